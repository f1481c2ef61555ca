#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "server/http_message.h"
#include "server/http_server.h"

namespace quern::server {

/// What /metrics tells of HTTP and of the process, with the names of vLLM's exporters (prometheus_fastapi_instrumentator,
/// prometheus_client); there is something to tell before a model is loaded. Thread-safe.
class HttpMetrics {
 public:
  HttpMetrics();
  ~HttpMetrics();
  HttpMetrics(const HttpMetrics&) = delete;
  HttpMetrics& operator=(const HttpMetrics&) = delete;

  void observe(const HttpExchange& exchange);
  void count_key_refused(int32_t key_idx);

  /// The exposition text.
  [[nodiscard]] std::string expose(const HttpStats& stats, uint64_t access_log_dropped) const;

 private:
  struct Families;
  std::unique_ptr<Families> families_;
};

}  // namespace quern::server
