#pragma once

#include <charconv>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/result.h"

// One option table per command: what can be given, how help describes it, where its value goes.

namespace quern::app {

/// Stores a value given on the command line, or says what is wrong with it. A flag is set with an empty value.
class Setter {
 public:
  Setter() = default;
  template <class Store>
    requires(std::is_invocable_r_v<Result<void>, Store&, std::string_view> && !std::is_same_v<std::remove_cvref_t<Store>, Setter>)
  Setter(Store store) : store_(std::move(store)) {}  // NOLINT(google-explicit-constructor): tables hold lambdas

  Result<void> operator()(std::string_view value) const { return store_(value); }

  // What completion in a shell may offer.
  std::vector<std::string> words;  // values, where they are few and known
  bool is_path = false;

 private:
  std::function<Result<void>(std::string_view)> store_;
};

struct Option {
  std::string names;  // "--max-model-len", or several: "-tp,--tensor-parallel-size"
  std::string value;  // what help shows for the value: "N", "SIZE"; empty: a flag, which takes none
  std::string help;
  Setter set;
  bool repeatable = false;  // every occurrence is set; otherwise the last one counts
};

/// Options that belong together, under one heading of the help.
struct OptionGroup {
  std::string heading;
  std::vector<Option> options;
};

/// An argument without a name in front, "MODEL".
struct Positional {
  std::string name;
  Setter set;
  bool required = true;
};

struct Command {
  std::string name;        // "serve", "bench latency"
  std::string summary;     // one line
  std::vector<Positional> positionals;
  std::vector<OptionGroup> groups;
  std::function<int()> run;  // after everything was set; returns an ExitCode
  std::string why_absent;    // not empty: this build lacks the command, for this reason
  std::string description;   // for the manual page; paragraphs with an empty line between them
};

// Values as people write them. Errors name what was expected.

/// 4096, 4G, 1.5GiB, 512MiB, 100MB, 32k. K, M, G, T and KiB, MiB, ... are powers of 1024; k, m, g, t and kB, MB, ... of 1000.
Result<uint64_t> parse_size(std::string_view text);
Result<int64_t> parse_integer(std::string_view text);
Result<double> parse_number(std::string_view text);
/// "a,b" -> a, b; empty parts are kept.
std::vector<std::string_view> split_at_commas(std::string_view text);
/// "0,63,64" or "0 63 64".
Result<std::vector<int64_t>> parse_integer_list(std::string_view text);

// Setters. Targets must live as long as the command.

Setter to_text(std::string& target);
Setter to_text(std::optional<std::string>& target);
Setter to_path(std::filesystem::path& target);
/// The same setter for an option whose value names a file or folder.
Setter naming_a_path(Setter setter);
Setter to_flag(bool& target, bool value = true);
Setter to_size(std::optional<uint64_t>& target);
Setter to_number(double& target, double lowest, double highest);
Setter to_list(std::vector<int64_t>& target);

/// A whole number in [lowest, highest]; sizes such as 32K are understood.
template <class Integer>
Setter to_integer(Integer& target, int64_t lowest, int64_t highest) {
  return [&target, lowest, highest](std::string_view text) -> Result<void> {
    int64_t value = 0;
    if (Result<int64_t> plain = parse_integer(text)) {
      value = *plain;
    } else {
      ASSIGN_OR_RETURN(const uint64_t size, parse_size(text));
      if (size > static_cast<uint64_t>(INT64_MAX)) return invalid_argument("{} is too large", text);
      value = static_cast<int64_t>(size);
    }
    if (value < lowest || value > highest) return invalid_argument("{} is not in the range {} to {}", text, lowest, highest);
    target = static_cast<Integer>(value);
    return {};
  };
}

/// One of several words.
template <class Value>
Setter to_choice(Value& target, std::vector<std::pair<std::string, Value>> words) {
  std::vector<std::string> names;
  for (const auto& [word, value] : words) names.push_back(word);
  Setter setter = [&target, words = std::move(words)](std::string_view text) -> Result<void> {
    std::string all;
    for (const auto& [word, value] : words) {
      if (word == text) {
        target = value;
        return {};
      }
      all += (all.empty() ? "" : ", ") + word;
    }
    return invalid_argument("'{}' is not one of {}", text, all);
  };
  setter.words = std::move(names);
  return setter;
}

}  // namespace quern::app
