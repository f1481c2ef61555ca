#pragma once

#include <string_view>

#include "base/result.h"
#include "text/finite_automaton.h"
#include "text/grammar.h"

namespace quern::text {

/// How characters stand in the output.
enum class CharForm : uint8_t {
  kText,        // as they are
  kJsonString,  // inside a JSON string: '"', '\' and control characters escaped in their shortest form, all others as they are
};

/// One character of the set in this form.
NodeId character(Grammar& grammar, const CodePointSet& set, CharForm form);
/// A fixed text in this form.
NodeId characters(Grammar& grammar, std::string_view utf8, CharForm form);

/// A regular expression as Python and ECMAScript have in common: classes and their escapes, . | () (?:) (?P<name>) ? * + {m,n}, lazy quantifiers (which
/// allow the same texts), \d \w \s (ASCII), \t \n \r \f \v \0 \xHH \uHHHH \u{H} \cX, and ^ $ at the ends of alternatives. `search`: a match
/// anywhere in the text is enough, as for JSON schema's pattern; else the whole text has to match.
/// Errors: kInvalidArgument with the place for what is malformed, kUnsupported for lookaround, back references, word boundaries and other
/// constructs, by name.
Result<NodeId> regex_node(Grammar& grammar, std::string_view pattern, CharForm form, bool search);
/// The same as an automaton, for products with others.
Result<Dfa> regex_dfa(std::string_view pattern, CharForm form, bool search);

}  // namespace quern::text
