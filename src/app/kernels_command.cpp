#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "app/app.h"
#include "app/commands.h"
#include "app/exit_code.h"
#include "app/startup.h"
#include "base/json.h"

namespace quern::app {
namespace {

struct KernelsOptions {
  ModelOptions model;
  bool json = false;
};

std::string as_text(const std::vector<worker::KernelRow>& rows) {
  std::string text = fmt::format("{:<10}{:<16}{:<28}{:<10}{}", "platform", "op", "candidate", "accepted", "reason");
  for (const worker::KernelRow& row : rows)
    text += fmt::format("\n{:<10}{:<16}{:<28}{:<10}{}", row.platform, row.op, row.candidate, row.accepted ? "yes" : "no", row.reason);
  return text;
}

Json as_json(const std::vector<worker::KernelRow>& rows) {
  Json array = Json::array();
  for (const worker::KernelRow& row : rows)
    array.push_back(
        {{"platform", row.platform}, {"op", row.op}, {"candidate", row.candidate}, {"accepted", row.accepted}, {"reason", row.reason}});
  return array;
}

/// The devices whose matrix is shown: the one asked for, or one of every platform.
std::vector<std::string> devices_to_show(const KernelsOptions& options) {
  if (!options.model.worker.device.empty()) return {options.model.worker.device};
  return {"cpu", "b60", "h200"};
}

int run_kernels(const KernelsOptions& options) {
  std::vector<worker::KernelRow> rows;
  for (const std::string& device : devices_to_show(options)) {
    ModelOptions model = options.model;
    model.worker.device = device;
    Result<worker::ExecutionPlan> plan = model.worker.model_dir.empty() ? worker::plan_reference_model(device) : plan_model(model);
    if (!plan) {
      print_error(plan.error());
      return kFailure;
    }
    const std::vector<worker::KernelRow> of_device = worker::kernel_matrix(*plan);
    rows.insert(rows.end(), of_device.begin(), of_device.end());
  }
  fmt::print("{}\n", options.json ? as_json(rows).dump(2) : as_text(rows));
  return kSuccess;
}

}  // namespace

Command kernels_command() {
  auto options = std::make_shared<KernelsOptions>();
  options->model.worker.device.clear();  // all platforms
  Command command{.name = "kernels",
                  .summary = "Every kernel of every op, with the reason where it refuses (without MODEL: Qwen3.6-27B in block FP8)"};
  command.groups.push_back({"Output", {{"--json", "", "Print JSON", to_flag(options->json)}}});
  add_model_options(command, options->model);
  command.positionals.back().required = false;
  command.run = [options] { return run_kernels(*options); };
  return command;
}

}  // namespace quern::app
