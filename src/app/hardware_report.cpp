#include "app/hardware_report.h"

#include <fmt/format.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <ctime>

#include "app/bench_engine.h"
#include "app/devices_report.h"
#include "app/doctor.h"
#include "app/format.h"
#include "app/graphics_cards.h"
#include "app/model_options.h"
#include "app/random_prompts.h"
#include "base/log.h"
#include "worker/devices.h"
#include "worker/hardware_probe.h"
#include "worker/start.h"

namespace quern::app {
namespace {

namespace fs = std::filesystem;

constexpr int kFormat = 1;  // of the file

/// Cards that can be used, from what describe_devices() says: "cuda:0  NVIDIA ...".
std::vector<std::string> usable_cards() {
  std::vector<std::string> names;
  for (const std::string& line : worker::describe_devices()) {
    const std::string name = line.substr(0, line.find(' '));
    if (name.find(':') != std::string::npos && line.find("(not usable") == std::string::npos) names.push_back(name);
  }
  if (names.empty()) names.emplace_back("cpu");
  return names;
}

/// models/quern-demo of a checkout that the program was built in, or of an installation.
fs::path find_demo_model() {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error).parent_path();
  for (const fs::path& folder : {program / "../models/quern-demo", program / "../share/quern/models/quern-demo", fs::path("models/quern-demo")})
    if (fs::exists(folder / "config.json", error)) return folder;
  return {};
}

Json as_json(const worker::HardwareProbe& probe) {
  Json measurements = Json::object(), faults = Json::array();
  for (const worker::Measurement& m : probe.measurements)
    measurements[m.name] = m.measured ? Json{{"value", m.value}, {"unit", m.unit}, {"remark", m.remark}} : Json{{"not_measured", m.remark}};
  for (const auto& fault : probe.op_faults) faults.push_back({{"op", fault.op}, {"candidate", fault.candidate}, {"reason", fault.reason}});
  return {{"device", probe.device}, {"name", probe.name}, {"op_tests", {{"candidates", probe.num_op_tests}, {"seconds", probe.op_test_seconds}, {"faults", faults}}}, {"measurements", measurements}};
}

/// One sequence: a prompt, then tokens one by one, with whatever the model's defaults are, drafts included.
Result<Json> decode_bench(const HardwareReportOptions& options, const std::string& device, const fs::path& model_dir) {
  ModelOptions model;
  model.worker.model_dir = model_dir;
  model.worker.device = device;
  model.worker.num_threads = options.num_threads;
  model.prefix_cache.enabled = false;
  const int32_t prompt = options.quick ? 16 : 128, output = options.quick ? 4 : 128;
  ASSIGN_OR_RETURN(const BenchEngine bench, start_bench_engine(model, 1, prompt + output, true));
  const std::vector<BenchRequest> request{{random_prompt(1, prompt, bench.engine->limits().vocab_size), output, 1}};
  if (!options.quick) RETURN_IF_ERROR(run_requests(*bench.engine, request));
  BenchTimes times;
  // On a machine that is busy with other things all tokens may be read at once, which says nothing of the speed.
  constexpr int kMostRuns = 10;
  for (int i = 0; i < kMostRuns && !times.decode_rate(); ++i) {
    ASSIGN_OR_RETURN(const BenchRun run, run_requests(*bench.engine, request));
    times = run.times[0];
  }
  const std::optional<double> rate = times.decode_rate();
  if (!rate) return make_error(ErrorCode::kUnavailable, "in each of {} runs all {} tokens were there at once", kMostRuns, output);
  return Json{{"model", model_dir.filename().string()},
              {"input_tokens", prompt},
              {"output_tokens", output},
              {"first_token_seconds", times.first_token},
              {"decode_tokens_per_second", *rate},
              {"expected_decode_tokens_per_second", bench.plan.expected_decode_tokens_per_second},
              {"counters", bench_counters(bench.engine->stats())}};
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  return fmt::format("{:04}-{:02}-{:02}", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday);
}

Json examine_device(const HardwareReportOptions& options, const std::string& device) {
  log_info("measuring {}", device);
  Json entry{{"device", device}};
  if (auto probe = worker::probe_hardware(device, {.num_threads = options.num_threads, .quick = options.quick})) entry = as_json(*probe);
  else entry["error"] = probe.error().message;
  const fs::path demo = options.demo_dir.empty() ? find_demo_model() : options.demo_dir;
  Json benches = Json::array();
  for (const fs::path& model_dir : {demo, options.model_dir}) {
    if (model_dir.empty()) continue;
    log_info("decoding with {} on {}", model_dir.filename().string(), device);
    if (auto bench = decode_bench(options, device, model_dir)) benches.push_back(std::move(*bench));
    else benches.push_back({{"model", model_dir.filename().string()}, {"error", bench.error().message}});
  }
  entry["benches"] = benches;
  if (demo.empty()) entry["no_demo_bench"] = "the demo model is not beside this program";
  return entry;
}

/// What passes between the devices of each platform, tried with every transport.
Json measure_exchange(const std::vector<std::string>& devices) {
  if (devices.size() < 2) return {{"not_measured", "one device: nothing passes between ranks"}};
  log_info("trying what passes between {} devices", devices.size());
  return devices_as_json(worker::measure_devices(devices, {}), find_graphics_cards("/sys"));
}

void summarize_exchange(const Json& exchange, std::vector<std::string>& lines) {
  if (exchange.contains("not_measured")) {
    lines.push_back("exchange: not measured: " + exchange["not_measured"].get<std::string>());
    return;
  }
  for (const Json& group : exchange["groups"]) {
    const std::string who = fmt::format("exchange on {}", group["platform"].get<std::string>());
    if (const std::string error = group["error"].get<std::string>(); !error.empty()) lines.push_back(fmt::format("{}: {}", who, error));
    for (const Json& pair : group["pairs"])
      lines.push_back(fmt::format("{}: {} - {}: peer access {}{}", who, pair["devices"][0].get<std::string>(), pair["devices"][1].get<std::string>(), pair["works"].get<bool>() ? "works" : "does not work: ",
                                  pair["reason"].get<std::string>()));
    for (const Json& transport : group["transports"]) {
      std::string line = fmt::format("{}: {}", who, transport["name"].get<std::string>());
      if (!transport["works"].get<bool>()) line += " does not work: " + transport["reason"].get<std::string>();
      for (const Json& time : transport["times"]) line += fmt::format(", {:.1f} us for {:.0f} KB", time["seconds"].get<double>() * 1e6, time["bytes"].get<double>() / 1e3);
      lines.push_back(std::move(line));
    }
    lines.push_back(fmt::format("{}: chosen is {}", who, group["chosen"].get<std::string>()));
  }
}

std::string in_units(const Json& measurement) {
  const double value = measurement["value"].get<double>();
  const std::string unit = measurement["unit"].get<std::string>();
  if (unit == "bytes/s") return fmt::format("{:.1f} GB/s", value / 1e9);
  if (unit == "s") return fmt::format("{:.2f} us", value * 1e6);
  return fmt::format("{:.2f} {}", value, unit);
}

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-'; }

/// Whole words alone: a user "ai" is no reason to change "chain".
std::string without_word(std::string text, const std::string& word, std::string_view instead) {
  if (word.size() < 2) return text;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at)) {
    const bool begins = at == 0 || !is_word(text[at - 1]), ends = at + word.size() == text.size() || !is_word(text[at + word.size()]);
    if (begins && ends) text.replace(at, word.size(), instead);
    at += begins && ends ? instead.size() : word.size();
  }
  return text;
}

}  // namespace

Result<Json> hardware_report(const HardwareReportOptions& options) {
  for (const fs::path& folder : {options.model_dir, options.demo_dir})
    if (!folder.empty() && !fs::exists(folder / "config.json")) return make_error(ErrorCode::kNotFound, "{} has no config.json; is it the folder of a checkpoint?", folder.string());
  Json report{{"summary", Json::array()}, {"hardware_report", kFormat}, {"date", today()}, {"quick", options.quick}, {"machine", examine_machine()}};
  Json libraries = Json::array();
  for (const Json& library : report["machine"]["libraries"]) libraries.push_back(fs::path(library.get<std::string>()).filename().string());
  report["machine"]["libraries"] = libraries;
  report["devices"] = Json::array();
  const std::vector<std::string> devices = options.devices.empty() ? usable_cards() : options.devices;
  for (const std::string& device : devices) report["devices"].push_back(examine_device(options, device));
  report["exchange"] = measure_exchange(devices);
  report["summary"] = report_summary(report);
  return without_private(report, private_words());
}

std::vector<std::string> report_summary(const Json& report) {
  std::vector<std::string> lines;
  const Json& machine = report["machine"];
  lines.push_back(fmt::format("quern {} ({}), {}, Linux {}, {}", machine["version"].get<std::string>(), machine["commit"].get<std::string>(), machine["system"]["name"].get<std::string>(),
                              machine["system"]["kernel"].get<std::string>(), machine["cpu"]["name"].get<std::string>()));
  for (const Json& finding : machine["findings"]) lines.push_back("finding: " + finding.get<std::string>());
  for (const Json& device : report["devices"]) {
    const std::string who = device["device"].get<std::string>();
    if (device.contains("error")) {
      lines.push_back(fmt::format("{}: {}", who, device["error"].get<std::string>()));
    } else {
      const Json& tests = device["op_tests"];
      lines.push_back(fmt::format("{}: {}; {} kernels tested against plain, {} faults", who, device["name"].get<std::string>(), tests["candidates"].get<int>(), tests["faults"].size()));
      for (const Json& fault : tests["faults"])
        lines.push_back(fmt::format("{}: {} {} is wrong: {}", who, fault["op"].get<std::string>(), fault["candidate"].get<std::string>(), fault["reason"].get<std::string>()));
      for (const auto& [name, m] : device["measurements"].items())
        lines.push_back(m.contains("not_measured") ? fmt::format("{}: {:<30} not measured: {}", who, name, m["not_measured"].get<std::string>())
                                                   : fmt::format("{}: {:<30} {:>14}  {}", who, name, in_units(m), m["remark"].get<std::string>()));
    }
    for (const Json& bench : device["benches"]) {
      const std::string model = bench["model"].get<std::string>();
      lines.push_back(bench.contains("error") ? fmt::format("{}: {}: {}", who, model, bench["error"].get<std::string>())
                                              : fmt::format("{}: {}: {:.2f} tok/s decode, first token after {:.3f} s", who, model, bench["decode_tokens_per_second"].get<double>(),
                                                            bench["first_token_seconds"].get<double>()));
    }
  }
  summarize_exchange(report["exchange"], lines);
  return lines;
}

PrivateWords private_words() {
  PrivateWords words;
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) == 0) words.host = host.data();
  passwd entry{}, *found = nullptr;
  std::array<char, 4096> text{};
  if (getpwuid_r(geteuid(), &entry, text.data(), text.size(), &found) == 0 && found != nullptr) {
    words.user = found->pw_name;
    words.home = found->pw_dir;
  }
  if (words.user == "root") words.user.clear();  // everybody's
  if (words.home == "/" ) words.home.clear();
  return words;
}

std::string without_private(std::string_view text, const PrivateWords& words) {
  std::string result(text);
  if (!words.home.empty())
    for (size_t at = result.find(words.home); at != std::string::npos; at = result.find(words.home, at)) {
      // Up to the end of what is named below it.
      const size_t end = result.find_first_of(" \t\n'\",;:()", at + words.home.size());
      result.replace(at, (end == std::string::npos ? result.size() : end) - at, "<path>");
    }
  constexpr std::array<std::string_view, 6> kOpen = {"/dev/", "/sys/", "/proc/", "/etc/OpenCL/", "/usr/lib/", "/lib/"};
  for (size_t at = 0; at < result.size(); ++at) {
    const bool begins = result[at] == '/' && (at == 0 || std::string_view(" \t\n'\"(=:,").find(result[at - 1]) != std::string_view::npos);
    if (!begins || at + 1 == result.size() || !is_word(result[at + 1])) continue;
    const size_t end = std::min(result.find_first_of(" \t\n'\",;:()", at), result.size());
    const std::string_view path = std::string_view(result).substr(at, end - at);
    if (std::any_of(kOpen.begin(), kOpen.end(), [&](std::string_view open) { return path.starts_with(open); })) {
      at = end;
      continue;
    }
    result.replace(at, end - at, "<path>");
    at += std::string_view("<path>").size() - 1;
  }
  result = without_word(std::move(result), words.host, "<host>");
  return without_word(std::move(result), words.user, "<user>");
}

Json without_private(const Json& value, const PrivateWords& words) {
  if (value.is_string()) return without_private(std::string_view(value.get_ref<const std::string&>()), words);
  if (value.is_array()) {
    Json list = Json::array();
    for (const Json& element : value) list.push_back(without_private(element, words));
    return list;
  }
  if (value.is_object()) {
    Json object = Json::object();
    for (const auto& [key, element] : value.items()) object[key] = without_private(element, words);
    return object;
  }
  return value;
}

}  // namespace quern::app
