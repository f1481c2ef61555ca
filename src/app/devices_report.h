#pragma once

#include <string>
#include <vector>

#include "app/graphics_cards.h"
#include "base/json.h"
#include "worker/devices.h"

namespace quern::app {

/// What `quern devices` says, from what was measured and what the kernel's files say of the cards.
Json devices_as_json(const worker::DevicesReport& report, const std::vector<GraphicsCard>& cards);
std::string devices_as_text(const worker::DevicesReport& report, const std::vector<GraphicsCard>& cards);

}  // namespace quern::app
