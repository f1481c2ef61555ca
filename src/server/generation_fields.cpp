#include "server/generation_fields.h"

#include <cstdlib>

#include "server/structured_output.h"

#include "server/request_id.h"

namespace quern::server {
namespace {

void read_logit_bias(JsonFields& fields, const RequestLimits& limits, engine::SamplingParams& sampling) {
  constexpr size_t kMaxEntries = 1024;
  const Json* bias = fields.object("logit_bias");
  if (bias == nullptr) return;
  if (bias->size() > kMaxEntries) return fields.fail("logit_bias", "{} entries, at most {} are allowed", bias->size(), kMaxEntries);
  for (const auto& [key, value] : bias->items()) {
    char* end = nullptr;
    const long id = std::strtol(key.c_str(), &end, 10);
    if (key.empty() || key.size() > 10 || *end != '\0' || id < 0 || id >= limits.vocab_size) {
      return fields.fail("logit_bias", "\"{}\" is not a token id below {}", key.substr(0, 32), limits.vocab_size);
    }
    if (!value.is_number()) return fields.fail("logit_bias", "token {}: expected a number, found {}", key, json_kind(value));
    const double number = value.get<double>();
    if (!(number >= -100 && number <= 100)) return fields.fail("logit_bias", "token {}: expected a number between -100 and 100", key);
    sampling.logit_bias.emplace_back(static_cast<int32_t>(id), static_cast<float>(number));
  }
}

void read_sampling(JsonFields& fields, const SamplingDefaults& defaults, const RequestLimits& limits, engine::SamplingParams& sampling) {
  const auto number = [&](std::string_view name, double min, double max, std::optional<double> silent, float neutral) {
    if (const auto given = fields.number(name, min, max)) return static_cast<float>(*given);
    return silent ? static_cast<float>(*silent) : neutral;
  };
  sampling.temperature = number("temperature", 0, 100, defaults.temperature, 1);
  sampling.top_p = number("top_p", 0, 1, defaults.top_p, 1);
  if (fields.number("top_p", 0, 1) == 0) fields.fail("top_p", "expected a number above 0, at most 1; temperature 0 is greedy");
  sampling.min_p = number("min_p", 0, 1, defaults.min_p, 0);
  sampling.presence_penalty = number("presence_penalty", -2, 2, {}, 0);
  sampling.frequency_penalty = number("frequency_penalty", -2, 2, {}, 0);
  sampling.repetition_penalty = number("repetition_penalty", 0.01, 100, defaults.repetition_penalty, 1);
  const auto top_k = fields.integer("top_k", -1, INT32_MAX);
  sampling.top_k = static_cast<int32_t>(top_k.value_or(defaults.top_k.value_or(0)));
  if (sampling.top_k < 0) sampling.top_k = 0;
  sampling.min_tokens = static_cast<int32_t>(fields.integer("min_tokens", 0, limits.max_model_len).value_or(0));
  read_logit_bias(fields, limits, sampling);
}

void read_stops(JsonFields& fields, const RequestLimits& limits, GenerationFields& out) {
  if (const Json* stop = fields.find("stop")) {
    if (stop->is_string()) {
      out.stop.push_back(stop->get<std::string>());
    } else if (!stop->is_array()) {
      fields.fail("stop", "expected a string or a list of strings, found {}", json_kind(*stop));
    } else if (stop->size() > kMaxStopStrings) {
      fields.fail("stop", "{} stop strings, at most {} are allowed", stop->size(), kMaxStopStrings);
    } else {
      for (const Json& text : *stop) {
        if (!text.is_string()) return fields.fail("stop", "expected a list of strings, found {} in it", json_kind(text));
        out.stop.push_back(text.get<std::string>());
      }
    }
    for (const std::string& text : out.stop) {
      if (text.empty()) return fields.fail("stop", "a stop string is empty");
      if (text.size() > kMaxStopBytes)
        return fields.fail("stop", "a stop string has {} bytes, at most {} are allowed", text.size(), kMaxStopBytes);
    }
  }
  out.stop_token_ids = fields.integers("stop_token_ids", 0, limits.vocab_size - 1, 1024).value_or(std::vector<int32_t>{});
  out.ignore_eos = fields.boolean("ignore_eos").value_or(false);
  out.include_stop_str_in_output = fields.boolean("include_stop_str_in_output").value_or(false);
}

void read_stream(JsonFields& fields, GenerationFields& out) {
  out.stream = fields.boolean("stream").value_or(false);
  const Json* options = fields.object("stream_options");
  if (options == nullptr) return;
  if (!out.stream) return fields.fail("stream_options", "only allowed with \"stream\": true");
  JsonFields stream(*options);
  out.include_usage = stream.boolean("include_usage").value_or(false);
  out.continuous_usage_stats = stream.boolean("continuous_usage_stats").value_or(false);
  if (const auto status = stream.status(); !status) fields.fail("stream_options", "{}", status.error().message);
}

/// Silence about these would change the answer behind the client's back.
void refuse_what_is_not_supported(JsonFields& fields) {
  if (const auto best_of = fields.integer("best_of", INT32_MIN, INT32_MAX); best_of && *best_of != 1) {
    fields.unsupported("best_of", "only 1 is supported; ask for several choices with n");
  }
  if (fields.boolean("use_beam_search") == true) fields.unsupported("use_beam_search", "beam search is not supported");
  if (fields.find("prompt_embeds") != nullptr) fields.unsupported("prompt_embeds", "prompts are text or token ids");
  if (const auto suffix = fields.string("suffix", SIZE_MAX); suffix && !suffix->empty()) {
    fields.unsupported("suffix", "the model does not fill in the middle");
  }
  for (const char* name : {"allowed_token_ids", "bad_words", "logits_processors"}) {
    if (fields.find(name) != nullptr) fields.unsupported(name, "is not supported; logit_bias weighs single tokens");
  }
}

}  // namespace

GenerationFields read_generation_fields(JsonFields& fields, const SamplingDefaults& defaults, const RequestLimits& limits) {
  GenerationFields out;
  out.model = fields.string("model", 1024).value_or("");
  read_sampling(fields, defaults, limits, out.sampling);
  if (const Json* seed = fields.find("seed")) {
    const auto* big = seed->get_ptr<const Json::number_unsigned_t*>();
    if (big != nullptr) {
      out.seed = *big;
    } else if (const auto number = fields.integer("seed", INT64_MIN, INT64_MAX)) {
      out.seed = static_cast<uint64_t>(*number);
    }
  }
  out.n = static_cast<int32_t>(fields.integer("n", 1, kMaxChoices).value_or(1));
  read_stops(fields, limits, out);
  read_stream(fields, out);
  out.skip_special_tokens = fields.boolean("skip_special_tokens").value_or(true);
  out.return_token_ids = fields.boolean("return_token_ids").value_or(false);
  out.return_tokens_as_token_ids = fields.boolean("return_tokens_as_token_ids").value_or(false);
  out.priority = static_cast<int32_t>(fields.integer("priority", INT32_MIN, INT32_MAX).value_or(0));
  out.cache_salt = fields.string("cache_salt", 1024).value_or("");
  out.prompt_logprobs = static_cast<int32_t>(fields.integer("prompt_logprobs", 0, kMaxLogprobs).value_or(-1));
  if (const auto kept = fields.integer("truncate_prompt_tokens", -1, limits.max_model_len)) {
    if (*kept == 0) fields.fail("truncate_prompt_tokens", "expected a number of tokens, at least 1, or -1 for as many as fit");
    out.truncate_prompt_tokens = static_cast<int32_t>(*kept);
  }
  out.request_id = fields.string("request_id", 128).value_or("");
  if (!out.request_id.empty() && !is_request_id(out.request_id)) fields.fail("request_id", "expected printable ASCII characters without spaces");
  out.content_format = read_content_format(fields);
  refuse_what_is_not_supported(fields);
  return out;
}

void require_plain_output(const GenerationFields& generation, JsonFields& fields) {
  constexpr std::string_view kElsewhere = "is not supported here; /v1/chat/completions has it";
  if (generation.n != 1) fields.unsupported("n", "{}", kElsewhere);
  if (generation.prompt_logprobs >= 0) fields.unsupported("prompt_logprobs", "{}", kElsewhere);
  if (generation.return_token_ids) fields.unsupported("return_token_ids", "{}", kElsewhere);
  if (generation.return_tokens_as_token_ids) fields.unsupported("return_tokens_as_token_ids", "{}", kElsewhere);
}

}  // namespace quern::server
