#include "app/hardware_report.h"

#include <cstdlib>

#include "app/program.h"
#include "support/test_support.h"

// The report of a machine's hardware: it is whole on every kind of device, and names nobody.

namespace quern::app {
namespace {

using quern::testing::ProgramResult;
using quern::testing::run_quern;
using quern::testing::TemporaryFolder;
using ::testing::HasSubstr;
using ::testing::Not;

/// cpu, or the device that this run of the tests is for.
std::string device_under_test() {
  const char* device = std::getenv("QUERN_TEST_DEVICE");
  return device == nullptr ? "cpu" : device;
}

TEST(HardwareReport, HasEveryMeasurementAndADecodeBench) {
  const TemporaryFolder folder;
  const std::string file = (folder.path() / "report.json").string(), demo = QUERN_SOURCE_DIR "/models/quern-demo";
  if (!std::filesystem::exists(demo + "/model.safetensors")) GTEST_SKIP() << demo << " has no weights";
  const ProgramResult result = run_quern({"doctor", "--hardware-report", file, "--device", device_under_test(), "--quick", "--demo-model", demo, "--model", demo, "--threads", "2"});
  ASSERT_EQ(result.exit_code, 0) << result.log;
  const auto report = read_json_file(file);
  ASSERT_OK(report);
  EXPECT_EQ((*report)["hardware_report"], 1);
  EXPECT_TRUE((*report)["machine"].contains("findings"));
  ASSERT_EQ((*report)["devices"].size(), 1u);
  const Json& device = (*report)["devices"][0];
  if (device.contains("error") && device_under_test() != "cpu") GTEST_SKIP() << device["error"].get<std::string>();
  ASSERT_FALSE(device.contains("error")) << device.dump(2);
  EXPECT_EQ(device["device"], device_under_test());
  EXPECT_EQ(device["op_tests"]["faults"].size(), 0u) << device["op_tests"].dump(2);
  for (const char* name : {"decode_read_bandwidth", "decode_read_bandwidth_8_rows", "decode_read_bandwidth_16_rows", "device_copy_bandwidth", "host_to_device_bandwidth", "device_to_host_bandwidth",
                           "host_to_device_row", "device_to_host_row", "launch_interval", "enqueue", "launch_and_wait"}) {
    ASSERT_TRUE(device["measurements"].contains(name)) << name;
    EXPECT_GT(device["measurements"][name].value("value", 0.0), 0) << name;
  }
  for (const char* name : {"host_mirror", "half_subnormals"}) {
    ASSERT_TRUE(device["measurements"].contains(name)) << name;
    EXPECT_TRUE(device["measurements"][name].contains("value") != device["measurements"][name].contains("not_measured")) << name << ": a number or a reason";
  }
  ASSERT_EQ(device["benches"].size(), 2u);
  for (const Json& bench : device["benches"]) {
    ASSERT_FALSE(bench.contains("error")) << bench.dump();
    EXPECT_EQ(bench["model"], "quern-demo");
    EXPECT_GT(bench["decode_tokens_per_second"].get<double>(), 0);
  }
  // A person reads the same.
  for (const Json& line : (*report)["summary"]) EXPECT_THAT(result.output, HasSubstr(line.get<std::string>()));
  EXPECT_THAT(result.output, HasSubstr("decode_read_bandwidth"));

  const PrivateWords words = private_words();
  const std::string text = report->dump();
  EXPECT_THAT(text, Not(HasSubstr(folder.path().string())));
  EXPECT_THAT(text, Not(HasSubstr(QUERN_SOURCE_DIR)));
  for (const std::string& word : {words.host, words.home}) {
    if (word.size() > 3) {
      EXPECT_THAT(text, Not(HasSubstr(word)));
    }
  }
}

TEST(HardwareReport, TriesWhatPassesBetweenDevices) {
  const TemporaryFolder folder;
  const std::string file = (folder.path() / "report.json").string();
  const ProgramResult result = run_quern({"doctor", "--hardware-report", file, "--device", "cpu:0", "--device", "cpu:1", "--quick", "--threads", "1"});
  ASSERT_EQ(result.exit_code, 0) << result.log;
  const auto report = read_json_file(file);
  ASSERT_OK(report);
  ASSERT_EQ((*report)["exchange"]["groups"].size(), 1u) << (*report)["exchange"].dump(2);
  const Json& group = (*report)["exchange"]["groups"][0];
  EXPECT_NE(group["chosen"], "");
  bool timed = false;
  for (const Json& transport : group["transports"])
    for (const Json& time : transport["times"]) timed = timed || time["seconds"].get<double>() > 0;
  EXPECT_TRUE(timed);
  EXPECT_THAT(result.output, HasSubstr("exchange on cpu: chosen is " + group["chosen"].get<std::string>()));
}

TEST(HardwareReport, SaysWhatFailsAndGoesOn) {
  const TemporaryFolder folder;
  const std::string file = (folder.path() / "report.json").string();
  const ProgramResult result = run_quern({"doctor", "--hardware-report", file, "--device", "cuda:99", "--device", "nonsense", "--quick", "--demo-model", QUERN_SOURCE_DIR "/models/quern-demo"});
  ASSERT_EQ(result.exit_code, 0) << result.log;
  const auto report = read_json_file(file);
  ASSERT_OK(report);
  ASSERT_EQ((*report)["devices"].size(), 2u);
  for (const Json& device : (*report)["devices"]) {
    EXPECT_TRUE(device.contains("error"));
    EXPECT_TRUE(device["benches"][0].contains("error"));
  }
  EXPECT_THAT(result.output, HasSubstr("unknown device 'nonsense'"));
  const ProgramResult no_model = run_quern({"doctor", "--hardware-report", file, "--device", "cpu", "--model", (folder.path() / "nothing").string()});
  EXPECT_EQ(no_model.exit_code, 1);
  EXPECT_THAT(no_model.log, HasSubstr("has no config.json"));
  const ProgramResult no_folder = run_quern({"doctor", "--hardware-report", (folder.path() / "nowhere/report.json").string(), "--device", "nonsense", "--quick"});
  EXPECT_EQ(no_folder.exit_code, 1);
}

TEST(HardwareReport, LeavesOutWhoseMachineItIs) {
  const PrivateWords words{"workhorse", "ai", "/home/ai"};
  const auto clean = [&](std::string_view text) { return without_private(text, words); };
  EXPECT_EQ(clean("libraries of workhorse"), "libraries of <host>");
  EXPECT_EQ(clean("workhorses and chains"), "workhorses and chains") << "whole words alone";
  EXPECT_EQ(clean("user ai ran ai-tool"), "user <user> ran ai-tool");
  EXPECT_EQ(clean("cannot read /home/ai/models/x.json: no"), "cannot read <path>: no");
  EXPECT_EQ(clean("'/data/models/secret name'"), "'<path> name'");
  EXPECT_EQ(clean("/mnt/disk"), "<path>");
  EXPECT_EQ(clean("/dev/dri/renderD128 and /usr/lib/libOpenCL.so.1"), "/dev/dri/renderD128 and /usr/lib/libOpenCL.so.1");
  EXPECT_EQ(clean("31.5 GB/s of 456 GB/s, tok/s"), "31.5 GB/s of 456 GB/s, tok/s");
  EXPECT_EQ(clean("a / b"), "a / b");
  const Json cleaned = without_private(Json{{"a", {"/opt/x", 3, true}}, {"b", {{"c", "workhorse"}}}}, words);
  EXPECT_EQ(cleaned.dump(), R"({"a":["<path>",3,true],"b":{"c":"<host>"}})");
}

}  // namespace
}  // namespace quern::app
