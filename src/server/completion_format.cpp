#include "server/completion_format.h"

#include <utility>

#include "server/json_writer.h"

namespace quern::server {

CompletionFormat::CompletionFormat(ResponseHeader header, const text::Tokenizer* tokenizer, std::vector<EchoedPrompt> prompts,
                                   int32_t choices_per_prompt, bool echo)
    : header_(std::move(header)),
      names_(tokenizer, header_.tokens_as_ids),
      writer_(header_, "text_completion"),
      prompts_(std::move(prompts)),
      choices_per_prompt_(choices_per_prompt),
      echo_(echo),
      choices_(prompts_.size() * static_cast<size_t>(choices_per_prompt), Choice{CompletionLogprobs(names_, header_.num_top_logprobs)}) {}

CompletionFormat::Choice& CompletionFormat::choice_at(size_t choice) { return choices_[choice]; }

Json CompletionFormat::take_logprobs(size_t choice, const OutputDelta& delta, bool with_prompt) {
  CompletionLogprobs& logprobs = choice_at(choice).logprobs;
  if (with_prompt) {
    const std::vector<int32_t>& ids = prompt_of(choice).ids;
    for (size_t i = 0; i < ids.size(); ++i) {
      const bool known = i > 0 && i - 1 < delta.prompt_logprobs.size();
      logprobs.add(ids[i], known ? &delta.prompt_logprobs[i - 1] : nullptr);
    }
  }
  for (size_t i = 0; i < delta.token_ids.size() && i < delta.logprobs.size(); ++i) logprobs.add(delta.token_ids[i], &delta.logprobs[i]);
  return logprobs.take();
}

Json CompletionFormat::prompt_logprobs(size_t choice, const OutputDelta& delta) const {
  return prompt_logprobs_json(names_, prompt_of(choice).ids, delta.prompt_logprobs, header_.num_prompt_logprobs);
}

void CompletionFormat::begin(int32_t, std::string&) {}

void CompletionFormat::delta(int32_t choice, const OutputDelta& delta, const OutputUsage& usage, std::string& out) {
  Choice& state = choice_at(static_cast<size_t>(choice));
  const bool first = !std::exchange(state.begun, true);
  const bool with_prompt = first && echo_;
  const bool tells_prompt = first && (header_.prompt_logprobs || header_.token_ids);
  if (with_prompt || tells_prompt || !delta.content.empty() || (!delta.token_ids.empty() && (header_.logprobs || header_.token_ids))) {
    writer_.open(choice, out);
    out += "\"text\":";
    append_json_string(out, with_prompt ? prompt_of(static_cast<size_t>(choice)).text + delta.content : delta.content);
    out += ",\"logprobs\":";
    out += header_.logprobs ? dump_json(take_logprobs(static_cast<size_t>(choice), delta, with_prompt)) : "null";
    out += ",\"finish_reason\":null";
    if (first && header_.prompt_logprobs) {
      out += ",\"prompt_logprobs\":";
      out += dump_json(prompt_logprobs(static_cast<size_t>(choice), delta));
    }
    if (header_.token_ids) {
      out += ",\"token_ids\":";
      append_json_integers(out, delta.token_ids);
      if (first) {
        out += ",\"prompt_token_ids\":";
        append_json_integers(out, prompt_of(static_cast<size_t>(choice)).ids);
      }
    }
    writer_.close(usage, out);
  }
  if (delta.end) {
    writer_.open(choice, out);
    out += R"("text":"","logprobs":null)";
    ChunkWriter::append_end(delta, out);
    writer_.close(usage, out);
  }
}

void CompletionFormat::finish(const OutputUsage& usage, std::string& out) { writer_.finish(usage, out); }

Json CompletionFormat::response(std::span<const OutputDelta> choices, const OutputUsage& usage) {
  Json list = Json::array();
  for (size_t i = 0; i < choices.size(); ++i) {
    const OutputDelta& output = choices[i];
    Json choice;
    choice["index"] = i;
    choice["text"] = echo_ ? prompt_of(i).text + output.content : output.content;
    choice["logprobs"] = header_.logprobs ? take_logprobs(i, output, echo_) : Json();
    append_end(output, choice);
    if (header_.prompt_logprobs) choice["prompt_logprobs"] = prompt_logprobs(i, output);
    if (header_.token_ids) {
      choice["token_ids"] = output.token_ids;
      choice["prompt_token_ids"] = prompt_of(i).ids;
    }
    list.push_back(std::move(choice));
  }
  Json body = response_head(header_, "text_completion");
  body["choices"] = std::move(list);
  body["usage"] = usage_json(usage);
  return body;
}

}  // namespace quern::server
