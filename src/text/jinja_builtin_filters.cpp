// What may follow `|`, with the parameters that jinja2 gives them.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <unordered_map>

#include "text/jinja_builtins.h"
#include "text/jinja_operators.h"
#include "text/jinja_strings.h"

namespace quern::text::jinja {
namespace {

/// An attribute path such as "function.name" or 0, looked up one part at a time.
Result<Value> lookup_path(Runtime& runtime, const Value& object, const Value& path) {
  if (!path.is_string()) return get_item(runtime, object, path);
  Value value = object;
  std::string_view rest = path.text();
  while (true) {
    const size_t dot = rest.find('.');
    const std::string_view part = rest.substr(0, dot);
    int64_t index = 0;
    const auto parsed = std::from_chars(part.data(), part.data() + part.size(), index);
    const bool is_index = !part.empty() && parsed.ec == std::errc() && parsed.ptr == part.data() + part.size();
    ASSIGN_OR_RETURN(value, get_item(runtime, value, is_index ? Value(index) : Value(part)));
    if (dot == std::string_view::npos) return value;
    rest.remove_prefix(dot + 1);
  }
}

/// What to compare an item by: an attribute of it or itself, letters lowered unless case matters.
Result<Value> sort_key(Runtime& runtime, const Value& item, const Value& attribute, bool case_sensitive) {
  Value key = item;
  if (!attribute.is_none()) {
    ASSIGN_OR_RETURN(key, lookup_path(runtime, item, attribute));
  }
  if (key.is_string() && !case_sensitive) return Value(to_lower(key.text()));
  return key;
}

struct Keyed {
  Value key, item;
};
Result<void> sort_by_key(Runtime& runtime, std::vector<Keyed>& items, bool reverse) {
  std::optional<Error> failure;
  const auto before = [&](const Keyed& a, const Keyed& b) {
    if (failure) return false;
    const auto result = reverse ? less(runtime, b.key, a.key) : less(runtime, a.key, b.key);
    if (!result) failure = result.error();
    return result && *result;
  };
  std::stable_sort(items.begin(), items.end(), before);
  if (failure) return *std::move(failure);
  return {};
}

Result<std::vector<Keyed>> with_keys(Runtime& runtime, const Value& input, const Value& attribute, bool case_sensitive) {
  ASSIGN_OR_RETURN(const std::vector<Value> items, iterate(runtime, input));
  std::vector<Keyed> keyed;
  for (const Value& item : items) {
    ASSIGN_OR_RETURN(Value key, sort_key(runtime, item, attribute, case_sensitive));
    keyed.push_back({std::move(key), item});
  }
  return keyed;
}

Result<Value> no_such_item(std::string_view filter) {
  return Value(Undefined{std::make_shared<const std::string>(fmt::format("no {} item, the sequence was empty", filter))});
}

// --- text

template <std::string (*transform)(std::string_view)>
Result<Value> transformed(Runtime& runtime, const Value& input, const Arguments& arguments) {
  RETURN_IF_ERROR(bind_arguments("the filter", {}, arguments));
  ASSIGN_OR_RETURN(const std::string text, to_str(runtime, input));
  return Value(transform(text));
}

/// jinja2's own notion of a title: words begin behind blanks and opening brackets.
std::string title_words(std::string_view text) {
  std::string out, word;
  const auto finish_word = [&] {
    if (word.empty()) return;
    const size_t first = code_point_at(word, 0).length;
    out += to_upper(std::string_view(word).substr(0, first)) + to_lower(std::string_view(word).substr(first));
    word.clear();
  };
  for_each_character(text, [&](std::string_view character) {
    const char32_t c = code_point_at(character, 0).value;
    if (is_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<') {
      finish_word();
      out += character;
    } else {
      word += character;
    }
  });
  finish_word();
  return out;
}

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '\'': out += "&#39;"; break;
      case '"': out += "&#34;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string unchanged(std::string_view text) { return std::string(text); }

Result<Value> trim(Runtime& runtime, const Value& input, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("trim", {{"chars", None{}}}, arguments));
  ASSIGN_OR_RETURN(const std::string text, to_str(runtime, input));
  if (bound[0].is_none()) return Value(strip(text));
  if (!bound[0].is_string()) return invalid_argument("trim: chars must be str, not {}", type_name(bound[0]));
  return Value(bound[0].text().empty() ? std::string_view(text) : strip(text, bound[0].text()));
}

Result<Value> replace(Runtime& runtime, const Value& input, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("replace", {{"old"}, {"new"}, {"count", None{}}}, arguments));
  ASSIGN_OR_RETURN(const std::string text, to_str(runtime, input));
  ASSIGN_OR_RETURN(const std::string old_text, to_str(runtime, bound[0]));
  ASSIGN_OR_RETURN(const std::string new_text, to_str(runtime, bound[1]));
  ASSIGN_OR_RETURN(std::string out, replace_text(runtime, text, old_text, new_text, bound[2].integer().value_or(-1)));
  return Value(std::move(out));
}

Result<Value> indent(Runtime& runtime, const Value& input, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("indent", {{"width", int64_t{4}}, {"first", false}, {"blank", false}}, arguments));
  ASSIGN_OR_RETURN(const std::string text, to_str(runtime, input));
  std::string indention;
  if (bound[0].is_string()) {
    indention = bound[0].text();
  } else if (const auto width = bound[0].integer()) {
    RETURN_IF_ERROR(runtime.check_text(static_cast<size_t>(std::max<int64_t>(*width, 0))));
    indention.assign(static_cast<size_t>(std::max<int64_t>(*width, 0)), ' ');
  } else {
    return invalid_argument("indent: width must be int or str, not {}", type_name(bound[0]));
  }
  const bool blank = truthy(bound[2]);
  std::string out = truthy(bound[1]) ? indention : "";
  for (size_t begin = 0; begin <= text.size();) {
    size_t end = text.find('\n', begin);
    if (end == std::string::npos) end = text.size();
    if (begin > 0) {
      out += '\n';
      if (blank || end > begin) out += indention;
    }
    out.append(text, begin, end - begin);
    RETURN_IF_ERROR(runtime.check_text(out.size()));
    begin = end + 1;
  }
  return Value(std::move(out));
}

Result<Value> join(Runtime& runtime, const Value& input, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("join", {{"d", ""}, {"attribute", None{}}}, arguments));
  ASSIGN_OR_RETURN(const std::string separator, to_str(runtime, bound[0]));
  ASSIGN_OR_RETURN(const std::vector<Value> items, iterate(runtime, input));
  std::string out;
  for (size_t i = 0; i < items.size(); ++i) {
    Value item = items[i];
    if (!bound[1].is_none()) {
      ASSIGN_OR_RETURN(item, lookup_path(runtime, item, bound[1]));
    }
    ASSIGN_OR_RETURN(const std::string text, to_str(runtime, item));
    if (i > 0) out += separator;
    out += text;
    RETURN_IF_ERROR(runtime.check_text(out.size()));
  }
  return Value(std::move(out));
}

Result<Value> tojson(Runtime& runtime, const Value& input, const Arguments& arguments) {
  ASSIGN_OR_RETURN(
      const auto bound,
      bind_arguments("tojson", {{"ensure_ascii", false}, {"indent", None{}}, {"separators", None{}}, {"sort_keys", false}}, arguments));
  JsonStyle style;
  style.ensure_ascii = truthy(bound[0]);
  style.sort_keys = truthy(bound[3]);
  if (bound[1].is_string()) {
    style.indent = bound[1].text();
  } else if (const auto width = bound[1].integer()) {
    if (*width > 64) return invalid_argument("tojson: an indent of {} is too wide", *width);
    style.indent = std::string(static_cast<size_t>(std::max<int64_t>(*width, 0)), ' ');
  }
  if (style.indent) style.item_separator = ",";
  if (const List* separators = bound[2].list()) {
    if (separators->items.size() != 2 || !separators->items[0].is_string() || !separators->items[1].is_string()) {
      return invalid_argument("tojson: separators must be two strings");
    }
    style.item_separator = separators->items[0].text();
    style.key_separator = separators->items[1].text();
  }
  ASSIGN_OR_RETURN(std::string text, to_json_text(runtime, input, style));
  return Value(std::move(text));
}

Result<Value> wordcount(Runtime& runtime, const Value& input, const Arguments&) {
  ASSIGN_OR_RETURN(const std::string text, to_str(runtime, input));
  int64_t words = 0;
  bool in_word = false;
  for_each_character(text, [&](std::string_view character) {
    const char32_t c = code_point_at(character, 0).value;
    const bool word = is_letter(c) || is_digit(c) || c == '_';
    words += word && !in_word;
    in_word = word;
  });
  return Value(words);
}

// --- any value

Result<Value> default_value(Runtime&, const Value& input, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("default", {{"default_value", ""}, {"boolean", false}}, arguments));
  return input.is_undefined() || (truthy(bound[1]) && !truthy(input)) ? bound[0] : input;
}

Result<Value> length(Runtime&, const Value& input, const Arguments&) {
  ASSIGN_OR_RETURN(const int64_t size, length_of(input));
  return Value(size);
}

Result<Value> attr(Runtime& runtime, const Value& input, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("attr", {{"name"}}, arguments));
  ASSIGN_OR_RETURN(const std::string name, to_str(runtime, bound[0]));
  if (input.dict() && !find_method(input, name)) return undefined_attribute(input, name);  // attributes only, never items
  return get_attribute(runtime, input, name);
}

// --- numbers

/// The number at the beginning and end of which only white space is left, as Python's int() and float() read it.
template <class Number>
std::optional<Number> parse_number(std::string_view text, int base = 10) {
  text = strip(text);
  if (text.starts_with('+') && text.size() > 1 && text[1] != '-') text.remove_prefix(1);
  Number number{};
  std::from_chars_result parsed{};
  if constexpr (std::is_integral_v<Number>)
    parsed = std::from_chars(text.data(), text.data() + text.size(), number, base);
  else
    parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  if (text.empty() || parsed.ec != std::errc() || parsed.ptr != text.data() + text.size()) return std::nullopt;
  return number;
}

std::optional<int64_t> truncated(double value) {
  if (!(std::fabs(value) < 0x1p63)) return std::nullopt;
  return static_cast<int64_t>(value);
}

Result<Value> to_int(Runtime&, const Value& input, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("int", {{"default", int64_t{0}}, {"base", int64_t{10}}}, arguments));
  if (input.is_undefined()) return undefined_error(input);
  if (const auto integer = input.integer()) return Value(*integer);
  if (input.is_number() && !input.is_float()) return input;
  if (input.is_string()) {
    const int64_t base = bound[1].integer().value_or(10);
    if (base < 2 || base > 36) return invalid_argument("int: base must be between 2 and 36");
    std::string_view digits = strip(input.text());
    const auto has_prefix = [&](std::string_view lower, std::string_view upper) {
      return digits.starts_with(lower) || digits.starts_with(upper);
    };
    if ((base == 16 && has_prefix("0x", "0X")) || (base == 8 && has_prefix("0o", "0O")) || (base == 2 && has_prefix("0b", "0B")))
      digits.remove_prefix(2);
    if (const auto integer = parse_number<int64_t>(digits, static_cast<int>(base))) return Value(*integer);
  }
  const auto number = input.is_string() ? parse_number<double>(input.text()) : input.number();
  const auto integer = number ? truncated(*number) : std::nullopt;
  return integer ? Value(*integer) : bound[0];
}

Result<Value> to_float(Runtime&, const Value& input, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("float", {{"default", 0.0}}, arguments));
  if (input.is_undefined()) return undefined_error(input);
  const auto number = input.is_string() ? parse_number<double>(input.text()) : input.number();
  return number ? Value(*number) : bound[0];
}

Result<Value> absolute(Runtime&, const Value& input, const Arguments&) {
  if (input.is_undefined()) return undefined_error(input);
  if (input.is_float()) return Value(std::fabs(*input.number()));
  if (const auto integer = input.integer()) return apply_sign(Value(*integer), *integer < 0);
  if (input.is_number()) return input;
  return invalid_argument("bad operand type for abs(): '{}'", type_name(input));
}

Result<Value> round_number(Runtime&, const Value& input, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("round", {{"precision", int64_t{0}}, {"method", "common"}}, arguments));
  if (input.is_undefined()) return undefined_error(input);
  if (!input.is_number()) return invalid_argument("round: expected a number, not {}", type_name(input));
  const auto precision = bound[0].integer();
  if (!precision || *precision < -300 || *precision > 300) return invalid_argument("round: precision must be an integer from -300 to 300");
  const std::string method = bound[1].is_string() ? bound[1].text() : "";
  if (method != "common" && method != "ceil" && method != "floor") return invalid_argument("method must be common, ceil or floor");
  if (method == "common") {
    if (!input.is_float() && *precision >= 0) return input;
    if (!std::isfinite(*input.number())) return input;
    if (*precision >= 0) {  // decimal digits of the exact binary value, ties to even, as Python rounds
      return Value(*parse_number<double>(fmt::format("{:.{}f}", *input.number(), *precision)));
    }
    const double scale = std::pow(10.0, static_cast<double>(-*precision));
    const double rounded = std::nearbyint(*input.number() / scale) * scale;
    if (input.is_float()) return Value(rounded);
    const auto integer = truncated(rounded);
    return integer ? Result<Value>(Value(*integer)) : invalid_argument("an integer is out of the range of 64 bits");
  }
  const double scale = std::pow(10.0, static_cast<double>(*precision));
  const double scaled = *input.number() * scale;
  return Value((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale);
}

Result<Value> sum(Runtime& runtime, const Value& input, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("sum", {{"attribute", None{}}, {"start", int64_t{0}}}, arguments));
  ASSIGN_OR_RETURN(const std::vector<Value> items, iterate(runtime, input));
  Value total = bound[1];
  for (const Value& item : items) {
    Value term = item;
    if (!bound[0].is_none()) {
      ASSIGN_OR_RETURN(term, lookup_path(runtime, item, bound[0]));
    }
    if (term.is_string()) return invalid_argument("sum() can't sum strings [use ''.join(seq) instead]");
    ASSIGN_OR_RETURN(total, apply_binary(runtime, BinaryOp::kAdd, total, term));
  }
  return total;
}

// --- sequences

Result<Value> to_list(Runtime& runtime, const Value& input, const Arguments&) {
  ASSIGN_OR_RETURN(std::vector<Value> items, iterate(runtime, input));
  return Value(runtime.make_list(std::move(items)));
}

Result<Value> items(Runtime& runtime, const Value& input, const Arguments&) {
  if (input.is_undefined()) return runtime.make_generator({});
  if (!input.dict()) return invalid_argument("Can only get item pairs from a mapping.");
  std::vector<Value> pairs;
  for (const auto& [key, value] : input.dict()->entries) pairs.push_back(runtime.make_tuple({key, value}));
  return runtime.make_generator(std::move(pairs));
}

Result<Value> first(Runtime& runtime, const Value& input, const Arguments&) {
  ASSIGN_OR_RETURN(const std::vector<Value> all, iterate(runtime, input));
  return all.empty() ? no_such_item("first") : all.front();
}
Result<Value> last(Runtime& runtime, const Value& input, const Arguments&) {
  ASSIGN_OR_RETURN(const std::vector<Value> all, iterate(runtime, input));
  return all.empty() ? no_such_item("last") : all.back();
}

Result<Value> reverse(Runtime& runtime, const Value& input, const Arguments&) {
  if (input.is_string()) return get_slice(runtime, input, std::nullopt, std::nullopt, -1);
  ASSIGN_OR_RETURN(std::vector<Value> all, iterate(runtime, input));
  std::reverse(all.begin(), all.end());
  return runtime.make_generator(std::move(all));
}

Result<Value> sort(Runtime& runtime, const Value& input, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound,
                   bind_arguments("sort", {{"reverse", false}, {"case_sensitive", false}, {"attribute", None{}}}, arguments));
  std::vector<Keyed> keyed;
  ASSIGN_OR_RETURN(keyed, with_keys(runtime, input, bound[2], truthy(bound[1])));
  RETURN_IF_ERROR(sort_by_key(runtime, keyed, truthy(bound[0])));
  std::vector<Value> sorted;
  for (Keyed& entry : keyed) sorted.push_back(std::move(entry.item));
  return Value(runtime.make_list(std::move(sorted)));
}

Result<Value> dictsort(Runtime& runtime, const Value& input, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("dictsort", {{"case_sensitive", false}, {"by", "key"}, {"reverse", false}}, arguments));
  if (!input.dict()) return invalid_argument("dictsort: expected a mapping, not {}", type_name(input));
  const std::string by = bound[1].is_string() ? bound[1].text() : "";
  if (by != "key" && by != "value") return invalid_argument("You can only sort by either \"key\" or \"value\"");
  std::vector<Keyed> keyed;
  for (const auto& [key, value] : input.dict()->entries) {
    ASSIGN_OR_RETURN(Value sorted_by, sort_key(runtime, by == "key" ? key : value, None{}, truthy(bound[0])));
    keyed.push_back({std::move(sorted_by), runtime.make_tuple({key, value})});
  }
  RETURN_IF_ERROR(sort_by_key(runtime, keyed, truthy(bound[2])));
  std::vector<Value> pairs;
  for (Keyed& entry : keyed) pairs.push_back(std::move(entry.item));
  return Value(runtime.make_list(std::move(pairs)));
}

Result<Value> unique(Runtime& runtime, const Value& input, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("unique", {{"case_sensitive", false}, {"attribute", None{}}}, arguments));
  ASSIGN_OR_RETURN(const std::vector<Keyed> keyed, with_keys(runtime, input, bound[1], truthy(bound[0])));
  Dict seen;
  std::vector<Value> kept;
  for (const Keyed& entry : keyed) {
    RETURN_IF_ERROR(check_key(entry.key));
    RETURN_IF_ERROR(runtime.charge(seen.entries.size()));
    if (seen.find(entry.key)) continue;
    seen.entries.emplace_back(entry.key, true);
    kept.push_back(entry.item);
  }
  return runtime.make_generator(std::move(kept));
}

template <bool largest>
Result<Value> extreme(Runtime& runtime, const Value& input, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound,
                   bind_arguments(largest ? "max" : "min", {{"case_sensitive", false}, {"attribute", None{}}}, arguments));
  ASSIGN_OR_RETURN(const std::vector<Keyed> keyed, with_keys(runtime, input, bound[1], truthy(bound[0])));
  if (keyed.empty()) return no_such_item(largest ? "max" : "min");
  const Keyed* best = &keyed[0];
  for (const Keyed& entry : keyed) {
    ASSIGN_OR_RETURN(const bool better, largest ? less(runtime, best->key, entry.key) : less(runtime, entry.key, best->key));
    if (better) best = &entry;
  }
  return best->item;
}

Result<Value> map(Runtime& runtime, const Value& input, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const std::vector<Value> all, iterate(runtime, input));
  std::vector<Value> mapped;
  if (arguments.positional.empty()) {
    ASSIGN_OR_RETURN(const auto bound, bind_arguments("map", {{"attribute"}, {"default", None{}}}, arguments));
    const bool has_default = arguments.named.size() == 2;
    for (const Value& item : all) {
      ASSIGN_OR_RETURN(Value value, lookup_path(runtime, item, bound[0]));
      mapped.push_back(value.is_undefined() && has_default ? bound[1] : std::move(value));
    }
  } else {
    const Value& name = arguments.positional[0];
    const Filter filter = name.is_string() ? find_filter(name.text()) : nullptr;
    if (!filter) return invalid_argument("map: no filter of the name given");
    const Arguments rest{{arguments.positional.begin() + 1, arguments.positional.end()}, arguments.named};
    for (const Value& item : all) {
      ASSIGN_OR_RETURN(Value value, filter(runtime, item, rest));
      mapped.push_back(std::move(value));
    }
  }
  return runtime.make_generator(std::move(mapped));
}

/// select, reject, selectattr and rejectattr: items, or attributes of them, that pass a test or are true.
template <bool wanted, bool by_attribute>
Result<Value> select(Runtime& runtime, const Value& input, const Arguments& arguments) {
  constexpr size_t kNumOwn = by_attribute ? 1 : 0;
  if (arguments.positional.size() < kNumOwn) return invalid_argument("selectattr and rejectattr need the name of an attribute");
  Test test = nullptr;
  Arguments rest{{}, arguments.named};
  if (arguments.positional.size() > kNumOwn) {
    const Value& name = arguments.positional[kNumOwn];
    test = name.is_string() ? find_test(name.text()) : nullptr;
    if (!test) return invalid_argument("no test named '{}'", name.is_string() ? name.text() : std::string(type_name(name)));
    rest.positional.assign(arguments.positional.begin() + kNumOwn + 1, arguments.positional.end());
  }
  ASSIGN_OR_RETURN(const std::vector<Value> all, iterate(runtime, input));
  std::vector<Value> kept;
  for (const Value& item : all) {
    Value value = item;
    if constexpr (by_attribute) {
      ASSIGN_OR_RETURN(value, lookup_path(runtime, item, arguments.positional[0]));
    }
    bool passed = truthy(value);
    if (test) {
      ASSIGN_OR_RETURN(passed, test(runtime, value, rest));
    }
    if (passed == wanted) kept.push_back(item);
  }
  return runtime.make_generator(std::move(kept));
}

}  // namespace

Result<std::string> replace_text(Runtime& runtime, std::string_view text, std::string_view old_text, std::string_view new_text,
                                 int64_t count) {
  std::string out;
  if (old_text.empty()) {
    const auto insert = [&] {
      if (count == 0) return;
      --count;
      out += new_text;
    };
    RETURN_IF_ERROR(runtime.check_text((text.size() + 1) * (new_text.size() + 1)));
    for_each_character(text, [&](std::string_view character) {
      insert();
      out += character;
    });
    insert();
    return out;
  }
  for (size_t at; count != 0 && (at = text.find(old_text)) != std::string_view::npos; --count) {
    out += text.substr(0, at);
    out += new_text;
    text.remove_prefix(at + old_text.size());
    RETURN_IF_ERROR(runtime.check_text(out.size()));
  }
  out += text;
  return out;
}

Filter find_filter(std::string_view name) {
  static const std::unordered_map<std::string_view, Filter> kFilters = {
      {"abs", absolute},
      {"attr", attr},
      {"capitalize", transformed<capitalized>},
      {"count", length},
      {"d", default_value},
      {"default", default_value},
      {"dictsort", dictsort},
      {"e", transformed<escape_html>},
      {"escape", transformed<escape_html>},
      {"first", first},
      {"float", to_float},
      {"indent", indent},
      {"int", to_int},
      {"items", items},
      {"join", join},
      {"last", last},
      {"length", length},
      {"list", to_list},
      {"lower", transformed<to_lower>},
      {"map", map},
      {"max", extreme<true>},
      {"min", extreme<false>},
      {"reject", select<false, false>},
      {"rejectattr", select<false, true>},
      {"replace", replace},
      {"reverse", reverse},
      {"round", round_number},
      {"safe", transformed<unchanged>},
      {"select", select<true, false>},
      {"selectattr", select<true, true>},
      {"sort", sort},
      {"string", transformed<unchanged>},
      {"sum", sum},
      {"title", transformed<title_words>},
      {"tojson", tojson},
      {"trim", trim},
      {"unique", unique},
      {"upper", transformed<to_upper>},
      {"wordcount", wordcount},
  };
  const auto found = kFilters.find(name);
  return found == kFilters.end() ? nullptr : found->second;
}

}  // namespace quern::text::jinja
