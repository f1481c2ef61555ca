#pragma once

#include <vector>

namespace quern::app {

/// Of samples in any order; 0 without samples. The deviation is the population's, percentiles are interpolated linearly: numpy's defaults.
double mean(const std::vector<double>& samples);
double standard_deviation(const std::vector<double>& samples);
double percentile(std::vector<double> samples, double percent);

}  // namespace quern::app
