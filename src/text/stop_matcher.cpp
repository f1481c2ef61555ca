#include "text/stop_matcher.h"

#include <algorithm>

namespace quern::text {

Result<StopMatcher> StopMatcher::create(std::vector<std::string> texts, StopOptions options) {
  std::vector<Stop> stops;
  for (std::string& text : texts) {
    if (text.empty()) return Error{ErrorCode::kInvalidArgument, "a stop string must not be empty", "stop"};
    std::vector<size_t> failure(text.size(), 0);
    for (size_t i = 1, border = 0; i < text.size(); ++i) {
      while (border > 0 && text[i] != text[border]) border = failure[border - 1];
      if (text[i] == text[border]) ++border;
      failure[i] = border;
    }
    stops.push_back(Stop{std::move(text), std::move(failure)});
  }
  return StopMatcher(std::move(stops), std::move(options));
}

bool StopMatcher::Stop::advance(char byte) {
  while (num_matched > 0 && text[num_matched] != byte) num_matched = failure[num_matched - 1];
  if (text[num_matched] == byte) ++num_matched;
  return num_matched == text.size();
}

std::string StopMatcher::push(std::string_view text) {
  if (stopped()) return {};
  const size_t num_held = held_.size();
  held_ += text;
  for (size_t i = num_held; i < held_.size(); ++i) {
    for (size_t k = 0; k < stops_.size(); ++k) {
      const bool complete = stops_[k].advance(held_[i]);
      if (complete && (!matched_ || stops_[k].text.size() > stops_[*matched_].text.size())) matched_ = k;
    }
    if (!matched_) continue;
    held_.resize(i + 1 - (options_.include_stop_in_output ? 0 : stops_[*matched_].text.size()));
    return std::exchange(held_, {});
  }
  const size_t safe = num_safe();
  std::string out = held_.substr(0, safe);
  held_.erase(0, safe);
  return out;
}

std::string StopMatcher::finish() { return stopped() ? std::string() : std::exchange(held_, {}); }

/// Bytes of held_ that no stop string can take away any more.
size_t StopMatcher::num_safe() const {
  size_t longest = 0;
  for (const Stop& stop : stops_) longest = std::max(longest, stop.num_matched);
  const size_t safe = held_.size() - longest;
  for (const std::string& literal : options_.atomic) {
    for (size_t begin = safe - std::min(safe, literal.size()); begin < safe; ++begin) {
      if (begin + literal.size() > safe && std::string_view(held_).substr(begin).starts_with(literal)) return begin;
    }
  }
  return safe;
}

}  // namespace quern::text
