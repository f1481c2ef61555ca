#pragma once

#include <span>
#include <string>

#include "base/json.h"
#include "weights/quantize.h"

namespace quern::weights {

/// What config.json says of a checkpoint in this scheme (model-spec.md 2.3, 2.4). `kept`: modules that are not quantized, as stored.
Json quantization_config(QuantizeScheme scheme, std::span<const std::string> kept, bool fp8_kv);

}  // namespace quern::weights
