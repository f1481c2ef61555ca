#include "backends/opencl/programs.h"

#include "backends/opencl/kernel_source.h"
#include "support/test_support.h"

// What programs.txt says of the machine code for Xe2: it is read whole, and it is of the sources as they are.

namespace quern::opencl {
namespace {

using ::testing::HasSubstr;

TEST(OpenClPrograms, WereMeasuredOnTheSourcesOfThisBuild) {
  std::map<std::string_view, uint64_t> measured;
  for (const MeasuredSource& source : declarations().sources) measured[source.unit] = source.hash;
  std::set<std::string_view> units;
  for (const DeclaredProgram& program : declarations().programs) units.insert(program.unit);
  for (const std::string_view unit : units) {
    const auto hash = source_hash(unit);
    ASSERT_OK(hash);
    EXPECT_EQ(fmt::format("{:016x}", measured[unit]), fmt::format("{:016x}", *hash))
        << unit << ".cl or a header of it has changed since programs.txt was measured: replace its lines by those that `scripts/xpu-check --declare` prints";
  }
  EXPECT_EQ(units.size(), measured.size()) << "sources of units that no program is built from";
}

TEST(OpenClPrograms, EveryUnitOfThisBuildIsMeasured) {
  std::set<std::string> units;
  for (const MeasuredSource& source : declarations().sources) units.emplace(source.unit);
  for (const SourceFile& file : source_files()) {
    if (!file.name.ends_with(".cl")) continue;
    EXPECT_TRUE(units.contains(std::string(file.name.substr(0, file.name.find('.'))))) << file.name;
  }
}

TEST(OpenClPrograms, AreReadFieldByField) {
  const auto read = parse_declarations(
      "# a remark\n\nsource dpas 00ff\n"
      "decode-8 | dpas | 2048:8:16 | dpas_decode:128:8:9:310 other:256:0:0 | -cl-std=CL3.0 -DDECODE\n"
      "norm | norm | 0 | norm_rows:128:0:0 | -cl-std=CL1.2\n"
      "chunks | gdn | 0:64 | walk:256:504:92:5979 | -DCHUNKS\n"
      "rows | gdn | 0:1 | rows:256:0:1:1735:723/44/216 | -DROWS\n");
  ASSERT_OK(read);
  ASSERT_EQ(read->sources.size(), 1u);
  EXPECT_EQ(read->sources[0].unit, "dpas");
  EXPECT_EQ(read->sources[0].hash, 255u);
  ASSERT_EQ(read->programs.size(), 4u);
  EXPECT_TRUE(read->programs[2].kernels[0].loops.empty());
  EXPECT_EQ(read->programs[3].kernels[0].loops, (std::vector<int>{723, 44, 216}));
  EXPECT_EQ(read->programs[2].turn_bytes, 0);
  EXPECT_EQ(read->programs[2].turn_rows, 64);
  EXPECT_EQ(read->programs[2].kernels[0].turn_instructions, 5979);
  const DeclaredProgram& program = read->programs[0];
  EXPECT_EQ(program.name, "decode-8");
  EXPECT_EQ(program.turn_bytes, 2048);
  EXPECT_EQ(program.turn_rows, 8);
  EXPECT_EQ(program.read_rows, 16);
  EXPECT_EQ(program.definitions, "-cl-std=CL3.0 -DDECODE");
  ASSERT_EQ(program.kernels.size(), 2u);
  EXPECT_EQ(program.kernels[0].turn_instructions, 310);
  EXPECT_EQ(program.kernels[0].block_loads, 9);
  EXPECT_EQ(program.kernels[1].registers, 256);
  EXPECT_EQ(program.kernels[1].turn_instructions, 0);
  for (const char* bad : {"source dpas", "source dpas xyz", "a | b | c", "a | b | 2048 | k:1:2:3 | d", "a | b | 0:64:64 | k:1:2:3 | d", "a | b | 0 | k:1:2 | d", "a | b | 0 | k:1:2:3:x | d", "a | b | 0:1 | k:1:2:3:4:5/x | d", "a | b | 0:1 | k:1:2:3:4:5:6 | d"}) {
    const auto refused = parse_declarations(bad);
    ASSERT_FALSE(refused.has_value()) << bad;
    EXPECT_THAT(refused.error().message, HasSubstr("line 1"));
  }
}

TEST(OpenClPrograms, APassTakesTheSmallestWorkGroupThatHoldsTheRows) {
  for (const auto& [decode, rows, turn_rows, read_rows] :
       {std::tuple{true, 1, 1, 1}, {true, 2, 8, 8}, {true, 8, 8, 8}, {true, 9, 32, 32}, {true, 64, 32, 32}, {false, 20, 32, 32}, {false, 512, 64, 256}}) {
    const auto pass = weight_pass("E4M3", decode, rows);
    ASSERT_OK(pass);
    EXPECT_EQ(pass->turn_rows, turn_rows) << rows;
    EXPECT_EQ(pass->read_rows, read_rows) << rows;
  }
  // The budget of a B60: 160 engines at 2.4 GHz against 456 GB/s.
  for (const int rows : {1, 8, 32}) EXPECT_LT(weight_pass("E4M3", true, rows)->slots_per_byte, 160 * 2.4 / 456) << rows;
  // Eight rows in a turn are bound by instructions, tiles of a prompt by the matrix units: 16 clocks for each of their instructions.
  EXPECT_DOUBLE_EQ(weight_pass("E4M3", false, 512)->slots_per_byte, 32 * 16 / 1024.0);
  EXPECT_FALSE(weight_pass("INT4", true, 1).has_value());
}

TEST(OpenClPrograms, AChunkOfGdnRowsIsBoundByTheMatrixUnitsWhereItsStateWalks) {
  for (const char* ring : {"BF16", "F32"}) {
    const auto pass = gdn_chunk_pass(ring);
    ASSERT_OK(pass);
    EXPECT_EQ(pass->rows, 64);
    // 8 sub-groups of 16 columns: S by q and k in two parts, 10 blocks each of T and P in three products, the state in two parts.
    EXPECT_DOUBLE_EQ(pass->walk_slots_per_value_head, 8 * 16 * (2 * 128 + 2 * 60 + 128.0));
    EXPECT_GT(pass->slots_per_head, 64 * 4);
    EXPECT_GT(pass->slots_per_value_head, 4 * 16 * 112.0);
  }
  EXPECT_FALSE(gdn_chunk_pass("E4M3").has_value());
}

TEST(OpenClPrograms, ARowOfGdnIsCountedByTheTurnsOfItsLoops) {
  for (const char* ring : {"BF16", "F32"}) {
    const auto alone = gdn_row_pass(ring, true), of_many = gdn_row_pass(ring, false);
    ASSERT_OK(alone);
    ASSERT_OK(of_many);
    for (const auto* pass : {&*alone, &*of_many}) {
      // 8 sub-groups meet 128 elements of a column with k and q, with a product and a rest of each of 64 rows every 64 rows, and 16 x 128 keys of each tile with k and q.
      EXPECT_GT(pass->slots_per_row, 8 * (2 * 128 + 128) + 2.5 * 2 * 128);
      EXPECT_LT(pass->slots_per_row, 18000);
      EXPECT_GT(pass->slots_per_run, 8 * 100);
      EXPECT_LT(pass->slots_per_run, pass->slots_per_row);
      EXPECT_GT(pass->slots_per_channel, 1);
    }
    EXPECT_GT(alone->slots_per_row, of_many->slots_per_row) << "q and k are made on the way";
    EXPECT_EQ(alone->slots_per_row_of_head, 0);
    EXPECT_GT(of_many->slots_per_row_of_head, 8 * 4) << "conv of 128 channels";
  }
  EXPECT_FALSE(gdn_row_pass("E4M3", true).has_value());
}

TEST(OpenClPrograms, ADecodeRowOfAttentionIsCountedByItsTurnsAndGroups) {
  for (const char* cache : {"BF16", "E4M3"}) {
    const auto pass = attention_decode_pass(cache);
    ASSERT_OK(pass);
    // 32 keys of 256 dimensions meet 8 heads, and their weights the values: 64 matrix instructions of 16 clocks.
    EXPECT_GE(pass->slots_per_turn, 64 * 16);
    EXPECT_GT(pass->slots, 4 * 8 * 8) << "a sub-group's quarter of what it merges, and of what it stores";
    EXPECT_GT(pass->slots_per_group, 4 * 8);
  }
  EXPECT_GT(attention_decode_pass("E4M3")->slots_per_turn, attention_decode_pass("BF16")->slots_per_turn) << "codes become halves";
  EXPECT_FALSE(attention_decode_pass("F32").has_value());
}

}  // namespace
}  // namespace quern::opencl
