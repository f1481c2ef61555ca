#include "app/app.h"
#include "app/commands.h"
#include "app/exit_code.h"
#include "app/text_tokens.h"

// A build with -DQUERN_SERVER=OFF has neither text/ nor server/: what needs them says so.

namespace quern::app {
namespace {

constexpr const char* kWhy = "this build has no server and no tokenizer (it was configured with -DQUERN_SERVER=OFF)";

Command absent(std::string name) {
  Command command{.name = std::move(name), .summary = "Not in this build: configured with -DQUERN_SERVER=OFF"};
  command.run = [] {
    print_error(make_error(ErrorCode::kUnsupported, "{}", kWhy));
    return static_cast<int>(kFailure);
  };
  return command;
}

}  // namespace

Command serve_command() { return absent("serve"); }

Result<std::vector<int32_t>> tokens_of_text(const std::filesystem::path&, std::string_view) {
  return make_error(ErrorCode::kUnsupported, "{}", kWhy);
}

}  // namespace quern::app
