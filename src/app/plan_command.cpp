#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "app/app.h"
#include "app/commands.h"
#include "app/exit_code.h"
#include "app/plan_report.h"
#include "app/startup.h"

namespace quern::app {
namespace {

struct PlanOptions {
  ModelOptions model;
  bool json = false;
};

int run_plan(const PlanOptions& options) {
  Result<worker::ExecutionPlan> plan = plan_model(options.model);
  if (!plan) {
    print_error(plan.error());
    return kFailure;
  }
  fmt::print("{}\n", options.json ? plan_as_json(*plan).dump(2) : plan_as_text(*plan));
  return plan->fits ? kSuccess : kDoesNotFit;
}

}  // namespace

Command plan_command() {
  auto options = std::make_shared<PlanOptions>();
  Command command{.name = "plan",
                  .summary = "Say what fits and how fast it should be, before anything loads; exits 3 when it does not fit"};
  command.groups.push_back({"Output", {{"--json", "", "Print JSON", to_flag(options->json)}}});
  add_model_options(command, options->model);
  command.run = [options] { return run_plan(*options); };
  return command;
}

}  // namespace quern::app
