#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

namespace quern {

/// A queue of values between threads with a fixed capacity; thread-safe. A full queue is an answer for the caller, not a growing list.
template <class T>
class BoundedQueue {
 public:
  explicit BoundedQueue(size_t capacity) : capacity_(capacity) {}

  /// False, and `value` untouched, when the queue is full or closed.
  [[nodiscard]] bool try_push(T& value) {
    {
      std::lock_guard lock(mutex_);
      if (closed_ || items_.size() >= capacity_) return false;
      items_.push_back(std::move(value));
    }
    not_empty_.notify_one();
    return true;
  }
  [[nodiscard]] bool try_push(T&& value) { return try_push(value); }

  /// Waits for room; false when the queue was closed.
  bool push(T value) {
    {
      std::unique_lock lock(mutex_);
      not_full_.wait(lock, [&] { return closed_ || items_.size() < capacity_; });
      if (closed_) return false;
      items_.push_back(std::move(value));
    }
    not_empty_.notify_one();
    return true;
  }

  /// Waits for a value; empty when the queue is closed and drained.
  std::optional<T> pop() {
    std::unique_lock lock(mutex_);
    not_empty_.wait(lock, [&] { return closed_ || !items_.empty(); });
    return take(lock);
  }
  std::optional<T> try_pop() {
    std::unique_lock lock(mutex_);
    return take(lock);
  }
  /// As pop, but gives up after `timeout`.
  template <class Rep, class Period>
  std::optional<T> pop_for(std::chrono::duration<Rep, Period> timeout) {
    std::unique_lock lock(mutex_);
    not_empty_.wait_for(lock, timeout, [&] { return closed_ || !items_.empty(); });
    return take(lock);
  }

  /// As pop, but returns nothing when wake() was called since it last did so.
  std::optional<T> pop_or_wake() {
    std::unique_lock lock(mutex_);
    not_empty_.wait(lock, [&] { return closed_ || woken_ || !items_.empty(); });
    woken_ = false;
    return take(lock);
  }
  /// The pop_or_wake() under way returns, or else the next one does not wait. For a queue with one consumer.
  void wake() {
    {
      std::lock_guard lock(mutex_);
      woken_ = true;
    }
    not_empty_.notify_one();
  }

  /// No further values are taken; what is inside can still be popped.
  void close() {
    {
      std::lock_guard lock(mutex_);
      closed_ = true;
    }
    not_empty_.notify_all();
    not_full_.notify_all();
  }

  [[nodiscard]] size_t size() const {
    std::lock_guard lock(mutex_);
    return items_.size();
  }
  [[nodiscard]] size_t capacity() const { return capacity_; }

 private:
  std::optional<T> take(std::unique_lock<std::mutex>& lock) {
    if (items_.empty()) return std::nullopt;
    std::optional<T> value(std::move(items_.front()));
    items_.pop_front();
    lock.unlock();
    not_full_.notify_one();
    return value;
  }

  const size_t capacity_;
  mutable std::mutex mutex_;
  std::condition_variable not_empty_, not_full_;
  std::deque<T> items_;
  bool closed_ = false, woken_ = false;
};

}  // namespace quern
