#include "ops/draft_rows.h"

#include "ops/bed.h"

namespace quern::ops::testing {
namespace {

constexpr int64_t kHidden = 48, kMaxDrafts = 3;

std::vector<int32_t> ints(const TensorView& view) {
  return {view.data<int32_t>(), view.data<int32_t>() + view.shape.num_elements()};
}

/// Runs of one step: a prompt of 4 rows in slot 0, a verify of 3 drafts in slot 1, one decode row in slot 2, and two rows of padding.
class DraftRowsTest : public ::testing::Test {
 protected:
  static constexpr int32_t kNumRows = 11;

  DraftRowsTest() {
    kernel_ = make_kernel<DraftRows>(bed_, {kHidden, kMaxDrafts, DType::kBF16});
    slots_ = make_slots(bed_, 3, kMaxDrafts, 4);
    for (const auto& [slot, cursor] : {std::pair{0, 64}, {1, 10}, {2, 20}}) slots_.cursor.data<int32_t>()[slot] = cursor;
    step_ = std::make_unique<Step>(bed_,
                                   std::vector<RowRun>{{0, 0, 4, RowKind::kPrompt, true}, {1, 4, 4, RowKind::kDecode, false}, {2, 8, 1, RowKind::kDecode, true}},
                                   slots_, kNumRows);
    for (int32_t row = 0; row < kNumRows; ++row) {
      step_->rows.tokens.data<int32_t>()[row] = 100 + row;
      for (int axis = 0; axis < 3; ++axis) step_->rows.positions.data<int32_t>()[3 * row + axis] = 500 + 10 * axis + row;
    }
    sampled_.tokens = bed_.ints({3, kMaxDrafts + 1}, std::vector<int32_t>{7, 0, 0, 0, 31, 32, 33, 0, 41, 0, 0, 0});
    last_rows_ = bed_.tensor(DType::kI32, {3});
    drafts_ = bed_.ints({3, kMaxDrafts}, std::vector<int32_t>(9, -1));
    hidden_ = bed_.tensor(DType::kBF16, {kNumRows, kHidden}, Random(3).normals(kNumRows * kHidden));
    hidden_out_ = bed_.tensor(DType::kBF16, {3, kHidden});
  }

  void first(const std::vector<DraftRun>& runs, const std::vector<int32_t>& num_tokens, const std::vector<int32_t>& non_finite = {0, 0, 0}) {
    runs_ = bed_.tensor(DType::kI32, {3, kDraftRunFields});
    std::memcpy(runs_.data<DraftRun>(), runs.data(), runs.size() * sizeof(DraftRun));
    sampled_.num_tokens = bed_.ints({3}, num_tokens);
    sampled_.non_finite = bed_.ints({3}, non_finite);
    rows_ = own_rows(kNumRows);
    Launch launch = bed_.launch(*kernel_, kNumRows);
    kernel_->enqueue_first(runs_, step_->rows, sampled_, rows_, last_rows_, launch);
  }
  void next(int32_t pass, const std::vector<int32_t>& ids) {
    const Rows before = rows_;
    rows_ = own_rows(3);
    Launch launch = bed_.launch(*kernel_, kNumRows);
    kernel_->enqueue_next(runs_, pass, bed_.ints({3}, ids), before, pass == 0 ? hidden_ : hidden_.first(3), rows_, hidden_out_, last_rows_, drafts_, launch);
  }
  Rows own_rows(int32_t n) {
    Rows rows = step_->rows;
    rows.num_rows = n;
    rows.tokens = bed_.tensor(DType::kI32, {n});
    rows.indices = bed_.tensor(DType::kI32, {n});
    rows.positions = bed_.tensor(DType::kI32, {n, 3});
    return rows;
  }

  Bed bed_;
  std::unique_ptr<DraftRows::Kernel> kernel_;
  SlotTables slots_;
  std::unique_ptr<Step> step_;
  SampleOutput sampled_;
  TensorView runs_, last_rows_, drafts_, hidden_, hidden_out_;
  Rows rows_;
};

TEST_F(DraftRowsTest, PairsEachCommittedRowWithTheTokenThatFollows) {
  first({{0, 1, -1, 2}, {1, 1, -1, 1}, {2, 1, -1, 0}}, {1, 2, 1});  // of the verify, one draft is accepted and one token drawn
  EXPECT_EQ(ints(rows_.tokens), (std::vector<int32_t>{101, 102, 103, 7, 31, 32, 0, 0, 41, 0, 0}));
  EXPECT_EQ(ints(rows_.indices), (std::vector<int32_t>{65, 66, 67, 68, 11, 12, -1, -1, 21, -1, -1}));
  for (const int32_t row : {0, 3, 4, 5, 8})
    for (int axis = 0; axis < 3; ++axis) EXPECT_EQ(rows_.positions.data<int32_t>()[3 * row + axis], 501 + 10 * axis + row) << row;
  EXPECT_EQ(ints(last_rows_), (std::vector<int32_t>{3, 5, -1}));
}

TEST_F(DraftRowsTest, LeavesOutWhatHasNoFollowerOrFailedOrIsNotWanted) {
  first({{0, 1, -1, 2}, {1, 1, -1, 2}, {2, 0, -1, 0}}, {0, 0, 1}, {0, 1, 0});
  EXPECT_EQ(ints(rows_.indices), (std::vector<int32_t>{65, 66, 67, -1, -1, -1, -1, -1, -1, -1, -1})) << "the prompt goes on with a token that is not known yet";
  EXPECT_EQ(ints(last_rows_), (std::vector<int32_t>{2, -1, -1}));
  first({{0, 1, 77, 0}, {1, 1, -1, 2}, {2, 1, -1, 2}}, {0, 4, 0});
  EXPECT_EQ(ints(rows_.tokens), (std::vector<int32_t>{101, 102, 103, 77, 31, 32, 33, 0, 0, 0, 0})) << "the prompt's next token was told";
  EXPECT_EQ(ints(last_rows_), (std::vector<int32_t>{-1, 7, -1})) << "a lone row without a follower drafts nothing";
}

TEST_F(DraftRowsTest, ContinuesEachDraftToItsOwnDepth) {
  first({{0, 1, -1, 3}, {1, 1, -1, 2}, {2, 1, -1, 1}}, {1, 1, 1});
  EXPECT_EQ(ints(last_rows_), (std::vector<int32_t>{3, 4, 8}));
  next(0, {60, 61, 62});
  EXPECT_EQ(ints(rows_.tokens), (std::vector<int32_t>{60, 61, 0}));
  EXPECT_EQ(ints(rows_.indices), (std::vector<int32_t>{69, 12, -1}));
  EXPECT_EQ(rows_.positions.data<int32_t>()[3], 506) << "row 4, then its successor in the draft";
  EXPECT_EQ(Bed::bytes(hidden_out_.at(0)), Bed::bytes(hidden_.at(3)));
  EXPECT_EQ(Bed::bytes(hidden_out_.at(1)), Bed::bytes(hidden_.at(4)));
  EXPECT_EQ(ints(last_rows_), (std::vector<int32_t>{0, 1, -1}));
  next(1, {70, 71, 72});
  EXPECT_EQ(ints(rows_.indices), (std::vector<int32_t>{70, -1, -1}));
  next(2, {80, 81, 82});
  EXPECT_EQ(ints(rows_.indices), (std::vector<int32_t>{-1, -1, -1}));
  EXPECT_EQ(ints(drafts_), (std::vector<int32_t>{60, 70, 80, 61, 71, -1, 62, -1, -1}));
  EXPECT_EQ(std::vector<int32_t>(slots_.drafts.data<int32_t>(), slots_.drafts.data<int32_t>() + 5), (std::vector<int32_t>{60, 70, 80, 61, 71}));
}

}  // namespace
}  // namespace quern::ops::testing
