// Messages between processes: what is written is read, and nothing else is.

#include "worker/wire.h"

#include <array>
#include <cstring>

#include "base/hash.h"
#include "ops/host_slots.h"
#include "support/test_support.h"

namespace quern::worker {
namespace {

using ::testing::HasSubstr;

/// Values at random, of every size that matters.
class Maker {
 public:
  explicit Maker(uint64_t seed) : random_(seed) {}
  int32_t integer(int32_t end = 1000) { return static_cast<int32_t>(random_.next() % static_cast<uint64_t>(end)); }
  bool flag() { return random_.next() % 2 == 0; }
  float real() { return static_cast<float>(integer()) / 7; }
  std::vector<int32_t> integers(int32_t most = 5) {
    std::vector<int32_t> list(static_cast<size_t>(integer(most + 1)));
    for (int32_t& value : list) value = integer() - 1;
    return list;
  }
  std::string text() { return std::string(static_cast<size_t>(integer(20)), static_cast<char>('a' + integer(26))); }
  TokenLogprobs logprobs() { return {.chosen = real(), .chosen_rank = integer(), .top = {{integer(), real()}, {integer(), real()}}}; }

  StepPlan plan() {
    StepPlan plan{.step = random_.next()};
    for (int32_t i = integer(4); i > 0; --i)
      plan.state_ops.push_back({.kind = static_cast<StateOp::Kind>(integer(8)), .slot = integer(), .snapshot = integer(), .boundary = integer(), .block = integer(), .host = integer()});
    for (int32_t i = integer(3); i > 0; --i) {
      SamplingParams sampling{.temperature = real(), .top_k = integer(), .top_p = real(), .min_p = real(), .presence_penalty = real(), .frequency_penalty = real()};
      sampling.repetition_penalty = real();
      sampling.seed = random_.next();
      sampling.logit_bias = {{integer(), real()}};
      sampling.num_logprobs = integer();
      sampling.min_tokens = integer();
      sampling.stop_ids = integers();
      plan.slot_updates.push_back({.slot = integer(), .sampling = sampling, .prompt_ids = integers(200), .output_ids = integers(), .position_delta = integer()});
    }
    for (int32_t i = integer(3); i > 0; --i) plan.block_table_updates.push_back({.slot = integer(), .first_block = integer(), .blocks = integers(40)});
    for (int32_t i = 1 + integer(3); i > 0; --i) {
      StepRun run{.slot = integer(), .kind = static_cast<RowKind>(integer(2)), .num_rows = integer(), .tokens = integers(300), .position = {integer(), integer(), integer()}};
      run.want = static_cast<Want>(integer(4));
      run.num_prompt_logprobs = integer();
      run.sample_after = flag();
      run.logit_rows = integers();
      run.following_token = integer();
      run.drafts = integers();
      run.synthetic_acceptance = integer();
      run.propose = static_cast<DraftMethod>(integer(2));
      run.propose_depth = integer();
      run.fill_mtp = flag();
      run.mask_pending = flag();
      plan.runs.push_back(run);
    }
    return plan;
  }
  StepResult result() {
    StepResult result{.step = random_.next(), .computed_rows = integer(), .gathered_rows = integer(), .device_seconds = real()};
    for (int32_t i = 1 + integer(3); i > 0; --i)
      result.runs.push_back({.slot = integer(), .tokens = integers(), .logprobs = {logprobs()}, .prompt_logprobs = {logprobs(), logprobs()}, .drafts = integers(), .num_draft_rows = integer(),
                             .non_finite = flag(), .logits = {{real(), real()}, {}}, .draft_logits = {{real()}}});
    if (flag()) result.error = Error{ErrorCode::kUnavailable, text(), text()};
    return result;
  }
  Statement statement() {
    Statement statement{.host = text(), .facts = {{text(), text()}, {text(), text()}}, .devices = {text()}};
    if (flag()) statement.error = Error{ErrorCode::kNotFound, text(), text()};
    ops::DeviceTraits traits{.platform = static_cast<ops::Platform>(integer(3)), .name = text(), .memory_bytes = random_.next(), .read_bandwidth = real(), .num_cores = integer()};
    traits.amx_bf16 = flag();
    traits.why_no_device_code = text();
    statement.traits = {traits, traits};
    return statement;
  }
  Message message(size_t kind) {
    switch (kind) {
      case 0: return statement();
      case 1: return Verdict{.error = flag() ? std::optional<Error>(Error{ErrorCode::kInternal, text(), {}}) : std::nullopt, .all = {statement(), statement()}};
      case 2: return Alive{.loaded = real()};
      case 3: return Started{};
      case 4: return SentStep{.plan = plan(), .slots = {{.slot = integer(), .cursor = integer(), .boundary = integer(), .last_token = integer(), .drafts = integers()}}};
      case 5: return StepMasks{.step = random_.next(), .rows = {{integer(), {1, 2, ~0u}}, {integer(), {}}}};
      case 6: return result();
      case 7: return EndOfSteps{};
      case 8: return Ended{};
      default: return Abort{.error = {ErrorCode::kInternal, text(), text()}};
    }
  }

 private:
  SplitMix64 random_;
};

constexpr size_t kNumKinds = std::variant_size_v<Message>;

TEST(Wire, ReadsWhatItHasWritten) {
  Maker maker(1);
  for (size_t i = 0; i < 50 * kNumKinds; ++i) {
    const Message message = maker.message(i % kNumKinds);
    ASSERT_EQ(message.index(), i % kNumKinds);
    const Bytes bytes = to_bytes(message);
    const Result<Message> read = message_from_bytes(bytes);
    ASSERT_OK(read);
    EXPECT_EQ(read->index(), message.index());
    EXPECT_EQ(to_bytes(*read), bytes) << "every member is in the bytes, so equal bytes are equal messages";
  }
}

TEST(Wire, KeepsValuesInTheirPlaces) {
  StepRun run{.slot = 3, .kind = RowKind::kDecode, .num_rows = 2, .tokens = {}, .position = {7, 8, 9}, .want = Want::kSample};
  run.drafts = {11};
  run.mask_pending = true;
  SentStep sent{.plan = {.step = 42, .runs = {run}}, .slots = {{.slot = 3, .cursor = 70, .boundary = 64, .last_token = 5, .drafts = {1, 2}}}};
  const Result<Message> read = message_from_bytes(to_bytes(sent));
  ASSERT_OK(read);
  const auto& found = std::get<SentStep>(*read);
  EXPECT_EQ(found.plan.step, 42u);
  const StepRun& there = found.plan.runs.at(0);
  EXPECT_EQ(there.kind, RowKind::kDecode);
  EXPECT_EQ(there.position[2], 9);
  EXPECT_EQ(there.want, Want::kSample);
  EXPECT_EQ(there.drafts, std::vector<int32_t>{11});
  EXPECT_TRUE(there.mask_pending);
  EXPECT_FALSE(there.fill_mtp);
  EXPECT_EQ(found.slots.at(0).drafts, (std::vector<int32_t>{1, 2}));
}

TEST(Wire, RefusesWhatHasChangedOnTheWay) {
  Maker maker(2);
  SplitMix64 random(3);
  for (size_t i = 0; i < 40 * kNumKinds; ++i) {
    const Bytes sound = to_bytes(maker.message(i % kNumKinds));
    Bytes bytes = sound;
    for (uint64_t changes = 1 + random.next() % 3; changes > 0; --changes) bytes[random.next() % bytes.size()] ^= static_cast<std::byte>(1 + random.next() % 255);
    if (bytes != sound) {
      EXPECT_FALSE(message_from_bytes(bytes)) << i;
    }
    EXPECT_FALSE(message_from_bytes(std::span(sound).first(random.next() % sound.size())));
    Bytes longer = sound;
    longer.push_back(std::byte{0});
    EXPECT_FALSE(message_from_bytes(longer));
  }
  EXPECT_FALSE(message_from_bytes({}));
}

/// What a broken sender would make: changed bytes under the right checksum. They are a message or an error; as steps they are refused where they name what there is not.
TEST(Wire, IsNotBrokenByBytesOfABrokenSender) {
  constexpr size_t kHeader = 24;
  const WorkerLimits limits{.num_slots = 4, .num_blocks = 8, .num_snapshots = 2, .max_model_len = 256, .max_rows = 64, .vocab_size = 100, .k_max = 2};
  Maker maker(4);
  SplitMix64 random(5);
  int32_t num_read = 0, num_refused = 0, num_steps_refused = 0;
  for (size_t i = 0; i < 400 * kNumKinds; ++i) {
    Bytes bytes = to_bytes(maker.message(i % kNumKinds));
    if (bytes.size() > kHeader) {
      for (uint64_t changes = 1 + random.next() % 4; changes > 0; --changes) bytes[kHeader + random.next() % (bytes.size() - kHeader)] = static_cast<std::byte>(random.next());
      if (random.next() % 4 == 0) bytes.resize(kHeader + random.next() % (bytes.size() - kHeader));
    }
    bytes[6] = random.next() % 8 == 0 ? static_cast<std::byte>(random.next()) : bytes[6];  // another kind
    const uint64_t num_bytes = bytes.size() - kHeader, checksum = ops::checksum(bytes.data() + kHeader, num_bytes);
    std::memcpy(bytes.data() + 8, &num_bytes, sizeof num_bytes);
    std::memcpy(bytes.data() + 16, &checksum, sizeof checksum);
    const Result<Message> read = message_from_bytes(bytes);
    ++(read ? num_read : num_refused);
    if (!read) continue;
    if (const auto* step = std::get_if<SentStep>(&*read)) num_steps_refused += check_step(*step, limits) ? 0 : 1;
    if (const auto* result = std::get_if<StepResult>(&*read)) {
      EXPECT_FALSE(check_result(*result, maker.plan(), limits));
    }
  }
  EXPECT_GT(num_read, 100);
  EXPECT_GT(num_refused, 100);
  EXPECT_GT(num_steps_refused, 20);
}

TEST(Wire, SaysThatAnotherVersionIsAnotherLanguage) {
  Bytes bytes = to_bytes(Started{});
  bytes[4] ^= std::byte{2};
  const Result<Message> read = message_from_bytes(bytes);
  ASSERT_FALSE(read);
  EXPECT_THAT(read.error().message, HasSubstr("all processes have to run the same quern"));
}

TEST(Wire, RefusesStepsThatNameWhatThereIsNot) {
  const WorkerLimits limits{.num_slots = 4, .num_blocks = 8, .num_snapshots = 2, .num_host_blocks = 3, .max_model_len = 256, .max_rows = 64, .vocab_size = 100, .k_max = 2};
  const StepRun sound{.slot = 1, .kind = RowKind::kPrompt, .num_rows = 2, .tokens = {1, 99}};
  const auto with = [&](auto&& change) {
    SentStep step{.plan = {.step = 1, .state_ops = {{.kind = StateOp::Kind::kRestore, .slot = 1, .snapshot = 1, .boundary = 64}},
                           .slot_updates = {{.slot = 1, .prompt_ids = {5}}},
                           .block_table_updates = {{.slot = 1, .first_block = 2, .blocks = {7, 0}}},
                           .runs = {sound}},
                  .slots = {{.slot = 1, .drafts = {0, 0}}}};
    change(step);
    return check_step(step, limits).has_value();
  };
  EXPECT_TRUE(with([](SentStep&) {}));
  EXPECT_FALSE(with([](SentStep& s) { s.plan.runs[0].slot = 4; }));
  EXPECT_FALSE(with([](SentStep& s) { s.plan.runs[0].slot = -1; }));
  EXPECT_FALSE(with([](SentStep& s) { s.plan.runs[0].tokens[0] = 100; }));
  EXPECT_FALSE(with([](SentStep& s) { s.plan.runs[0].num_rows = 3; }));
  EXPECT_FALSE(with([](SentStep& s) { s.plan.runs[0].tokens.clear(), s.plan.runs[0].num_rows = 4; })) << "more drafts than there are places";
  EXPECT_FALSE(with([](SentStep& s) { s.plan.runs[0].drafts = {1}; })) << "no verify";
  EXPECT_FALSE(with([](SentStep& s) { s.plan.runs[0].logit_rows = {2}; }));
  EXPECT_FALSE(with([](SentStep& s) { s.plan.runs[0].propose_depth = 3; }));
  EXPECT_FALSE(with([](SentStep& s) { s.plan.runs[0].tokens.assign(65, 1), s.plan.runs[0].num_rows = 65; }));
  EXPECT_FALSE(with([](SentStep& s) { s.plan.state_ops[0].snapshot = 2; }));
  EXPECT_FALSE(with([](SentStep& s) { s.plan.state_ops[0].boundary = -64; }));
  EXPECT_FALSE(with([](SentStep& s) { s.plan.state_ops[0] = {.kind = StateOp::Kind::kBlockToHost, .block = 8, .host = 0}; }));
  EXPECT_FALSE(with([](SentStep& s) { s.plan.state_ops[0] = {.kind = StateOp::Kind::kBlockToHost, .block = 7, .host = 3}; }));
  EXPECT_FALSE(with([](SentStep& s) { s.plan.slot_updates[0].prompt_ids[0] = -1; }));
  EXPECT_FALSE(with([](SentStep& s) { s.plan.slot_updates[0].sampling.stop_ids.assign(65, 1); }));
  EXPECT_FALSE(with([](SentStep& s) { s.plan.block_table_updates[0].first_block = 3; }));
  EXPECT_FALSE(with([](SentStep& s) { s.plan.block_table_updates[0].blocks[0] = 8; }));
  EXPECT_FALSE(with([](SentStep& s) { s.slots[0].drafts.pop_back(); }));
  EXPECT_FALSE(with([](SentStep& s) { s.slots[0].drafts[1] = 100; }));
  EXPECT_FALSE(with([](SentStep& s) { s.slots[0].last_token = 100; }));
  EXPECT_FALSE(with([](SentStep& s) { s.slots[0].cursor = 257; }));
  EXPECT_FALSE(with([](SentStep& s) { s.slots[0].cursor = 63, s.slots[0].boundary = 64; }));
  EXPECT_TRUE(with([](SentStep& s) { s.slots[0].cursor = 256, s.slots[0].boundary = 256, s.slots[0].last_token = 99; }));
}

TEST(Wire, RefusesMasksThatAreNotWholeRowsOfASlot) {
  const WorkerLimits limits{.num_slots = 4, .vocab_size = 100, .k_max = 2};
  const auto sound = [&](int32_t slot, size_t words) { return check_masks({.step = 1, .rows = {{slot, std::vector<uint32_t>(words)}}}, limits).has_value(); };
  EXPECT_TRUE(sound(3, 4));
  EXPECT_TRUE(sound(0, 12));  // of a verify of two drafts
  EXPECT_FALSE(sound(0, 5));
  EXPECT_FALSE(sound(0, 0));
  EXPECT_FALSE(sound(0, 16));
  EXPECT_FALSE(sound(4, 4));
  EXPECT_FALSE(sound(-1, 4));
}

TEST(Wire, RefusesResultsWithOtherNumbersOfTokensAndLogProbabilities) {
  const WorkerLimits limits{.num_slots = 4, .vocab_size = 100, .k_max = 2};
  StepPlan plan;
  plan.runs.push_back({.slot = 1});
  const auto sound = [&](size_t tokens, size_t logprobs) {
    StepResult result;
    result.runs.push_back({.slot = 1, .tokens = std::vector<int32_t>(tokens, 7), .logprobs = std::vector<TokenLogprobs>(logprobs)});
    return check_result(result, plan, limits).has_value();
  };
  EXPECT_TRUE(sound(2, 0));
  EXPECT_TRUE(sound(2, 2));
  EXPECT_FALSE(sound(2, 1));
  EXPECT_FALSE(sound(4, 0));
}

/// docs/scaling.md has these numbers.
TEST(Wire, NeedsFewBytesAToken) {
  SlotValues values(16, 4);
  const auto sizes = [&](size_t num_sequences) {
    SentStep step;
    StepResult result, of_another;
    for (size_t i = 0; i < num_sequences; ++i) {
      step.plan.runs.push_back({.slot = static_cast<int32_t>(i), .kind = RowKind::kDecode, .num_rows = 1, .want = Want::kSample});
      of_another.runs.push_back({.slot = static_cast<int32_t>(i)});
      result.runs.push_back({.slot = static_cast<int32_t>(i), .tokens = {7}});
    }
    SentStep to_others{.plan = step.plan, .slots = named_slots(step.plan, values)};
    return std::array{to_bytes(step).size(), to_bytes(to_others).size(), to_bytes(result).size(), to_bytes(of_another).size()};
  };
  const auto none = sizes(0), one = sizes(1), many = sizes(16);
  EXPECT_EQ(none[0], 52u);
  EXPECT_EQ(one[0] - none[0], 54u);
  EXPECT_EQ(one[1] - none[1], 54u + 20 + 4 * 4);
  EXPECT_EQ(none[2], 61u);
  EXPECT_EQ(one[2] - none[2], 33u + 4);
  EXPECT_EQ(one[3] - none[3], 33u);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_EQ(many[i] - none[i], 16 * (one[i] - none[i]));
  EXPECT_EQ(to_bytes(Alive{}).size(), 32u);
  StepPlan block;
  const size_t before = to_bytes(SentStep{.plan = block, .slots = {}}).size();
  block.block_table_updates.push_back({.slot = 1, .first_block = 3, .blocks = {9}});
  EXPECT_EQ(to_bytes(SentStep{.plan = block, .slots = {}}).size() - before, 16u);
}

TEST(Wire, CarriesTheValuesOfTheSlotsThatAStepNamesAndNoOthers) {
  SlotValues here(8, 2), there(8, 2);
  SplitMix64 random(9);
  for (std::vector<int32_t>* values : {&here.cursor, &here.boundary, &here.last_token, &here.drafts})
    for (int32_t& value : *values) value = static_cast<int32_t>(random.next() % 1000);
  StepPlan plan;
  plan.state_ops.push_back({.kind = StateOp::Kind::kSnapshot, .slot = 6});
  plan.runs.push_back({.slot = 2});
  const std::vector<SlotEntry> entries = named_slots(plan, here);
  EXPECT_EQ(entries.size(), 2u);
  set_slots(there, entries);
  for (const size_t slot : {size_t{2}, size_t{6}}) {
    EXPECT_EQ(there.cursor[slot], here.cursor[slot]);
    EXPECT_EQ(there.boundary[slot], here.boundary[slot]);
    EXPECT_EQ(there.last_token[slot], here.last_token[slot]);
    for (size_t i = 2 * slot; i < 2 * slot + 2; ++i) EXPECT_EQ(there.drafts[i], here.drafts[i]);
  }
  EXPECT_EQ(there.cursor[3], 0);
}

}  // namespace
}  // namespace quern::worker
