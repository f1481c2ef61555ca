#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "app/http_client.h"
#include "base/json.h"
#include "base/result.h"

// A conversation with an OpenAI-compatible server, for a terminal.

namespace quern::app {

/// What a request may be told; empty: left to the model.
class ChatParameters {
 public:
  /// temperature, top_p, top_k, min_p, max_tokens, seed, presence_penalty, frequency_penalty, thinking. `value` "default" takes it back.
  Result<void> set(std::string_view name, std::string_view value);
  /// Name and value of all of them, in order; "default" where nothing was set.
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> list() const;
  void add_to(Json& request) const;

 private:
  std::map<std::string, Json, std::less<>> values_;
};

/// How one answer went.
struct AnswerFigures {
  int64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0;
  double ttft = 0, decode_seconds = 0;  // to the first token with text; from there to the last
  std::string finish_reason;
  bool interrupted = false;
};

/// "42 tokens, 38.1 tok/s, first token after 0.12 s, prompt 512 tokens, 448 cached".
std::string figures_text(const AnswerFigures& figures);

class ChatSession {
 public:
  struct Server {
    HttpAddress address;
    std::vector<std::string> headers;  // "Name: value"
    std::string model;
  };
  struct Listener {
    std::function<void(std::string_view)> on_reasoning, on_content;
    std::function<bool()> interrupted;  // asked often; true ends the answer
  };
  explicit ChatSession(Server server) : server_(std::move(server)) {}

  /// Sends the conversation with one more message of the user; the answer is told piece by piece and added to the conversation, also what
  /// there is of one that was interrupted. After an error the conversation is as before.
  Result<AnswerFigures> ask(const std::string& text, const Listener& listener);
  /// Takes back the last question with its answer. The question, or nothing when there is none.
  std::optional<std::string> take_back();
  void clear() { messages_.clear(); }
  [[nodiscard]] bool empty() const { return messages_.empty(); }

  ChatParameters& parameters() { return parameters_; }
  [[nodiscard]] const std::string& system_prompt() const { return system_prompt_; }
  void set_system_prompt(std::string text) { system_prompt_ = std::move(text); }
  [[nodiscard]] const std::string& model() const { return server_.model; }

  /// {"model", "messages", parameters}: what a request would say.
  [[nodiscard]] Json request() const;
  /// The conversation for a reader.
  [[nodiscard]] std::string markdown() const;

 private:
  Server server_;
  ChatParameters parameters_;
  std::string system_prompt_;
  std::vector<Json> messages_;
};

}  // namespace quern::app
