// Attributes, items and slices of values, and the methods of strings, dicts and lists.

#include <algorithm>
#include <unordered_map>

#include "text/jinja_builtins.h"
#include "text/jinja_strings.h"

namespace quern::text::jinja {
namespace {

Result<std::string> text_argument(std::string_view method, const Value& value) {
  if (value.is_string()) return value.text();
  if (value.is_undefined()) return undefined_error(value);
  return invalid_argument("{}() argument must be str, not {}", method, type_name(value));
}

Result<int64_t> integer_argument(std::string_view method, const Value& value) {
  if (value.integer()) return *value.integer();
  if (value.is_undefined()) return undefined_error(value);
  return invalid_argument("{}() argument must be int, not {}", method, type_name(value));
}

// --- strings

template <std::string (*transform)(std::string_view)>
Result<Value> transformed(Runtime&, const Value& self, const Arguments& arguments) {
  RETURN_IF_ERROR(bind_arguments("the method", {}, arguments));
  return Value(transform(self.text()));
}

template <std::string_view (*strip_side)(std::string_view, std::string_view)>
Result<Value> stripped(Runtime&, const Value& self, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("strip", {{"chars", None{}}}, arguments));
  if (bound[0].is_none()) return Value(strip_side(self.text(), {}));
  ASSIGN_OR_RETURN(const std::string characters, text_argument("strip", bound[0]));
  if (characters.empty()) return self;
  return Value(strip_side(self.text(), characters));
}

/// startswith and endswith: one affix or a tuple of them, looked for in self[start:end].
template <bool at_start>
Result<Value> has_affix(Runtime& runtime, const Value& self, const Arguments& arguments) {
  constexpr std::string_view kName = at_start ? "startswith" : "endswith";
  ASSIGN_OR_RETURN(const auto bound, bind_arguments(kName, {{"affix"}, {"start", None{}}, {"end", None{}}}, arguments));
  ASSIGN_OR_RETURN(const Value part, get_slice(runtime, self, bound[1].integer(), bound[2].integer(), std::nullopt));
  const std::string& text = part.text();
  std::vector<Value> affixes{bound[0]};
  if (const List* tuple = bound[0].list(); tuple && tuple->kind == List::Kind::kTuple) affixes = tuple->items;
  for (const Value& affix : affixes) {
    ASSIGN_OR_RETURN(const std::string wanted, text_argument(kName, affix));
    if (at_start ? text.starts_with(wanted) : text.ends_with(wanted)) return Value(true);
  }
  return Value(false);
}

template <bool prefix>
Result<Value> remove_affix(Runtime&, const Value& self, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments(prefix ? "removeprefix" : "removesuffix", {{"affix"}}, arguments));
  ASSIGN_OR_RETURN(const std::string affix, text_argument("removeprefix", bound[0]));
  std::string_view text = self.text();
  if (prefix && text.starts_with(affix)) text.remove_prefix(affix.size());
  if (!prefix && text.ends_with(affix)) text.remove_suffix(affix.size());
  return Value(text);
}

/// Pieces between separators, at most `max_splits` + 1; a negative count is no limit.
std::vector<std::string_view> split_left(std::string_view text, std::string_view separator, int64_t max_splits) {
  std::vector<std::string_view> pieces;
  for (size_t at; max_splits != 0 && (at = text.find(separator)) != std::string_view::npos; --max_splits) {
    pieces.push_back(text.substr(0, at));
    text.remove_prefix(at + separator.size());
  }
  pieces.push_back(text);
  return pieces;
}
std::vector<std::string_view> split_right(std::string_view text, std::string_view separator, int64_t max_splits) {
  std::vector<std::string_view> pieces;
  for (size_t at; max_splits != 0 && (at = text.rfind(separator)) != std::string_view::npos; --max_splits) {
    pieces.push_back(text.substr(at + separator.size()));
    text = text.substr(0, at);
  }
  pieces.push_back(text);
  std::reverse(pieces.begin(), pieces.end());
  return pieces;
}
/// Words between runs of white space; the rest keeps its inner white space.
std::vector<std::string_view> split_words_left(std::string_view text, int64_t max_splits) {
  std::vector<std::string_view> words;
  for (text = strip_left(text); !text.empty(); text = strip_left(text)) {
    if (max_splits-- == 0) {
      words.push_back(text);
      break;
    }
    size_t end = 0;
    while (end < text.size() && !is_space(code_point_at(text, end).value)) end += code_point_at(text, end).length;
    words.push_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  return words;
}
std::vector<std::string_view> split_words_right(std::string_view text, int64_t max_splits) {
  const std::vector<std::string_view> words = split_words_left(text, -1);
  if (max_splits < 0 || words.size() <= static_cast<size_t>(max_splits)) return words;
  const auto rest = words.end() - static_cast<std::ptrdiff_t>(max_splits);  // the words that stay apart
  const std::string_view last = *(rest - 1);
  std::vector<std::string_view> result{text.substr(0, static_cast<size_t>(last.data() + last.size() - text.data()))};
  result.insert(result.end(), rest, words.end());
  return result;
}

template <bool from_right>
Result<Value> split(Runtime& runtime, const Value& self, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("split", {{"sep", None{}}, {"maxsplit", int64_t{-1}}}, arguments));
  ASSIGN_OR_RETURN(const int64_t max_splits, integer_argument("split", bound[1]));
  std::vector<std::string_view> pieces;
  if (bound[0].is_none()) {
    pieces = from_right ? split_words_right(self.text(), max_splits) : split_words_left(self.text(), max_splits);
  } else {
    ASSIGN_OR_RETURN(const std::string separator, text_argument("split", bound[0]));
    if (separator.empty()) return invalid_argument("empty separator");
    pieces = from_right ? split_right(self.text(), separator, max_splits) : split_left(self.text(), separator, max_splits);
  }
  RETURN_IF_ERROR(runtime.charge(pieces.size() + self.text().size() / 256));
  return Value(runtime.make_list(std::vector<Value>(pieces.begin(), pieces.end())));
}

Result<Value> splitlines(Runtime& runtime, const Value& self, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("splitlines", {{"keepends", false}}, arguments));
  const auto is_line_end = [](char32_t c) {
    return (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
  };
  std::vector<Value> lines;
  const std::string_view text = self.text();
  for (size_t at = 0, begin = 0; at < text.size(); begin = at) {
    while (at < text.size() && !is_line_end(code_point_at(text, at).value)) at += code_point_at(text, at).length;
    const size_t end = at;
    if (at < text.size()) at += text.substr(at).starts_with("\r\n") ? 2 : code_point_at(text, at).length;
    lines.emplace_back(text.substr(begin, (truthy(bound[0]) ? at : end) - begin));
  }
  return Value(runtime.make_list(std::move(lines)));
}

Result<Value> join(Runtime& runtime, const Value& self, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("join", {{"iterable"}}, arguments));
  ASSIGN_OR_RETURN(const std::vector<Value> items, iterate(runtime, bound[0]));
  std::string out;
  for (size_t i = 0; i < items.size(); ++i) {
    if (!items[i].is_string()) return invalid_argument("sequence item {}: expected str instance, {} found", i, type_name(items[i]));
    if (i > 0) out += self.text();
    out += items[i].text();
    RETURN_IF_ERROR(runtime.check_text(out.size()));
  }
  return Value(std::move(out));
}

Result<Value> replace(Runtime& runtime, const Value& self, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("replace", {{"old"}, {"new"}, {"count", int64_t{-1}}}, arguments));
  ASSIGN_OR_RETURN(const std::string old_text, text_argument("replace", bound[0]));
  ASSIGN_OR_RETURN(const std::string new_text, text_argument("replace", bound[1]));
  ASSIGN_OR_RETURN(const int64_t count, integer_argument("replace", bound[2]));
  ASSIGN_OR_RETURN(std::string out, replace_text(runtime, self.text(), old_text, new_text, count));
  return Value(std::move(out));
}

template <bool last, bool must_exist>
Result<Value> find(Runtime&, const Value& self, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("find", {{"sub"}}, arguments));
  ASSIGN_OR_RETURN(const std::string wanted, text_argument("find", bound[0]));
  const size_t at = last ? self.text().rfind(wanted) : self.text().find(wanted);
  if (at != std::string::npos) return Value(static_cast<int64_t>(count_characters(std::string_view(self.text()).substr(0, at))));
  if (must_exist) return invalid_argument("substring not found");
  return Value(int64_t{-1});
}

Result<Value> count_text(Runtime&, const Value& self, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("count", {{"sub"}}, arguments));
  ASSIGN_OR_RETURN(const std::string wanted, text_argument("count", bound[0]));
  if (wanted.empty()) return Value(static_cast<int64_t>(count_characters(self.text())) + 1);
  return Value(static_cast<int64_t>(split_left(self.text(), wanted, -1).size()) - 1);
}

template <bool (*predicate)(char32_t)>
Result<Value> all_characters(Runtime&, const Value& self, const Arguments&) {
  bool all = !self.text().empty();
  for_each_character(self.text(), [&](std::string_view character) { all = all && predicate(code_point_at(character, 0).value); });
  return Value(all);
}
bool is_letter_or_digit(char32_t c) { return is_letter(c) || is_digit(c); }

template <bool wants_upper>
Result<Value> has_case(Runtime&, const Value& self, const Arguments&) {
  return Value(all_in_case(self.text(), wants_upper));
}

// --- dicts

Result<Value> dict_items(Runtime& runtime, const Value& self, const Arguments& arguments) {
  RETURN_IF_ERROR(bind_arguments("items", {}, arguments));
  std::vector<Value> items;
  for (const auto& [key, value] : self.dict()->entries) items.push_back(runtime.make_tuple({key, value}));
  return Value(runtime.make_list(std::move(items)));
}
Result<Value> dict_keys(Runtime& runtime, const Value& self, const Arguments& arguments) {
  RETURN_IF_ERROR(bind_arguments("keys", {}, arguments));
  std::vector<Value> keys;
  for (const auto& entry : self.dict()->entries) keys.push_back(entry.first);
  return Value(runtime.make_list(std::move(keys)));
}
Result<Value> dict_values(Runtime& runtime, const Value& self, const Arguments& arguments) {
  RETURN_IF_ERROR(bind_arguments("values", {}, arguments));
  std::vector<Value> values;
  for (const auto& entry : self.dict()->entries) values.push_back(entry.second);
  return Value(runtime.make_list(std::move(values)));
}
Result<Value> dict_get(Runtime& runtime, const Value& self, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("get", {{"key"}, {"default", None{}}}, arguments));
  RETURN_IF_ERROR(check_key(bound[0]));
  RETURN_IF_ERROR(runtime.charge(self.dict()->entries.size()));
  const Value* found = self.dict()->find(bound[0]);
  return found ? *found : bound[1];
}
Result<Value> dict_copy(Runtime& runtime, const Value& self, const Arguments& arguments) {
  RETURN_IF_ERROR(bind_arguments("copy", {}, arguments));
  Dict* const copy = runtime.make_dict();
  *copy = *self.dict();
  return Value(copy);
}

// --- lists (append and pop change the list in place, which transformers' sandbox would refuse)

Result<Value> list_append(Runtime& runtime, const Value& self, const Arguments& arguments) {
  ASSIGN_OR_RETURN(auto bound, bind_arguments("append", {{"object"}}, arguments));
  RETURN_IF_ERROR(runtime.charge(1));
  self.list()->items.push_back(std::move(bound[0]));
  return Value(None{});
}
Result<Value> list_pop(Runtime&, const Value& self, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("pop", {{"index", int64_t{-1}}}, arguments));
  ASSIGN_OR_RETURN(int64_t index, integer_argument("pop", bound[0]));
  auto& items = self.list()->items;
  const auto size = static_cast<int64_t>(items.size());
  if (index < 0) index += size;
  if (index < 0 || index >= size) return invalid_argument("pop index out of range");
  const Value value = items[static_cast<size_t>(index)];
  items.erase(items.begin() + index);
  return value;
}
Result<Value> list_index(Runtime& runtime, const Value& self, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("index", {{"value"}}, arguments));
  for (size_t i = 0; i < self.list()->items.size(); ++i) {
    ASSIGN_OR_RETURN(const bool same, equals(runtime, self.list()->items[i], bound[0]));
    if (same) return Value(static_cast<int64_t>(i));
  }
  return invalid_argument("the value is not in the list");
}
Result<Value> list_count(Runtime& runtime, const Value& self, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const auto bound, bind_arguments("count", {{"value"}}, arguments));
  int64_t count = 0;
  for (const Value& item : self.list()->items) {
    ASSIGN_OR_RETURN(const bool same, equals(runtime, item, bound[0]));
    count += same;
  }
  return Value(count);
}

using Methods = std::unordered_map<std::string_view, Method>;

const Methods& string_methods() {
  static const Methods kMethods = {
      {"upper", transformed<to_upper>},
      {"lower", transformed<to_lower>},
      {"capitalize", transformed<capitalized>},
      {"title", transformed<titled>},
      {"strip", stripped<strip>},
      {"lstrip", stripped<strip_left>},
      {"rstrip", stripped<strip_right>},
      {"startswith", has_affix<true>},
      {"endswith", has_affix<false>},
      {"removeprefix", remove_affix<true>},
      {"removesuffix", remove_affix<false>},
      {"split", split<false>},
      {"rsplit", split<true>},
      {"splitlines", splitlines},
      {"join", join},
      {"replace", replace},
      {"find", find<false, false>},
      {"rfind", find<true, false>},
      {"index", find<false, true>},
      {"rindex", find<true, true>},
      {"count", count_text},
      {"isspace", all_characters<is_space>},
      {"isalpha", all_characters<is_letter>},
      {"isdigit", all_characters<is_digit>},
      {"isalnum", all_characters<is_letter_or_digit>},
      {"isupper", has_case<true>},
      {"islower", has_case<false>},
  };
  return kMethods;
}
const Methods& dict_methods() {
  static const Methods kMethods = {
      {"items", dict_items}, {"keys", dict_keys}, {"values", dict_values}, {"get", dict_get}, {"copy", dict_copy},
  };
  return kMethods;
}
const Methods& list_methods() {
  static const Methods kMethods = {{"append", list_append}, {"pop", list_pop}, {"index", list_index}, {"count", list_count}};
  return kMethods;
}
const Methods& tuple_methods() {
  static const Methods kMethods = {{"index", list_index}, {"count", list_count}};
  return kMethods;
}

const Methods* methods_of(const Value& value) {
  if (value.is_string()) return &string_methods();
  if (value.dict()) return &dict_methods();
  if (value.list() && value.list()->kind == List::Kind::kList) return &list_methods();
  if (value.list() && value.list()->kind == List::Kind::kTuple) return &tuple_methods();
  return nullptr;
}

/// A method, or an attribute of an object; nothing for the rest.
std::optional<Value> find_attribute(Runtime& runtime, const Value& object, std::string_view name) {
  if (object.object()) return object.object()->attribute(runtime, name);
  const Method method = find_method(object, name);
  if (!method) return std::nullopt;
  return runtime.make_callable(
      {std::string(name), [method, object](Runtime& r, const Arguments& arguments) { return method(r, object, arguments); }});
}

/// The item number `index`, counted from the end when negative.
std::optional<Value> find_indexed(const Value& object, int64_t index) {
  const bool is_list = object.list() && object.list()->kind != List::Kind::kGenerator;
  if (!is_list && !object.is_string()) return std::nullopt;
  const auto size = static_cast<int64_t>(is_list ? object.list()->items.size() : count_characters(object.text()));
  if (index < 0) index += size;
  if (index < 0 || index >= size) return std::nullopt;
  if (is_list) return object.list()->items[static_cast<size_t>(index)];
  const size_t at = byte_offset(object.text(), static_cast<size_t>(index));
  return Value(std::string_view(object.text()).substr(at, code_point_at(object.text(), at).length));
}

}  // namespace

Method find_method(const Value& self, std::string_view name) {
  const Methods* methods = methods_of(self);
  if (!methods) return nullptr;
  const auto found = methods->find(name);
  return found == methods->end() ? nullptr : found->second;
}

Result<Value> get_attribute(Runtime& runtime, const Value& object, std::string_view name) {
  if (object.is_undefined()) return undefined_error(object);
  if (auto attribute = find_attribute(runtime, object, name)) return *std::move(attribute);
  if (const Dict* dict = object.dict()) {
    RETURN_IF_ERROR(runtime.charge(dict->entries.size() / 16));
    if (const Value* value = dict->find(name)) return *value;
  }
  return undefined_attribute(object, name);
}

Result<Value> get_item(Runtime& runtime, const Value& object, const Value& key) {
  if (object.is_undefined()) return undefined_error(object);
  if (const Dict* dict = object.dict()) {
    if (key.is_undefined()) return undefined_item(object, key);
    if (!check_key(key)) return undefined_item(object, key);
    RETURN_IF_ERROR(runtime.charge(dict->entries.size() / 16));
    if (const Value* value = dict->find(key)) return *value;
  } else if (const auto index = key.integer()) {
    if (object.is_string()) RETURN_IF_ERROR(runtime.charge(object.text().size() / 256));
    if (auto item = find_indexed(object, *index)) return *std::move(item);
  }
  if (key.is_string()) {
    if (auto attribute = find_attribute(runtime, object, key.text())) return *std::move(attribute);
  }
  return undefined_item(object, key);
}

Result<Value> get_slice(Runtime& runtime, const Value& object, std::optional<int64_t> start, std::optional<int64_t> stop,
                        std::optional<int64_t> step) {
  if (object.is_undefined()) return undefined_error(object);
  const bool is_list = object.list() && object.list()->kind != List::Kind::kGenerator;
  if (!is_list && !object.is_string()) return invalid_argument("'{}' object is not subscriptable", type_name(object));
  const int64_t stride = step.value_or(1);
  if (stride == 0) return invalid_argument("slice step cannot be zero");
  if (object.is_string() && !start && !stop && stride == 1) return object;
  std::vector<Value> characters;
  if (object.is_string()) {
    ASSIGN_OR_RETURN(characters, iterate(runtime, object));
  }
  const std::vector<Value>& items = is_list ? object.list()->items : characters;
  const auto size = static_cast<int64_t>(items.size());
  const int64_t low = stride > 0 ? 0 : -1, high = stride > 0 ? size : size - 1;
  const auto clamp = [&](std::optional<int64_t> bound, int64_t omitted) {
    if (!bound) return omitted;
    return std::clamp(*bound < 0 ? *bound + size : *bound, low, high);
  };
  const int64_t begin = clamp(start, stride > 0 ? low : high), end = clamp(stop, stride > 0 ? high : low);
  std::vector<Value> picked;
  for (int64_t i = begin; stride > 0 ? i < end : i > end;) {
    picked.push_back(items[static_cast<size_t>(i)]);
    if (__builtin_add_overflow(i, stride, &i)) break;
  }
  if (is_list) return Value(runtime.make_list(std::move(picked), object.list()->kind));
  std::string text;
  for (const Value& character : picked) text += character.text();
  return Value(std::move(text));
}

}  // namespace quern::text::jinja
