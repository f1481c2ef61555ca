#include <gmock/gmock.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/hash.h"
#include "grammar_support.h"
#include "text/decimal_grammar.h"
#include "text/json_schema.h"

namespace quern::text {
namespace {

using ::testing::HasSubstr;

Result<TextJudge> schema(std::string_view text) { return TextJudge::of_schema(*parse_json(text, "schema")); }

struct Texts {
  const char* source;
  std::vector<std::string> right, wrong;
};

void check(const std::vector<Texts>& cases) {
  for (const Texts& c : cases) {
    const auto judge = schema(c.source);
    ASSERT_TRUE(judge) << c.source << ": " << judge.error().message;
    for (const std::string& text : c.right) EXPECT_TRUE(judge->accepts(text)) << c.source << "\nrefuses " << text << " at " << judge->stops_at(text);
    for (const std::string& text : c.wrong) EXPECT_FALSE(judge->accepts(text)) << c.source << "\naccepts " << text;
  }
}

TEST(JsonSchemaGrammar, WritesPropertiesInTheirOrderAndNoOthers) {
  check({
      {R"({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["b"]})",
       {R"({"a":1,"b":true})", R"({"b":false})", "{\n  \"a\": 1,\n  \"b\": true\n}"},
       {R"({"b":true,"a":1})", R"({"a":1})", R"({"b":true,"c":1})", R"({"a":1,"a":1,"b":true})", R"({"b":true,})"}},
      {R"({"type": "object", "properties": {"a": {}}, "additionalProperties": true})", {R"({"a":1,"b":2})", R"({"b":{"c":[]}})", "{}"}, {R"({"b":1,"a":2})", R"({"\u0061":1})"}},
      {R"({"type": "object"})", {"{}", R"({"x":[{"y":null}]})", R"({"\u0061":1})"}, {"[]", "1"}},
      {R"({"properties": {"a": {"type": "string"}}, "required": ["a", "z"]})", {R"({"a":"","z":[1]})", "3", "null"}, {R"({"a":""})"}},
      {R"({"type": "object", "properties": {"a": false, "b": true}})", {"{}", R"({"b":1})"}, {R"({"a":1})"}},
      {R"({"type": "object", "properties": {"ab": {}, "abc": {}, "": {}}})", {R"({"abc":1})", R"({"ab":1,"abc":1,"":0})", R"({"":0})"}, {R"({"a":1})"}},
      {R"({"type": "object", "properties": {"x": {"type": "integer"}}, "patternProperties": {"^s": {"type": "string"}, "n$": {"type": "number"}}, "additionalProperties": {"type": "null"}})",
       {R"({"x":1,"s1":"a","an":2.5,"q":null})", "{}"}, {R"({"s1":1})", R"({"q":1})", R"({"an":"a"})"}},
      {R"({"type": "object", "properties": {"sx": {"maxLength": 2}}, "patternProperties": {"^s": {"type": "string"}}, "additionalProperties": false})",
       {R"({"sx":"ab"})", R"({"sy":"abc"})"}, {R"({"sx":"abc"})", R"({"sx":1})", R"({"y":""})"}},
      {R"({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2, "maxProperties": 3})", {R"({"a":1,"b":2})", R"({"a":1,"b":2,"c":3})"},
       {R"({"a":1})", R"({"a":1,"b":2,"c":3,"d":4})", "{}"}},
      {R"({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2})", {R"({"a":1,"c":1})", R"({"a":1,"b":1,"c":1})"}, {R"({"b":1})", "{}"}},
  });
}

TEST(JsonSchemaGrammar, CountsExactlyHoweverMuch) {
  const auto judge = schema(R"({"type": "object", "properties": {"s": {"type": "string", "minLength": 30, "maxLength": 40000}, "l": {"type": "array", "items": {"type": "integer"}, "minItems": 25, "maxItems": 1000}}, "required": ["s"]})");
  ASSERT_OK(judge);
  EXPECT_LT(judge->automaton().num_states(), 1000);
  const auto text = [](size_t length, size_t items) {
    std::string out = "{\"s\":\"";
    for (size_t i = 0; i < length; ++i) out += i % 3 == 0 ? "é" : i % 3 == 1 ? "\\n" : "\\ud83d\\ude42";
    out += "\"";
    if (items > 0) {
      out += ",\"l\":[1";
      for (size_t i = 1; i < items; ++i) out += ", 2";
      out += "]";
    }
    return out + "}";
  };
  EXPECT_TRUE(judge->accepts(text(30, 25)));
  EXPECT_TRUE(judge->accepts(text(40000, 1000)));
  EXPECT_FALSE(judge->accepts(text(29, 25)));
  EXPECT_FALSE(judge->accepts(text(40001, 25)));
  EXPECT_FALSE(judge->accepts(text(30, 24)));
  EXPECT_FALSE(judge->accepts(text(30, 1001)));
  EXPECT_TRUE(judge->accepts(text(31, 0)));
}

TEST(JsonSchemaGrammar, KeepsStringsValid) {
  check({{R"({"type": "string"})",
          {R"("a")", R"("\u00e9\ud83d\ude42\/")", "\"日本🙂\""},
          {"\"\n\"", "\"\\x\"", "\"\xC3\"", "\"\xC3\x28\"", "\"\xED\xA0\x80\"", "\"\xF5\x80\x80\x80\"", R"("\ud83d")", R"("\ude42")", R"("\ud83d\u0041")", "\"a", "a"}}});
}

TEST(JsonSchemaGrammar, HoldsNumbersToTheirBounds) {
  check({
      {R"({"type": "integer"})", {"0", "-1", "1234567890123456789"}, {"-0", "01", "1.0", "1e3", "+1", "12345678901234567890", ""}},
      {R"({"type": "number"})", {"0", "-0.5", "1e5", "1.25E-10", "2e+299"}, {".5", "1.", "1e", "1e300", "00"}},
      {R"({"type": "integer", "minimum": -5, "maximum": 120})", {"-5", "-1", "0", "9", "99", "120"}, {"-6", "121", "-10", "1000", "-0"}},
      {R"({"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 11})", {"10"}, {"9", "11", "1", "100"}},
      {R"({"type": "integer", "minimum": 1.5})", {"2", "10"}, {"1", "0", "-2"}},
      {R"({"type": "integer", "maximum": -100})", {"-100", "-101", "-1000"}, {"-99", "0", "100"}},
      {R"({"type": "integer", "minimum": 1e20})", {"100000000000000000000", "100000000000000000001"}, {"99999999999999999999"}},
      {R"({"type": "number", "minimum": 0.25, "maximum": 1.5})", {"0.25", "0.250", "1", "1.5", "1.4999"}, {"0.2499", "1.51", "0", "1e0", "-1"}},
      {R"({"type": "number", "exclusiveMinimum": 0, "maximum": 1})", {"0.001", "1", "1.000"}, {"0", "0.0", "1.01", "-0.5"}},
      {R"({"type": "number", "maximum": -0.5})", {"-0.5", "-3"}, {"-0.49", "0", "1"}},
      {R"({"type": "integer", "multipleOf": 7})", {"0", "7", "-14", "700"}, {"1", "-8"}},
      {R"({"type": "number", "multipleOf": 0.01})", {"0.25", "3", "-1.5"}, {"0.001", "1.255"}},
      {R"({"type": "integer", "multipleOf": 4, "minimum": 10, "maximum": 20})", {"12", "16", "20"}, {"8", "10", "24"}},
      {R"({"type": "number", "minimum": 5, "exclusiveMinimum": true})", {"5.1"}, {"5", "4"}},
      {R"({"type": "integer", "format": "int32"})", {"2147483647", "-2147483648"}, {"2147483648"}},
  });
}

TEST(JsonSchemaGrammar, CombinesSchemas) {
  check({
      {R"({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]})", {"1", R"("a")"}, {R"("ab")", "null"}},
      {R"({"oneOf": [{"const": 1}, {"enum": ["x", null]}]})", {"1", R"("x")", "null"}, {"2"}},
      {R"({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"b": {"type": "string"}}, "required": ["b"]}]})", {R"({"a":1,"b":""})"}, {R"({"a":1})"}},
      {R"({"allOf": [{"properties": {"a": {"minimum": 3}}}, {"properties": {"a": {"type": "integer", "maximum": 5}}, "required": ["a"]}], "type": "object"})", {R"({"a":4})"}, {R"({"a":2})", R"({"a":6})", R"({"a":"x"})"}},
      {R"({"type": ["string", "null"]})", {R"("a")", "null"}, {"1"}},
      {R"({"type": "string", "nullable": true, "maxLength": 2})", {R"("a")", "null"}, {"1", R"("abc")"}},
      {R"({"enum": ["a", "bb", 3], "minLength": 2})", {R"("bb")", "3"}, {R"("a")"}},
      {R"({"type": "string", "enum": ["a", 3]})", {R"("a")"}, {"3"}},
      {R"({"const": {"a": [1, "x"]}})", {R"({"a":[1,"x"]})", R"({"a": [1, "x"]})"}, {R"({"a":[1]})"}},
      {R"({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}, {"not_a_keyword": 1}], "maximum": 2})", {"2"}, {"3", "1"}},
      {R"({"items": [{"type": "integer"}], "additionalItems": {"type": "string"}, "type": "array"})", {"[1]", R"([1,"a"])", "[]"}, {R"(["a"])"}},
      {R"({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "minItems": 1})", {"[1]", "[1,2]", "[ 1, 2]"}, {"[]", "[1,2,3]", "[2]"}},
      {"true", {"1", "[]", R"({"a":null})"}, {""}},
      {R"({"minLength": 2})", {"1", R"("ab")", "[]"}, {R"("a")"}},
  });
}

TEST(JsonSchemaGrammar, FollowsReferencesIntoThemselves) {
  const auto judge = schema(R"({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}}, "required": ["next"]}}})");
  ASSERT_OK(judge);
  std::string open, close;
  for (int i = 0; i < 20000; ++i) open += "{\"next\":", close += "}";
  EXPECT_TRUE(judge->accepts(open + "null" + close));
  EXPECT_FALSE(judge->accepts(open + "null" + close + "}"));
  EXPECT_FALSE(judge->accepts(open + "1" + close));
}

TEST(JsonSchemaGrammar, BoundsWhiteSpace) {
  const auto judge = schema(R"({"type": "object", "properties": {"a": {"type": "array"}}})");
  ASSERT_OK(judge);
  EXPECT_TRUE(judge->accepts("{\"a\": [1, 2]}"));
  EXPECT_TRUE(judge->accepts("{\n\t\"a\": [\n" + std::string(64, ' ') + "1\n]\n}"));
  EXPECT_FALSE(judge->accepts("{  \"a\": []}"));
  EXPECT_FALSE(judge->accepts("{\n\n\"a\": []}"));
  EXPECT_FALSE(judge->accepts("{\n" + std::string(65, ' ') + "\"a\": []}"));
  EXPECT_FALSE(judge->accepts(" {}"));
  EXPECT_FALSE(judge->accepts("{} "));
  const auto compact = TextJudge::of_schema(*parse_json(R"({"type": "object", "properties": {"a": {"type": "array"}}})", ""), {.whitespace = false});
  ASSERT_OK(compact);
  EXPECT_TRUE(compact->accepts("{\"a\":[1,{\"b\":2}]}"));
  EXPECT_FALSE(compact->accepts("{\"a\": []}"));
}

TEST(JsonSchemaGrammar, NamesTheKeywordThatItDoesNotSupportAndItsPlace) {
  const std::vector<std::pair<const char*, std::vector<const char*>>> cases{
      {R"({"properties": {"a": {"not": {}}}})", {"#/properties/a/not", "\"not\""}},
      {R"({"if": {}})", {"\"if\""}},
      {R"({"items": {"uniqueItems": true}})", {"#/items/uniqueItems", "not supported"}},
      {R"({"contains": {}})", {"\"contains\""}},
      {R"({"dependentRequired": {}})", {"dependentRequired"}},
      {R"({"propertyNames": {}})", {"propertyNames"}},
      {R"({"unevaluatedProperties": {"type": "string"}})", {"unevaluatedProperties"}},
      {R"({"format": "phone"})", {"\"phone\"", "date-time"}},
      {R"({"$ref": "http://example.com/x"})", {"only references within"}},
      {R"({"$ref": "#/$defs/x"})", {"is not there"}},
      {R"({"$ref": "#"})", {"refers to itself"}},
      {R"({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"})", {"refers to itself"}},
      {R"({"type": "strin"})", {"#/type", "types are"}},
      {R"({"type": []})", {"#/type"}},
      {R"({"properties": 3})", {"#/properties"}},
      {R"({"required": "a"})", {"#/required"}},
      {R"({"enum": []})", {"#/enum"}},
      {R"({"minLength": -1})", {"#/minLength"}},
      {R"({"maximum": "3"})", {"#/maximum"}},
      {R"({"multipleOf": 0})", {"#/multipleOf"}},
      {R"({"type": "integer", "multipleOf": 123457})", {"multipleOf"}},
      {R"({"pattern": "("})", {"#/pattern", "malformed"}},
      {R"-({"pattern": "(?=a)"})-", {"#/pattern", "lookahead"}},
      {R"({"anyOf": []})", {"#/anyOf"}},
      {R"({"properties": {"a/b~c": 3}})", {"#/properties/a~1b~0c"}},
      {R"({"items": 3})", {"#/items"}},
  };
  for (const auto& [source, words] : cases) {
    const auto judge = schema(source);
    ASSERT_FALSE(judge) << source;
    EXPECT_EQ(judge.error().field, "schema");
    for (const char* word : words) EXPECT_THAT(judge.error().message, HasSubstr(word)) << source;
  }
  for (const char* impossible : {"false", R"({"type": "string", "enum": [1]})", R"({"type": "array", "minItems": 3, "maxItems": 2})",
                                 R"({"allOf": [{"type": "string"}, {"type": "integer"}]})", R"({"type": "object", "properties": {"a": false}, "required": ["a"]})",
                                 R"({"type": "integer", "minimum": 3, "maximum": 2})", R"({"type": "string", "minLength": 3, "maxLength": 2})",
                                 R"({"type": "string", "minLength": 300, "maxLength": 200})", R"({"type": "string", "minLength": 3, "maxLength": 2, "pattern": "a"})"}) {
    const auto judge = schema(impossible);
    ASSERT_FALSE(judge) << impossible;
    EXPECT_THAT(judge.error().message, HasSubstr("no text at all")) << impossible;
  }
}

TEST(JsonSchemaGrammar, HoldsSchemasWithinBounds) {
  std::string deep = "{}";
  for (int i = 0; i < 60; ++i) deep = R"({"properties": {"a": )" + deep + R"(}, "required": ["a"], "type": "object"})";
  EXPECT_OK(schema(deep));
  std::string combinations = R"({"allOf": [)";
  for (int i = 0; i < 12; ++i) combinations += std::string(i > 0 ? "," : "") + R"({"anyOf": [{"minimum": 1}, {"maxLength": 2}]})";
  const auto judge = schema(combinations + "]}");
  ASSERT_FALSE(judge);
  EXPECT_THAT(judge.error().message, HasSubstr("combinations"));
  Json wide = {{"type", "object"}, {"properties", Json::object()}};
  for (int i = 0; i < 400; ++i) wide["properties"][fmt::format("property_{}", i)] = {{"type", "string"}};
  const auto many = TextJudge::of_schema(wide);
  ASSERT_OK(many);
  EXPECT_TRUE(many->accepts(R"({"property_7":"a","property_399":"b"})"));
}

/// Changed schemas either compile or are refused with a sentence.
TEST(JsonSchemaGrammar, SurvivesMalformedSchemas) {
  const Json seeds = *parse_json(
      R"([{"type": "object", "properties": {"a": {"type": "string", "pattern": "^a+$", "maxLength": 30}, "b": {"$ref": "#/$defs/x"}}, "required": ["a"], "$defs": {"x": {"anyOf": [{"type": "integer", "minimum": 3}, {"enum": [1, "a", null]}]}}},
          {"type": "array", "prefixItems": [{"const": 1}], "items": {"format": "date"}, "minItems": 1, "maxItems": 5},
          {"allOf": [{"patternProperties": {"^x": {"type": "number", "multipleOf": 0.5}}}, {"additionalProperties": false, "minProperties": 1}]}])",
      "");
  SplitMix64 random(11);
  const auto below = [&](size_t n) { return static_cast<size_t>(random.next() % n); };
  std::vector<Json> values{nullptr, true, false, 0, -1, 1.5, 1e300, "", "#", "#/", "(", "string", "object", Json::array(), Json::object(), Json::array({"string", 3})};
  const std::vector<std::string> keys{"type", "$ref", "properties", "items", "enum", "const", "pattern", "minimum", "maxLength", "minItems", "anyOf", "allOf", "required", "format", "additionalProperties", "multipleOf", "not", "prefixItems", "nullable"};
  int compiled = 0, refused = 0;
  for (int round = 0; round < 3000; ++round) {
    Json changed = seeds[below(seeds.size())];
    for (size_t changes = 1 + below(3); changes > 0; --changes) {
      Json* at = &changed;
      while (at->is_structured() && !at->empty() && below(4) != 0) {
        auto it = at->begin();
        std::advance(it, static_cast<std::ptrdiff_t>(below(at->size())));
        at = &*it;
      }
      if (at->is_object() && below(2) == 0) {
        (*at)[keys[below(keys.size())]] = below(3) == 0 ? changed : values[below(values.size())];
      } else {
        *at = values[below(values.size())];
      }
    }
    const auto judge = TextJudge::of_schema(changed);
    ++(judge ? compiled : refused);
    if (!judge) {
      EXPECT_FALSE(judge.error().message.empty());
      EXPECT_TRUE(judge.error().code == ErrorCode::kInvalidArgument || judge.error().code == ErrorCode::kUnsupported) << judge.error().message;
    }
  }
  EXPECT_GT(compiled, 300);
  EXPECT_GT(refused, 300);
}

TEST(Decimal, ComparesExactly) {
  const auto d = [](const char* text) { return decimal_of(*parse_json(text, "")); };
  EXPECT_EQ(compare(d("0.1"), d("0.10")), 0);
  EXPECT_EQ(compare(d("-0.0"), d("0")), 0);
  EXPECT_LT(compare(d("-2"), d("-1.5")), 0);
  EXPECT_GT(compare(d("1e3"), d("999.5")), 0);
  EXPECT_EQ(d("1.5e-7").fraction, "00000015");
  EXPECT_EQ(d("18446744073709551615").whole, "18446744073709551615");
}

/// Bounds against doubles, for many numbers near them.
TEST(Decimal, AutomataAgreeWithArithmetic) {
  SplitMix64 random(5);
  const auto number = [&] { return static_cast<int64_t>(random.next() % 4001) - 2000; };
  for (int round = 0; round < 300; ++round) {
    const int64_t low = number(), high = low + static_cast<int64_t>(random.next() % 50);  // in hundredths
    const bool exclusive = random.next() % 2 == 0;
    DecimalRange range;
    range.least = DecimalBound{decimal_of(static_cast<double>(low) / 100), exclusive};
    range.most = DecimalBound{decimal_of(static_cast<double>(high) / 100), exclusive};
    const auto dfa = decimal_dfa(range, false);
    ASSERT_OK(dfa);
    for (int i = 0; i < 60; ++i) {
      const int64_t x = low - 30 + static_cast<int64_t>(random.next() % 110);
      const bool wanted = exclusive ? low < x && x < high : low <= x && x <= high;
      const std::string text = fmt::format("{}{}.{:02}", x < 0 ? "-" : "", std::abs(x) / 100, std::abs(x) % 100);
      if (x == 0) continue;  // "-0.00" is not written
      EXPECT_EQ(dfa->accepts(text), wanted) << text << " of " << low << " to " << high << (exclusive ? " exclusive" : "");
    }
  }
}

}  // namespace
}  // namespace quern::text
