#include "app/chart.h"

#include <boost/property_tree/ptree.hpp>
#include <boost/property_tree/xml_parser.hpp>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "api_fixture.h"
#include "app/program.h"
#include "app/serving_charts.h"
#include "base/file.h"

// Plots: well-formed, and every point where its axes say that it is.

namespace quern::app {
namespace {

using boost::property_tree::ptree;
using quern::testing::run_quern;
using quern::testing::TemporaryFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

/// One chart as it stands in the picture.
struct Drawn {
  std::string title, x_title, y_title;
  std::map<double, double> x_ticks, y_ticks;  // value -> pixel
  std::vector<std::string> legend;
  std::vector<std::vector<std::pair<double, double>>> lines;  // pixels
};

std::vector<Drawn> read_svg(const std::string& svg) {
  std::istringstream stream(svg);
  ptree document;
  EXPECT_NO_THROW(boost::property_tree::read_xml(stream, document)) << svg;
  std::vector<Drawn> charts;
  for (const auto& [tag, group] : document.get_child("svg")) {
    if (tag != "g") continue;
    Drawn chart;
    for (const auto& [name, node] : group) {
      const std::string kind = node.get("<xmlattr>.class", "");
      if (kind == "chart-title") chart.title = node.data();
      if (kind == "x-title") chart.x_title = node.data();
      if (kind == "y-title") chart.y_title = node.data();
      if (kind == "legend") chart.legend.push_back(node.data());
      if (kind == "x-tick") chart.x_ticks[std::stod(node.data())] = node.get<double>("<xmlattr>.x");
      if (kind == "y-tick") chart.y_ticks[std::stod(node.data())] = node.get<double>("<xmlattr>.y");
      if (kind != "series") continue;
      chart.lines.emplace_back();
      std::istringstream points(node.get<std::string>("<xmlattr>.points"));
      for (std::string point; points >> point;) {
        const size_t comma = point.find(',');
        chart.lines.back().emplace_back(std::stod(point.substr(0, comma)), std::stod(point.substr(comma + 1)));
      }
    }
    charts.push_back(std::move(chart));
  }
  return charts;
}

/// The value that the ticks of an axis give to a pixel.
double value_at(const std::map<double, double>& ticks, double pixel, bool logarithmic) {
  const auto first = *ticks.begin(), last = *ticks.rbegin();
  const double share = (pixel - first.second) / (last.second - first.second);
  if (!logarithmic) return first.first + share * (last.first - first.first);
  return first.first * std::pow(last.first / first.first, share);
}

void expect_drawn(const Chart& chart, const Drawn& drawn) {
  EXPECT_EQ(drawn.title, chart.title);
  EXPECT_THAT(drawn.x_title, HasSubstr(chart.x.label));
  EXPECT_THAT(drawn.y_title, HasSubstr(chart.y.unit.empty() ? "" : "(" + chart.y.unit + ")"));
  ASSERT_GE(drawn.x_ticks.size(), 2u);
  ASSERT_GE(drawn.y_ticks.size(), 2u);
  ASSERT_EQ(drawn.lines.size(), chart.series.size());
  for (size_t i = 0; i < chart.series.size(); ++i) {
    EXPECT_EQ(drawn.legend.at(i), chart.series[i].name);
    ASSERT_EQ(drawn.lines[i].size(), chart.series[i].points.size());
    for (size_t p = 0; p < drawn.lines[i].size(); ++p) {
      const auto [x, y] = chart.series[i].points[p];
      const double x_range = drawn.x_ticks.rbegin()->first, y_range = drawn.y_ticks.rbegin()->first;
      EXPECT_NEAR(value_at(drawn.x_ticks, drawn.lines[i][p].first, chart.x.logarithmic), x, x_range * 2e-4)
          << chart.series[i].name << " " << p;
      EXPECT_NEAR(value_at(drawn.y_ticks, drawn.lines[i][p].second, chart.y.logarithmic), y, y_range * 2e-4)
          << chart.series[i].name << " " << p;
    }
  }
}

TEST(Chart, DrawsEveryPointWhereItsAxesSay) {
  std::vector<Chart> charts;
  for (const bool log_x : {false, true}) {
    for (const bool log_y : {false, true}) {
      for (const double scale : {1e-3, 1.0, 7.3, 4e6}) {
        Chart chart{.title = "A <chart> & more",
                    .x = {"x", "requests/s", log_x},
                    .y = {"y", "ms", log_y},
                    .series = {{"one", {}}, {"two \"2\"", {}}}};
        for (int i = 1; i <= 9; ++i) {
          chart.series[0].points.emplace_back(i * i * scale, 3 * i * scale);
          chart.series[1].points.emplace_back(i * i * scale, scale * 100.0 / i);
        }
        charts.push_back(std::move(chart));
      }
    }
  }
  const std::vector<Drawn> drawn = read_svg(charts_svg(charts, "title", "subtitle"));
  ASSERT_EQ(drawn.size(), charts.size());
  for (size_t i = 0; i < charts.size(); ++i) expect_drawn(charts[i], drawn[i]);
}

TEST(Chart, IsWellFormedWhateverItIsGiven) {
  const double inf = HUGE_VAL, nan = std::nan("");
  const std::vector<Chart> charts = {
      {.title = "empty", .x = {"x", ""}, .y = {"y", ""}, .series = {}},
      {.title = "no points", .x = {"x", "", true}, .y = {"y", "", true}, .series = {{"s", {}}}},
      {.title = "one point", .x = {"x", "", true}, .y = {"y", "", true}, .series = {{"s", {{3, 3}}}}},
      {.title = "zeros", .x = {"x", ""}, .y = {"y", ""}, .series = {{"s", {{0, 0}, {0, 0}}}}},
      {.title = "not drawable",
       .x = {"x", "", true},
       .y = {"y", ""},
       .series = {{"s", {{0, 1}, {1, nan}, {2, inf}, {nan, 1}, {-1, 1}, {4, 5}}}}},
      {.title = "]]> <!-- \x01 \xff & é 你", .x = {"<x>", "&"}, .y = {"\"y\"", "'"}, .series = {{"</text><script>", {{1, 1}}}}},
  };
  const std::string svg = charts_svg(charts, "<t>&\x02", "\xc0");
  const std::vector<Drawn> drawn = read_svg(svg);
  ASSERT_EQ(drawn.size(), charts.size());
  EXPECT_THAT(drawn[4].lines[0], SizeIs(1)) << "only the point that has a place";
  EXPECT_EQ(drawn[5].title, "]]> <!-- \ufffd \ufffd & é 你");
  EXPECT_EQ(drawn[5].legend[0], "</text><script>");
  for (const char* word : {"\"nan", ",nan", " nan", ">nan", "\"inf", ",inf", " inf", ">inf", "-inf", "-nan"})
    EXPECT_EQ(svg.find(word), std::string::npos) << word;
  const TemporaryFolder folder;
  std::ofstream(folder.path() / "plot.svg") << svg;
  if (std::system("command -v xmllint >/dev/null 2>&1") != 0) GTEST_SKIP() << "there is no xmllint";
  EXPECT_EQ(std::system(("xmllint --noout " + (folder.path() / "plot.svg").string()).c_str()), 0);
}

TEST(Chart, IsTheSameAsJson) {
  const Chart chart{.title = "t", .x = {"a", "s"}, .y = {"b", "ms", true}, .series = {{"one", {{1, 2.5}, {2, 3}}}}};
  EXPECT_EQ(charts_json(std::vector{chart}), Json::parse(R"([{"title": "t", "x": {"label": "a", "unit": "s", "scale": "linear"},
      "y": {"label": "b", "unit": "ms", "scale": "log"}, "series": [{"name": "one", "points": [[1.0, 2.5], [2.0, 3.0]]}]}])"));
}

TEST(ServingCharts, AreOfWhatWasMeasured) {
  const auto run_of = [](double ttft) {
    ServingRun run{.duration = 2, .request_rate = HUGE_VAL};
    for (int i = 0; i < 4; ++i)
      run.requests.push_back(
          {.succeeded = true, .start = 0, .ttft = ttft, .latency = ttft + 0.3, .itls = {0.1, 0.1, 0.1}, .input_len = 10, .output_len = 4});
    run.requests.push_back({.error = "failed"});
    return run;
  };
  const std::vector<SweptRun> runs = {{1, run_of(0.1)}, {2, run_of(0.2)}, {8, run_of(0.8)}};
  const std::vector<Chart> charts = charts_of_sweep(runs, SweptQuantity::kConcurrency);
  ASSERT_EQ(charts.size(), 3u);
  EXPECT_THAT(charts[0].series[0].points, ElementsAre(std::pair(1.0, 8.0), std::pair(2.0, 8.0), std::pair(8.0, 8.0))) << "16 tokens in 2 s";
  EXPECT_EQ(charts[0].series[1].points[0].second, 28) << "and 40 of input";
  EXPECT_NEAR(charts[1].series[0].points[2].second, 800, 1e-9);
  EXPECT_NEAR(charts[2].series[1].points[0].second, 100, 1e-9);
  const std::vector<Chart> one = charts_of_run(runs[0].run);
  EXPECT_EQ(one[0].series[0].points[0].second, 16) << "all tokens in the first second";
  EXPECT_NEAR(one[2].series[0].points[50].second, 100, 1e-9);
  const ServingRun nothing{.duration = 0.1, .request_rate = 1};
  EXPECT_THAT(read_svg(charts_svg(charts_of_run(nothing), "t", "s")), SizeIs(3));
  EXPECT_THAT(read_svg(charts_svg(charts_of_sweep(std::vector<SweptRun>{{1, nothing}}, SweptQuantity::kRequestRate), "t", "s")), SizeIs(3));
}

class BenchServePlot : public server::ApiTest {};

TEST_F(BenchServePlot, SweepsAndDrawsWhatItWrites) {
  start();
  const TemporaryFolder folder;
  const std::string json = (folder.path() / "result.json").string(), svg = (folder.path() / "plot.svg").string();
  const auto bench = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments = {"bench",
                                          "serve",
                                          "--base-url",
                                          fmt::format("http://127.0.0.1:{}", port()),
                                          "--random-input-len",
                                          "8",
                                          "--random-output-len",
                                          "4",
                                          "--num-prompts",
                                          "6",
                                          "--save-result",
                                          "--result-filename",
                                          json,
                                          "--plot",
                                          svg};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_quern(arguments);
  };
  const testing::ProgramResult swept = bench({"--sweep-concurrency", "1,2,4"});
  ASSERT_EQ(swept.exit_code, 0) << swept.log;
  Result<Json> result = read_json_file(json);
  ASSERT_OK(result);
  ASSERT_EQ(result->at("runs").size(), 3u);
  EXPECT_EQ(result->at("runs")[1]["max_concurrency"], 2);
  EXPECT_EQ(result->at("runs")[1]["completed"], 6);
  const auto expect_same = [&] {
    const std::vector<Drawn> drawn = read_svg(read_file(svg).value());
    ASSERT_EQ(drawn.size(), result->at("charts").size());
    for (size_t i = 0; i < drawn.size(); ++i) {
      const Json& written = result->at("charts")[i];
      Chart chart{.title = written["title"],
                  .x = {written["x"]["label"], written["x"]["unit"], written["x"]["scale"] == "log"},
                  .y = {written["y"]["label"], written["y"]["unit"], written["y"]["scale"] == "log"},
                  .series = {}};
      for (const Json& series : written["series"])
        chart.series.push_back({series["name"], series["points"].get<std::vector<std::pair<double, double>>>()});
      expect_drawn(chart, drawn[i]);
    }
  };
  expect_same();
  EXPECT_EQ(result->at("charts")[0]["series"][0]["points"].size(), 3u);
  std::set<std::vector<int32_t>> prompts;
  for (const engine::GenerationRequest& request : engine_.submitted()) prompts.insert(request.prompt);
  EXPECT_EQ(prompts.size(), 18u) << "each run of a sweep has prompts of its own, or a prefix cache makes the later ones fast";

  ASSERT_EQ(bench({}).exit_code, 0);
  result = read_json_file(json);
  ASSERT_OK(result);
  EXPECT_EQ(result->at("completed"), 6);
  EXPECT_FALSE(result->contains("runs"));
  expect_same();

  EXPECT_EQ(bench({"--sweep-concurrency", "2,1"}).exit_code, 2);
  EXPECT_EQ(bench({"--sweep-request-rate", "inf"}).exit_code, 2);
  EXPECT_EQ(bench({"--sweep-concurrency", "1", "--sweep-request-rate", "1"}).exit_code, 2);
}

}  // namespace
}  // namespace quern::app
