#include "app/terminal.h"

#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

namespace quern::app {
namespace {

/// Ranges of East Asian wide characters and of emoji that are drawn wide.
constexpr std::array<std::pair<char32_t, char32_t>, 19> kWide = {{{0x1100, 0x115f},
                                                                  {0x231a, 0x231b},
                                                                  {0x23e9, 0x23ec},
                                                                  {0x25fd, 0x25fe},
                                                                  {0x2614, 0x2615},
                                                                  {0x2648, 0x2653},
                                                                  {0x26a1, 0x26a1},
                                                                  {0x2705, 0x2705},
                                                                  {0x274c, 0x274c},
                                                                  {0x2e80, 0x303e},
                                                                  {0x3041, 0x33ff},
                                                                  {0x3400, 0x4dbf},
                                                                  {0x4e00, 0x9fff},
                                                                  {0xa000, 0xa4cf},
                                                                  {0xac00, 0xd7a3},
                                                                  {0xf900, 0xfaff},
                                                                  {0xfe30, 0xfe6f},
                                                                  {0xff00, 0xff60},
                                                                  {0x1f300, 0x1faff}}};
constexpr std::array<std::pair<char32_t, char32_t>, 6> kCombining = {
    {{0x0300, 0x036f}, {0x1ab0, 0x1aff}, {0x200b, 0x200f}, {0x20d0, 0x20ff}, {0xfe00, 0xfe0f}, {0xfe20, 0xfe2f}}};

template <size_t N>
bool is_in(const std::array<std::pair<char32_t, char32_t>, N>& ranges, char32_t c) {
  return std::ranges::any_of(ranges, [c](const auto& range) { return c >= range.first && c <= range.second; });
}

/// Bytes of the character that begins with `first`; 0: none does.
size_t utf8_length(unsigned char first) {
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first < 0xe0) return 2;
  if (first >= 0xe0 && first < 0xf0) return 3;
  if (first >= 0xf0 && first < 0xf5) return 4;
  return 0;
}

void append_utf8(std::string& out, char32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xc0 | (c >> 6));
    out += static_cast<char>(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xe0 | (c >> 12));
    out += static_cast<char>(0x80 | ((c >> 6) & 0x3f));
    out += static_cast<char>(0x80 | (c & 0x3f));
  } else {
    out += static_cast<char>(0xf0 | (c >> 18));
    out += static_cast<char>(0x80 | ((c >> 12) & 0x3f));
    out += static_cast<char>(0x80 | ((c >> 6) & 0x3f));
    out += static_cast<char>(0x80 | (c & 0x3f));
  }
}

// What a signal that ends the process has to put back; set by one thread, read by the handler.
termios saved_mode;
volatile sig_atomic_t mode_is_changed = 0;
volatile sig_atomic_t interrupted = 0;

void restore_and_end(int signal_number) {
  if (mode_is_changed != 0) tcsetattr(STDIN_FILENO, TCSANOW, &saved_mode);
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

void note_interrupt(int) { interrupted = 1; }

/// Returns what was set before.
struct sigaction set_handler(int signal_number, void (*handler)(int)) {
  struct sigaction action {
  }, before{};
  action.sa_handler = handler;  // without SA_RESTART: a read or poll that waits returns
  sigaction(signal_number, &action, &before);
  return before;
}

}  // namespace

int terminal_width() {
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
    winsize size{};
    if (ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  }
  if (const char* columns = std::getenv("COLUMNS"); columns != nullptr) {
    if (const int width = std::atoi(columns); width > 0) return width;
  }
  return 80;
}

int character_width(char32_t c) {
  if (is_in(kCombining, c)) return 0;
  return is_in(kWide, c) || (c >= 0x20000 && c <= 0x3fffd) ? 2 : 1;
}

char32_t next_character(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const size_t length = utf8_length(byte(at));
  if (length == 1) return byte(at++);
  char32_t c = length == 0 ? 0 : byte(at) & (0xffu >> (length + 1));
  bool whole = length != 0 && at + length <= text.size();
  for (size_t i = 1; whole && i < length; ++i) {
    whole = (byte(at + i) & 0xc0) == 0x80;
    c = (c << 6) | (byte(at + i) & 0x3f);
  }
  const bool legal =
      whole && !(length == 3 && (c < 0x800 || (c >= 0xd800 && c < 0xe000))) && !(length == 4 && (c < 0x10000 || c > 0x10ffff));
  at += legal ? length : 1;
  return legal ? c : U'\ufffd';
}

std::string PrintableText::feed(std::string_view piece) {
  rest_ += piece;
  std::string out;
  size_t at = 0;
  while (at < rest_.size()) {
    const size_t length = utf8_length(static_cast<unsigned char>(rest_[at]));
    if (length > rest_.size() - at) break;  // more of it may come
    const char32_t c = next_character(rest_, at);
    if (c == '\n' || c == '\t') {
      out += static_cast<char>(c);
    } else if (c < 0x20) {
      append_utf8(out, 0x2400 + c);
    } else if (c == 0x7f || (c >= 0x80 && c < 0xa0)) {
      append_utf8(out, 0x2421);
    } else if ((c >= 0x202a && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069)) {
      append_utf8(out, 0xfffd);  // would reorder what stands around it
    } else {
      append_utf8(out, c);
    }
  }
  rest_.erase(0, at);
  return out;
}

TerminalMode::TerminalMode(Keys keys) {
  termios mode{};
  if (isatty(STDIN_FILENO) == 0 || tcgetattr(STDIN_FILENO, &mode) != 0) return;
  before_ = mode;
  outermost_ = mode_is_changed == 0;
  if (outermost_) saved_mode = mode;
  mode.c_lflag &= ~static_cast<tcflag_t>(ECHO | ICANON | IEXTEN);
  mode.c_lflag |= ISIG;
  if (keys == Keys::kAll) mode.c_lflag &= ~static_cast<tcflag_t>(ISIG);
  mode.c_iflag &= ~static_cast<tcflag_t>(ICRNL | IXON);
  mode.c_cc[VMIN] = 1;
  mode.c_cc[VTIME] = 0;
  mode_is_changed = 1;
  if (outermost_) {
    for (const int signal_number : {SIGINT, SIGTERM, SIGHUP}) set_handler(signal_number, restore_and_end);
  }
  tcsetattr(STDIN_FILENO, TCSADRAIN, &mode);  // what was typed ahead stays
  changed_ = true;
}

TerminalMode::~TerminalMode() {
  if (!changed_) return;
  tcsetattr(STDIN_FILENO, TCSADRAIN, &before_);
  if (outermost_) mode_is_changed = 0;
}

InterruptFlag::InterruptFlag() {
  interrupted = 0;
  before_ = set_handler(SIGINT, note_interrupt);
}
InterruptFlag::~InterruptFlag() { sigaction(SIGINT, &before_, nullptr); }
bool InterruptFlag::raised() { return interrupted != 0; }

}  // namespace quern::app
