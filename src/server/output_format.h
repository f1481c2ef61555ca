#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"
#include "server/generation_fields.h"
#include "server/http_message.h"
#include "server/output.h"
#include "text/tokenizer.h"

namespace quern::server {

/// What every object of one answer says about itself, and what the client wants to see.
struct ResponseHeader {
  std::string id;
  int64_t created = 0;  // seconds since 1970
  std::string model;
  bool logprobs = false;
  int32_t num_top_logprobs = 0;
  bool prompt_logprobs = false;
  int32_t num_prompt_logprobs = 0;
  bool tokens_as_ids = false;
  bool token_ids = false;  // as asked, and always when there is no tokenizer to make text
  bool include_usage = false;
  bool continuous_usage = false;
};

/// A prompt as the answer shows it.
struct EchoedPrompt {
  std::vector<int32_t> ids;
  std::string text;
};

/// Writes outputs in one of OpenAI's dialects, as events of a stream or as one object. Belongs to one answer.
class OutputFormat {
 public:
  virtual ~OutputFormat() = default;

  /// A choice's first event.
  virtual void begin(int32_t choice, std::string& out) = 0;
  /// Its news; an event for each kind of text in it, one if it has none but token ids. `usage`: so far.
  virtual void delta(int32_t choice, const OutputDelta& delta, const OutputUsage& usage, std::string& out) = 0;
  /// The stream's last events. `usage`: of all choices together.
  virtual void finish(const OutputUsage& usage, std::string& out) = 0;

  /// The one object of an answer that is not streamed.
  virtual Json response(std::span<const OutputDelta> choices, const OutputUsage& usage) = 0;

  /// The answer has failed: the stream's last events, or the one response.
  virtual void fail(const Error& error, std::string& out);
  virtual HttpResponse failure(const Error& error);
};

/// {"prompt_tokens", "completion_tokens", "total_tokens", details}
Json usage_json(const OutputUsage& usage);
/// {"id", "object", "created", "model"}
Json response_head(const ResponseHeader& header, std::string_view object);
/// Adds finish_reason and stop_reason to a choice.
void append_end(const OutputDelta& output, Json& choice);
/// An event with an error, after which only [DONE] follows.
void append_error_event(const Error& error, std::string& out);
void append_done_event(std::string& out);

}  // namespace quern::server
