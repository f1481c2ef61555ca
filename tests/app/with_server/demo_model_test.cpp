// The shipped model answers its held-out questions, on the CPU or QUERN_TEST_DEVICE: tokenizer, scheduler, kernels and states judged together, on text.

#include <cstdlib>
#include <fstream>
#include <iostream>

#include "app/eval_run.h"
#include "base/file.h"
#include "base/json.h"
#include "engine/engine.h"
#include "support/test_support.h"
#include "text/tokenizer.h"
#include "worker/start.h"

namespace quern::app {
namespace {

using quern::testing::data_path;

std::filesystem::path model_dir() { return std::filesystem::path(QUERN_SOURCE_DIR) / "models" / "quern-demo"; }

/// The first questions of one file of tests/data/demo, and how many right answers are asked for; the ranks that share layers, and stages.
struct QuestionFile {
  const char* name;
  size_t num_questions, min_right;
  int32_t tp_size = 1, pp_size = 1;
};

struct Answer {
  std::string text;
  bool ended = false;  // with <|im_end|>
};

std::string trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\n");
  return begin == std::string_view::npos ? std::string() : std::string(text.substr(begin, text.find_last_not_of(" \t\n") + 1 - begin));
}

/// The answer proper, without reasoning and the end of the turn; empty when the reasoning did not end.
std::string content_of(bool thinking, std::string_view text) {
  constexpr std::string_view kThinkEnd = "</think>", kTurnEnd = "<|im_end|>";
  if (thinking) {
    const size_t end = text.find(kThinkEnd);
    if (end == std::string_view::npos) return {};
    text.remove_prefix(end + kThinkEnd.size());
  }
  return trimmed(text.substr(0, text.find(kTurnEnd)));
}

/// The last integer in `text` with its sign; empty without one.
std::string_view last_number(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789";
  const size_t last = text.find_last_of(kDigits);
  if (last == std::string_view::npos) return {};
  const size_t before = text.find_last_not_of(kDigits, last);
  size_t begin = before == std::string_view::npos ? 0 : before + 1;
  if (begin > 0 && text[begin - 1] == '-') --begin;
  return text.substr(begin, last + 1 - begin);
}

/// The rule of tools/demo_model/questions.py, except that a tool call has to be the expected text and not only the same call.
bool is_right(const Json& question, std::string_view text) {
  const auto kind = question.at("kind").get<std::string>();
  const auto expected = question.at("expected").get<std::string>();
  const std::string content = content_of(question.at("enable_thinking").get<bool>(), text);
  if (kind.starts_with("arithmetic") && kind != "arithmetic <") {
    return !last_number(content).empty() && last_number(content) == last_number(expected);
  }
  return content == expected;
}

std::vector<Json> read_questions(const QuestionFile& file) {
  const std::filesystem::path path = data_path(fmt::format("demo/{}.jsonl", file.name));
  std::ifstream in(path);
  std::vector<Json> questions;
  for (std::string line; questions.size() < file.num_questions && std::getline(in, line);) {
    Result<Json> question = parse_json(line, path.string());
    EXPECT_OK(question);
    if (question) questions.push_back(std::move(*question));
  }
  return questions;
}

class DemoModel : public ::testing::TestWithParam<QuestionFile> {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(model_dir() / "model.safetensors")) GTEST_SKIP() << "this checkout has no weights of quern-demo";
    auto tokenizer = text::Tokenizer::load(model_dir());
    ASSERT_OK(tokenizer);
    tokenizer_ = std::make_unique<text::Tokenizer>(std::move(*tokenizer));
    worker::WorkerOptions options;
    options.model_dir = model_dir();
    options.load.with_mtp = false;
    options.max_num_seqs = 8;
    options.max_model_len = 4608;
    options.kv_cache_memory_bytes = uint64_t{96} << 20;  // 8 sequences of 4,608 tokens of 2 KiB are 72 MiB
    options.tp_size = GetParam().tp_size;
    options.pp_size = GetParam().pp_size;
    options.num_threads = options.tp_size * options.pp_size == 1 ? 2 : 1;
    if (const char* device = std::getenv("QUERN_TEST_DEVICE"); device != nullptr) {
      if (options.tp_size * options.pp_size > 1) GTEST_SKIP() << "several ranks are tried on the CPU";
      options.device = device;
    }
    const auto plan = worker::make_plan(options);
    ASSERT_OK(plan);
    auto workers = worker::start_workers(*plan);
    ASSERT_OK(workers);
    engine_ = engine::Engine::start(std::move(*workers), {});
  }

  std::unique_ptr<engine::RequestStream> ask(const Json& question, int32_t im_end) {
    engine::GenerationRequest request;
    request.prompt = tokenizer_->encode(question.at("prompt").get<std::string>(), true);
    request.sampling.temperature = 0;
    request.sampling.stop_ids = {im_end};
    request.max_tokens = 200;
    auto stream = engine_->submit(std::move(request));
    EXPECT_OK(stream);
    return stream ? std::move(*stream) : nullptr;
  }

  Answer read(engine::RequestStream& stream, int32_t im_end) {
    std::vector<int32_t> tokens;
    for (;;) {
      const engine::TokenEvent event = stream.next();
      tokens.insert(tokens.end(), event.tokens.begin(), event.tokens.end());
      if (!event.finish) continue;
      EXPECT_FALSE(event.finish->error.has_value());
      return {.text = tokenizer_->decode(tokens, false), .ended = event.finish->stop_token == im_end};
    }
  }

  std::unique_ptr<text::Tokenizer> tokenizer_;
  std::unique_ptr<engine::Engine> engine_;
};

TEST_P(DemoModel, AnswersHeldOutQuestionsAndEndsItsTurns) {
  const QuestionFile& file = GetParam();
  const std::vector<Json> questions = read_questions(file);
  ASSERT_EQ(questions.size(), file.num_questions);
  const std::optional<int32_t> im_end = tokenizer_->token_to_id("<|im_end|>");
  ASSERT_TRUE(im_end.has_value());

  std::vector<std::unique_ptr<engine::RequestStream>> streams;
  for (const Json& question : questions) {
    streams.push_back(ask(question, *im_end));
    ASSERT_NE(streams.back(), nullptr);
  }
  size_t num_right = 0;
  std::string wrong;
  for (size_t i = 0; i < questions.size(); ++i) {
    const Answer answer = read(*streams[i], *im_end);
    EXPECT_TRUE(answer.ended) << "question " << i << ": " << answer.text;
    if (is_right(questions[i], answer.text)) {
      ++num_right;
    } else {
      wrong += fmt::format("\nquestion {}: expected {}\ngot {}", i, questions[i].at("expected").get<std::string>(), answer.text);
    }
  }
  const double percent = 100.0 * static_cast<double>(num_right) / static_cast<double>(questions.size());
  std::cout << fmt::format("{}: {} of {} right ({:.1f} %){}\n", file.name, num_right, questions.size(), percent, wrong);
  EXPECT_GE(num_right, file.min_right);
}

// Larger samples give 100 % of arithmetic, 98.6 % of recall_1k, 97.3 % of recall_4k, 99.0 % of tool calls and 100 % of chat
// (docs/quality.md); of these questions the CPU answers all but one tool call. Below that one answer a file, two of arithmetic, are left to
// kernels that add in another order.
INSTANTIATE_TEST_SUITE_P(Questions, DemoModel,
                         ::testing::Values(QuestionFile{"arithmetic", 40, 38}, QuestionFile{"recall_1k", 10, 9},
                                           QuestionFile{"recall_4k", 2, 1}, QuestionFile{"tool_call", 12, 10}, QuestionFile{"chat", 10, 9}),
                         [](const auto& file) { return std::string(file.param.name); });
INSTANTIATE_TEST_SUITE_P(QuestionsToRanks, DemoModel,
                         ::testing::Values(QuestionFile{"arithmetic", 40, 38, 2, 1}, QuestionFile{"chat", 10, 9, 3, 1}, QuestionFile{"tool_call", 12, 10, 1, 2},
                                           QuestionFile{"recall_1k", 5, 4, 2, 2}),
                         [](const auto& file) { return fmt::format("{}_tp{}_pp{}", file.param.name, file.param.tp_size, file.param.pp_size); });

/// The first draft after each token, judged by the model's own greedy choice; docs/quality.md has larger samples.
TEST(DemoModelDrafts, AreAcceptedOnTextAndMoreSoOnStructuredOutput) {
  if (!std::filesystem::exists(model_dir() / "model.safetensors")) GTEST_SKIP() << "this checkout has no weights of quern-demo";
  const auto tokenizer = text::Tokenizer::load(model_dir());
  ASSERT_OK(tokenizer);
  worker::WorkerOptions options;
  options.model_dir = model_dir();
  options.max_num_seqs = 1;
  options.max_model_len = 2048;
  options.kv_cache_memory_bytes = uint64_t{16} << 20;
  options.num_threads = 2;
  const auto plan = worker::make_plan(options);
  ASSERT_OK(plan);
  const auto workers = worker::start_workers(*plan);
  ASSERT_OK(workers);
  const auto rate = [](const char* what, const Acceptance& a) {
    const double share = static_cast<double>(a.num_accepted) / static_cast<double>(a.num_drafts);
    std::cout << fmt::format("{}: {} of {} drafts accepted ({:.1f} %)\n", what, a.num_accepted, a.num_drafts, 100 * share);
    return share;
  };

  const auto text = read_file(data_path("demo/heldout.txt"));
  ASSERT_OK(text);
  const auto along_text = eval_acceptance(**workers, tokenizer->encode(text->substr(0, 4000), true), 0);
  ASSERT_OK(along_text);
  EXPECT_GT(along_text->num_drafts, 500);
  EXPECT_GE(rate("text", *along_text), 0.60);

  Acceptance structured;
  for (const char* name : {"tool_call", "json"}) {
    for (const Json& question : read_questions({name, 6, 0})) {
      const std::string prompt = question.at("prompt").get<std::string>();
      const auto given = static_cast<int32_t>(tokenizer->encode(prompt, true).size());
      const auto one = eval_acceptance(**workers, tokenizer->encode(prompt + question.at("expected").get<std::string>() + "<|im_end|>", true), given);
      ASSERT_OK(one);
      structured.num_drafts += one->num_drafts;
      structured.num_accepted += one->num_accepted;
    }
  }
  EXPECT_GT(structured.num_drafts, 200);
  EXPECT_GE(rate("structured output", structured), 0.80);
}

}  // namespace
}  // namespace quern::app
