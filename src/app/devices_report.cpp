#include "app/devices_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "app/format.h"

namespace quern::app {
namespace {

using worker::DeviceGroup;
using worker::DevicePair;
using worker::MeasuredDevice;

const GraphicsCard* card_of(const MeasuredDevice& device, const std::vector<GraphicsCard>& cards) {
  const auto card = std::find_if(cards.begin(), cards.end(), [&](const GraphicsCard& c) { return c.address == device.pci_address; });
  return device.pci_address.empty() || card == cards.end() ? nullptr : &*card;
}

double bandwidth(const ops::TransportTrial::Time& time) { return static_cast<double>(time.bytes) / time.seconds; }

/// "10.2 KB", "41.0 MB": powers of 1000, as bandwidths are.
std::string message_size(size_t bytes) {
  return bytes < 1'000'000 ? fmt::format("{:.1f} KB", static_cast<double>(bytes) / 1e3) : fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6);
}

std::string device_line(const MeasuredDevice& device, const std::vector<GraphicsCard>& cards) {
  std::string text = fmt::format("{:<10}", device.name);
  if (device.product.empty()) return text + device.error + "\n";
  text += fmt::format("{}, {}", device.product, format_bytes(device.memory_bytes));
  if (const GraphicsCard* card = card_of(device, cards)) {
    text += fmt::format(", {}", describe(card->link));
    if (card->link != card->fastest_link && card->fastest_link.known()) text += fmt::format(" of {}", describe(card->fastest_link));
    if (card->numa_node >= 0) text += fmt::format(", NUMA node {}", card->numa_node);
  }
  if (!device.pci_address.empty()) text += fmt::format(", at {}", device.pci_address);
  text += "\n";
  if (!device.error.empty()) return text + fmt::format("{:<10}{}\n", "", device.error);
  const bool is_host = device.platform == "cpu";
  return text + fmt::format("{:<10}{} {:.1f} GB/s, {} {:.1f} GB/s\n", "", is_host ? "copies in memory" : "copies to it", device.bytes_to_device / 1e9, is_host ? "and back" : "from it", device.bytes_to_host / 1e9);
}

std::string group_as_text(const DeviceGroup& group, const worker::DevicesReport& report) {
  const auto name = [&](size_t place) { return report.devices[place].name; };
  std::vector<std::string> names;
  for (const size_t place : group.devices) names.push_back(name(place));
  std::string text = fmt::format("\nbetween {}\n", fmt::join(names, ", "));
  if (!group.error.empty()) return text + fmt::format("  {}\n", group.error);
  for (const DevicePair& pair : group.pairs)
    text += fmt::format("  {:<22}{}\n", fmt::format("{} - {}", name(pair.a), name(pair.b)),
                        !pair.refusal.empty()   ? fmt::format("no peer access: {}", pair.refusal)
                        : !pair.failure.empty() ? fmt::format("peer access is claimed and does not work: {}", pair.failure)
                                                : fmt::format("peer access, tested; {:.1f} us for a decode row", pair.seconds * 1e6));
  std::string heading = fmt::format("  {:<12}", "transport");
  for (const ops::TransportTrial& trial : group.transports)
    if (!trial.times.empty()) {
      for (const auto& time : trial.times) heading += fmt::format("{:>24}", message_size(time.bytes));
      break;
    }
  text += heading + "\n";
  for (const ops::TransportTrial& trial : group.transports) {
    text += fmt::format("  {:<12}", trial.transport);
    for (const auto& time : trial.times) text += fmt::format("{:>24}", fmt::format("{:.1f} us, {:.2f} GB/s", time.seconds * 1e6, bandwidth(time) / 1e9));
    text += fmt::format("{}\n", !trial.refusal.empty() ? trial.refusal : trial.transport == group.chosen ? "  chosen" : "");
  }
  return text + fmt::format("  {}\n", group.chosen.empty() ? "no transport works: these devices cannot share a model" : fmt::format("-tp and -pp use {}; --collective names another", group.chosen));
}

}  // namespace

std::string devices_as_text(const worker::DevicesReport& report, const std::vector<GraphicsCard>& cards) {
  std::string text;
  for (const MeasuredDevice& device : report.devices) text += device_line(device, cards);
  for (const DeviceGroup& group : report.groups) text += group_as_text(group, report);
  const auto opened = std::count_if(report.devices.begin(), report.devices.end(), [](const MeasuredDevice& d) { return !d.product.empty(); });
  if (report.groups.empty() && opened > 0) {
    const bool on_cpu = std::all_of(report.devices.begin(), report.devices.end(), [](const MeasuredDevice& d) { return d.platform == "cpu"; });
    text += on_cpu        ? "\none device: nothing passes between ranks; --device cpu:0,cpu:1 measures two of them on the CPU, and `quern doctor` says why a card is not listed\n"
            : opened == 1 ? "\none device: nothing passes between ranks, and -tp and -pp need another\n"
                          : "\nno two devices of one kind: ranks of one model compute alike\n";
  }
  text.pop_back();
  return text;
}

Json devices_as_json(const worker::DevicesReport& report, const std::vector<GraphicsCard>& cards) {
  Json devices = Json::array(), groups = Json::array();
  for (const MeasuredDevice& device : report.devices) {
    Json entry{{"name", device.name},
               {"product", device.product},
               {"platform", device.platform},
               {"memory_bytes", device.memory_bytes},
               {"pci_address", device.pci_address},
               {"bytes_to_device_per_second", device.bytes_to_device},
               {"bytes_to_host_per_second", device.bytes_to_host},
               {"error", device.error}};
    if (const GraphicsCard* card = card_of(device, cards)) {
      const auto link = [](const PcieLink& l) { return Json{{"gigatransfers_per_second", l.gigatransfers}, {"width", l.width}, {"bytes_per_second", l.bytes_per_second()}}; };
      entry["numa_node"] = card->numa_node;
      entry["link"] = link(card->link);
      entry["fastest_link"] = link(card->fastest_link);
    }
    devices.push_back(std::move(entry));
  }
  for (const DeviceGroup& group : report.groups) {
    Json names = Json::array(), pairs = Json::array(), transports = Json::array();
    for (const size_t place : group.devices) names.push_back(report.devices[place].name);
    for (const DevicePair& pair : group.pairs)
      pairs.push_back({{"devices", {report.devices[pair.a].name, report.devices[pair.b].name}},
                       {"claimed", pair.refusal.empty()},
                       {"works", pair.refusal.empty() && pair.failure.empty()},
                       {"reason", pair.refusal.empty() ? pair.failure : pair.refusal},
                       {"row_seconds", pair.seconds}});
    for (const ops::TransportTrial& trial : group.transports) {
      Json times = Json::array();
      for (const auto& time : trial.times) times.push_back({{"bytes", time.bytes}, {"seconds", time.seconds}, {"bytes_per_second", bandwidth(time)}});
      transports.push_back({{"name", trial.transport}, {"works", trial.refusal.empty()}, {"reason", trial.refusal}, {"times", times}});
    }
    groups.push_back({{"platform", group.platform}, {"devices", names}, {"pairs", pairs}, {"transports", transports}, {"chosen", group.chosen}, {"error", group.error}});
  }
  return {{"devices", devices}, {"groups", groups}};
}

}  // namespace quern::app
