// str(), repr() and json.dumps() of template values.

#include <algorithm>
#include <charconv>
#include <cmath>

#include "text/jinja_strings.h"
#include "text/jinja_value.h"
#include "text/utf8.h"

namespace quern::text::jinja {
namespace {

void append_string_repr(std::string& out, std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos, has_double = text.find('"') != std::string_view::npos;
  const char quote = has_single && !has_double ? '"' : '\'';
  out += quote;
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = code_point_at(text, at);
    if (c.value == static_cast<char32_t>(quote) || c.value == '\\')
      out.append({'\\', static_cast<char>(c.value)});
    else if (c.value == '\n')
      out += "\\n";
    else if (c.value == '\r')
      out += "\\r";
    else if (c.value == '\t')
      out += "\\t";
    else if (is_printable(c.value))
      out += text.substr(at, c.length);
    else if (c.value < 0x100)
      out += fmt::format("\\x{:02x}", static_cast<uint32_t>(c.value));
    else if (c.value < 0x10000)
      out += fmt::format("\\u{:04x}", static_cast<uint32_t>(c.value));
    else
      out += fmt::format("\\U{:08x}", static_cast<uint32_t>(c.value));
    at += c.length;
  }
  out += quote;
}

void append_json_string(std::string& out, std::string_view text, bool ensure_ascii) {
  out += '"';
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = code_point_at(text, at);
    switch (c.value) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      case '\f': out += "\\f"; break;
      case '\b': out += "\\b"; break;
      default: {
        const uint32_t code = c.value;
        if (code < 0x20 || (ensure_ascii && code > 0x7e && code < 0x10000)) {
          if (code == 0x7f)
            out += '\x7f';
          else
            out += fmt::format("\\u{:04x}", code);
        } else if (ensure_ascii && code >= 0x10000) {
          out += fmt::format("\\u{:04x}\\u{:04x}", 0xd800 + ((code - 0x10000) >> 10), 0xdc00 + ((code - 0x10000) & 0x3ff));
        } else {
          out += text.substr(at, c.length);
        }
      }
    }
    at += c.length;
  }
  out += '"';
}

/// None, booleans and numbers print alike in str() and repr(); false for other types.
bool append_scalar(std::string& out, const Value& value) {
  if (value.is_none())
    out += "None";
  else if (const bool* b = value.bool_ptr())
    out += *b ? "True" : "False";
  else if (const auto* i = std::get_if<int64_t>(&value.storage()))
    out += fmt::format("{}", *i);
  else if (const auto* u = std::get_if<uint64_t>(&value.storage()))
    out += fmt::format("{}", *u);
  else if (const auto* d = std::get_if<double>(&value.storage()))
    out += float_repr(*d);
  else
    return false;
  return true;
}

Result<void> append_repr(Runtime& runtime, std::string& out, const Value& value) {
  RETURN_IF_ERROR(runtime.charge(1));
  RETURN_IF_ERROR(runtime.check_text(out.size()));
  const Runtime::Nested nested(runtime);
  RETURN_IF_ERROR(nested.check());
  if (append_scalar(out, value)) return {};
  if (value.is_string()) {
    append_string_repr(out, value.text());
  } else if (const List* list = value.list()) {
    if (list->kind == List::Kind::kGenerator) {
      out += "<generator object>";
      return {};
    }
    const bool tuple = list->kind == List::Kind::kTuple;
    out += tuple ? '(' : '[';
    for (size_t i = 0; i < list->items.size(); ++i) {
      if (i > 0) out += ", ";
      RETURN_IF_ERROR(append_repr(runtime, out, list->items[i]));
    }
    if (tuple && list->items.size() == 1) out += ',';
    out += tuple ? ')' : ']';
  } else if (const Dict* dict = value.dict()) {
    out += '{';
    for (size_t i = 0; i < dict->entries.size(); ++i) {
      if (i > 0) out += ", ";
      RETURN_IF_ERROR(append_repr(runtime, out, dict->entries[i].first));
      out += ": ";
      RETURN_IF_ERROR(append_repr(runtime, out, dict->entries[i].second));
    }
    out += '}';
  } else if (value.is_undefined()) {
    out += "Undefined";
  } else if (value.object()) {
    out += fmt::format("<{}>", value.object()->type_name());
  } else {
    out += fmt::format("<function {}>", value.callable()->name);
  }
  return {};
}

class JsonWriter {
 public:
  JsonWriter(Runtime& runtime, const JsonStyle& style) : runtime_(runtime), style_(style) {}

  Result<void> write(const Value& value) {
    RETURN_IF_ERROR(runtime_.charge(1));
    RETURN_IF_ERROR(runtime_.check_text(out_.size()));
    const Runtime::Nested nested(runtime_);
    RETURN_IF_ERROR(nested.check());
    if (write_scalar(value)) return {};
    if (value.is_string()) {
      append_json_string(out_, value.text(), style_.ensure_ascii);
      return {};
    }
    if (value.list() && value.list()->kind != List::Kind::kGenerator) return write_list(*value.list());
    if (value.dict()) return write_dict(*value.dict());
    if (value.is_undefined()) return undefined_error(value);
    return invalid_argument("Object of type {} is not JSON serializable", type_name(value));
  }
  std::string take() { return std::move(out_); }

 private:
  bool write_scalar(const Value& value) {
    if (value.is_none())
      out_ += "null";
    else if (const bool* b = value.bool_ptr())
      out_ += *b ? "true" : "false";
    else if (value.is_float() && std::isnan(*value.number()))
      out_ += "NaN";
    else if (value.is_float() && std::isinf(*value.number()))
      out_ += *value.number() > 0 ? "Infinity" : "-Infinity";
    else
      return append_scalar(out_, value);
    return true;
  }

  Result<void> write_list(const List& list) {
    out_ += '[';
    ++level_;
    for (size_t i = 0; i < list.items.size(); ++i) {
      begin_item(i == 0);
      RETURN_IF_ERROR(write(list.items[i]));
    }
    end_items(list.items.empty());
    out_ += ']';
    return {};
  }

  Result<void> write_dict(const Dict& dict) {
    auto entries = dict.entries;
    if (style_.sort_keys) {
      for (const auto& entry : entries) {
        if (!entry.first.is_string()) return invalid_argument("tojson(sort_keys=true) needs keys that are strings");
      }
      std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.first.text() < b.first.text(); });
    }
    out_ += '{';
    ++level_;
    for (size_t i = 0; i < entries.size(); ++i) {
      begin_item(i == 0);
      const Value& key = entries[i].first;
      if (key.is_string()) {
        append_json_string(out_, key.text(), style_.ensure_ascii);
      } else {
        out_ += '"';
        if (!write_scalar(key)) return invalid_argument("keys must be str, int, float, bool or None, not {}", type_name(key));
        out_ += '"';
      }
      out_ += style_.key_separator;
      RETURN_IF_ERROR(write(entries[i].second));
    }
    end_items(entries.empty());
    out_ += '}';
    return {};
  }

  void begin_item(bool first) {
    if (!first) out_ += style_.item_separator;
    if (style_.indent) new_line();
  }
  void end_items(bool empty) {
    --level_;
    if (style_.indent && !empty) new_line();
  }
  void new_line() {
    out_ += '\n';
    for (int i = 0; i < level_; ++i) out_ += *style_.indent;
  }

  Runtime& runtime_;
  const JsonStyle& style_;
  std::string out_;
  int level_ = 0;
};

}  // namespace

std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char digits[64];
  const double magnitude = std::fabs(value);
  if (magnitude != 0.0 && (magnitude < 1e-4 || magnitude >= 1e16)) {
    const auto end = std::to_chars(digits, digits + sizeof(digits), value, std::chars_format::scientific).ptr;
    return std::string(digits, end);
  }
  const auto end = std::to_chars(digits, digits + sizeof(digits), value, std::chars_format::fixed).ptr;
  std::string text(digits, end);
  if (text.find('.') == std::string::npos) text += ".0";
  return text;
}

Result<std::string> to_repr(Runtime& runtime, const Value& value) {
  std::string out;
  RETURN_IF_ERROR(append_repr(runtime, out, value));
  return out;
}

Result<std::string> to_str(Runtime& runtime, const Value& value) {
  if (value.is_string()) return value.text();
  if (value.is_undefined()) return std::string();
  return to_repr(runtime, value);
}

Result<std::string> to_json_text(Runtime& runtime, const Value& value, const JsonStyle& style) {
  JsonWriter writer(runtime, style);
  RETURN_IF_ERROR(writer.write(value));
  return writer.take();
}

}  // namespace quern::text::jinja
