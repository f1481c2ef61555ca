#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>

#include "app/app.h"
#include "app/commands.h"
#include "app/eval_run.h"
#include "app/exit_code.h"
#include "app/startup.h"
#include "app/text_tokens.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/shape.h"

namespace quern::app {
namespace {

constexpr int32_t kDraftDepth = 2;             // a draft and the one chained to it
constexpr int32_t kLikelihoodWindow = 2048;    // tokens of a window, unless --max-model-len says otherwise
constexpr int32_t kLikelihoodLogitRows = 128;  // rows of a step in a likelihood run: bounds the memory of logits

struct EvalOptions {
  ModelOptions model;
  std::filesystem::path tokens_file, text_file;
  std::vector<int64_t> logits_at;
  int32_t chunk = 0;
  bool mtp = false, acceptance = false, json = false;
};

Result<std::string> read_input(const std::filesystem::path& file) {
  if (file != "-") return read_file(file);
  return std::string(std::istreambuf_iterator<char>(std::cin), {});
}

Result<std::vector<int32_t>> read_tokens(const EvalOptions& options) {
  if (options.tokens_file.empty() == options.text_file.empty())
    return invalid_argument("quern eval: give either --tokens FILE or --text FILE");
  if (!options.text_file.empty()) {
    ASSIGN_OR_RETURN(const std::string text, read_input(options.text_file));
    return tokens_of_text(options.model.worker.model_dir, text);
  }
  ASSIGN_OR_RETURN(const std::string text, read_input(options.tokens_file));
  Result<std::vector<int64_t>> ids = parse_integer_list(text);
  if (!ids) return ids.error().with_context(options.tokens_file.string());
  std::vector<int32_t> tokens;
  tokens.reserve(ids->size());
  for (const int64_t id : *ids) {
    if (id < 0 || id > std::numeric_limits<int32_t>::max())
      return invalid_argument("{}: {} is not a token id", options.tokens_file.string(), id);
    tokens.push_back(static_cast<int32_t>(id));
  }
  if (tokens.empty()) return invalid_argument("{} holds no tokens", options.tokens_file.string());
  return tokens;
}

Result<std::vector<int32_t>> positions_wanted(const EvalOptions& options, int32_t num_tokens) {
  std::vector<int32_t> positions;
  for (const int64_t at : options.logits_at) {
    const int64_t position = at < 0 ? at + num_tokens : at;
    if (position < 0 || position >= num_tokens)
      return invalid_argument("--logits-at: position {} is outside the prompt of {} tokens", at, num_tokens);
    positions.push_back(static_cast<int32_t>(position));
  }
  std::sort(positions.begin(), positions.end());
  positions.erase(std::unique(positions.begin(), positions.end()), positions.end());
  return positions;
}

int32_t argmax(const std::vector<float>& logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

void print_logits(const EvalLogits& result, bool json) {
  if (json) {
    Json document{{"logits", Json::array()}};
    for (const PositionLogits& at : result.positions) document["logits"].push_back({{"position", at.position}, {"logits", at.logits}});
    for (const std::vector<float>& draft : result.drafts) document["drafts"].push_back({{"draft", argmax(draft)}, {"logits", draft}});
    fmt::print("{}\n", document.dump());
    return;
  }
  fmt::print("{:>9} {:>9} {:>12}\n", "position", "argmax", "logit");
  const auto row = [](const std::string& name, const std::vector<float>& logits) {
    fmt::print("{:>9} {:>9} {:>12.6f}\n", name, argmax(logits), logits[static_cast<size_t>(argmax(logits))]);
  };
  for (const PositionLogits& at : result.positions) row(fmt::format("{}", at.position), at.logits);
  for (size_t i = 0; i < result.drafts.size(); ++i) row(fmt::format("draft {}", i + 1), result.drafts[i]);
}

void print_likelihood(const Likelihood& likelihood, int32_t window, bool json) {
  const double perplexity = likelihood.num_tokens > 0 ? std::exp(likelihood.nll / static_cast<double>(likelihood.num_tokens)) : 1.0;
  if (json) {
    fmt::print("{}\n",
               Json{{"perplexity", perplexity}, {"tokens", likelihood.num_tokens}, {"nll", likelihood.nll}, {"window", window}}.dump());
  } else {
    fmt::print("perplexity {:.4f}, {} tokens scored, nll {:.4f}, windows of {} tokens\n", perplexity, likelihood.num_tokens, likelihood.nll,
               window);
  }
}

void print_acceptance(const Acceptance& acceptance, bool json) {
  const double rate = static_cast<double>(acceptance.num_accepted) / static_cast<double>(std::max<int64_t>(acceptance.num_drafts, 1));
  if (json) {
    fmt::print("{}\n", Json{{"acceptance", rate}, {"drafts", acceptance.num_drafts}, {"accepted", acceptance.num_accepted}}.dump());
  } else {
    fmt::print("acceptance {:.4f}, {} of {} drafts\n", rate, acceptance.num_accepted, acceptance.num_drafts);
  }
}

Result<void> eval_drafts(const EvalOptions& options, const worker::ExecutionPlan& first, const std::vector<int32_t>& tokens) {
  const int32_t limit =
      options.model.worker.max_model_len > 0 ? options.model.worker.max_model_len : std::min(kLikelihoodWindow, first.limits.max_model_len);
  const auto window = static_cast<int32_t>(std::min<size_t>(static_cast<size_t>(limit), tokens.size() + 1));
  ASSIGN_OR_RETURN(const worker::ExecutionPlan plan, plan_for_eval(first, window, 1));
  ASSIGN_OR_RETURN(const std::unique_ptr<worker::WorkerGroup> workers, start_planned(plan));
  ASSIGN_OR_RETURN(const Acceptance result, eval_acceptance(*workers, tokens, 0));
  print_acceptance(result, options.json);
  return {};
}

Result<void> eval(const EvalOptions& options) {
  ASSIGN_OR_RETURN(const worker::ExecutionPlan first, plan_model(options.model));
  ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, read_tokens(options));
  const auto num_tokens = static_cast<int32_t>(tokens.size());
  ASSIGN_OR_RETURN(const std::vector<int32_t> positions, positions_wanted(options, num_tokens));
  const bool likelihood = positions.empty() && !options.mtp;
  if ((options.mtp || options.acceptance) && !first.limits.has_mtp)
    return make_error(ErrorCode::kUnsupported, "{}: this checkpoint has no MTP head", options.mtp ? "--mtp" : "--acceptance");
  if (options.acceptance) return eval_drafts(options, first, tokens);
  if (likelihood) {
    const int32_t limit = options.model.worker.max_model_len > 0 ? options.model.worker.max_model_len
                                                                 : std::min(kLikelihoodWindow, first.limits.max_model_len);
    const int32_t window = std::min(limit, num_tokens);
    ASSIGN_OR_RETURN(const worker::ExecutionPlan plan, plan_for_eval(first, window, kLikelihoodLogitRows));
    ASSIGN_OR_RETURN(const std::unique_ptr<worker::WorkerGroup> workers, start_planned(plan));
    ASSIGN_OR_RETURN(const Likelihood result, eval_likelihood(*workers, tokens, options.chunk));
    print_likelihood(result, window, options.json);
    return {};
  }
  const int32_t logit_rows = std::min(static_cast<int32_t>(positions.size()), first.limits.max_rows);
  const int32_t draft_depth = options.mtp ? std::min(kDraftDepth, first.limits.k_max) : 0;
  ASSIGN_OR_RETURN(const worker::ExecutionPlan plan, plan_for_eval(first, num_tokens + draft_depth, std::max(logit_rows, 1 + draft_depth)));
  ASSIGN_OR_RETURN(const std::unique_ptr<worker::WorkerGroup> workers, start_planned(plan));
  ASSIGN_OR_RETURN(const EvalLogits result, eval_logits(*workers, tokens, positions, options.chunk, draft_depth));
  print_logits(result, options.json);
  return {};
}

}  // namespace

Command eval_command() {
  auto options = std::make_shared<EvalOptions>();
  Command command{.name = "eval", .summary = "Logits or perplexity of given tokens or text"};
  command.groups.push_back(
      {"Evaluation",
       {
           {"--tokens", "FILE", "Token ids separated by blanks or commas; - reads stdin", to_path(options->tokens_file)},
           {"--text", "FILE", "Text for the model's tokenizer; - reads stdin", to_path(options->text_file)},
           {"--logits-at", "LIST", "Positions whose logits are printed, e.g. 0,63,-1; without it the perplexity is",
            to_list(options->logits_at)},
           {"--chunk", "N", "Rows of one step: multiples of 64 run as prompt rows, others as decode rows",
            to_integer(options->chunk, 1, std::numeric_limits<int32_t>::max())},
           {"--mtp", "", "Also the logits of two MTP drafts after the last token", to_flag(options->mtp)},
           {"--acceptance", "", "How often the MTP head's first draft of a token is the model's own choice", to_flag(options->acceptance)},
           {"--json", "", "Print JSON", to_flag(options->json)},
       }});
  add_model_options(command, options->model);
  command.run = [options]() -> int {
    if (Result<void> done = eval(*options); !done) {
      print_error(done.error());
      return kFailure;
    }
    return kSuccess;
  };
  return command;
}

}  // namespace quern::app
