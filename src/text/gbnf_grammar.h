#pragma once

#include <string_view>

#include "base/result.h"
#include "text/grammar.h"

namespace quern::text {

struct ParsedGrammar {
  Grammar grammar;
  RuleId root = 0;
};

/// A grammar in llama.cpp's GBNF and vLLM's EBNF:
///   name ::= alternatives of sequences of "text", [classes] and [^classes], ., names and (groups), each with ? * + {m,n}   # comment
/// Newlines may stand wherever the next line does not begin a rule. The rule "root" is the output.
/// Errors: kInvalidArgument with the line; kUnsupported for Lark, by name.
Result<ParsedGrammar> parse_gbnf(std::string_view text);

}  // namespace quern::text
