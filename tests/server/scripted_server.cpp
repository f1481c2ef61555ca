#include <cstdio>
#include <string>

#include "api_fixture.h"

// A server without a model, for tests/python/openai_client_test.py: prints its port, serves until its input ends.
int main() {
  using namespace quern::server;
  ScriptedEngine engine([](const quern::engine::GenerationRequest&) { return say(kAnswer); });
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
