#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace quern::text::jinja {

enum class TokenKind {
  kText,        // between tags, white space control done
  kPrintBegin,  // {{
  kPrintEnd,    // }}
  kBlockBegin,  // {%
  kBlockEnd,    // %}
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct Token {
  TokenKind kind;
  int line;
  std::string text;  // text, name, operator, or the string without quotes and escapes
  int64_t integer = 0;
  double number = 0.0;
};

/// Cuts a template into tokens as jinja2 does with trim_blocks, lstrip_blocks and without keep_trailing_newline:
/// comments are gone, raw blocks are text. Errors: kInvalidArgument with the line.
Result<std::vector<Token>> tokenize(std::string_view source);

}  // namespace quern::text::jinja
