#pragma once

#include <map>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/result.h"

namespace quern::text {

/// JSON types that a parameter may have, as bits.
enum JsonTypes : unsigned {
  kJsonString = 1,
  kJsonInteger = 2,
  kJsonNumber = 4,
  kJsonBoolean = 8,
  kJsonNull = 16,
  kJsonArray = 32,
  kJsonObject = 64,
  kJsonAny = 127,
};

/// The types that a name of JSON schema stands for, as bits: "number" has the integers in it. 0 where there is no such name.
unsigned types_of_name(std::string_view name);

/// The functions that a request offers, as far as calls of them are read. Immutable, so that several threads may read it.
class ToolSchemas {
 public:
  /// `tools`: null, or a list of {"type": "function", "function": {"name", "parameters"}}. Errors name the field.
  static Result<ToolSchemas> parse(const Json& tools);

  [[nodiscard]] bool empty() const { return parameters_.empty(); }
  [[nodiscard]] bool has(std::string_view function) const { return parameters_.contains(function); }
  /// True when the function's schema names the parameter.
  [[nodiscard]] bool has_parameter(std::string_view function, std::string_view parameter) const;
  /// The types that the schema allows; any for what it does not know.
  [[nodiscard]] unsigned types_of(std::string_view function, std::string_view parameter) const;

 private:
  [[nodiscard]] const Json* find(std::string_view function, std::string_view parameter) const;
  std::map<std::string, Json, std::less<>> parameters_;  // function -> its schema, null without one
};

/// The value that `text` stands for, as JSON: what the types allow and the text can be read as, else the text as a string. Python's True,
/// False and None are understood. Where only numbers, booleans, lists or objects are allowed and the text is none, `complete` decides:
/// a string, or, for a text that was cut off, nothing.
std::string json_value(std::string_view text, unsigned types, bool complete);

}  // namespace quern::text
