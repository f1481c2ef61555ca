#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"

// programs.txt: every program that quern builds for Arc Pro B60 and B70 and what its machine code was measured to need, one code for both chips. It is part of this build, so that speeds can be
// modelled without a card and without a compiler.

namespace quern::opencl {

/// Rows of the longest decode run whose q and k gdn_rows makes itself (SHORT_RUN of gdn_simd16.cl).
inline constexpr int32_t kGdnShortRun = 8;

/// Groups that share the keys of a decode row, at most, and the sub-groups of one in attention_dpas.cl (SPLITS) with the keys of their turns (KEYS).
inline constexpr int kAttentionShares = 16, kAttentionSplits = 4, kAttentionKeys = 32;

struct DeclaredKernel {
  std::string_view name;
  int registers = 0, matrix_instructions = 0, block_loads = 0;
  int turn_instructions = 0;  // of a sub-group in a turn of the inner loop; 0: there is none that reads weights. Where no weights are read but rows are declared, of the whole kernel
  std::vector<int> loops;     // where rows are computed one by one: what of these instructions is in each loop and in no loop inside it, in the order in which loops begin
};

struct DeclaredProgram {
  std::string_view name, unit;
  int turn_bytes = 0;  // weight bytes that a turn of the inner loop reads; 0: the program reads no weights
  int turn_rows = 0;   // rows that meet them in one sub-group; without weights, rows of a chunk that its kernels share, 1: rows one by one; 0: not counted
  int read_rows = 0;   // rows of a work-group, for which they are read once
  std::vector<DeclaredKernel> kernels;
  std::string_view definitions;
};

/// The source of a unit that the programs were measured on.
struct MeasuredSource {
  std::string_view unit;
  uint64_t hash = 0;
};

struct Declarations {
  std::vector<DeclaredProgram> programs;
  std::vector<MeasuredSource> sources;
};

/// Reads the text of programs.txt, which outlives the result. An error names the line.
Result<Declarations> parse_declarations(std::string_view text);
/// Those of this build.
const Declarations& declarations();

/// Hash of a unit's source as scripts/xpu-check computes it: of the file and of each header's text where it is first included.
Result<uint64_t> source_hash(std::string_view unit);

/// What it takes to bring a weight of `dtype` ("E4M3", ...) past `num_rows` rows on the matrix units; of the programs that may do it, the slowest.
struct WeightPass {
  double slots_per_byte = 0;  // issue slots of an engine for a weight byte and `turn_rows` rows; an instruction takes one, a matrix instruction 16 that others may fill
  int turn_rows = 0, read_rows = 0;
};
Result<WeightPass> weight_pass(std::string_view dtype, bool decode, int64_t num_rows);

/// Issue slots of an engine that the kernels of gdn_prompt.cl take for a chunk: an upper bound, since what is for rows in the ring and for the last chunk alone is counted as well.
struct ChunkPass {
  int rows = 0;
  double slots_per_head = 0;             // of q, k and v each
  double slots_per_value_head = 0;       // besides
  double walk_slots_per_value_head = 0;  // of the scan, whose chunks follow each other
};
/// `ring`: "F32" or "BF16".
Result<ChunkPass> gdn_chunk_pass(std::string_view ring);

/// Issue slots of an engine that gdn_simd16.cl takes for the rows of a run, one after the other, with half a ring of rows before them on average: all that stands in no loop, and the loops by their turns. An upper
/// bound, since what one sub-group does for all, or a row in so many, is counted in each unless a loop holds it.
struct RowPass {
  double slots_per_run = 0;          // of a value head, before its first row
  double slots_per_row = 0;          // of a value head, with the fold that every 64th row brings
  double slots_per_row_of_head = 0;  // of q and k each, where they have a launch of their own
  double slots_per_channel = 0;      // of gdn_keep, where that is launched
};
/// `with_keys`: gdn_rows makes q and k itself. Error: the loops are not those whose turns are known.
Result<RowPass> gdn_row_pass(std::string_view ring, bool with_keys);

/// Issue slots that a sub-group of attention_decode (attention_dpas.cl) takes for a row and kv head, the last one to come, which merges what all groups have found.
struct AttentionPass {
  double slots = 0;            // beside the loops
  double slots_per_turn = 0;   // of kAttentionKeys keys
  double slots_per_group = 0;  // that has keys
};
/// `cache`: "BF16" or "E4M3". Errors as above.
Result<AttentionPass> attention_decode_pass(std::string_view cache);

}  // namespace quern::opencl
