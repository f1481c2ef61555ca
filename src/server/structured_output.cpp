#include "server/structured_output.h"

#include <array>
#include <string>
#include <utility>

namespace quern::server {
namespace {

using text::ContentFormat;

constexpr size_t kMaxExpressionBytes = 64 << 10, kMaxGrammarBytes = 256 << 10, kMaxChoices = 10'000;

ContentFormat format_of(ContentFormat::Kind kind, std::string field) {
  ContentFormat format;
  format.kind = kind;
  format.field = std::move(field);
  return format;
}

/// A schema, also as the text of one.
std::optional<ContentFormat> json_format(const Json& value, std::string field, std::string_view name, JsonFields& fields) {
  ContentFormat format = format_of(ContentFormat::Kind::kJsonSchema, std::move(field));
  if (value.is_string()) {
    auto parsed = parse_json(value.get_ref<const std::string&>(), "the schema");
    if (!parsed) {
      fields.fail(name, "{}", parsed.error().message);
      return std::nullopt;
    }
    format.schema = std::move(*parsed);
  } else {
    format.schema = value;
  }
  if (!format.schema.is_object() && !format.schema.is_boolean()) {
    fields.fail(name, "expected a JSON schema, found {}", json_kind(format.schema));
    return std::nullopt;
  }
  return format;
}

std::optional<ContentFormat> text_format(const Json& value, ContentFormat::Kind kind, std::string field, std::string_view name, JsonFields& fields) {
  if (!value.is_string()) {
    fields.fail(name, "expected a string, found {}", json_kind(value));
    return std::nullopt;
  }
  ContentFormat format = format_of(kind, std::move(field));
  format.text = value.get<std::string>();
  const size_t most = kind == ContentFormat::Kind::kRegex ? kMaxExpressionBytes : kMaxGrammarBytes;
  if (format.text.size() > most) {
    fields.fail(name, "has {} bytes, at most {} are allowed", format.text.size(), most);
    return std::nullopt;
  }
  return format;
}

std::optional<ContentFormat> choice_format(const Json& value, std::string field, std::string_view name, JsonFields& fields) {
  if (!value.is_array() || value.empty() || value.size() > kMaxChoices) {
    fields.fail(name, "expected a list of 1 to {} strings", kMaxChoices);
    return std::nullopt;
  }
  ContentFormat format = format_of(ContentFormat::Kind::kChoice, std::move(field));
  for (const Json& choice : value) {
    if (!choice.is_string() || choice.get_ref<const std::string&>().empty()) {
      fields.fail(name, "expected a list of strings that are not empty");
      return std::nullopt;
    }
    format.choices.push_back(choice.get<std::string>());
  }
  return format;
}

/// The members of structured_outputs, and of the request with "guided_" before them.
std::optional<ContentFormat> constraint_member(std::string_view kind, const Json& value, std::string field, std::string_view name, JsonFields& fields) {
  if (kind == "json") return json_format(value, std::move(field), name, fields);
  if (kind == "regex") return text_format(value, ContentFormat::Kind::kRegex, std::move(field), name, fields);
  if (kind == "grammar") return text_format(value, ContentFormat::Kind::kGrammar, std::move(field), name, fields);
  if (kind == "choice") return choice_format(value, std::move(field), name, fields);
  if (!value.is_boolean()) {
    fields.fail(name, "expected true or false, found {}", json_kind(value));
  } else if (value == true) {
    return format_of(ContentFormat::Kind::kJsonObject, std::move(field));
  }
  return std::nullopt;
}

constexpr std::array<std::string_view, 5> kKinds{"json", "regex", "choice", "grammar", "json_object"};

std::optional<ContentFormat> read_structured_outputs(const Json& object, JsonFields& fields) {
  constexpr std::string_view kName = "structured_outputs";
  std::optional<ContentFormat> found;
  JsonFields members(object, "structured_outputs.");
  for (const std::string_view kind : kKinds) {
    const Json* value = members.find(kind);
    if (value == nullptr) continue;
    if (found) fields.fail(kName, "has several constraints; only one can hold");
    if (auto format = constraint_member(kind, *value, fmt::format("structured_outputs.{}", kind), fmt::format("structured_outputs.{}", kind), fields))
      found = std::move(format);
  }
  for (const char* name : {"structural_tag", "whitespace_pattern"}) {
    if (members.find(name) != nullptr) fields.unsupported(fmt::format("structured_outputs.{}", name), "is not supported");
  }
  const bool compact = members.boolean("disable_any_whitespace").value_or(false);
  if (const auto status = members.status(); !status) fields.fail(kName, "{}", status.error().message);
  if (!found) {
    fields.fail(kName, "has none of json, regex, choice, grammar and json_object");
    return std::nullopt;
  }
  found->whitespace = !compact;
  return found;
}

}  // namespace

std::optional<ContentFormat> read_format_object(const Json& format, std::string_view name, JsonFields& fields) {
  if (!format.is_object()) {
    fields.fail(name, "expected an object, found {}", json_kind(format));
    return std::nullopt;
  }
  JsonFields members(format);
  const Json* type = members.find("type");
  if (type == nullptr || !type->is_string()) {
    fields.fail(fmt::format("{}.type", name), "has to be a string");
    return std::nullopt;
  }
  const auto& kind = type->get_ref<const std::string&>();
  const std::string field(name);
  if (kind == "text") return std::nullopt;
  if (kind == "json_object") {
    // llama.cpp's and others' servers take a schema here, too.
    if (const Json* schema = members.find("schema")) return json_format(*schema, field + ".schema", field + ".schema", fields);
    return format_of(ContentFormat::Kind::kJsonObject, field);
  }
  if (kind == "json_schema") {
    const Json* nested = members.find("json_schema");
    if (nested != nullptr && !nested->is_object()) {
      fields.fail(field + ".json_schema", "expected an object, found {}", json_kind(*nested));
      return std::nullopt;
    }
    const std::string prefix = nested != nullptr ? field + ".json_schema." : field + ".";
    JsonFields inner(nested != nullptr ? *nested : format);
    const Json* schema = inner.find("schema");
    if (schema == nullptr) {
      fields.fail(prefix + "schema", "is required");
      return std::nullopt;
    }
    (void)inner.boolean("strict");  // what is not strict elsewhere is here as well
    if (const auto status = inner.status(); !status) fields.fail(name, "{}", status.error().message);
    return json_format(*schema, prefix + "schema", prefix + "schema", fields);
  }
  if (kind == "regex" || kind == "grammar") {
    const Json* value = members.find(kind == "regex" ? "pattern" : "grammar");
    if (value == nullptr) {
      fields.fail(name, "\"{}\" is required", kind == "regex" ? "pattern" : "grammar");
      return std::nullopt;
    }
    return text_format(*value, kind == "regex" ? ContentFormat::Kind::kRegex : ContentFormat::Kind::kGrammar, field, name, fields);
  }
  fields.unsupported(name, "type \"{}\" is not supported, only \"text\", \"json_object\", \"json_schema\", \"regex\" and \"grammar\"", kind.substr(0, 64));
  return std::nullopt;
}

std::optional<ContentFormat> read_content_format(JsonFields& fields) {
  std::optional<ContentFormat> found;
  const auto keep = [&](std::string_view name, std::optional<ContentFormat> format) {
    if (!format) return;
    if (found) return fields.fail(name, "stands beside {}; only one of them can hold", found->field);
    found = std::move(format);
  };
  if (const Json* format = fields.object("response_format")) keep("response_format", read_format_object(*format, "response_format", fields));
  if (const Json* object = fields.object("structured_outputs")) keep("structured_outputs", read_structured_outputs(*object, fields));
  for (const std::string_view kind : kKinds) {
    const std::string name = fmt::format("guided_{}", kind);
    if (const Json* value = fields.find(name)) keep(name, constraint_member(kind, *value, name, name, fields));
  }
  if (fields.find("guided_whitespace_pattern") != nullptr) fields.unsupported("guided_whitespace_pattern", "is not supported");
  return found;
}

}  // namespace quern::server
