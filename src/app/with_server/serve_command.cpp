#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "app/app.h"
#include "app/build_info.h"
#include "app/commands.h"
#include "app/exit_code.h"
#include "app/exit_deadline.h"
#include "app/shutdown_signals.h"
#include "app/startup.h"
#include "app/with_server/model_text.h"
#include "app/with_server/network_options.h"
#include "app/with_server/open_files.h"
#include "app/with_server/service_notifier.h"
#include "app/with_server/stats_log.h"
#include "base/log.h"
#include "base/log_mark.h"
#include "server/server.h"

// `quern serve`: everything that can be refused is refused before a weight is read; then load, answer, and drain when asked to stop.

namespace quern::app {
namespace {

// After the engine has failed. A rank that waits for another gives up after ten seconds; with these the process has ended half a minute after a rank was lost.
constexpr std::chrono::seconds kTellFailure{3};  // so long clients, probes and scrapers are told
constexpr std::chrono::seconds kEndLatest{15};   // so long the end may take in all
constexpr std::chrono::seconds kMeetLatest{60};  // so long the processes that were started together may take to find each other

struct ServeOptions {
  ServeFaults faults;
  ModelOptions model;
  ModelTextOptions text;
  NetworkOptions network;
  std::vector<std::string> served_names;
  int64_t seed = -1;  // below 0: at random
  int32_t shutdown_timeout_seconds = 60;
  bool disable_log_stats = false, disable_page = false;
};

Setter to_names(std::vector<std::string>& target) {
  return [&target](std::string_view text) -> Result<void> {
    target.emplace_back(text);
    return {};
  };
}

/// The names under which clients know the model: as given, or the folder's name and the path.
std::vector<std::string> model_names(const ServeOptions& options, const worker::ExecutionPlan& plan) {
  if (!options.served_names.empty()) return options.served_names;
  std::vector<std::string> names = {plan.config.name};
  if (const std::string path = options.model.worker.model_dir.string(); path != names[0]) names.push_back(path);
  return names;
}

/// Of the engine, or of another process, which may be lost while nothing runs.
std::optional<Error> failure_of(const engine::Engine& engine, const worker::Processes* processes) {
  if (const std::optional<Error> failure = engine.failure()) return failure;
  return processes != nullptr ? processes->failure() : std::nullopt;
}

/// Of several processes: mpirun asks all for the end when one has died, and kills them a moment later. Then it is a failure, and whoever waits for an answer is told.
Result<void> look_for_lost_processes(const engine::Engine& engine, worker::Processes* processes) {
  if (processes == nullptr) return {};
  constexpr std::chrono::milliseconds kLook{100};
  processes->set_impatient(true);
  std::this_thread::sleep_for(kLook);
  processes->set_impatient(false);
  if (const std::optional<Error> failure = failure_of(engine, processes)) return failure->with_context("the engine failed");
  return {};
}

/// Until a signal asks for the end, or the engine breaks.
Result<void> serve_until_stopped(const engine::Engine& engine, const ServeOptions& options, ShutdownSignals& signals,
                                 ServiceNotifier& notifier, worker::Processes* processes) {
  StatsLog stats;
  while (!signals.wait_for(std::chrono::milliseconds(500))) {
    if (const std::optional<Error> failure = failure_of(engine, processes)) return failure->with_context("the engine failed");
    const engine::EngineStats now = engine.stats();  // comes back only while the engine lives
    notifier.well();
    if (!options.disable_log_stats) stats.update(now, StatsLog::Clock::now());
  }
  RETURN_IF_ERROR(look_for_lost_processes(engine, processes));
  log_info("stopping: no new requests; those that run have {} s to end, a second signal stops at once", options.shutdown_timeout_seconds);
  return {};
}

/// Requests and /health get the reason for a while, so that whoever probes sees more than a closed port.
void tell_failure(const Error& failure, ShutdownSignals& signals) {
  log_error("{}; requests and /health are answered with that for {} s, then this process ends", failure.message, kTellFailure.count());
  signals.wait_for(kTellFailure);
}

Result<void> serve(const ServeOptions& options, ShutdownSignals& signals, worker::Processes* processes) {
  log_info("quern {}", version_with_commit());
  ServiceNotifier notifier;
  ASSIGN_OR_RETURN(server::ServerOptions server_settings, server_options(options.network));
  ASSIGN_OR_RETURN(const worker::ExecutionPlan plan, plan_model(options.model, processes));
  RETURN_IF_ERROR(check_runnable(plan));
  ASSIGN_OR_RETURN(const ModelText text, load_model_text(plan, options.text));

  server_settings.api.version = version();
  server_settings.api.page = !options.disable_page;
  allow_connections(options.network.max_connections);
  std::optional<ExitDeadline> deadline;  // outlives all that may wait for a lost device
  // The engine is declared before the server and so outlives it.
  std::unique_ptr<engine::Engine> engine;
  ASSIGN_OR_RETURN(const std::unique_ptr<server::Server> server, server::Server::start(server_settings));
  auto reopening = signals.on_user_signal([&server] { server->reopen_files(); });
  log_info("listening on {}; requests are answered with 503 until the model is loaded", url_of(options.network, server->port()));
  notifier.loading("loading " + plan.config.name);

  ASSIGN_OR_RETURN(std::unique_ptr<worker::WorkerGroup> workers, start_planned(plan, nullptr, [&, told = 0](double share) mutable {
                     server->set_loading({.phase = "loading_weights", .fraction = share});
                     const int percent = static_cast<int>(share * 100);
                     if (percent != std::exchange(told, percent)) notifier.loading(fmt::format("loading {}: {} %", plan.config.name, percent));
                   }, processes));
  server->set_loading({.phase = "starting_engine"});
  if (options.faults.wrap_workers) workers = options.faults.wrap_workers(std::move(workers));
  engine = engine::Engine::start(std::move(workers), engine_options(options.model));
  server::ServerContext context;
  context.engine = engine.get();
  context.tokenizer = text.tokenizer ? &*text.tokenizer : nullptr;
  context.chat_template = text.chat_template ? &*text.chat_template : nullptr;
  context.model_names = model_names(options, plan);
  context.max_model_len = engine->limits().max_model_len;
  context.sampling_defaults = text.sampling_defaults;
  context.eos_ids = text.eos_ids;
  context.time_limits = time_limits(options.network);
  if (options.seed >= 0) context.seed = static_cast<uint64_t>(options.seed);
  const std::string name = context.model_names.front(), names = fmt::format("{}", fmt::join(context.model_names, ", also ")), url = url_of(options.network, server->port());
  // Whoever reads "ready" may ask, or send a signal, in the same moment.
  signals.listen();
  server->set_ready(std::move(context));
  log_info("ready: {} at {}/v1", names, url);
  if (!options.disable_page && url.find("://") != std::string::npos) log_info("a page to talk to it: {}/", url);
  notifier.ready(fmt::format("serving {} at {}", name, url));

  const Result<void> end = serve_until_stopped(*engine, options, signals, notifier, processes);
  if (!end) {
    deadline.emplace(kEndLatest);
    tell_failure(end.error(), signals);
  }
  reopening.reset();
  const auto timeout = std::chrono::seconds(end ? options.shutdown_timeout_seconds : 0);
  notifier.stopping(end ? "running requests may end" : end.error().message, timeout + std::chrono::seconds(30));
  server->drain_and_stop(timeout);
  engine->drain(0);  // what the server has not waited for has nobody left to read it
  if (end) log_info("stopped");
  return end;
}

/// In a process behind process 0, which serves: no HTTP, and signals to end are process 0's to act on.
Result<void> follow(const ServeOptions& options, ShutdownSignals& signals, worker::Processes& processes) {
  log_info("quern {}", version_with_commit());
  std::optional<ExitDeadline> deadline;  // outlives all that may wait for a lost device
  ASSIGN_OR_RETURN(const worker::ExecutionPlan plan, plan_model(options.model, &processes));
  RETURN_IF_ERROR(follow_planned(plan, processes,
                                 {.on_loaded =
                                      [&] {
                                        signals.listen();
                                        log_info("ready: steps come from process 0; it decides when this one ends, and a second signal ends it at once");
                                      },
                                  .on_failure = [&] { deadline.emplace(kEndLatest); }}));
  log_info("stopped");
  return {};
}

/// mpirun gives each of two processes a single core, if it is not told otherwise.
void warn_of_binding() {
  cpu_set_t mine;
  if (sched_getaffinity(0, sizeof mine, &mine) != 0) return;
  const int usable = CPU_COUNT(&mine), all = get_nprocs();
  if (usable < all) log_warning("this process may use {} of {} cores; if that is mpirun's doing, mpirun --bind-to none gives it all", usable, all);
}

/// One process, or what mpirun has started as several.
Result<void> serve_or_follow(const ServeOptions& options, ShutdownSignals& signals) {
  std::unique_ptr<worker::Processes> processes;
  {
    const ExitDeadline deadline(kMeetLatest, "the processes that mpirun has started have not met");
    ASSIGN_OR_RETURN(processes, worker::join_processes());
  }
  if (processes == nullptr) return serve(options, signals, nullptr);
  const int32_t rank = processes->rank();
  if (rank != 0) set_log_mark(fmt::format("process {}", rank));
  log_info("process {} of {}, pid {}, on {}", rank, processes->size(), getpid(), processes->host());
  warn_of_binding();
  RETURN_IF_ERROR(rank == 0 ? serve(options, signals, processes.get()) : follow(options, signals, *processes));
  const ExitDeadline deadline(kEndLatest, "other processes have not ended");
  processes->leave();
  return {};
}

OptionGroup server_group(ServeOptions& o) {
  return {"Server",
          {
              {"--served-model-name", "NAME", "Name of the model for clients, may be repeated (default: the folder's name)",
               to_names(o.served_names), true},
              {"--chat-template", "FILE", "Jinja template instead of the checkpoint's", to_path(o.text.chat_template)},
              {"--generation-config", "WHAT", "Default sampling: auto (the checkpoint's), vllm (neutral), or a folder or file",
               naming_a_path(to_text(o.text.generation_config))},
              {"--seed", "N", "Makes requests without a seed repeatable", to_integer(o.seed, 0, std::numeric_limits<int64_t>::max())},
              {"--shutdown-timeout", "SECONDS", "How long running requests may go on after SIGTERM (default 60)",
               to_integer(o.shutdown_timeout_seconds, 0, 86400)},
              {"--disable-page", "", "No chat page at /", to_flag(o.disable_page)},
              {"--disable-log-stats", "", "No line about throughput every ten seconds", to_flag(o.disable_log_stats)},
              {"--allow-synthetic-acceptance", "", "Serve nonsense at the speed that a synthetic_acceptance_length gives",
               to_flag(o.model.allow_synthetic_acceptance)},
          }};
}

}  // namespace

Command serve_command(ServeFaults faults) {
  auto options = std::make_shared<ServeOptions>();
  options->model.worker.collective.wrap = faults.wrap_collective;
  options->model.worker.wrap_stream = faults.wrap_stream;
  options->faults = std::move(faults);
  Command command{.name = "serve", .summary = "Serve a model over an OpenAI-compatible HTTP API"};
  command.description =
      "Everything that can be refused is refused before a weight is read. Then the server listens and answers 503 until the model is loaded; "
      "/ready says how far that is. / is a page to chat in a browser.\n\n"
      "SIGTERM or SIGINT: no new requests; those that run may end within the timeout. A second signal stops at once.\n\n"
      "Started by mpirun, each process has one stage of the pipeline (docs/scaling.md). Process 0 serves.\n\n"
      "When a device is lost, every request ends with an error that says so, /health answers 503 with it, and the process ends with exit code 1.";
  command.groups.push_back(server_group(*options));
  for (OptionGroup& group : network_groups(options->network)) command.groups.push_back(std::move(group));
  add_model_options(command, options->model);
  command.run = [options]() -> int {
    ShutdownSignals signals;
    if (Result<void> done = serve_or_follow(*options, signals); !done) {
      print_error(done.error());
      return kFailure;
    }
    return kSuccess;
  };
  return command;
}

}  // namespace quern::app
