#include "text/token_trie.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace quern::text {

std::string token_as_bytes(int32_t id) {
  const auto u = static_cast<uint32_t>(id);
  return {static_cast<char>(kTokenEscape), static_cast<char>(u >> 16 & 0xFF), static_cast<char>(u >> 8 & 0xFF), static_cast<char>(u & 0xFF)};
}

TokenTrie::TokenTrie(std::vector<Entry> entries) {
  std::ranges::sort(entries, [](const Entry& a, const Entry& b) { return std::tie(a.bytes, a.value) < std::tie(b.bytes, b.value); });
  std::vector<int32_t> path;  // nodes from the root to the last entry's end
  std::string_view last;
  for (const Entry& entry : entries) {
    size_t shared = 0;
    while (shared < last.size() && shared < entry.bytes.size() && last[shared] == entry.bytes[shared]) ++shared;
    while (path.size() > shared) {
      subtree_ends_[static_cast<size_t>(path.back())] = num_nodes();
      path.pop_back();
    }
    for (size_t i = shared; i < entry.bytes.size(); ++i) {
      path.push_back(num_nodes());
      bytes_.push_back(static_cast<uint8_t>(entry.bytes[i]));
      depths_.push_back(static_cast<uint16_t>(i));
      subtree_ends_.push_back(0);
      first_values_.push_back(static_cast<int32_t>(values_.size()));
      max_depth_ = std::max(max_depth_, static_cast<int32_t>(i) + 1);
    }
    values_.push_back(entry.value);
    last = entry.bytes;
  }
  for (const int32_t node : path) subtree_ends_[static_cast<size_t>(node)] = num_nodes();
  first_values_.push_back(static_cast<int32_t>(values_.size()));
}

namespace {

bool never_in_utf8(char c) {
  const auto byte = static_cast<uint8_t>(c);
  return byte == 0xC0 || byte == 0xC1 || byte > 0xF4;
}

std::vector<std::string> bytes_of(const Tokenizer& tokenizer, int32_t vocab_size) {
  // Longer ones than a trie holds do not exist in real vocabularies; without them, their text is still written by others.
  constexpr size_t kLongest = 1024;
  std::vector<std::string> out(static_cast<size_t>(std::max(std::min(tokenizer.num_tokens(), vocab_size), 0)));
  for (size_t i = 0; i < out.size(); ++i) {
    const auto id = static_cast<int32_t>(i);
    const std::string_view bytes = tokenizer.token_bytes(id);
    if (tokenizer.is_added(id)) {
      out[i] = token_as_bytes(id);
    } else if (bytes.size() <= kLongest && std::ranges::none_of(bytes, never_in_utf8)) {
      out[i] = bytes;
    }
  }
  return out;
}

}  // namespace

TokenVocabulary::TokenVocabulary(const Tokenizer& tokenizer, int32_t vocab_size) : TokenVocabulary(bytes_of(tokenizer, vocab_size)) {}

TokenVocabulary::TokenVocabulary(std::vector<std::string> bytes) : bytes_(std::move(bytes)) {
  std::vector<TokenTrie::Entry> entries;
  for (size_t i = 0; i < bytes_.size(); ++i) {
    if (!bytes_[i].empty()) entries.push_back({bytes_[i], static_cast<int32_t>(i)});
    size_bytes_ += sizeof(std::string) + bytes_[i].size();
  }
  trie_ = TokenTrie(std::move(entries));
  size_bytes_ += trie_.size_bytes();
}

}  // namespace quern::text
