#include "server/answer.h"

#include <utility>
#include <vector>

namespace quern::server {
namespace {

class WholeAnswer final : public DeferredResponse {
 public:
  WholeAnswer(ServicePtr service, std::unique_ptr<Generation> generation, std::unique_ptr<OutputFormat> format)
      : service_(std::move(service)),
        generation_(std::move(generation)),
        format_(std::move(format)),
        outputs_(static_cast<size_t>(generation_->num_choices())) {}

  void on_ready(std::function<void()> wake) override { generation_->on_ready(wake); }
  [[nodiscard]] std::chrono::steady_clock::time_point deadline() const override { return generation_->deadline(); }
  void describe(RequestFacts& facts) const override { generation_->describe(facts); }

  std::optional<HttpResponse> poll() override {
    const bool running = generation_->advance(
        [&](int32_t choice, OutputDelta delta, const OutputUsage&) { outputs_[static_cast<size_t>(choice)].append(std::move(delta)); });
    if (running) return std::nullopt;
    HttpResponse response;
    if (generation_->error()) {
      response = format_->failure(*generation_->error());
    } else {
      response.body = dump_json(format_->response(outputs_, generation_->usage()));
    }
    service_->metrics.count_http_response(response.status);
    return response;
  }

 private:
  ServicePtr service_;  // outlives the generation, which uses its metrics
  std::unique_ptr<Generation> generation_;
  std::unique_ptr<OutputFormat> format_;
  std::vector<OutputDelta> outputs_;
};

class StreamedAnswer final : public EventStream {
 public:
  StreamedAnswer(ServicePtr service, std::unique_ptr<Generation> generation, std::unique_ptr<OutputFormat> format)
      : service_(std::move(service)), generation_(std::move(generation)), format_(std::move(format)) {
    service_->metrics.count_http_response(200);
  }

  void on_ready(std::function<void()> wake) override { generation_->on_ready(wake); }
  [[nodiscard]] std::chrono::steady_clock::time_point deadline() const override { return generation_->deadline(); }
  void describe(RequestFacts& facts) const override { generation_->describe(facts); }

  bool read(std::string& out) override {
    if (!std::exchange(begun_, true)) {
      for (int32_t i = 0; i < generation_->num_choices(); ++i) format_->begin(i, out);
    }
    const bool running = generation_->advance(
        [&](int32_t choice, const OutputDelta& delta, const OutputUsage& usage) { format_->delta(choice, delta, usage, out); });
    if (running) return true;
    if (generation_->error()) {
      format_->fail(*generation_->error(), out);
    } else {
      format_->finish(generation_->usage(), out);
    }
    return false;
  }

 private:
  ServicePtr service_;
  std::unique_ptr<Generation> generation_;
  std::unique_ptr<OutputFormat> format_;
  bool begun_ = false;
};

}  // namespace

HttpAnswer make_answer(ServicePtr service, std::unique_ptr<Generation> generation, std::unique_ptr<OutputFormat> format, bool stream) {
  generation->limit_time(service->context.time_limits);
  if (stream) {
    std::unique_ptr<EventStream> answer = std::make_unique<StreamedAnswer>(std::move(service), std::move(generation), std::move(format));
    return answer;
  }
  std::unique_ptr<DeferredResponse> answer = std::make_unique<WholeAnswer>(std::move(service), std::move(generation), std::move(format));
  return answer;
}

}  // namespace quern::server
