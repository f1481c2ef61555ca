#include "text/jinja_parser.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

#include "text/jinja_lexer.h"

namespace quern::text::jinja {
namespace {

constexpr int kMaxNesting = 100;  // of expressions and of statements
constexpr int kMaxChain = 300;    // operators, filters or subscripts in a row

template <class Node>
ExprPtr make_expr(Node node) {
  return std::make_unique<const Expr>(Expr{std::move(node)});
}

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  Result<Block> run() { return parse_block({}); }

 private:
  using Words = std::initializer_list<std::string_view>;

  // --- tokens

  [[nodiscard]] const Token& current() const { return tokens_[at_]; }
  [[nodiscard]] const Token& next() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  void advance() {
    if (at_ + 1 < tokens_.size()) ++at_;
  }
  [[nodiscard]] Error error(std::string_view message) const { return invalid_argument("line {}: {}", current().line, message); }
  [[nodiscard]] static bool is(const Token& token, TokenKind kind, std::string_view text) {
    return token.kind == kind && token.text == text;
  }
  [[nodiscard]] bool is_op(std::string_view op) const { return is(current(), TokenKind::kOperator, op); }
  [[nodiscard]] bool is_word(std::string_view word) const { return is(current(), TokenKind::kName, word); }
  [[nodiscard]] bool is_any_word(Words words) const {
    return current().kind == TokenKind::kName && std::find(words.begin(), words.end(), current().text) != words.end();
  }
  bool skip_op(std::string_view op) {
    if (!is_op(op)) return false;
    advance();
    return true;
  }
  bool skip_word(std::string_view word) {
    if (!is_word(word)) return false;
    advance();
    return true;
  }
  [[nodiscard]] std::string found() const {
    switch (current().kind) {
      case TokenKind::kText: return "text";
      case TokenKind::kPrintBegin: return "'{{'";
      case TokenKind::kPrintEnd: return "'}}'";
      case TokenKind::kBlockBegin: return "'{%'";
      case TokenKind::kBlockEnd: return "'%}'";
      case TokenKind::kEnd: return "the end of the template";
      default: return fmt::format("'{}'", current().text);
    }
  }
  Result<void> expect_op(std::string_view op) {
    if (skip_op(op)) return {};
    return error(fmt::format("expected '{}', found {}", op, found()));
  }
  Result<void> expect(TokenKind kind, std::string_view what) {
    if (current().kind != kind) return error(fmt::format("expected {}, found {}", what, found()));
    advance();
    return {};
  }
  Result<void> expect_block_end() { return expect(TokenKind::kBlockEnd, "'%}'"); }
  Result<std::string> expect_name() {
    if (current().kind != TokenKind::kName) return error(fmt::format("expected a name, found {}", found()));
    std::string name = current().text;
    advance();
    return name;
  }

  class Nesting {
   public:
    explicit Nesting(int& level) : level_(++level) {}
    ~Nesting() { --level_; }
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;

   private:
    int& level_;
  };
  Result<void> check_nesting() const {
    if (nesting_ > kMaxNesting) return error(fmt::format("nested more than {} levels deep", kMaxNesting));
    return {};
  }
  Result<void> check_chain(int length) const {
    if (length > kMaxChain) return error(fmt::format("more than {} operations in a row", kMaxChain));
    return {};
  }

  // --- statements

  /// Statements up to a tag whose name is in `ends`, or up to the end of the template when there are none.
  /// The tag's name is left as the current token.
  Result<Block> parse_block(Words ends) {
    const Nesting nesting(nesting_);
    RETURN_IF_ERROR(check_nesting());
    Block block;
    while (true) {
      const int line = current().line;
      switch (current().kind) {
        case TokenKind::kEnd:
          if (ends.size() != 0) return error(fmt::format("unexpected end of the template, expected '{{% {} %}}'", *(ends.end() - 1)));
          return block;
        case TokenKind::kText:
          block.push_back(Stmt{line, TextStmt{current().text}});
          advance();
          break;
        case TokenKind::kPrintBegin: {
          advance();
          ASSIGN_OR_RETURN(ExprPtr value, parse_tuple(true));
          RETURN_IF_ERROR(expect(TokenKind::kPrintEnd, "'}}'"));
          block.push_back(Stmt{line, PrintStmt{std::move(value)}});
          break;
        }
        default: {
          RETURN_IF_ERROR(expect(TokenKind::kBlockBegin, "a tag"));
          if (is_any_word(ends)) return block;
          ASSIGN_OR_RETURN(Stmt statement, parse_statement());
          block.push_back(std::move(statement));
        }
      }
    }
  }

  /// parse_block, then the end tag itself.
  Result<Block> parse_body(std::string_view end) {
    ASSIGN_OR_RETURN(Block body, parse_block({end}));
    advance();
    RETURN_IF_ERROR(expect_block_end());
    return body;
  }

  Result<Stmt> parse_statement() {
    const int line = current().line;
    ASSIGN_OR_RETURN(const std::string tag, expect_name());
    if (tag == "for") return parse_for(line);
    if (tag == "if") return parse_if(line);
    if (tag == "set") return parse_set(line);
    if (tag == "macro") {
      ASSIGN_OR_RETURN(std::string name, expect_name());
      ASSIGN_OR_RETURN(MacroStmt macro, parse_macro(std::move(name), "endmacro"));
      return Stmt{line, std::move(macro)};
    }
    if (tag == "call") return parse_call_block(line);
    if (tag == "filter") {
      ASSIGN_OR_RETURN(ExprPtr filter, parse_filter_chain(nullptr, true));
      RETURN_IF_ERROR(expect_block_end());
      ASSIGN_OR_RETURN(Block body, parse_body("endfilter"));
      return Stmt{line, FilterBlockStmt{std::move(filter), std::move(body)}};
    }
    if (tag == "with") return parse_with(line);
    if (tag == "generation") {
      RETURN_IF_ERROR(expect_block_end());
      ASSIGN_OR_RETURN(Block body, parse_body("endgeneration"));
      return Stmt{line, WithStmt{{}, std::move(body)}};
    }
    if (tag == "break" || tag == "continue") {
      if (loops_ == 0) return error(fmt::format("'{}' outside of a loop", tag));
      RETURN_IF_ERROR(expect_block_end());
      if (tag == "break") return Stmt{line, BreakStmt{}};
      return Stmt{line, ContinueStmt{}};
    }
    return invalid_argument("line {}: unknown or unsupported tag '{}'", line, tag);
  }

  Result<Stmt> parse_for(int line) {
    ForStmt loop;
    ASSIGN_OR_RETURN(loop.target, parse_target(false));
    if (loop.target.name == "loop") return error("cannot assign to 'loop' in a for statement");
    if (!skip_word("in")) return error(fmt::format("expected 'in', found {}", found()));
    ASSIGN_OR_RETURN(loop.iterable, parse_tuple(false));
    if (skip_word("if")) {
      ASSIGN_OR_RETURN(loop.condition, parse_expression());
    }
    if (is_word("recursive")) return error("recursive loops are not supported");
    RETURN_IF_ERROR(expect_block_end());
    ++loops_;
    ASSIGN_OR_RETURN(loop.body, parse_block({"else", "endfor"}));
    --loops_;
    if (skip_word("else")) {
      RETURN_IF_ERROR(expect_block_end());
      ASSIGN_OR_RETURN(loop.otherwise, parse_block({"endfor"}));
    }
    advance();
    RETURN_IF_ERROR(expect_block_end());
    return Stmt{line, std::move(loop)};
  }

  Result<Stmt> parse_if(int line) {
    IfStmt statement;
    while (true) {  // at the condition of an if or elif
      ASSIGN_OR_RETURN(ExprPtr condition, parse_tuple(false));
      RETURN_IF_ERROR(expect_block_end());
      ASSIGN_OR_RETURN(Block body, parse_block({"elif", "else", "endif"}));
      statement.branches.emplace_back(std::move(condition), std::move(body));
      if (!skip_word("elif")) break;
    }
    if (skip_word("else")) {
      RETURN_IF_ERROR(expect_block_end());
      ASSIGN_OR_RETURN(statement.otherwise, parse_block({"endif"}));
    }
    advance();
    RETURN_IF_ERROR(expect_block_end());
    return Stmt{line, std::move(statement)};
  }

  Result<Stmt> parse_set(int line) {
    ASSIGN_OR_RETURN(Target target, parse_target(true));
    if (skip_op("=")) {
      ASSIGN_OR_RETURN(ExprPtr value, parse_tuple(true));
      RETURN_IF_ERROR(expect_block_end());
      return Stmt{line, SetStmt{std::move(target), std::move(value)}};
    }
    ASSIGN_OR_RETURN(ExprPtr filter, parse_filter_chain(nullptr, false));
    RETURN_IF_ERROR(expect_block_end());
    ASSIGN_OR_RETURN(Block body, parse_body("endset"));
    return Stmt{line, SetBlockStmt{std::move(target), std::move(filter), std::move(body)}};
  }

  /// From the parameter list to the end tag; without parentheses there are no parameters.
  Result<MacroStmt> parse_macro(std::string name, std::string_view end) {
    MacroStmt macro;
    macro.name = std::move(name);
    RETURN_IF_ERROR(parse_parameters(macro));
    RETURN_IF_ERROR(expect_block_end());
    return parse_macro_body(std::move(macro), end);
  }

  Result<void> parse_parameters(MacroStmt& macro) {
    if (!skip_op("(")) return {};
    while (!skip_op(")")) {
      if (!macro.parameters.empty()) {
        RETURN_IF_ERROR(expect_op(","));
        if (skip_op(")")) break;
      }
      MacroParameter parameter;
      ASSIGN_OR_RETURN(parameter.name, expect_name());
      if (skip_op("=")) {
        ASSIGN_OR_RETURN(parameter.fallback, parse_expression());
      } else if (!macro.parameters.empty() && macro.parameters.back().fallback) {
        return error("a parameter without a default follows one with a default");
      }
      macro.parameters.push_back(std::move(parameter));
    }
    return {};
  }

  Result<MacroStmt> parse_macro_body(MacroStmt macro, std::string_view end) {
    const int outer_loops = std::exchange(loops_, 0);
    const auto outer_names = std::exchange(macro_names_, {});
    ASSIGN_OR_RETURN(macro.body, parse_body(end));
    macro.uses_varargs = macro_names_[0];
    macro.uses_kwargs = macro_names_[1];
    macro.uses_caller = macro_names_[2];
    macro_names_ = outer_names;
    loops_ = outer_loops;
    return macro;
  }

  Result<Stmt> parse_call_block(int line) {
    MacroStmt caller;
    caller.name = "caller";
    RETURN_IF_ERROR(parse_parameters(caller));
    ASSIGN_OR_RETURN(ExprPtr call, parse_expression());
    if (!std::holds_alternative<CallExpr>(call->node)) return error("expected a call");
    RETURN_IF_ERROR(expect_block_end());
    ASSIGN_OR_RETURN(caller, parse_macro_body(std::move(caller), "endcall"));
    return Stmt{line, CallBlockStmt{std::move(call), std::move(caller)}};
  }

  Result<Stmt> parse_with(int line) {
    WithStmt with;
    while (current().kind != TokenKind::kBlockEnd) {
      if (!with.variables.empty()) RETURN_IF_ERROR(expect_op(","));
      ASSIGN_OR_RETURN(Target target, parse_single_target());
      RETURN_IF_ERROR(expect_op("="));
      ASSIGN_OR_RETURN(ExprPtr value, parse_expression());
      with.variables.emplace_back(std::move(target), std::move(value));
    }
    RETURN_IF_ERROR(expect_block_end());
    ASSIGN_OR_RETURN(with.body, parse_body("endwith"));
    return Stmt{line, std::move(with)};
  }

  /// a | a, b | (a, b), c | ns.a
  Result<Target> parse_target(bool allow_attribute) {
    if (allow_attribute && current().kind == TokenKind::kName && is(next(), TokenKind::kOperator, ".")) {
      Target target;
      target.name = current().text;
      advance(), advance();
      ASSIGN_OR_RETURN(target.attribute, expect_name());
      return target;
    }
    ASSIGN_OR_RETURN(Target first, parse_single_target());
    if (!is_op(",")) return first;
    Target tuple;
    tuple.items.push_back(std::move(first));
    while (skip_op(",")) {
      if (current().kind != TokenKind::kName && !is_op("(")) break;
      if (is_word("in")) break;
      ASSIGN_OR_RETURN(Target item, parse_single_target());
      tuple.items.push_back(std::move(item));
    }
    return tuple;
  }

  Result<Target> parse_single_target() {
    const Nesting nesting(nesting_);
    RETURN_IF_ERROR(check_nesting());
    if (skip_op("(")) {
      ASSIGN_OR_RETURN(Target target, parse_target(false));
      RETURN_IF_ERROR(expect_op(")"));
      return target;
    }
    static constexpr std::string_view kReserved[] = {"true", "false", "none", "True", "False", "None"};
    Target target;
    ASSIGN_OR_RETURN(target.name, expect_name());
    if (std::find(std::begin(kReserved), std::end(kReserved), target.name) != std::end(kReserved)) {
      return error(fmt::format("cannot assign to '{}'", target.name));
    }
    return target;
  }

  // --- expressions, weakest binding first

  /// One expression, or several with commas between them, which make a tuple.
  Result<ExprPtr> parse_tuple(bool allow_conditional, bool allow_empty = false) {
    ListExpr tuple{{}, true};
    bool comma = false;
    while (!ends_tuple()) {
      if (!tuple.items.empty()) {
        if (!skip_op(",")) break;
        comma = true;
        if (ends_tuple()) break;
      }
      ASSIGN_OR_RETURN(ExprPtr item, allow_conditional ? parse_expression() : parse_or());
      tuple.items.push_back(std::move(item));
      if (!is_op(",")) break;
    }
    if (tuple.items.size() == 1 && !comma) return std::move(tuple.items[0]);
    if (tuple.items.empty() && !allow_empty) return error(fmt::format("expected an expression, found {}", found()));
    return make_expr(std::move(tuple));
  }
  [[nodiscard]] bool ends_tuple() const {
    return current().kind == TokenKind::kPrintEnd || current().kind == TokenKind::kBlockEnd || is_op(")");
  }

  Result<ExprPtr> parse_expression() {
    const Nesting nesting(nesting_);
    RETURN_IF_ERROR(check_nesting());
    ASSIGN_OR_RETURN(ExprPtr value, parse_or());
    for (int n = 1; skip_word("if"); ++n) {
      RETURN_IF_ERROR(check_chain(n));
      ASSIGN_OR_RETURN(ExprPtr condition, parse_or());
      ExprPtr otherwise;
      if (skip_word("else")) {
        ASSIGN_OR_RETURN(otherwise, parse_expression());
      }
      value = make_expr(ConditionalExpr{std::move(condition), std::move(value), std::move(otherwise)});
    }
    return value;
  }

  struct Operator {
    std::string_view text;
    BinaryOp op;
  };
  /// operand (operator operand)*, left to right.
  Result<ExprPtr> parse_chain(std::initializer_list<Operator> operators, TokenKind kind, Result<ExprPtr> (Parser::*operand)()) {
    ASSIGN_OR_RETURN(ExprPtr left, (this->*operand)());
    for (int n = 1;; ++n) {
      const auto* found_op =
          std::find_if(operators.begin(), operators.end(), [&](const Operator& o) { return is(current(), kind, o.text); });
      if (found_op == operators.end()) return left;
      RETURN_IF_ERROR(check_chain(n));
      advance();
      ASSIGN_OR_RETURN(ExprPtr right, (this->*operand)());
      left = make_expr(BinaryExpr{found_op->op, std::move(left), std::move(right)});
    }
  }
  Result<ExprPtr> parse_or() { return parse_chain({{"or", BinaryOp::kOr}}, TokenKind::kName, &Parser::parse_and); }
  Result<ExprPtr> parse_and() { return parse_chain({{"and", BinaryOp::kAnd}}, TokenKind::kName, &Parser::parse_not); }
  Result<ExprPtr> parse_not() {
    if (!is_word("not")) return parse_compare();
    const Nesting nesting(nesting_);
    RETURN_IF_ERROR(check_nesting());
    advance();
    ASSIGN_OR_RETURN(ExprPtr operand, parse_not());
    return make_expr(UnaryExpr{UnaryOp::kNot, std::move(operand)});
  }

  std::optional<CompareOp> skip_compare_op() {
    static constexpr std::pair<std::string_view, CompareOp> kOperators[] = {{"==", CompareOp::kEqual},  {"!=", CompareOp::kNotEqual},
                                                                            {"<", CompareOp::kLess},    {"<=", CompareOp::kLessEqual},
                                                                            {">", CompareOp::kGreater}, {">=", CompareOp::kGreaterEqual}};
    for (const auto& [text, op] : kOperators) {
      if (skip_op(text)) return op;
    }
    if (skip_word("in")) return CompareOp::kIn;
    if (is_word("not") && is(next(), TokenKind::kName, "in")) {
      advance(), advance();
      return CompareOp::kNotIn;
    }
    return std::nullopt;
  }
  Result<ExprPtr> parse_compare() {
    ASSIGN_OR_RETURN(ExprPtr first, parse_sum());
    CompareExpr compare;
    while (const auto op = skip_compare_op()) {
      RETURN_IF_ERROR(check_chain(static_cast<int>(compare.rest.size())));
      ASSIGN_OR_RETURN(ExprPtr operand, parse_sum());
      compare.rest.emplace_back(*op, std::move(operand));
    }
    if (compare.rest.empty()) return first;
    compare.first = std::move(first);
    return make_expr(std::move(compare));
  }

  Result<ExprPtr> parse_sum() {
    return parse_chain({{"+", BinaryOp::kAdd}, {"-", BinaryOp::kSubtract}}, TokenKind::kOperator, &Parser::parse_concat);
  }
  Result<ExprPtr> parse_concat() { return parse_chain({{"~", BinaryOp::kConcat}}, TokenKind::kOperator, &Parser::parse_product); }
  Result<ExprPtr> parse_product() {
    return parse_chain({{"*", BinaryOp::kMultiply}, {"/", BinaryOp::kDivide}, {"//", BinaryOp::kFloorDivide}, {"%", BinaryOp::kModulo}},
                       TokenKind::kOperator, &Parser::parse_power);
  }
  Result<ExprPtr> parse_power() { return parse_chain({{"**", BinaryOp::kPower}}, TokenKind::kOperator, &Parser::parse_unary); }

  /// A sign binds tighter than filters: -x|abs is (-x)|abs.
  Result<ExprPtr> parse_unary() {
    ASSIGN_OR_RETURN(ExprPtr value, parse_signed());
    return parse_filters_and_tests(std::move(value));
  }
  Result<ExprPtr> parse_signed() {
    if (is_op("-") || is_op("+")) {
      const Nesting nesting(nesting_);
      RETURN_IF_ERROR(check_nesting());
      const UnaryOp op = is_op("-") ? UnaryOp::kNegate : UnaryOp::kPlus;
      advance();
      ASSIGN_OR_RETURN(ExprPtr operand, parse_signed());
      return make_expr(UnaryExpr{op, std::move(operand)});
    }
    ASSIGN_OR_RETURN(ExprPtr value, parse_primary());
    return parse_postfix(std::move(value));
  }

  Result<ExprPtr> parse_primary() {
    const Token token = current();
    switch (token.kind) {
      case TokenKind::kName: {
        advance();
        if (token.text == "true" || token.text == "True") return make_expr(ConstantExpr{true});
        if (token.text == "false" || token.text == "False") return make_expr(ConstantExpr{false});
        if (token.text == "none" || token.text == "None") return make_expr(ConstantExpr{None{}});
        if (token.text == "varargs") macro_names_[0] = true;
        if (token.text == "kwargs") macro_names_[1] = true;
        if (token.text == "caller") macro_names_[2] = true;
        return make_expr(NameExpr{token.text});
      }
      case TokenKind::kString: {
        std::string text;
        while (current().kind == TokenKind::kString) {
          text += current().text;
          advance();
        }
        return make_expr(ConstantExpr{std::move(text)});
      }
      case TokenKind::kInteger: advance(); return make_expr(ConstantExpr{token.integer});
      case TokenKind::kFloat: advance(); return make_expr(ConstantExpr{token.number});
      case TokenKind::kOperator:
        if (skip_op("(")) {
          ASSIGN_OR_RETURN(ExprPtr inner, parse_tuple(true, true));
          RETURN_IF_ERROR(expect_op(")"));
          return inner;
        }
        if (skip_op("[")) return parse_list();
        if (skip_op("{")) return parse_dict();
        break;
      default: break;
    }
    return error(fmt::format("expected an expression, found {}", found()));
  }

  Result<ExprPtr> parse_list() {
    ListExpr list{{}, false};
    while (!skip_op("]")) {
      if (!list.items.empty()) {
        RETURN_IF_ERROR(expect_op(","));
        if (skip_op("]")) break;
      }
      ASSIGN_OR_RETURN(ExprPtr item, parse_expression());
      list.items.push_back(std::move(item));
    }
    return make_expr(std::move(list));
  }

  Result<ExprPtr> parse_dict() {
    DictExpr dict;
    while (!skip_op("}")) {
      if (!dict.entries.empty()) {
        RETURN_IF_ERROR(expect_op(","));
        if (skip_op("}")) break;
      }
      ASSIGN_OR_RETURN(ExprPtr key, parse_expression());
      RETURN_IF_ERROR(expect_op(":"));
      ASSIGN_OR_RETURN(ExprPtr value, parse_expression());
      dict.entries.emplace_back(std::move(key), std::move(value));
    }
    return make_expr(std::move(dict));
  }

  /// .name .0 [key] [a:b:c] (arguments)
  Result<ExprPtr> parse_postfix(ExprPtr value) {
    for (int n = 1;; ++n) {
      RETURN_IF_ERROR(check_chain(n));
      if (skip_op(".")) {
        if (current().kind == TokenKind::kInteger) {
          value = make_expr(SubscriptExpr{std::move(value), make_expr(ConstantExpr{current().integer})});
          advance();
        } else {
          ASSIGN_OR_RETURN(std::string name, expect_name());
          value = make_expr(AttributeExpr{std::move(value), std::move(name)});
        }
      } else if (skip_op("[")) {
        ASSIGN_OR_RETURN(value, parse_subscript(std::move(value)));
      } else if (is_op("(")) {
        CallExpr call{std::move(value), {}};
        ASSIGN_OR_RETURN(call.arguments, parse_arguments());
        value = make_expr(std::move(call));
      } else {
        return value;
      }
    }
  }

  Result<ExprPtr> parse_subscript(ExprPtr object) {
    std::array<ExprPtr, 3> parts;
    size_t colons = 0;
    while (!is_op("]")) {
      if (is_op(":") && colons < 2) {
        advance();
        ++colons;
      } else if (!parts[colons]) {
        ASSIGN_OR_RETURN(parts[colons], parse_expression());
      } else {
        return error(fmt::format("expected ']', found {}", found()));
      }
    }
    advance();
    if (colons > 0) return make_expr(SliceExpr{std::move(object), std::move(parts[0]), std::move(parts[1]), std::move(parts[2])});
    if (!parts[0]) return error("expected an expression, found ']'");
    return make_expr(SubscriptExpr{std::move(object), std::move(parts[0])});
  }

  Result<CallArguments> parse_arguments() {
    RETURN_IF_ERROR(expect_op("("));
    CallArguments arguments;
    for (bool first = true; !skip_op(")"); first = false) {
      if (!first) {
        RETURN_IF_ERROR(expect_op(","));
        if (skip_op(")")) break;
      }
      if (skip_op("**")) {
        if (arguments.star_star) return error("only one ** argument is allowed");
        ASSIGN_OR_RETURN(arguments.star_star, parse_expression());
      } else if (skip_op("*")) {
        if (arguments.star) return error("only one * argument is allowed");
        ASSIGN_OR_RETURN(arguments.star, parse_expression());
      } else if (current().kind == TokenKind::kName && is(next(), TokenKind::kOperator, "=")) {
        std::string name = current().text;
        advance(), advance();
        ASSIGN_OR_RETURN(ExprPtr value, parse_expression());
        arguments.named.emplace_back(std::move(name), std::move(value));
      } else {
        if (!arguments.named.empty() || arguments.star_star) return error("a positional argument follows a keyword argument");
        ASSIGN_OR_RETURN(ExprPtr value, parse_expression());
        arguments.positional.push_back(std::move(value));
      }
    }
    return arguments;
  }

  Result<ExprPtr> parse_filters_and_tests(ExprPtr value) {
    for (int n = 1;; ++n) {
      RETURN_IF_ERROR(check_chain(n));
      if (is_op("|")) {
        ASSIGN_OR_RETURN(value, parse_filter_chain(std::move(value), false));
      } else if (is_word("is")) {
        ASSIGN_OR_RETURN(value, parse_test(std::move(value)));
      } else if (is_op("(")) {
        CallExpr call{std::move(value), {}};
        ASSIGN_OR_RETURN(call.arguments, parse_arguments());
        value = make_expr(std::move(call));
      } else {
        return value;
      }
    }
  }

  /// (| name arguments?)*; with `at_name` the first bar is left out.
  Result<ExprPtr> parse_filter_chain(ExprPtr input, bool at_name) {
    for (int n = 1; at_name || skip_op("|"); at_name = false, ++n) {
      RETURN_IF_ERROR(check_chain(n));
      FilterExpr expr{std::move(input), {}, nullptr, {}};
      ASSIGN_OR_RETURN(expr.name, expect_name());
      expr.filter = find_filter(expr.name);
      if (!expr.filter) return error(fmt::format("no filter named '{}'", expr.name));
      if (is_op("(")) {
        ASSIGN_OR_RETURN(expr.arguments, parse_arguments());
      }
      input = make_expr(std::move(expr));
    }
    return input;
  }

  Result<ExprPtr> parse_test(ExprPtr input) {
    advance();
    const bool negated = skip_word("not");
    TestExpr expr{std::move(input), nullptr, {}};
    ASSIGN_OR_RETURN(const std::string name, expect_name());
    expr.test = find_test(name);
    if (!expr.test) return error(fmt::format("no test named '{}'", name));
    if (is_op("(")) {
      ASSIGN_OR_RETURN(expr.arguments, parse_arguments());
    } else if (begins_test_argument()) {
      ASSIGN_OR_RETURN(ExprPtr argument, parse_primary());
      ASSIGN_OR_RETURN(argument, parse_postfix(std::move(argument)));
      expr.arguments.positional.push_back(std::move(argument));
    }
    ExprPtr test = make_expr(std::move(expr));
    return negated ? make_expr(UnaryExpr{UnaryOp::kNot, std::move(test)}) : std::move(test);
  }
  /// `x is divisibleby 3`: an operand behind a test's name is its argument.
  [[nodiscard]] bool begins_test_argument() const {
    switch (current().kind) {
      case TokenKind::kName: return !is_any_word({"else", "or", "and", "if", "is", "in", "not"});
      case TokenKind::kString:
      case TokenKind::kInteger:
      case TokenKind::kFloat: return true;
      case TokenKind::kOperator: return is_op("[") || is_op("{");
      default: return false;
    }
  }

  const std::vector<Token> tokens_;
  size_t at_ = 0;
  int nesting_ = 0, loops_ = 0;
  std::array<bool, 3> macro_names_{};  // varargs, kwargs, caller are named in the macro that is being parsed
};

}  // namespace

Result<Block> parse_template(std::string_view source) {
  ASSIGN_OR_RETURN(std::vector<Token> tokens, tokenize(source));
  return Parser(std::move(tokens)).run();
}

}  // namespace quern::text::jinja
