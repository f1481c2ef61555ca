#include "text/json_formats.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <utility>

namespace quern::text {
namespace {

// Days that the month does not have are left out, the 29th of February in years that have none included (RFC 3339, section 5.7).
constexpr std::string_view kDate =
    R"((?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])))"
    R"(|(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29))";
constexpr std::string_view kTime = R"((?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9]))";
constexpr std::string_view kDuration =
    R"(P(?:[0-9]{1,9}W|(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)(?:T@)?|T@))";
constexpr std::string_view kDurationTime = R"((?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S))";
constexpr std::string_view kLabel = R"([A-Za-z0-9]+(?:-+[A-Za-z0-9]+)*)";
constexpr std::string_view kMailAtom = R"([A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)";
constexpr std::string_view kOctet = R"((?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9]))";

/// All forms of RFC 4291, section 2.2: eight groups, or fewer around one "::", the last two perhaps as an IPv4 address.
std::string ipv6() {
  const std::string group = "[0-9a-fA-F]{1,4}", ipv4 = fmt::format(R"({0}(?:\.{0}){{3}})", kOctet);
  const std::string last_two = fmt::format("(?:{0}:{0}|{1})", group, ipv4);
  std::string out = fmt::format("(?:{}:){{6}}{}", group, last_two);
  for (int before = 0; before <= 7; ++before) {
    const std::string head = before == 0 ? "" : before == 1 ? group : fmt::format("{0}(?::{0}){{{1}}}", group, before - 1);
    const int most = 7 - before;  // groups behind "::", which stands for one at least
    std::string tail;
    if (most >= 2) tail = fmt::format("(?:(?:{0}:){{0,{1}}}{2}|{0})?", group, most - 2, last_two);
    if (most == 1) tail = fmt::format("(?:{})?", group);
    out += fmt::format("|{}::{}", head, tail);
  }
  return out;
}

constexpr std::array<std::string_view, 10> kKnown{"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"};
constexpr std::array<std::string_view, 6> kFree{"binary", "byte", "password", "float", "double", "decimal"};

}  // namespace

std::optional<std::string> format_pattern(std::string_view format) {
  if (format == "date") return fmt::format("^(?:{})$", kDate);
  if (format == "time") return fmt::format("^{}$", kTime);
  if (format == "date-time") return fmt::format("^(?:{})T{}$", kDate, kTime);
  if (format == "duration") {
    std::string out = "^";
    for (const char c : kDuration) out += c == '@' ? std::string(kDurationTime) : std::string(1, c);
    return out + "$";
  }
  if (format == "email") return fmt::format(R"(^{0}(?:\.{0})*@{1}(?:\.{1})+$)", kMailAtom, kLabel);
  if (format == "hostname") return fmt::format(R"(^{0}(?:\.{0})*$)", kLabel);
  if (format == "ipv4") return fmt::format(R"(^{0}(?:\.{0}){{3}}$)", kOctet);
  if (format == "ipv6") return fmt::format("^(?:{})$", ipv6());
  if (format == "uuid") return "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$";
  if (format == "uri") return R"(^[A-Za-z][A-Za-z0-9+.-]*:(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+$)";
  return std::nullopt;
}

bool is_free_format(std::string_view format) {
  for (const std::string_view name : kFree)
    if (name == format) return true;
  return false;
}

std::string known_formats() { return fmt::format("{}, int32 and int64; {} mean nothing here", fmt::join(kKnown, ", "), fmt::join(kFree, ", ")); }

}  // namespace quern::text
