// Writes a checkpoint with made-up weights; `synth_checkpoint --help` says how.

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <map>
#include <optional>
#include <string>

#include "synth_checkpoint/synth.h"

namespace {

using quern::Json;
using quern::Result;
using namespace quern::tools;

struct Arguments {
  std::string out, config, preset, scheme = "bf16", scale_shape;
  std::map<std::string, std::optional<int64_t>> extents;  // key of text_config -> value
  std::optional<bool> tied;
  bool no_mtp = false, no_tokenizer = false, f32_gates = false;
  uint64_t seed = 0;
  double shard_gb = 5;
  int threads = 2;
};

Result<Json> base_config(const Arguments& arguments) {
  if (arguments.config.empty() == arguments.preset.empty()) return quern::invalid_argument("give either --config or --preset");
  return arguments.preset.empty() ? quern::read_json_file(arguments.config) : preset_config(arguments.preset);
}

Result<SynthOptions> make_options(const Arguments& arguments) {
  SynthOptions options;
  ASSIGN_OR_RETURN(options.config, base_config(arguments));
  Json& text = options.config.contains("text_config") ? options.config["text_config"] : options.config;
  for (const auto& [key, value] : arguments.extents) {
    if (!value) continue;
    text[key] = *value;
    if (key == "num_hidden_layers") text.erase("layer_types");  // derived from full_attention_interval
    if (key == "head_dim") text["rope_parameters"].erase("mrope_section");
  }
  if (arguments.tied) options.config["tie_word_embeddings"] = text["tie_word_embeddings"] = *arguments.tied;
  ASSIGN_OR_RETURN(options.scheme, parse_synth_scheme(arguments.scheme));
  if (!arguments.scale_shape.empty()) {
    if (arguments.scale_shape == "()") {
      options.scale_shape = quern::Shape{};
    } else if (arguments.scale_shape == "(1,)") {
      options.scale_shape = quern::Shape{1};
    } else if (arguments.scale_shape == "(1,1)") {
      options.scale_shape = quern::Shape{1, 1};
    } else {
      return quern::invalid_argument("--scale-shape {}: expected (), (1,) or (1,1)", arguments.scale_shape);
    }
  }
  options.with_mtp = !arguments.no_mtp;
  options.text_files = !arguments.no_tokenizer;
  options.f32_gates = arguments.f32_gates;
  options.seed = arguments.seed;
  options.shard_bytes = static_cast<uint64_t>(arguments.shard_gb * 1e9);
  options.num_threads = arguments.threads;
  return options;
}

uint64_t bytes_in(const std::filesystem::path& folder) {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) bytes += entry.is_regular_file() ? entry.file_size() : 0;
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app("Writes a checkpoint with made-up weights in the formats that quern loads.");
  app.add_option("OUT", arguments.out, "directory to write")->required();
  app.add_option("--config", arguments.config, "config.json of the model");
  app.add_option("--preset", arguments.preset, fmt::format("a config of the family: {}", fmt::join(preset_names(), ", ")));
  app.add_option("--scheme", arguments.scheme, fmt::format("{}", fmt::join(synth_scheme_names(), ", ")))->capture_default_str();
  for (const auto& [flag, key] : std::initializer_list<std::pair<const char*, const char*>>{{"--layers", "num_hidden_layers"},
                                                                                            {"--hidden", "hidden_size"},
                                                                                            {"--intermediate", "intermediate_size"},
                                                                                            {"--vocab", "vocab_size"},
                                                                                            {"--heads", "num_attention_heads"},
                                                                                            {"--kv-heads", "num_key_value_heads"},
                                                                                            {"--head-dim", "head_dim"},
                                                                                            {"--gdn-key-heads", "linear_num_key_heads"},
                                                                                            {"--gdn-value-heads", "linear_num_value_heads"},
                                                                                            {"--gdn-key-dim", "linear_key_head_dim"},
                                                                                            {"--gdn-value-dim", "linear_value_head_dim"}}) {
    app.add_option(flag, arguments.extents[key], fmt::format("override of {}", key));
  }
  app.add_flag("--tied,!--untied", arguments.tied, "lm_head shares the embedding table, or not");
  app.add_option("--scale-shape", arguments.scale_shape, "shape of per-tensor scales: (), (1,) or (1,1)");
  app.add_flag("--f32-gates", arguments.f32_gates, "A_log and linear_attn.norm in f32");
  app.add_flag("--no-mtp", arguments.no_mtp, "leave the MTP head out");
  app.add_flag("--no-tokenizer", arguments.no_tokenizer, "weights and config only");
  app.add_option("--seed", arguments.seed, "of the weights")->capture_default_str();
  app.add_option("--shard-gb", arguments.shard_gb, "size of a shard")->capture_default_str();
  app.add_option("--threads", arguments.threads, "threads that make weights")->check(CLI::Range(1, 256))->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  const auto start = std::chrono::steady_clock::now();
  auto options = make_options(arguments);
  const Result<void> written = options ? write_checkpoint(*options, arguments.out) : Result<void>(options.error());
  if (!written) {
    fmt::print(stderr, "synth_checkpoint: {}\n", written.error().message);
    return 1;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const double megabytes = static_cast<double>(bytes_in(arguments.out)) * 1e-6;
  fmt::print("{}: {:.1f} MB in {:.1f} s, {:.0f} MB/s\n", arguments.out, megabytes, seconds, megabytes / seconds);
  return 0;
}
