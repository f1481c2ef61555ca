#include "text/tokenizer_json.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <initializer_list>
#include <optional>
#include <unordered_map>

#include "base/json.h"
#include "text/utf8.h"

namespace quern::text {
namespace {

/// The member, or nullptr where it is absent or null.
const SortedJson* member(const SortedJson& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

std::string string_member(const SortedJson& object, const char* key) {
  const SortedJson* value = member(object, key);
  const auto* text = value ? value->get_ptr<const std::string*>() : nullptr;
  return text ? *text : std::string();
}

Result<bool> flag(const SortedJson& object, const char* key, bool absent = false) {
  const SortedJson* value = member(object, key);
  if (!value) return absent;
  if (!value->is_boolean()) return invalid_argument("\"{}\" is expected to be true or false, found {}", key, value->dump());
  return value->get<bool>();
}

/// Refuses an object in which one of these flags is set: nothing here computes what it asks for.
Result<void> refuse_flags(const SortedJson& object, std::string_view what, std::initializer_list<const char*> keys, bool absent = false) {
  for (const char* key : keys) {
    ASSIGN_OR_RETURN(const bool set, flag(object, key, absent));
    if (set) return make_error(ErrorCode::kUnsupported, "{} with \"{}\": true is not supported", what, key);
  }
  return {};
}

std::string describe(const SortedJson& object) {
  std::string type = string_member(object, "type");
  return type.empty() ? object.dump(-1, ' ', false, SortedJson::error_handler_t::replace).substr(0, 200) : type;
}

/// The parts of a "Sequence", or the object itself as the only part.
std::vector<const SortedJson*> parts_of(const SortedJson& object, const char* list) {
  std::vector<const SortedJson*> parts;
  const SortedJson* sequence = string_member(object, "type") == "Sequence" ? member(object, list) : nullptr;
  if (!sequence || !sequence->is_array()) return {&object};
  for (const SortedJson& part : *sequence) parts.push_back(&part);
  return parts;
}

Result<bool> parse_normalizer(const SortedJson& root) {
  const SortedJson* normalizer = member(root, "normalizer");
  if (!normalizer) return false;
  bool nfc = false;
  for (const SortedJson* part : parts_of(*normalizer, "normalizers")) {
    if (string_member(*part, "type") != "NFC") {
      return make_error(ErrorCode::kUnsupported, "normalizer {} is not supported; NFC and none are", describe(*part));
    }
    nfc = true;
  }
  return nfc;
}

Result<SplitPattern> parse_split(const SortedJson& split) {
  const SortedJson* pattern = member(split, "pattern");
  const std::string regex = pattern ? string_member(*pattern, "Regex") : "";
  const auto found = find_split_pattern(regex);
  if (!found) {
    return make_error(
        ErrorCode::kUnsupported,
        "the pre-tokenizer's pattern is not supported: {}\nsupported are those of Qwen2 to Qwen3: {}\nand of Qwen3.5 and later: {}",
        pattern ? pattern->dump(-1, ' ', false, SortedJson::error_handler_t::replace) : "none", regex_of(SplitPattern::kQwen2),
        regex_of(SplitPattern::kQwen3_5));
  }
  if (const std::string behavior = string_member(split, "behavior"); behavior != "Isolated") {
    return make_error(ErrorCode::kUnsupported, "pre-tokenizer Split with behavior \"{}\" is not supported; \"Isolated\" is", behavior);
  }
  RETURN_IF_ERROR(refuse_flags(split, "pre-tokenizer Split", {"invert"}));
  return *found;
}

/// Split by a known pattern, then ByteLevel; or ByteLevel alone.
Result<SplitPattern> parse_pre_tokenizer(const SortedJson& root) {
  const SortedJson* pre_tokenizer = member(root, "pre_tokenizer");
  if (!pre_tokenizer)
    return make_error(ErrorCode::kUnsupported, "no pre_tokenizer; Split and ByteLevel, or ByteLevel alone, are supported");
  const auto parts = parts_of(*pre_tokenizer, "pretokenizers");
  SplitPattern pattern = SplitPattern::kNone;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string type = string_member(*parts[i], "type");
    if (type == "Split" && i == 0 && parts.size() == 2) {
      ASSIGN_OR_RETURN(pattern, parse_split(*parts[i]));
    } else if (type == "ByteLevel" && i + 1 == parts.size()) {
      RETURN_IF_ERROR(refuse_flags(*parts[i], "pre-tokenizer ByteLevel", {"add_prefix_space", "use_regex"}, true));
    } else {
      return make_error(
          ErrorCode::kUnsupported,
          "pre-tokenizer {} (part {} of {}) is not supported; a Split with a known pattern followed by ByteLevel, or ByteLevel alone, is",
          describe(*parts[i]), i + 1, parts.size());
    }
  }
  if (parts.empty() || string_member(*parts.back(), "type") != "ByteLevel") {
    return make_error(ErrorCode::kUnsupported, "the pre-tokenizer does not end with ByteLevel; only byte-level vocabularies are supported");
  }
  return pattern;
}

Result<void> check_decoder_and_post_processor(const SortedJson& root) {
  const SortedJson* decoder = member(root, "decoder");
  if (!decoder || string_member(*decoder, "type") != "ByteLevel") {
    return make_error(ErrorCode::kUnsupported, "decoder {} is not supported; ByteLevel is", decoder ? describe(*decoder) : "none");
  }
  if (const SortedJson* post = member(root, "post_processor"); post && string_member(*post, "type") != "ByteLevel") {
    return make_error(ErrorCode::kUnsupported, "post_processor {} is not supported; ByteLevel and none are", describe(*post));
  }
  return {};
}

Result<void> check_model(const SortedJson& model) {
  if (string_member(model, "type") != "BPE") {
    return make_error(ErrorCode::kUnsupported, "model {} is not supported; BPE is", describe(model));
  }
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (const SortedJson* value = member(model, affix); value && *value != "") {
      return make_error(ErrorCode::kUnsupported, "BPE with a {} ({}) is not supported", affix, value->dump());
    }
  }
  if (const SortedJson* dropout = member(model, "dropout"); dropout && *dropout != 0) {
    return make_error(ErrorCode::kUnsupported, "BPE with dropout ({}) is not supported: it makes tokens a matter of luck", dropout->dump());
  }
  return refuse_flags(model, "BPE", {"byte_fallback"});
}

/// Byte-level vocabularies write each byte as a character: printable Latin-1 as itself, the other 68 from U+0100 on.
class ByteAlphabet {
 public:
  ByteAlphabet() {
    byte_of_.fill(-1);
    char32_t next = 0x100;
    for (int16_t byte = 0; byte < 256; ++byte) {
      const bool printable = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
      byte_of_[printable ? static_cast<char32_t>(byte) : next++] = byte;
    }
  }
  /// The bytes that `written` stands for; nothing where it has a character outside the alphabet.
  [[nodiscard]] std::optional<std::string> bytes_of(std::string_view written) const {
    std::string bytes;
    for (size_t at = 0; at < written.size();) {
      const CodePoint c = code_point_at(written, at);
      if (c.value >= byte_of_.size() || byte_of_[c.value] < 0) return std::nullopt;
      bytes.push_back(static_cast<char>(byte_of_[c.value]));
      at += c.length;
    }
    return bytes;
  }

 private:
  std::array<int16_t, 256 + 68> byte_of_;
};

std::optional<int32_t> token_id(const SortedJson& value) {
  constexpr int64_t kMaxTokenId = (1 << 21) - 1;  // far above any vocabulary; a table of all ids stays affordable
  if (!value.is_number_integer()) return std::nullopt;
  const auto id = value.get<int64_t>();
  if (id < 0 || id > kMaxTokenId) return std::nullopt;
  return static_cast<int32_t>(id);
}

using IdOfWritten = std::unordered_map<std::string_view, int32_t>;

Result<IdOfWritten> parse_vocab(const SortedJson& model, TokenizerSpec& spec) {
  const SortedJson* vocab = member(model, "vocab");
  if (!vocab || !vocab->is_object()) return invalid_argument("model.vocab is expected to be an object of tokens and their ids");
  const ByteAlphabet alphabet;
  IdOfWritten ids;
  ids.reserve(vocab->size());
  spec.vocab.reserve(vocab->size());
  for (const auto& [written, value] : vocab->items()) {
    const auto id = token_id(value);
    if (!id) return invalid_argument("model.vocab: the id of \"{}\" is {}", written, value.dump());
    ids.emplace(written, *id);
    // A token outside the alphabet can never come out of a merge of bytes; it decodes as it is written.
    spec.vocab.push_back({*id, alphabet.bytes_of(written).value_or(written)});
  }
  return ids;
}

/// "a b", or ["a", "b"].
std::optional<std::pair<std::string_view, std::string_view>> merge_pair(const SortedJson& merge) {
  if (const auto* text = merge.get_ptr<const std::string*>()) {
    const size_t space = text->find(' ');
    if (space == std::string::npos || text->find(' ', space + 1) != std::string::npos) return std::nullopt;
    return std::pair(std::string_view(*text).substr(0, space), std::string_view(*text).substr(space + 1));
  }
  if (!merge.is_array() || merge.size() != 2) return std::nullopt;
  const auto* left = merge[0].get_ptr<const std::string*>();
  const auto* right = merge[1].get_ptr<const std::string*>();
  if (!left || !right) return std::nullopt;
  return std::pair(std::string_view(*left), std::string_view(*right));
}

Result<void> parse_merges(const SortedJson& model, const IdOfWritten& ids, TokenizerSpec& spec) {
  const SortedJson* merges = member(model, "merges");
  if (!merges || !merges->is_array()) return invalid_argument("model.merges is expected to be a list");
  spec.merges.reserve(merges->size());
  std::string both;
  for (const SortedJson& merge : *merges) {
    const auto pair = merge_pair(merge);
    if (!pair)
      return invalid_argument("model.merges[{}]: expected \"left right\" or [\"left\", \"right\"], found {}", spec.merges.size(),
                              merge.dump());
    both.assign(pair->first).append(pair->second);
    std::array<int32_t, 3> found{};
    const std::array<std::string_view, 3> wanted{pair->first, pair->second, both};
    for (size_t i = 0; i < wanted.size(); ++i) {
      const auto id = ids.find(wanted[i]);
      if (id == ids.end()) return invalid_argument("model.merges[{}]: \"{}\" is not in the vocabulary", spec.merges.size(), wanted[i]);
      found[i] = id->second;
    }
    spec.merges.push_back({found[0], found[1], found[2]});
  }
  return {};
}

Result<AddedToken> parse_added_token(const SortedJson& token, std::optional<int32_t> id) {
  std::string content = string_member(token, "content");
  if (!id || content.empty()) return invalid_argument("an added token needs an \"id\" and a \"content\"; found {}", token.dump());
  RETURN_IF_ERROR(refuse_flags(token, fmt::format("added token \"{}\"", content), {"lstrip", "rstrip", "single_word"}));
  ASSIGN_OR_RETURN(const bool special, flag(token, "special"));
  ASSIGN_OR_RETURN(const bool normalized, flag(token, "normalized"));
  return AddedToken{*id, std::move(content), special, normalized};
}

Result<void> parse_added_tokens(const SortedJson& root, TokenizerSpec& spec) {
  const SortedJson* tokens = member(root, "added_tokens");
  if (!tokens) return {};
  if (!tokens->is_array()) return invalid_argument("added_tokens is expected to be a list");
  for (const SortedJson& token : *tokens) {
    const SortedJson* id = member(token, "id");
    ASSIGN_OR_RETURN(AddedToken added, parse_added_token(token, id ? token_id(*id) : std::nullopt));
    spec.added_tokens.push_back(std::move(added));
  }
  return {};
}

}  // namespace

Result<TokenizerSpec> parse_tokenizer_json(std::string_view text) {
  ASSIGN_OR_RETURN(const SortedJson root, parse_sorted_json(text, "tokenizer.json"));
  const SortedJson* model = member(root, "model");
  if (!model) return invalid_argument("there is no \"model\"; is this a tokenizer.json?");
  TokenizerSpec spec;
  RETURN_IF_ERROR(check_model(*model));
  ASSIGN_OR_RETURN(spec.ignore_merges, flag(*model, "ignore_merges"));
  ASSIGN_OR_RETURN(spec.nfc, parse_normalizer(root));
  ASSIGN_OR_RETURN(spec.pattern, parse_pre_tokenizer(root));
  RETURN_IF_ERROR(check_decoder_and_post_processor(root));
  ASSIGN_OR_RETURN(const IdOfWritten ids, parse_vocab(*model, spec));
  RETURN_IF_ERROR(parse_merges(*model, ids, spec));
  RETURN_IF_ERROR(parse_added_tokens(root, spec));
  return spec;
}

Result<void> add_tokens_of_config(std::string_view tokenizer_config, TokenizerSpec& spec) {
  ASSIGN_OR_RETURN(const SortedJson root, parse_sorted_json(tokenizer_config, "tokenizer_config.json"));
  const SortedJson* decoder = member(root, "added_tokens_decoder");
  if (!decoder) return {};
  for (const auto& [key, token] : decoder->items()) {
    int32_t id = 0;
    const auto [end, failure] = std::from_chars(key.data(), key.data() + key.size(), id);
    const bool is_number = failure == std::errc() && end == key.data() + key.size();
    ASSIGN_OR_RETURN(AddedToken added, parse_added_token(token, is_number ? token_id(id) : std::nullopt));
    const auto known =
        std::find_if(spec.added_tokens.begin(), spec.added_tokens.end(), [&](const AddedToken& t) { return t.id == added.id; });
    if (known == spec.added_tokens.end()) {
      spec.added_tokens.push_back(std::move(added));
    } else if (known->content != added.content) {
      return invalid_argument("tokenizer_config.json: token {} is \"{}\", but \"{}\" in tokenizer.json", id, added.content, known->content);
    }
  }
  return {};
}

}  // namespace quern::text
