#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "api_fixture.h"

namespace {

using namespace quern::server;

/// To a request with tools whose results are not there yet.
constexpr std::string_view kCallingAnswer =
    "Let me look.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nSão \"Paulo\"\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>";

/// The results of tools since the last question, as the model sees them.
std::vector<std::string> results_in(std::string_view prompt) {
  constexpr std::string_view kUser = "<|im_start|>user\n", kOpen = "<tool_response>\n", kClose = "\n</tool_response>";
  size_t question = 0;
  for (size_t at = prompt.find(kUser); at != std::string_view::npos; at = prompt.find(kUser, at + 1)) {
    if (!prompt.substr(at + kUser.size()).starts_with(kOpen)) question = at;
  }
  std::vector<std::string> results;
  for (size_t at = prompt.find(kOpen, question); at != std::string_view::npos; at = prompt.find(kOpen, at + 1)) {
    const size_t begin = at + kOpen.size();
    results.emplace_back(prompt.substr(begin, prompt.find(kClose, begin) - begin));
  }
  return results;
}

std::string call(std::string_view function, std::string_view parameters) {
  return fmt::format("<tool_call>\n<function={}>\n{}</function>\n</tool_call>", function, parameters);
}

/// An agent with the tools add, lookup and clock: ten calls, each made of the result before, then an answer made of all (tests/python/agent_loop_test.py).
std::string agent_turn(const std::vector<std::string>& results) {
  const size_t turn = results.size();
  const std::string last = results.empty() ? "0" : results.back();
  std::string text = fmt::format("Turn {}.\n</think>\n\n", turn);
  if (turn == 10) {
    text += "All in all:";
    for (const std::string& result : results) text += " " + result;
    return text;
  }
  if (turn % 3 == 0) return text + call("add", fmt::format("<parameter=a>\n{}\n</parameter>\n<parameter=b>\n{}\n</parameter>\n", last, turn));
  if (turn % 3 == 1) return text + "I look it up.\n\n" + call("lookup", fmt::format("<parameter=key>\n{}\n</parameter>\n", last));
  return text + call("clock", "");
}

Script answer(const quern::engine::GenerationRequest& request) {
  const std::string prompt = standin_tokenizer().decode(request.prompt, false);
  const std::vector<std::string> results = results_in(prompt);
  const bool has_tools = prompt.find("<tools>") != std::string::npos, is_agent = prompt.find("\"lookup\"") != std::string::npos;
  std::string text(has_tools && results.empty() ? kCallingAnswer : kAnswer);
  if (has_tools && is_agent) text = agent_turn(results);
  if (!prompt.ends_with("<think>\n")) text.erase(0, text.find("</think>\n\n") + 10);
  return say(text);
}

}  // namespace

// A server without a model, for the programs in tests/python: prints its port, serves until its input ends.
int main() {
  ScriptedEngine engine(answer);
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
