#include <gmock/gmock.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/hash.h"
#include "grammar_support.h"
#include "support/standin_tokenizer.h"
#include "text/gbnf_grammar.h"
#include "text/json_schema.h"
#include "text/marked_text.h"
#include "text/output_grammar.h"
#include "text/regex_grammar.h"
#include "text/tool_call_parser.h"
#include "text/utf8.h"

namespace quern::text {
namespace {

using ::testing::HasSubstr;

const Tokenizer& demo_tokenizer() {
  static const Tokenizer instance = Tokenizer::load(std::filesystem::path(QUERN_SOURCE_DIR) / "models" / "quern-demo").value();
  return instance;
}
const Tokenizer& standin_tokenizer() {
  static const Tokenizer instance = Tokenizer::load(quern::testing::standin_tokenizer_dir()).value();
  return instance;
}

/// A tokenizer with its masks.
struct Vocabulary {
  explicit Vocabulary(const Tokenizer& t)
      : tokenizer(t), vocabulary(std::make_shared<const TokenVocabulary>(t, t.num_tokens())), masks(vocabulary), end(*t.token_to_id("<|im_end|>")) {}
  const Tokenizer& tokenizer;
  std::shared_ptr<const TokenVocabulary> vocabulary;
  TokenMasks masks;
  int32_t end;
  [[nodiscard]] std::vector<uint32_t> empty_mask() const { return std::vector<uint32_t>((static_cast<size_t>(tokenizer.num_tokens()) + 31) / 32); }
};
Vocabulary& demo() {
  static Vocabulary instance(demo_tokenizer());
  return instance;
}
Vocabulary& standin() {
  static Vocabulary instance(standin_tokenizer());
  return instance;
}

bool has(const std::vector<uint32_t>& mask, int32_t token) { return (mask[static_cast<size_t>(token) / 32] >> (token % 32) & 1) != 0; }

std::vector<int32_t> tokens_of(const std::vector<uint32_t>& mask) {
  std::vector<int32_t> tokens;
  for (size_t word = 0; word < mask.size(); ++word)
    for (uint32_t bits = mask[word]; bits != 0; bits &= bits - 1) tokens.push_back(static_cast<int32_t>(word * 32) + std::countr_zero(bits));
  return tokens;
}

ContentFormat format(ContentFormat::Kind kind, std::string text) {
  ContentFormat out;
  out.kind = kind;
  if (kind == ContentFormat::Kind::kJsonSchema) {
    out.schema = *parse_json(text, "schema");
  } else {
    out.text = std::move(text);
  }
  out.field = "response_format";
  return out;
}
OutputShape shape_of(ContentFormat content) {
  OutputShape shape;
  shape.content = std::move(content);
  return shape;
}
constexpr auto kSchema = ContentFormat::Kind::kJsonSchema;
constexpr auto kRegex = ContentFormat::Kind::kRegex;
constexpr auto kGrammar = ContentFormat::Kind::kGrammar;

CallableFunction function(std::string name, std::string_view parameters, bool strict) {
  return {std::move(name), parameters.empty() ? Json() : *parse_json(parameters, "parameters"), strict, "tools[0].function.parameters"};
}

constexpr const char* kWeather =
    R"({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 14}, "units": {"enum": ["metric", "imperial"]},
        "when": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}, "tags": {"type": "array", "items": {"type": "string"}}, "code": {"type": "string", "maxLength": 12, "pattern": "^[A-Z]"},
        "place": {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}, "required": ["lat", "lon"]}, "note": {"type": "string", "maxLength": 40}}, "required": ["city", "days"]})";

std::vector<OutputShape> many_shapes() {
  std::vector<OutputShape> shapes;
  for (const char* schema : {R"({"type": "object"})", R"({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}}, "required": ["name", "age"]})",
                             R"({"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 40}, "minItems": 1, "maxItems": 30})",
                             R"({"type": "string", "pattern": "^[a-zA-Z ]{3,60}$"})", R"({"type": "number", "minimum": -12.5, "maximum": 1000})",
                             R"({"enum": ["red", "green", "blue", 12, null, "große"]})",
                             R"({"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"v": {"type": ["string", "boolean"]}, "c": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "required": ["v", "c"]}}})",
                             R"({"type": "object", "properties": {"id": {"type": "string", "format": "uuid"}, "at": {"type": "string", "format": "date-time"}}, "additionalProperties": {"type": "integer"}, "required": ["id"]})"})
    shapes.push_back(shape_of(format(kSchema, schema)));
  shapes.push_back(shape_of(format(kRegex, "(\\d{1,3}\\.){3}\\d{1,3}|[a-f]{2,}(-[a-z]+)*")));
  shapes.push_back(shape_of(format(kRegex, "[^\\n]{30,200}")));
  shapes.push_back(shape_of(format(kGrammar, "root ::= expr\nexpr ::= term ([-+*/] term)*\nterm ::= [0-9]+ | \"(\" expr \")\"")));
  ContentFormat choice;
  choice.kind = ContentFormat::Kind::kChoice;
  choice.choices = {"positive", "negative", "neutral", "posit", "日本"};
  shapes.push_back(shape_of(choice));
  ContentFormat compact;
  compact.whitespace = false;
  shapes.push_back(shape_of(compact));
  for (const bool thinks : {false, true}) {
    OutputShape both = shapes[1];
    both.starts_in_reasoning = thinks;
    if (thinks) shapes.push_back(both);
    both.functions = {function("weather", kWeather, true), function("free", "", false)};
    shapes.push_back(both);
    both.content.reset();
    shapes.push_back(both);
  }
  OutputShape forced;
  forced.functions = {function("weather", kWeather, false), function("none", "", false), function("odd", R"({"type": "object", "properties": {"x": {"not": {}}}})", false)};
  forced.calls = OutputShape::Calls::kForced;
  shapes.push_back(forced);
  forced.functions.resize(1);
  forced.calls = OutputShape::Calls::kNamed;
  forced.parallel_calls = false;
  shapes.push_back(forced);
  return shapes;
}

/// Draws allowed tokens: mostly any, sometimes what ends things.
class Walk {
 public:
  Walk(Vocabulary& vocabulary, std::shared_ptr<const TokenGrammar> grammar, uint64_t seed)
      : v_(vocabulary), matcher_(std::move(grammar), {vocabulary.end}), random_(seed) {}

  [[nodiscard]] std::vector<uint32_t> mask() {
    std::vector<uint32_t> mask = v_.empty_mask();
    matcher_.fill_mask(mask);
    return mask;
  }
  /// False when the output has ended.
  bool step(size_t patience) {
    const std::vector<uint32_t> allowed = mask();
    const std::vector<int32_t> tokens = tokens_of(allowed);
    EXPECT_FALSE(tokens.empty()) << "a dead end behind: " << text_;
    if (tokens.empty()) return false;
    int32_t token = tokens[static_cast<size_t>(random_.next() % tokens.size())];
    if (taken_.size() > patience) {
      for (const char* closing : {"\n</parameter>\n", "</function>\n"}) {
        if (closes_calls_ && random_.next() % 2 == 0 && matcher_.accept_bytes(closing)) {
          text_ += closing;
          return true;
        }
      }
      // One that ends a string, a list, an object or a tag, if there is one.
      if (has(allowed, v_.end)) token = v_.end;
      for (const char* ending : {"</think>", "\"", "]", "}", "</", "\n", "<", ",", "0", "a"}) {
        const auto id = v_.tokenizer.token_to_id(ending);
        if (token != v_.end && id && has(allowed, *id) && random_.next() % 3 != 0) {
          token = *id;
          break;
        }
      }
    }
    if (token == v_.end) return false;
    EXPECT_TRUE(matcher_.accept(token)) << token;
    taken_.push_back(token);
    text_ += v_.tokenizer.token_bytes(token);
    return !matcher_.is_finished();
  }
  bool run(size_t patience, size_t limit) {
    while (taken_.size() < limit)
      if (!step(patience)) return true;
    return false;
  }
  void close_calls() { closes_calls_ = true; }
  GrammarMatcher& matcher() { return matcher_; }
  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] const std::vector<int32_t>& taken() const { return taken_; }
  SplitMix64& random() { return random_; }

 private:
  Vocabulary& v_;
  GrammarMatcher matcher_;
  SplitMix64 random_;
  bool closes_calls_ = false;  // tags of calls are written as a whole, now and then
  std::string text_;
  std::vector<int32_t> taken_;
};

std::shared_ptr<const TokenGrammar> compile(Vocabulary& v, const OutputShape& shape) {
  auto grammar = compile_output(shape, v.tokenizer, v.masks);
  EXPECT_OK(grammar);
  return grammar ? *grammar : nullptr;
}

/// The mask is exactly the set of tokens that can be accepted.
void expect_exact(Vocabulary& v, Walk& walk) {
  const std::vector<uint32_t> mask = walk.mask();
  int wrong = 0;
  for (int32_t token = 0; token < v.tokenizer.num_tokens() && wrong < 5; ++token) {
    const bool accepted = walk.matcher().accept(token);
    if (accepted) walk.matcher().rollback(1);
    if (accepted != has(mask, token)) {
      ++wrong;
      ADD_FAILURE() << (accepted ? "missing" : "too much") << ": token " << token << " \"" << v.tokenizer.token_bytes(token) << "\" behind: " << walk.text();
    }
  }
}

TEST(TokenMask, IsWhatTheAutomatonAcceptsTokenByToken) {
  uint64_t seed = 1;
  for (const OutputShape& shape : many_shapes()) {
    const auto grammar = compile(demo(), shape);
    ASSERT_NE(grammar, nullptr);
    SCOPED_TRACE(shape.key());
    for (int round = 0; round < 3; ++round) {
      Walk walk(demo(), grammar, seed++);
      for (int steps = 0; steps < 12; ++steps) {
        expect_exact(demo(), walk);
        if (::testing::Test::HasFailure()) return;
        if (!walk.step(6)) break;
      }
    }
  }
}

TEST(TokenMask, IsExactForALargeVocabulary) {
  for (const size_t i : {1u, 2u, 13u}) {
    const OutputShape shape = many_shapes()[i];
    const auto grammar = compile(standin(), shape);
    ASSERT_NE(grammar, nullptr);
    SCOPED_TRACE(shape.key());
    Walk walk(standin(), grammar, i);
    for (int steps = 0; steps < 8; ++steps) {
      expect_exact(standin(), walk);
      if (!walk.step(4)) break;
    }
  }
}

TEST(TokenMask, LetsNoControlTokenIntoText) {
  const auto grammar = compile(demo(), shape_of(format(kSchema, R"({"type": "string"})")));
  GrammarMatcher matcher(grammar, {demo().end});
  ASSERT_TRUE(matcher.accept_bytes("\"a<thin"));
  std::vector<uint32_t> mask = demo().empty_mask();
  matcher.fill_mask(mask);
  for (const int32_t token : tokens_of(mask)) EXPECT_FALSE(demo().tokenizer.is_added(token)) << token;
  EXPECT_TRUE(matcher.accept_bytes("k></think>\""));  // as text it may stand there
  EXPECT_TRUE(matcher.is_finished());
}

TEST(TokenMask, TakesDraftsBack) {
  uint64_t seed = 100;
  for (const OutputShape& shape : many_shapes()) {
    const auto grammar = compile(demo(), shape);
    Walk walk(demo(), grammar, seed++);
    SplitMix64 random(seed);
    for (int steps = 0; steps < 30; ++steps) {
      const std::vector<uint32_t> before = walk.mask();
      const int32_t accepted_before = walk.matcher().num_accepted();
      int32_t num_drafts = 0;
      for (uint64_t wanted = random.next() % 6; wanted > 0; --wanted) {
        std::vector<uint32_t> mask = demo().empty_mask();
        walk.matcher().fill_mask(mask);
        const std::vector<int32_t> tokens = tokens_of(mask);
        ASSERT_FALSE(tokens.empty());
        // An end of the output can be a draft, too.
        const int32_t draft = has(mask, demo().end) ? demo().end : tokens[static_cast<size_t>(random.next() % tokens.size())];
        ASSERT_TRUE(walk.matcher().accept(draft));
        ++num_drafts;
        if (walk.matcher().is_finished()) break;
      }
      walk.matcher().rollback(num_drafts);
      ASSERT_EQ(walk.matcher().num_accepted(), accepted_before);
      ASSERT_EQ(walk.mask(), before) << walk.text();
      if (!walk.step(10)) break;
    }
  }
}

TEST(TokenGrammar, AllowsTheEndExactlyWhereTheTextIsComplete) {
  const auto grammar = compile(demo(), shape_of(format(kRegex, "ab?c*")));
  GrammarMatcher matcher(grammar, {demo().end});
  const auto end_allowed = [&] {
    std::vector<uint32_t> mask = demo().empty_mask();
    matcher.fill_mask(mask);
    return has(mask, demo().end);
  };
  EXPECT_FALSE(end_allowed());
  ASSERT_TRUE(matcher.accept_bytes("a"));
  EXPECT_TRUE(end_allowed());
  EXPECT_FALSE(matcher.is_finished());
  ASSERT_TRUE(matcher.accept(demo().end));
  EXPECT_TRUE(matcher.is_finished());
  EXPECT_FALSE(matcher.accept_bytes("b"));
  matcher.rollback(1);
  EXPECT_TRUE(matcher.accept_bytes("b"));
  EXPECT_FALSE(matcher.accept_bytes("b"));
}

/// What comes out of any draw is JSON, valid UTF-8, and satisfies the schema.
TEST(RandomWalk, EndsInDocumentsThatSatisfyTheSchema) {
  std::ifstream file(std::string(QUERN_BINARY_DIR) + "/tests/data/schemas/corpus.jsonl");
  ASSERT_TRUE(file);
  int num_complete = 0, num_walks = 0;
  uint64_t seed = 7;
  for (std::string line; std::getline(file, line);) {
    if (++seed % 3 != 0) continue;  // some of the corpus
    const Json schema = (*parse_json(line, "line"))["schema"];
    const auto grammar = compile(demo(), shape_of(format(kSchema, dump_json(schema))));
    ASSERT_NE(grammar, nullptr) << dump_json(schema);
    const SchemaReader reader(schema, "schema");
    for (int round = 0; round < 2; ++round) {
      Walk walk(demo(), grammar, seed * 10 + static_cast<uint64_t>(round));
      ++num_walks;
      const bool complete = walk.run(8, 400);
      if (!complete) continue;
      ++num_complete;
      EXPECT_TRUE(is_valid_utf8(walk.text())) << walk.text();
      const auto json = parse_json(walk.text(), "text");
      ASSERT_TRUE(json) << dump_json(schema) << "\n" << walk.text();
      const auto matched = reader.matches(*json, Conjunction{reader.root()});
      ASSERT_OK(matched);
      EXPECT_TRUE(*matched) << dump_json(schema) << "\n" << walk.text();
    }
  }
  EXPECT_GT(num_complete, num_walks * 8 / 10) << num_walks;
}

TEST(RandomWalk, WritesCallsWhoseArgumentsSatisfyTheSchema) {
  OutputShape shape;
  shape.functions = {function("weather", kWeather, true)};
  shape.calls = OutputShape::Calls::kForced;
  const auto grammar = compile(demo(), shape);
  const Json tools = *parse_json(fmt::format(R"([{{"type": "function", "function": {{"name": "weather", "parameters": {}}}}}])", kWeather), "tools");
  const auto schemas = std::make_shared<const ToolSchemas>(*ToolSchemas::parse(tools));
  const Json parameters = *parse_json(kWeather, "schema");
  const SchemaReader reader(parameters, "schema");
  int num_calls = 0;
  for (uint64_t seed = 0; seed < 150; ++seed) {
    Walk walk(demo(), grammar, seed);
    walk.close_calls();
    if (!walk.run(6, 600)) continue;
    ToolCallParser parser(schemas, 1000);
    std::vector<std::string> arguments;
    std::string content;
    const auto take = [&](const ToolCallParser::Delta& delta) {
      content += delta.content;
      for (const ToolCallParser::Piece& piece : delta.pieces) {
        if (!piece.name.empty()) {
          EXPECT_EQ(piece.name, "weather");
          arguments.emplace_back();
        }
        arguments.back() += piece.arguments;
      }
    };
    take(parser.push("<tool_call>\n<function=" + walk.text()));
    take(parser.finish());
    EXPECT_EQ(content, "") << walk.text();
    EXPECT_GE(arguments.size(), 1u) << walk.text();
    for (const std::string& one : arguments) {
      ++num_calls;
      const auto json = parse_json(one, "arguments");
      ASSERT_TRUE(json) << walk.text() << "\n" << one;
      const auto matched = reader.matches(*json, Conjunction{reader.root()});
      ASSERT_OK(matched);
      EXPECT_TRUE(*matched) << walk.text() << "\n" << one;
    }
  }
  EXPECT_GT(num_calls, 100);
}

TEST(OutputShape, HoldsTheContentBehindReasoningOnly) {
  OutputShape shape = shape_of(format(kSchema, R"({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})"));
  shape.starts_in_reasoning = true;
  const auto grammar = compile(demo(), shape);
  const int32_t think_end = *demo().tokenizer.token_to_id("</think>"), call = *demo().tokenizer.token_to_id("<tool_call>");
  GrammarMatcher matcher(grammar, {demo().end});
  ASSERT_TRUE(matcher.accept_bytes("So {\"b\": 1} is </thin wrong. \xC3"));  // any bytes
  std::vector<uint32_t> mask = demo().empty_mask();
  matcher.fill_mask(mask);
  EXPECT_TRUE(has(mask, think_end));
  EXPECT_TRUE(has(mask, demo().end));
  EXPECT_FALSE(has(mask, call));  // it would end the reasoning, and there are no tools
  EXPECT_FALSE(matcher.is_complete());
  ASSERT_TRUE(matcher.accept(think_end));
  ASSERT_TRUE(matcher.accept_bytes("\n\n"));
  EXPECT_FALSE(matcher.accept_bytes("S"));
  ASSERT_TRUE(matcher.accept_bytes("{\"a\": 7}"));
  EXPECT_TRUE(matcher.is_finished());

  GrammarMatcher spelled(grammar, {demo().end});  // the tag, spelled out by other tokens
  ASSERT_TRUE(spelled.accept_bytes("x</think>{\"a\":"));
  EXPECT_FALSE(spelled.accept_bytes("\""));

  shape.starts_in_reasoning = false;
  GrammarMatcher direct(compile(demo(), shape), {demo().end});
  EXPECT_FALSE(direct.accept_bytes("S"));
  EXPECT_FALSE(direct.accept_bytes("\n"));
  EXPECT_TRUE(direct.accept_bytes("{"));
}

TEST(OutputShape, LetsAStrictFunctionBeCalledFromFreeText) {
  OutputShape shape;
  shape.starts_in_reasoning = true;
  shape.functions = {function("weather", kWeather, true), function("other", R"({"type": "object", "properties": {"x": {"type": "integer"}}})", false)};
  const auto grammar = compile(demo(), shape);
  const Tokenizer& t = demo().tokenizer;
  const int32_t think_end = *t.token_to_id("</think>"), call = *t.token_to_id("<tool_call>"), call_end = *t.token_to_id("</tool_call>");
  GrammarMatcher matcher(grammar, {demo().end});
  ASSERT_TRUE(matcher.accept_bytes("Hm."));
  ASSERT_TRUE(matcher.accept(think_end));
  ASSERT_TRUE(matcher.accept_bytes("\n\nI will look. "));
  EXPECT_TRUE(matcher.is_complete());
  ASSERT_TRUE(matcher.accept(call));
  EXPECT_FALSE(matcher.is_complete());
  EXPECT_FALSE(matcher.accept_bytes("\n<function=unknown>"));
  ASSERT_TRUE(matcher.accept_bytes("\n<function=weather>\n"));
  EXPECT_FALSE(matcher.accept_bytes("</function>"));  // city is required
  ASSERT_TRUE(matcher.accept_bytes("<parameter=city>\nParis </par\n</parameter>\n<parameter=days>\n3"));
  EXPECT_FALSE(matcher.accept_bytes("0"));
  ASSERT_TRUE(matcher.accept_bytes("\n</parameter>\n</function>\n"));
  ASSERT_TRUE(matcher.accept(call_end));
  EXPECT_TRUE(matcher.is_complete());
  ASSERT_TRUE(matcher.accept_bytes("\n"));
  ASSERT_TRUE(matcher.accept(call));
  ASSERT_TRUE(matcher.accept_bytes("\n<function=other>\n<parameter=whatever>\nnot an integer\n</parameter>\n</function>\n"));  // it is not strict
  ASSERT_TRUE(matcher.accept(call_end));
  EXPECT_TRUE(matcher.is_complete());

  GrammarMatcher from_reasoning(grammar, {demo().end});  // a call in the middle of reasoning ends it
  ASSERT_TRUE(from_reasoning.accept_bytes("Hm."));
  ASSERT_TRUE(from_reasoning.accept(call));
  EXPECT_FALSE(from_reasoning.accept_bytes("x"));
  EXPECT_TRUE(from_reasoning.accept_bytes("\n<function=weather>\n<parameter=city>"));
}

TEST(OutputShape, RefusesAStrictFunctionThatItCannotHold) {
  OutputShape shape;
  shape.functions = {function("f", R"({"type": "object", "properties": {"x": {"not": {}}}})", true)};
  const auto grammar = compile_output(shape, demo().tokenizer, demo().masks);
  ASSERT_FALSE(grammar);
  EXPECT_EQ(grammar.error().field, "tools[0].function.parameters");
  EXPECT_THAT(grammar.error().message, HasSubstr("#/properties/x/not"));
}

TEST(OutputShape, IsFreeWithoutFormatStrictOrForcedCalls) {
  OutputShape shape;
  EXPECT_TRUE(shape.is_free());
  shape.functions = {function("f", "", false)};
  EXPECT_TRUE(shape.is_free());
  shape.functions.front().strict = true;
  EXPECT_FALSE(shape.is_free());
  shape.functions.front().strict = false;
  shape.calls = OutputShape::Calls::kForced;
  EXPECT_FALSE(shape.is_free());
}

TEST(TokenMasks, AreSharedBetweenGrammarsWhereRulesAreEqual) {
  const auto first = compile(demo(), shape_of(format(kSchema, R"({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})")));
  const auto second = compile(demo(), shape_of(format(kSchema, R"({"type": "object", "properties": {"other": {"type": "string"}}, "required": ["other"]})")));
  const auto masks_of = [](const TokenGrammar& grammar) {
    std::set<const StateMask*> out;
    for (int32_t s = 0; s < grammar.automaton().num_states(); ++s) out.insert(&grammar.mask(s));
    return out;
  };
  const std::set<const StateMask*> a = masks_of(*first), b = masks_of(*second);
  std::vector<const StateMask*> shared;
  std::ranges::set_intersection(a, b, std::back_inserter(shared));
  EXPECT_GT(shared.size(), 5u);
  EXPECT_GT(first->size_bytes(), 1000u);
}

TEST(TokenTrie, ListsEveryTokenUnderItsBytes) {
  const TokenTrie& trie = demo().vocabulary->trie();
  std::set<int32_t> seen;
  std::string path;
  for (int32_t node = 0; node < trie.num_nodes(); ++node) {
    path.resize(static_cast<size_t>(trie.depth(node)));
    path += static_cast<char>(trie.byte(node));
    EXPECT_GT(trie.subtree_end(node), node);
    for (int32_t i = trie.first_value(node); i < trie.values_end(node); ++i) {
      const int32_t token = trie.values()[static_cast<size_t>(i)];
      EXPECT_EQ(demo().vocabulary->bytes(token), path);
      EXPECT_TRUE(seen.insert(token).second);
    }
  }
  EXPECT_GT(seen.size(), 8000u);
}

}  // namespace
}  // namespace quern::text
