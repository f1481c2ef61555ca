#pragma once

#include <filesystem>

#include "app/chat_session.h"

namespace quern::app {

struct ChatTerminalOptions {
  std::filesystem::path history_file;  // empty: none is kept
};

/// Talks with a person on a terminal until they leave: messages of several lines, /commands, reasoning in dim letters, Ctrl-C stops the
/// answer.
Result<void> run_chat_terminal(ChatSession& session, const ChatTerminalOptions& options);

/// One question, one answer. Where stdout is no terminal it gets the answer alone, without reasoning.
Result<void> ask_once(ChatSession& session, const std::string& question);

}  // namespace quern::app
