#include "weights/quantized_config.h"

#include <utility>

#include "ops/linear.h"

namespace quern::weights {
namespace {

Json float8(std::string_view strategy, bool dynamic) {
  return Json{{"num_bits", 8}, {"type", "float"}, {"strategy", strategy}, {"dynamic", dynamic}, {"symmetric", true}};
}

Json compressed_tensors(Json weights, Json input_activations, std::span<const std::string> kept, bool fp8_kv) {
  Json group{{"targets", {"Linear"}},
             {"format", "float-quantized"},
             {"weights", std::move(weights)},
             {"input_activations", std::move(input_activations)},
             {"output_activations", nullptr}};
  return Json{{"quant_method", "compressed-tensors"},
              {"format", "float-quantized"},
              {"quantization_status", "compressed"},
              {"config_groups", {{"group_0", std::move(group)}}},
              {"ignore", kept},
              {"kv_cache_scheme", fp8_kv ? float8("tensor", /*dynamic=*/false) : Json(nullptr)}};
}

}  // namespace

Json quantization_config(QuantizeScheme scheme, std::span<const std::string> kept, bool fp8_kv) {
  switch (scheme) {
    case QuantizeScheme::kBlockFp8:
      return Json{{"quant_method", "fp8"},
                  {"fmt", "e4m3"},
                  {"activation_scheme", "dynamic"},
                  {"weight_block_size", {ops::kScaleBlock, ops::kScaleBlock}},
                  {"modules_to_not_convert", kept}};
    case QuantizeScheme::kStaticFp8:
      return compressed_tensors(float8("tensor", /*dynamic=*/false), float8("tensor", /*dynamic=*/false), kept, fp8_kv);
    case QuantizeScheme::kChannelFp8:
      return compressed_tensors(float8("channel", /*dynamic=*/false), float8("token", /*dynamic=*/true), kept, fp8_kv);
  }
  CHECK_UNREACHABLE();
}

}  // namespace quern::weights
