#include "server/api_keys.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>

namespace quern::server {
namespace {

std::array<unsigned char, 32> digest_of(std::string_view key) {
  std::array<unsigned char, 32> digest;
  SHA256(reinterpret_cast<const unsigned char*>(key.data()), key.size(), digest.data());
  return digest;
}

}  // namespace

Result<ApiKeys> ApiKeys::make(const std::vector<std::string>& keys) {
  ApiKeys result;
  for (size_t i = 0; i < keys.size(); ++i) {
    const std::string& key = keys[i];
    if (key.empty()) return invalid_argument("API key {} of {} is empty", i + 1, keys.size());
    if (!std::ranges::all_of(key, [](char c) { return c > ' ' && c < 127; })) {
      return invalid_argument("API key {} of {} has a blank or a character that is not printable ASCII; no client could send it", i + 1, keys.size());
    }
    result.digests_.push_back(digest_of(key));
  }
  return result;
}

std::optional<int32_t> ApiKeys::find(std::string_view key) const {
  const Digest digest = digest_of(key);
  int32_t found = -1;
  for (size_t i = 0; i < digests_.size(); ++i) {  // all of them, also behind a match
    if (CRYPTO_memcmp(digest.data(), digests_[i].data(), digest.size()) == 0 && found < 0) found = static_cast<int32_t>(i);
  }
  return found < 0 ? std::nullopt : std::optional(found);
}

std::optional<int32_t> ApiKeys::find(const HttpRequest& request) const {
  constexpr std::string_view kScheme = "Bearer ";
  const std::string_view authorization = request.header("Authorization"), anthropic = request.header("x-api-key");
  if (authorization.size() > kScheme.size() && equals_ignoring_case(authorization.substr(0, kScheme.size()), kScheme)) {
    if (const auto idx = find(authorization.substr(kScheme.size()))) return idx;
  }
  return anthropic.empty() ? std::nullopt : find(anthropic);
}

}  // namespace quern::server
