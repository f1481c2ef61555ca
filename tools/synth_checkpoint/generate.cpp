#include <utility>

#include "base/file.h"
#include "model/config.h"
#include "synth_checkpoint/plan.h"
#include "synth_checkpoint/schemes.h"
#include "synth_checkpoint/synth.h"
#include "synth_checkpoint/text_files.h"
#include "synth_checkpoint/writer.h"

namespace quern::tools {
namespace {

Json make_config(const SynthOptions& options) {
  Json config = options.config;
  config.erase("quantization_config");
  if (config.contains("text_config")) config["text_config"].erase("quantization_config");
  if (options.text_files) set_token_ids(config);
  return config;
}

}  // namespace

Result<void> write_checkpoint(const SynthOptions& options, const std::filesystem::path& out) {
  Json config = make_config(options);
  ASSIGN_OR_RETURN(const model::ModelConfig parsed, model::parse_config(config, out.filename().string()));
  std::error_code error;
  std::filesystem::create_directories(out, error);
  if (error) return invalid_argument("{}: cannot make the directory: {}", out.string(), error.message());
  std::filesystem::remove(out / "config.json", error);

  if (options.text_files) RETURN_IF_ERROR(write_text_files(out, parsed.vocab_size));
  const CheckpointPlan plan = plan_checkpoint(parsed, options, /*flattened=*/!config.contains("text_config"));
  RETURN_IF_ERROR(write_safetensors(plan.files, out, options.num_threads, options.holes));
  if (!plan.index.is_null()) RETURN_IF_ERROR(write_file(out / "model.safetensors.index.json", plan.index.dump(2)));

  const Json quantization = quantization_config(parsed, options);
  if (options.scheme == SynthScheme::kModelOptFp8) {
    Json settings = quantization;
    settings.erase("quant_method");
    RETURN_IF_ERROR(
        write_file(out / "hf_quant_config.json", Json{{"producer", {{"name", "modelopt"}}}, {"quantization", settings}}.dump(2)));
  }
  if (!quantization.is_null()) config["quantization_config"] = quantization;
  return write_file(out / "config.json", config.dump(2));
}

}  // namespace quern::tools
