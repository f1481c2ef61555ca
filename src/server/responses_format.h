#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "base/json.h"
#include "server/output_format.h"
#include "server/responses_request.h"

namespace quern::server {

/// A response and its events, as OpenAI's clients put them together: reasoning, messages and calls are items of the output, one open at a time,
/// in the order in which the model wrote them.
class ResponsesFormat final : public OutputFormat {
 public:
  /// on_complete: given the response when it is completed or incomplete.
  ResponsesFormat(const ResponseHeader& header, const ResponsesRequest& request, std::function<void(const Json&)> on_complete);

  void begin(int32_t choice, std::string& out) override;
  void delta(int32_t choice, const OutputDelta& delta, const OutputUsage& usage, std::string& out) override;
  void finish(const OutputUsage& usage, std::string& out) override;
  Json response(std::span<const OutputDelta> choices, const OutputUsage& usage) override;
  void fail(const Error& error, std::string& out) override;

 private:
  enum class Kind : uint8_t { kNone, kReasoning, kMessage, kCall };

  void take(const OutputDelta& delta, std::string* out);
  void add_text(Kind kind, std::string_view text, std::string* out);
  void add_call(const ToolCallDelta& call, std::string* out);
  void open_item(Kind kind, Json item, std::string* out);
  /// status: "completed", or "incomplete" for what the length cut off.
  void close_item(std::string_view status, std::string* out);
  void set_end(const OutputUsage& usage);
  void write(std::string_view type, Json event, std::string& out);
  void write_lifecycle(std::string_view type, std::string& out);
  void write_delta(std::string_view type, std::string_view text, std::string_view more, std::string& out);

  Json response_;  // without output
  Json output_ = Json::array();
  std::string id_;
  std::function<void(const Json&)> on_complete_;
  Kind open_ = Kind::kNone;
  Json item_;         // the open one; its text is in text_
  std::string text_;  // or arguments
  bool cut_off_ = false;
  int64_t sequence_number_ = 0;
};

}  // namespace quern::server
