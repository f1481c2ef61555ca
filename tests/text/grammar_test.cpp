#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "grammar_support.h"
#include "text/gbnf_grammar.h"
#include "text/json_schema.h"
#include "text/regex_grammar.h"

namespace quern::text {
namespace {

using ::testing::HasSubstr;

Result<TextJudge> regex(std::string_view pattern, bool search = false, CharForm form = CharForm::kText) {
  Grammar grammar;
  ASSIGN_OR_RETURN(const NodeId node, regex_node(grammar, pattern, form, search));
  return TextJudge::of_node(std::move(grammar), node);
}

Result<TextJudge> gbnf(std::string_view text) {
  ASSIGN_OR_RETURN(ParsedGrammar parsed, parse_gbnf(text));
  return TextJudge::of_rule(parsed.grammar, parsed.root);
}

struct Texts {
  const char* source;
  std::vector<std::string> right, wrong;
};

TEST(Regex, AcceptsWhatMatchesAsAWhole) {
  const std::vector<Texts> cases{
      {"abc", {"abc"}, {"", "ab", "abcd", "xabc"}},
      {"", {""}, {"a"}},
      {"a|bc|", {"a", "bc", ""}, {"b", "abc"}},
      {"(ab)+c?", {"ab", "abab", "ababc"}, {"", "aba", "c"}},
      {"a{2}", {"aa"}, {"a", "aaa"}},
      {"a{2,}", {"aa", std::string(100, 'a')}, {"a"}},
      {"a{,2}", {"", "a", "aa"}, {"aaa"}},
      {"a{25,30}b", {std::string(25, 'a') + "b", std::string(30, 'a') + "b"}, {std::string(24, 'a') + "b", std::string(31, 'a') + "b"}},
      {"[a-z]{21,}[0-9a-c]", {std::string(22, 'a'), std::string(21, 'z') + "7"}, {std::string(21, 'a'), std::string(22, 'z')}},
      {"(?:a{22}){2}", {std::string(44, 'a')}, {std::string(43, 'a'), std::string(22, 'a'), std::string(45, 'a')}},
      {"a+?b*?", {"a", "aab"}, {"", "b"}},
      {"[abc]", {"a", "c"}, {"", "d", "ab"}},
      {"[^abc]", {"d", "é", "日", "🙂", "\n"}, {"a", ""}},
      {"[a-cx-z-]", {"b", "y", "-"}, {"d"}},
      {"[\\]a]*", {"]", "a]"}, {"b"}},
      {"[é-ü]+", {"éü", "ñ"}, {"e", "þþ "}},
      {"[\\u4e00-\\u9fff]{2}", {"日本"}, {"日", "ab"}},
      {"\\u{1F642}|\\ud83d\\ude00", {"🙂", "😀"}, {"🙃"}},
      {".", {"a", "é", "🙂"}, {"\n", "", "ab", "\xE2\x82"}},
      {"\\d+\\s\\w", {"12 a", "0\t_"}, {"a 1", "12"}},
      {"\\D\\S\\W", {"ab!"}, {"1b!", "a !", "abc"}},
      {"\\.\\*\\\\\\/\\-", {".*\\/-"}, {"a"}},
      {"\\x41\\x42\\t\\cJ", {"AB\t\n"}, {}},
      {"^abc$", {"abc"}, {"abcd"}},
      {"(?P<name>a)(?<other>b)", {"ab"}, {"a"}},
      {"a{b}", {"a{b}"}, {"ab"}},
      {"(^a|b)c", {"ac", "bc"}, {"c"}},
      {"(a|b$)", {"a", "b"}, {"ab"}},
      {"((a))*", {"", "aaa"}, {"b"}},
      {"(a*)*", {"", "aaa"}, {"b"}},
  };
  for (const Texts& c : cases) {
    const auto judge = regex(c.source);
    ASSERT_TRUE(judge) << c.source << ": " << judge.error().message;
    for (const std::string& text : c.right) EXPECT_TRUE(judge->accepts(text)) << c.source << " refuses " << text << " at " << judge->stops_at(text);
    for (const std::string& text : c.wrong) EXPECT_FALSE(judge->accepts(text)) << c.source << " accepts " << text;
  }
}

TEST(Regex, SearchesWhereAPatternIsAsked) {
  const std::vector<Texts> cases{
      {"b", {"abc", "b", "日b"}, {"", "ac"}},
      {"^b", {"bc"}, {"ab"}},
      {"b$", {"ab"}, {"bc"}},
      {"^$", {""}, {"a"}},
      {"^a|b$", {"ax", "xb", "a"}, {"xa", "bx"}},
      {"(^a)|(b$)", {"ax", "xb"}, {"xa"}},
      {"^(a|b$)", {"ax", "b"}, {"bx", "xa"}},
      {"[0-9]{21,25}", {"x" + std::string(21, '1') + "y", std::string(40, '2')}, {std::string(20, '1')}},
  };
  for (const Texts& c : cases) {
    const auto judge = regex(c.source, true);
    ASSERT_TRUE(judge) << c.source << ": " << judge.error().message;
    for (const std::string& text : c.right) EXPECT_TRUE(judge->accepts(text)) << c.source << " refuses " << text;
    for (const std::string& text : c.wrong) EXPECT_FALSE(judge->accepts(text)) << c.source << " accepts " << text;
  }
}

TEST(Regex, WritesJsonEscapesWhereTheyAreNeeded) {
  const auto judge = regex("^[\"\\\\\\n\\u0001é]+$", true, CharForm::kJsonString);
  ASSERT_OK(judge);
  EXPECT_TRUE(judge->accepts("\\\"\\\\\\n\\u0001é"));
  for (const char* text : {"\"", "\n", "\\", "\\t", "\x01"}) EXPECT_FALSE(judge->accepts(text)) << text;
}

TEST(Regex, NamesWhatItDoesNotSupport) {
  const std::vector<std::pair<const char*, const char*>> cases{
      {"a(?=b)", "lookahead"}, {"a(?!b)", "lookahead"}, {"(?<=a)b", "lookbehind"}, {"(?<!a)b", "lookbehind"}, {"(a)\\1", "back references"},
      {"(?P<x>a)(?P=x)", "back references"}, {"\\bword", "word boundaries"}, {"\\p{L}", "Unicode properties"}, {"(?i)a", "flags"},
      {"[[:alpha:]]", "POSIX"}, {"a^b", "anchors"}, {"a++", "possessive"}};
  for (const auto& [pattern, words] : cases) {
    const auto judge = regex(pattern);
    ASSERT_FALSE(judge) << pattern;
    EXPECT_THAT(judge.error().message, HasSubstr(words)) << pattern;
    EXPECT_EQ(judge.error().code, ErrorCode::kUnsupported) << pattern;
  }
}

TEST(Regex, SaysWhereItIsMalformed) {
  for (const char* pattern : {"(", "a)", "[a", "*a", "a{3,2}", "\\", "[z-a]", "a**", "\\q", "\\x4", "\\ud83d", "a{1000000}", "^*", "(?<a", "[]a]", "[^]", "[a-\\d]", "\xFF"}) {
    const auto judge = regex(pattern);
    ASSERT_FALSE(judge) << pattern;
    EXPECT_EQ(judge.error().code, ErrorCode::kInvalidArgument) << pattern << judge.error().message;
  }
  EXPECT_FALSE(regex(std::string(5000, '(') + std::string(5000, ')')));
}

TEST(Regex, IsRefusedWhenItsAutomatonWouldBeTooLarge) {
  const auto judge = regex("(.*a.{20}){2}b.*c.{19}x");
  ASSERT_FALSE(judge);
  EXPECT_THAT(judge.error().message, HasSubstr("too large"));
}

TEST(Gbnf, AcceptsWhatItsRulesSay) {
  const std::vector<Texts> cases{
      {"root ::= \"yes\" | \"no\"", {"yes", "no"}, {"", "maybe", "yesno"}},
      {"root ::= greeting \" \" name # a comment\ngreeting ::= \"hi\" | \"hello\"\nname ::= [A-Z] [a-z]*\n", {"hi Bob", "hello A"}, {"hi bob", "hi"}},
      {"# first\n\nroot ::=\n  \"a\"\n  | \"b\"\n  | (\"c\" \"d\"?)+\n", {"a", "cdc", "cc"}, {"ab", "d"}},
      {"root ::= [^\"\\n]{2,3}", {"ab", "日本語"}, {"a", "a\"", "abcd"}},
      {"root ::= \"\\x41\\u00e9\\U0001F642\\\"\\\\\" .", {"Aé🙂\"\\x"}, {"A"}},
      {"root ::= expr\nexpr ::= term (\"+\" term)*\nterm ::= [0-9]+ | \"(\" expr \")\"", {"1+2", "((1)+2)+33"}, {"1+", "(1", ""}},
      {"root ::= s\ns ::= \"a\" s \"b\" | \"\"", {"", "ab", "aaabbb"}, {"aab", "abb", "ba"}},
      {"root ::= list\nlist ::= \"x\" list | \"x\"", {"x", std::string(300, 'x')}, {"", "y"}},
      {"root ::= a*\na ::= b?\nb ::= \"b\"", {"", "bbb"}, {"a"}},
      {"root ::= (\"ab\" | \"a\") (\"c\" | \"bc\")", {"abc", "ac", "abbc"}, {"ab"}},
      {"root ::= [\\d]+ [\\s] [\\w-]", {"12 -", "1\ta"}, {"a b"}},
      {"root ::= 'single' [\\]\\-]", {"single]", "single-"}, {"single"}},
      {"SELECT-x ::= \"unused\"\nroot ::= select_statement\nselect_statement ::= \"SELECT \" column \" from \" table \" where \" condition\n"
       "column ::= \"col_1 \" | \"col_2 \"\ntable ::= \"table_1 \" | \"table_2 \"\ncondition ::= column \"= \" number\nnumber ::= \"1 \" | \"2 \"",
       {"SELECT col_1  from table_2  where col_2 = 1 "}, {"SELECT col_3  from table_2  where col_2 = 1 "}},
  };
  for (const Texts& c : cases) {
    const auto judge = gbnf(c.source);
    ASSERT_TRUE(judge) << c.source << ": " << judge.error().message;
    for (const std::string& text : c.right) EXPECT_TRUE(judge->accepts(text)) << c.source << "\nrefuses " << text << " at " << judge->stops_at(text);
    for (const std::string& text : c.wrong) EXPECT_FALSE(judge->accepts(text)) << c.source << "\naccepts " << text;
  }
}

TEST(Gbnf, SaysWhatIsWrong) {
  const std::vector<std::pair<std::string, const char*>> cases{
      {"", "no rules"},
      {"a ::= \"x\"", "no rule \"root\""},
      {"root ::= missing", "no rule \"missing\""},
      {"root ::= \"a\"\nroot ::= \"b\"", "two rules"},
      {"root ::= \"a", "no end"},
      {"root ::= [a", "no end"},
      {"root ::= (\"a\"", "no end"},
      {"root ::= \"a\"{3,1}", "malformed"},
      {"root ::= \"\\q\"", "escape"},
      {"root = \"a\"", "expected ::="},
      {"root ::= \"a\" )", "unexpected"},
      {"root ::= root \"a\" | \"a\"", "left-recursive"},
      {"root ::= a\na ::= b \"x\"\nb ::= \"\" a | \"y\"", "left-recursive"},
      {"root ::= \"a\" root", "no text at all"},
      {"start: \"a\" | \"b\"", "Lark"},
      {"%import common.WS\nroot ::= \"a\"", "Lark"},
      {"?start: expr\nexpr: \"a\"", "Lark"},
      {"root ::= " + std::string(3000, '(') + "\"a\"" + std::string(3000, ')'), "nested"},
  };
  for (const auto& [source, words] : cases) {
    const auto judge = gbnf(source);
    ASSERT_FALSE(judge) << source;
    EXPECT_THAT(judge.error().message, HasSubstr(words)) << source;
  }
}

TEST(Gbnf, SurvivesLongChainsOfRules) {
  std::string text = "root ::= r0\n";
  for (int i = 0; i < 5000; ++i) text += fmt::format("r{} ::= r{} | \"{}\"\n", i, i + 1, i);
  text += "r5000 ::= \"end\"\n";
  const auto judge = gbnf(text);
  if (judge) {
    EXPECT_TRUE(judge->accepts("4999"));
    EXPECT_TRUE(judge->accepts("end"));
  } else {
    EXPECT_THAT(judge.error().message, HasSubstr("too large"));
  }
}

/// Many rules that are each just small enough are too much together.
TEST(Gbnf, HasOneBoundForAllItsRules) {
  std::string text = "root ::= r0\n";
  for (int i = 0; i < 2000; ++i) text += fmt::format("r{} ::= \"x\" r{} \"y\" | (((\"a\"*){{20}}){{20}}){{20}}\n", i, (i + 1) % 2000);
  const auto judge = gbnf(text);
  ASSERT_FALSE(judge);
  EXPECT_THAT(judge.error().message, HasSubstr("too large"));
}

TEST(Gbnf, StaysSmallWhereItIsAmbiguous) {
  const auto judge = gbnf("root ::= s\ns ::= \"a\" s \"b\"? | \"a\"");
  ASSERT_OK(judge);
  EXPECT_TRUE(judge->accepts(std::string(2000, 'a')));
  EXPECT_TRUE(judge->accepts(std::string(200, 'a') + std::string(100, 'b')));
}

}  // namespace
}  // namespace quern::text
