#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace quern::server {

/// W3C Trace Context, level 1: where a request stands in a distributed trace.
struct TraceContext {
  std::string trace_id;  // 32 lower-case hexadecimal digits
  std::string span_id;   // 16; of the sender when parsed, ours when it is sent on
  std::string flags;     // 2; "01": the trace is recorded

  /// Empty for what the standard calls invalid; then a trace does not go on.
  static std::optional<TraceContext> parse(std::string_view traceparent);
  /// The same trace with a new span below that of the sender.
  [[nodiscard]] TraceContext child() const;
  /// "00-trace_id-span_id-flags"
  [[nodiscard]] std::string traceparent() const;
};

}  // namespace quern::server
