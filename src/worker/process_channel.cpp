#include "worker/process_channel.h"

#include <pthread.h>

#include <utility>

namespace quern::worker {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int32_t kTag = 1;  // rows of tp_rank r have stage_link.cpp's

}  // namespace

ProcessChannel::ProcessChannel(Processes& processes, int32_t other, const Settings& settings, Callbacks callbacks)
    : processes_(processes), other_(other), settings_(settings), callbacks_(std::move(callbacks)), last_heard_(Clock::now()) {}

void ProcessChannel::open() {
  last_heard_ = Clock::now();
  receiver_ = std::jthread([this] { receive_all(); });
  sender_ = std::jthread([this] { send_queued(); });
}

ProcessChannel::~ProcessChannel() {
  closing_ = true;
  queue_.close();
  if (sender_.joinable()) sender_.join();
  ends_ = true;
}

void ProcessChannel::send(const Message& message) {
  if (lost_) return;
  Bytes bytes = to_bytes(message);
  if (!queue_.try_push(std::move(bytes)) && !lost_ && !closing_) lose(make_error(ErrorCode::kInternal, "it has not taken {} messages", kQueueLength));
}

std::chrono::milliseconds ProcessChannel::silent_for() const { return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - last_heard_.load()); }

void ProcessChannel::send_queued() {
  pthread_setname_np(pthread_self(), "quern-to-peer");
  auto next_sign = Clock::now();
  while (!lost_) {
    std::optional<Bytes> bytes = queue_.pop_for(next_sign - Clock::now());
    if (!bytes) {
      if (Clock::now() < next_sign) return;  // closed, and all is sent
      bytes = to_bytes(Alive{.loaded = callbacks_.loaded ? callbacks_.loaded() : 1});
    }
    next_sign = Clock::now() + settings_.interval();
    const auto owned = std::make_shared<const Bytes>(std::move(*bytes));
    if (const Result<void> sent = processes_.send(other_, kTag, *owned, owned, {.deadline = settings_.silence, .stop = [this] { return ends_.load(); }}); !sent) return lose(sent.error());
  }
}

void ProcessChannel::receive_all() {
  pthread_setname_np(pthread_self(), "quern-from-peer");
  for (auto deadline = settings_.first_word; !lost_; deadline = settings_.silence) {
    const Result<Bytes> bytes = processes_.receive(other_, kTag, {.deadline = deadline, .stop = [this] { return ends_ || is_silent_now(); }});
    if (!bytes) {
      const bool silent = bytes.error().code == ErrorCode::kUnavailable || bytes.error().code == ErrorCode::kCancelled;
      if (!ends_) lose(silent ? make_error(ErrorCode::kInternal, "nothing was heard of it for {:.1f} s", std::chrono::duration<double>(Clock::now() - last_heard_.load()).count()) : bytes.error());
      return;
    }
    last_heard_ = Clock::now();
    Result<Message> message = message_from_bytes(*bytes);
    if (!message) return fail(message.error());  // the other lives, and can be told
    callbacks_.on_message(std::move(*message));
  }
}

bool ProcessChannel::is_silent_now() const { return processes_.impatient() && silent_for() > 3 * settings_.interval(); }

void ProcessChannel::lose(const Error& error) {
  lost_ = true;
  ends_ = true;
  fail(error);
}

void ProcessChannel::fail(const Error& error) {
  if (!failed_.exchange(true)) callbacks_.on_failure(error);
}

}  // namespace quern::worker
