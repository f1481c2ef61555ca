#include "model/tensors.h"

#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "support/test_support.h"

namespace quern::model {
namespace {

/// name -> shape of the text part of the released checkpoint, by canonical name.
std::map<std::string, std::string> released_tensors() {
  std::ifstream file(quern::testing::data_path("qwen3.6-27b/tensors.bf16.tsv"));
  std::map<std::string, std::string> tensors;
  std::string line;
  std::getline(file, line);
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string name, dtype, shape;
    fields >> name >> dtype >> shape;
    if (name.starts_with("model.visual.")) continue;
    constexpr std::string_view kPrefix = "model.language_model.";
    if (name.starts_with(kPrefix)) name.erase(0, kPrefix.size());
    tensors[name] = shape;
  }
  return tensors;
}

ModelConfig released_config() {
  auto json = read_json_file(quern::testing::data_path("qwen3.6-27b/config.json"));
  return std::move(parse_config(*json, "Qwen3.6-27B")).value();
}

TEST(TensorSpecs, AreTheTextTensorsOfTheReleasedCheckpoint) {
  std::map<std::string, std::string> specs;
  for (const TensorSpec& spec : tensor_specs(released_config(), /*with_mtp=*/true)) {
    EXPECT_TRUE(specs.emplace(spec.name, fmt::format("{}", fmt::join(spec.shape.extents(), "x"))).second) << spec.name;
  }
  EXPECT_EQ(specs, released_tensors());
  EXPECT_EQ(specs.size(), 1199u - 333u);
}

TEST(TensorSpecs, QuantizeAtRuntimeWhatTheReleasedFp8CheckpointQuantizes) {
  std::ifstream file(quern::testing::data_path("qwen3.6-27b/tensors.fp8.tsv"));
  std::set<std::string> stored;
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string name, dtype;
    fields >> name >> dtype;
    if (dtype == "F8_E4M3") stored.insert(name.starts_with("mtp.") ? name : name.substr(std::string_view("model.language_model.").size()));
  }
  std::set<std::string> converted;
  for (const TensorSpec& spec : tensor_specs(released_config(), true))
    if (spec.quantize_at_runtime) converted.insert(spec.name);
  EXPECT_EQ(converted, stored);
  EXPECT_EQ(converted.size(), 407u);
}

TEST(TensorSpecs, HaveNoHeadOfTheirOwnWhenTied) {
  ModelConfig config = released_config();
  config.tie_word_embeddings = true;
  for (const TensorSpec& spec : tensor_specs(config, false)) {
    EXPECT_NE(spec.name, "lm_head.weight");
    EXPECT_FALSE(spec.name.starts_with("mtp."));
  }
}

}  // namespace
}  // namespace quern::model
