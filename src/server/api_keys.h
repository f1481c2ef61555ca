#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "server/http_message.h"

namespace quern::server {

/// The keys that clients may send. Only their digests are kept. Thread-safe, since nothing changes.
class ApiKeys {
 public:
  ApiKeys() = default;  // none: everybody may ask
  /// Errors name a key by its place, never by its value: an empty one, one that no HTTP header can carry.
  static Result<ApiKeys> make(const std::vector<std::string>& keys);

  [[nodiscard]] bool empty() const { return digests_.empty(); }
  [[nodiscard]] size_t size() const { return digests_.size(); }
  /// Its index. The time it takes depends on the length of `key` alone.
  [[nodiscard]] std::optional<int32_t> find(std::string_view key) const;
  /// Of the key in `Authorization: Bearer KEY` or, as Anthropic's clients send it, `x-api-key: KEY`.
  [[nodiscard]] std::optional<int32_t> find(const HttpRequest& request) const;

 private:
  using Digest = std::array<unsigned char, 32>;
  std::vector<Digest> digests_;
};

}  // namespace quern::server
