// What constrained output costs: compiling a schema, and the mask of each token of a document that satisfies it.
//   bench_grammar MODEL_DIR [TOKENS]
// The vocabulary is the tokenizer's; if that has fewer than TOKENS (default 248,077, those of Qwen3.6), joined pairs of its tokens are added,
// which is what further merges would make. Times are CPU time of the thread.

#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/hash.h"
#include "text/output_grammar.h"
#include "text/token_grammar.h"
#include "text/tokenizer.h"

namespace {

using namespace quern;
/// Of this thread alone, so that other programs on the machine do not count.
struct Clock {
  static double now() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
  }
};
double micros_since(double begin) { return Clock::now() - begin; }

struct Case {
  const char* name;
  const char* schema;  // null: any object
  const char* document;
};

const std::vector<Case> kCases{
    {"any object", nullptr, R"({"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics", "computing"], "notes": {"quoted": "She said \"no\".", "ok": true, "x": null}})"},
    {"a person", R"({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}, "email": {"type": "string", "format": "email"}}, "required": ["name", "age", "email"]})",
     R"({"name": "Ada Lovelace", "age": 36, "email": "ada.lovelace@example.org"})"},
    {"lengths", R"({"type": "object", "properties": {"title": {"type": "string", "minLength": 5, "maxLength": 80}, "body": {"type": "string", "maxLength": 4000}, "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"}}, "required": ["title", "body", "code"]})",
     R"({"title": "On the economy of machinery", "body": "It was a bright cold day in April, and the clocks were striking thirteen.\nWinston Smith, his chin nuzzled into his breast.", "code": "AB1234"})"},
    {"lists of records", R"({"type": "object", "properties": {"items": {"type": "array", "items": {"type": "object", "properties": {"id": {"type": "string", "format": "uuid"}, "price": {"type": "number", "minimum": 0}, "kind": {"enum": ["new", "used", "refurbished"]}, "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 10}, "seller": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"name": {"type": "string"}, "since": {"type": "string", "format": "date"}}, "required": ["name", "since"]}]}}, "required": ["id", "price", "kind", "tags", "seller"]}}}, "required": ["items"]})",
     R"({"items": [{"id": "123e4567-e89b-12d3-a456-426614174000", "price": 12.5, "kind": "used", "tags": ["red", "round"], "seller": {"name": "Bob", "since": "2001-02-03"}}, {"id": "123e4567-e89b-12d3-a456-426614174001", "price": 3, "kind": "new", "tags": [], "seller": null}]})"},
    {"a tree", R"({"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "required": ["name", "children"]}}})",
     R"({"name": "root", "children": [{"name": "left", "children": [{"name": "leaf", "children": []}]}, {"name": "right side", "children": []}]})"},
};

/// The longest tokens first, as BPE mostly does.
std::vector<int32_t> greedy_tokens(const text::TokenVocabulary& vocabulary, std::string_view document, text::GrammarMatcher& matcher) {
  std::vector<int32_t> tokens;
  const text::TokenTrie& trie = vocabulary.trie();
  while (!document.empty()) {
    int32_t best = -1;
    size_t length = 0;
    // Walks down the trie along the document.
    int32_t node = 0, end = trie.num_nodes();
    for (size_t depth = 0; depth < document.size(); ++depth) {
      while (node < end && trie.byte(node) != static_cast<uint8_t>(document[depth])) node = trie.subtree_end(node);
      if (node >= end) break;
      if (trie.first_value(node) < trie.values_end(node)) {
        const int32_t token = trie.values()[static_cast<size_t>(trie.first_value(node))];
        if (matcher.accept(token)) {
          matcher.rollback(1);
          best = token;
          length = depth + 1;
        }
      }
      end = trie.subtree_end(node);
      ++node;
    }
    if (best < 0) return {};
    tokens.push_back(best);
    if (!matcher.accept(best)) return {};
    document.remove_prefix(length);
  }
  matcher.rollback(static_cast<int32_t>(tokens.size()));
  return tokens;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print(stderr, "usage: bench_grammar MODEL_DIR [TOKENS]\n");
    return 2;
  }
  const auto tokenizer = text::Tokenizer::load(argv[1]);
  if (!tokenizer) {
    fmt::print(stderr, "{}\n", tokenizer.error().message);
    return 1;
  }
  const auto wanted = static_cast<size_t>(argc > 2 ? std::atol(argv[2]) : 248'077);
  std::vector<std::string> bytes;
  for (int32_t id = 0; id < tokenizer->num_tokens(); ++id) bytes.emplace_back(tokenizer->is_added(id) ? text::token_as_bytes(id) : tokenizer->token_bytes(id));
  const size_t own = bytes.size();
  std::unordered_set<std::string> known(bytes.begin(), bytes.end());
  for (SplitMix64 random(1); bytes.size() < wanted;) {
    const auto any = [&] { return static_cast<int32_t>(random.next() % own); };
    const int32_t a = any(), b = any();
    if (tokenizer->is_added(a) || tokenizer->is_added(b)) continue;
    std::string joined = std::string(tokenizer->token_bytes(a)) + std::string(tokenizer->token_bytes(b));
    if (joined.size() <= 12 && known.insert(joined).second) bytes.push_back(std::move(joined));
  }
  auto begin = Clock::now();
  const auto vocabulary = std::make_shared<const text::TokenVocabulary>(std::move(bytes));
  fmt::print("{} tokens ({} of the tokenizer), trie of {} nodes, {:.1f} MB, made in {:.0f} ms\n", vocabulary->num_tokens(), own, vocabulary->trie().num_nodes(),
             static_cast<double>(vocabulary->size_bytes()) / 1e6, micros_since(begin) / 1000);
  text::TokenMasks masks(vocabulary);
  fmt::print("{:<18} {:>12} {:>12} {:>8} {:>7} {:>10} {:>10} {:>10} {:>12}\n", "schema", "compile, ms", "again, ms", "MB", "tokens", "mask, us", "p99, us", "max, us", "accept, us");
  std::vector<uint32_t> mask((static_cast<size_t>(vocabulary->num_tokens()) + 31) / 32);
  std::vector<std::shared_ptr<const text::TokenGrammar>> kept;
  for (const Case& c : kCases) {
    text::OutputShape shape;
    shape.content = text::ContentFormat{};
    if (c.schema != nullptr) {
      shape.content->kind = text::ContentFormat::Kind::kJsonSchema;
      shape.content->schema = *parse_json(c.schema, "schema");
    }
    begin = Clock::now();
    const auto grammar = text::compile_output(shape, *tokenizer, masks);
    const double compile_ms = micros_since(begin) / 1000;
    if (!grammar) {
      fmt::print(stderr, "{}: {}\n", c.name, grammar.error().message);
      return 1;
    }
    kept.push_back(*grammar);
    begin = Clock::now();
    const auto again = text::compile_output(shape, *tokenizer, masks);  // with the masks of rules that others have
    const double again_ms = micros_since(begin) / 1000;
    text::GrammarMatcher matcher(*grammar, {0});
    const std::vector<int32_t> tokens = greedy_tokens(*vocabulary, c.document, matcher);
    if (tokens.empty()) {
      fmt::print(stderr, "{}: the document does not satisfy the schema\n", c.name);
      return 1;
    }
    std::vector<double> times;
    double accept_us = 0;
    for (int round = 0; round < 20; ++round) {
      for (const int32_t token : tokens) {
        begin = Clock::now();
        std::fill(mask.begin(), mask.end(), 0);
        matcher.fill_mask(mask);
        times.push_back(micros_since(begin));
        begin = Clock::now();
        (void)matcher.accept(token);
        accept_us += micros_since(begin);
      }
      matcher.rollback(static_cast<int32_t>(tokens.size()));
    }
    double sum = 0;
    for (const double t : times) sum += t;
    std::ranges::sort(times);
    const auto count = static_cast<double>(times.size());
    fmt::print("{:<18} {:>12.1f} {:>12.1f} {:>8.1f} {:>7} {:>10.1f} {:>10.1f} {:>10.1f} {:>12.2f}\n", c.name, compile_ms, again_ms, static_cast<double>((*grammar)->size_bytes()) / 1e6,
               tokens.size(), sum / count, times[times.size() * 99 / 100], times.back(), accept_us / count);
  }
  return 0;
}
