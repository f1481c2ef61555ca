#include "server/response_store.h"

#include <iterator>
#include <utility>

namespace quern::server {

void ResponseStore::put(const std::string& id, StoredResponse response) {
  const size_t bytes = dump_json(response.response).size() + dump_json(response.input_items).size() + dump_json(response.messages).size();
  auto shared = std::make_shared<const StoredResponse>(std::move(response));
  const std::lock_guard lock(mutex_);
  if (const auto old = by_id_.find(id); old != by_id_.end()) drop(old->second);
  entries_.push_back({id, std::move(shared), bytes});
  by_id_[id] = std::prev(entries_.end());
  num_bytes_ += bytes;
  while (!entries_.empty() && (entries_.size() > max_responses_ || num_bytes_ > max_bytes_)) drop(entries_.begin());
}

std::shared_ptr<const StoredResponse> ResponseStore::find(const std::string& id) const {
  const std::lock_guard lock(mutex_);
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : found->second->response;
}

bool ResponseStore::erase(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return false;
  drop(found->second);
  return true;
}

size_t ResponseStore::size() const {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

void ResponseStore::drop(std::list<Entry>::iterator entry) {
  num_bytes_ -= entry->num_bytes;
  by_id_.erase(entry->id);
  entries_.erase(entry);
}

}  // namespace quern::server
