#include <cstdio>
#include <string>

#include "api_fixture.h"

namespace {

/// To a request with tools whose results are not there yet.
constexpr std::string_view kCallingAnswer =
    "Let me look.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nSão \"Paulo\"\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>";

}  // namespace

// A server without a model, for tests/python/openai_client_test.py: prints its port, serves until its input ends.
int main() {
  using namespace quern::server;
  ScriptedEngine engine([](const quern::engine::GenerationRequest& request) {
    const std::string prompt = standin_tokenizer().decode(request.prompt, false);
    const bool wants_call = prompt.find("<tools>") != std::string::npos && prompt.find("<tool_response>") == std::string::npos;
    return wants_call ? say(kCallingAnswer) : say(kAnswer);
  });
  ServerOptions options;
  options.http.port = 0;
  options.api.version = "test";
  auto server = Server::start(options);
  if (!server) {
    std::fprintf(stderr, "%s\n", server.error().message.c_str());
    return 1;
  }
  (*server)->set_ready(standin_context(engine));
  std::printf("%d\n", int{(*server)->port()});
  std::fflush(stdout);
  while (std::getchar() != EOF) {
  }
  (*server)->drain_and_stop(std::chrono::seconds(5));
  return 0;
}
