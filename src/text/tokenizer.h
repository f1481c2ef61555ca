#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/result.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/normalizer.h"
#include "text/pretokenizer.h"

namespace quern::text {

struct TokenizerSpec;

/// Byte-level BPE as a checkpoint's tokenizer.json describes it: added tokens by their literals, NFC, the pattern's pieces,
/// merges. Token ids equal those of Hugging Face `tokenizers`. Immutable, thread-safe; move-only.
class Tokenizer {
 public:
  Tokenizer(Tokenizer&&) = default;
  Tokenizer& operator=(Tokenizer&&) = default;
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  /// Reads tokenizer.json of a model directory, and the added tokens of its tokenizer_config.json, where there is one.
  /// Errors: kNotFound without a tokenizer.json, kUnsupported naming the part that this program would not compute exactly.
  static Result<Tokenizer> load(const std::filesystem::path& model_dir);
  /// From the text of a tokenizer.json alone.
  static Result<Tokenizer> from_json(std::string_view tokenizer_json);

  /// Tokens of `text` (below 2 GiB; what is not UTF-8 becomes U+FFFD). With parse_special, literals of added tokens are those
  /// tokens; without, they are text like any other. Nothing is added in front or behind.
  [[nodiscard]] std::vector<int32_t> encode(std::string_view text, bool parse_special = true) const;

  /// A text in which untrusted parts may stand: `text` changed so that encode_with_escapes finds no added token in it, nor one
  /// that begins in it and is completed by what follows. Noncharacters U+FDD0 mark the places; those in `text` are dropped.
  [[nodiscard]] std::string escape_control_tokens(std::string_view text) const;
  /// encode() of a text with such parts: the same tokens as if the marks were not there, but the marked literals stay text.
  [[nodiscard]] std::vector<int32_t> encode_with_escapes(std::string_view text) const;

  /// The text of all tokens together, as UTF-8; what is not UTF-8 becomes U+FFFD. Undefined ids have no text.
  [[nodiscard]] std::string decode(std::span<const int32_t> ids, bool skip_special_tokens) const;
  /// The bytes of one token, which need not be UTF-8; an added token's literal; empty for an undefined id.
  [[nodiscard]] std::string_view token_bytes(int32_t id) const;
  /// The token with exactly these bytes.
  [[nodiscard]] std::optional<int32_t> token_to_id(std::string_view bytes) const;

  [[nodiscard]] bool is_defined(int32_t id) const { return kind(id) != Kind::kUndefined; }
  /// An added token, recognised by its literal.
  [[nodiscard]] bool is_added(int32_t id) const { return kind(id) == Kind::kAdded || kind(id) == Kind::kSpecial; }
  /// An added token that decode() can skip.
  [[nodiscard]] bool is_special(int32_t id) const { return kind(id) == Kind::kSpecial; }
  /// The highest defined id, plus 1.
  [[nodiscard]] int32_t num_tokens() const { return static_cast<int32_t>(entries_.size()); }

 private:
  enum class Kind : uint8_t { kUndefined, kBase, kAdded, kSpecial };
  struct Entry {
    std::string bytes;
    Kind kind = Kind::kUndefined;
  };

  static Result<Tokenizer> from_spec(TokenizerSpec spec);
  Tokenizer(TokenizerSpec spec, std::vector<Entry> entries, const std::array<int32_t, 256>& byte_tokens, NfcNormalizer nfc);

  [[nodiscard]] Kind kind(int32_t id) const {
    return id < 0 || id >= num_tokens() ? Kind::kUndefined : entries_[static_cast<size_t>(id)].kind;
  }
  [[nodiscard]] std::vector<int32_t> encode(std::string_view text, bool parse_special, bool honour_escapes) const;
  void encode_stretch(std::string_view text, bool parse_special, bool honour_escapes, std::vector<int32_t>& out) const;
  void encode_pieces(std::string_view text, bool honour_escapes, std::vector<int32_t>& out) const;
  void encode_piece(std::string_view piece, std::vector<int32_t>& out) const;

  std::vector<Entry> entries_;                         // by id
  std::unordered_map<std::string_view, int32_t> ids_;  // views of entries_, which never changes
  Bpe bpe_;
  NfcNormalizer nfc_;
  bool normalizes_;
  SplitPattern pattern_;
  bool ignore_merges_;
  AddedTokenMatcher in_text_;             // added tokens that are looked for in the text as it came
  AddedTokenMatcher in_normalized_text_;  // and in the normalized text
  AddedTokenMatcher all_added_tokens_;
};

}  // namespace quern::text
