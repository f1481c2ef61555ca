#include "app/line_editor.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "app/terminal.h"
#include "base/json.h"

namespace quern::app {

// History

LineHistory::LineHistory(std::filesystem::path file) : file_(std::move(file)) {
  if (file_.empty()) return;
  std::ifstream stream(file_);
  for (std::string line; std::getline(stream, line);) {
    if (const Result<Json> text = parse_json(line, "history"); text && text->is_string()) entries_.push_back(text->get<std::string>());
  }
  if (entries_.size() > kMost) entries_.erase(entries_.begin(), entries_.end() - kMost);
}

void LineHistory::add(const std::string& text) {
  if (text.empty() || (!entries_.empty() && entries_.back() == text)) return;
  entries_.push_back(text);
  if (entries_.size() > kMost) entries_.erase(entries_.begin());
  if (file_.empty()) return;
  std::error_code ignored;
  std::filesystem::create_directories(file_.parent_path(), ignored);
  const int fd = open(file_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0) return;
  const std::string line = dump_json(text) + "\n";
  if (write(fd, line.data(), line.size()) < 0) file_.clear();  // a full disk: no more of it
  close(fd);
}

std::filesystem::path default_history_file() {
  if (const char* state = std::getenv("XDG_STATE_HOME"); state != nullptr && *state != '\0')
    return std::filesystem::path(state) / "quern/chat_history";
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0')
    return std::filesystem::path(home) / ".local/state/quern/chat_history";
  return {};
}

// The text

namespace {

bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }
bool is_blank(char c) { return c == ' ' || c == '\n' || c == '\t'; }

}  // namespace

void EditedText::set(std::string text) {
  text_ = std::move(text);
  cursor_ = text_.size();
}
void EditedText::insert(std::string_view piece) {
  text_.insert(cursor_, piece);
  cursor_ += piece.size();
}
void EditedText::left() {
  if (cursor_ == 0) return;
  do --cursor_;
  while (cursor_ > 0 && is_continuation(text_[cursor_]));
}
void EditedText::right() {
  if (cursor_ == text_.size()) return;
  do ++cursor_;
  while (cursor_ < text_.size() && is_continuation(text_[cursor_]));
}
void EditedText::word_left() {
  while (cursor_ > 0 && is_blank(text_[cursor_ - 1])) --cursor_;
  while (cursor_ > 0 && !is_blank(text_[cursor_ - 1])) --cursor_;
}
void EditedText::word_right() {
  while (cursor_ < text_.size() && is_blank(text_[cursor_])) ++cursor_;
  while (cursor_ < text_.size() && !is_blank(text_[cursor_])) ++cursor_;
}
size_t EditedText::begin_of_line(size_t at) const {
  const size_t newline = at == 0 ? std::string::npos : text_.rfind('\n', at - 1);
  return newline == std::string::npos ? 0 : newline + 1;
}
size_t EditedText::end_of_line(size_t at) const { return std::min(text_.find('\n', at), text_.size()); }
void EditedText::line_begin() { cursor_ = begin_of_line(cursor_); }
void EditedText::line_end() { cursor_ = end_of_line(cursor_); }
bool EditedText::up() {
  const size_t begin = begin_of_line(cursor_);
  if (begin == 0) return false;
  const size_t column = cursor_ - begin, above = begin_of_line(begin - 1);
  cursor_ = std::min(above + column, begin - 1);
  while (cursor_ > above && is_continuation(text_[cursor_])) --cursor_;
  return true;
}
bool EditedText::down() {
  const size_t end = end_of_line(cursor_);
  if (end == text_.size()) return false;
  const size_t column = cursor_ - begin_of_line(cursor_);
  cursor_ = std::min(end + 1 + column, end_of_line(end + 1));
  while (cursor_ > end + 1 && cursor_ < text_.size() && is_continuation(text_[cursor_])) --cursor_;
  return true;
}
void EditedText::erase_before() {
  const size_t end = cursor_;
  left();
  text_.erase(cursor_, end - cursor_);
}
void EditedText::erase_at() {
  const size_t begin = cursor_;
  right();
  text_.erase(begin, cursor_ - begin);
  cursor_ = begin;
}
void EditedText::erase_word_before() {
  const size_t end = cursor_;
  word_left();
  text_.erase(cursor_, end - cursor_);
}
void EditedText::erase_to_line_begin() {
  const size_t end = cursor_;
  line_begin();
  text_.erase(cursor_, end - cursor_);
}
void EditedText::erase_to_line_end() { text_.erase(cursor_, end_of_line(cursor_) - cursor_); }

// Keys

enum class LineEditor::Key : uint8_t {
  kText,
  kEnter,
  kNewline,
  kLeft,
  kRight,
  kWordLeft,
  kWordRight,
  kUp,
  kDown,
  kHome,
  kEnd,
  kBackspace,
  kDelete,
  kEraseWord,
  kEraseToBegin,
  kEraseToEnd,
  kClear,
  kInterrupt,
  kEndOfInput,
  kGone,
  kNone
};

struct LineEditor::Event {
  Key key = Key::kNone;
  std::string text = {};
};

std::optional<char> LineEditor::next_byte() {
  while (input_.empty()) {
    char buffer[4096];
    const ssize_t got = ::read(STDIN_FILENO, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return std::nullopt;
    input_.assign(buffer, static_cast<size_t>(got));
  }
  const char c = input_.front();
  input_.erase(0, 1);
  return c;
}

LineEditor::Event LineEditor::next_event() {
  const std::optional<char> first = next_byte();
  if (!first) return {Key::kGone};
  switch (const char c = *first) {
    case '\r': return {Key::kEnter};
    case '\n': return {Key::kNewline};
    case 1: return {Key::kHome};
    case 2: return {Key::kLeft};
    case 3: return {Key::kInterrupt};
    case 4: return {Key::kEndOfInput};
    case 5: return {Key::kEnd};
    case 6: return {Key::kRight};
    case 8:
    case 127: return {Key::kBackspace};
    case 11: return {Key::kEraseToEnd};
    case 12: return {Key::kClear};
    case 14: return {Key::kDown};
    case 16: return {Key::kUp};
    case 21: return {Key::kEraseToBegin};
    case 23: return {Key::kEraseWord};
    case 27: break;
    case '\t': return {Key::kText, "\t"};
    default: {
      if (static_cast<unsigned char>(c) < 32) return {Key::kNone};
      std::string text(1, c);
      while (!input_.empty() && static_cast<unsigned char>(input_.front()) >= 32 &&
             input_.front() != 127) {  // what was typed or pasted at once
        text += input_.front();
        input_.erase(0, 1);
      }
      return {Key::kText, std::move(text)};
    }
  }
  // Escape sequences: ESC CR, ESC b, ESC [ parameters letter, ESC O letter.
  const std::optional<char> second = next_byte();
  if (!second) return {Key::kGone};
  if (*second == '\r' || *second == '\n') return {Key::kNewline};
  if (*second == 'b') return {Key::kWordLeft};
  if (*second == 'f') return {Key::kWordRight};
  if (*second == 127) return {Key::kEraseWord};
  if (*second != '[' && *second != 'O') return {Key::kNone};
  std::string parameters;
  char last = 0;
  while (last == 0) {
    const std::optional<char> c = next_byte();
    if (!c) return {Key::kGone};
    if ((*c >= '0' && *c <= '9') || *c == ';') {
      parameters += *c;
    } else {
      last = *c;
    }
  }
  if (last == '~' && parameters == "200") {  // a paste, up to ESC [ 201 ~
    constexpr std::string_view kEnd = "\033[201~";
    std::string pasted;
    while (!pasted.ends_with(kEnd)) {
      const std::optional<char> c = next_byte();
      if (!c) return {Key::kGone};
      pasted += *c;
    }
    pasted.resize(pasted.size() - kEnd.size());
    std::string text;
    for (size_t i = 0; i < pasted.size(); ++i) {
      if (pasted[i] == '\r') {
        if (i + 1 >= pasted.size() || pasted[i + 1] != '\n') text += '\n';
      } else if (static_cast<unsigned char>(pasted[i]) >= 32 || pasted[i] == '\n' || pasted[i] == '\t') {
        text += pasted[i];
      }
    }
    return {Key::kText, std::move(text)};
  }
  const bool with_control = parameters.ends_with(";5") || parameters.ends_with(";3");
  switch (last) {
    case 'A': return {Key::kUp};
    case 'B': return {Key::kDown};
    case 'C': return {with_control ? Key::kWordRight : Key::kRight};
    case 'D': return {with_control ? Key::kWordLeft : Key::kLeft};
    case 'H': return {Key::kHome};
    case 'F': return {Key::kEnd};
    case '~':
      if (parameters == "1" || parameters == "7") return {Key::kHome};
      if (parameters == "4" || parameters == "8") return {Key::kEnd};
      if (parameters == "3") return {Key::kDelete};
      return {Key::kNone};
    default: return {Key::kNone};
  }
}

// Drawing

namespace {

/// Where the pen of a terminal stands; breaks lines at the width by itself, since terminals differ in what they do there.
struct Pen {
  int width;
  int row = 0, column = 0;
  std::string out = {};

  void put(std::string_view text) {
    for (size_t at = 0; at < text.size();) {
      const size_t begin = at;
      const char32_t c = next_character(text, at);
      if (c == '\n') {
        newline();
        put("  ");
        continue;
      }
      const int columns = c == '\t' ? 4 : character_width(c);
      if (column + columns > width) newline();
      out += c == '\t' ? "    " : text.substr(begin, at - begin);
      column += columns;
      if (column >= width) newline();
    }
  }
  void newline() {
    out += "\r\n";
    ++row;
    column = 0;
  }
};

}  // namespace

void LineEditor::draw(std::string_view prompt) {
  Pen pen{.width = terminal_width()};
  if (rows_above_ > 0) pen.out += fmt::format("\033[{}A", rows_above_);
  pen.out += "\r\033[J";
  pen.put(prompt);
  const std::string& text = edited_.text();
  pen.put(std::string_view(text).substr(0, edited_.cursor()));
  const int row = pen.row, column = pen.column;
  pen.put(std::string_view(text).substr(edited_.cursor()));
  if (pen.row > row) pen.out += fmt::format("\033[{}A", pen.row - row);
  pen.out += "\r";
  if (column > 0) pen.out += fmt::format("\033[{}C", column);
  rows_above_ = row;
  fmt::print("{}", pen.out);
  std::fflush(stdout);
}

void LineEditor::browse(int direction) {
  const std::vector<std::string>& entries = history_.entries();
  if (direction < 0 ? history_at_ == 0 : history_at_ >= entries.size()) return;
  if (history_at_ == entries.size()) unsent_ = edited_.text();
  history_at_ += direction < 0 ? size_t(-1) : 1;
  edited_.set(history_at_ == entries.size() ? unsent_ : entries[history_at_]);
}

LineEditor::End LineEditor::read(std::string_view prompt, std::string& text) {
  const TerminalMode mode(TerminalMode::Keys::kAll);
  edited_.set({});
  history_at_ = history_.entries().size();
  rows_above_ = 0;
  fmt::print("\033[?2004h");  // pastes come in brackets
  const auto finish = [&](End end) {
    edited_.set(edited_.text());
    draw(prompt);  // the cursor behind everything
    fmt::print("\033[?2004l\r\n");
    std::fflush(stdout);
    return end;
  };
  for (;;) {
    if (input_.empty()) draw(prompt);
    const Event event = next_event();
    switch (event.key) {
      case Key::kText: edited_.insert(event.text); break;
      case Key::kNewline: edited_.insert("\n"); break;
      case Key::kEnter:
        if (edited_.cursor() > 0 && edited_.text()[edited_.cursor() - 1] == '\\') {
          edited_.erase_before();
          edited_.insert("\n");
          break;
        }
        text = edited_.text();
        history_.add(text);
        return finish(End::kEntered);
      case Key::kLeft: edited_.left(); break;
      case Key::kRight: edited_.right(); break;
      case Key::kWordLeft: edited_.word_left(); break;
      case Key::kWordRight: edited_.word_right(); break;
      case Key::kUp:
        if (!edited_.up()) browse(-1);
        break;
      case Key::kDown:
        if (!edited_.down()) browse(+1);
        break;
      case Key::kHome: edited_.line_begin(); break;
      case Key::kEnd: edited_.line_end(); break;
      case Key::kBackspace: edited_.erase_before(); break;
      case Key::kDelete: edited_.erase_at(); break;
      case Key::kEraseWord: edited_.erase_word_before(); break;
      case Key::kEraseToBegin: edited_.erase_to_line_begin(); break;
      case Key::kEraseToEnd: edited_.erase_to_line_end(); break;
      case Key::kClear:
        fmt::print("\033[H\033[2J");
        rows_above_ = 0;
        break;
      case Key::kInterrupt: return finish(End::kInterrupted);
      case Key::kEndOfInput:
        if (edited_.text().empty()) return finish(End::kEndOfInput);
        break;
      case Key::kGone: return finish(End::kEndOfInput);
      case Key::kNone: break;
    }
  }
}

}  // namespace quern::app
