#include "text/output_grammar.h"

#include <algorithm>
#include <utility>

#include "text/gbnf_grammar.h"
#include "text/json_grammar.h"
#include "text/json_schema_grammar.h"
#include "text/marked_text.h"
#include "text/regex_grammar.h"
#include "text/utf8.h"

namespace quern::text {
namespace {

constexpr int32_t kMaxLineBreaks = 4;  // between </think> and the answer

class OutputCompiler {
 public:
  OutputCompiler(const OutputShape& shape, const Tokenizer& tokenizer)
      : shape_(shape), think_end_(TextMark::of(tokenizer, "</think>")), call_begin_(TextMark::of(tokenizer, "<tool_call>")), call_end_(TextMark::of(tokenizer, "</tool_call>")) {}

  Result<std::shared_ptr<const TokenGrammar>> compile(TokenMasks& masks) {
    // A grammar of the user comes first: its rules keep their numbers.
    std::optional<RuleId> users;
    if (shape_.content && shape_.content->kind == ContentFormat::Kind::kGrammar) {
      ASSIGN_OR_RETURN(ParsedGrammar parsed, with_field(parse_gbnf(shape_.content->text)));
      grammar_ = std::move(parsed.grammar);
      users = parsed.root;
    }
    const RuleId root = grammar_.add_rule("output");
    NodeId content = -1;
    if (users) {
      content = grammar_.rule(*users);
    } else if (shape_.content) {
      ASSIGN_OR_RETURN(content, content_node(grammar_, *shape_.content));
    }
    ASSIGN_OR_RETURN(const NodeId output, whole(content));
    grammar_.define(root, output);
    return with_field(TokenGrammar::compile(grammar_, root, masks));
  }

 private:
  [[nodiscard]] std::string field() const {
    if (shape_.content) return shape_.content->field;
    return shape_.functions.empty() ? std::string() : "tools";
  }
  template <class T>
  Result<T> with_field(Result<T> result) const {
    if (result || !result.error().field.empty() || field().empty()) return result;
    Error error = result.error().with_context(field());
    error.field = field();
    return error;
  }

  /// content: the format's node, -1 without.
  Result<NodeId> whole(NodeId content) {
    if (shape_.calls != OutputShape::Calls::kAllowed) return forced_calls();
    const bool has_calls = !shape_.functions.empty();
    NodeId block = -1, calls = -1;
    if (has_calls) {
      ASSIGN_OR_RETURN(const NodeId one, call_block());
      block = grammar_.rule(grammar_.add_rule("tool call", one));
      calls = grammar_.sequence({block, more_calls(block)});  // behind <tool_call>
    }
    NodeId answer = content;
    if (has_calls) {
      answer = content >= 0 ? grammar_.choice({content, grammar_.sequence({mark(call_begin_), calls})}) : text_with_calls(block);
    }
    if (!shape_.starts_in_reasoning) return answer;
    // A call in the middle of reasoning ends it, as ReasoningSplitter sees it; where calls are not allowed none can begin.
    const NodeId line_breaks = grammar_.repeat(grammar_.literal("\n"), 0, kMaxLineBreaks);
    const NodeId thought = free("reasoning", text_until({think_end_}, {call_begin_}));
    NodeId out = grammar_.sequence({thought, line_breaks, answer});
    if (has_calls) {
      const NodeId cut_short = free("reasoning up to a call", text_until({call_begin_}, {think_end_}));
      const NodeId behind = content >= 0 ? calls : grammar_.sequence({block, text_with_calls(block)});
      out = grammar_.choice({out, grammar_.sequence({cut_short, behind})});
    }
    return out;
  }

  Result<NodeId> forced_calls() {
    ASSIGN_OR_RETURN(const NodeId block, call_block());
    NodeId first = -1;
    if (shape_.calls == OutputShape::Calls::kNamed) {
      ASSIGN_OR_RETURN(const NodeId arguments, arguments_of(shape_.functions.front()));
      first = grammar_.sequence({arguments, call_tail()});
    } else {
      ASSIGN_OR_RETURN(first, named_calls());
    }
    return grammar_.sequence({first, more_calls(grammar_.rule(grammar_.add_rule("tool call", block)))});
  }

  NodeId more_calls(NodeId block) {
    if (!shape_.parallel_calls) return grammar_.empty();
    return grammar_.repeat(grammar_.sequence({grammar_.literal("\n"), mark(call_begin_), block}), 0, Grammar::kUnbounded);
  }

  /// Free text, and calls in it.
  NodeId text_with_calls(NodeId block) {
    const NodeId up_to_call = free("text up to a call", text_until({call_begin_}, {}));
    return grammar_.sequence({grammar_.repeat(grammar_.sequence({up_to_call, block}), 0, Grammar::kUnbounded), free("text", text_without({call_begin_}))});
  }

  NodeId free(const char* name, const Dfa& dfa) { return grammar_.rule(grammar_.add_rule(name, dfa.as_node(grammar_))); }
  NodeId mark(const TextMark& mark) { return mark.token ? grammar_.token(*mark.token) : grammar_.literal(mark.text); }

  /// What follows <tool_call>.
  Result<NodeId> call_block() {
    ASSIGN_OR_RETURN(const NodeId calls, named_calls());
    return grammar_.sequence({grammar_.literal("\n<function="), calls});
  }
  /// What follows <function=.
  Result<NodeId> named_calls() {
    std::vector<NodeId> alternatives;
    for (const CallableFunction& function : shape_.functions) {
      ASSIGN_OR_RETURN(const NodeId arguments, arguments_of(function));
      alternatives.push_back(grammar_.sequence({grammar_.literal(function.name), grammar_.literal(">\n"), arguments, call_tail()}));
    }
    return grammar_.choice(std::move(alternatives));
  }
  NodeId call_tail() { return grammar_.sequence({grammar_.literal("</function>\n"), mark(call_end_)}); }

  Result<NodeId> arguments_of(const CallableFunction& function) {
    const bool held = function.strict || shape_.calls != OutputShape::Calls::kAllowed;
    if (function.parameters.is_null() && held) return grammar_.empty();
    if (!held) return any_tool_arguments_node(grammar_);
    auto node = tool_arguments_node(grammar_, function.parameters, function.field);
    if (node || function.strict) return node;
    return any_tool_arguments_node(grammar_);
  }

  const OutputShape& shape_;
  const TextMark think_end_, call_begin_, call_end_;
  Grammar grammar_;
};

}  // namespace

bool OutputShape::is_free() const {
  return !content && calls == Calls::kAllowed && std::ranges::none_of(functions, &CallableFunction::strict);
}

std::string OutputShape::key() const {
  Json key = Json::array();
  key.push_back(starts_in_reasoning);
  key.push_back(static_cast<int>(calls));
  key.push_back(parallel_calls);
  if (content) {
    key.push_back({static_cast<int>(content->kind), content->schema, content->text, content->choices, content->whitespace, content->field});
  }
  for (const CallableFunction& function : functions) key.push_back({function.name, function.parameters, function.strict, function.field});
  return dump_json(key);
}

Result<NodeId> content_node(Grammar& grammar, const ContentFormat& format) {
  const auto located = [&](Error error) {
    if (!error.field.empty()) return error;
    error = error.with_context(format.field);
    error.field = format.field;
    return error;
  };
  JsonGrammar json(grammar, {format.whitespace});
  switch (format.kind) {
    case ContentFormat::Kind::kJsonObject: return json.object();
    case ContentFormat::Kind::kJsonSchema: return json_schema_node(grammar, format.schema, format.field, {format.whitespace});
    case ContentFormat::Kind::kRegex: {
      auto node = regex_node(grammar, format.text, CharForm::kText, false);
      if (!node) return located(node.error());
      return node;
    }
    case ContentFormat::Kind::kChoice: {
      std::vector<NodeId> alternatives;
      for (const std::string& choice : format.choices) alternatives.push_back(grammar.literal(to_valid_utf8(choice)));
      return grammar.choice(std::move(alternatives));
    }
    case ContentFormat::Kind::kGrammar: {
      auto parsed = parse_gbnf(format.text);
      if (!parsed) return located(parsed.error());
      grammar = std::move(parsed->grammar);
      return grammar.rule(parsed->root);
    }
  }
  CHECK_UNREACHABLE();
}

Result<std::shared_ptr<const TokenGrammar>> compile_output(const OutputShape& shape, const Tokenizer& tokenizer, TokenMasks& masks) {
  return OutputCompiler(shape, tokenizer).compile(masks);
}

}  // namespace quern::text
