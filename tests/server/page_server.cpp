#include <cstdio>
#include <iostream>
#include <string>

#include "api_fixture.h"

// A server without a model, for tests/python/chat_page_test.py: prints its port, then does what each line of its input says, a JSON object,
// and answers each with a line; ends with its input.
//
//   {"say": [TEXT, ...]}                 the next answers, in order; the last one repeats. With "fail": every answer ends with that error
//   {"hold": true} {"permit": N} {"run": true}    no token, N more, all of them
//   {"idle": true}                       waits until nothing runs
//   {"submitted": true}                  the requests so far: prompt and parameters
//   {"loading": {"phase", "fraction"}} {"ready": true}     of a server started with --loading

namespace quern::server {
namespace {

struct Arguments {
  std::vector<std::string> api_keys;
  std::string model = "scripted";
  bool loading = false;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--loading") arguments.loading = true;
    if (name == "--api-key" && i + 1 < argc) arguments.api_keys.emplace_back(argv[++i]);
    if (name == "--model" && i + 1 < argc) arguments.model = argv[++i];
  }
  return arguments;
}

Json told_of(const engine::GenerationRequest& request) {
  return {{"prompt", standin_tokenizer().decode(request.prompt, false)},
          {"max_tokens", request.max_tokens},
          {"temperature", request.sampling.temperature},
          {"top_p", request.sampling.top_p},
          {"top_k", request.sampling.top_k},
          {"seed", request.sampling.seed}};
}

/// Answers one line of input.
Json obey(const Json& command, ScriptedEngine& engine, Server& server, const ServerContext& context) {
  if (command.contains("say")) {
    auto texts = std::make_shared<std::vector<std::string>>(command["say"].get<std::vector<std::string>>());
    const std::string fault = command.value("fail", "");
    engine.set_writer([texts, fault](const engine::GenerationRequest&) {
      Script script = say(texts->front());
      script.cached_tokens = 3;
      if (!fault.empty()) script.error_after_end = make_error(ErrorCode::kInternal, "{}", fault);
      if (texts->size() > 1) texts->erase(texts->begin());
      return script;
    });
  }
  if (command.contains("hold")) engine.hold();
  if (command.contains("permit")) engine.permit(command["permit"]);
  if (command.contains("run")) engine.let_run();
  if (command.contains("idle")) return {{"idle", engine.wait_until_idle()}};
  if (command.contains("loading")) server.set_loading({.phase = command["loading"]["phase"], .fraction = command["loading"]["fraction"]});
  if (command.contains("ready")) server.set_ready(context);
  Json reply{{"ok", true}};
  if (command.contains("submitted")) {
    reply["submitted"] = Json::array();
    for (const engine::GenerationRequest& request : engine.submitted()) reply["submitted"].push_back(told_of(request));
  }
  return reply;
}

int run(const Arguments& arguments) {
  ScriptedEngine engine([](const engine::GenerationRequest&) { return say(kAnswer); });
  ServerOptions options;
  options.http.port = 0;
  options.api.version = "test";
  options.api.api_keys = arguments.api_keys;
  auto server = Server::start(options);
  if (!server) {
    std::fprintf(stderr, "%s\n", server.error().message.c_str());
    return 1;
  }
  ServerContext context = standin_context(engine);
  context.model_names = {arguments.model};
  if (!arguments.loading) (*server)->set_ready(context);
  std::cout << (*server)->port() << std::endl;
  for (std::string line; std::getline(std::cin, line);)
    std::cout << dump_json(obey(Json::parse(line), engine, **server, context)) << std::endl;
  engine.let_run();
  (*server)->drain_and_stop(std::chrono::seconds(5));
  return 0;
}

}  // namespace
}  // namespace quern::server

int main(int argc, char** argv) { return quern::server::run(quern::server::parse(argc, argv)); }
