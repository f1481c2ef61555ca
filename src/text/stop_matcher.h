#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"

namespace quern::text {

struct StopOptions {
  bool include_stop_in_output = false;
  /// Texts that a delta holds wholly or not at all when they arrive in one piece: the literals of control tokens.
  std::vector<std::string> atomic;
};

/// Looks for stop strings in a stream of text. The stop that is complete first wins, the longest of those that are complete
/// at the same byte; so the outcome does not depend on how the text is cut into pieces, and generation can end at once.
/// What is held back is never more than the longest end of the text that a stop string begins with (and the whole of an
/// atomic text that it would cut). One stream, one thread.
class StopMatcher {
 public:
  /// Errors: kInvalidArgument when a stop string is empty (field "stop").
  static Result<StopMatcher> create(std::vector<std::string> stops, StopOptions options = {});

  /// The text that is safe to emit; empty after a match.
  std::string push(std::string_view text);
  /// Releases what was held back, when no stop string has been found.
  std::string finish();
  [[nodiscard]] bool stopped() const { return matched_.has_value(); }
  /// The stop string that was found, or null.
  [[nodiscard]] const std::string* matched() const { return matched_ ? &stops_[*matched_].text : nullptr; }

 private:
  struct Stop {
    std::string text;
    std::vector<size_t> failure;  // [i]: longest proper border of the first i + 1 bytes (Knuth, Morris, Pratt 1977)
    size_t num_matched = 0;       // bytes of `text` that the stream ends with
    /// True when the stop is complete with this byte.
    bool advance(char byte);
  };
  StopMatcher(std::vector<Stop> stops, StopOptions options) : stops_(std::move(stops)), options_(std::move(options)) {}
  [[nodiscard]] size_t num_safe() const;

  std::vector<Stop> stops_;
  StopOptions options_;
  std::string held_;
  std::optional<size_t> matched_;  // index into stops_
};

}  // namespace quern::text
