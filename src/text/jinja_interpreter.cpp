#include "text/jinja_interpreter.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "text/jinja_operators.h"

namespace quern::text::jinja {
namespace {

/// Variables of one block. Macros keep the scope in which they were defined alive.
class Scope {
 public:
  explicit Scope(std::shared_ptr<Scope> parent) : parent_(std::move(parent)) {}

  [[nodiscard]] const Value* find(std::string_view name) const {
    for (const Scope* scope = this; scope; scope = scope->parent_.get()) {
      for (const auto& [own_name, value] : scope->variables_) {
        if (own_name == name) return &value;
      }
    }
    return nullptr;
  }
  void set(std::string_view name, Value value) {
    for (auto& [own_name, own_value] : variables_) {
      if (own_name == name) {
        own_value = std::move(value);
        return;
      }
    }
    variables_.emplace_back(name, std::move(value));
  }

 private:
  std::vector<std::pair<std::string, Value>> variables_;
  std::shared_ptr<Scope> parent_;
};
using ScopePtr = std::shared_ptr<Scope>;

/// The variable `loop` of one for statement.
class Loop final : public Object {
 public:
  explicit Loop(std::vector<Value> items) : items_(std::move(items)) {}
  [[nodiscard]] const std::vector<Value>& items() const { return items_; }
  void move_to(size_t index) { index_ = index; }

  [[nodiscard]] std::string_view type_name() const override { return "LoopContext"; }
  bool set_attribute(std::string_view, Value) override { return false; }
  std::optional<Value> attribute(Runtime& runtime, std::string_view name) override {
    const auto integer = [](size_t i) { return Value(static_cast<int64_t>(i)); };
    if (name == "index") return integer(index_ + 1);
    if (name == "index0") return integer(index_);
    if (name == "revindex") return integer(items_.size() - index_);
    if (name == "revindex0") return integer(items_.size() - index_ - 1);
    if (name == "first") return index_ == 0;
    if (name == "last") return index_ + 1 == items_.size();
    if (name == "length") return integer(items_.size());
    if (name == "depth") return int64_t{1};
    if (name == "depth0") return int64_t{0};
    if (name == "previtem") return index_ > 0 ? items_[index_ - 1] : undefined_name("there is no previous item");
    if (name == "nextitem") return index_ + 1 < items_.size() ? items_[index_ + 1] : undefined_name("there is no next item");
    if (name == "cycle") {
      return runtime.make_callable({"cycle", [this](Runtime&, const Arguments& arguments) -> Result<Value> {
                                      if (arguments.positional.empty()) return invalid_argument("no items for cycling given");
                                      return arguments.positional[index_ % arguments.positional.size()];
                                    }});
    }
    if (name == "changed") {
      return runtime.make_callable({"changed", [this](Runtime& r, const Arguments& arguments) -> Result<Value> {
                                      const Value now = r.make_tuple(arguments.positional);
                                      ASSIGN_OR_RETURN(const bool same, equals(r, now, last_changed_));
                                      last_changed_ = now;
                                      return !same;
                                    }});
    }
    return std::nullopt;
  }

 private:
  const std::vector<Value> items_;
  size_t index_ = 0;
  Value last_changed_;
};

class Interpreter {
 public:
  explicit Interpreter(const RenderLimits& limits) : runtime_(limits) {}

  Result<std::string> run(const Block& block, const Json& context) {
    const auto scope = std::make_shared<Scope>(nullptr);
    for (const auto& [name, value] : context.items()) scope->set(name, runtime_.from_json(value));
    return capture(block, std::make_shared<Scope>(scope));
  }

 private:
  enum class Flow { kNext, kBreak, kContinue };

  // --- statements

  /// What the block prints.
  Result<std::string> capture(const Block& block, const ScopePtr& scope) {
    std::string text;
    std::string* const outer = std::exchange(out_, &text);
    const auto flow = run_block(block, scope);
    out_ = outer;
    if (!flow) return flow.error();
    return text;
  }

  Result<void> print(std::string_view text) {
    out_->append(text);
    return runtime_.check_text(out_->size());
  }

  Result<Flow> run_block(const Block& block, const ScopePtr& scope) {
    const Runtime::Nested nested(runtime_);
    RETURN_IF_ERROR(nested.check());
    for (const Stmt& statement : block) {
      Result<Flow> flow = run_statement(statement, scope);
      if (!flow) {
        if (std::exchange(runtime_.error_is_complete, true)) return flow;
        return flow.error().with_context(fmt::format("template line {}", statement.line));
      }
      if (*flow != Flow::kNext) return flow;
    }
    return Flow::kNext;
  }

  Result<Flow> run_statement(const Stmt& statement, const ScopePtr& scope) {
    RETURN_IF_ERROR(runtime_.charge(1));
    return std::visit([&](const auto& node) { return run(node, scope); }, statement.node);
  }

  Result<Flow> run(const TextStmt& node, const ScopePtr&) {
    RETURN_IF_ERROR(print(node.text));
    return Flow::kNext;
  }

  Result<Flow> run(const PrintStmt& node, const ScopePtr& scope) {
    ASSIGN_OR_RETURN(const Value value, evaluate(*node.value, scope));
    if (value.is_string()) {
      RETURN_IF_ERROR(print(value.text()));
    } else {
      ASSIGN_OR_RETURN(const std::string text, to_str(runtime_, value));
      RETURN_IF_ERROR(print(text));
    }
    return Flow::kNext;
  }

  Result<Flow> run(const ForStmt& node, const ScopePtr& scope) {
    ASSIGN_OR_RETURN(const Value iterable, evaluate(*node.iterable, scope));
    ASSIGN_OR_RETURN(std::vector<Value> items, iterate(runtime_, iterable));
    if (node.condition) {
      std::vector<Value> kept;
      for (Value& item : items) {
        const auto inner = std::make_shared<Scope>(scope);
        RETURN_IF_ERROR(assign(node.target, item, *inner));
        ASSIGN_OR_RETURN(const Value condition, evaluate(*node.condition, inner));
        if (truthy(condition)) kept.push_back(std::move(item));
      }
      items = std::move(kept);
    }
    if (items.empty()) return run_block(node.otherwise, std::make_shared<Scope>(scope));
    Loop* const loop = runtime_.make_object<Loop>(std::move(items));
    for (size_t i = 0; i < loop->items().size(); ++i) {
      loop->move_to(i);
      const auto inner = std::make_shared<Scope>(scope);
      inner->set("loop", loop);
      RETURN_IF_ERROR(assign(node.target, loop->items()[i], *inner));
      ASSIGN_OR_RETURN(const Flow flow, run_block(node.body, inner));
      if (flow == Flow::kBreak) break;
    }
    return Flow::kNext;
  }

  Result<Flow> run(const IfStmt& node, const ScopePtr& scope) {
    for (const auto& [condition, body] : node.branches) {
      ASSIGN_OR_RETURN(const Value value, evaluate(*condition, scope));
      if (truthy(value)) return run_block(body, scope);
    }
    return run_block(node.otherwise, scope);
  }

  Result<Flow> run(const SetStmt& node, const ScopePtr& scope) {
    ASSIGN_OR_RETURN(Value value, evaluate(*node.value, scope));
    RETURN_IF_ERROR(assign(node.target, std::move(value), *scope));
    return Flow::kNext;
  }

  Result<Flow> run(const SetBlockStmt& node, const ScopePtr& scope) {
    ASSIGN_OR_RETURN(std::string text, capture(node.body, std::make_shared<Scope>(scope)));
    ASSIGN_OR_RETURN(Value value, apply_filters(node.filter.get(), std::move(text), scope));
    RETURN_IF_ERROR(assign(node.target, std::move(value), *scope));
    return Flow::kNext;
  }

  Result<Flow> run(const FilterBlockStmt& node, const ScopePtr& scope) {
    ASSIGN_OR_RETURN(std::string text, capture(node.body, std::make_shared<Scope>(scope)));
    ASSIGN_OR_RETURN(const Value value, apply_filters(node.filter.get(), std::move(text), scope));
    ASSIGN_OR_RETURN(const std::string printed, to_str(runtime_, value));
    RETURN_IF_ERROR(print(printed));
    return Flow::kNext;
  }

  Result<Flow> run(const MacroStmt& node, const ScopePtr& scope) {
    scope->set(node.name, make_macro(node, scope));
    return Flow::kNext;
  }

  Result<Flow> run(const CallBlockStmt& node, const ScopePtr& scope) {
    const auto& call = std::get<CallExpr>(node.call->node);
    ASSIGN_OR_RETURN(Arguments arguments, evaluate_arguments(call.arguments, scope));
    arguments.named.emplace_back("caller", make_macro(node.caller, scope));
    ASSIGN_OR_RETURN(const Value callee, evaluate(*call.callee, scope));
    ASSIGN_OR_RETURN(const Value value, call_value(callee, arguments));
    ASSIGN_OR_RETURN(const std::string text, to_str(runtime_, value));
    RETURN_IF_ERROR(print(text));
    return Flow::kNext;
  }

  Result<Flow> run(const WithStmt& node, const ScopePtr& scope) {
    const auto inner = std::make_shared<Scope>(scope);
    for (const auto& [target, expr] : node.variables) {
      ASSIGN_OR_RETURN(Value value, evaluate(*expr, scope));
      RETURN_IF_ERROR(assign(target, std::move(value), *inner));
    }
    return run_block(node.body, inner);
  }

  Result<Flow> run(const BreakStmt&, const ScopePtr&) { return Flow::kBreak; }
  Result<Flow> run(const ContinueStmt&, const ScopePtr&) { return Flow::kContinue; }

  Result<void> assign(const Target& target, Value value, Scope& scope) {
    if (!target.attribute.empty()) {
      const Value* found = scope.find(target.name);
      if (!found) return undefined_error(undefined_name(target.name));
      if (!found->object() || !found->object()->set_attribute(target.attribute, std::move(value))) {
        return invalid_argument("cannot assign attribute on non-namespace object");
      }
      return {};
    }
    if (target.items.empty()) {
      scope.set(target.name, std::move(value));
      return {};
    }
    ASSIGN_OR_RETURN(std::vector<Value> items, iterate(runtime_, value));
    if (items.size() != target.items.size()) {
      return invalid_argument("cannot unpack {} values into {} names", items.size(), target.items.size());
    }
    for (size_t i = 0; i < items.size(); ++i) RETURN_IF_ERROR(assign(target.items[i], std::move(items[i]), scope));
    return {};
  }

  // --- macros

  Value make_macro(const MacroStmt& macro, const ScopePtr& scope) {
    return runtime_.make_callable(
        {macro.name, [this, &macro, scope](Runtime&, const Arguments& arguments) { return call_macro(macro, scope, arguments); }});
  }

  Result<Value> call_macro(const MacroStmt& macro, const ScopePtr& defined_in, const Arguments& arguments) {
    const auto scope = std::make_shared<Scope>(defined_in);
    const size_t num_parameters = macro.parameters.size();
    std::vector<std::optional<Value>> bound(num_parameters);
    const size_t num_positional = std::min(num_parameters, arguments.positional.size());
    std::copy_n(arguments.positional.begin(), num_positional, bound.begin());
    std::vector<Value> varargs(arguments.positional.begin() + static_cast<std::ptrdiff_t>(num_positional), arguments.positional.end());
    if (!varargs.empty() && !macro.uses_varargs) {
      return invalid_argument("macro '{}' takes not more than {} argument(s)", macro.name, num_parameters);
    }
    Dict* const kwargs = runtime_.make_dict();
    Value caller = undefined_name("caller");
    for (const auto& [name, value] : arguments.named) {
      const auto found = std::find_if(macro.parameters.begin(), macro.parameters.end(),
                                      [&, n = std::string_view(name)](const auto& p) { return p.name == n; });
      if (found != macro.parameters.end()) {
        auto& slot = bound[static_cast<size_t>(found - macro.parameters.begin())];
        if (slot) return invalid_argument("macro '{}' got multiple values for argument '{}'", macro.name, name);
        slot = value;
      } else if (name == "caller" && macro.uses_caller) {
        caller = value;
      } else if (macro.uses_kwargs) {
        kwargs->set(Value(name), value);
      } else {
        return invalid_argument("macro '{}' takes no keyword argument '{}'", macro.name, name);
      }
    }
    for (size_t i = 0; i < num_parameters; ++i) {
      const MacroParameter& parameter = macro.parameters[i];
      if (!bound[i] && parameter.fallback) {
        ASSIGN_OR_RETURN(bound[i], evaluate(*parameter.fallback, scope));
      }
      scope->set(parameter.name, bound[i] ? *bound[i] : undefined_name(parameter.name));
    }
    if (macro.uses_varargs) scope->set("varargs", runtime_.make_tuple(std::move(varargs)));
    if (macro.uses_kwargs) scope->set("kwargs", kwargs);
    if (macro.uses_caller) scope->set("caller", caller);
    ASSIGN_OR_RETURN(std::string text, capture(macro.body, scope));
    return Value(std::move(text));
  }

  // --- expressions

  Result<Value> evaluate(const Expr& expr, const ScopePtr& scope) {
    RETURN_IF_ERROR(runtime_.charge(1));
    const Runtime::Nested nested(runtime_);
    RETURN_IF_ERROR(nested.check());
    return std::visit([&](const auto& node) { return evaluate_node(node, scope); }, expr.node);
  }

  Result<Value> evaluate_node(const ConstantExpr& node, const ScopePtr&) { return node.value; }

  Result<Value> evaluate_node(const NameExpr& node, const ScopePtr& scope) {
    if (const Value* value = scope->find(node.name)) return *value;
    if (auto global = find_global(node.name)) return *std::move(global);
    return undefined_name(node.name);
  }

  Result<Value> evaluate_node(const ListExpr& node, const ScopePtr& scope) {
    std::vector<Value> items;
    items.reserve(node.items.size());
    for (const ExprPtr& item : node.items) {
      ASSIGN_OR_RETURN(Value value, evaluate(*item, scope));
      items.push_back(std::move(value));
    }
    return Value(runtime_.make_list(std::move(items), node.is_tuple ? List::Kind::kTuple : List::Kind::kList));
  }

  Result<Value> evaluate_node(const DictExpr& node, const ScopePtr& scope) {
    Dict* const dict = runtime_.make_dict();
    for (const auto& [key_expr, value_expr] : node.entries) {
      ASSIGN_OR_RETURN(const Value key, evaluate(*key_expr, scope));
      ASSIGN_OR_RETURN(Value value, evaluate(*value_expr, scope));
      if (key.is_undefined()) return undefined_error(key);
      RETURN_IF_ERROR(check_key(key));
      dict->set(key, std::move(value));
    }
    return Value(dict);
  }

  Result<Value> evaluate_node(const AttributeExpr& node, const ScopePtr& scope) {
    ASSIGN_OR_RETURN(const Value object, evaluate(*node.object, scope));
    return get_attribute(runtime_, object, node.name);
  }

  Result<Value> evaluate_node(const SubscriptExpr& node, const ScopePtr& scope) {
    ASSIGN_OR_RETURN(const Value object, evaluate(*node.object, scope));
    ASSIGN_OR_RETURN(const Value key, evaluate(*node.key, scope));
    return get_item(runtime_, object, key);
  }

  Result<Value> evaluate_node(const SliceExpr& node, const ScopePtr& scope) {
    ASSIGN_OR_RETURN(const Value object, evaluate(*node.object, scope));
    const auto part = [&](const ExprPtr& expr) -> Result<std::optional<int64_t>> {
      if (!expr) return std::optional<int64_t>();
      ASSIGN_OR_RETURN(const Value value, evaluate(*expr, scope));
      if (value.is_none()) return std::optional<int64_t>();
      if (!value.integer()) return invalid_argument("slice indices must be integers or None, not {}", type_name(value));
      return value.integer();
    };
    ASSIGN_OR_RETURN(const auto start, part(node.start));
    ASSIGN_OR_RETURN(const auto stop, part(node.stop));
    ASSIGN_OR_RETURN(const auto step, part(node.step));
    return get_slice(runtime_, object, start, stop, step);
  }

  Result<Value> evaluate_node(const CallExpr& node, const ScopePtr& scope) {
    if (const auto* attribute = std::get_if<AttributeExpr>(&node.callee->node)) {  // a method: no need to make a value of it
      ASSIGN_OR_RETURN(const Value self, evaluate(*attribute->object, scope));
      const Method method = find_method(self, attribute->name);
      if (method) {
        ASSIGN_OR_RETURN(const Arguments arguments, evaluate_arguments(node.arguments, scope));
        RETURN_IF_ERROR(charge_for(self));
        ASSIGN_OR_RETURN(Value result, method(runtime_, self, arguments));
        return checked(std::move(result));
      }
      ASSIGN_OR_RETURN(const Value callee, get_attribute(runtime_, self, attribute->name));
      ASSIGN_OR_RETURN(const Arguments arguments, evaluate_arguments(node.arguments, scope));
      return call_value(callee, arguments);
    }
    ASSIGN_OR_RETURN(const Value callee, evaluate(*node.callee, scope));
    ASSIGN_OR_RETURN(const Arguments arguments, evaluate_arguments(node.arguments, scope));
    return call_value(callee, arguments);
  }

  Result<Value> evaluate_node(const FilterExpr& node, const ScopePtr& scope) {
    ASSIGN_OR_RETURN(Value input, evaluate(*node.input, scope));
    return apply_filter(node, std::move(input), scope);
  }

  Result<Value> evaluate_node(const TestExpr& node, const ScopePtr& scope) {
    ASSIGN_OR_RETURN(const Value input, evaluate(*node.input, scope));
    ASSIGN_OR_RETURN(const Arguments arguments, evaluate_arguments(node.arguments, scope));
    ASSIGN_OR_RETURN(const bool passed, node.test(runtime_, input, arguments));
    return Value(passed);
  }

  Result<Value> evaluate_node(const UnaryExpr& node, const ScopePtr& scope) {
    ASSIGN_OR_RETURN(const Value operand, evaluate(*node.operand, scope));
    if (node.op == UnaryOp::kNot) return Value(!truthy(operand));
    return apply_sign(operand, node.op == UnaryOp::kNegate);
  }

  Result<Value> evaluate_node(const BinaryExpr& node, const ScopePtr& scope) {
    ASSIGN_OR_RETURN(Value left, evaluate(*node.left, scope));
    if (node.op == BinaryOp::kAnd && !truthy(left)) return left;
    if (node.op == BinaryOp::kOr && truthy(left)) return left;
    ASSIGN_OR_RETURN(Value right, evaluate(*node.right, scope));
    if (node.op == BinaryOp::kAnd || node.op == BinaryOp::kOr) return right;
    ASSIGN_OR_RETURN(Value result, apply_binary(runtime_, node.op, left, right));
    return checked(std::move(result));
  }

  Result<Value> evaluate_node(const CompareExpr& node, const ScopePtr& scope) {
    ASSIGN_OR_RETURN(Value left, evaluate(*node.first, scope));
    for (const auto& [op, expr] : node.rest) {
      ASSIGN_OR_RETURN(Value right, evaluate(*expr, scope));
      ASSIGN_OR_RETURN(const bool holds, apply_compare(runtime_, op, left, right));
      if (!holds) return Value(false);
      left = std::move(right);
    }
    return Value(true);
  }

  Result<Value> evaluate_node(const ConditionalExpr& node, const ScopePtr& scope) {
    ASSIGN_OR_RETURN(const Value condition, evaluate(*node.condition, scope));
    if (truthy(condition)) return evaluate(*node.then, scope);
    if (node.otherwise) return evaluate(*node.otherwise, scope);
    return Value(
        Undefined{std::make_shared<const std::string>("the inline if-expression evaluated to false and no else section was defined")});
  }

  // --- calls

  Result<Arguments> evaluate_arguments(const CallArguments& node, const ScopePtr& scope) {
    Arguments arguments;
    arguments.positional.reserve(node.positional.size());
    for (const ExprPtr& expr : node.positional) {
      ASSIGN_OR_RETURN(Value value, evaluate(*expr, scope));
      arguments.positional.push_back(std::move(value));
    }
    if (node.star) {
      ASSIGN_OR_RETURN(const Value list, evaluate(*node.star, scope));
      ASSIGN_OR_RETURN(std::vector<Value> items, iterate(runtime_, list));
      std::move(items.begin(), items.end(), std::back_inserter(arguments.positional));
    }
    for (const auto& [name, expr] : node.named) {
      ASSIGN_OR_RETURN(Value value, evaluate(*expr, scope));
      arguments.named.emplace_back(name, std::move(value));
    }
    if (node.star_star) {
      ASSIGN_OR_RETURN(const Value dict, evaluate(*node.star_star, scope));
      if (!dict.dict()) return invalid_argument("argument after ** must be a mapping, not {}", type_name(dict));
      for (const auto& [key, value] : dict.dict()->entries) {
        if (!key.is_string()) return invalid_argument("keywords must be strings");
        arguments.named.emplace_back(key.text(), value);
      }
    }
    return arguments;
  }

  Result<Value> call_value(const Value& callee, const Arguments& arguments) {
    if (callee.is_undefined()) return undefined_error(callee);
    if (!callee.callable()) return invalid_argument("'{}' object is not callable", type_name(callee));
    ASSIGN_OR_RETURN(Value result, callee.callable()->call(runtime_, arguments));
    return checked(std::move(result));
  }

  Result<Value> apply_filter(const FilterExpr& node, Value input, const ScopePtr& scope) {
    ASSIGN_OR_RETURN(const Arguments arguments, evaluate_arguments(node.arguments, scope));
    RETURN_IF_ERROR(charge_for(input));
    ASSIGN_OR_RETURN(Value result, node.filter(runtime_, input, arguments));
    return checked(std::move(result));
  }

  /// A chain of filters without an input, applied to `text`.
  Result<Value> apply_filters(const Expr* chain, Value text, const ScopePtr& scope) {
    if (!chain) return text;
    const auto& node = std::get<FilterExpr>(chain->node);
    ASSIGN_OR_RETURN(Value input, apply_filters(node.input.get(), std::move(text), scope));
    return apply_filter(node, std::move(input), scope);
  }

  /// Charges for the size of what an operation is given or has made.
  Result<void> charge_for(const Value& value) {
    if (value.is_string()) return runtime_.charge(value.text().size() / 256);
    if (value.list()) return runtime_.charge(value.list()->items.size());
    return {};
  }
  Result<Value> checked(Value value) {
    if (value.is_string()) RETURN_IF_ERROR(runtime_.check_text(value.text().size()));
    RETURN_IF_ERROR(charge_for(value));
    return value;
  }

  Runtime runtime_;
  std::string* out_ = nullptr;
};

}  // namespace

Result<std::string> run_template(const Block& block, const Json& context, const RenderLimits& limits) {
  return Interpreter(limits).run(block, context);
}

}  // namespace quern::text::jinja
