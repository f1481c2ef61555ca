#include "app/load_generator.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "app/event_stream.h"
#include "app/json_members.h"
#include "base/hash.h"
#include "base/json.h"

namespace quern::app {
namespace {

using Clock = std::chrono::steady_clock;

/// One streamed answer while it arrives.
class Transfer {
 public:
  Transfer(ServeBackend backend, int64_t input_len, Clock::time_point benchmark_start)
      : backend_(backend), sent_(Clock::now()), last_(sent_), events_([this](std::string_view data) { take_event(data); }) {
    served_.start = seconds(sent_ - benchmark_start);
    served_.input_len = input_len;
  }

  Result<void> start(const HttpAddress& address, const HttpCall& call) {
    ASSIGN_OR_RETURN(exchange_, HttpExchange::start(address, call, [this](std::string_view bytes) { take_body(bytes); }));
    return {};
  }
  [[nodiscard]] HttpExchange* exchange() const { return exchange_.get(); }

  /// True when the transfer is over, for better or worse.
  bool advance() {
    const Result<bool> complete = exchange_->advance();
    if (!complete) return fail(complete.error().message);
    if (!*complete) return false;
    const int status = exchange_->response().status();
    if (status != 200) return fail(fmt::format("HTTP {}: {}", status, other_body_.substr(0, 500)));
    if (!served_.error.empty()) return true;
    if (num_events_ == 0) return fail("the answer has no token");
    served_.succeeded = true;
    served_.latency = seconds(last_ - sent_);
    if (served_.output_len == 0) served_.output_len = num_events_;  // a server that reports no usage
    return true;
  }
  bool fail(std::string why) {
    served_.error = std::move(why);
    return true;
  }
  ServedRequest take_result() { return std::move(served_); }

 private:
  static double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

  void take_body(std::string_view bytes) {
    if (exchange_->response().status() == 200) {
      events_.feed(bytes);
    } else {
      other_body_ += bytes;
    }
  }

  void take_event(std::string_view data) {
    if (data == "[DONE]") return;
    const Clock::time_point now = Clock::now();
    const Result<Json> event = parse_json(data, "event");
    if (!event || !event->is_object()) {
      served_.error = "an event is not a JSON object";
      return;
    }
    if (const Json* error = member_of(*event, "error"); error != nullptr && !error->is_null()) served_.error = error->dump();
    if (const Json* choices = array_of(*event, "choices"); choices != nullptr && !choices->empty() && has_token(choices->front())) take_token(now);
    if (const Json* usage = object_of(*event, "usage")) {
      served_.output_len = count_of(*usage, "completion_tokens").value_or(served_.output_len);
      served_.input_len = count_of(*usage, "prompt_tokens").value_or(served_.input_len);
    }
  }

  /// Whether a chunk carries a token: its id, or text where the server sends no ids. One with the role or the end alone does not.
  [[nodiscard]] bool has_token(const Json& choice) const {
    if (!choice.is_object()) return false;
    if (const auto ids = choice.find("token_ids"); ids != choice.end() && ids->is_array()) return !ids->empty();
    const auto has_text = [](const Json& object, const char* key) {
      const auto text = object.find(key);
      return text != object.end() && text->is_string() && !text->get_ref<const std::string&>().empty();
    };
    if (backend_ == ServeBackend::kCompletions) return has_text(choice, "text");
    const auto delta = choice.find("delta");
    if (delta == choice.end() || !delta->is_object()) return false;
    return has_text(*delta, "content") || has_text(*delta, "reasoning_content") || has_text(*delta, "reasoning");
  }

  void take_token(Clock::time_point now) {
    if (num_events_++ == 0) {
      served_.ttft = seconds(now - sent_);
    } else {
      served_.itls.push_back(seconds(now - last_));
    }
    last_ = now;
  }

  ServeBackend backend_;
  Clock::time_point sent_, last_;  // `last_`: of the last event with text
  ServedRequest served_;
  int64_t num_events_ = 0;
  EventStreamReader events_;
  std::string other_body_;  // of an answer that is no stream
  std::unique_ptr<HttpExchange> exchange_;
};

/// Seconds from the start at which each request may be sent.
std::vector<double> schedule(size_t num_requests, double request_rate, uint64_t seed) {
  std::vector<double> times(num_requests, 0);
  if (!std::isfinite(request_rate)) return times;
  SplitMix64 random(mix64(seed + 7));
  double at = 0;
  for (double& time : times) {
    time = at;
    const double uniform = static_cast<double>((random.next() >> 11) + 1) * 0x1p-53;  // (0, 1]
    at += -std::log(uniform) / request_rate;
  }
  return times;
}

}  // namespace

ServingRun generate_load(const HttpAddress& address, const std::vector<PlannedRequest>& requests, const LoadOptions& options) {
  ServingRun run{.request_rate = options.request_rate, .max_concurrency = options.max_concurrency};
  run.requests.resize(requests.size());
  const std::vector<double> times = schedule(requests.size(), options.request_rate, options.seed);
  const auto most = static_cast<size_t>(options.max_concurrency.value_or(static_cast<int64_t>(requests.size())));
  const Clock::time_point start = Clock::now();
  const auto now = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };

  std::vector<std::pair<size_t, std::unique_ptr<Transfer>>> open;
  size_t next = 0;
  while (next < requests.size() || !open.empty()) {
    for (; next < requests.size() && open.size() < most && times[next] <= now(); ++next) {
      auto transfer = std::make_unique<Transfer>(options.backend, requests[next].input_len, start);
      const HttpCall call{.method = "POST", .path = options.endpoint, .headers = options.headers, .body = requests[next].body};
      if (Result<void> started = transfer->start(address, call); !started) {
        transfer->fail(started.error().message);
        run.requests[next] = transfer->take_result();
        continue;
      }
      open.emplace_back(next, std::move(transfer));
    }
    int timeout_ms = open.empty() ? 0 : -1;
    if (next < requests.size() && open.size() < most) timeout_ms = std::max(0, static_cast<int>((times[next] - now()) * 1e3));
    std::vector<HttpExchange*> exchanges;
    exchanges.reserve(open.size());
    for (const auto& [index, transfer] : open) exchanges.push_back(transfer->exchange());
    std::vector<size_t> ready = poll_exchanges(exchanges, timeout_ms);
    std::reverse(ready.begin(), ready.end());  // so that removing one leaves the others in place
    for (const size_t at : ready) {
      if (!open[at].second->advance()) continue;
      run.requests[open[at].first] = open[at].second->take_result();
      open.erase(open.begin() + static_cast<ptrdiff_t>(at));
    }
  }
  run.duration = now();
  return run;
}

}  // namespace quern::app
