#include "backends/opencl/numeric.clh"

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
