#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "server/generation.h"
#include "server/constraints.h"
#include "server/generation_fields.h"
#include "server/http_message.h"
#include "server/metrics.h"
#include "server/response_store.h"
#include "server/sampling_defaults.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace quern::server {

/// What the API speaks for. Pointers are borrowed and have to outlive the server.
struct ServerContext {
  engine::Engine* engine = nullptr;
  const text::Tokenizer* tokenizer = nullptr;         // null: only token-id prompts, answered in token ids
  const text::ChatTemplate* chat_template = nullptr;  // null: no chat
  std::vector<std::string> model_names;               // at least one; answers carry the first
  int32_t max_model_len = 0;                          // tokens of prompt and output
  SamplingDefaults sampling_defaults;
  std::vector<int32_t> eos_ids;
  TimeLimits time_limits;
  std::optional<uint64_t> seed;  // requests without a seed get theirs from this and their order; else at random
};

/// A ServerContext at work; shared by the handlers and by the answers that outlive them.
struct Service {
  explicit Service(ServerContext c);

  /// Tokens of prompt and output that a request can have.
  [[nodiscard]] int32_t window() const;
  [[nodiscard]] RequestLimits limits() const;
  [[nodiscard]] bool knows_model(const std::string& name) const;
  /// The given seed, or the next one.
  uint64_t seed_for(const std::optional<uint64_t>& given);

  ServerContext context;
  int64_t created;  // seconds since 1970
  Metrics metrics;
  ResponseStore responses;
  Constraints constraints;

 private:
  std::atomic<uint64_t> seed_state_;
};

using ServicePtr = std::shared_ptr<Service>;

HttpAnswer chat_completions(const ServicePtr& service, const HttpRequest& request);
HttpAnswer completions(const ServicePtr& service, const HttpRequest& request);
HttpAnswer list_models(const ServicePtr& service, const HttpRequest& request);
HttpAnswer get_model(const ServicePtr& service, const HttpRequest& request);
HttpAnswer tokenize(const ServicePtr& service, const HttpRequest& request);
HttpAnswer detokenize(const ServicePtr& service, const HttpRequest& request);
HttpAnswer render_chat_completion(const ServicePtr& service, const HttpRequest& request);
HttpAnswer render_completion(const ServicePtr& service, const HttpRequest& request);
HttpAnswer create_response(const ServicePtr& service, const HttpRequest& request);
HttpAnswer count_response_tokens(const ServicePtr& service, const HttpRequest& request);
HttpAnswer get_response(const ServicePtr& service, const HttpRequest& request);
HttpAnswer delete_response(const ServicePtr& service, const HttpRequest& request);
HttpAnswer list_input_items(const ServicePtr& service, const HttpRequest& request);
HttpAnswer create_message(const ServicePtr& service, const HttpRequest& request);
HttpAnswer count_message_tokens(const ServicePtr& service, const HttpRequest& request);

// The members that their readers look at.
void describe_chat(FieldLog& log);
void describe_completion(FieldLog& log);
void describe_response(FieldLog& log);
void describe_message(FieldLog& log);
void describe_token_count(FieldLog& log);
void describe_tokenize(FieldLog& log);
void describe_detokenize(FieldLog& log);

Error unknown_model_error(const Service& service, std::string_view name);
/// "model_not_found", as a 404.
HttpResponse unknown_model(const Service& service, std::string_view name);

}  // namespace quern::server
