#include "synth_checkpoint/text_files.h"

#include <array>
#include <string>
#include <string_view>

#include "base/file.h"

namespace quern::tools {
namespace {

struct AddedToken {
  std::string_view text;
  bool special;  // dropped when decoding without special tokens
};
constexpr std::array kAddedTokens{
    AddedToken{"<|endoftext|>", true},      AddedToken{"<|im_start|>", true},
    AddedToken{"<|im_end|>", true},         AddedToken{"<|object_ref_start|>", true},
    AddedToken{"<|object_ref_end|>", true}, AddedToken{"<|box_start|>", true},
    AddedToken{"<|box_end|>", true},        AddedToken{"<|quad_start|>", true},
    AddedToken{"<|quad_end|>", true},       AddedToken{"<|vision_start|>", true},
    AddedToken{"<|vision_end|>", true},     AddedToken{"<|vision_pad|>", true},
    AddedToken{"<|image_pad|>", true},      AddedToken{"<|video_pad|>", true},
    AddedToken{"<tool_call>", false},       AddedToken{"</tool_call>", false},
    AddedToken{"<|fim_prefix|>", false},    AddedToken{"<|fim_middle|>", false},
    AddedToken{"<|fim_suffix|>", false},    AddedToken{"<|fim_pad|>", false},
    AddedToken{"<|repo_name|>", false},     AddedToken{"<|file_sep|>", false},
    AddedToken{"<tool_response>", false},   AddedToken{"</tool_response>", false},
    AddedToken{"<think>", false},           AddedToken{"</think>", false},
    AddedToken{"<|audio_start|>", true},    AddedToken{"<|audio_end|>", true},
    AddedToken{"<tts_pad>", true},          AddedToken{"<tts_text_bos>", true},
    AddedToken{"<tts_text_eod>", true},     AddedToken{"<tts_text_bos_single>", true},
    AddedToken{"<|audio_pad|>", true},
};
constexpr int64_t kNumBytes = 256;
static_assert(kNumBytes + static_cast<int64_t>(kAddedTokens.size()) == TokenIds::kCount);
static_assert(kAddedTokens[TokenIds::kEndOfTurn - kNumBytes].text == "<|im_end|>" &&
              kAddedTokens[TokenIds::kVideoPad - kNumBytes].text == "<|video_pad|>");

constexpr std::string_view kPattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

/// Our own, in the form of the family: turns, reasoning, tools.
constexpr std::string_view kChatTemplate = R"({%- macro text_of(content) %}
    {%- if content is string %}
        {{- content | trim }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if part.type == 'text' %}
                {{- part.text }}
            {%- else %}
                {{- raise_exception('This model reads text only.') }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}
    {{- raise_exception('No messages provided.') }}
{%- endif %}
{%- set has_system = messages[0].role == 'system' %}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n\nThese functions can be called:\n\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' ~ (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>\n\nA call has this form, one line for each tag:\n\n<tool_call>\n<function=NAME>\n<parameter=ARGUMENT>\nVALUE\n</parameter>\n</function>\n</tool_call>' }}
    {%- if has_system %}
        {{- '\n\n' ~ text_of(messages[0].content) }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- elif has_system %}
    {{- '<|im_start|>system\n' ~ text_of(messages[0].content) ~ '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = text_of(message.content) %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- raise_exception('System message must be at the beginning.') }}
        {%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' ~ content ~ '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' ~ content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function is defined else call %}
            {{- ('\n' if content or not loop.first else '') ~ '<tool_call>\n<function=' ~ function.name ~ '>\n' }}
            {%- for name, value in function.arguments | items %}
                {{- '<parameter=' ~ name ~ '>\n' ~ (value if value is string else value | tojson) ~ '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' ~ content ~ '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
)";

std::string utf8(uint32_t code_point) {  // below U+0800
  if (code_point < 0x80) return {static_cast<char>(code_point)};
  return {static_cast<char>(0xc0 | (code_point >> 6)), static_cast<char>(0x80 | (code_point & 0x3f))};
}

/// The character that byte-level BPE writes for a byte: itself where it is printable and not a blank, else the next one from U+0100 on.
std::array<std::string, 256> byte_alphabet() {
  std::array<std::string, 256> alphabet;
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool visible = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    alphabet[byte] = utf8(visible ? byte : next++);
  }
  return alphabet;
}

Json added_token(const AddedToken& token) {
  return Json{{"content", token.text}, {"single_word", false}, {"lstrip", false},
              {"rstrip", false},       {"normalized", false},  {"special", token.special}};
}

Json make_tokenizer() {
  Json vocab = Json::object(), added = Json::array();
  int64_t id = 0;
  for (const std::string& character : byte_alphabet()) vocab[character] = id++;
  for (const AddedToken& token : kAddedTokens) {
    Json entry{{"id", id++}};
    entry.update(added_token(token));
    added.push_back(std::move(entry));
  }
  const Json byte_level{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  const Json split{{"type", "Split"}, {"pattern", {{"Regex", kPattern}}}, {"behavior", "Isolated"}, {"invert", false}};
  Json model{{"type", "BPE"}, {"dropout", nullptr}, {"unk_token", nullptr}, {"continuing_subword_prefix", ""}, {"end_of_word_suffix", ""}};
  model["fuse_unk"] = false;
  model["byte_fallback"] = false;
  model["ignore_merges"] = false;
  model["vocab"] = std::move(vocab);
  model["merges"] = Json::array();
  Json tokenizer{{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr}};
  tokenizer["added_tokens"] = std::move(added);
  tokenizer["normalizer"] = Json{{"type", "NFC"}};
  tokenizer["pre_tokenizer"] = Json{{"type", "Sequence"}, {"pretokenizers", Json::array({split, byte_level})}};
  tokenizer["post_processor"] = byte_level;
  tokenizer["decoder"] = byte_level;
  tokenizer["model"] = std::move(model);
  return tokenizer;
}

Json make_tokenizer_config() {
  Json decoder = Json::object();
  int64_t id = kNumBytes;
  for (const AddedToken& token : kAddedTokens) decoder[std::to_string(id++)] = added_token(token);
  return Json{{"add_prefix_space", false},
              {"added_tokens_decoder", std::move(decoder)},
              {"bos_token", nullptr},
              {"chat_template", kChatTemplate},
              {"clean_up_tokenization_spaces", false},
              {"eos_token", "<|im_end|>"},
              {"model_max_length", 262144},
              {"pad_token", "<|endoftext|>"},
              {"tokenizer_class", "Qwen2Tokenizer"},
              {"unk_token", nullptr}};
}

Json make_generation_config() {
  return Json{{"bos_token_id", TokenIds::kEndOfText},
              {"do_sample", true},
              {"eos_token_id", {TokenIds::kEndOfTurn, TokenIds::kEndOfText}},
              {"pad_token_id", TokenIds::kEndOfText},
              {"temperature", 1.0},
              {"top_k", 20},
              {"top_p", 0.95}};
}

}  // namespace

Result<void> write_text_files(const std::filesystem::path& folder, int64_t vocab_size) {
  if (vocab_size < TokenIds::kCount) {
    return invalid_argument("vocab_size {} has no room for 256 bytes and {} added tokens; at least {} is needed", vocab_size,
                            kAddedTokens.size(), TokenIds::kCount);
  }
  RETURN_IF_ERROR(write_file(folder / "tokenizer.json", make_tokenizer().dump(2)));
  RETURN_IF_ERROR(write_file(folder / "tokenizer_config.json", make_tokenizer_config().dump(2)));
  RETURN_IF_ERROR(write_file(folder / "chat_template.jinja", kChatTemplate));
  return write_file(folder / "generation_config.json", make_generation_config().dump(2));
}

void set_token_ids(Json& config) {
  Json& text = config.contains("text_config") ? config["text_config"] : config;
  text["bos_token_id"] = TokenIds::kEndOfText;
  text["eos_token_id"] = TokenIds::kEndOfText;
  config["vision_start_token_id"] = TokenIds::kVisionStart;
  config["vision_end_token_id"] = TokenIds::kVisionEnd;
  config["image_token_id"] = TokenIds::kImagePad;
  config["video_token_id"] = TokenIds::kVideoPad;
}

}  // namespace quern::tools
