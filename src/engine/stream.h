#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "engine/event_channel.h"
#include "engine/inbox.h"
#include "engine/request.h"

namespace quern::engine {

/// The consumer's handle: reads from the channel, and tells the engine thread through its inbox.
class Stream final : public RequestStream {
 public:
  Stream(uint64_t id, std::shared_ptr<EventChannel> events, std::shared_ptr<Inbox> inbox)
      : id_(id), events_(std::move(events)), inbox_(std::move(inbox)) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() override {
    if (events_->detach()) inbox_->post(Cancel{id_});
  }

  std::optional<TokenEvent> try_next() override { return events_->try_next(); }
  TokenEvent next() override { return events_->next(); }
  void on_event(std::function<void()> wake) override { events_->on_event(std::move(wake)); }
  void cancel() override {
    if (events_->cancel()) inbox_->post(Cancel{id_});
  }
  void stop_at(int32_t completion_tokens) override {
    if (events_->stop_at(completion_tokens)) inbox_->post(StopAt{id_, completion_tokens});
  }

 private:
  const uint64_t id_;
  const std::shared_ptr<EventChannel> events_;
  const std::shared_ptr<Inbox> inbox_;
};

}  // namespace quern::engine
