#include "app/local_server.h"

#include <random>

#include "app/build_info.h"
#include "app/startup.h"
#include "app/with_server/model_text.h"
#include "server/server.h"

namespace quern::app {
namespace {

std::string random_key() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", device(), device(), device(), device());
}

class RunningServer final : public LocalServer {
 public:
  static Result<std::unique_ptr<LocalServer>> start(const ModelOptions& options) {
    ASSIGN_OR_RETURN(const worker::ExecutionPlan plan, plan_model(options));
    RETURN_IF_ERROR(check_runnable(plan));
    auto running = std::make_unique<RunningServer>();
    ASSIGN_OR_RETURN(running->text_, load_model_text(plan, {}));
    if (!running->text_.chat_template)
      return make_error(ErrorCode::kUnsupported, "{} has no chat template, so it cannot chat", plan.options.model_dir.string());
    server::ServerOptions server_options;
    server_options.http.port = 0;
    server_options.api.api_keys = {running->key_};
    server_options.api.version = version();
    server_options.api.page = false;
    ASSIGN_OR_RETURN(running->server_, server::Server::start(server_options));
    ASSIGN_OR_RETURN(std::unique_ptr<worker::WorkerGroup> workers, start_planned(plan));
    running->engine_ = engine::Engine::start(std::move(workers), engine_options(options));
    server::ServerContext context;
    context.engine = running->engine_.get();
    context.tokenizer = &*running->text_.tokenizer;
    context.chat_template = &*running->text_.chat_template;
    context.model_names = {plan.config.name};
    context.max_model_len = running->engine_->limits().max_model_len;
    context.sampling_defaults = running->text_.sampling_defaults;
    context.eos_ids = running->text_.eos_ids;
    running->server_->set_ready(std::move(context));
    return Result<std::unique_ptr<LocalServer>>(std::move(running));
  }

  ~RunningServer() override {
    if (server_ != nullptr) server_->drain_and_stop(std::chrono::milliseconds(0));
    if (engine_ != nullptr) engine_->drain(0);
  }

  [[nodiscard]] std::string url() const override { return fmt::format("http://127.0.0.1:{}", server_->port()); }
  [[nodiscard]] std::string api_key() const override { return key_; }

 private:
  std::string key_ = random_key();
  ModelText text_;
  std::unique_ptr<engine::Engine> engine_;  // outlives the server
  std::unique_ptr<server::Server> server_;
};

}  // namespace

Result<std::unique_ptr<LocalServer>> start_local_server(const ModelOptions& options) { return RunningServer::start(options); }

}  // namespace quern::app
