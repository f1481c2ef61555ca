#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"

// programs.txt: every program that quern builds for Arc Pro B60 and B70 and what its machine code was measured to need, one code for both chips. It is part of this build, so that speeds can be
// modelled without a card and without a compiler.

namespace quern::opencl {

struct DeclaredKernel {
  std::string_view name;
  int registers = 0, matrix_instructions = 0, block_loads = 0;
  int turn_instructions = 0;  // of a sub-group in a turn of the inner loop; 0: there is none that reads weights. Where no weights are read but rows are declared, of the whole kernel
};

struct DeclaredProgram {
  std::string_view name, unit;
  int turn_bytes = 0;  // weight bytes that a turn of the inner loop reads; 0: the program reads no weights
  int turn_rows = 0;   // rows that meet them in one sub-group; without weights, rows of a chunk that its kernels share; 0: not counted
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

}  // namespace quern::opencl
