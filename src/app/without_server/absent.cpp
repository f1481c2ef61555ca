#include "app/commands.h"
#include "app/local_server.h"
#include "app/text_tokens.h"

// A build with -DQUERN_SERVER=OFF has neither text/ nor server/: what needs them says so.

namespace quern::app {
namespace {

constexpr const char* kWhy = "this build has no server and no tokenizer (it was configured with -DQUERN_SERVER=OFF)";

}  // namespace

Command serve_command(ServeFaults) {
  return {.name = "serve", .summary = "Not in this build: configured with -DQUERN_SERVER=OFF", .why_absent = kWhy};
}

Result<std::unique_ptr<LocalServer>> start_local_server(const ModelOptions&) {
  return make_error(ErrorCode::kUnsupported, "{}; --base-url talks to a server that runs", kWhy);
}

Result<std::vector<int32_t>> tokens_of_text(const std::filesystem::path&, std::string_view) {
  return make_error(ErrorCode::kUnsupported, "{}", kWhy);
}

}  // namespace quern::app
