#define ITEMS PORTABLE_ITEMS(64, 256)
#include "backends/opencl/numeric.clh"

#ifdef SIMD16
// x[i] = r(x[i] + r(sum of partials[i] in rank order)) for up to 8 ranks, 8 elements an item.
#define ADD(rank)                                                                                          \
  if (num_ranks > rank) {                                                                                  \
    FIND(const ushort, partial##rank);                                                                     \
    total += as_float8(convert_uint8(vload8(0, partial##rank + i)) << 16);                                 \
  }
PORTABLE __attribute__((reqd_work_group_size(ITEMS, 1, 1))) __kernel void combine(int num_ranks, PLACE(const ushort, partial0), PLACE(const ushort, partial1),
                                                                                  PLACE(const ushort, partial2), PLACE(const ushort, partial3), PLACE(const ushort, partial4),
                                                                                  PLACE(const ushort, partial5), PLACE(const ushort, partial6), PLACE(const ushort, partial7),
                                                                                  PLACE(ushort, x), long num_elements) {
  FIND(ushort, x);
  const long i = (long)get_global_id(0) * 8;
  if (i >= num_elements) return;
  float8 total = 0.0f;
  ADD(0) ADD(1) ADD(2) ADD(3) ADD(4) ADD(5) ADD(6) ADD(7)
  float sums[8];
  vstore8(total, 0, sums);
  for (int e = 0; e < 8; ++e) x[i + e] = narrow(widen(x[i + e]) + round_activation(sums[e]));
}
#else
// sum[i] = (first ? 0 : sum[i]) + partial[i]; after the last rank x[i] = r(x[i] + r(sum[i])).
__kernel void combine(PLACE(const activation_t, partial), PLACE(float, sum), PLACE(activation_t, x), int first, int last, long num_elements) {
  FIND(const activation_t, partial);
  FIND(float, sum);
  FIND(activation_t, x);
  const long i = (long)get_global_id(0);
  if (i >= num_elements) return;
  const float total = (first ? 0.0f : sum[i]) + widen(partial[i]);
  if (last)
    x[i] = narrow(widen(x[i]) + round_activation(total));
  else
    sum[i] = total;
}
#endif
