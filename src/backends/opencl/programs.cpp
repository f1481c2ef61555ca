#include "backends/opencl/programs.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "backends/opencl/kernel_source.h"
#include "base/hash.h"

namespace quern::opencl {

namespace {

/// Clocks that a matrix unit takes for one instruction of 8 rows (Xe2: 2048 products of halves at 128 a clock and engine).
constexpr double kMatrixClocks = 16;

std::string_view trim(std::string_view text) {
  const size_t first = text.find_first_not_of(' ');
  return first == std::string_view::npos ? std::string_view() : text.substr(first, text.find_last_not_of(' ') + 1 - first);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(trim(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return parts;
}

template <class Number>
bool read_number(std::string_view text, Number& number, int base = 10) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, base);
  return error == std::errc() && end == text.data() + text.size();
}

bool read_program(std::string_view line, DeclaredProgram& program) {
  const std::vector<std::string_view> columns = split(line, '|');
  if (columns.size() != 5) return false;
  program.name = columns[0];
  program.unit = columns[1];
  program.definitions = columns[4];
  const std::vector<std::string_view> turn = split(columns[2], ':');
  if (!read_number(turn[0], program.turn_bytes) || (program.turn_bytes > 0 ? turn.size() != 3 : turn.size() > 2)) return false;
  if (turn.size() >= 2 && !read_number(turn[1], program.turn_rows)) return false;
  if (turn.size() == 3 && !read_number(turn[2], program.read_rows)) return false;
  for (const std::string_view declared : split(columns[3], ' ')) {
    const std::vector<std::string_view> fields = split(declared, ':');
    DeclaredKernel kernel;
    if (fields.size() < 4 || fields.size() > 6) return false;
    kernel.name = fields[0];
    if (!read_number(fields[1], kernel.registers) || !read_number(fields[2], kernel.matrix_instructions) || !read_number(fields[3], kernel.block_loads)) return false;
    if (fields.size() >= 5 && !read_number(fields[4], kernel.turn_instructions)) return false;
    if (fields.size() == 6)
      for (const std::string_view loop : split(fields[5], '/'))
        if (!read_number(loop, kernel.loops.emplace_back())) return false;
    program.kernels.push_back(kernel);
  }
  return !program.name.empty() && !program.unit.empty();
}

/// The text of the unit's files, each header behind the file that first includes it.
Result<void> hash_file(std::string_view name, std::set<std::string_view>& seen, uint64_t& hash) {
  const auto files = source_files();
  const auto file = std::find_if(files.begin(), files.end(), [&](const SourceFile& f) { return f.name == name; });
  if (file == files.end()) return make_error(ErrorCode::kInternal, "this build has no OpenCL source '{}'", name);
  if (!seen.insert(file->name).second) return {};
  hash = fnv1a(file->text, hash);
  constexpr std::string_view kInclude = "#include \"backends/opencl/";
  for (const std::string_view line : split(file->text, '\n'))
    if (line.starts_with(kInclude)) RETURN_IF_ERROR(hash_file(line.substr(kInclude.size(), line.find('"', kInclude.size()) - kInclude.size()), seen, hash));
  return {};
}

}  // namespace

Result<Declarations> parse_declarations(std::string_view text) {
  Declarations found;
  int number = 0;
  for (const std::string_view line : split(text, '\n')) {
    ++number;
    if (line.empty() || line.starts_with('#')) continue;
    if (line.starts_with("source ")) {
      const std::vector<std::string_view> words = split(line, ' ');
      MeasuredSource source;
      if (words.size() != 3 || !read_number(words[2], source.hash, 16)) return invalid_argument("line {}: expected source UNIT HASH, found '{}'", number, line);
      source.unit = words[1];
      found.sources.push_back(source);
      continue;
    }
    if (!read_program(line, found.programs.emplace_back()))
      return invalid_argument("line {}: expected name | unit | bytes[:rows:rows] | kernel:registers:dpas:loads[:instructions[:loop/loop...]] ... | definitions, found '{}'", number, line);
  }
  return found;
}

const Declarations& declarations() {
  static const Declarations kDeclarations = [] {
    const auto files = source_files();
    const auto file = std::find_if(files.begin(), files.end(), [](const SourceFile& f) { return f.name == "programs.txt"; });
    CHECK(file != files.end());
    Result<Declarations> parsed = parse_declarations(file->text);
    CHECK_MSG(parsed.has_value(), "programs.txt");
    return std::move(*parsed);
  }();
  return kDeclarations;
}

Result<uint64_t> source_hash(std::string_view unit) {
  uint64_t hash = fnv1a("");
  std::set<std::string_view> seen;
  RETURN_IF_ERROR(hash_file(fmt::format("{}.cl", unit), seen, hash));
  return hash;
}

Result<WeightPass> weight_pass(std::string_view dtype, bool decode, int64_t num_rows) {
  const std::string weight = fmt::format("-DWEIGHT_{} ", dtype);
  const auto serves = [&](const DeclaredProgram& program) {
    return program.turn_bytes > 0 && program.definitions.find(weight) != std::string_view::npos && program.definitions.find("-DSCALED_OPERANDS") == std::string_view::npos &&
           (program.definitions.find("-DDECODE") != std::string_view::npos) == decode;
  };
  // Few rows take the smallest work-group that holds them, many the largest there is.
  int read_rows = 0;
  for (const DeclaredProgram& program : declarations().programs) {
    if (!serves(program)) continue;
    const bool holds = program.read_rows >= num_rows, held = read_rows >= num_rows;
    if (read_rows == 0 || (holds ? !held || program.read_rows < read_rows : !held && program.read_rows > read_rows)) read_rows = program.read_rows;
  }
  if (read_rows == 0) return make_error(ErrorCode::kNotFound, "programs.txt has no program with{} {} for {} rows", decode ? " -DDECODE and" : "", weight, decode ? "decode" : "prompt");
  WeightPass slowest;
  for (const DeclaredProgram& program : declarations().programs) {
    if (!serves(program) || program.read_rows != read_rows) continue;
    for (const DeclaredKernel& kernel : program.kernels) {
      const double slots = std::max<double>(kernel.turn_instructions, kMatrixClocks * kernel.matrix_instructions) / program.turn_bytes;
      if (slots / program.turn_rows > slowest.slots_per_byte / std::max(slowest.turn_rows, 1)) slowest = {slots, program.turn_rows, program.read_rows};
    }
  }
  return slowest;
}

Result<ChunkPass> gdn_chunk_pass(std::string_view ring) {
  constexpr int kRowGroups = 4, kScanGroups = 8;  // sub-groups of gdn_prompt.cl: of a chunk's rows, of a head's columns
  const auto programs = std::span(declarations().programs);
  const auto program = std::find_if(programs.begin(), programs.end(), [&](const DeclaredProgram& p) {
    return p.unit == "gdn_prompt" && p.definitions.find(fmt::format("-DRING_{} ", ring)) != std::string_view::npos;
  });
  if (program == programs.end()) return make_error(ErrorCode::kNotFound, "programs.txt has no gdn_prompt for rings of {}", ring);
  const auto slots = [&](std::string_view name) {
    const auto kernel = std::find_if(program->kernels.begin(), program->kernels.end(), [&](const DeclaredKernel& k) { return k.name == name; });
    CHECK(kernel != program->kernels.end());  // programs.txt declares all kernels of a unit
    return std::max<double>(kernel->turn_instructions, kMatrixClocks * kernel->matrix_instructions);
  };
  return ChunkPass{program->turn_rows, kRowGroups * slots("gdn_prompt_rows"), kRowGroups * (slots("gdn_prompt_chunks") + slots("gdn_prompt_norm")), kScanGroups * slots("gdn_prompt_scan")};
}

Result<RowPass> gdn_row_pass(std::string_view ring, bool with_keys) {
  constexpr int kGroups = 8, kLanes = 16;     // sub-groups of gdn_rows
  constexpr double kGrid = 64, kBlock = 8;    // rows of a chunk, and of the ring's u in a turn
  constexpr double kFolds = 1 / kGrid;        // of a row
  // Blocks before a row, whose place in its chunk is anything from 0 to 63 : ceil(place / 8) on average, and one that the ring's end cuts in two.
  constexpr double kBlocks = (kGrid / kBlock + 1) / 2 - (kGrid / kBlock) / kGrid + 1;
  // Two sub-groups take 16 rows of the chunk, from the first to the row itself: 1 to 4 such tiles.
  constexpr double kTiles = (1 + 2 + 3 + 4) / 4.0 * 2 / kGroups;
  // The turns that a row makes of each loop in gdn_rows, in the order in which they begin: rows; with keys, the columns before a boundary; halves of d_k, the fold in there, its rows; tiles of the chunk; blocks of u.
  std::vector<double> turns{1, 2, 2 * kFolds, 2 * kFolds * kGrid, kTiles, kBlocks};
  if (with_keys) turns.insert(turns.begin() + 1, 3 * kFolds);
  const DeclaredProgram* program = nullptr;
  const DeclaredProgram* beside = nullptr;  // with the other kernels
  for (const DeclaredProgram& p : declarations().programs) {
    if (p.unit != "gdn_simd16" || p.definitions.find(fmt::format("-DRING_{} ", ring)) == std::string_view::npos) continue;
    const bool is_short = p.definitions.find("-DSHORT_RUNS") != std::string_view::npos;
    if (is_short == with_keys) program = &p;
    if (!is_short) beside = &p;
  }
  if (program == nullptr || beside == nullptr) return make_error(ErrorCode::kNotFound, "programs.txt has no gdn_simd16 for rings of {}", ring);
  const auto kernel_of = [](const DeclaredProgram& of, std::string_view name) {
    const auto found = std::find_if(of.kernels.begin(), of.kernels.end(), [&](const DeclaredKernel& k) { return k.name == name; });
    return found == of.kernels.end() ? DeclaredKernel{} : *found;
  };
  const DeclaredKernel rows = kernel_of(*program, "gdn_rows");
  if (rows.loops.size() != turns.size()) return make_error(ErrorCode::kInternal, "gdn_rows has {} loops in its machine code, and turns are known of {}", rows.loops.size(), turns.size());
  RowPass pass;
  pass.slots_per_run = rows.turn_instructions;
  for (size_t i = 0; i < turns.size(); ++i) {
    pass.slots_per_run -= rows.loops[i];
    pass.slots_per_row += turns[i] * rows.loops[i];
  }
  pass.slots_per_run *= kGroups;
  pass.slots_per_row *= kGroups;
  if (!with_keys) pass.slots_per_row_of_head = kernel_of(*beside, "gdn_keys").turn_instructions;
  pass.slots_per_channel = static_cast<double>(kernel_of(*beside, "gdn_keep").turn_instructions) / kLanes;
  return pass;
}

Result<AttentionPass> attention_decode_pass(std::string_view cache) {
  for (const DeclaredProgram& program : declarations().programs) {
    const bool is_e4m3 = program.definitions.find("-DKV_E4M3") != std::string_view::npos, is_scaled = program.definitions.find("-DSCALED_OPERANDS") != std::string_view::npos;
    if (program.unit != "attention_dpas" || is_scaled || cache != (is_e4m3 ? "E4M3" : "BF16")) continue;
    for (const DeclaredKernel& kernel : program.kernels) {
      if (kernel.name != "attention_decode") continue;
      constexpr size_t kLoops = 4;  // turns over keys; the groups' largest scores, their sums, their values
      if (kernel.loops.size() != kLoops) return make_error(ErrorCode::kInternal, "attention_decode has {} loops in its machine code, and turns are known of {}", kernel.loops.size(), kLoops);
      AttentionPass pass;
      pass.slots_per_turn = std::max<double>(kernel.loops[0], kMatrixClocks * kernel.matrix_instructions);
      pass.slots_per_group = kernel.loops[1] + kernel.loops[2] + kernel.loops[3];
      pass.slots = kernel.turn_instructions - kernel.loops[0] - pass.slots_per_group;
      return pass;
    }
  }
  return make_error(ErrorCode::kNotFound, "programs.txt has no attention_decode for a cache of {}", cache);
}

}  // namespace quern::opencl
