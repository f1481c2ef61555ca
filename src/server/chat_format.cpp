#include "server/chat_format.h"

#include <utility>

#include "server/json_writer.h"

namespace quern::server {
namespace {

/// As chunks have them, by index and without what an earlier chunk has told, or as a whole message has them.
Json tool_calls_json(const std::vector<ToolCallDelta>& calls, bool with_index) {
  Json list = Json::array();
  for (const ToolCallDelta& call : calls) {
    Json json;
    if (with_index) json["index"] = call.index;
    if (!call.id.empty()) {
      json["id"] = call.id;
      json["type"] = "function";
      json["function"]["name"] = call.name;
    }
    json["function"]["arguments"] = call.arguments;
    list.push_back(std::move(json));
  }
  return list;
}

}  // namespace

ChatFormat::ChatFormat(ResponseHeader header, const text::Tokenizer* tokenizer, std::vector<int32_t> prompt_ids)
    : header_(std::move(header)),
      names_(tokenizer, header_.tokens_as_ids),
      writer_(header_, "chat.completion.chunk"),
      prompt_ids_(std::move(prompt_ids)) {}

void ChatFormat::append_logprobs(const OutputDelta& delta, std::string& out) const {
  out += ",\"logprobs\":";
  if (!header_.logprobs || delta.token_ids.empty()) {
    out += "null";
  } else {
    out += dump_json(chat_logprobs(names_, delta.token_ids, delta.logprobs, header_.num_top_logprobs));
  }
}

Json ChatFormat::prompt_logprobs(const OutputDelta& delta) const {
  return prompt_logprobs_json(names_, prompt_ids_, delta.prompt_logprobs, header_.num_prompt_logprobs);
}

void ChatFormat::begin(int32_t choice, std::string& out) {
  writer_.open(choice, out);
  out += R"("delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null)";
  std::string top_level;
  if (header_.token_ids && choice == 0) {
    top_level = ",\"prompt_token_ids\":";
    append_json_integers(top_level, prompt_ids_);
  }
  writer_.close({}, out, top_level);
}

void ChatFormat::delta(int32_t choice, const OutputDelta& delta, const OutputUsage& usage, std::string& out) {
  const bool has_text = !delta.reasoning.empty() || !delta.content.empty() || !delta.tool_calls.empty();
  const bool tells_prompt = header_.prompt_logprobs && choice == 0 && std::exchange(prompt_pending_, false);
  if (has_text || tells_prompt || (!delta.token_ids.empty() && (header_.logprobs || header_.token_ids))) {
    writer_.open(choice, out);
    out += "\"delta\":{";
    if (!delta.reasoning.empty()) {
      std::string text;
      append_json_string(text, delta.reasoning);
      out += "\"reasoning_content\":";
      out += text;
      out += ",\"reasoning\":";
      out += text;
    }
    if (!delta.content.empty()) {
      out += delta.reasoning.empty() ? "\"content\":" : ",\"content\":";
      append_json_string(out, delta.content);
    }
    if (!delta.tool_calls.empty()) {
      if (!delta.reasoning.empty() || !delta.content.empty()) out += ',';
      out += "\"tool_calls\":";
      out += dump_json(tool_calls_json(delta.tool_calls, /*with_index=*/true));
    }
    out += "}";
    append_logprobs(delta, out);
    out += ",\"finish_reason\":null";
    if (header_.token_ids) {
      out += ",\"token_ids\":";
      append_json_integers(out, delta.token_ids);
    }
    std::string top_level;
    if (tells_prompt) top_level = ",\"prompt_logprobs\":" + dump_json(prompt_logprobs(delta));
    writer_.close(usage, out, top_level);
  }
  if (delta.end) {
    writer_.open(choice, out);
    out += R"("delta":{},"logprobs":null)";
    ChunkWriter::append_end(delta, out);
    writer_.close(usage, out);
  }
}

void ChatFormat::finish(const OutputUsage& usage, std::string& out) { writer_.finish(usage, out); }

Json ChatFormat::response(std::span<const OutputDelta> choices, const OutputUsage& usage) {
  Json list = Json::array();
  for (size_t i = 0; i < choices.size(); ++i) {
    const OutputDelta& output = choices[i];
    const auto text_or_null = [](const std::string& text) { return text.empty() ? Json() : Json(text); };
    Json message;
    message["role"] = "assistant";
    message["content"] = text_or_null(output.content);
    message["reasoning_content"] = text_or_null(output.reasoning);
    message["reasoning"] = text_or_null(output.reasoning);
    message["refusal"] = nullptr;
    if (!output.tool_calls.empty()) message["tool_calls"] = tool_calls_json(output.tool_calls, /*with_index=*/false);
    Json choice;
    choice["index"] = i;
    choice["message"] = std::move(message);
    choice["logprobs"] = header_.logprobs ? chat_logprobs(names_, output.token_ids, output.logprobs, header_.num_top_logprobs) : Json();
    append_end(output, choice);
    if (header_.token_ids) choice["token_ids"] = output.token_ids;
    list.push_back(std::move(choice));
  }
  Json body = response_head(header_, "chat.completion");
  body["choices"] = std::move(list);
  if (header_.token_ids) body["prompt_token_ids"] = prompt_ids_;
  if (header_.prompt_logprobs) body["prompt_logprobs"] = prompt_logprobs(choices[0]);
  body["usage"] = usage_json(usage);
  return body;
}

}  // namespace quern::server
