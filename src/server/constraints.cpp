#include "server/constraints.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace quern::server {

text::TokenMasks& Constraints::masks() {
  std::call_once(masks_made_, [this] {
    masks_ = std::make_unique<text::TokenMasks>(std::make_shared<const text::TokenVocabulary>(*tokenizer_, vocab_size_));
  });
  return *masks_;
}

Result<std::shared_ptr<const text::TokenGrammar>> Constraints::compiled(const text::OutputShape& shape) {
  if (shape.is_free()) return Grammar();
  if (tokenizer_ == nullptr) {
    std::string field = shape.content ? shape.content->field : "tools";
    return Error{ErrorCode::kUnsupported, fmt::format("{}: this model has no tokenizer, so its output cannot be held to a form", field), field};
  }
  const std::string key = shape.key();
  if (key.size() > kMaxFormBytes) {
    std::string field = shape.content ? shape.content->field : "tools";
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("{}: the form of the output takes {} bytes to write down, at most {} are allowed", field, key.size(), kMaxFormBytes), field};
  }
  std::list<Entry>::iterator entry;
  {
    std::unique_lock lock(mutex_);
    for (auto found = by_key_.find(key); found != by_key_.end(); found = by_key_.find(key)) {
      if (found->second->grammar != nullptr) {
        entries_.splice(entries_.begin(), entries_, found->second);
        ++stats_.num_hits;
        return entries_.front().grammar;
      }
      compiled_.wait(lock);  // another request compiles it; when that fails, we will see why
    }
    entries_.push_front({key, nullptr});
    entry = entries_.begin();
    by_key_.emplace(entry->key, entry);
  }
  const auto begin = std::chrono::steady_clock::now();
  auto grammar = text::compile_output(shape, *tokenizer_, masks());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  {
    const std::lock_guard lock(mutex_);
    stats_.compile_seconds += seconds;
    if (grammar) {
      ++stats_.num_compiled;
      entry->grammar = *grammar;
      shrink();
    } else {
      ++stats_.num_failed;
      by_key_.erase(entry->key);
      entries_.erase(entry);
    }
  }
  compiled_.notify_all();
  return grammar;
}

/// Grammars grow as masks are made, so their sizes are asked for anew. The most recently used one stays, whatever its size.
void Constraints::shrink() {
  uint64_t bytes = 0;
  for (const Entry& entry : entries_)
    if (entry.grammar != nullptr) bytes += entry.grammar->size_bytes();
  for (auto last = entries_.end(); bytes > max_bytes_ && last != entries_.begin();) {
    --last;
    if (last == entries_.begin() || last->grammar == nullptr) continue;
    bytes -= std::min<uint64_t>(bytes, last->grammar->size_bytes());
    by_key_.erase(last->key);
    last = entries_.erase(last);
  }
  stats_.cached_bytes = bytes;
  stats_.num_cached = by_key_.size();
}

ConstraintStats Constraints::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace quern::server
