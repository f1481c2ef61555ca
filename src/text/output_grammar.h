#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "text/token_grammar.h"
#include "text/tokenizer.h"

namespace quern::text {

/// What the content of an answer has to be.
struct ContentFormat {
  enum class Kind : uint8_t { kJsonObject, kJsonSchema, kRegex, kChoice, kGrammar } kind = Kind::kJsonObject;
  Json schema;                       // kJsonSchema
  std::string text;                  // kRegex: the pattern, all of which has to match; kGrammar: GBNF
  std::vector<std::string> choices;  // kChoice
  bool whitespace = true;            // JsonStyle
  std::string field;                 // of the request, for errors
};

/// A function that calls are held to.
struct CallableFunction {
  std::string name;
  Json parameters;    // its schema; null: there is none
  bool strict = false;  // calls have to fit the schema; else they do where it is understood, and otherwise only have to be well formed
  std::string field;  // of the request, for errors
};

/// An output from its first token to its last: reasoning, then calls or content.
struct OutputShape {
  bool starts_in_reasoning = false;  // free up to </think>, and not there at all without
  std::optional<ContentFormat> content;
  std::vector<CallableFunction> functions;  // that may be called; empty: none
  enum class Calls : uint8_t {
    kAllowed,  // instead of content, or within content that has no format
    kForced,   // the output is a call, of which the prompt has the beginning up to "<function="
    kNamed,    // the same up to "<function=NAME>\n", with one function
  } calls = Calls::kAllowed;
  bool parallel_calls = true;  // several may follow one another

  /// Nothing has to be held to anything.
  [[nodiscard]] bool is_free() const;
  /// Equal outputs have equal keys.
  [[nodiscard]] std::string key() const;
};

/// Errors: those of the schema, expression or grammar, with the request's field.
Result<std::shared_ptr<const TokenGrammar>> compile_output(const OutputShape& shape, const Tokenizer& tokenizer, TokenMasks& masks);

/// The node of a format alone.
Result<NodeId> content_node(Grammar& grammar, const ContentFormat& format);

}  // namespace quern::text
