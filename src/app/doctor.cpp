#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gnu/libc-version.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "app/app.h"
#include "app/build_info.h"
#include "app/commands.h"
#include "app/doctor.h"
#include "app/doctor_findings.h"
#include "app/exit_code.h"
#include "app/format.h"
#include "app/hardware_report.h"
#include "app/machine.h"
#include "app/model_options.h"
#include "base/file.h"
#include "worker/start.h"

// `quern doctor`: what a bug report should contain.

namespace quern::app {
namespace {

std::string text_of(const std::filesystem::path& path) {
  auto text = read_file(path);
  return text ? std::move(*text) : std::string();
}

/// Packages register a driver with a file of its name.
std::vector<std::string> registered_drivers() {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/etc/OpenCL/vendors", error)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

DriverFacts look_at_drivers() {
  DriverFacts facts;
  facts.cards = find_graphics_cards("/sys");
  std::vector<uint32_t> groups(static_cast<size_t>(std::max(getgroups(0, nullptr), 0)));
  groups.resize(static_cast<size_t>(std::max(getgroups(static_cast<int>(groups.size()), groups.data()), 0)));
  groups.push_back(getegid());
  for (const GraphicsCard& card : facts.cards)
    if (!card.render_node.empty()) facts.nodes.push_back(check_node("/dev", card.render_node, geteuid(), groups));
  if (auto devices = worker::opencl_devices()) facts.opencl_devices = std::move(*devices);
  else facts.why_no_opencl = devices.error().message;
  return facts;
}

Json as_json(const DriverFacts& facts) {
  Json cards = Json::array(), devices = Json::array();
  const auto link = [](const PcieLink& l) { return Json{{"gigatransfers_per_second", l.gigatransfers}, {"width", l.width}, {"bytes_per_second", l.bytes_per_second()}}; };
  for (const GraphicsCard& card : facts.cards)
    cards.push_back({{"address", card.address},
                     {"name", card.name},
                     {"id", fmt::format("{:04x}:{:04x}", card.vendor, card.device)},
                     {"kernel_driver", card.kernel_driver},
                     {"link", link(card.link)},
                     {"fastest_link", link(card.fastest_link)},
                     {"window_bytes", card.window_bytes},
                     {"numa_node", card.numa_node},
                     {"render_node", card.render_node}});
  for (const worker::OpenClDevice& device : facts.opencl_devices)
    devices.push_back({{"platform", device.platform},
                       {"platform_version", device.platform_version},
                       {"name", device.name},
                       {"driver_version", device.driver_version},
                       {"pci_address", device.pci_address},
                       {"memory_bytes", device.memory_bytes},
                       {"largest_allocation_bytes", device.largest_allocation_bytes},
                       {"why_not_usable", device.why_not_usable}});
  utsname kernel{};
  uname(&kernel);
  return {{"kernel", kernel.release},
          {"nvidia_driver", nvidia_driver_version(text_of("/proc/driver/nvidia/version"))},
          {"graphics_cards", cards},
          {"opencl", {{"registered_drivers", registered_drivers()}, {"why_none", facts.why_no_opencl}, {"devices", devices}}},
          {"findings", findings(facts)}};
}

}  // namespace

std::vector<std::string> machine_findings() { return findings(look_at_drivers()); }

Json examine_machine() {
  const Machine machine = inspect_machine();
  const BuildInfo build = build_info();
  const std::vector<std::string> devices = worker::describe_devices();  // opens drivers, which shows in the libraries below
  const Json drivers = as_json(look_at_drivers());
  Json memory{{"total_bytes", machine.memory_bytes}, {"available_bytes", machine.available_bytes}};
  if (machine.memory_limit_bytes > 0) memory["limit_bytes"] = machine.memory_limit_bytes;
  return {{"version", build.version},
          {"commit", build.commit},
          {"build",
           {{"compiler", build.compiler},
            {"type", build.build_type},
            {"server", build.server},
            {"cuda", build.cuda},
            {"opencl", build.opencl}}},
          {"system", {{"name", machine.system}, {"libc", gnu_get_libc_version()}, {"kernel", drivers["kernel"]}}},
          {"cpu", {{"name", machine.cpu}, {"cores", machine.num_cores}, {"features", machine.cpu_features}}},
          {"memory", memory},
          {"devices", devices},
          {"graphics_cards", drivers["graphics_cards"]},
          {"opencl", drivers["opencl"]},
          {"nvidia_driver", drivers["nvidia_driver"]},
          {"findings", drivers["findings"]},
          {"libraries", opened_libraries()}};
}

namespace {

std::string cards_as_text(const Json& found) {
  std::string text;
  for (const Json& card : found["graphics_cards"]) {
    const auto link = [&](const char* which) { return describe(PcieLink{card[which]["gigatransfers_per_second"].get<double>(), card[which]["width"].get<int>()}); };
    const std::string driver = card["kernel_driver"].get<std::string>();
    text += fmt::format("card       {}  {}, kernel driver {}, {}{}{}\n", card["address"].get<std::string>(), card["name"].get<std::string>(), driver.empty() ? "none" : driver, link("link"),
                        card["link"] == card["fastest_link"] ? "" : fmt::format(" of {}", link("fastest_link")),
                        card["window_bytes"] == 0 ? "" : fmt::format(", window {}", format_bytes(card["window_bytes"].get<uint64_t>())));
  }
  if (const std::string driver = found["nvidia_driver"].get<std::string>(); !driver.empty()) text += fmt::format("nvidia     driver {}\n", driver);
  for (const Json& name : found["opencl"]["registered_drivers"]) text += fmt::format("opencl     registered: {}\n", name.get<std::string>());
  return text;
}

std::string as_text(const Json& found) {
  const auto words = [](const Json& list) { return fmt::format("{}", fmt::join(list.get<std::vector<std::string>>(), " ")); };
  const Json& build = found["build"];
  std::string text = fmt::format("quern      {} ({})\n", found["version"].get<std::string>(), found["commit"].get<std::string>());
  text += fmt::format("build      {}, {}, server {}, CUDA {}, OpenCL {}\n", build["compiler"].get<std::string>(),
                      build["type"].get<std::string>(), build["server"].get<bool>() ? "on" : "off", build["cuda"].get<std::string>(),
                      build["opencl"].get<std::string>());
  text += fmt::format("system     {}, glibc {}, Linux {}\n", found["system"]["name"].get<std::string>(), found["system"]["libc"].get<std::string>(),
                      found["system"]["kernel"].get<std::string>());
  text += fmt::format("cpu        {}, {} cores\n", found["cpu"]["name"].get<std::string>(), found["cpu"]["cores"].get<int>());
  text += fmt::format("features   {}\n", words(found["cpu"]["features"]));
  text += fmt::format("memory     {}, {} available\n", format_bytes(found["memory"]["total_bytes"].get<uint64_t>()),
                      format_bytes(found["memory"]["available_bytes"].get<uint64_t>()));
  if (found["memory"].contains("limit_bytes"))
    text += fmt::format("           limited to {}\n", format_bytes(found["memory"]["limit_bytes"].get<uint64_t>()));
  for (const Json& device : found["devices"]) text += fmt::format("device     {}\n", device.get<std::string>());
  text += cards_as_text(found);
  for (const Json& library : found["libraries"]) text += fmt::format("library    {}\n", library.get<std::string>());
  if (found["findings"].empty()) text += "findings   nothing is known to be wrong here\n";
  for (const Json& finding : found["findings"]) text += fmt::format("finding    {}\n", finding.get<std::string>());
  text.pop_back();
  return text;
}

}  // namespace

namespace {

struct DoctorOptions {
  bool json = false;
  std::filesystem::path report;
  HardwareReportOptions hardware;
};

/// A repeatable name.
Setter to_names(std::vector<std::string>& names) {
  return [&names](std::string_view text) -> Result<void> {
    names.emplace_back(text);
    return {};
  };
}

int run_doctor(const DoctorOptions& options) {
  if (options.report.empty()) {
    const Json found = examine_machine();
    fmt::print("{}\n", options.json ? found.dump(2) : as_text(found));
    return kSuccess;
  }
  const auto report = hardware_report(options.hardware);
  const Result<void> written = !report ? report.error() : write_file(options.report, report->dump(2) + "\n");
  if (!written) {
    print_error(written.error());
    return kFailure;
  }
  for (const Json& line : (*report)["summary"]) fmt::print("{}\n", line.get<std::string>());
  fmt::print("\n{} holds this and the details: no names of host, user or files. Please look through it and attach it to an issue.\n", options.report.string());
  return kSuccess;
}

}  // namespace

Command doctor_command() {
  auto options = std::make_shared<DoctorOptions>();
  Command command{.name = "doctor", .summary = "This machine, its devices and this build, for bug reports"};
  command.groups.push_back({"Output",
                            {{"--json", "", "Print JSON", to_flag(options->json)},
                             {"--hardware-report", "FILE", "Measure the cards, which takes a minute or two each, and write what was found to FILE, to be sent to us", to_path(options->report)}}});
  command.groups.push_back({"Hardware report",
                            {{"--device", "NAME", "Measure this device; may be repeated (default: all cards that can be used, or the CPU where there is none)", to_names(options->hardware.devices), true},
                             {"--model", "DIR", "Decode with this model, too", to_path(options->hardware.model_dir)},
                             {"--demo-model", "DIR", "The demo model (default: where a checkout or an installation has it)", to_path(options->hardware.demo_dir)},
                             {"--threads", "N", "CPU threads (default: one per core)", to_integer(options->hardware.num_threads, 1, 4096)},
                             {"--quick", "", "Small weights and buffers: whether all of it works, in seconds", to_flag(options->hardware.quick)},
                             log_level_option()}});
  command.run = [options] { return run_doctor(*options); };
  return command;
}

}  // namespace quern::app
