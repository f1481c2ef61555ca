#include <gmock/gmock.h>

#include "app/devices_report.h"
#include "app/program.h"

// What `quern devices` says; the measuring itself is tested with the transports (tests/ops/collective_test).

namespace quern::app {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using worker::DevicesReport;

/// Two cards of a board without peer access, the second behind half of its lanes, and what staged took.
DevicesReport two_cards() {
  DevicesReport report;
  report.devices.push_back({"opencl:0", "Intel Arc Pro B60", "opencl", "0000:03:00.0", uint64_t{24} << 30, 12.5e9, 11e9, ""});
  report.devices.push_back({"opencl:1", "Intel Arc Pro B60", "opencl", "0000:04:00.0", uint64_t{24} << 30, 6.5e9, 6e9, ""});
  worker::DeviceGroup group{"opencl", {0, 1}, "", {}, {}, "staged"};
  group.pairs.push_back({0, 1, "OpenCL has no peer access", "", 0});
  group.transports.push_back({"direct", "OpenCL has no peer access", {}});
  group.transports.push_back({"staged", "", {{10'240, 50e-6}, {655'360, 300e-6}}});
  report.groups.push_back(std::move(group));
  return report;
}

std::vector<GraphicsCard> cards() {
  std::vector<GraphicsCard> cards(2);
  cards[0].address = "0000:03:00.0";
  cards[0].link = cards[0].fastest_link = {32, 8};
  cards[0].numa_node = 0;
  cards[1].address = "0000:04:00.0";
  cards[1].link = {32, 4};
  cards[1].fastest_link = {32, 8};
  cards[1].numa_node = 1;
  return cards;
}

TEST(DevicesReport, ShowsLinksPairsAndTransports) {
  const std::string text = devices_as_text(two_cards(), cards());
  EXPECT_THAT(text, AllOf(HasSubstr("opencl:0  Intel Arc Pro B60, 24.00 GiB, PCIe 5.0 x8 (31.5 GB/s), NUMA node 0"), HasSubstr("PCIe 5.0 x4 (15.8 GB/s) of PCIe 5.0 x8"),
                          HasSubstr("copies to it 12.5 GB/s, from it 11.0 GB/s")));
  EXPECT_THAT(text, AllOf(HasSubstr("opencl:0 - opencl:1"), HasSubstr("no peer access: OpenCL has no peer access"), HasSubstr("50.0 us, 0.20 GB/s"), HasSubstr("300.0 us, 2.18 GB/s"), HasSubstr("use staged")));
}

TEST(DevicesReport, TellsAClaimFromATest) {
  DevicesReport report = two_cards();
  report.groups[0].pairs[0] = {0, 1, "", "", 9e-6};
  EXPECT_THAT(devices_as_text(report, {}), HasSubstr("peer access, tested; 9.0 us"));
  report.groups[0].pairs[0] = {0, 1, "", "rank 0 found other bytes", 0};
  EXPECT_THAT(devices_as_text(report, {}), HasSubstr("peer access is claimed and does not work: rank 0 found other bytes"));
  const Json json = devices_as_json(report, {});
  EXPECT_TRUE(json["groups"][0]["pairs"][0]["claimed"].get<bool>());
  EXPECT_FALSE(json["groups"][0]["pairs"][0]["works"].get<bool>());
  EXPECT_EQ(json["groups"][0]["pairs"][0]["reason"].get<std::string>(), "rank 0 found other bytes");
}

TEST(DevicesReport, SaysWhenNothingWorks) {
  DevicesReport report = two_cards();
  report.groups[0].chosen.clear();
  report.groups[0].transports[1] = {"staged", "rank 1 has stopped", {}};
  EXPECT_THAT(devices_as_text(report, {}), AllOf(HasSubstr("rank 1 has stopped"), HasSubstr("no transport works")));
  report.groups.clear();
  report.devices.pop_back();
  EXPECT_THAT(devices_as_text(report, {}), HasSubstr("one device: nothing passes between ranks"));
  report.devices[0] = {"cuda:7", "", "", "", 0, 0, 0, "there is no cuda:7"};
  EXPECT_EQ(devices_as_text(report, {}), "cuda:7    there is no cuda:7");
}

TEST(DevicesReport, KeepsEveryNumberInJson) {
  const Json json = devices_as_json(two_cards(), cards());
  EXPECT_EQ(json["devices"][1]["numa_node"].get<int>(), 1);
  EXPECT_EQ(json["devices"][1]["link"]["width"].get<int>(), 4);
  EXPECT_EQ(json["devices"][1]["fastest_link"]["width"].get<int>(), 8);
  EXPECT_EQ(json["groups"][0]["devices"].dump(), R"(["opencl:0","opencl:1"])");
  EXPECT_EQ(json["groups"][0]["chosen"].get<std::string>(), "staged");
  EXPECT_EQ(json["groups"][0]["transports"][1]["times"][1]["bytes"].get<int>(), 655'360);
  EXPECT_NEAR(json["groups"][0]["transports"][1]["times"][1]["bytes_per_second"].get<double>(), 655'360 / 300e-6, 1);
}

TEST(DevicesCommand, MeasuresTheCpuAndSaysWhatToTry) {
  const auto text = quern::testing::run_quern({"devices", "--device", "cpu"});
  EXPECT_EQ(text.exit_code, 0) << text.log;
  EXPECT_THAT(text.output, AllOf(HasSubstr("copies in memory"), HasSubstr("--device cpu:0,cpu:1")));
  const auto json = quern::testing::run_quern({"devices", "--device", "cpu", "--json"});
  const auto found = parse_json(json.output, "devices");
  ASSERT_TRUE(found.has_value()) << json.output;
  EXPECT_GT((*found)["devices"][0]["bytes_to_device_per_second"].get<double>(), 1e6);
}

TEST(DevicesCommand, ReportsADeviceThatDoesNotOpen) {
  const auto result = quern::testing::run_quern({"devices", "--device", "pigeon"});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(result.output, HasSubstr("unknown device 'pigeon'"));
  EXPECT_NE(quern::testing::run_quern({"devices", "--device", "cpu,"}).exit_code, 0);
}

}  // namespace
}  // namespace quern::app
