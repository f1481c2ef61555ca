#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// Reading a message from a terminal: a text of several lines that can be edited, and the messages before it.

namespace quern::app {

/// What was entered before, the latest last. Kept in a file, one JSON string a line, where a path is given.
class LineHistory {
 public:
  explicit LineHistory(std::filesystem::path file = {});
  /// Appends, unless it is the same as the last one. A file that cannot be written is left alone.
  void add(const std::string& text);
  [[nodiscard]] const std::vector<std::string>& entries() const { return entries_; }

 private:
  static constexpr size_t kMost = 1000;
  std::filesystem::path file_;
  std::vector<std::string> entries_;
};

/// $XDG_STATE_HOME/quern/chat_history, or in ~/.local/state; empty when neither is known.
std::filesystem::path default_history_file();

/// The text under edit, as keys change it; knows nothing of a terminal. Positions are bytes of UTF-8 at character boundaries.
class EditedText {
 public:
  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] size_t cursor() const { return cursor_; }
  void set(std::string text);
  void insert(std::string_view piece);
  void left();
  void right();
  void word_left();
  void word_right();
  void line_begin();
  void line_end();
  /// To the line above or below, about the same column; false when there is none.
  bool up();
  bool down();
  void erase_before();
  void erase_at();
  void erase_word_before();
  void erase_to_line_begin();
  void erase_to_line_end();

 private:
  [[nodiscard]] size_t begin_of_line(size_t at) const;
  [[nodiscard]] size_t end_of_line(size_t at) const;
  std::string text_;
  size_t cursor_ = 0;
};

/// Reads messages from the terminal on stdin, drawing on stdout. Enter ends a message; Alt-Enter, Ctrl-J, or a backslash before Enter
/// begins a line; arrows move, up and down also through the history; pasted text keeps its lines.
class LineEditor {
 public:
  explicit LineEditor(LineHistory& history) : history_(history) {}
  enum class End : uint8_t { kEntered, kInterrupted, kEndOfInput };
  /// `prompt` is printable text. kInterrupted: Ctrl-C; kEndOfInput: Ctrl-D on an empty text, or the terminal is gone.
  End read(std::string_view prompt, std::string& text);

 private:
  enum class Key : uint8_t;
  struct Event;
  Event next_event();
  std::optional<char> next_byte();
  void draw(std::string_view prompt);
  void browse(int direction);

  LineHistory& history_;
  EditedText edited_;
  std::string input_;      // read, not yet used
  std::string unsent_;     // what was being written when the history was entered
  size_t history_at_ = 0;  // == entries: the text under edit
  int rows_above_ = 0;     // of the cursor in what was drawn last
};

}  // namespace quern::app
