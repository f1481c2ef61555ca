// RMSNorm of rows, and the vectors of a checkpoint as the kernels read them.
#define ITEMS 64
#include "backends/opencl/numeric.clh"

// out = r(x * rsqrt(mean(x^2) + eps) * (weight + addend)), one group a row; row i of out begins at element i * out_stride.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void norm_rows(PLACE(const activation_t, x), PLACE(const float, weight), PLACE(activation_t, out), int width,
                                                                           long out_stride, float eps, float addend) {
  FIND(const activation_t, x);
  FIND(const float, weight);
  FIND(activation_t, out);
  __local float shared[ITEMS];
  const long at = (long)get_group_id(0) * width, out_at = (long)get_group_id(0) * out_stride;
  float sum = 0.0f;
  for (int i = (int)get_local_id(0); i < width; i += ITEMS) {
    const float value = widen(x[at + i]);
    sum = fma(value, value, sum);
  }
  const float factor = 1.0f / sqrt(group_sum(sum, shared) / (float)width + eps);
  for (int i = (int)get_local_id(0); i < width; i += ITEMS) out[out_at + i] = narrow(widen(x[at + i]) * factor * (weight[i] + addend));
}

// out[i] = source[i] + addend in f32; the source is of any dtype and rounded to bf16 first where that is asked for.
__kernel void widen_vector(PLACE(const uchar, source), int dtype, int rounds_to_bf16, float addend, PLACE(float, out), long num_elements) {
  FIND(const uchar, source);
  FIND(float, out);
  const long i = (long)get_global_id(0);
  if (i >= num_elements) return;
  const float x = load_any(source, dtype, i);
  out[i] = (rounds_to_bf16 ? round_bf16(x) : x) + addend;
}
