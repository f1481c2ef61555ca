#pragma once

#include <string>
#include <string_view>

#include "base/json.h"
#include "server/output_format.h"

namespace quern::server {

/// A message of Anthropic's and its events: thinking, text and uses of tools are blocks of its content, one open at a time, in the order in which
/// the model wrote them. A thinking block's signature is a checksum of its text; nobody has to send it back.
class AnthropicFormat final : public OutputFormat {
 public:
  AnthropicFormat(ResponseHeader header, int32_t prompt_tokens) : header_(std::move(header)), prompt_tokens_(prompt_tokens) {}

  void begin(int32_t choice, std::string& out) override;
  void delta(int32_t choice, const OutputDelta& delta, const OutputUsage& usage, std::string& out) override;
  void finish(const OutputUsage& usage, std::string& out) override;
  Json response(std::span<const OutputDelta> choices, const OutputUsage& usage) override;
  void fail(const Error& error, std::string& out) override;
  HttpResponse failure(const Error& error) override;

 private:
  enum class Kind : uint8_t { kNone, kThinking, kText, kToolUse };

  void take(const OutputDelta& delta, std::string* out);
  void add_text(Kind kind, std::string_view text, std::string* out);
  void add_call(const ToolCallDelta& call, std::string* out);
  void open_block(Kind kind, Json block, std::string* out);
  void close_block(std::string* out);
  void write_delta(std::string_view type, std::string_view member, std::string_view text, std::string& out) const;
  [[nodiscard]] Json message(Json content) const;

  ResponseHeader header_;
  int32_t prompt_tokens_;
  Json content_ = Json::array();
  Kind open_ = Kind::kNone;
  Json block_;        // the open one; its text is in text_
  std::string text_;  // or the input's JSON
  OutputEnd end_;
};

}  // namespace quern::server
