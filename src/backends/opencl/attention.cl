// q/k norm with rotary embedding and the KV write, and attention over the paged cache. The host defines the activation dtype and KV_E4M3 where the cache is e4m3.
#define ITEMS 64
#include "backends/opencl/numeric.clh"
#include "backends/opencl/step.clh"
#include "backends/opencl/kv.clh"
#include "backends/opencl/attention.clh"

#define MAX_HEAD_DIM 512

// values <- rotate(norm(values)); all items of the group.
void norm_and_rotate(__local float* values, int d, const __global float* factors, float eps, const __global int* position, const __global float* inv_freq,
                     const __global int* axis, int num_frequencies, float rope_scale, __local float* shared) {
  const int item = (int)get_local_id(0);
  float sum = 0.0f;
  for (int i = item; i < d; i += ITEMS) sum = fma(values[i], values[i], sum);
  const float scale = 1.0f / sqrt(group_sum(sum, shared) / (float)d + eps);
  for (int i = item; i < d; i += ITEMS) values[i] = round_activation(values[i] * scale * factors[i]);
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int i = item; i < num_frequencies; i += ITEMS) {
    const float angle = (float)position[axis[i]] * inv_freq[i];
    const float cosine = round_activation(cos(angle) * rope_scale), sine = round_activation(sin(angle) * rope_scale);
    const float a = values[i], b = values[i + num_frequencies];
    values[i] = round_activation(a * cosine - b * sine);
    values[i + num_frequencies] = round_activation(b * cosine + a * sine);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
}

// A group per projected row (axis 0, counted from first_row of the step) and head (axis 1): query heads first, then kv heads.
// q [., num_q_heads * 2 * head_dim]: per head query, then gate; k, v [., num_kv_heads * head_dim]; query, gate [rows of the step, num_q_heads, head_dim].
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void rotate_rows(
    int first_row, int num_q_heads, int num_kv_heads, int d, int num_frequencies, float eps, float rope_scale, PLACE(const activation_t, q), PLACE(const activation_t, k),
    PLACE(const activation_t, v), PLACE(const float, q_norm), PLACE(const float, k_norm), PLACE(const float, inv_freq), PLACE(const int, axis), PLACE(activation_t, query),
    PLACE(activation_t, gate), PLACE(const run_t, runs), PLACE(const int, row_runs), PLACE(const int, indices), PLACE(const int, positions), PLACE(const int, block_tables),
    int block_tables_stride, PLACE(kv_t, cache_k), PLACE(kv_t, cache_v), PLACE(const float, k_scale), PLACE(const float, v_scale)) {
  FIND(const activation_t, q);
  FIND(const activation_t, k);
  FIND(const activation_t, v);
  FIND(const float, q_norm);
  FIND(const float, k_norm);
  FIND(const float, inv_freq);
  FIND(const int, axis);
  FIND(activation_t, query);
  FIND(activation_t, gate);
  FIND(const run_t, runs);
  FIND(const int, row_runs);
  FIND(const int, indices);
  FIND(const int, positions);
  FIND(const int, block_tables);
  FIND(kv_t, cache_k);
  FIND(kv_t, cache_v);
  FIND(const float, k_scale);
  FIND(const float, v_scale);
  __local float values[MAX_HEAD_DIM], shared[ITEMS];
  const int item = (int)get_local_id(0), projected = (int)get_group_id(0), row = first_row + projected, head = (int)get_group_id(1);
  const bool is_query = head < num_q_heads;
  const int kv_head = head - num_q_heads;
  const long from = is_query ? ((long)projected * num_q_heads + head) * 2 * d : ((long)projected * num_kv_heads + kv_head) * d;
  for (int i = item; i < d; i += ITEMS) values[i] = widen(is_query ? q[from + i] : k[from + i]);
  barrier(CLK_LOCAL_MEM_FENCE);
  norm_and_rotate(values, d, is_query ? q_norm : k_norm, eps, positions + (long)row * 3, inv_freq, axis, num_frequencies, rope_scale, shared);
  if (is_query) {
    const long to = ((long)row * num_q_heads + head) * d;
    for (int i = item; i < d; i += ITEMS) {
      query[to + i] = narrow(values[i]);
      gate[to + i] = q[from + d + i];
    }
  } else if (indices[row] >= 0) {  // no padding
    const __global int* block_table = block_tables + (long)runs[row_runs[row]].slot * block_tables_stride;
    const long to = place_in_cache(block_table, indices[row], kv_head, num_kv_heads) * d;
    for (int i = item; i < d; i += ITEMS) {
      cache_k[to + i] = kv_of(values[i], scale_of_head(k_scale_memory == 0 ? 0 : k_scale, kv_head));
      cache_v[to + i] = kv_of(widen(v[from + i]), scale_of_head(v_scale_memory == 0 ? 0 : v_scale, kv_head));
    }
  }
}

// query . key
float dot_key(const __local float* query, const __global kv_t* key, int d) {
  float dot = 0.0f;
  for (int i = 0; i < d; ++i) dot = fma(query[i], kv_to_f32(key[i]), dot);
  return dot;
}

// A group per row (axis 0) and query head (axis 1). Parts of 512 keys from the sequence's start, each with its own maximum and sum, merged in order: a row's arithmetic
// depends on its own index alone. An item computes whole scores, then the values of dimensions item, item + ITEMS, ...
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void attention(int num_q_heads, int num_kv_heads, int d, int first_index, ATTENTION_PARAMETERS(activation_t, kv_heads)) {
  FIND_ATTENTION(activation_t, kv_heads);
  __local float query[MAX_HEAD_DIM], scores[KV_SPLIT], shared[ITEMS];
  const int item = (int)get_local_id(0), row = (int)get_group_id(0), head = (int)get_group_id(1);
  const long at = ((long)row * num_q_heads + head) * d;
  const int index = indices[row];
  const int kv_head = kv_heads[head];
  const __global int* block_table = block_tables + (index < 0 ? 0 : (long)runs[row_runs[row]].slot * block_tables_stride);
  const float score_scale = scale_of_head(k_scale_memory == 0 ? 0 : k_scale, kv_head) / sqrt((float)d);
  const float value_scale = scale_of_head(v_scale_memory == 0 ? 0 : v_scale, kv_head);
  for (int i = item; i < d; i += ITEMS) query[i] = widen(query_rows[at + i]);
  barrier(CLK_LOCAL_MEM_FENCE);

  float total[MAX_HEAD_DIM / ITEMS], largest = -INFINITY, sum = 0.0f;
  for (int c = 0; c < MAX_HEAD_DIM / ITEMS; ++c) total[c] = 0.0f;
  for (int part = first_index / KV_SPLIT * KV_SPLIT; part <= index; part += KV_SPLIT) {
    const int begin = max(part, first_index), end = min(part + KV_SPLIT, index + 1);
    float item_largest = -INFINITY;
    for (int j = begin + item; j < end; j += ITEMS) {
      const float score = score_scale * dot_key(query, cache_k + place_in_cache(block_table, j, kv_head, num_kv_heads) * d, d);
      scores[j - part] = score;
      item_largest = fmax(item_largest, score);
    }
    const float part_largest = group_max(item_largest, shared);
    float weights = 0.0f;
    for (int j = begin + item; j < end; j += ITEMS) {
      const float weight = exp(scores[j - part] - part_largest);
      scores[j - part] = weight;
      weights += weight;
    }
    const float part_sum = group_sum(weights, shared);  // also: all weights are written
    float values[MAX_HEAD_DIM / ITEMS];
    for (int c = 0; c < MAX_HEAD_DIM / ITEMS; ++c) values[c] = 0.0f;
    for (int j = begin; j < end; ++j) {
      const __global kv_t* value = cache_v + place_in_cache(block_table, j, kv_head, num_kv_heads) * d;
      const float weight = scores[j - part];
      for (int c = 0; c * ITEMS < d; ++c)
        if (c * ITEMS + item < d) values[c] = fma(weight, kv_to_f32(value[c * ITEMS + item]), values[c]);
    }
    const float now_largest = fmax(largest, part_largest), before = exp(largest - now_largest), now = exp(part_largest - now_largest);
    sum = sum * before + part_sum * now;
    for (int c = 0; c < MAX_HEAD_DIM / ITEMS; ++c) total[c] = total[c] * before + values[c] * now;
    largest = now_largest;
    barrier(CLK_LOCAL_MEM_FENCE);  // all scores are read
  }
  const float factor = sum > 0.0f ? value_scale / sum : sum;  // no key at all, or padding: 0; NaN stays NaN
  for (int c = 0; c * ITEMS < d; ++c) {
    const int i = c * ITEMS + item;
    if (i >= d) continue;
    const float gated = round_activation(total[c] * factor) * round_activation(sigmoid(widen(gate[at + i])));
    out[at + i] = index < 0 ? narrow(0.0f) : narrow(gated);
  }
}
