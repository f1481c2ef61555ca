#include "text/tokenizer.h"

#include <algorithm>
#include <utility>

#include "base/file.h"
#include "text/tokenizer_json.h"
#include "text/utf8.h"

namespace quern::text {
namespace {

std::vector<AddedToken> tokens_where(std::span<const AddedToken> tokens, bool normalized) {
  std::vector<AddedToken> chosen;
  std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(chosen), [&](const AddedToken& t) { return t.normalized == normalized; });
  return chosen;
}

/// Calls stretch(text) and added(id) from left to right for what lies between added tokens, and for them.
template <class Stretch, class Added>
void split(const AddedTokenMatcher& matcher, std::string_view text, bool honour_escapes, const Stretch& stretch, const Added& added) {
  size_t done = 0;
  while (const auto match = matcher.find(text, done, honour_escapes)) {
    if (match->begin > done) stretch(text.substr(done, match->begin - done));
    added(match->id);
    done = match->end;
  }
  if (done < text.size()) stretch(text.substr(done));
}

}  // namespace

Result<Tokenizer> Tokenizer::load(const std::filesystem::path& model_dir) {
  const std::filesystem::path path = model_dir / "tokenizer.json";
  const auto with_path = [&](const Error& error) { return error.with_context(path.string()); };
  ASSIGN_OR_RETURN(const std::string text, read_file(path));
  auto spec = parse_tokenizer_json(text);
  if (!spec) return with_path(spec.error());
  const std::filesystem::path config_path = model_dir / "tokenizer_config.json";
  if (std::error_code ignored; std::filesystem::exists(config_path, ignored)) {
    ASSIGN_OR_RETURN(const std::string config, read_file(config_path));
    if (auto added = add_tokens_of_config(config, *spec); !added) return added.error().with_context(config_path.string());
  }
  auto tokenizer = from_spec(std::move(*spec));
  if (!tokenizer) return with_path(tokenizer.error());
  return tokenizer;
}

Result<Tokenizer> Tokenizer::from_json(std::string_view tokenizer_json) {
  ASSIGN_OR_RETURN(TokenizerSpec spec, parse_tokenizer_json(tokenizer_json));
  return from_spec(std::move(spec));
}

Result<Tokenizer> Tokenizer::from_spec(TokenizerSpec spec) {
  int32_t max_id = -1;
  for (const auto& token : spec.vocab) max_id = std::max(max_id, token.id);
  for (const AddedToken& token : spec.added_tokens) max_id = std::max(max_id, token.id);
  std::vector<Entry> entries(static_cast<size_t>(max_id + 1));

  std::array<int32_t, 256> byte_tokens;
  byte_tokens.fill(-1);
  for (auto& token : spec.vocab) {
    Entry& entry = entries[static_cast<size_t>(token.id)];
    if (entry.kind != Kind::kUndefined) return invalid_argument("token id {} stands twice in model.vocab", token.id);
    if (token.bytes.size() == 1) byte_tokens[static_cast<uint8_t>(token.bytes[0])] = token.id;
    entry = {std::move(token.bytes), Kind::kBase};
  }
  for (size_t byte = 0; byte < byte_tokens.size(); ++byte) {
    if (byte_tokens[byte] < 0)
      return invalid_argument("model.vocab has no token for the byte 0x{:02X}; is it a byte-level vocabulary?", byte);
  }

  ASSIGN_OR_RETURN(NfcNormalizer nfc, NfcNormalizer::create());
  for (AddedToken& token : spec.added_tokens) {
    Entry& entry = entries[static_cast<size_t>(token.id)];
    if (entry.kind != Kind::kUndefined && entry.bytes != token.content) {
      return invalid_argument("added token \"{}\" has the id {}, which is \"{}\" already", token.content, token.id,
                              to_valid_utf8(entry.bytes));
    }
    entry = {token.content, token.special ? Kind::kSpecial : Kind::kAdded};
    if (std::string storage; token.normalized && spec.nfc) token.content = std::string(nfc.normalize(token.content, storage));
  }
  return Tokenizer(std::move(spec), std::move(entries), byte_tokens, std::move(nfc));
}

Tokenizer::Tokenizer(TokenizerSpec spec, std::vector<Entry> entries, const std::array<int32_t, 256>& byte_tokens, NfcNormalizer nfc)
    : entries_(std::move(entries)),
      bpe_(byte_tokens, spec.merges),
      nfc_(std::move(nfc)),
      normalizes_(spec.nfc),
      pattern_(spec.pattern),
      ignore_merges_(spec.ignore_merges),
      in_text_(tokens_where(spec.added_tokens, false)),
      in_normalized_text_(tokens_where(spec.added_tokens, true)),
      all_added_tokens_(spec.added_tokens) {
  ids_.reserve(entries_.size());
  for (int32_t id = 0; id < num_tokens(); ++id) {
    if (is_defined(id)) ids_.emplace(token_bytes(id), id);
  }
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool parse_special) const { return encode(text, parse_special, false); }

std::vector<int32_t> Tokenizer::encode_with_escapes(std::string_view text) const { return encode(text, true, true); }

std::string Tokenizer::escape_control_tokens(std::string_view text) const {
  const std::string valid = to_valid_utf8(text);
  // Where literals are looked for in normalized text, that is where they have to be found here.
  std::string storage;
  return all_added_tokens_.escape(normalizes_ && !in_normalized_text_.empty() ? nfc_.normalize(valid, storage) : valid);
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool parse_special, bool honour_escapes) const {
  std::string replaced;
  if (!is_valid_utf8(text)) text = replaced = to_valid_utf8(text);
  std::vector<int32_t> out;
  out.reserve(text.size() / 3);
  const auto stretch = [&](std::string_view part) { encode_stretch(part, parse_special, honour_escapes, out); };
  if (parse_special) {
    split(in_text_, text, honour_escapes, stretch, [&](int32_t id) { out.push_back(id); });
  } else {
    stretch(text);
  }
  return out;
}

/// What lies between two added tokens of the text as it came: those of the normalized text are found here.
void Tokenizer::encode_stretch(std::string_view text, bool parse_special, bool honour_escapes, std::vector<int32_t>& out) const {
  const auto pieces = [&](std::string_view part) { encode_pieces(part, honour_escapes, out); };
  if (!parse_special || in_normalized_text_.empty()) return pieces(text);
  std::string storage;
  split(in_normalized_text_, normalizes_ ? nfc_.normalize(text, storage) : text, honour_escapes, pieces,
        [&](int32_t id) { out.push_back(id); });
}

/// Text without any added token.
void Tokenizer::encode_pieces(std::string_view text, bool honour_escapes, std::vector<int32_t>& out) const {
  std::string without_escapes, normalized;
  if (honour_escapes && text.find(kEscape) != std::string_view::npos) text = without_escapes = drop_escapes(text);
  if (normalizes_) text = nfc_.normalize(text, normalized);
  while (!text.empty()) {
    const size_t length = next_piece(pattern_, text);
    encode_piece(text.substr(0, length), out);
    text.remove_prefix(length);
  }
}

void Tokenizer::encode_piece(std::string_view piece, std::vector<int32_t>& out) const {
  if (ignore_merges_) {
    // Only the vocabulary's own tokens are found this way; an added token here is one that is not to be parsed.
    if (const auto id = token_to_id(piece); id && !is_added(*id)) return out.push_back(*id);
  }
  bpe_.encode(piece, out);
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  std::string bytes;
  for (const int32_t id : ids) {
    if (!skip_special_tokens || !is_special(id)) bytes.append(token_bytes(id));
  }
  return to_valid_utf8(bytes);
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  return is_defined(id) ? std::string_view(entries_[static_cast<size_t>(id)].bytes) : std::string_view();
}

std::optional<int32_t> Tokenizer::token_to_id(std::string_view bytes) const {
  const auto found = ids_.find(bytes);
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace quern::text
