#pragma once

#include <signal.h>
#include <termios.h>

#include <atomic>
#include <string>
#include <string_view>

// The terminal below `quern chat`: its modes, its width, what may be written to it, and Ctrl-C.

namespace quern::app {

/// Columns of the terminal behind stdout or stderr; 80 where there is none.
int terminal_width();

/// Columns that one character takes: 2 for wide ones, 0 for combining ones.
int character_width(char32_t character);

/// Reads one character of UTF-8 at `at` and moves behind it; bytes that are none are U+FFFD, one each.
char32_t next_character(std::string_view text, size_t& at);

/// Takes a text apart that may hold anything, as a model writes it: control characters, which would command the terminal, are shown as
/// symbols (U+2400 and on) except line breaks and tabs. Works on pieces of any size, also ones that end within a character.
class PrintableText {
 public:
  std::string feed(std::string_view piece);

 private:
  std::string rest_;  // the beginning of a character
};

/// Switches the terminal on stdin to reading keys one by one, without echo; back to what was before when destroyed, and when a signal ends
/// the process. Can be nested: what is typed between an outer and an inner one is not touched. Does nothing where stdin is no terminal.
class TerminalMode {
 public:
  enum class Keys : uint8_t { kAll, kSignals };  // kSignals: Ctrl-C is still a signal
  explicit TerminalMode(Keys keys);
  ~TerminalMode();
  TerminalMode(const TerminalMode&) = delete;
  TerminalMode& operator=(const TerminalMode&) = delete;

 private:
  bool changed_ = false, outermost_ = false;
  termios before_{};
};

/// While one lives, SIGINT only sets a flag; afterwards it does again what it did before.
class InterruptFlag {
 public:
  InterruptFlag();
  ~InterruptFlag();
  InterruptFlag(const InterruptFlag&) = delete;
  InterruptFlag& operator=(const InterruptFlag&) = delete;
  [[nodiscard]] static bool raised();

 private:
  struct sigaction before_ {};
};

}  // namespace quern::app
