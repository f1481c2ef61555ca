#include "backends/cuda/linears_sm90.h"

#include "backends/cuda/plain.h"

namespace quern::cuda::sm90 {

namespace {

int64_t padded(int64_t rows) { return (rows + 7) / 8 * 8; }
int64_t aligned(int64_t bytes) { return (bytes + 1023) / 1024 * 1024; }
size_t column_index(int64_t rows) {
  size_t i = 0;
  while (kColumns[i] < rows) ++i;
  return i;
}
constexpr unsigned kThreads = 384;
/// Floats of Layout::sums(): of up to kResidentRows rows a block of 128 each, and products of side rows.
int num_sums(const LinearLayer& linear, bool e4m3) {
  const int blocks = e4m3 ? linear.k_blocks : linear.k_blocks / 2;
  return (linear.norm == nullptr ? 0 : kResidentRows * blocks) + (linear.side.weight == nullptr ? 0 : kSideSlice * 32);
}

}  // namespace

DecodePlaces::DecodePlaces(std::byte* workspace, int64_t rows, int64_t in_features) : spare(workspace) {
  const int64_t all = padded(rows);
  x_scale = spare + all * kSpareBytes;
  x = x_scale + aligned(in_features / 128 * all * 4);
  end = x + in_features * all * 2;  // e4m3 or bf16
}

PromptPlaces::PromptPlaces(std::byte* workspace, int64_t rows, int64_t in_features, bool e4m3, bool bf16, int64_t spare_columns) : x8(workspace) {
  const int64_t all = padded(rows);
  x_scale = x8 + (e4m3 ? in_features * all : 0);
  x16 = x_scale + (e4m3 ? aligned(in_features / 128 * all * 4) : 0);
  spare = x16 + (bf16 ? in_features * all * 2 : 0);
  end = spare + spare_columns * all * 2;
}

Result<Linears> Linears::load(Device& device, PromptShape shape, int num_side_units) {
  Linears linears;
  linears.shape_ = shape;
  ASSIGN_OR_RETURN(linears.packers_, Packers::load(device));
  linears.num_sms_ = device.num_sms();
  linears.max_shared_bytes_ = device.max_shared_bytes();
  const auto words = static_cast<size_t>(linears.num_sms_) * 2 * kTileRows * kMaxDecodeRows;
  ASSIGN_OR_RETURN(linears.parts_, device.shared_words("parts of sums", words, static_cast<int32_t>(kNothing)));
  if (num_side_units > 0) {
    const size_t parts = static_cast<size_t>(num_side_units) * kMaxDecodeRows * 8;
    ASSIGN_OR_RETURN(linears.side_parts_, device.upload(std::vector<int32_t>(parts, static_cast<int32_t>(kNothing)), "parts of sums of side rows"));
  }
  const int shared = linears.max_shared_bytes_;
  ASSIGN_OR_RETURN(linears.quantise_, device.function<QuantiseArgs>("rows_sm90", "quantise_rows"));
  ASSIGN_OR_RETURN(linears.norm_pair_, device.function<QuantisePairArgs>("rows_sm90", "norm_pair_of_rows"));
  ASSIGN_OR_RETURN(linears.norm_prompt_, device.function<QuantiseArgs>("rows_prompt_sm90", "norm_prompt_rows"));
  ASSIGN_OR_RETURN(linears.quantise_prompt_, device.function<QuantiseArgs>("rows_prompt_sm90", "quantise_prompt_rows"));
  static constexpr const char* kResident[] = {"decode_resident_1", "decode_resident_2", "decode_resident_4"};
  for (size_t i = 0; i < linears.resident_.size(); ++i) {
    ASSIGN_OR_RETURN(linears.resident_[i], device.function<DecodeArgs>("decode_sm90_resident", kResident[i], shared));
  }
  static constexpr const char* kUnits[] = {"decode_sm90_narrow", "decode_sm90_narrow", "decode_sm90_narrow", "decode_sm90_wide", "decode_sm90_wide", "decode_sm90_256"};
  static constexpr const char* kE4M3[] = {"decode_e4m3_8", "decode_e4m3_16", "decode_e4m3_32", "decode_e4m3_64", "decode_e4m3_128", "decode_e4m3_256"};
  static constexpr const char* kBF16[] = {"decode_bf16_8", "decode_bf16_16", "decode_bf16_32", "decode_bf16_64", "decode_bf16_128", "decode_bf16_256"};
  for (size_t i = 0; i < kColumns.size(); ++i) {
    ASSIGN_OR_RETURN(linears.e4m3_.decode[i], device.function<DecodeArgs>(kUnits[i], kE4M3[i], shared));
    ASSIGN_OR_RETURN(linears.bf16_.decode[i], device.function<DecodeArgs>(kUnits[i], kBF16[i], shared));
  }
  ASSIGN_OR_RETURN(linears.e4m3_.prompt, device.function<PromptArgs>("prompt_sm90", "prompt_e4m3", shared));
  ASSIGN_OR_RETURN(linears.bf16_.prompt, device.function<PromptArgs>("prompt_sm90", "prompt_bf16", shared));
  ASSIGN_OR_RETURN(linears.e4m3_.prompt_pair, device.function<PromptArgs>("prompt_sm90", "prompt_pair_e4m3", shared));
  ASSIGN_OR_RETURN(linears.e4m3_.prompt_tall_pair, device.function<PromptArgs>("prompt_sm90", "prompt_tall_pair_e4m3", shared));
  ASSIGN_OR_RETURN(linears.bf16_.prompt_pair, device.function<PromptArgs>("prompt_sm90", "prompt_pair_bf16", shared));
  return linears;
}

size_t Linears::workspace_bytes(int64_t max_rows, const TileLayer& layer, int64_t spare_columns) const {
  const DecodePlaces decode(nullptr, std::clamp<int64_t>(max_rows, 1, kMaxDecodeRows), layer.in_features());
  const PromptPlaces prompt(nullptr, max_rows, layer.in_features(), layer.is_e4m3(), !layer.is_e4m3() || layer.has_side(), spare_columns);
  return static_cast<size_t>(std::max(decode.end, prompt.end) - static_cast<std::byte*>(nullptr));
}

QuantiseArgs Linears::to_fill(const TileLayer& layer, int64_t rows, std::byte* x8, std::byte* x_scale, std::byte* x16) {
  QuantiseArgs args;
  args.rows = static_cast<int32_t>(rows);
  args.x_rows = static_cast<int32_t>(padded(rows));
  args.k_blocks = static_cast<int32_t>(layer.in_features() / 128);
  if (layer.is_e4m3()) {
    args.x8 = x8;
    args.x_scale = reinterpret_cast<float*>(x_scale);
  } else {
    args.x16 = x16;
  }
  return args;
}

void Linears::launch_decode(Stream& stream, LinearLayer linear, bool e4m3, int64_t rows, int32_t* arrivals, const ops::TensorView& workspace) const {
  if (linear.side.weight != nullptr) linear.side.parts = reinterpret_cast<float*>(side_parts_->address());
  CHECK(int64_t{linear.tiles} * linear.k_blocks * num_sms_ <= INT32_MAX);  // places in the list are counted in 32 bits
  linear.blocks = decode_blocks(linear.tiles, linear.k_blocks, num_sms_);
  if (rows > kMaxPacedColumns && (e4m3 || rows <= 128)) linear.side.blocks = side_blocks(linear, e4m3 ? linear.k_blocks : linear.k_blocks / 2, num_sms_);
  const DecodePlaces places(workspace.data<std::byte>(), rows, int64_t{linear.k_blocks} * (e4m3 ? 128 : 64));
  DecodeArgs args;
  args.rows = static_cast<int32_t>(rows);
  args.x_rows = static_cast<int32_t>(padded(rows));
  args.arrivals = arrivals;
  args.x = places.x;
  args.x_scale = reinterpret_cast<float*>(places.x_scale);
  args.x16 = places.spare;
  args.parts = reinterpret_cast<float*>(parts_->address());
  const size_t index = column_index(rows);
  const int blocks = sm90::resident_blocks(linear.tiles, linear.k_blocks, linear.blocks), norm = linear.norm == nullptr ? 0 : linear.k_blocks * 128, sums = num_sums(linear, e4m3);
  constexpr int kFewestStages = 4;
  const bool fits = std::max(blocks, norm / 128) <= kMaxResidentBlocks && fixed_bytes(blocks, args.rows, norm, sums) + kFewestStages * stage_bytes(8, true, true) <= max_shared_bytes_;
  const bool resident = e4m3 && rows <= kResidentRows && linear.in != nullptr && fits;
  args.resident_blocks = resident ? blocks : 0;
  args.norm_floats = resident ? norm : 0;
  const int columns = kColumns[index], fixed = fixed_bytes(args.resident_blocks, args.rows, args.norm_floats, sums) + row_stages_bytes(columns, e4m3, resident), per_stage = stage_bytes(columns, e4m3, resident);
  args.stages = std::min((max_shared_bytes_ - fixed) / per_stage, kMaxStages);
  const int stages_of_rows = is_split(columns, e4m3, resident) ? kRowStages : args.stages;
  CHECK(columns <= 32 || args.stages * kTileBytes + stages_of_rows * columns * kTileRowBytes >= 12 * kTileBytes);  // room for what join_wide has there: a part and parts on their way
  args.linear = linear;
  // What is launched behind this may begin at once (decision 0037), but finds no room before a block of this has ended, since each has nearly all of a multiprocessor's shared memory. Kernels that read a step's
  // tables and states before they wait rely on that, and on the first launch of a step, which is no programmatic one: it waits for all of the step before.
  const Function<DecodeArgs>& function = resident ? resident_[std::min<size_t>(static_cast<size_t>(rows), 3) - 1] : (e4m3 ? e4m3_ : bf16_).decode[index];
  stream.launch(function,
                {.grid = {static_cast<unsigned>(num_sms_)},
                 .block = {kThreads},
                 .shared_bytes = static_cast<unsigned>(fixed + args.stages * per_stage),
                 .programmatic = true},
                args);
}

void Linears::quantise(Stream& stream, const QuantiseArgs& args) const {
  stream.launch(quantise_, {.grid = {static_cast<unsigned>(args.rows)}, .block = {256}, .programmatic = true}, args);
}

void Linears::norm_pair(Stream& stream, const QuantiseArgs& first, const QuantiseArgs& second) const {
  CHECK(first.norm != nullptr && second.norm != nullptr);
  stream.launch(norm_pair_, {.grid = {static_cast<unsigned>(first.rows + second.rows)}, .block = {256}, .programmatic = true}, QuantisePairArgs{first, second});
}

void Linears::quantise_prompt(Stream& stream, const QuantiseArgs& args) const {
  constexpr int64_t kLanes = 8, kWarp = 32, kResident = 1024;  // lanes of a group; threads of norm_prompt_rows that a multiprocessor has registers for
  const auto threads_of = [](int64_t groups) { return static_cast<unsigned>((groups * kLanes + kWarp - 1) / kWarp * kWarp); };
  if (args.norm != nullptr) {
    const unsigned threads = threads_of(args.k_blocks);
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(args.rows, kResident / threads * num_sms_));
    stream.launch(norm_prompt_, {.grid = {blocks}, .block = {threads}, .programmatic = true}, args);
  } else {
    const unsigned threads = std::min<unsigned>(threads_of(plain::blocks_for(args.k_blocks, kQuantisedGroups)), kMaxQuantisers);
    stream.launch(quantise_prompt_, {.grid = {static_cast<unsigned>(args.rows)}, .block = {threads}, .programmatic = true}, args);
  }
}

void Linears::multiply_prompt(Stream& stream, const LinearLayer& linear, bool e4m3, int64_t rows, const PromptPlaces& places) const {
  CHECK(linear.epilogue != Epilogue::kLogits);  // logits have the arithmetic of decode rows
  PromptArgs args;
  args.linear = linear;
  args.rows = static_cast<int32_t>(rows);
  args.x_rows = static_cast<int32_t>(padded(rows));
  args.x = e4m3 ? places.x8 : places.x16;
  args.x_scale = reinterpret_cast<const float*>(places.x_scale);
  const PromptShape shape = shape_ != PromptShape::kFastest ? shape_ : fastest_shape(linear, e4m3, args.x_rows);
  const bool tall = shape == PromptShape::kTallPair && e4m3, pair = shape != PromptShape::kSingle;
  const int block_rows = tall ? 256 : 128, per_stage = stage_bytes(block_rows, e4m3, false);
  args.stages = std::min((max_shared_bytes_ - fixed_bytes(0, 0, 0, 0)) / per_stage, kMaxStages);
  const unsigned blocks = pair ? 2 : 1;  // of a cluster
  const int64_t items = linear.tiles * int64_t{plain::blocks_for(args.x_rows, block_rows * blocks)};
  const Kind& kind = e4m3 ? e4m3_ : bf16_;
  stream.launch(tall ? kind.prompt_tall_pair : pair ? kind.prompt_pair : kind.prompt,
                {.grid = {blocks * static_cast<unsigned>(std::min<int64_t>(items, num_sms_ / static_cast<int>(blocks)))},
                 .block = {kThreads},
                 .shared_bytes = static_cast<unsigned>(fixed_bytes(0, 0, 0, 0) + args.stages * per_stage),
                 .cluster = {blocks, 1, 1}},
                args);
}

/// By how often the device's blocks take an output tile, and how long that takes: measured on an H200, the same for all shapes of the model within 5 %.
PromptShape Linears::fastest_shape(const LinearLayer& linear, bool e4m3, int64_t rows) const {
  const auto turns = [&](int64_t tile_rows, int64_t at_once) {
    return static_cast<double>(plain::blocks_for(linear.tiles * int64_t{plain::blocks_for(rows, tile_rows)}, at_once));
  };
  const double single = turns(128, num_sms_), pair = 0.96 * turns(256, num_sms_ / 2), tall_pair = 1.78 * turns(512, num_sms_ / 2);
  if (e4m3 && tall_pair < std::min(single, pair)) return PromptShape::kTallPair;
  return pair < single ? PromptShape::kPair : PromptShape::kSingle;
}

void Linears::prompt(Stream& stream, const TileLayer& layer, const ops::Buffer& packed, const LinearLayer& linear, const RowsIn& in, int64_t rows,
                     const PromptPlaces& places) const {
  QuantiseArgs args = to_fill(layer, rows, places.x8, places.x_scale, places.x16);
  args.in = in.data;
  args.in_stride = in.columns;
  args.norm = linear.norm;
  args.eps = linear.eps;
  if (layer.has_side()) args.x16 = places.x16;
  quantise_prompt(stream, args);
  multiply_prompt(stream, linear, layer.is_e4m3(), rows, places);
  if (!layer.has_side()) return;
  LinearLayer side = layer.side_linear(packed);
  const SideRows& outputs = linear.side;
  void* const out[] = {outputs.b, outputs.a};
  for (int i = 0; i < 2; ++i) {
    side.segments[i].out = out[i];
    side.segments[i].stride = side.segments[i].features;
  }
  multiply_prompt(stream, side, false, rows, places);
}

}  // namespace quern::cuda::sm90
