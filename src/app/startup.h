#pragma once

#include <memory>

#include "app/model_options.h"
#include "base/result.h"
#include "worker/plan.h"
#include "worker/start.h"

// From options to running workers, with what a person wants to read on the way.

namespace quern::app {

/// Says in one sentence what is wrong with a model directory before anything is planned: it does not exist, is a file, has no config.json.
Result<void> check_model_dir(const std::filesystem::path& model_dir);

/// Logs the options without effect, checks the directory and plans, together with the others where there are several processes. Opens no device and reads no weight.
Result<worker::ExecutionPlan> plan_model(ModelOptions options, worker::Processes* processes = nullptr);

/// Why this plan cannot run, if so: the refusals of its ops, or the memory that is missing.
Result<void> check_runnable(const worker::ExecutionPlan& plan);

/// Logs the plan in a few lines and starts the workers, with progress on a terminal and to `on_progress`, where given. Steps add to
/// `ranges`, where given.
Result<std::unique_ptr<worker::WorkerGroup>> start_planned(const worker::ExecutionPlan& plan, worker::ActivationRanges* ranges = nullptr,
                                                           const worker::LoadProgress& on_progress = {}, worker::Processes* processes = nullptr);

/// Logs this process's part of the plan and executes the steps of process 0, in one of the processes behind it.
Result<void> follow_planned(const worker::ExecutionPlan& plan, worker::Processes& processes, const worker::FollowerEvents& events);

}  // namespace quern::app
