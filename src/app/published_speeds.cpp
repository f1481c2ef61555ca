#include "app/published_speeds.h"

namespace quern::app {
namespace {

constexpr PublishedSpeed kPublished[] = {
    {"b60", 2, 15, "one request, 1024 in and 256 out: vLLM 0.14 of llm-scaler, FP8 made while loading, tensor parallel, eager", "a user's report to intel/llm-scaler"},
    {"b60", 2, 107, "16 requests together, the same, pipeline parallel", "the same report"},
    {"b70", 4, 39.264, "one request, 512 in and 256 out, prompt included: vLLM 0.20.1, static FP8, tensor parallel", "a user's notes, steveseguin/llm-optimizations"},
    {"b70", 4, 41.503, "the same, 512 out", "the same notes"},
    {"b70", 2, 33.31, "one request, decode: vLLM, official block FP8, tensor parallel", "steveseguin/b70-optimization-lab, R156"},
    {"b70", 2, 54.60, "the same with one MTP draft", "the same"},
};

}  // namespace

std::span<const PublishedSpeed> published_speeds() { return kPublished; }

bool has_published_shapes(const model::ModelConfig& config) {
  return config.hidden_size == 5120 && config.intermediate_size == 17408 && config.num_layers() == 64 && config.vocab_size == 248320;
}

}  // namespace quern::app
