#include "server/metrics.h"

#include "support/test_support.h"

namespace quern::server {
namespace {

using ::testing::HasSubstr;

TEST(Metrics, HasTheNamesAndLabelsOfVllm) {
  Metrics metrics("some/model", 4096);
  metrics.observe_time_to_first_token(0.03);
  metrics.observe_inter_token_latency(0.04, 2);
  OutputUsage usage;
  usage.prompt_tokens = 300;
  usage.completion_tokens = 3;
  usage.cached_tokens = 256;
  metrics.observe_finished(usage, {.seconds = 1.25, .queue_seconds = 0.75, .decode_seconds = 0.125});
  metrics.observe_submitted(2, 100);
  metrics.observe_longest_output(3);
  metrics.count_http_response(503);
  engine::EngineStats stats;
  stats.num_running = 3;
  stats.num_waiting = 2;
  stats.num_blocks = 100;
  stats.num_free_blocks = 75;
  stats.num_preemptions = 4;
  stats.prompt_tokens = 12345678901;
  stats.generation_tokens = 77;
  stats.requests_length = 6;
  stats.prefix_queried_tokens = 300;
  stats.prefix_hit_tokens = 256;
  stats.speculation = {.num_drafts = 5, .num_draft_tokens = 10, .num_accepted_tokens = 7, .accepted_at = {4, 3}};
  stats.max_draft_tokens = 2;
  stats.computed_rows = 900;
  stats.steps_by_rows[0] = 4;  // of one row
  stats.steps_by_rows[8] = 1;  // of 513 to 1024
  const std::string text = metrics.expose(stats);
  const std::string labels = R"({engine="0",model_name="some/model"})";
  for (const std::string& line :
       {"vllm:num_requests_running" + labels + " 3\n", "vllm:num_requests_waiting" + labels + " 2\n",
        "vllm:kv_cache_usage_perc" + labels + " 0.25\n", "vllm:num_preemptions_total" + labels + " 4\n",
        "vllm:prompt_tokens_total" + labels + " 12345678901\n", "vllm:generation_tokens_total" + labels + " 77\n",
        "vllm:prefix_cache_queries_total" + labels + " 300\n", "vllm:prefix_cache_hits_total" + labels + " 256\n",
        "vllm:spec_decode_num_drafts_total" + labels + " 5\n", "vllm:spec_decode_num_draft_tokens_total" + labels + " 10\n",
        "vllm:spec_decode_num_accepted_tokens_total" + labels + " 7\n", "vllm:time_to_first_token_seconds_count" + labels + " 1\n", "vllm:inter_token_latency_seconds_count" + labels + " 2\n",
        "vllm:request_time_per_output_token_seconds_count" + labels + " 1\n", "vllm:e2e_request_latency_seconds_count" + labels + " 1\n",
        "vllm:request_queue_time_seconds_sum" + labels + " 0.75\n", "vllm:request_prefill_time_seconds_sum" + labels + " 0.375\n",
        "vllm:request_decode_time_seconds_sum" + labels + " 0.125\n", "vllm:request_inference_time_seconds_sum" + labels + " 0.5\n",
        "vllm:request_params_n_sum" + labels + " 2\n", "vllm:request_params_max_tokens_sum" + labels + " 100\n",
        "vllm:request_max_num_generation_tokens_sum" + labels + " 3\n", "vllm:iteration_tokens_total_count" + labels + " 5\n",
        "vllm:iteration_tokens_total_sum" + labels + " 900\n",
        "vllm:request_prompt_tokens_sum" + labels + " 300\n", "vllm:request_generation_tokens_sum" + labels + " 3\n"}) {
    EXPECT_THAT(text, HasSubstr("\n" + line)) << line;
  }
  EXPECT_THAT(text, HasSubstr(R"(vllm:request_success_total{engine="0",finished_reason="length",model_name="some/model"} 6)"));
  EXPECT_THAT(text, HasSubstr(R"(vllm:time_to_first_token_seconds_bucket{engine="0",model_name="some/model",le="0.04"} 1)"));
  EXPECT_THAT(text, HasSubstr(R"(quern:http_responses_total{engine="0",model_name="some/model",status="503"} 1)"));
  EXPECT_THAT(text, HasSubstr(R"(vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="some/model",position="1"} 3)"));
  EXPECT_THAT(text, HasSubstr(R"(vllm:iteration_tokens_total_bucket{engine="0",model_name="some/model",le="512"} 4)"));
  EXPECT_THAT(text, HasSubstr(R"(vllm:iteration_tokens_total_bucket{engine="0",model_name="some/model",le="+Inf"} 5)"));
  EXPECT_THAT(text, HasSubstr(R"(vllm:cache_config_info{block_size="64",engine="0",model_name="some/model",num_cpu_blocks="0",num_gpu_blocks="100"} 1)"));
  EXPECT_THAT(text, HasSubstr("# TYPE vllm:num_requests_running gauge\n"));
  EXPECT_THAT(text, HasSubstr("# TYPE vllm:prompt_tokens_total counter\n"));
}

TEST(Metrics, TheTokenCounterNeverFalls) {
  const Metrics metrics("m", 64);
  engine::EngineStats stats;
  stats.generation_tokens = 10;
  stats.unfinished_generation_tokens = 5;
  EXPECT_THAT(metrics.expose(stats), HasSubstr(R"(vllm:generation_tokens_total{engine="0",model_name="m"} 15)"));
  stats.generation_tokens = 13;  // two of the five lay behind the end
  stats.unfinished_generation_tokens = 0;
  EXPECT_THAT(metrics.expose(stats), HasSubstr(R"(vllm:generation_tokens_total{engine="0",model_name="m"} 15)"));
}

TEST(Metrics, NothingIsDividedByNoBlocks) {
  EXPECT_THAT(Metrics("m", 64).expose({}), HasSubstr(R"(vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0)"));
}

}  // namespace
}  // namespace quern::server
