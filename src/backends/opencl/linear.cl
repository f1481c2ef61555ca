// y = W x for every weight scheme, with f32 arithmetic. LANES work-items compute one output feature for up to ROWS rows: an item takes 16 elements of the weight at
// a time and adds its products in the order of k, then the 16 sums of an item and the items are added in order. So a row's bits depend on the weight's shape only.
// The host defines the weight's dtype: WEIGHT_F32, WEIGHT_BF16, WEIGHT_F16 or WEIGHT_E4M3.
#define ITEMS 64
#include "backends/opencl/numeric.clh"
#include "backends/opencl/weight.clh"
#include "backends/opencl/epilogue.clh"

#define LANES 16
#define FEATURES 4
#define ROWS 4
#define PIECE 16

#ifdef WEIGHT_E4M3
typedef uchar weight_t;
float weight_to_f32(weight_t x) { return e4m3_to_f32(x); }
float16 load_piece(const __global weight_t* p) {
  const uint16 code = convert_uint16(vload16(0, p)), magnitude = code & 0x7fu;
  const float16 normal = as_float16((magnitude << 20) + (120u << 23)), small = convert_float16(magnitude) * 0x1p-9f;
  const float16 value = select(normal, small, as_int16(magnitude) < 8);
  const uint16 bits = as_uint16(value) | ((code & 0x80u) << 24);
  return as_float16(select(bits, (uint16)(0x7fc00000u), as_int16(magnitude) == 0x7f));
}
#elif defined(WEIGHT_BF16)
typedef ushort weight_t;
float weight_to_f32(weight_t x) { return bf16_to_f32(x); }
float16 load_piece(const __global weight_t* p) { return as_float16(convert_uint16(vload16(0, p)) << 16); }
#elif defined(WEIGHT_F16)
typedef ushort weight_t;
float weight_to_f32(weight_t x) { return f16_to_f32(x); }
float16 load_piece(const __global weight_t* p) { return vload_half16(0, (const __global half*)p); }
#else
typedef float weight_t;
float weight_to_f32(weight_t x) { return x; }
float16 load_piece(const __global weight_t* p) { return vload16(0, p); }
#endif

#ifdef ACTIVATION_BF16
float16 load_activations(const __global activation_t* p) { return as_float16(convert_uint16(vload16(0, p)) << 16); }
#else
float16 load_activations(const __global activation_t* p) { return vload16(0, p); }
#endif

float sum_of(float16 v) {
  const float8 eight = v.lo + v.hi;
  const float4 four = eight.lo + eight.hi;
  const float2 two = four.lo + four.hi;
  return two.x + two.y;
}

// x [., in_features]; x_rows i32 [num_rows] names the row of x of each row, -1: zeros; null: the row itself. out [num_rows, out_features].
// Groups: features / FEATURES x rows / ROWS; items: LANES x FEATURES.
__kernel __attribute__((reqd_work_group_size(LANES, FEATURES, 1))) void linear(PLACE(const weight_t, weight), PLACE(const float, scale), PLACE(const long, offsets), int scales,
                                                                               long out_features, long in_features, PLACE(const activation_t, x), PLACE(const int, x_rows),
                                                                               int num_rows, PLACE(uchar, out), int epilogue) {
  FIND(const weight_t, weight);
  FIND(const float, scale);
  FIND(const long, offsets);
  FIND(const activation_t, x);
  FIND(const int, x_rows);
  FIND(uchar, out);
  __local float shared[FEATURES][LANES][ROWS];
  const int lane = (int)get_local_id(0), local_feature = (int)get_local_id(1);
  const long feature = (long)get_group_id(0) * FEATURES + local_feature, first_row = (long)get_group_id(1) * ROWS;
  const bool by_block = scales == SCALES_BLOCK;
  float sums[ROWS] = {0.0f, 0.0f, 0.0f, 0.0f};
  long x_at[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    const long row = first_row + r >= num_rows ? -1 : x_rows_memory == 0 ? first_row + r : x_rows[first_row + r];
    x_at[r] = row < 0 ? -1 : row * in_features;
  }
  if (feature < out_features) {
    const __global weight_t* w = weight + feature * in_features;
    const long whole = in_features / PIECE * PIECE;
    float16 parts[ROWS];
    for (int r = 0; r < ROWS; ++r) parts[r] = 0.0f;
    for (long k = lane * PIECE; k < whole; k += LANES * PIECE) {
      float16 values = load_piece(w + k);
      if (by_block) {
        const float first = scale_at(scales, scale, offsets, in_features, feature, k), last = scale_at(scales, scale, offsets, in_features, feature, k + PIECE - 1);
        const int border = (int)(SCALE_BLOCK - (offsets[1] + k) % SCALE_BLOCK);  // elements before the next block
        const int16 i = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        values *= select((float16)(last), (float16)(first), i < border);
      }
      for (int r = 0; r < ROWS; ++r)
        if (x_at[r] >= 0) parts[r] = fma(values, load_activations(x + x_at[r] + k), parts[r]);
    }
    for (int r = 0; r < ROWS; ++r) sums[r] = sum_of(parts[r]);
    for (long k = whole + lane; k < in_features; k += LANES) {  // what is no whole piece
      float value = weight_to_f32(w[k]);
      if (by_block) value *= scale_at(scales, scale, offsets, in_features, feature, k);
      for (int r = 0; r < ROWS; ++r)
        if (x_at[r] >= 0) sums[r] = fma(value, widen(x[x_at[r] + k]), sums[r]);
    }
  }
  for (int r = 0; r < ROWS; ++r) shared[local_feature][lane][r] = sums[r];
  barrier(CLK_LOCAL_MEM_FENCE);
  if (lane >= ROWS || feature >= out_features || first_row + lane >= num_rows) return;
  float y = 0.0f;
  for (int l = 0; l < LANES; ++l) y += shared[local_feature][l][lane];
  if (scales == SCALES_CHANNEL || scales == SCALES_TENSOR) y *= scale_at(scales, scale, offsets, in_features, feature, 0);
  finish(epilogue, out, (first_row + lane) * out_features + feature, y);
}
