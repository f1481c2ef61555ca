// Many streams of a model that takes no time: what is measured is what the server adds. Engine and server are one process, the clients
// another, on the same machine; every token's way is timed, from the engine's hand to the client's.
//
//   stream_bench MODEL [--streams 1000] [--tokens 300] [--beat-ms 100] [--per-second 250]
//
// MODEL: a folder with tokenizer and chat template; models/quern-demo will do.

#include <fmt/format.h>
#include <sys/resource.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/log.h"
#include "metronome_engine.h"
#include "server/process_stats.h"
#include "server/server.h"
#include "stream_client.h"

namespace quern::tools {
namespace {

struct Options {
  std::string model;
  StreamLoad load;
  double beat_ms = 100;
};

Result<Options> read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (!name.starts_with("--")) {
      options.model = name;
      continue;
    }
    if (i + 1 == argc) return invalid_argument("{} needs a value", name);
    const double value = std::strtod(argv[++i], nullptr);
    if (value <= 0) return invalid_argument("{} {}: a number above 0 is needed", name, argv[i]);
    if (name == "--streams") options.load.num_streams = static_cast<int32_t>(value);
    else if (name == "--tokens") options.load.num_tokens = static_cast<int32_t>(value);
    else if (name == "--per-second") options.load.streams_per_second = value;
    else if (name == "--beat-ms") options.beat_ms = value;
    else return invalid_argument("{} is not an option", name);
  }
  if (options.model.empty()) return invalid_argument("usage: stream_bench MODEL [--streams N] [--tokens N] [--beat-ms MS] [--per-second N]");
  return options;
}

void print_quantiles(const char* what, std::vector<double> values) {
  if (values.empty()) {
    fmt::print("{:<34} none\n", what);
    return;
  }
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) { return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))]; };
  fmt::print("{:<34} p50 {:7.2f} ms   p90 {:7.2f} ms   p99 {:7.2f} ms   max {:7.2f} ms   ({} of them)\n", what, at(0.5), at(0.9), at(0.99),
             values.back(), values.size());
}

/// The clients' process: waits for the port, reads the streams, prints what it saw.
int run_clients(Options options, const TokenTimes& times, int port_pipe) {
  uint16_t port = 0;
  if (::read(port_pipe, &port, sizeof port) != sizeof port) return 1;
  options.load.port = port;
  const Result<StreamLatencies> seen = read_streams(options.load, times);
  if (!seen) {
    fmt::print(stderr, "stream_bench: {}\n", seen.error().message);
    return 1;
  }
  print_quantiles("first token, since the request", seen->first_token_ms);
  print_quantiles("a token's way", seen->token_ms);
  print_quantiles("a token's way, all streams open", seen->steady_token_ms);
  fmt::print("{:<34} {} of {}\n", "complete streams", seen->num_complete, options.load.num_streams);
  std::fflush(stdout);
  return seen->num_complete == options.load.num_streams ? 0 : 1;
}

Result<int> run_server(const Options& options, const TokenTimes& times, int port_pipe, pid_t clients) {
  ASSIGN_OR_RETURN(const text::Tokenizer tokenizer, text::Tokenizer::load(options.model));
  ASSIGN_OR_RETURN(const text::ChatTemplate chat_template, text::ChatTemplate::load(options.model, std::nullopt));
  MetronomeEngine engine(times, std::chrono::microseconds(static_cast<int64_t>(options.beat_ms * 1000)), 1 << 20);
  server::ServerOptions server_options;
  server_options.http.port = 0;
  server_options.http.max_connections = options.load.num_streams + 16;
  ASSIGN_OR_RETURN(const auto server, server::Server::start(server_options));
  server::ServerContext context;
  context.engine = &engine;
  context.tokenizer = &tokenizer;
  context.chat_template = &chat_template;
  context.model_names = {"metronome"};
  context.max_model_len = 1 << 20;
  server->set_ready(std::move(context));
  const uint16_t port = server->port();
  if (::write(port_pipe, &port, sizeof port) != sizeof port) return make_error(ErrorCode::kInternal, "cannot tell the port");

  std::vector<uint64_t> resident;  // every half second
  int status = 0;
  const int64_t begin = TokenTimes::now();
  while (::waitpid(clients, &status, WNOHANG) == 0) {
    resident.push_back(server::process_stats().resident_bytes);
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  }
  const double seconds = static_cast<double>(TokenTimes::now() - begin) * 1e-6;
  const auto mib = [](uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  const size_t n = resident.size();
  const auto opened = static_cast<size_t>(std::min<double>(static_cast<double>(n) - 1, 2 * options.load.num_streams / options.load.streams_per_second + 2));
  fmt::print("{:<34} at the start {:.1f} MiB, all streams open {:.1f} MiB, half of the rest {:.1f} MiB, end {:.1f} MiB\n", "server's memory",
             mib(resident[0]), mib(resident[opened]), mib(resident[(opened + n - 1) / 2]), mib(resident[n - 1]));
  double load = 0;
  ::getloadavg(&load, 1);
  fmt::print("{:<34} {:.1f} s of CPU in {:.1f} s; load average of the machine {:.1f}\n", "server's time", server::process_stats().cpu_seconds, seconds, load);
  server->drain_and_stop(std::chrono::seconds(5));
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int run(int argc, char** argv) {
  const Result<Options> options = read_options(argc, argv);
  if (!options) {
    fmt::print(stderr, "stream_bench: {}\n", options.error().message);
    return 2;
  }
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  const TokenTimes times(options->load.num_streams, options->load.num_tokens);
  int pipe[2];
  if (!times.valid() || ::pipe(pipe) != 0) {
    fmt::print(stderr, "stream_bench: no memory for the times of {} x {} tokens\n", options->load.num_streams, options->load.num_tokens);
    return 1;
  }
  fmt::print("{} streams of {} tokens, a token each every {:g} ms, {:g} new streams a second\n", options->load.num_streams, options->load.num_tokens,
             options->beat_ms, options->load.streams_per_second);
  std::fflush(stdout);
  const pid_t clients = ::fork();  // before any thread
  if (clients == 0) ::_exit(run_clients(*options, times, pipe[0]));
  const Result<int> code = run_server(*options, times, pipe[1], clients);
  if (code) return *code;
  fmt::print(stderr, "stream_bench: {}\n", code.error().message);
  ::kill(clients, SIGKILL);
  return 1;
}

}  // namespace
}  // namespace quern::tools

int main(int argc, char** argv) { return quern::tools::run(argc, argv); }
