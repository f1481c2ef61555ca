#include "app/statistics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace quern::app {

double mean(const std::vector<double>& samples) {
  if (samples.empty()) return 0;
  return std::accumulate(samples.begin(), samples.end(), 0.0) / static_cast<double>(samples.size());
}

double standard_deviation(const std::vector<double>& samples) {
  if (samples.empty()) return 0;
  const double center = mean(samples);
  double sum = 0;
  for (const double sample : samples) sum += (sample - center) * (sample - center);
  return std::sqrt(sum / static_cast<double>(samples.size()));
}

double percentile(std::vector<double> samples, double percent) {
  if (samples.empty()) return 0;
  std::sort(samples.begin(), samples.end());
  const double at = percent / 100 * static_cast<double>(samples.size() - 1);
  const auto below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, samples.size() - 1);
  return samples[below] + (samples[above] - samples[below]) * (at - static_cast<double>(below));
}

}  // namespace quern::app
