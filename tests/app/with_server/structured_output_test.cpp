// The shipped model held to grammars, with the real kernels: the text is valid, and the same whatever guesses tokens ahead.

#include <iostream>

#include "base/json.h"
#include "engine/engine.h"
#include "server/constraints.h"
#include "support/test_support.h"
#include "text/json_schema.h"
#include "text/output_grammar.h"
#include "text/tokenizer.h"
#include "worker/start.h"

namespace quern::app {
namespace {

std::filesystem::path model_dir() { return std::filesystem::path(QUERN_SOURCE_DIR) / "models" / "quern-demo"; }

struct Question {
  const char* schema;
  const char* ask;
};
const std::vector<Question> kQuestions{
    {R"({"type": "object", "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 200}, "sure": {"type": "boolean"}}, "required": ["answer", "sure"]})", "What is 17 + 25?"},
    {R"({"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 30}, "minItems": 2, "maxItems": 4})", "List some animals."},
    {R"({"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "note": {"type": "string", "maxLength": 60}, "n": {"type": "number", "minimum": -1, "maximum": 1}}, "required": ["city", "note", "n"]})", "Answer in JSON: where is the tower?"},
    {R"({"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"v": {"type": "integer", "maximum": 99}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}]}}, "required": ["v", "next"]}}})", "Make a list in JSON."},
};

class StructuredDemo : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(model_dir() / "model.safetensors")) GTEST_SKIP() << "this checkout has no weights of quern-demo";
    auto tokenizer = text::Tokenizer::load(model_dir());
    ASSERT_OK(tokenizer);
    tokenizer_ = std::make_unique<text::Tokenizer>(std::move(*tokenizer));
    end_ = *tokenizer_->token_to_id("<|im_end|>");
  }

  struct Answer {
    std::vector<int32_t> tokens;
    engine::FinishReason reason = engine::FinishReason::kError;
  };
  /// All questions at once, greedy and seeded, with and without reasoning before them.
  std::vector<Answer> ask(engine::SpeculationMethod method, uint64_t cache_bytes, engine::EngineStats& stats) {
    worker::WorkerOptions options;
    options.model_dir = model_dir();
    options.max_num_seqs = 16;
    options.max_model_len = 1024;
    options.kv_cache_memory_bytes = cache_bytes;
    options.num_threads = 2;
    const auto plan = worker::make_plan(options);
    EXPECT_OK(plan);
    auto workers = worker::start_workers(*plan);
    EXPECT_OK(workers);
    engine::EngineOptions engine_options;
    engine_options.speculation.method = method;
    engine_options.speculation.adaptive = false;
    const auto engine = engine::Engine::start(std::move(*workers), engine_options);
    server::Constraints constraints(tokenizer_.get(), engine->limits().vocab_size);
    std::vector<std::unique_ptr<engine::RequestStream>> streams;
    for (size_t i = 0; i < kQuestions.size() * 4; ++i) {
      const Question& question = kQuestions[i / 4];
      const bool thinks = i % 2 == 1, greedy = i % 4 < 2;
      text::OutputShape shape;
      shape.starts_in_reasoning = thinks;
      shape.content = text::ContentFormat{};
      shape.content->kind = text::ContentFormat::Kind::kJsonSchema;
      shape.content->schema = *parse_json(question.schema, "schema");
      shape.content->field = "schema";
      auto grammar = constraints.compiled(shape);
      EXPECT_OK(grammar);
      engine::GenerationRequest request;
      request.prompt = tokenizer_->encode(fmt::format("<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n{}", question.ask, thinks ? "" : "\n</think>\n\n"));
      request.sampling.temperature = greedy ? 0 : 1;
      request.sampling.seed = i;
      request.sampling.stop_ids = {end_};
      request.max_tokens = 150;
      request.constraint = std::make_unique<server::GrammarConstraint>(*grammar, std::vector<int32_t>{end_});
      auto stream = engine->submit(std::move(request));
      EXPECT_OK(stream);
      streams.push_back(std::move(*stream));
    }
    std::vector<Answer> answers;
    for (const auto& stream : streams) {
      Answer answer;
      for (bool done = false; !done;) {
        const engine::TokenEvent event = stream->next();
        answer.tokens.insert(answer.tokens.end(), event.tokens.begin(), event.tokens.end());
        if (event.finish) {
          answer.reason = event.finish->reason;
          EXPECT_NE(answer.reason, engine::FinishReason::kError) << (event.finish->error ? event.finish->error->message : "");
          done = true;
        }
      }
      answers.push_back(std::move(answer));
    }
    stats = engine->stats();
    return answers;
  }

  std::unique_ptr<text::Tokenizer> tokenizer_;
  int32_t end_ = 0;
};

TEST_F(StructuredDemo, WritesValidDocumentsAndTheSameOnesWithDrafts) {
  engine::EngineStats plain_stats;
  const std::vector<Answer> plain = ask(engine::SpeculationMethod::kNone, uint64_t{64} << 20, plain_stats);
  int num_complete = 0, num_thought = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    std::string text = tokenizer_->decode(plain[i].tokens, true);
    const bool thinks = i % 2 == 1;
    if (thinks) {
      const size_t end = text.find("</think>");
      if (end == std::string::npos) continue;  // it did not stop thinking in time
      ++num_thought;
      text.erase(0, end + 8);
      text.erase(0, text.find_first_not_of('\n'));
    }
    if (plain[i].reason != engine::FinishReason::kStop || (thinks && text.empty())) continue;
    ++num_complete;
    const Json schema = *parse_json(kQuestions[i / 4].schema, "schema");
    const auto json = parse_json(text, "answer");
    ASSERT_TRUE(json) << text;
    const text::SchemaReader reader(schema, "schema");
    EXPECT_TRUE(reader.matches(*json, text::Conjunction{reader.root()}).value()) << text;
  }
  std::cout << num_complete << " of " << plain.size() << " answers complete, " << num_thought << " behind reasoning\n";
  EXPECT_GE(num_complete, 6);

  struct Setup {
    const char* name;
    engine::SpeculationMethod method;
    uint64_t cache_bytes;
  };
  for (const Setup& setup : {Setup{"mtp", engine::SpeculationMethod::kMtp, uint64_t{64} << 20}, Setup{"n-grams", engine::SpeculationMethod::kNgram, uint64_t{64} << 20},
                             Setup{"mtp in little memory", engine::SpeculationMethod::kMtp, uint64_t{3} << 20}}) {
    SCOPED_TRACE(setup.name);
    engine::EngineStats stats;
    const std::vector<Answer> answers = ask(setup.method, setup.cache_bytes, stats);
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_EQ(answers[i].tokens, plain[i].tokens) << i << ": " << tokenizer_->decode(answers[i].tokens, false) << "\ninstead of\n" << tokenizer_->decode(plain[i].tokens, false);
      EXPECT_EQ(answers[i].reason, plain[i].reason) << i;
    }
    std::cout << setup.name << ": " << stats.speculation.num_accepted_tokens << " of " << stats.speculation.num_draft_tokens << " drafts accepted, " << stats.num_preemptions
              << " preemptions\n";
    EXPECT_GT(stats.speculation.num_accepted_tokens, 0u);
  }
}

}  // namespace
}  // namespace quern::app
