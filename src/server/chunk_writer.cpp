#include "server/chunk_writer.h"

#include <fmt/format.h>

#include <iterator>

#include "server/json_writer.h"

namespace quern::server {

ChunkWriter::ChunkWriter(const ResponseHeader& header, std::string_view object)
    : include_usage_(header.include_usage), continuous_usage_(header.continuous_usage) {
  head_ = "data: {\"id\":";
  append_json_string(head_, header.id);
  head_ += fmt::format(",\"object\":\"{}\",\"created\":{},\"model\":", object, header.created);
  append_json_string(head_, header.model);
  head_ += ",\"choices\":[";
}

void ChunkWriter::open(int32_t choice, std::string& out) const {
  out += head_;
  fmt::format_to(std::back_inserter(out), "{{\"index\":{},", choice);
}

void ChunkWriter::close(const OutputUsage& usage, std::string& out, std::string_view top_level) const {
  out += "}]";
  out += top_level;
  if (continuous_usage_) {
    out += ",\"usage\":";
    out += dump_json(usage_json(usage));
  } else if (include_usage_) {
    out += ",\"usage\":null";
  }
  out += "}\n\n";
}

void ChunkWriter::append_end(const OutputDelta& delta, std::string& out) {
  if (!delta.end) {
    out += ",\"finish_reason\":null";
    return;
  }
  fmt::format_to(std::back_inserter(out), ",\"finish_reason\":\"{}\",\"stop_reason\":", delta.end->finish_reason);
  if (delta.end->stop_string) {
    append_json_string(out, *delta.end->stop_string);
  } else if (delta.end->stop_token) {
    fmt::format_to(std::back_inserter(out), "{}", *delta.end->stop_token);
  } else {
    out += "null";
  }
}

void ChunkWriter::finish(const OutputUsage& usage, std::string& out) const {
  if (include_usage_) {
    out += head_;
    out += "],\"usage\":";
    out += dump_json(usage_json(usage));
    out += "}\n\n";
  }
  append_done_event(out);
}

}  // namespace quern::server
