#pragma once

#include "text/jinja_ast.h"

namespace quern::text::jinja {

/// Arithmetic, repetition and concatenation as in Python; kAnd and kOr are not among them.
Result<Value> apply_binary(Runtime& runtime, BinaryOp op, const Value& left, const Value& right);
Result<bool> apply_compare(Runtime& runtime, CompareOp op, const Value& left, const Value& right);
/// -operand or +operand
Result<Value> apply_sign(const Value& operand, bool negate);

}  // namespace quern::text::jinja
