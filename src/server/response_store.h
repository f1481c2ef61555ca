#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "base/json.h"

namespace quern::server {

/// A response as /v1/responses keeps it.
struct StoredResponse {
  Json response;     // as it was sent
  Json input_items;  // what the request added, each with an id
  Json messages;     // the conversation up to its end, without instructions, as text::normalize_messages takes it
};

/// The last responses, in memory: what does not fit goes, oldest first. Thread-safe.
class ResponseStore {
 public:
  /// Bytes are those of the JSON text.
  explicit ResponseStore(size_t max_responses = 4096, size_t max_bytes = size_t{256} << 20) : max_responses_(max_responses), max_bytes_(max_bytes) {}

  void put(const std::string& id, StoredResponse response);
  /// Null when it is not (or no longer) there.
  [[nodiscard]] std::shared_ptr<const StoredResponse> find(const std::string& id) const;
  bool erase(const std::string& id);
  [[nodiscard]] size_t size() const;

 private:
  struct Entry {
    std::string id;
    std::shared_ptr<const StoredResponse> response;
    size_t num_bytes = 0;
  };
  void drop(std::list<Entry>::iterator entry);

  const size_t max_responses_, max_bytes_;
  mutable std::mutex mutex_;
  std::list<Entry> entries_;  // oldest first
  std::unordered_map<std::string, std::list<Entry>::iterator> by_id_;
  size_t num_bytes_ = 0;
};

}  // namespace quern::server
