#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gnu/libc-version.h>

#include <cstdio>
#include <memory>

#include "app/build_info.h"
#include "app/commands.h"
#include "app/exit_code.h"
#include "app/format.h"
#include "app/machine.h"
#include "base/json.h"
#include "worker/start.h"

// `quern doctor`: what a bug report should contain.

namespace quern::app {
namespace {

Json examine() {
  const Machine machine = inspect_machine();
  const BuildInfo build = build_info();
  const std::vector<std::string> devices = worker::describe_devices();  // opens drivers, which shows in the libraries below
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
          {"system", {{"name", machine.system}, {"libc", gnu_get_libc_version()}}},
          {"cpu", {{"name", machine.cpu}, {"cores", machine.num_cores}, {"features", machine.cpu_features}}},
          {"memory", memory},
          {"devices", devices},
          {"libraries", opened_libraries()}};
}

std::string as_text(const Json& found) {
  const auto words = [](const Json& list) { return fmt::format("{}", fmt::join(list.get<std::vector<std::string>>(), " ")); };
  const Json& build = found["build"];
  std::string text = fmt::format("quern      {} ({})\n", found["version"].get<std::string>(), found["commit"].get<std::string>());
  text += fmt::format("build      {}, {}, server {}, CUDA {}, OpenCL {}\n", build["compiler"].get<std::string>(),
                      build["type"].get<std::string>(), build["server"].get<bool>() ? "on" : "off", build["cuda"].get<std::string>(),
                      build["opencl"].get<std::string>());
  text += fmt::format("system     {}, glibc {}\n", found["system"]["name"].get<std::string>(), found["system"]["libc"].get<std::string>());
  text += fmt::format("cpu        {}, {} cores\n", found["cpu"]["name"].get<std::string>(), found["cpu"]["cores"].get<int>());
  text += fmt::format("features   {}\n", words(found["cpu"]["features"]));
  text += fmt::format("memory     {}, {} available\n", format_bytes(found["memory"]["total_bytes"].get<uint64_t>()),
                      format_bytes(found["memory"]["available_bytes"].get<uint64_t>()));
  if (found["memory"].contains("limit_bytes"))
    text += fmt::format("           limited to {}\n", format_bytes(found["memory"]["limit_bytes"].get<uint64_t>()));
  for (const Json& device : found["devices"]) text += fmt::format("device     {}\n", device.get<std::string>());
  for (const Json& library : found["libraries"]) text += fmt::format("library    {}\n", library.get<std::string>());
  text.pop_back();
  return text;
}

}  // namespace

Command doctor_command() {
  auto json = std::make_shared<bool>(false);
  Command command{.name = "doctor", .summary = "This machine, its devices and this build, for bug reports"};
  command.groups.push_back({"Output", {{"--json", "", "Print JSON", to_flag(*json)}}});
  command.run = [json]() -> int {
    const Json found = examine();
    fmt::print("{}\n", *json ? found.dump(2) : as_text(found));
    return kSuccess;
  };
  return command;
}

}  // namespace quern::app
