#include "app/chat_terminal.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <optional>

#include "app/line_editor.h"
#include "app/nearest.h"
#include "app/terminal.h"
#include "base/file.h"

namespace quern::app {
namespace {

constexpr std::string_view kHelp =
    "  /help                     this list\n"
    "  /new                      begin a new conversation\n"
    "  /retry                    ask the last question again\n"
    "  /system [TEXT]            show or set the system prompt; /system - removes it\n"
    "  /params [NAME VALUE]      show or set a parameter; \"default\" leaves it to the model\n"
    "  /save FILE                write the conversation: .json as a request, anything else as Markdown\n"
    "  /quit                     leave, as Ctrl-D does\n"
    "  //TEXT                    a message that begins with a slash\n"
    "  Enter sends; Alt-Enter, Ctrl-J or a backslash before Enter begins a line; Ctrl-C stops an answer.\n";

/// A terminal that understands no commands, such as a shell inside an editor.
bool is_dumb_terminal() {
  const char* term = std::getenv("TERM");
  return term == nullptr || *term == '\0' || std::string_view(term) == "dumb";
}

bool uses_colours() {
  const char* no_color = std::getenv("NO_COLOR");
  return isatty(STDOUT_FILENO) != 0 && !is_dumb_terminal() && (no_color == nullptr || *no_color == '\0');
}

/// A line as such a terminal sends it.
LineEditor::End read_plainly(std::string_view prompt, std::string& text) {
  fmt::print("{}", prompt);
  std::fflush(stdout);
  return std::getline(std::cin, text) ? LineEditor::End::kEntered : LineEditor::End::kEndOfInput;
}

/// Shows an answer as it comes: reasoning dim, then the text, nothing that would command the terminal.
class AnswerPrinter {
 public:
  AnswerPrinter() : colours_(uses_colours()) {}
  void reasoning(std::string_view piece) {
    if (state_ == State::kNothing) {
      if (colours_) fmt::print("\033[2m");
      if (!colours_) fmt::print("(thinking)\n");
      state_ = State::kReasoning;
    }
    print(piece);
  }
  void content(std::string_view piece) {
    end_reasoning();
    state_ = State::kContent;
    print(piece);
  }
  /// Ends the last line.
  void finish() {
    end_reasoning();
    if (state_ == State::kContent && !at_line_begin_) fmt::print("\n");
    std::fflush(stdout);
  }
  /// A remark of ours.
  void remark(std::string_view text) const { fmt::print("{}[{}]{}\n", colours_ ? "\033[2m" : "", text, colours_ ? "\033[0m" : ""); }

 private:
  enum class State : uint8_t { kNothing, kReasoning, kContent };
  void print(std::string_view piece) {
    const std::string text = printable_.feed(piece);
    if (text.empty()) return;
    at_line_begin_ = text.back() == '\n';
    fmt::print("{}", text);
    std::fflush(stdout);
  }
  void end_reasoning() {
    if (state_ != State::kReasoning) return;
    fmt::print("{}{}", colours_ ? "\033[0m" : "", at_line_begin_ ? "\n" : "\n\n");
    if (!colours_) fmt::print("(answer)\n");
    state_ = State::kNothing;
    at_line_begin_ = true;
  }
  bool colours_;
  State state_ = State::kNothing;
  bool at_line_begin_ = true;
  PrintableText printable_;
};

class ChatTerminal {
 public:
  ChatTerminal(ChatSession& session, const ChatTerminalOptions& options)
      : session_(session), history_(options.history_file), editor_(history_) {}

  void run() {
    const bool colours = uses_colours();
    const std::string prompt = "> ";
    fmt::print("{}\n", PrintableText().feed(fmt::format("Talking with {}; /help lists what else there is.", session_.model())));
    for (;;) {
      if (colours) fmt::print("\033[1m");
      std::string text;
      const LineEditor::End end = is_dumb_terminal() ? read_plainly(prompt, text) : editor_.read(prompt, text);
      if (colours) fmt::print("\033[0m");
      std::fflush(stdout);
      if (end == LineEditor::End::kEndOfInput) return;
      if (end == LineEditor::End::kInterrupted) {
        fmt::print("(Ctrl-D or /quit leaves)\n");
        continue;
      }
      if (text.find_first_not_of(" \t\n") == std::string::npos) continue;
      if (text.starts_with("//")) {
        ask(text.substr(1));
      } else if (!text.starts_with('/')) {
        ask(text);
      } else if (!obey(text)) {
        return;
      }
    }
  }

 private:
  void ask(const std::string& text) {
    AnswerPrinter printer;
    Result<AnswerFigures> figures = [&] {
      const InterruptFlag interrupt;
      return session_.ask(text, {.on_reasoning = [&](std::string_view piece) { printer.reasoning(piece); },
                                 .on_content = [&](std::string_view piece) { printer.content(piece); },
                                 .interrupted = InterruptFlag::raised});
    }();
    printer.finish();
    printer.remark(PrintableText().feed(figures ? figures_text(*figures) : figures.error().message));
  }

  /// False to leave.
  bool obey(const std::string& line) {
    const size_t end = std::min(line.find_first_of(" \t\n"), line.size());
    const std::string command = line.substr(1, end - 1);
    const size_t begin = line.find_first_not_of(" \t\n", end);
    std::string rest = begin == std::string::npos ? "" : line.substr(begin);
    rest.erase(rest.find_last_not_of(" \t\n") + 1);
    const auto say = [](std::string_view text) { fmt::print("{}\n", PrintableText().feed(text)); };
    if (command == "quit" || command == "exit") return false;
    if (command == "help") {
      fmt::print("{}", kHelp);
    } else if (command == "new") {
      session_.clear();
      say("A new conversation.");
    } else if (command == "retry") {
      if (const std::optional<std::string> question = session_.take_back()) {
        ask(*question);
      } else {
        say("Nothing has been asked yet.");
      }
    } else if (command == "system") {
      if (!rest.empty()) session_.set_system_prompt(rest == "-" ? "" : rest);
      say(session_.system_prompt().empty() ? "There is no system prompt." : fmt::format("System prompt: {}", session_.system_prompt()));
    } else if (command == "params") {
      set_parameter(rest, say);
    } else if (command == "save") {
      save(rest, say);
    } else {
      const std::string nearest = nearest_name(command, {"help", "new", "retry", "system", "params", "save", "quit"});
      say(fmt::format("There is no /{}{}; /help lists what there is.", command,
                      nearest.empty() ? "" : fmt::format(" (did you mean /{}?)", nearest)));
    }
    return true;
  }

  template <class Say>
  void set_parameter(const std::string& rest, const Say& say) {
    if (const size_t blank = rest.find_first_of(" ="); !rest.empty()) {
      const std::string name = rest.substr(0, blank),
                        value = blank == std::string::npos ? "" : rest.substr(rest.find_first_not_of(" =", blank));
      if (value.empty()) return say("A parameter needs a value: /params temperature 0.7");
      if (const Result<void> set = session_.parameters().set(name, value); !set) return say(set.error().message);
    }
    for (const auto& [name, value] : session_.parameters().list()) say(fmt::format("  {:<18} {}", name, value));
  }

  template <class Say>
  void save(const std::string& file, const Say& say) {
    if (file.empty()) return say("/save needs the name of a file.");
    if (session_.empty()) return say("There is nothing to save yet.");
    const bool json = std::filesystem::path(file).extension() == ".json";
    const Result<void> written =
        write_file(file, json ? session_.request().dump(2, ' ', false, Json::error_handler_t::replace) + "\n" : session_.markdown());
    say(written ? fmt::format("Written to {}.", file) : written.error().message);
  }

  ChatSession& session_;
  LineHistory history_;
  LineEditor editor_;
};

}  // namespace

Result<void> run_chat_terminal(ChatSession& session, const ChatTerminalOptions& options) {
  std::optional<TerminalMode> mode;  // also between messages and answers: what is typed ahead stays as it is
  if (!is_dumb_terminal()) mode.emplace(TerminalMode::Keys::kSignals);
  ChatTerminal(session, options).run();
  return {};
}

Result<void> ask_once(ChatSession& session, const std::string& question) {
  const bool terminal = isatty(STDOUT_FILENO) != 0;
  AnswerPrinter printer;
  bool ends_line = true;
  Result<AnswerFigures> figures = session.ask(question, {.on_reasoning =
                                                             [&](std::string_view piece) {
                                                               if (terminal) printer.reasoning(piece);
                                                             },
                                                         .on_content =
                                                             [&](std::string_view piece) {
                                                               if (terminal) return printer.content(piece);
                                                               std::fwrite(piece.data(), 1, piece.size(), stdout);
                                                               std::fflush(stdout);
                                                               ends_line = piece.back() == '\n';
                                                             },
                                                         .interrupted = [] { return false; }});
  if (terminal) printer.finish();
  if (!ends_line) fmt::print("\n");
  if (!figures) return std::move(figures).error();
  return {};
}

}  // namespace quern::app
