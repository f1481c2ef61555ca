#pragma once

#include <optional>
#include <string_view>

#include "text/jinja_value.h"

namespace quern::text::jinja {

using Filter = Result<Value> (*)(Runtime&, const Value& input, const Arguments&);
using Test = Result<bool> (*)(Runtime&, const Value& input, const Arguments&);
using Method = Result<Value> (*)(Runtime&, const Value& self, const Arguments&);

/// Null when there is none of that name.
Filter find_filter(std::string_view name);
Test find_test(std::string_view name);
Method find_method(const Value& self, std::string_view name);

/// range, dict, namespace, raise_exception, strftime_now.
std::optional<Value> find_global(std::string_view name);

/// object.name: a method first, then an item, else Undefined. An error when `object` itself is undefined.
Result<Value> get_attribute(Runtime& runtime, const Value& object, std::string_view name);
/// object[key]: an item first, then a method or attribute, else Undefined.
Result<Value> get_item(Runtime& runtime, const Value& object, const Value& key);
/// object[start:stop:step] of strings and lists; an empty optional stands for an omitted part.
Result<Value> get_slice(Runtime& runtime, const Value& object, std::optional<int64_t> start, std::optional<int64_t> stop,
                        std::optional<int64_t> step);

/// text with at most `count` (negative: all) occurrences of `old_text` replaced; an empty `old_text` is found around every character.
Result<std::string> replace_text(Runtime& runtime, std::string_view text, std::string_view old_text, std::string_view new_text,
                                 int64_t count);

}  // namespace quern::text::jinja
