#pragma once

#include <string>
#include <string_view>

#include "server/output.h"
#include "server/output_format.h"

namespace quern::server {

/// Writes the events of a stream: everything around the choice's own members is prepared once.
///   data: {"id":..,"object":..,"created":..,"model":..,"choices":[{"index":0,<members>}],"usage":null}
class ChunkWriter {
 public:
  ChunkWriter(const ResponseHeader& header, std::string_view object);

  /// Opens an event of `choice` up to and including the comma before its members.
  void open(int32_t choice, std::string& out) const;
  /// Closes it. `top_level`: further members of the chunk, each with a comma in front.
  void close(const OutputUsage& usage, std::string& out, std::string_view top_level = {}) const;
  /// ,"finish_reason":..,"stop_reason":..
  static void append_end(const OutputDelta& delta, std::string& out);
  /// The usage chunk, if one was asked for, and the end of the stream.
  void finish(const OutputUsage& usage, std::string& out) const;

 private:
  std::string head_;  // up to "choices":[
  bool include_usage_, continuous_usage_;
};

}  // namespace quern::server
