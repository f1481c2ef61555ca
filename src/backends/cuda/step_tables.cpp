#include "backends/cuda/step_tables.h"

#include "backends/cuda/plain.h"

namespace quern::cuda::plain {

static_assert(sizeof(RunRecord) == sizeof(ops::RunEntry) && kIsDecode == ops::kRunIsDecode && kIsCommitted == ops::kRunIsCommitted);
static_assert(kGrid == ops::kGrid && kKvSplit == ops::kKvSplit);

StepTables step_tables(const ops::Rows& rows) {
  const ops::SlotTables& slots = rows.slots;
  StepTables t{};
  t.num_rows = rows.num_rows;
  t.num_runs = static_cast<int32_t>(rows.runs.size());
  t.runs = address_or_null<const RunRecord>(rows.run_table);
  t.row_runs = address_or_null<const int32_t>(rows.row_runs);
  t.given_tokens = address_or_null<const int32_t>(rows.given_tokens);
  t.run_positions = address_or_null<const int32_t>(rows.run_positions);
  t.tokens = address_or_null<int32_t>(rows.tokens);
  t.indices = address_or_null<int32_t>(rows.indices);
  t.positions = address_or_null<int32_t>(rows.positions);
  t.cursor = address_or_null<const int32_t>(slots.cursor);
  t.boundary = address_or_null<const int32_t>(slots.boundary);
  t.last_token = address_or_null<const int32_t>(slots.last_token);
  t.position_delta = address_or_null<const int32_t>(slots.position_delta);
  t.drafts = address_or_null<const int32_t>(slots.drafts);
  t.block_tables = address_or_null<const int32_t>(slots.block_tables);
  t.drafts_stride = slots.drafts.shape.rank() == 2 ? static_cast<int32_t>(slots.drafts.shape[1]) : 0;
  t.block_tables_stride = slots.block_tables.shape.rank() == 2 ? static_cast<int32_t>(slots.block_tables.shape[1]) : 0;
  return t;
}

}  // namespace quern::cuda::plain
