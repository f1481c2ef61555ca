#include "model/config.h"

#include <cmath>
#include <string>

#include "base/file.h"
#include "support/test_support.h"

namespace quern::model {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

Json released() {
  auto json = read_json_file(quern::testing::data_path("qwen3.6-27b/config.json"));
  return std::move(json).value();
}

Json flattened() {
  Json config = released().at("text_config");
  config["architectures"] = Json::array({"Qwen3_5ForCausalLM"});
  return config;
}

std::string error_of(const Json& config) {
  auto parsed = parse_config(config, "test");
  return parsed ? "no error" : parsed.error().message;
}

TEST(ModelConfig, ReadsTheReleased27BConfigs) {
  for (const char* file : {"config.json", "config.fp8.json", "config.static.json"}) {
    SCOPED_TRACE(file);
    auto json = read_json_file(quern::testing::data_path("qwen3.6-27b") / file);
    ASSERT_OK(json);
    const auto config = parse_config(*json, "Qwen3.6-27B");
    ASSERT_OK(config);
    EXPECT_EQ(config->hidden_size, 5120);
    EXPECT_EQ(config->intermediate_size, 17408);
    EXPECT_EQ(config->vocab_size, 248320);
    EXPECT_EQ(config->num_layers(), 64);
    EXPECT_EQ(config->num_attention_layers(), 16);
    EXPECT_EQ(config->num_linear_layers(), 48);
    for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(config->layers[i] == LayerType::kFullAttention, i % 4 == 3) << i;
    EXPECT_EQ(config->num_attention_heads, 24);
    EXPECT_EQ(config->num_key_value_heads, 4);
    EXPECT_EQ(config->head_dim, 256);
    EXPECT_EQ(config->linear_num_key_heads, 16);
    EXPECT_EQ(config->linear_num_value_heads, 48);
    EXPECT_EQ(config->conv_channels(), 10240);
    EXPECT_EQ(config->max_position_embeddings, 262144);
    EXPECT_FALSE(config->tie_word_embeddings);
    EXPECT_EQ(config->mtp_num_hidden_layers, 1);
    EXPECT_THAT(config->eos_token_ids, ElementsAre(248044));
    EXPECT_EQ(config->dtype, "bfloat16");
    EXPECT_EQ(config->rotary_dim, 64);
    EXPECT_THAT(config->mrope_section, ElementsAre(11, 11, 10));
    EXPECT_EQ(config->rope_scale, 1.0f);
    ASSERT_EQ(config->inv_freq.size(), 32u);
    for (size_t i = 0; i < 32; ++i) EXPECT_NEAR(config->inv_freq[i] * std::pow(1e7, static_cast<double>(i) / 32), 1.0, 1e-6) << i;
    EXPECT_EQ(config->quantization.is_null(), std::string(file) == "config.json");
  }
}

TEST(ModelConfig, ReadsAFlattenedTextConfig) {
  const auto config = parse_config(flattened(), "text only");
  ASSERT_OK(config);
  EXPECT_EQ(config->num_layers(), 64);
  EXPECT_EQ(config->rotary_dim, 64);
}

TEST(ModelConfig, DerivesTheLayerPatternFromTheInterval) {
  Json json = flattened();
  json.erase("layer_types");
  json["num_hidden_layers"] = 7;
  json["full_attention_interval"] = 3;
  const auto config = parse_config(json, "test");
  ASSERT_OK(config);
  using enum LayerType;
  EXPECT_THAT(config->layers, ElementsAre(kLinearAttention, kLinearAttention, kFullAttention, kLinearAttention, kLinearAttention,
                                          kFullAttention, kLinearAttention));
}

TEST(ModelConfig, AcceptsTheOlderRopeSpellings) {
  Json json = flattened();
  json.erase("rope_parameters");
  json["rope_scaling"] = Json{{"type", "default"}, {"mrope_section", {11, 11, 10}}};
  json["rope_theta"] = 10000.0;
  json["partial_rotary_factor"] = 0.5;
  json["rope_scaling"]["mrope_section"] = Json::array({22, 21, 21});
  const auto config = parse_config(json, "test");
  ASSERT_OK(config);
  EXPECT_EQ(config->rotary_dim, 128);
  EXPECT_NEAR(config->inv_freq[1], std::pow(10000.0, -2.0 / 128), 1e-6);
}

TEST(ModelConfig, DealsFrequenciesInTurnWithoutAnMropeSection) {
  Json json = flattened();
  json["rope_parameters"].erase("mrope_section");
  const auto config = parse_config(json, "test");
  ASSERT_OK(config);
  EXPECT_THAT(config->mrope_section, ElementsAre(11, 11, 10));
}

TEST(ModelConfig, TiesEmbeddingsAtEitherLevel) {
  Json top = released(), text = released();
  top["tie_word_embeddings"] = true;
  text.erase("tie_word_embeddings");
  text["text_config"]["tie_word_embeddings"] = true;
  EXPECT_TRUE(parse_config(top, "top")->tie_word_embeddings);
  EXPECT_TRUE(parse_config(text, "text")->tie_word_embeddings);
}

TEST(ModelConfig, ReadsOneOrSeveralEndTokens) {
  Json json = flattened();
  json["eos_token_id"] = Json::array({7, 9, 7});
  EXPECT_THAT(parse_config(json, "list")->eos_token_ids, ElementsAre(7, 9));
  json["eos_token_id"] = nullptr;
  EXPECT_THAT(parse_config(json, "null")->eos_token_ids, ElementsAre());
  json["eos_token_id"] = 248320;
  EXPECT_THAT(error_of(json), HasSubstr("eos_token_id: expected token ids below vocab_size 248320"));
}

TEST(ModelConfig, AcceptsBothNamesOfTheVisionModel) {
  for (const char* name : {"qwen3_5", "qwen3_5_vision"}) {
    Json json = released();
    json["vision_config"]["model_type"] = name;
    EXPECT_OK(parse_config(json, name));
  }
  Json json = released();
  json["vision_config"]["model_type"] = "clip";
  EXPECT_THAT(error_of(json), HasSubstr("vision_config.model_type: \"clip\""));
}

TEST(ModelConfig, KeepsTheDtypeAsWritten) {
  Json json = flattened();
  json.erase("dtype");
  EXPECT_EQ(parse_config(json, "none")->dtype, "bfloat16");
  json["torch_dtype"] = "float16";
  EXPECT_EQ(parse_config(json, "torch")->dtype, "float16");
}

TEST(ModelConfig, IgnoresTheOutputGateType) {
  Json json = flattened();
  json["output_gate_type"] = "anything";
  EXPECT_OK(parse_config(json, "test"));
}

struct YarnCase {
  const char* parameters;
  double attention_factor;
  int64_t window;
  std::vector<double> at_0_5_10_13_16_20_25_31;  // transformers 5.24
};

TEST(ModelConfig, ComputesYarnAsTransformersDoes) {
  const YarnCase cases[] = {
      {R"({"factor": 4.0, "original_max_position_embeddings": 262144})",
       1.138629436111989,
       1048576,
       {1.0, 0.08058421313762665, 0.006493816617876291, 0.0014330126577988267, 0.00025693507632240653, 1.844922371674329e-05,
        8.495520660289912e-07, 4.1370427084075345e-08}},
      {R"({"factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.2})",
       0.9405715251010841,
       262144,
       {1.0, 0.08058421313762665, 0.006493816617876291, 0.0010031089186668396, 7.905694656074047e-05, 1.0542413292569108e-05,
        8.495520660289912e-07, 4.1370427084075345e-08}},
      {R"({"factor": 2.0, "original_max_position_embeddings": 4096, "attention_factor": 1.5, "truncate": false})",
       1.5,
       262144,
       {1.0, 0.08058421313762665, 0.004598781932145357, 0.0007165063288994133, 0.00015811389312148094, 2.1084826585138217e-05,
        1.6991041320579825e-06, 8.274085416815069e-08}},
  };
  const size_t positions[] = {0, 5, 10, 13, 16, 20, 25, 31};
  for (const YarnCase& c : cases) {
    SCOPED_TRACE(c.parameters);
    Json json = flattened();
    json["rope_parameters"].update(*parse_json(c.parameters, "case"));
    json["rope_parameters"]["rope_type"] = "yarn";
    const auto config = parse_config(json, "yarn");
    ASSERT_OK(config);
    EXPECT_FLOAT_EQ(config->rope_scale, static_cast<float>(c.attention_factor));
    EXPECT_EQ(config->max_position_embeddings, c.window);
    for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(config->inv_freq[positions[i]] / c.at_0_5_10_13_16_20_25_31[i], 1.0, 1e-6) << positions[i];
  }
}

TEST(ModelConfig, SaysWhatIsSupportedWhenTheModelIsAnother) {
  Json json = released();
  json["model_type"] = "qwen3_5_moe";
  json["text_config"]["model_type"] = "qwen3_5_moe_text";
  EXPECT_THAT(
      error_of(json),
      HasSubstr("model_type: \"qwen3_5_moe\" (mixture of experts) is not supported; quern serves the dense Qwen3.5, Qwen3.6 and Qwen3.8"));
  EXPECT_THAT(error_of(json), Not(HasSubstr("faults")));
  EXPECT_THAT(error_of(Json{{"model_type", "llama"}, {"hidden_size", 64}}), HasSubstr("\"llama\" is not supported"));
  EXPECT_THAT(error_of(Json::object()), HasSubstr("model_type: missing"));
  EXPECT_THAT(error_of(Json::array()), HasSubstr("expected an object"));
  json = released();
  json["architectures"] = Json::array({"Qwen3_5MoeForConditionalGeneration"});
  EXPECT_THAT(error_of(json), HasSubstr("architectures: [\"Qwen3_5MoeForConditionalGeneration\"] is not supported"));
}

TEST(ModelConfig, ListsAllFaultsAtOnceWithTheirKeys) {
  Json json = released();
  Json& text = json["text_config"];
  text.erase("hidden_size");
  text["num_attention_heads"] = 23;
  text["linear_num_value_heads"] = 47;
  text["layer_types"].push_back("full_attention");
  text["hidden_act"] = "gelu";
  text["attention_bias"] = true;
  text["attn_output_gate"] = false;
  text["rms_norm_eps"] = -1;
  text["rope_parameters"]["mrope_section"] = Json::array({11, 11, 11});
  text["mtp_num_hidden_layers"] = 2;
  text["vocab_size"] = "many";
  const std::string message = error_of(json);
  EXPECT_THAT(message, HasSubstr("config.json of test: "));
  for (const char* part :
       {"text_config.hidden_size: missing", "text_config.num_attention_heads: 23 is not a multiple of num_key_value_heads 4",
        "text_config.linear_num_value_heads: 47 is not a multiple",
        "text_config.layer_types: expected a list of num_hidden_layers = 64 entries, found 65",
        "text_config.hidden_act: \"gelu\" is not supported", "text_config.attention_bias: true", "text_config.attn_output_gate: false",
        "text_config.rms_norm_eps: expected a number above 0, found -1",
        "text_config.rope_parameters.mrope_section: expected three counts that sum to 32", "text_config.mtp_num_hidden_layers: 2",
        "text_config.vocab_size: expected a whole number"}) {
    EXPECT_THAT(message, HasSubstr(part));
  }
}

TEST(ModelConfig, RefusesUnknownRopeTypes) {
  Json json = flattened();
  json["rope_parameters"]["rope_type"] = "llama3";
  EXPECT_THAT(error_of(json), HasSubstr("rope_parameters.rope_type: \"llama3\" is not supported, only \"default\" and \"yarn\""));
}

TEST(ModelConfig, RefusesExtentsThatWouldOverflow) {
  Json json = flattened();
  json["hidden_size"] = int64_t{1} << 40;
  json["num_attention_heads"] = 1e300;
  json["linear_num_key_heads"] = -16;
  json["head_dim"] = 0.5;
  EXPECT_THAT(error_of(json), HasSubstr("4 faults"));
}

TEST(ModelConfig, SaysWhenTheDirectoryIsNotOne) {
  const quern::testing::TemporaryFolder folder;
  EXPECT_THAT(load_config(folder.path() / "missing").error().message, HasSubstr("no such directory"));
  EXPECT_THAT(load_config(folder.path()).error().message, HasSubstr("no config.json in it"));
  ASSERT_OK(write_file(folder.path() / "file", "x"));
  EXPECT_THAT(load_config(folder.path() / "file").error().message, HasSubstr("not a directory"));
  ASSERT_OK(write_file(folder.path() / "config.json", "{\"model_type\": "));
  EXPECT_THAT(load_config(folder.path()).error().message, HasSubstr("config.json: not valid JSON"));
}

TEST(ModelConfig, TakesQuantizationFromHfQuantConfig) {
  const quern::testing::TemporaryFolder folder;
  ASSERT_OK(write_file(folder.path() / "config.json", dump_json(flattened())));
  ASSERT_OK(write_file(folder.path() / "hf_quant_config.json", R"({"quantization": {"quant_algo": "FP8"}})"));
  const auto config = load_config(folder.path());
  ASSERT_OK(config);
  EXPECT_EQ(config->name, folder.path().filename().string());
  EXPECT_EQ(config->quantization["quantization"]["quant_algo"], "FP8");
  EXPECT_EQ(load_config(folder.path().string() + "/")->name, folder.path().filename().string());
}

}  // namespace
}  // namespace quern::model
