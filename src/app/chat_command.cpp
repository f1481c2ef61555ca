#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <thread>

#include "app/app.h"
#include "app/chat_session.h"
#include "app/chat_terminal.h"
#include "app/commands.h"
#include "app/exit_code.h"
#include "app/json_members.h"
#include "app/line_editor.h"
#include "app/local_server.h"
#include "app/progress.h"
#include "app/served_model.h"
#include "base/log.h"

// `quern chat`: a conversation in the terminal, with a server that runs or with a MODEL that it loads itself. What comes through a pipe is
// one question.

namespace quern::app {
namespace {

struct ChatOptions {
  ModelOptions model;
  std::string base_url, model_name, api_key, system_prompt, quick;
  ChatParameters parameters;
  bool no_history = false;
};

Setter to_parameter(ChatParameters& parameters, std::string name) {
  return [&parameters, name = std::move(name)](std::string_view text) -> Result<void> { return parameters.set(name, text); };
}

/// As OpenAI clients are given it, "http://host:8000/v1", or without the last part.
std::string without_v1(std::string url) {
  while (url.ends_with('/')) url.pop_back();
  if (url.ends_with("/v1")) url.resize(url.size() - 3);
  return url;
}

/// Waits while a server loads its model, showing how far it is. A server that knows no /ready is taken as it is.
Result<void> wait_until_ready(const HttpAddress& address) {
  std::unique_ptr<Progress> progress;
  for (;;) {
    ASSIGN_OR_RETURN(const HttpReply reply, http_call(address, {.path = "/ready"}));
    const Result<Json> state = parse_json(reply.body, "/ready");
    if (reply.status != 503 || !state || text_of(*state, "status") != "loading") break;
    if (progress == nullptr) progress = std::make_unique<Progress>("the server loads its model", 0);
    progress->update(text_of(*state, "phase") == "loading_weights" ? number_of(*state, "fraction").value_or(0) : 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(250));
  }
  if (progress != nullptr) progress->finish(false);
  return {};
}

std::string read_stdin() {
  std::string text;
  char buffer[65536];
  for (size_t got = 0; (got = std::fread(buffer, 1, sizeof buffer, stdin)) > 0;) text.append(buffer, got);
  return text;
}

Result<void> chat(ChatOptions& options) {
  const bool loads = !options.model.worker.model_dir.empty();
  if (loads && !options.base_url.empty())
    return invalid_argument("MODEL and --base-url contradict each other: load a model, or talk to a server");
  const bool interactive = options.quick.empty() && isatty(STDIN_FILENO) != 0 && isatty(STDOUT_FILENO) != 0;
  std::string question = options.quick;
  if (question.empty() && !interactive) question = read_stdin();
  if (!interactive && question.find_first_not_of(" \t\r\n") == std::string::npos)
    return invalid_argument("nothing was asked: stdin is empty");

  std::unique_ptr<LocalServer> local;
  if (loads) {
    ASSIGN_OR_RETURN(local, start_local_server(options.model));
  }
  const std::string url = loads ? local->url() : options.base_url.empty() ? "http://127.0.0.1:8000" : without_v1(options.base_url);
  Result<HttpAddress> address = HttpAddress::parse(url);
  if (!address) return std::move(address).error();
  if (Result<void> ready = wait_until_ready(*address); !ready)
    return ready.error().with_context(fmt::format("{} (`quern serve MODEL` starts a server, `quern chat MODEL` needs none)", url));

  std::string key = options.api_key;
  if (const char* variable = std::getenv("OPENAI_API_KEY"); key.empty() && variable != nullptr) key = variable;
  if (loads) key = local->api_key();
  ChatSession::Server server{.address = *address, .headers = {}, .model = options.model_name};
  if (key.find_first_of("\r\n") != std::string::npos) return invalid_argument("the API key has a line break in it");
  if (!key.empty()) server.headers.push_back(fmt::format("Authorization: Bearer {}", key));
  if (server.model.empty()) {
    ASSIGN_OR_RETURN(server.model, served_model(*address, server.headers, "--model-name"));
  }

  ChatSession session(std::move(server));
  session.set_system_prompt(options.system_prompt);
  session.parameters() = options.parameters;
  if (!interactive) return ask_once(session, question);
  return run_chat_terminal(session, {.history_file = options.no_history ? std::filesystem::path() : default_history_file()});
}

OptionGroup chat_group(ChatOptions& o) {
  return {"Chat",
          {
              {"--url,--base-url", "URL", "The server (default http://127.0.0.1:8000); http+unix:PATH is a socket file; without MODEL",
               to_text(o.base_url)},
              {"--model-name", "NAME", "Served name (default: the first of /v1/models)", to_text(o.model_name)},
              {"--api-key", "KEY", "Default: the environment variable OPENAI_API_KEY", to_text(o.api_key)},
              {"--system-prompt", "TEXT", "What the model is told first", to_text(o.system_prompt)},
              {"--quick", "TEXT", "Ask this, print the answer and end", to_text(o.quick)},
              {"--no-history", "", "Do not keep what is entered for the next time", to_flag(o.no_history)},
          }};
}

OptionGroup sampling_group(ChatOptions& o) {
  Setter thinking = to_parameter(o.parameters, "thinking");
  thinking.words = {"on", "off"};
  return {"Sampling",
          {
              {"--temperature", "T", "0: always the most likely token (default: the model's, as for all of these)",
               to_parameter(o.parameters, "temperature")},
              {"--top-p", "P", "Of the most likely tokens, those that make up this share", to_parameter(o.parameters, "top_p")},
              {"--top-k", "K", "Of the K most likely tokens", to_parameter(o.parameters, "top_k")},
              {"--max-tokens", "N", "Most tokens of an answer", to_parameter(o.parameters, "max_tokens")},
              {"--seed", "N", "The same seed gives the same answer", to_parameter(o.parameters, "seed")},
              {"--thinking", "on|off", "Whether the model thinks first", thinking},
          }};
}

}  // namespace

Command chat_command() {
  auto options = std::make_shared<ChatOptions>();
  Command command{.name = "chat", .summary = "Talk with a model in the terminal: with a server that runs, or with MODEL"};
  command.description =
      "Enter sends; Alt-Enter, Ctrl-J or a backslash before Enter begins a line. Ctrl-C stops the answer, Ctrl-D leaves. /help lists the "
      "commands: "
      "/new, /retry, /system, /params, /save, /quit.\n\n"
      "What comes through a pipe is one question, and standard output gets the answer alone.\n\n"
      "What was entered is kept in $XDG_STATE_HOME/quern/chat_history, or in ~/.local/state, for the next time.";
  command.groups = {chat_group(*options), sampling_group(*options)};
  add_model_options(command, options->model);
  command.positionals.back().required = false;
  command.run = [options]() -> int {
    if (log_level() == LogLevel::kInfo) set_log_level(LogLevel::kWarning);  // a log would stand between the lines
    if (Result<void> done = chat(*options); !done) {
      print_error(done.error());
      return kFailure;
    }
    return kSuccess;
  };
  return command;
}

}  // namespace quern::app
