#include "backends/cuda/linears_e4m3.h"

#include "backends/cuda/device_code.h"
#include "backends/cuda/e4m3.h"
#include "base/shape.h"

namespace quern::cuda::e4m3 {

using ops::WeightScheme;

namespace {

constexpr int kFirstArchitecture = 89;          // that has the instruction
constexpr int64_t kRowsQuantisedByAll = 8;      // blocks of so few rows quantise them for themselves
int64_t padded(int64_t rows) { return round_up(rows, mma::kBlockRows); }

}  // namespace

ops::Verdict multiplies(const ops::DeviceTraits& traits) {
  if (traits.architecture < kFirstArchitecture) return ops::refuse("sm_{} does not multiply e4m3 by e4m3; sm_89 and newer do", traits.architecture);
  if (traits.architecture >= 90 && traits.architecture < 120) return ops::refuse("sm_{} multiplies e4m3 by e4m3 with warpgroups alone", traits.architecture);
  return ops::accept();
}

Result<E4M3Linears> E4M3Linears::create(Device& device) {
  E4M3Linears linears;
  ASSIGN_OR_RETURN(linears.wide_, mma::TiledLinears::create(device));
  constexpr std::string_view kUnit = "linear_e4m3_sm89";
  static constexpr const char* kNames[][4] = {{"e4m3_block_8", "e4m3_block_16", "e4m3_block_32", "e4m3_block_128"}, {"e4m3_whole_8", "e4m3_whole_16", "e4m3_whole_32", "e4m3_whole_128"}};
  Kernels* all[] = {&linears.block_, &linears.whole_};
  for (size_t scales = 0; scales < 2; ++scales)
    for (size_t i = 0; i < 4; ++i) {
      ASSIGN_OR_RETURN((*all[scales])[i], device.function<mma::E4M3LinearArgs>(kUnit, kNames[scales][i], i == 3 ? mma::kBlockSharedBytes : 0));
    }
  ASSIGN_OR_RETURN(linears.quantise_, device.function<mma::QuantiseRowsArgs>(kUnit, "e4m3_rows"));
  linears.num_sms_ = device.num_sms();
  linears.overlap_ = waits_for_predecessors(code_architectures(), device.traits().architecture);
  return linears;
}

ops::Verdict E4M3Linears::accepts(const ops::DeviceTraits& traits, std::initializer_list<ops::LinearShape> weights) {
  if (std::none_of(weights.begin(), weights.end(), [](const ops::LinearShape& weight) { return ops::is_fp8(weight.scheme); })) return ops::refuse("no weight is FP8");
  if (!traits.fp8_matrix) return ops::refuse("fp8 weights are multiplied with quantised activations, which are not wanted");
  if (const auto built = code_architectures(); !built.empty())
    if (const auto covered = covers(architectures_from(kFirstArchitecture, built), traits.architecture); !covered)
      return ops::refuse("this build has no code with products of e4m3 for sm_{}", traits.architecture);
  return ops::accept();
}

void E4M3Linears::pack(const Packed& weight, const ops::LinearSource& source, ops::Buffer& packed, ops::Stream& stream) const {
  if (ops::is_fp8(weight.shape().scheme))
    wide_.pack(weight, source, packed, stream, mma::Tiles::kE4M3);
  else
    wide_.pack(weight, source, packed, stream);
}

size_t E4M3Linears::operand_bytes(int64_t rows, int64_t in_features) {
  return Scratch::size(static_cast<size_t>(padded(rows) * in_features)) + Scratch::size(static_cast<size_t>(padded(rows) * (in_features / mma::kBlockColumns)) * sizeof(float));
}

/// Up to 32 rows are split, more than 128 never. Between, a block of 128 rows by 128 features takes about as long as seven of 32 by 32, which read through the L2 cache what the other keeps in
/// shared memory: from the rates of the instruction and of the cache, for no such card has been measured.
bool E4M3Linears::takes_blocks(const ops::LinearShape& shape, int64_t num_rows) const {
  if (num_rows <= 32) return false;
  if (num_rows > mma::kBlockRows) return true;
  const int64_t split = ceil_div(num_rows, 32) * ceil_div(shape.out_features, mma::kTileFeatures), turns = ceil_div(ceil_div(shape.out_features, mma::kBlockFeatures), num_sms_);
  return 7 * turns * num_sms_ < split;
}

E4M3Linears::Operand E4M3Linears::operand(Stream& stream, Scratch& scratch, const void* x, const int32_t* rows, int64_t num_rows, std::initializer_list<const Packed*> weights) const {
  Operand operand{{x, rows}, {}};
  if (num_rows <= kRowsQuantisedByAll || std::none_of(weights.begin(), weights.end(), [](const Packed* weight) { return ops::is_fp8(weight->shape().scheme); })) return operand;
  const int64_t in_features = (*weights.begin())->shape().in_features, k_blocks = in_features / mma::kBlockColumns;
  operand.quantised.codes = reinterpret_cast<uint8_t*>(scratch.take(static_cast<size_t>(padded(num_rows) * in_features)));
  operand.quantised.scale = reinterpret_cast<float*>(scratch.take(static_cast<size_t>(padded(num_rows) * k_blocks) * sizeof(float)));
  operand.quantised.padded = static_cast<int32_t>(padded(num_rows));
  const mma::QuantiseRowsArgs args{x, rows, static_cast<int32_t>(num_rows), static_cast<int32_t>(in_features), operand.quantised};
  const auto blocks = static_cast<unsigned>(ceil_div(k_blocks, mma::kThreads / 32)), groups = static_cast<unsigned>(ceil_div(num_rows, 8));
  stream.launch(quantise_, {.grid = {blocks, groups}, .block = {mma::kThreads}, .programmatic = overlap_}, args);
  return operand;
}

void E4M3Linears::multiply(Stream& stream, const Packed& weight, const ops::Buffer& packed, DType activation, const Operand& x, int64_t num_rows, Epilogue epilogue, void* out) const {
  const ops::LinearShape& shape = weight.shape();
  if (!ops::is_fp8(shape.scheme)) return wide_.multiply(stream, weight, packed, activation, x.plain, num_rows, epilogue, out);
  const mma::E4M3LinearArgs args{{weight.view(packed), epilogue, static_cast<int32_t>(num_rows), x.plain.x, x.plain.rows, out}, x.quantised};
  const bool blocks = takes_blocks(shape, num_rows);
  const size_t size = blocks ? 3 : num_rows <= 8 ? 0 : num_rows <= 16 ? 1 : 2;
  const int64_t rows = blocks ? mma::kBlockRows : int64_t{8} << size, features = blocks ? mma::kBlockFeatures : mma::kTileFeatures;
  const Kernels& kernels = shape.scheme == WeightScheme::kFp8Block ? block_ : whole_;
  stream.launch(kernels[size],
                {.grid = {static_cast<unsigned>(ceil_div(num_rows, rows)), static_cast<unsigned>(ceil_div(shape.out_features, features))},
                 .block = {mma::kThreads},
                 .shared_bytes = blocks ? mma::kBlockSharedBytes : 0u,
                 .programmatic = overlap_},
                args);
}

}  // namespace quern::cuda::e4m3
