#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "app/app.h"
#include "app/commands.h"
#include "app/doctor.h"
#include "app/exit_code.h"
#include "app/plan_report.h"
#include "app/speed_report.h"
#include "app/startup.h"

namespace quern::app {
namespace {

struct PlanOptions {
  ModelOptions model;
  int32_t cards = 0;  // 0: the layout that -tp and -pp say
  bool json = false;
};

/// Every way to lay the model out over all of the cards.
int compare_layouts(const PlanOptions& options) {
  std::vector<Layout> layouts;
  for (int32_t tp_size = 1; tp_size <= options.cards; ++tp_size) {
    if (options.cards % tp_size != 0) continue;
    ModelOptions model = options.model;
    model.worker.tp_size = tp_size;
    model.worker.pp_size = options.cards / tp_size;
    Layout& layout = layouts.emplace_back();
    if (auto plan = plan_model(model)) {
      layout.plan = std::move(*plan);
      layout.speed = worker::card_speed(layout.plan);
    } else if (plan.error().code == ErrorCode::kInvalidArgument || plan.error().code == ErrorCode::kUnsupported) {  // the model cannot be shared out so
      layout.plan.options = model.worker;
      layout.plan.verdict = plan.error().message;
    } else {
      print_error(plan.error());
      return kFailure;
    }
  }
  fmt::print("{}\n", options.json ? layouts_as_json(layouts).dump(2) : layouts_as_text(layouts));
  return std::any_of(layouts.begin(), layouts.end(), [](const Layout& layout) { return layout.plan.fits; }) ? kSuccess : kDoesNotFit;
}

int run_plan(const PlanOptions& options) {
  if (options.cards > 0) return compare_layouts(options);
  Result<worker::ExecutionPlan> plan = plan_model(options.model);
  if (!plan) {
    print_error(plan.error());
    return kFailure;
  }
  if (options.model.worker.device.starts_with("opencl"))  // of this machine
    for (std::string& finding : machine_findings()) plan->notes.push_back(std::move(finding));
  fmt::print("{}\n", options.json ? plan_as_json(*plan).dump(2) : plan_as_text(*plan));
  return plan->fits ? kSuccess : kDoesNotFit;
}

}  // namespace

Command plan_command() {
  auto options = std::make_shared<PlanOptions>();
  Command command{.name = "plan",
                  .summary = "Say what fits and how fast it should be, before anything loads; exits 3 when it does not fit"};
  command.groups.push_back({"Output",
                            {{"--json", "", "Print JSON", to_flag(options->json)},
                             {"--cards", "N", "Compare all layouts of -tp and -pp over N cards of the kind that --device names, the fastest first", to_integer(options->cards, 1, 64)}}});
  add_model_options(command, options->model);
  command.run = [options] { return run_plan(*options); };
  return command;
}

}  // namespace quern::app
