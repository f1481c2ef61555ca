// A chat of twenty turns costs, each turn, what is new in it: the prompt behind the longest prefix that it shares with anything before, and at
// most a block of 64 tokens more. Told by the server's usage, and by its count of computed rows.

#include <signal.h>

#include <algorithm>
#include <iostream>
#include <thread>

#include "app/http_client.h"
#include "app/program.h"
#include "base/hash.h"
#include "base/json.h"
#include "support/test_support.h"

namespace quern::app {
namespace {

using quern::testing::BackgroundProgram;

struct ChatMode {
  const char* name;
  Json template_kwargs;
  const char* speculation;
};

class Chat : public ::testing::TestWithParam<ChatMode> {
 protected:
  static constexpr int kNumTurns = 20, kMaxTokens = 60;

  static HttpAddress address_of(const BackgroundProgram& server) {
    const std::string log = server.log();
    const size_t begin = log.find("http://127.0.0.1:");
    Result<HttpAddress> address = HttpAddress::parse(log.substr(begin, log.find_first_not_of("0123456789", begin + 17) - begin));
    EXPECT_OK(address);
    return *address;
  }
  static double metric(const std::string& text, const std::string& name) {
    const size_t at = text.find("} ", text.find("\n" + name + "{"));
    EXPECT_NE(at, std::string::npos) << name;
    return std::stod(text.substr(at + 2));
  }
  /// Rows that were computed for requests and not behind their ends, once nothing is under way.
  static double computed_rows(const HttpAddress& address) {
    for (;;) {
      const std::string text = http_call(address, {.path = "/metrics"})->body;
      if (metric(text, "quern:state_slots") == metric(text, "quern:state_slots_free"))
        return metric(text, "quern:computed_rows_total") - metric(text, "quern:discarded_rows_total");
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  /// About 170 tokens.
  static std::string question(int turn) {
    SplitMix64 random(static_cast<uint64_t>(turn));
    std::string text = "Remember these entries.\n";
    for (int i = 0; i < 12; ++i) text += fmt::format("item {}: {}\n", random.next() % 9999, random.next() % 9999);
    return text + fmt::format("What is {} + {}?", random.next() % 99, random.next() % 99);
  }
};

TEST_P(Chat, ComputesOnlyWhatIsNew) {
  const std::filesystem::path source(QUERN_SOURCE_DIR);
  BackgroundProgram server({"serve", (source / "models/quern-demo").string(), "--port", "0", "--threads", "2", "--max-num-seqs", "2", "--chat-template",
                            (source / "tests/data/templates/qwen3.6.jinja").string(), "--speculative-config", GetParam().speculation});
  ASSERT_TRUE(server.wait_for_log("ready: ")) << server.log();
  const HttpAddress address = address_of(server);
  Json messages = Json::array();
  messages.push_back({{"role", "system"}, {"content", "Answer in few words. " + question(100)}});
  std::vector<std::vector<int32_t>> earlier;  // prompts with their outputs
  double rows = computed_rows(address);
  int32_t longest = 0;
  int64_t cached_in_all = 0;
  for (int turn = 0; turn < kNumTurns; ++turn) {
    SCOPED_TRACE(turn);
    messages.push_back({{"role", "user"}, {"content", question(turn)}});
    const Json body{{"messages", messages}, {"max_tokens", kMaxTokens}, {"seed", turn}, {"return_token_ids", true}, {"chat_template_kwargs", GetParam().template_kwargs}};
    const Result<HttpReply> reply = http_call(address, {.method = "POST", .path = "/v1/chat/completions", .body = body.dump()});
    ASSERT_OK(reply);
    ASSERT_EQ(reply->status, 200) << reply->body;
    const Result<Json> answer = parse_json(reply->body, "answer");
    ASSERT_OK(answer);
    auto tokens = answer->at("prompt_token_ids").get<std::vector<int32_t>>();
    const auto num_prompt = static_cast<int32_t>(tokens.size());
    ptrdiff_t shared = 0;
    for (const std::vector<int32_t>& before : earlier)
      shared = std::max(shared, std::mismatch(tokens.begin(), tokens.end(), before.begin(), before.end()).first - tokens.begin());
    const Json& usage = answer->at("usage");
    const auto cached = usage.at("prompt_tokens_details").at("cached_tokens").get<int32_t>(), output = usage.at("completion_tokens").get<int32_t>();
    EXPECT_EQ(usage.at("prompt_tokens"), num_prompt);
    EXPECT_LE(num_prompt - cached, num_prompt - shared + 64) << "of " << num_prompt << " tokens " << shared << " were known";
    const double now = computed_rows(address);
    if (std::string_view(GetParam().speculation).find("none") != std::string_view::npos) {
      EXPECT_EQ(now - rows, num_prompt - cached + output - 1) << "cached_tokens is what was not computed";
    } else {
      EXPECT_GE(now - rows, num_prompt - cached + output - 1);
      EXPECT_LE(now - rows, num_prompt - cached + 4 * output);
    }
    rows = now;
    cached_in_all += cached;
    longest = std::max(longest, num_prompt + output);
    const Json& choice = answer->at("choices").at(0);
    const auto ids = choice.at("token_ids").get<std::vector<int32_t>>();
    tokens.insert(tokens.end(), ids.begin(), ids.end());
    earlier.push_back(std::move(tokens));
    messages.push_back(choice.at("message"));
  }
  EXPECT_GT(longest, 3700);
  std::cout << fmt::format("{} tokens in the end, {} prompt tokens cached in all\n", longest, cached_in_all);
  server.send(SIGTERM);
  EXPECT_EQ(server.wait(), 0);
}

INSTANTIATE_TEST_SUITE_P(Modes, Chat,
                         ::testing::Values(ChatMode{"Thinking", {{"enable_thinking", true}}, R"({"method": "none"})"},
                                           ChatMode{"NotThinking", {{"enable_thinking", false}}, R"({"method": "none"})"},
                                           ChatMode{"PreservedThinking", {{"enable_thinking", true}, {"preserve_thinking", true}}, R"({"method": "none"})"},
                                           ChatMode{"PreservedThinkingWithDrafts", {{"enable_thinking", true}, {"preserve_thinking", true}}, R"({"method": "mtp", "adaptive": false})"},
                                           ChatMode{"NotThinkingWithDrafts", {{"enable_thinking", false}}, R"({"method": "mtp", "adaptive": false})"}),
                         [](const auto& mode) { return mode.param.name; });

}  // namespace
}  // namespace quern::app
