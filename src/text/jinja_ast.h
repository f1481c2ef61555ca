#pragma once

#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "text/jinja_builtins.h"
#include "text/jinja_value.h"

// The tree of a parsed template; immutable, shared by all renderings.

namespace quern::text::jinja {

struct Expr;
using ExprPtr = std::unique_ptr<const Expr>;
struct Stmt;
using Block = std::vector<Stmt>;

struct CallArguments {
  std::vector<ExprPtr> positional;
  std::vector<std::pair<std::string, ExprPtr>> named;
  ExprPtr star, star_star;  // *list and **dict, or null
};

enum class UnaryOp { kNot, kNegate, kPlus };
enum class BinaryOp { kAnd, kOr, kAdd, kSubtract, kMultiply, kDivide, kFloorDivide, kModulo, kPower, kConcat };
enum class CompareOp { kEqual, kNotEqual, kLess, kLessEqual, kGreater, kGreaterEqual, kIn, kNotIn };

/// A scalar or a string.
struct ConstantExpr {
  Value value;
};
struct NameExpr {
  std::string name;
};
struct ListExpr {
  std::vector<ExprPtr> items;
  bool is_tuple;
};
struct DictExpr {
  std::vector<std::pair<ExprPtr, ExprPtr>> entries;
};
struct AttributeExpr {
  ExprPtr object;
  std::string name;
};
struct SubscriptExpr {
  ExprPtr object, key;
};
/// The last three may be null.
struct SliceExpr {
  ExprPtr object, start, stop, step;
};
struct CallExpr {
  ExprPtr callee;
  CallArguments arguments;
};
/// No input: the body of a block.
struct FilterExpr {
  ExprPtr input;
  std::string name;
  Filter filter;
  CallArguments arguments;
};
struct TestExpr {
  ExprPtr input;
  Test test;
  CallArguments arguments;
};
struct UnaryExpr {
  UnaryOp op;
  ExprPtr operand;
};
struct BinaryExpr {
  BinaryOp op;
  ExprPtr left, right;
};
struct CompareExpr {
  ExprPtr first;
  std::vector<std::pair<CompareOp, ExprPtr>> rest;
};
/// Without else: Undefined.
struct ConditionalExpr {
  ExprPtr condition, then, otherwise;
};

struct Expr {
  std::variant<ConstantExpr, NameExpr, ListExpr, DictExpr, AttributeExpr, SubscriptExpr, SliceExpr, CallExpr, FilterExpr, TestExpr,
               UnaryExpr, BinaryExpr, CompareExpr, ConditionalExpr>
      node;
};

/// What is assigned to: a name, an attribute of a namespace, or a tuple of targets.
struct Target {
  std::string name, attribute;
  std::vector<Target> items;
};

struct MacroParameter {
  std::string name;
  ExprPtr fallback;
};

struct TextStmt {
  std::string text;
};
struct PrintStmt {
  ExprPtr value;
};
struct ForStmt {
  Target target;
  ExprPtr iterable, condition;
  Block body, otherwise;
};
struct IfStmt {
  std::vector<std::pair<ExprPtr, Block>> branches;
  Block otherwise;
};
struct SetStmt {
  Target target;
  ExprPtr value;
};
/// Filter: a chain of FilterExpr, or null.
struct SetBlockStmt {
  Target target;
  ExprPtr filter;
  Block body;
};
struct MacroStmt {
  std::string name;
  std::vector<MacroParameter> parameters;
  Block body;
  bool uses_varargs = false, uses_kwargs = false, uses_caller = false;
};
struct CallBlockStmt {
  ExprPtr call;
  MacroStmt caller;
};
struct FilterBlockStmt {
  ExprPtr filter;
  Block body;
};
/// Also {% generation %}: no variables.
struct WithStmt {
  std::vector<std::pair<Target, ExprPtr>> variables;
  Block body;
};
struct BreakStmt {};
struct ContinueStmt {};

struct Stmt {
  int line;
  std::variant<TextStmt, PrintStmt, ForStmt, IfStmt, SetStmt, SetBlockStmt, MacroStmt, CallBlockStmt, FilterBlockStmt, WithStmt, BreakStmt,
               ContinueStmt>
      node;
};

}  // namespace quern::text::jinja
