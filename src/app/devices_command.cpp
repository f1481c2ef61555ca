#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "app/commands.h"
#include "app/devices_report.h"
#include "app/exit_code.h"
#include "app/model_options.h"

namespace quern::app {
namespace {

struct DevicesOptions {
  std::vector<std::string> devices;
  std::string transport;
  bool json = false;
};

Setter to_device_names(std::vector<std::string>& names) {
  return [&names](std::string_view text) -> Result<void> {
    names.clear();
    for (const std::string_view name : split_at_commas(text)) {
      if (name.empty()) return invalid_argument("'{}' has a device without a name", text);
      names.emplace_back(name);
    }
    return {};
  };
}

}  // namespace

Command devices_command() {
  auto options = std::make_shared<DevicesOptions>();
  Command command{.name = "devices", .summary = "Devices of this machine, their links, and what can pass between them and how fast"};
  command.groups.push_back({"Devices",
                            {{"--device", "A,B,...", "These; without it all NVIDIA cards, or all Intel cards, or the CPU", to_device_names(options->devices)},
                             {"--collective", "NAME", "Only this way for ranks to exchange messages: direct, staged or nccl", to_text(options->transport)}}});
  command.groups.push_back({"Output", {{"--json", "", "Print JSON", to_flag(options->json)}, log_level_option()}});
  command.run = [options]() -> int {
    const worker::DevicesReport report = worker::measure_devices(options->devices.empty() ? worker::default_devices() : options->devices, options->transport);
    const std::vector<GraphicsCard> cards = find_graphics_cards("/sys");
    fmt::print("{}\n", options->json ? devices_as_json(report, cards).dump(2) : devices_as_text(report, cards));
    const bool failed = std::any_of(report.devices.begin(), report.devices.end(), [](const worker::MeasuredDevice& d) { return !d.error.empty(); }) ||
                        std::any_of(report.groups.begin(), report.groups.end(), [](const worker::DeviceGroup& g) { return g.chosen.empty(); });
    return failed ? kFailure : kSuccess;
  };
  return command;
}

}  // namespace quern::app
