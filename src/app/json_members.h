#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/json.h"

// Members of what a server sent, which may be anything: of the wanted type, or as if they were not there.

namespace quern::app {

inline const Json* member_of(const Json& json, const char* name) {
  const auto found = json.is_object() ? json.find(name) : json.end();
  return json.is_object() && found != json.end() ? &*found : nullptr;
}

/// Empty when there is no such text.
inline std::string_view text_of(const Json& json, const char* name) {
  const Json* member = member_of(json, name);
  return member != nullptr && member->is_string() ? std::string_view(member->get_ref<const std::string&>()) : std::string_view();
}

inline std::optional<int64_t> count_of(const Json& json, const char* name) {
  const Json* member = member_of(json, name);
  return member != nullptr && member->is_number_integer() ? std::optional(member->get<int64_t>()) : std::nullopt;
}

inline std::optional<double> number_of(const Json& json, const char* name) {
  const Json* member = member_of(json, name);
  return member != nullptr && member->is_number() ? std::optional(member->get<double>()) : std::nullopt;
}

/// Null when there is no such object, or array.
inline const Json* object_of(const Json& json, const char* name) {
  const Json* member = member_of(json, name);
  return member != nullptr && member->is_object() ? member : nullptr;
}
inline const Json* array_of(const Json& json, const char* name) {
  const Json* member = member_of(json, name);
  return member != nullptr && member->is_array() ? member : nullptr;
}

}  // namespace quern::app
