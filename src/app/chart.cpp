#include "app/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "app/statistics.h"
#include "app/terminal.h"

namespace quern::app {
namespace {

// Pixels of the picture. The plot is what the axes enclose.
constexpr double kWidth = 760, kHead = 64, kChartHeight = 340, kPlotLeft = 78, kPlotRight = 20, kPlotTop = 62, kPlotBottom = 52;
constexpr double kPlotWidth = kWidth - kPlotLeft - kPlotRight, kPlotHeight = kChartHeight - kPlotTop - kPlotBottom;
/// Okabe and Ito, "Color Universal Design", 2008: told apart also by those who see few colours.
constexpr std::array<std::string_view, 6> kColours = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"};

/// Text for XML: markup escaped, what XML does not allow shown as U+FFFD.
std::string xml(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const char32_t c = next_character(text, at);
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else if ((c < 0x20 && c != '\n' && c != '\t') || c == 0xfffd || c == 0xfffe || c == 0xffff) {
      out += "\xef\xbf\xbd";
    } else {
      out += text.substr(begin, at - begin);
    }
  }
  return out;
}

/// "2500", "0.05", "1.5e-05": as short as six digits allow.
std::string number(double value) { return fmt::format("{:g}", value); }

/// An axis with its range and ticks, and where a value stands on it.
class Scale {
 public:
  Scale(const ChartAxis& axis, const std::vector<double>& values, bool ticks_at_values) : logarithmic_(axis.logarithmic) {
    const std::set<double> distinct(values.begin(), values.end());
    const double most = distinct.empty() ? 1 : *distinct.rbegin();
    if (logarithmic_) {
      make_logarithmic(distinct.empty() ? 1 : *distinct.begin(), most, ticks_at_values);
    } else {
      make_linear(most);
    }
    constexpr size_t kMostTicks = 12;
    if (ticks_at_values && !distinct.empty() && distinct.size() <= kMostTicks) ticks_.assign(distinct.begin(), distinct.end());
  }

  /// 0 at the beginning of the axis, 1 at its end.
  [[nodiscard]] double share(double value) const {
    if (logarithmic_) return (std::log(value) - std::log(low_)) / (std::log(high_) - std::log(low_));
    return (value - low_) / (high_ - low_);
  }
  [[nodiscard]] const std::vector<double>& ticks() const { return ticks_; }

 private:
  void make_linear(double most) {
    if (most <= 0) most = 1;
    const double rough = most / 5, power = std::pow(10, std::floor(std::log10(rough)));
    double step = 10 * power;
    for (const double factor : {1.0, 2.0, 2.5, 5.0}) {
      if (factor * power < rough * (1 - 1e-9)) continue;
      step = factor * power;
      break;
    }
    const auto num_steps = static_cast<int>(std::ceil(most / step * (1 - 1e-12)));
    high_ = num_steps * step;
    for (int i = 0; i <= num_steps; ++i) ticks_.push_back(i * step);
  }

  void make_logarithmic(double least, double most, bool tight) {
    low_ = tight ? least : std::pow(10, std::floor(std::log10(least) + 1e-9));
    high_ = tight ? most : std::pow(10, std::ceil(std::log10(most) - 1e-9));
    if (high_ <= low_) {
      low_ /= 2;
      high_ *= 2;
    }
    const bool few = high_ / low_ < 150;
    for (double power = std::pow(10, std::floor(std::log10(low_) + 1e-9)); power <= high_ * 1.001; power *= 10) {
      for (const double factor : {1.0, 2.0, 5.0}) {
        if ((factor == 1 || few) && factor * power >= low_ * 0.999 && factor * power <= high_ * 1.001) ticks_.push_back(factor * power);
      }
    }
  }

  bool logarithmic_;
  double low_ = 0, high_ = 1;
  std::vector<double> ticks_;
};

std::string axis_title(const ChartAxis& axis) {
  return xml(axis.unit.empty() ? axis.label : fmt::format("{} ({})", axis.label, axis.unit));
}

/// The points that can be drawn.
std::vector<std::pair<double, double>> drawable(const Chart& chart, const ChartSeries& series) {
  std::vector<std::pair<double, double>> points;
  const auto fits = [](const ChartAxis& axis, double value) { return std::isfinite(value) && (axis.logarithmic ? value > 0 : value >= 0); };
  for (const auto& [x, y] : series.points) {
    if (fits(chart.x, x) && fits(chart.y, y)) points.emplace_back(x, y);
  }
  return points;
}

std::string chart_svg(const Chart& chart, double top) {
  std::vector<double> xs, ys;
  for (const ChartSeries& series : chart.series) {
    for (const auto& [x, y] : drawable(chart, series)) {
      xs.push_back(x);
      ys.push_back(y);
    }
  }
  const Scale x_scale(chart.x, xs, chart.x.logarithmic), y_scale(chart.y, ys, false);
  const auto left_of = [&](double x) { return kPlotLeft + x_scale.share(x) * kPlotWidth; };
  const auto top_of = [&](double y) { return kPlotTop + (1 - y_scale.share(y)) * kPlotHeight; };
  constexpr double kBottom = kPlotTop + kPlotHeight;

  std::string out = fmt::format(
      "<g class=\"chart\" transform=\"translate(0,{})\">\n<text class=\"chart-title\" x=\"{}\" y=\"22\" font-size=\"15\" "
      "font-weight=\"bold\">{}</text>\n",
      top, kPlotLeft, xml(chart.title));
  for (const double tick : y_scale.ticks()) {
    out += fmt::format("<line x1=\"{}\" x2=\"{}\" y1=\"{:.2f}\" y2=\"{:.2f}\" stroke=\"#dddddd\"/>\n", kPlotLeft, kPlotLeft + kPlotWidth,
                       top_of(tick), top_of(tick));
    out += fmt::format("<text class=\"y-tick\" x=\"{}\" y=\"{:.2f}\" text-anchor=\"end\" dominant-baseline=\"middle\">{}</text>\n",
                       kPlotLeft - 8, top_of(tick), number(tick));
  }
  for (const double tick : x_scale.ticks()) {
    out += fmt::format("<line x1=\"{0:.2f}\" x2=\"{0:.2f}\" y1=\"{1}\" y2=\"{2}\" stroke=\"#555555\"/>\n", left_of(tick), kBottom,
                       kBottom + 5);
    out += fmt::format("<text class=\"x-tick\" x=\"{:.2f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", left_of(tick), kBottom + 19,
                       number(tick));
  }
  out += fmt::format("<path d=\"M{0} {1}V{2}H{3}\" fill=\"none\" stroke=\"#555555\"/>\n", kPlotLeft, kPlotTop, kBottom,
                     kPlotLeft + kPlotWidth);
  out += fmt::format("<text class=\"x-title\" x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", kPlotLeft + kPlotWidth / 2,
                     kBottom + 40, axis_title(chart.x));
  out += fmt::format("<text class=\"y-title\" transform=\"translate(18,{}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
                     kPlotTop + kPlotHeight / 2, axis_title(chart.y));

  double legend = kPlotLeft;
  for (size_t i = 0; i < chart.series.size(); ++i) {
    const ChartSeries& series = chart.series[i];
    const std::string_view colour = kColours[i % kColours.size()];
    const std::string dashes = i >= kColours.size() ? " stroke-dasharray=\"6 4\"" : "";
    out += fmt::format("<line x1=\"{}\" x2=\"{}\" y1=\"40\" y2=\"40\" stroke=\"{}\" stroke-width=\"2\"{}/>\n", legend, legend + 22, colour,
                       dashes);
    out += fmt::format("<text class=\"legend\" x=\"{}\" y=\"40\" dominant-baseline=\"middle\">{}</text>\n", legend + 28, xml(series.name));
    legend += 28 + 7.2 * static_cast<double>(series.name.size()) + 20;
    std::string points, circles;
    const std::vector<std::pair<double, double>> values = drawable(chart, series);
    constexpr size_t kMostCircles = 64;
    for (const auto& [x, y] : values) {
      points += fmt::format("{}{:.2f},{:.2f}", points.empty() ? "" : " ", left_of(x), top_of(y));
      if (values.size() <= kMostCircles)
        circles += fmt::format("<circle cx=\"{:.2f}\" cy=\"{:.2f}\" r=\"3\" fill=\"{}\"><title>{}: {} at {}</title></circle>\n", left_of(x),
                               top_of(y), colour, xml(series.name), number(y), number(x));
    }
    out += fmt::format(
        "<polyline class=\"series\" points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\" stroke-linejoin=\"round\"{}/>\n{}", points,
        colour, dashes, circles);
  }
  return out + "</g>\n";
}

Json axis_json(const ChartAxis& axis) {
  return {{"label", axis.label}, {"unit", axis.unit}, {"scale", axis.logarithmic ? "log" : "linear"}};
}

}  // namespace

ChartSeries percentile_curve(std::string name, const std::vector<double>& samples) {
  ChartSeries series{std::move(name), {}};
  if (samples.empty()) return series;
  for (int percent = 0; percent <= 100; ++percent) series.points.emplace_back(percent, percentile(samples, percent));
  return series;
}

Json charts_json(std::span<const Chart> charts) {
  Json list = Json::array();
  for (const Chart& chart : charts) {
    Json series = Json::array();
    for (const ChartSeries& one : chart.series) {
      Json points = Json::array();
      for (const auto& [x, y] : one.points) points.push_back(Json::array({x, y}));
      series.push_back({{"name", one.name}, {"points", std::move(points)}});
    }
    list.push_back({{"title", chart.title}, {"x", axis_json(chart.x)}, {"y", axis_json(chart.y)}, {"series", std::move(series)}});
  }
  return list;
}

std::string charts_svg(std::span<const Chart> charts, std::string_view title, std::string_view subtitle) {
  const double height = kHead + kChartHeight * static_cast<double>(charts.size());
  std::string out = fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" font-family=\"system-ui, "
      "sans-serif\" font-size=\"12\" fill=\"#222222\">\n"
      "<title>{2}</title>\n<rect width=\"{0}\" height=\"{1}\" fill=\"#ffffff\"/>\n"
      "<text x=\"{3}\" y=\"28\" font-size=\"18\" font-weight=\"bold\">{2}</text>\n<text x=\"{3}\" y=\"48\" fill=\"#555555\">{4}</text>\n",
      kWidth, height, xml(title), kPlotLeft, xml(subtitle));
  for (size_t i = 0; i < charts.size(); ++i) out += chart_svg(charts[i], kHead + kChartHeight * static_cast<double>(i));
  return out + "</svg>\n";
}

}  // namespace quern::app
