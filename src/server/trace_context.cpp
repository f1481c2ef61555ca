#include "server/trace_context.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "base/hash.h"

namespace quern::server {
namespace {

bool is_hex(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}
bool is_zero(std::string_view text) { return text.find_first_not_of('0') == std::string_view::npos; }

}  // namespace

std::optional<TraceContext> TraceContext::parse(std::string_view text) {
  // 2 version - 32 trace id - 16 parent id - 2 flags; later versions may go on behind another dash.
  constexpr size_t kSize = 55;
  if (text.size() < kSize || text[2] != '-' || text[35] != '-' || text[52] != '-') return std::nullopt;
  const std::string_view version = text.substr(0, 2), trace = text.substr(3, 32), parent = text.substr(36, 16), flags = text.substr(53, 2);
  if (!is_hex(version) || version == "ff" || !is_hex(trace) || is_zero(trace) || !is_hex(parent) || is_zero(parent) || !is_hex(flags)) {
    return std::nullopt;
  }
  if (version == "00" ? text.size() != kSize : (text.size() > kSize && text[kSize] != '-')) return std::nullopt;
  return TraceContext{std::string(trace), std::string(parent), std::string(flags)};
}

TraceContext TraceContext::child() const {
  thread_local SplitMix64 generator = [] {
    std::random_device device;
    return SplitMix64((uint64_t{device()} << 32) | device());
  }();
  uint64_t span = 0;
  while (span == 0) span = generator.next();
  return {trace_id, fmt::format("{:016x}", span), flags};
}

std::string TraceContext::traceparent() const { return fmt::format("00-{}-{}-{}", trace_id, span_id, flags); }

}  // namespace quern::server
