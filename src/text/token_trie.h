#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/tokenizer.h"

namespace quern::text {

/// Grammars are over UTF-8, where the byte 0xFF never stands: behind it three bytes name an added token, which stands for itself and not for
/// its text. So a string in which "<think>" may stand does not let the token <think> in.
inline constexpr uint8_t kTokenEscape = 0xFF;
std::string token_as_bytes(int32_t id);

/// Byte strings with shared beginnings, in the order of a depth-first walk. A string may stand for several values. Immutable.
class TokenTrie {
 public:
  struct Entry {
    std::string bytes;  // not empty
    int32_t value;
  };
  TokenTrie() = default;
  explicit TokenTrie(std::vector<Entry> entries);

  [[nodiscard]] bool empty() const { return bytes_.empty(); }
  /// Nodes 0 .. num_nodes - 1 in preorder; the root, which has no byte, is none of them.
  [[nodiscard]] int32_t num_nodes() const { return static_cast<int32_t>(bytes_.size()); }
  [[nodiscard]] uint8_t byte(int32_t node) const { return bytes_[static_cast<size_t>(node)]; }
  /// 0 for children of the root.
  [[nodiscard]] int32_t depth(int32_t node) const { return depths_[static_cast<size_t>(node)]; }
  /// The first node behind those below `node`.
  [[nodiscard]] int32_t subtree_end(int32_t node) const { return subtree_ends_[static_cast<size_t>(node)]; }
  [[nodiscard]] int32_t max_depth() const { return max_depth_; }
  /// Entries that end at `node`, and those in the whole subtree, as indices of values().
  [[nodiscard]] int32_t first_value(int32_t node) const { return first_values_[static_cast<size_t>(node)]; }
  [[nodiscard]] int32_t values_end(int32_t node) const { return first_values_[static_cast<size_t>(node) + 1]; }
  [[nodiscard]] int32_t subtree_values_end(int32_t node) const { return first_values_[static_cast<size_t>(subtree_end(node))]; }
  [[nodiscard]] const std::vector<int32_t>& values() const { return values_; }
  [[nodiscard]] size_t size_bytes() const { return bytes_.size() * (1 + 2 + 4 + 4) + values_.size() * 4; }

 private:
  std::vector<uint8_t> bytes_;
  std::vector<uint16_t> depths_;
  std::vector<int32_t> subtree_ends_;
  std::vector<int32_t> first_values_;  // one more than nodes
  std::vector<int32_t> values_;
  int32_t max_depth_ = 0;
};

/// A tokenizer's tokens as grammars see them. Tokens that cannot stand in UTF-8 text are left out, and so are ids that the model does not
/// have. Every byte that UTF-8 text can have is a token of its own, so that whatever a grammar wants next can be written. Immutable.
class TokenVocabulary {
 public:
  /// Ids from vocab_size on are left out.
  TokenVocabulary(const Tokenizer& tokenizer, int32_t vocab_size);
  /// By id; an added token is token_as_bytes(id), what no grammar can allow is empty.
  explicit TokenVocabulary(std::vector<std::string> bytes);

  [[nodiscard]] const TokenTrie& trie() const { return trie_; }
  [[nodiscard]] int32_t num_tokens() const { return static_cast<int32_t>(bytes_.size()); }
  /// What the token adds to a text in a grammar's eyes; empty when no grammar can allow it.
  [[nodiscard]] std::string_view bytes(int32_t token) const {
    return token < 0 || token >= num_tokens() ? std::string_view() : std::string_view(bytes_[static_cast<size_t>(token)]);
  }
  [[nodiscard]] size_t size_bytes() const { return size_bytes_; }

 private:
  std::vector<std::string> bytes_;
  TokenTrie trie_;
  size_t size_bytes_ = 0;
};

}  // namespace quern::text
