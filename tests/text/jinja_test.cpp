#include <atomic>
#include <thread>
#include <vector>

#include "base/file.h"
#include "base/hash.h"
#include "support/test_support.h"
#include "text/jinja_template.h"

namespace quern::text::jinja {
namespace {

using quern::testing::data_path;

Result<std::string> render(std::string_view source, const Json& context = Json::object(), const RenderLimits& limits = {}) {
  ASSIGN_OR_RETURN(const Template parsed, Template::parse(source));
  return parsed.render(context, limits);
}

std::string message_of(std::string_view source, const Json& context = Json::object(), const RenderLimits& limits = {}) {
  const auto result = render(source, context, limits);
  return result ? "no error: " + *result : result.error().message;
}

/// What differs between the values that Python has and ours; jinja2 prints these.
bool prints_an_address(std::string_view text) { return text.find(" at 0x") != std::string_view::npos; }

TEST(Jinja, RendersEverySnippetAsJinja2Does) {
  const auto golden = read_json_file(data_path("templates/snippets.json"));
  ASSERT_OK(golden);
  const Json& context = (*golden)["context"];
  size_t num_texts = 0, num_errors = 0;
  for (const Json& expected : (*golden)["cases"]) {
    const auto& source = expected["template"].get_ref<const std::string&>();
    SCOPED_TRACE(source);
    const auto result = render(source, context);
    if (expected.contains("output")) {
      const auto& output = expected["output"].get_ref<const std::string&>();
      ASSERT_FALSE(prints_an_address(output));
      ++num_texts;
      EXPECT_OK(result);
      if (!result) continue;
      EXPECT_EQ(*result, output);
    } else if (expected.contains("raised")) {
      ASSERT_FALSE(result.has_value()) << *result;
      EXPECT_EQ(result.error().message, expected["raised"].get<std::string>());
    } else {
      ++num_errors;
      ASSERT_FALSE(result.has_value()) << *result << "\njinja2: " << expected["error"];
      EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
    }
  }
  EXPECT_GT(num_texts, 450u);
  EXPECT_GT(num_errors, 50u);
}

class QwenTemplate : public ::testing::TestWithParam<const char*> {};

TEST_P(QwenTemplate, RendersEveryConversationAsJinja2Does) {
  const std::string name = GetParam();
  const auto source = read_file(data_path("templates/" + name + ".jinja"));
  ASSERT_OK(source);
  const auto parsed = Template::parse(*source);
  ASSERT_OK(parsed);
  const auto golden = read_json_file(data_path("templates/conversations.json"));
  ASSERT_OK(golden);
  size_t number = 0, num_texts = 0, num_raised = 0;
  for (const Json& conversation : (*golden)["cases"]) {
    SCOPED_TRACE(fmt::format("conversation {0}; jinja2's text: tools/reference/template_golden.py --show {0} {1}", number++, name));
    const Json& expected = conversation["expected"][name];
    const auto result = parsed->render(conversation["context"]);
    if (expected.is_array()) {
      EXPECT_OK(result);
      if (!result) continue;
      EXPECT_EQ(result->size(), expected[0].get<size_t>()) << *result;
      EXPECT_EQ(fmt::format("{:016x}", fnv1a(*result)), expected[1].get<std::string>()) << *result;
      ++num_texts;
    } else {
      ASSERT_TRUE(expected.contains("raised")) << expected;
      ASSERT_FALSE(result.has_value()) << *result;
      EXPECT_EQ(result.error().message, expected["raised"].get<std::string>());
      ++num_raised;
    }
  }
  EXPECT_GE(number, 200u);
  EXPECT_GE(num_texts, 150u);
  EXPECT_GE(num_raised, 5u);
}
INSTANTIATE_TEST_SUITE_P(Jinja, QwenTemplate, ::testing::Values("qwen3.5", "qwen3.6", "qwen3.8"));

TEST(Jinja, NamesTheLineOfAParseError) {
  EXPECT_EQ(message_of("a\nb\n{% if x %}\n{% unknown %}"), "line 4: unknown or unsupported tag 'unknown'");
  EXPECT_EQ(message_of("\n\n{{ x | nosuch }}"), "line 3: no filter named 'nosuch'");
  EXPECT_EQ(message_of("{{ x is nosuch }}"), "line 1: no test named 'nosuch'");
  EXPECT_EQ(message_of("{% for x in y %}\n\n"), "line 2: unexpected end of the template, expected '{% endfor %}'");
  EXPECT_EQ(message_of("{{ 'a\nb'\n$ }}"), "line 3: unexpected character '$'");
  EXPECT_EQ(message_of("{% include 'x' %}"), "line 1: unknown or unsupported tag 'include'");
  EXPECT_EQ(message_of("\xff"), "the template is not valid UTF-8");
}

TEST(Jinja, NamesTheLineOfAnErrorWhenRenderingButNotOfAnExceptionRaisedByTheTemplate) {
  EXPECT_EQ(message_of("a\n{{ missing.x }}"), "template line 2: 'missing' is undefined");
  EXPECT_EQ(message_of("{% if true %}\n{% for x in [1] %}\n{{ {}.a.b }}\n{% endfor %}\n{% endif %}"),
            "template line 3: 'dict object' has no attribute 'a'");
  EXPECT_EQ(message_of("{% macro m() %}\n{{ raise_exception('as is') }}\n{% endmacro %}\n{{ m() }}"), "as is");
}

TEST(Jinja, StopsTemplatesThatRunForEver) {
  const std::string loops =
      "{% for a in range(1000) %}{% for b in range(1000) %}{% for c in range(1000) %}{{ c }}{% endfor %}{% endfor %}{% endfor %}";
  EXPECT_THAT(message_of(loops), ::testing::HasSubstr("the template"));
  EXPECT_THAT(message_of("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), ::testing::HasSubstr("nested too deeply"));
  EXPECT_THAT(message_of("{{ 'abcdefgh' * 1000000000000 }}"), ::testing::HasSubstr("a text of more than"));
  EXPECT_THAT(message_of("{{ [1] * 1000000000000 }}"), ::testing::HasSubstr("runs too long"));
  const std::string doubling = "{% set ns = namespace(s='ab') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}";
  EXPECT_THAT(message_of(doubling), ::testing::HasSubstr("a text of more than"));
  const std::string shared = "{% set ns = namespace(l=[1]) %}{% for i in range(64) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}";
  EXPECT_THAT(message_of(shared + "{{ ns.l }}"), ::testing::HasSubstr("the template"));
  EXPECT_THAT(message_of(shared + "{{ ns.l == ns.l + [] }}"), ::testing::HasSubstr("the template"));
  EXPECT_THAT(message_of("{{ range(5000) | list }}", Json::object(), RenderLimits{.max_steps = 1000}),
              ::testing::HasSubstr("more than 1000 steps"));
}

TEST(Jinja, SurvivesNestingInSourceAndValues) {
  for (const std::string_view open : {"(", "[", "{1:", "not ", "-", "a[", "f("}) {
    std::string source = "{{ ";
    for (int i = 0; i < 100'000; ++i) source += open;
    EXPECT_FALSE(Template::parse(source).has_value()) << open;
  }
  std::string chain = "{{ 1", ifs, ternary = "{{ 1";
  for (int i = 0; i < 100'000; ++i) chain += " + 1", ifs += "{% if a %}", ternary += " if a else 1";
  EXPECT_THAT(message_of(chain + " }}"), ::testing::HasSubstr("operations in a row"));
  EXPECT_THAT(message_of(ifs), ::testing::HasSubstr("levels deep"));
  EXPECT_THAT(message_of(ternary + " }}"), ::testing::HasSubstr("levels deep"));
  const std::string growing = "{% set ns = namespace(l=[]) %}{% for i in range(90000) %}{% set ns.l = [ns.l] %}{% endfor %}";
  EXPECT_EQ(message_of(growing + "{{ ns.l | length }}"), "no error: 1");
  EXPECT_THAT(message_of(growing + "{{ ns.l }}"), ::testing::HasSubstr("nested too deeply"));
  EXPECT_THAT(message_of(growing + "{{ ns.l | tojson }}"), ::testing::HasSubstr("nested too deeply"));
}

TEST(Jinja, AListMayHoldItselfWithoutHarm) {
  EXPECT_THAT(message_of("{% set l = [1] %}{{ l.append(l) }}{{ l }}"), ::testing::HasSubstr("nested too deeply"));
  EXPECT_THAT(message_of("{% set l = [1] %}{% set m = [1] %}{{ l.append(m) }}{{ m.append(l) }}{{ l == m }}"),
              ::testing::HasSubstr("the template"));
}

TEST(Jinja, ListsCanGrowInPlace) {
  EXPECT_EQ(
      message_of("{% set l = [] %}{% for x in 'abc' %}{% set _ = l.append(x) %}{% endfor %}{{ l }}{{ l.pop() }}{{ l.pop(0) }}{{ l }}"),
      "no error: ['a', 'b', 'c']ca['b']");
  EXPECT_THAT(message_of("{{ [].pop() }}"), ::testing::HasSubstr("pop index out of range"));
}

TEST(Jinja, OneTemplateServesManyThreads) {
  const auto source = read_file(data_path("templates/qwen3.6.jinja"));
  ASSERT_OK(source);
  const auto parsed = Template::parse(*source);
  ASSERT_OK(parsed);
  const Json context = Json::parse(R"({"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": true})");
  const auto expected = parsed->render(context);
  ASSERT_OK(expected);
  std::atomic<int> num_equal = 0;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 50; ++i) {
          const auto text = parsed->render(context);
          num_equal += text.has_value() && *text == *expected;
        }
      });
    }
  }
  EXPECT_EQ(num_equal, 200);
}

TEST(Jinja, StrftimeNowKnowsTheTime) {
  const auto year = render("{{ strftime_now('%Y-%m-%d') }}{{ strftime_now('') }}");
  ASSERT_OK(year);
  EXPECT_THAT(*year, ::testing::MatchesRegex("[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]"));
}

}  // namespace
}  // namespace quern::text::jinja
