#include "server/token_logprobs.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "text/utf8.h"

namespace quern::server {
namespace {

/// Finite, and at most the floor's size.
double json_logprob(float logprob) { return std::isnan(logprob) || logprob < kLogprobFloor ? kLogprobFloor : std::min<double>(logprob, 0); }

Json token_entry(const TokenNames& names, int32_t id, float logprob) {
  Json entry;
  entry["token"] = names.name(id);
  entry["logprob"] = json_logprob(logprob);
  Json bytes = Json::array();
  for (const char c : names.bytes(id)) bytes.push_back(static_cast<unsigned char>(c));
  entry["bytes"] = std::move(bytes);
  return entry;
}

}  // namespace

std::string TokenNames::name(int32_t id) const { return text::to_valid_utf8(bytes(id)); }

std::string TokenNames::bytes(int32_t id) const {
  return as_ids_ ? fmt::format("token_id:{}", id) : std::string(tokenizer_->token_bytes(id));
}

Json chat_logprobs(const TokenNames& names, std::span<const int32_t> ids, std::span<const engine::TokenLogprobs> logprobs,
                   int32_t num_top) {
  Json content = Json::array();
  for (size_t i = 0; i < ids.size() && i < logprobs.size(); ++i) {
    Json entry = token_entry(names, ids[i], logprobs[i].chosen);
    Json top = Json::array();
    for (const auto& [id, logprob] : logprobs[i].top) {
      if (std::cmp_equal(top.size(), num_top)) break;
      top.push_back(token_entry(names, id, logprob));
    }
    entry["top_logprobs"] = std::move(top);
    content.push_back(std::move(entry));
  }
  Json result;
  result["content"] = std::move(content);
  result["refusal"] = nullptr;
  return result;
}

Json prompt_logprobs_json(const TokenNames& names, std::span<const int32_t> ids, std::span<const engine::TokenLogprobs> logprobs,
                          int32_t num_top) {
  Json list = Json::array();
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i == 0 || i - 1 >= logprobs.size()) {
      list.push_back(nullptr);
      continue;
    }
    const engine::TokenLogprobs& entry = logprobs[i - 1];
    const auto told = [&](int32_t id, float logprob, int32_t rank) {
      return Json{{"logprob", json_logprob(logprob)}, {"rank", rank}, {"decoded_token", names.name(id)}};
    };
    Json tokens = Json::object();
    tokens[std::to_string(ids[i])] = told(ids[i], entry.chosen, entry.chosen_rank);
    int32_t rank = 0;
    for (const auto& [id, logprob] : entry.top) {
      if (rank == num_top) break;
      ++rank;
      if (id != ids[i]) tokens[std::to_string(id)] = told(id, logprob, rank);
    }
    list.push_back(std::move(tokens));
  }
  return list;
}

void CompletionLogprobs::add(int32_t id, const engine::TokenLogprobs* logprobs) {
  const std::string bytes = names_.bytes(id);
  const std::string name = text::to_valid_utf8(bytes);
  const auto continues = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; };
  // A token that begins within a character has that character's offset.
  text_offset_.push_back(!bytes.empty() && continues(bytes[0]) && num_code_points_ > 0 ? num_code_points_ - 1 : num_code_points_);
  for (const char c : bytes) num_code_points_ += continues(c) ? 0 : 1;
  tokens_.push_back(name);
  if (logprobs == nullptr) {
    token_logprobs_.push_back(nullptr);
    top_logprobs_.push_back(nullptr);
    return;
  }
  token_logprobs_.push_back(json_logprob(logprobs->chosen));
  Json top = Json::object();
  for (const auto& [other, logprob] : logprobs->top) {
    if (std::cmp_equal(top.size(), num_top_)) break;
    const std::string other_name = names_.name(other);
    if (!top.contains(other_name)) top[other_name] = json_logprob(logprob);  // of two tokens with one name the likelier stays
  }
  if (!top.contains(name)) top[name] = json_logprob(logprobs->chosen);
  top_logprobs_.push_back(std::move(top));
}

Json CompletionLogprobs::take() {
  Json result;
  result["tokens"] = std::exchange(tokens_, Json::array());
  result["token_logprobs"] = std::exchange(token_logprobs_, Json::array());
  result["top_logprobs"] = std::exchange(top_logprobs_, Json::array());
  result["text_offset"] = std::exchange(text_offset_, Json::array());
  return result;
}

}  // namespace quern::server
