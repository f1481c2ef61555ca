#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace quern::app {

/// Takes server-sent events apart as their bytes arrive: calls back with the data of every event that has some.
class EventStreamReader {
 public:
  explicit EventStreamReader(std::function<void(std::string_view data)> on_data) : on_data_(std::move(on_data)) {}

  void feed(std::string_view bytes) {
    for (const char c : bytes) {
      if (c == '\r') continue;
      if (c != '\n') {
        line_ += c;
        continue;
      }
      if (line_.empty() && !data_.empty()) {
        on_data_(data_);
        data_.clear();
      } else if (line_.starts_with("data:")) {
        const std::string_view value = std::string_view(line_).substr(line_.size() > 5 && line_[5] == ' ' ? 6 : 5);
        if (!data_.empty()) data_ += '\n';
        data_ += value;
      }
      line_.clear();
    }
  }

 private:
  std::function<void(std::string_view)> on_data_;
  std::string line_, data_;
};

}  // namespace quern::app
