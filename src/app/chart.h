#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"

// Diagrams of what a benchmark measured: as JSON for whoever draws them, and as an SVG of our own.

namespace quern::app {

struct ChartAxis {
  std::string label, unit;
  bool logarithmic = false;  // otherwise it begins at 0
};

struct ChartSeries {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x, y; by rising x
};

/// Curves over one x axis.
struct Chart {
  std::string title;
  ChartAxis x, y;
  std::vector<ChartSeries> series;
};

/// A series of the percentiles 0 to 100 of samples in any order; no points without samples.
ChartSeries percentile_curve(std::string name, const std::vector<double>& samples);

/// [{"title", "x": {"label", "unit", "scale"}, "y": the same, "series": [{"name", "points": [[x, y], ...]}]}]
Json charts_json(std::span<const Chart> charts);

/// One picture with the charts below each other: axes with ticks and units, a legend, a point for every value. Points that are no finite
/// numbers, or not above 0 on a logarithmic axis, are left out.
std::string charts_svg(std::span<const Chart> charts, std::string_view title, std::string_view subtitle);

}  // namespace quern::app
