#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "text/tool_schemas.h"

namespace quern::text {

/// Reads the calls out of a stream of content (model-spec.md 4.4), one block a call:
///   <tool_call> <function=NAME> <parameter=NAME> VALUE </parameter> ... </function> </tool_call>
/// Arguments come out as JSON text, piece by piece; all pieces of a call together are one JSON object, also where the stream was cut off or
/// tags are missing. Values are converted by the tool's schema. A <tool_call> without a function is content, as is everything outside;
/// white space around calls is dropped. The outcome does not depend on how the text is cut into pieces. One stream, one thread.
class ToolCallParser {
 public:
  struct Piece {
    size_t call = 0;        // from 0
    std::string name;       // not empty in the first piece of a call
    std::string arguments;  // what follows of the JSON
  };
  /// Where content stands: behind so many calls.
  struct ContentRun {
    size_t calls_before = 0, num_bytes = 0;
  };
  struct Delta {
    std::string content;
    std::vector<ContentRun> runs;  // of `content`, one after the other
    std::vector<Piece> pieces;
  };

  /// After `max_calls` calls everything is dropped.
  ToolCallParser(std::shared_ptr<const ToolSchemas> tools, size_t max_calls) : tools_(std::move(tools)), max_calls_(max_calls) {}

  Delta push(std::string_view text);
  /// Closes what is open; nothing may be pushed afterwards.
  Delta finish();
  [[nodiscard]] size_t num_begun() const { return num_begun_; }
  [[nodiscard]] size_t num_complete() const { return num_complete_; }

 private:
  enum class State : uint8_t { kText, kBlock, kFunction, kAfterFunction, kValue, kDone };
  void run(Delta& delta, bool at_end);
  /// One step on held_; false when it has to wait for more text.
  bool step(Delta& delta, bool at_end);
  bool step_text(Delta& delta, bool at_end);
  bool step_block(Delta& delta, bool at_end);
  bool step_function(Delta& delta, bool at_end);
  bool step_after_function(Delta& delta, bool at_end);
  bool step_value(Delta& delta, bool at_end);
  void add_content(std::string_view text, Delta& delta) const;
  void begin_call(std::string name, Delta& delta);
  void end_call(Delta& delta);
  void begin_value(std::string name, Delta& delta);
  void add_value(std::string_view text, Delta& delta);
  void end_value(Delta& delta, bool complete);
  void add_key(Delta& delta);
  std::string& arguments(Delta& delta);
  /// The end of the value in held_, or where it may begin.
  struct ValueEnd {
    size_t value = 0;     // bytes that belong to the value for certain
    bool ended = false;
    size_t consumed = 0;  // bytes up to the next state, with the tag where it belongs to the value
  };
  [[nodiscard]] ValueEnd find_value_end() const;

  std::shared_ptr<const ToolSchemas> tools_;
  size_t max_calls_;
  State state_ = State::kText;
  std::string held_;
  std::string opening_;           // kBlock: text that becomes content when no function follows
  size_t num_begun_ = 0, num_complete_ = 0;
  bool after_call_ = false;       // white space is dropped until text comes
  std::string function_, parameter_;
  std::set<std::string> seen_;    // parameters of the call
  bool has_arguments_ = false;    // the object is open
  bool value_begins_ = false;     // behind the tag: a newline may follow
  bool value_is_empty_ = false;   // so far
  bool skipped_ = false;          // the parameter was there already
  unsigned types_ = kJsonAny;
  std::string value_;             // of types other than string, until it is complete
};

}  // namespace quern::text
