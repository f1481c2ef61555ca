#include "app/chat_session.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <mutex>
#include <thread>

#include "app/load_generator.h"
#include "app/served_model.h"
#include "base/hash.h"
#include "support/test_support.h"

// What a server may send: the chat and the load generator take any of it, as an answer or as an error.

namespace quern::app {
namespace {

using ::testing::HasSubstr;

/// Sends the same bytes to every request, whatever it is, and closes.
class CannedServer {
 public:
  CannedServer() : listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof name;
    CHECK(bind(listener_, reinterpret_cast<sockaddr*>(&name), size) == 0);
    CHECK(listen(listener_, 16) == 0);
    CHECK(getsockname(listener_, reinterpret_cast<sockaddr*>(&name), &size) == 0);
    port_ = ntohs(name.sin_port);
    thread_ = std::jthread([this] { run(); });
  }
  ~CannedServer() { shutdown(listener_, SHUT_RDWR), thread_.join(), close(listener_); }
  void set_body(std::string body) {
    const std::lock_guard lock(mutex_);
    body_ = std::move(body);
  }
  [[nodiscard]] HttpAddress address() const { return HttpAddress::parse(fmt::format("http://127.0.0.1:{}", port_)).value(); }

 private:
  void run() {
    for (int client = 0; (client = accept(listener_, nullptr, nullptr)) >= 0; close(client)) {
      std::string request;
      char buffer[4096];
      while (request.find("\r\n\r\n") == std::string::npos || (request.starts_with("POST") && !request.ends_with('}'))) {
        const ssize_t got = read(client, buffer, sizeof buffer);
        if (got <= 0) break;
        request.append(buffer, static_cast<size_t>(got));
      }
      const std::lock_guard lock(mutex_);
      const std::string reply = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body_;
      (void)send(client, reply.data(), reply.size(), MSG_NOSIGNAL);
    }
  }
  int listener_;
  uint16_t port_ = 0;
  std::mutex mutex_;
  std::string body_;
  std::jthread thread_;
};

struct Asked {
  Result<AnswerFigures> figures;
  std::string reasoning, content;
};

Asked ask(const CannedServer& server) {
  ChatSession session({server.address(), {}, "m"});
  std::string reasoning, content;
  Result<AnswerFigures> figures = session.ask("hi", {.on_reasoning = [&](std::string_view piece) { reasoning += piece; },
                                                     .on_content = [&](std::string_view piece) { content += piece; },
                                                     .interrupted = [] { return false; }});
  EXPECT_TRUE(figures || session.empty()) << "after an error the conversation is as before";
  return {std::move(figures), reasoning, content};
}

std::string events(const std::vector<std::string>& data) {
  std::string text;
  for (const std::string& one : data) text += "data: " + one + "\n\n";
  return text;
}

constexpr const char* kHello = R"({"choices":[{"delta":{"content":"Hello"}}]})";

TEST(ChatSession, TakesMembersOfTheWrongTypeAsAbsent) {
  CannedServer server;
  for (
      const std::string odd :
      {R"({"choices":[{"delta":{"content":5,"reasoning":null,"tool_calls":{}}}]})", R"({"choices":[null]})", R"({"choices":{}})",
       R"({"choices":[{"delta":[]}]})",
       R"({"usage":{"prompt_tokens":"x","completion_tokens":null,"prompt_tokens_details":{"cached_tokens":null}}})", R"({"usage":[1]})",
       R"({"usage":{"prompt_tokens":1.5,"prompt_tokens_details":[]}})", R"({"error":null,"choices":[]})",
       R"({"choices":[{"finish_reason":7,"delta":null}]})",
       R"({"choices":[{"delta":{"tool_calls":[null,5,{"index":"a"},{"index":-1},{"index":1000000000},{"index":1,"function":5},{"function":{"name":[]}}]}}]})",
       "{}"}) {
    server.set_body(events({odd, kHello, "[DONE]"}));
    const Asked asked = ask(server);
    ASSERT_OK(asked.figures) << odd;
    EXPECT_EQ(asked.content, "Hello") << odd;
  }
}

TEST(ChatSession, TellsErrorsInEveryForm) {
  CannedServer server;
  for (const auto& [error, words] : std::vector<std::pair<std::string, std::string>>{{R"({"error":{"message":"gone"}})", "gone"},
                                                                                     {R"({"error":{"message":5}})", "5"},
                                                                                     {R"({"error":"gone"})", "gone"},
                                                                                     {R"({"error":true})", "true"},
                                                                                     {"[1]", "no JSON object"},
                                                                                     {"{", "no JSON object"}}) {
    server.set_body(events({kHello, error, "[DONE]"}));
    const Asked asked = ask(server);
    ASSERT_FALSE(asked.figures) << error;
    EXPECT_THAT(asked.figures.error().message, HasSubstr(words));
  }
}

TEST(ChatSession, SurvivesEveryByteThatIsChanged) {
  CannedServer server;
  const std::string good = events(
      {R"({"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":null})",
       R"({"choices":[{"delta":{"reasoning_content":"é","reasoning":"é"}}],"usage":{"prompt_tokens":5,"completion_tokens":1}})", kHello,
       R"({"choices":[{"delta":{"tool_calls":[{"index":0,"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]}}]})",
       R"({"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}})", "[DONE]"});
  SplitMix64 random(7);
  for (int i = 0; i < 600; ++i) {
    std::string body = good;
    for (int changes = 0; changes < 1 + i % 3; ++changes) {
      constexpr std::string_view kBytes = "\"{}[]:,0-5enx\\\n \xff\xc3";
      body[random.next() % body.size()] = kBytes[random.next() % kBytes.size()];
    }
    if (i % 5 == 0) body.resize(random.next() % body.size());
    server.set_body(body);
    (void)ask(server);
    const ServingRun run =
        generate_load(server.address(), {{"{}", 1}}, {.backend = ServeBackend::kChat, .endpoint = "/", .request_rate = HUGE_VAL});
    EXPECT_EQ(run.requests.size(), 1u);
  }
}

TEST(ServedModel, IsTheFirstOfAListThatMayBeAnything) {
  CannedServer server;
  server.set_body(R"({"data":[{"id":"one"},{"id":"two"}]})");
  EXPECT_EQ(served_model(server.address(), {}, "--model").value(), "one");
  for (const char* body :
       {"", "[]", "{}", R"({"data":{}})", R"({"data":[]})", R"({"data":[5]})", R"({"data":[{"id":null}]})", R"({"data":[{"id":""}]})"}) {
    server.set_body(body);
    EXPECT_THAT(served_model(server.address(), {}, "--model").error().message, HasSubstr("--model gives the name")) << body;
  }
}

}  // namespace
}  // namespace quern::app
