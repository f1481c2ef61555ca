#include "app/command_line.h"

#include "app/commands.h"
#include "app/model_options.h"
#include "support/test_support.h"

namespace quern::app {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// One command with the model options of the real ones.
struct Sample {
  ModelOptions model;
  std::vector<Command> commands;
  std::optional<Error> error;
  std::string output;
  bool found = false;

  explicit Sample(const std::vector<std::string>& arguments) {
    Command command{.name = "serve", .summary = "sample"};
    add_model_options(command, model);
    commands.push_back(command);
    commands.push_back({.name = "bench latency", .summary = "sample"});
    commands.push_back({.name = "bench serve", .summary = "sample"});
    Result<Invocation> invocation = parse_command_line(commands, arguments);
    if (!invocation) {
      error = invocation.error();
    } else {
      output = invocation->output;
      found = invocation->command != nullptr;
    }
  }
  [[nodiscard]] std::string message() const { return error ? error->message : ""; }
};

TEST(CommandLine, ReadsOptionsBeforeAndAfterTheModel) {
  const Sample sample({"serve", "--max-model-len", "4096", "models/m", "--max-num-seqs=8", "--dtype", "float32"});
  ASSERT_TRUE(sample.found) << sample.message();
  EXPECT_EQ(sample.model.worker.model_dir, "models/m");
  EXPECT_EQ(sample.model.worker.max_model_len, 4096);
  EXPECT_EQ(sample.model.worker.max_num_seqs, 8);
  EXPECT_EQ(sample.model.worker.dtype, worker::ModelDType::kFloat32);
}

TEST(CommandLine, ReadsUnderscoresAsDashesInNamesButNotInValues) {
  const Sample sample({"serve", "my_model", "--max_model_len", "32K", "--kv_cache_memory_bytes=512MiB"});
  ASSERT_TRUE(sample.found) << sample.message();
  EXPECT_EQ(sample.model.worker.model_dir, "my_model");
  EXPECT_EQ(sample.model.worker.max_model_len, 32768);
  EXPECT_EQ(sample.model.worker.kv_cache_memory_bytes, 512ull << 20);
}

TEST(CommandLine, LetsTheLastOfAnOptionWinUnlessItIsRepeatable) {
  const Sample sample(
      {"serve", "m", "--max-num-seqs", "4", "--max-num-seqs", "8", "--kernel", "attention=cpu.plain", "--kernel", "head=cpu.plain"});
  ASSERT_TRUE(sample.found) << sample.message();
  EXPECT_EQ(sample.model.worker.max_num_seqs, 8);
  EXPECT_EQ(sample.model.worker.kernels.size(), 2u);
  EXPECT_EQ(sample.model.worker.kernels.at("attention"), "cpu.plain");
}

TEST(CommandLine, NamesTheNearestOption) {
  EXPECT_THAT(Sample({"serve", "m", "--max-model-length", "5"}).message(),
              HasSubstr("unknown option --max-model-length; did you mean --max-model-len?"));
  EXPECT_THAT(Sample({"serve", "m", "--max_num_seq=5"}).message(), HasSubstr("did you mean --max-num-seqs?"));
  EXPECT_THAT(Sample({"serve", "m", "--frobnicate"}).message(), HasSubstr("quern serve --help"));
}

TEST(CommandLine, NamesTheNearestCommand) {
  EXPECT_THAT(Sample({"sevre", "m"}).message(), HasSubstr("did you mean `quern serve`?"));
  EXPECT_THAT(Sample({"bench"}).message(), HasSubstr("latency, serve"));
  EXPECT_THAT(Sample({"bench", "--help"}).message(), HasSubstr("latency, serve"));
  EXPECT_THAT(Sample({"bench", "latncy"}).message(), HasSubstr("latency, serve"));
  EXPECT_THAT(Sample({"--port", "1", "serve"}).message(), HasSubstr("options follow a command"));
}

TEST(CommandLine, SaysWhatIsMissingOrTooMuch) {
  EXPECT_THAT(Sample({"serve"}).message(), HasSubstr("MODEL is missing"));
  EXPECT_THAT(Sample({"serve", "m", "--device"}).message(), HasSubstr("--device needs a value"));
  EXPECT_THAT(Sample({"serve", "m", "--device="}).message(), HasSubstr("--device needs a value"));
  EXPECT_THAT(Sample({"serve", "m", "--strict=yes"}).message(), HasSubstr("--strict takes no value"));
  EXPECT_THAT(Sample({"serve", "m", "n"}).message(), HasSubstr("too many"));
  EXPECT_TRUE(Sample({}).error.has_value());
}

TEST(CommandLine, RefusesValuesAndNamesTheirOption) {
  EXPECT_THAT(Sample({"serve", "m", "--max-num-seqs", "0"}).message(), HasSubstr("--max-num-seqs: 0 is not in the range"));
  EXPECT_THAT(Sample({"serve", "m", "--max-num-seqs", "-3"}).message(), HasSubstr("--max-num-seqs: -3 is not in the range"));
  EXPECT_THAT(Sample({"serve", "m", "--kv-cache-dtype", "int8"}).message(), HasSubstr("auto, bfloat16, fp8"));
  EXPECT_THAT(Sample({"serve", "m", "--gdn-ring-dtype", "fp8"}).message(), HasSubstr("auto, bfloat16, float32"));
  EXPECT_THAT(Sample({"serve", "m", "--kernel", "attention"}).message(), HasSubstr("OP=CANDIDATE"));
  EXPECT_THAT(Sample({"serve", "m", "--gpu-memory-utilization", "1.5"}).message(), HasSubstr("0.01 to 1"));
  EXPECT_THAT(Sample({"serve", "m", "--quantization", "awq"}).message(), HasSubstr("fp8"));
}

TEST(CommandLine, RefusesFloat16WithTheReason) {
  for (const char* name : {"float16", "half"}) EXPECT_THAT(Sample({"serve", "m", "--dtype", name}).message(), HasSubstr("65504")) << name;
}

TEST(CommandLine, TakesRanksUnderVllmsNames) {
  for (const char* name : {"-tp", "--tensor-parallel-size", "--tensor_parallel_size"}) EXPECT_EQ(Sample({"serve", "m", name, "3"}).model.worker.tp_size, 3) << name;
  for (const char* name : {"-pp", "--pipeline-parallel-size"}) EXPECT_EQ(Sample({"serve", "m", name, "2"}).model.worker.pp_size, 2) << name;
  EXPECT_EQ(Sample({"serve", "m", "-tp=1"}).model.worker.tp_size, 1);
  EXPECT_THAT(Sample({"serve", "m", "-tp", "0"}).message(), HasSubstr("0 is not in the range"));
}

TEST(CommandLine, TakesVllmsSpellings) {
  EXPECT_EQ(Sample({"serve", "m", "--kv-cache-dtype", "fp8_e4m3"}).model.worker.kv_cache_dtype, worker::KvCacheDType::kFp8);
  for (const auto& [word, type] : {std::pair{"auto", worker::RingDType::kAuto}, {"bfloat16", worker::RingDType::kBFloat16}, {"float32", worker::RingDType::kFloat32}, {"float", worker::RingDType::kFloat32}})
    EXPECT_EQ(Sample({"serve", "m", "--gdn-ring-dtype", word}).model.worker.ring_dtype, type) << word;
  EXPECT_EQ(Sample({"serve", "m", "--max-model-len", "auto"}).model.worker.max_model_len, 0);
  EXPECT_EQ(Sample({"serve", "m", "--max-model-len", "-1"}).model.worker.max_model_len, 0);
  EXPECT_TRUE(Sample({"serve", "m", "-q", "fp8"}).model.worker.load.quantize_fp8);
  EXPECT_EQ(Sample({"serve", "m", "--load-format", "dummy"}).model.worker.load.format, weights::LoadFormat::kDummy);
}

TEST(CommandLine, RemembersOptionsThatHaveNoEffect) {
  EXPECT_THAT(Sample({"serve", "m"}).model.notices, IsEmpty());
  const auto settled = [](Sample sample) {
    EXPECT_OK(settle_options(sample.model));
    return sample.model.notices;
  };
  EXPECT_THAT(settled(Sample({"serve", "m", "--enforce-eager", "--language-model-only"})), ::testing::SizeIs(2));
  EXPECT_THAT(settled(Sample({"serve", "m", "--enforce_eager"})), ElementsAre(HasSubstr("--enforce-eager has no effect")));
  EXPECT_THAT(settled(Sample({"serve", "m", "--enforce-eager", "--device", "cuda:0"})), IsEmpty());
}

TEST(CommandLine, PrintsHelpAndVersion) {
  EXPECT_THAT(Sample({"--help"}).output, HasSubstr("bench latency"));
  EXPECT_THAT(Sample({"--version"}).output, HasSubstr("quern 0."));
  const Sample sample({"serve", "--help"});
  EXPECT_THAT(sample.output, HasSubstr("--max-model-len"));
  EXPECT_THAT(sample.output, HasSubstr("Memory and limits"));
  EXPECT_THAT(sample.output, HasSubstr("--tensor-parallel-size"));
  EXPECT_FALSE(sample.found);
}

TEST(CommandLine, SaysWhyThisBuildLacksACommandWhateverFollowsIt) {
  const std::vector<Command> commands = {{.name = "serve", .summary = "sample", .why_absent = "built without a server"}};
  const std::vector<std::string> arguments = {"serve", "model", "--port", "8000"};
  const Result<Invocation> invocation = parse_command_line(commands, arguments);
  ASSERT_FALSE(invocation);
  EXPECT_THAT(invocation.error().message, HasSubstr("built without a server"));
}

TEST(CommandLine, EveryRealCommandHasASummaryAndHelp) {
  const std::vector<Command> commands = all_commands();
  for (const Command& command : commands) {
    EXPECT_FALSE(command.summary.empty()) << command.name;
    if (!command.why_absent.empty()) continue;
    EXPECT_TRUE(command.run) << command.name;
    std::vector<std::string> arguments;
    for (size_t begin = 0; begin < command.name.size();) {
      const size_t end = std::min(command.name.find(' ', begin), command.name.size());
      arguments.push_back(command.name.substr(begin, end - begin));
      begin = end + 1;
    }
    arguments.emplace_back("--help");
    const Result<Invocation> invocation = parse_command_line(commands, arguments);
    ASSERT_OK(invocation);
    for (const OptionGroup& group : command.groups) {
      for (const Option& option : group.options) {
        EXPECT_FALSE(option.help.empty()) << option.names;
        EXPECT_THAT(invocation->output, HasSubstr(option.names.substr(option.names.rfind(',') + 1))) << command.name;
      }
    }
  }
}

}  // namespace
}  // namespace quern::app
