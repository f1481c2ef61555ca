#include "server/http_metrics.h"

#include <fmt/format.h>
#include <prometheus/counter.h>
#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>
#include <prometheus/summary.h>
#include <prometheus/text_serializer.h>

#include <array>
#include <sstream>
#include <utility>
#include <vector>

#include "server/access_log.h"
#include "server/process_stats.h"

namespace quern::server {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;

/// Anybody can invent methods, and every label value costs memory for ever.
std::string method_label(const std::string& method) {
  for (const char* known : {"GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH"}) {
    if (method == known) return method;
  }
  return "other";
}

MetricFamily single(const char* name, const char* help, MetricType type, double value) {
  prometheus::ClientMetric metric;
  (type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  return {name, help, type, {metric}};
}

}  // namespace

struct HttpMetrics::Families {
  prometheus::Registry registry;
  prometheus::Family<prometheus::Counter>& requests =
      prometheus::BuildCounter().Name("http_requests_total").Help("Requests by handler, method and class of status.").Register(registry);
  prometheus::Family<prometheus::Histogram>& duration =
      prometheus::BuildHistogram().Name("http_request_duration_seconds").Help("From a request's head to the end of its answer.").Register(registry);
  prometheus::Family<prometheus::Summary>& request_size =
      prometheus::BuildSummary().Name("http_request_size_bytes").Help("Bodies of requests.").Register(registry);
  prometheus::Family<prometheus::Summary>& response_size =
      prometheus::BuildSummary().Name("http_response_size_bytes").Help("Responses, heads included.").Register(registry);
  prometheus::Family<prometheus::Counter>& outcomes =
      prometheus::BuildCounter().Name("quern:http_outcomes_total").Help("What became of requests, by outcome.").Register(registry);
  prometheus::Family<prometheus::Counter>& key_refused =
      prometheus::BuildCounter().Name("quern:key_limit_refusals_total").Help("Requests over the limit of their key (429).").Register(registry);
  std::array<prometheus::Counter*, 5> by_outcome;

  Families() {
    size_t i = 0;
    for (const char* name : {"complete", "client_left", "client_slow", "cut_off", "timeout"}) by_outcome[i++] = &outcomes.Add({{"outcome", name}});
  }
};

HttpMetrics::HttpMetrics() : families_(std::make_unique<Families>()) {}
HttpMetrics::~HttpMetrics() = default;

void HttpMetrics::observe(const HttpExchange& exchange) {
  Families& f = *families_;
  const std::string_view route = exchange.facts ? exchange.facts->route : std::string_view();
  const std::string handler = route.empty() ? "none" : std::string(route), method = method_label(exchange.method);
  f.requests.Add({{"handler", handler}, {"method", method}, {"status", fmt::format("{}xx", exchange.status / 100)}}).Increment();
  static const prometheus::Histogram::BucketBoundaries kBuckets{0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600};
  f.duration.Add({{"handler", handler}, {"method", method}}, kBuckets).Observe(exchange.seconds);
  const prometheus::Summary::Quantiles none;
  f.request_size.Add({{"handler", handler}}, none).Observe(static_cast<double>(exchange.bytes_received));
  f.response_size.Add({{"handler", handler}}, none).Observe(static_cast<double>(exchange.bytes_sent));
  const bool timed_out = exchange.facts && exchange.facts->timed_out;
  f.by_outcome[timed_out ? 4 : static_cast<size_t>(exchange.outcome)]->Increment();
}

void HttpMetrics::count_key_refused(int32_t key_idx) { families_->key_refused.Add({{"key", std::to_string(key_idx)}}).Increment(); }

std::string HttpMetrics::expose(const HttpStats& stats, uint64_t access_log_dropped) const {
  std::vector<MetricFamily> families = families_->registry.Collect();
  const auto add = [&](const char* name, const char* help, MetricType type, double value) { families.push_back(single(name, help, type, value)); };
  add("quern:http_connections", "Open connections.", MetricType::Gauge, static_cast<double>(stats.connections));
  add("quern:http_connections_accepted_total", "Accepted connections.", MetricType::Counter, static_cast<double>(stats.accepted));
  add("quern:http_connections_refused_total", "Connections over the limit.", MetricType::Counter, static_cast<double>(stats.refused));
  add("quern:tls_handshakes_failed_total", "Connections that ended before they were encrypted.", MetricType::Counter,
      static_cast<double>(stats.handshakes_failed));
  add("quern:access_log_dropped_total", "Lines of the access log that could not be written.", MetricType::Counter,
      static_cast<double>(access_log_dropped));
  const ProcessStats process = process_stats();
  add("process_resident_memory_bytes", "Resident memory.", MetricType::Gauge, static_cast<double>(process.resident_bytes));
  add("process_virtual_memory_bytes", "Virtual memory.", MetricType::Gauge, static_cast<double>(process.virtual_bytes));
  add("process_cpu_seconds_total", "Time on CPUs, user and system.", MetricType::Counter, process.cpu_seconds);
  add("process_start_time_seconds", "Start of the process, since 1970.", MetricType::Gauge, process.start_time_seconds);
  add("process_open_fds", "Open file descriptors.", MetricType::Gauge, static_cast<double>(process.open_fds));
  add("process_max_fds", "Most file descriptors that may be open.", MetricType::Gauge, static_cast<double>(process.max_fds));
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, families);
  return std::move(out).str();
}

}  // namespace quern::server
