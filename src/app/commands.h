#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "app/option.h"
#include "worker/options.h"
#include "worker/worker_group.h"

// The commands of quern, one file each.

namespace quern::app {

/// For tests of what becomes of a server whose workers or ranks fail.
struct ServeFaults {
  std::function<std::unique_ptr<worker::WorkerGroup>(std::unique_ptr<worker::WorkerGroup>)> wrap_workers;  // what stands between the engine and the workers
  decltype(worker::WorkerOptions{}.wrap_stream) wrap_stream;                                                   // what stands between a rank and its device's queue
  decltype(worker::WorkerOptions{}.collective.wrap) wrap_collective;                                       // what stands between a rank and its messages
};

Command plan_command();
Command kernels_command();
Command devices_command();
Command eval_command();
Command quantize_command();
Command bench_latency_command();
Command bench_throughput_command();
Command bench_serve_command();
Command doctor_command();
Command completion_command();
Command man_command();
/// Talks to a server; loading a MODEL itself needs text/ and server/.
Command chat_command();
/// Needs text/ and server/ (QUERN_SERVER); in a build without them, a command of the same name that says so.
Command serve_command(ServeFaults faults = {});

/// All of them, in the order in which help lists them.
std::vector<Command> all_commands();

}  // namespace quern::app
