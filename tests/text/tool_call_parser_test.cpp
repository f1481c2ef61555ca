#include "text/tool_call_parser.h"

#include <vector>

#include "base/hash.h"
#include "support/test_support.h"

namespace quern::text {
namespace {

using ::testing::HasSubstr;

constexpr const char* kTools = R"([
  {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}, "precise": {"type": "boolean"}, "scale": {"type": "number"},
    "tags": {"type": "array", "items": {"type": "string"}}, "place": {"$ref": "#/$defs/Place"}, "note": {"type": ["string", "null"]},
    "unit": {"enum": ["C", "F"]}, "level": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "any": {}},
    "$defs": {"Place": {"type": "object"}}}}},
  {"type": "function", "function": {"name": "now"}}
])";

std::shared_ptr<const ToolSchemas> tools() {
  static const auto kSchemas = std::make_shared<const ToolSchemas>(ToolSchemas::parse(parse_json(kTools, "tools").value()).value());
  return kSchemas;
}

struct Call {
  std::string name, arguments;
  friend bool operator==(const Call&, const Call&) = default;
};
struct Outcome {
  std::string content;
  std::vector<Call> calls;
  std::vector<std::pair<size_t, size_t>> runs = {};  // where the content stands: behind so many calls, so many bytes
  friend bool operator==(const Outcome& a, const Outcome& b) { return a.content == b.content && a.calls == b.calls; }
  friend std::ostream& operator<<(std::ostream& out, const Outcome& o) {
    out << "content [" << o.content << "]";
    for (const Call& call : o.calls) out << " " << call.name << "(" << call.arguments << ")";
    return out;
  }
};

Outcome parse_pieces(const std::vector<std::string_view>& pieces, size_t max_calls = SIZE_MAX) {
  ToolCallParser parser(tools(), max_calls);
  Outcome outcome;
  const auto add = [&](const ToolCallParser::Delta& delta) {
    outcome.content += delta.content;
    size_t in_runs = 0;
    for (const ToolCallParser::ContentRun& run : delta.runs) {
      if (outcome.runs.empty() || outcome.runs.back().first != run.calls_before) outcome.runs.emplace_back(run.calls_before, 0);
      outcome.runs.back().second += run.num_bytes;
      in_runs += run.num_bytes;
    }
    EXPECT_EQ(in_runs, delta.content.size());
    for (const ToolCallParser::Piece& piece : delta.pieces) {
      if (!piece.name.empty()) {
        EXPECT_EQ(piece.call, outcome.calls.size());
        outcome.calls.push_back({piece.name, {}});
      }
      ASSERT_LT(piece.call, outcome.calls.size());
      EXPECT_EQ(piece.call + 1, outcome.calls.size());  // one after the other
      outcome.calls[piece.call].arguments += piece.arguments;
    }
  };
  for (const std::string_view piece : pieces) add(parser.push(piece));
  add(parser.finish());
  EXPECT_EQ(parser.num_begun(), outcome.calls.size());
  EXPECT_EQ(parser.num_complete(), outcome.calls.size());
  return outcome;
}

struct Case {
  std::string text;
  Outcome expected;
};

std::string block(std::string_view body) { return fmt::format("<tool_call>\n{}\n</tool_call>", body); }
std::string weather(std::string_view parameters) { return block(fmt::format("<function=weather>\n{}</function>", parameters)); }
std::string parameter(std::string_view name, std::string_view value) { return fmt::format("<parameter={}>\n{}\n</parameter>\n", name, value); }

const std::vector<Case>& cases() {
  static const std::vector<Case> kCases = {
      // content
      {"", {"", {}}},
      {"plain text, a < b, </tool_call> and <tool>\n", {"plain text, a < b, </tool_call> and <tool>\n", {}}},
      {"ends like a call <tool_ca", {"ends like a call <tool_ca", {}}},
      // one call, several, with text around them
      {weather(parameter("city", "Paris")), {"", {{"weather", R"({"city": "Paris"})"}}}},
      {block("<function=now>\n</function>"), {"", {{"now", "{}"}}}},
      {"<tool_call><function=now></function></tool_call>", {"", {{"now", "{}"}}}},
      {"I will look.\n\n" + weather(parameter("city", "Oslo") + parameter("days", "3")), {"I will look.", {{"weather", R"({"city": "Oslo", "days": 3})"}}}},
      {weather(parameter("city", "Oslo")) + "\n" + weather(parameter("city", "Rome")) + "\n",
       {"", {{"weather", R"({"city": "Oslo"})"}, {"weather", R"({"city": "Rome"})"}}}},
      {"a\n" + block("<function=now>\n</function>") + "\nb\n" + block("<function=now>\n</function>") + "\n\n", {"ab", {{"now", "{}"}, {"now", "{}"}}}},
      // strings stay as they are, to the last newline
      {weather(parameter("city", "a \"b\" \\ } { \t 你好 🙂\n\n  x ")), {"", {{"weather", "{\"city\": \"a \\\"b\\\" \\\\ } { \\t 你好 🙂\\n\\n  x \"}"}}}},
      {weather(parameter("city", "\n\nlines\n")), {"", {{"weather", R"({"city": "\n\nlines\n"})"}}}},
      {weather(parameter("city", "")), {"", {{"weather", R"({"city": ""})"}}}},
      {weather("<parameter=city></parameter>"), {"", {{"weather", R"({"city": ""})"}}}},
      {weather("<parameter=city>inline</parameter>"), {"", {{"weather", R"({"city": "inline"})"}}}},
      {weather(parameter("city", "5")), {"", {{"weather", R"({"city": "5"})"}}}},
      {weather(parameter("city", "<b>x</b> </para </parameters <parameter=city>")),
       {"", {{"weather", R"({"city": "<b>x</b> </para </parameters <parameter=city>"})"}}}},
      {weather(parameter("city", "x\n<parameter=unknown>\ny")), {"", {{"weather", R"({"city": "x\n<parameter=unknown>\ny"})"}}}},
      {weather("<parameter=city>\r\nBonn\n</parameter>\n"), {"", {{"weather", R"({"city": "Bonn"})"}}}},
      // other types, by the schema
      {weather(parameter("days", "007") + parameter("scale", "1e400")), {"", {{"weather", R"({"days": "007", "scale": "1e400"})"}}}},
      {weather(parameter("days", " 12345678901234567890123 ")), {"", {{"weather", R"({"days": 12345678901234567890123})"}}}},
      {weather(parameter("precise", "True") + parameter("scale", "2.50")), {"", {{"weather", R"({"precise": true, "scale": 2.50})"}}}},
      {weather(parameter("tags", "[\"a\", \"}\"]") + parameter("place", "{\"x\": {\"y\": 1}}")),
       {"", {{"weather", R"({"tags": ["a", "}"], "place": {"x": {"y": 1}}})"}}}},
      {weather(parameter("note", "null")), {"", {{"weather", R"({"note": null})"}}}},
      {weather(parameter("note", "5")), {"", {{"weather", R"({"note": "5"})"}}}},
      {weather(parameter("unit", "C") + parameter("level", "None")), {"", {{"weather", R"({"unit": "C", "level": null})"}}}},
      {weather(parameter("any", "[1]")), {"", {{"weather", R"({"any": [1]})"}}}},
      {weather(parameter("any", "two words")), {"", {{"weather", R"({"any": "two words"})"}}}},
      {weather(parameter("precise", "maybe")), {"", {{"weather", R"({"precise": "maybe"})"}}}},
      {weather(parameter("tags", "a, b")), {"", {{"weather", R"({"tags": "a, b"})"}}}},
      {weather(parameter("days", "\"3\"")), {"", {{"weather", R"({"days": "3"})"}}}},
      // what nobody has declared
      {block("<function=unheard>\n<parameter=x>\n1\n</parameter>\n</function>"), {"", {{"unheard", R"({"x": 1})"}}}},
      {weather(parameter("extra", "word")), {"", {{"weather", R"({"extra": "word"})"}}}},
      {weather(parameter("city", "first") + parameter("city", "second")), {"", {{"weather", R"({"city": "first"})"}}}},
      // tags that are missing or malformed
      {weather("<parameter=city>\nBonn\n<parameter=days>\n2\n</parameter>\n"), {"", {{"weather", R"({"city": "Bonn", "days": 2})"}}}},
      {weather("<parameter=city>\nBonn\n"), {"", {{"weather", R"({"city": "Bonn"})"}}}},
      {weather("<parameter=city>\n"), {"", {{"weather", R"({"city": ""})"}}}},
      {block("<function=weather>\n<parameter=city>\nBonn"), {"", {{"weather", R"({"city": "Bonn"})"}}}},
      {block("<function=now>"), {"", {{"now", "{}"}}}},
      {"<tool_call>\n<function=now>\n</function>\nthat was it", {"that was it", {{"now", "{}"}}}},
      {"<tool_call>\n<function=now>\n<tool_call>\n<function=now>\n</function>\n</tool_call>", {"", {{"now", "{}"}, {"now", "{}"}}}},
      {block("<function=now>\n</function>\n<function=now>\n</function>"), {"", {{"now", "{}"}, {"now", "{}"}}}},
      {weather("<parameter=\ncity>\nBonn\n</parameter>\n" + parameter("days", "2")), {"", {{"weather", R"({"days": 2})"}}}},
      {weather("<parameter>\nBonn\n</parameter>\n<parameter city>\n" + parameter("days", "2")), {"", {{"weather", R"({"days": 2})"}}}},
      {weather("stray = text < 3\n" + parameter("days", "2") + "more"), {"", {{"weather", R"({"days": 2})"}}}},
      {weather("<parameter= city >\nBonn\n</parameter>"), {"", {{"weather", R"({"city": "Bonn"})"}}}},
      // no call at all
      {"see\n\n<tool_call>\n{\"name\": \"now\"}\n</tool_call>!", {"see\n\n<tool_call>\n{\"name\": \"now\"}\n</tool_call>!", {}}},
      {"<tool_call>\n<function=\nnow>\n</function>\n</tool_call>", {"<tool_call>\n<function=\nnow>\n</function>\n</tool_call>", {}}},
      {"<tool_call>", {"<tool_call>", {}}},
      {"<tool_call>\n<func", {"<tool_call>\n<func", {}}},
      {"<tool_call>\n<function=wea", {"<tool_call>\n<function=wea", {}}},
      {"<tool_call> <tool_call>\n<function=now>\n</function>\n</tool_call>", {"<tool_call>", {{"now", "{}"}}}},
      {"<function=now>\n</function>", {"<function=now>\n</function>", {}}},
  };
  return kCases;
}

// TOOL-43, TOOL-44, TOOL-49
TEST(ToolCallParser, ReadsCallsAndContent) {
  for (const Case& c : cases()) EXPECT_EQ(parse_pieces({c.text}), c.expected) << c.text;
}

TEST(ToolCallParser, TellsBehindWhichCallContentStands) {
  const Outcome outcome = parse_pieces({"ab\n" + block("<function=now>\n</function>") + "\ncde\n" + block("<function=now>\n</function>") + "f"});
  EXPECT_EQ(outcome.runs, (std::vector<std::pair<size_t, size_t>>{{0, 2}, {1, 3}, {2, 1}}));
}

TEST(ToolCallParser, CutsDoNotMatter) {
  SplitMix64 random(5);
  for (const Case& c : cases()) {
    const std::string_view text = c.text;
    const auto runs = parse_pieces({text}).runs;
    for (size_t cut = 0; cut <= text.size(); ++cut) {
      const Outcome outcome = parse_pieces({text.substr(0, cut), text.substr(cut)});
      ASSERT_EQ(outcome, c.expected) << c.text << " at " << cut;
      ASSERT_EQ(outcome.runs, runs) << c.text << " at " << cut;
    }
    std::vector<std::string_view> bytes;
    for (size_t i = 0; i < text.size(); ++i) bytes.push_back(text.substr(i, 1));
    ASSERT_EQ(parse_pieces(bytes), c.expected) << c.text;
    for (int round = 0; round < 50; ++round) {
      std::vector<std::string_view> pieces;
      for (size_t begin = 0; begin < text.size();) {
        const size_t size = random.next() % 9;
        pieces.push_back(text.substr(begin, size));
        begin += size;
      }
      ASSERT_EQ(parse_pieces(pieces), c.expected) << c.text;
    }
  }
}

// TOOL-44, TOOL-47
TEST(ToolCallParser, ArgumentsAreAnObjectWhereverTheStreamEnds) {
  for (const Case& c : cases()) {
    for (size_t end = 0; end <= c.text.size(); ++end) {
      const Outcome outcome = parse_pieces({std::string_view(c.text).substr(0, end)});
      for (const Call& call : outcome.calls) {
        const bool half_a_character = end < c.text.size() && (static_cast<unsigned char>(c.text[end]) & 0xc0) == 0x80;
        if (half_a_character) continue;  // the detokenizer holds those back
        const auto parsed = parse_json(call.arguments, "arguments");
        ASSERT_OK(parsed);
        ASSERT_TRUE(parsed->is_object()) << call.arguments;
      }
    }
  }
}

TEST(ToolCallParser, TellsNamesAndStringsAsTheyCome) {
  ToolCallParser parser(tools(), SIZE_MAX);
  EXPECT_TRUE(parser.push("<tool_call>\n<function=weather").pieces.empty());
  ToolCallParser::Delta delta = parser.push(">");
  ASSERT_EQ(delta.pieces.size(), 1u);
  EXPECT_EQ(delta.pieces[0].name, "weather");
  EXPECT_EQ(delta.pieces[0].arguments, "");
  delta = parser.push("\n<parameter=city>\nNew");
  ASSERT_EQ(delta.pieces.size(), 1u);
  EXPECT_EQ(delta.pieces[0].arguments, "{\"city\": \"New");
  EXPECT_EQ(parser.push(" York").pieces.at(0).arguments, " York");
  EXPECT_TRUE(parser.push("\n").pieces.empty());  // may belong to the closing tag
  EXPECT_EQ(parser.push("x").pieces.at(0).arguments, "\\nx");
  EXPECT_EQ(parser.push("\n</parameter>").pieces.at(0).arguments, "\"");
  EXPECT_EQ(parser.num_complete(), 0u);
  EXPECT_EQ(parser.push("\n</function>").pieces.at(0).arguments, "}");
  EXPECT_EQ(parser.num_complete(), 1u);
}

TEST(ToolCallParser, AfterTheLastAllowedCallNothingIsTold) {
  const std::string text = "a " + weather(parameter("days", "1")) + "\n" + weather(parameter("days", "2")) + " and more";
  for (size_t cut = 0; cut <= text.size(); ++cut)
    EXPECT_EQ(parse_pieces({std::string_view(text).substr(0, cut), std::string_view(text).substr(cut)}, 1), (Outcome{"a", {{"weather", R"({"days": 1})"}}}));
}

TEST(ToolCallParser, AnythingIsReadWithoutHarm) {
  constexpr std::string_view kParts[] = {"<tool_call>", "</tool_call>", "<function=", "weather>", "now>", "</function>", "<parameter=", "city>", "days>",
                                         "</parameter>", "\n", " ", "<", ">", "\"", "\\", "}", "{", "[1", "text", "\x01", "=", "/"};
  SplitMix64 random(11);
  for (int round = 0; round < 4000; ++round) {
    std::string text;
    for (size_t i = random.next() % 40; i > 0; --i) text += kParts[random.next() % std::size(kParts)];
    const Outcome whole = parse_pieces({text});
    for (const Call& call : whole.calls) {
      const auto parsed = parse_json(call.arguments, "arguments");
      ASSERT_TRUE(parsed && parsed->is_object()) << text << "\n" << call.arguments;
    }
    std::vector<std::string_view> bytes;
    for (size_t i = 0; i < text.size(); ++i) bytes.push_back(std::string_view(text).substr(i, 1));
    ASSERT_EQ(parse_pieces(bytes), whole) << text;
  }
}

TEST(ToolSchemas, RefusesWhatIsNoTool) {
  const auto error = [](const char* text) {
    const auto parsed = ToolSchemas::parse(parse_json(text, "tools").value());
    return parsed ? std::string("no error") : parsed.error().field + "|" + parsed.error().message;
  };
  EXPECT_THAT(error("{}"), HasSubstr("tools|"));
  EXPECT_THAT(error("[1]"), HasSubstr("tools[0].function|"));
  EXPECT_THAT(error(R"([{"type": "code_interpreter"}])"), HasSubstr("tools[0].type|"));
  EXPECT_THAT(error(R"([{"type": "function", "function": {"name": ""}}])"), HasSubstr("tools[0].function.name|"));
  EXPECT_THAT(error(R"([{"function": {"name": "f", "parameters": []}}])"), HasSubstr("tools[0].function.parameters|"));
  EXPECT_THAT(error(R"([{"function": {"name": "f"}}, {"function": {"name": "f"}}])"), HasSubstr("two tools"));
  EXPECT_EQ(error("null"), "no error");
  EXPECT_EQ(error(kTools), "no error");
}

TEST(ToolSchemas, KnowsTheTypesOfASchema) {
  const auto types = [](const char* schema) {
    const std::string text = fmt::format(
        R"([{{"function": {{"name": "f", "parameters": {{"properties": {{"p": {}}}, "$defs": {{"S": {{"type": "string"}}, "Loop": {{"$ref": "#/$defs/Loop"}}}}}}}}}}])", schema);
    return ToolSchemas::parse(parse_json(text, "tools").value()).value().types_of("f", "p");
  };
  EXPECT_EQ(types(R"({"type": "string"})"), unsigned{kJsonString});
  EXPECT_EQ(types(R"({"$ref": "#/$defs/S"})"), unsigned{kJsonString});
  EXPECT_EQ(types(R"({"allOf": [{"$ref": "#/$defs/S"}], "description": "x"})"), unsigned{kJsonString});
  EXPECT_EQ(types(R"({"$ref": "#/$defs/Loop"})"), unsigned{kJsonAny});
  EXPECT_EQ(types(R"({"$ref": "#/nowhere"})"), unsigned{kJsonAny});
  EXPECT_EQ(types(R"({"$ref": "#bad pointer"})"), unsigned{kJsonAny});
  EXPECT_EQ(types(R"({"type": "number"})"), kJsonNumber | kJsonInteger);
  EXPECT_EQ(types(R"({"enum": [1, null]})"), kJsonInteger | kJsonNumber | kJsonNull);
  EXPECT_EQ(types(R"({"const": true})"), unsigned{kJsonBoolean});
  EXPECT_EQ(types(R"({"type": "string", "nullable": true})"), kJsonString | kJsonNull);
  EXPECT_EQ(types(R"({"oneOf": [{"type": "string"}, {"type": "array"}]})"), kJsonString | kJsonArray);
  EXPECT_EQ(types(R"({"type": "string", "const": 5})"), unsigned{kJsonAny});
  EXPECT_EQ(types("true"), unsigned{kJsonAny});
}

}  // namespace
}  // namespace quern::text
