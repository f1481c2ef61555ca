// Attention for heads of 256 on sub-groups of 16: the query heads of a kv head share every key and value that is read. A sub-group computes the scores of a key, a lane
// 16 elements of it; then an item owns one dimension of the values. Parts of 512 keys from the sequence's start have their own maximum and sum.
#define ITEMS 256
#include "backends/opencl/numeric.clh"
#include "backends/opencl/step.clh"
#include "backends/opencl/kv.clh"
#include "backends/opencl/attention.clh"
#include "backends/opencl/lanes.clh"

#define D 256
#define GROUPS 16   // sub-groups
#define MAX_HEADS 8  // query heads of a kv head
#define PART (D + 2)  // values, maximum, sum

float16 load_keys(const __global kv_t* p) {
#if defined(KV_E4M3)
  const uint16 code = convert_uint16(vload16(0, p)), magnitude = code & 0x7fu;
  const float16 normal = as_float16((magnitude << 20) + (120u << 23)), small = convert_float16(magnitude) * 0x1p-9f;
  const float16 value = select(normal, small, as_int16(magnitude) < 8);
  return as_float16(select(as_uint16(value) | ((code & 0x80u) << 24), (uint16)(0x7fc00000u), as_int16(magnitude) == 0x7f));
#elif defined(ACTIVATION_BF16)
  return as_float16(convert_uint16(vload16(0, p)) << 16);
#else
  return vload16(0, p);
#endif
}
float dot16(float16 a, float16 b) {
  const float16 products = a * b;
  const float8 eight = products.lo + products.hi;
  const float4 four = eight.lo + eight.hi;
  const float2 two = four.lo + four.hi;
  return two.x + two.y;
}

float gated(float value, float gate) { return round_activation(value) * round_activation(sigmoid(gate)); }

// Merges the shares of a row and query head, in order; shares without a key have no maximum.
float merged(const __global float* from, int num_shares, int item) {
  float total = 0.0f, largest = -INFINITY, sum = 0.0f;
  for (int share = 0; share < num_shares; ++share) {
    const __global float* p = from + (long)share * PART;
    if (p[D] == -INFINITY) continue;
    const float now_largest = fmax(largest, p[D]), before = exp(largest - now_largest), now = exp(p[D] - now_largest);
    sum = sum * before + p[D + 1] * now;
    total = total * before + p[item] * now;
    largest = now_largest;
  }
  return sum > 0.0f ? total / sum : sum;  // no key at all, or padding: 0; NaN stays NaN
}

// A group per row from first_row on (axis 0), kv head (axis 1) and share of the parts (axis 2): share z of n takes the parts z, z + n, ... in order. With one share the
// group writes out, otherwise `shares` f32 [rows, num_q_heads, n, PART], and the last one of a row and kv head to come, which `arrivals` [rows, num_kv_heads] counts from zero
// to zero, merges them. first_head i32 [num_kv_heads + 1] names the query heads of each kv head, which are consecutive.
__attribute__((intel_reqd_sub_group_size(16))) __attribute__((reqd_work_group_size(ITEMS, 1, 1))) __kernel void attention_shares(
    int first_row, int num_q_heads, int num_kv_heads, int first_index, ATTENTION_PARAMETERS(activation_t, first_heads), PLACE(float, shares), PLACE(atomic_int, arrivals)) {
  FIND_ATTENTION(activation_t, first_heads);
  FIND(float, shares);
  FIND(atomic_int, arrivals);
  __local float scores[MAX_HEADS][KV_SPLIT], query[MAX_HEADS][D], shared[ITEMS];
  const int item = (int)get_local_id(0), group = item / 16, lane = (int)get_sub_group_local_id();
  const int local_row = (int)get_group_id(0), row = first_row + local_row, kv_head = (int)get_group_id(1), share = (int)get_group_id(2), num_shares = (int)get_num_groups(2);
  const int head0 = first_heads[kv_head], num_heads = first_heads[kv_head + 1] - head0;
  const int index = indices[row];
  const __global int* block_table = block_tables + (index < 0 ? 0 : (long)runs[row_runs[row]].slot * block_tables_stride);
  const float score_scale = scale_of_head(k_scale_memory == 0 ? 0 : k_scale, kv_head) * 0.0625f;  // 256^-1/2
  const float value_scale = scale_of_head(v_scale_memory == 0 ? 0 : v_scale, kv_head);
  for (int h = 0; h < num_heads; ++h) query[h][item] = widen(query_rows[((long)row * num_q_heads + head0 + h) * D + item]);
  barrier(CLK_LOCAL_MEM_FENCE);
  float total[MAX_HEADS], largest[MAX_HEADS], sum[MAX_HEADS];
  for (int h = 0; h < MAX_HEADS; ++h) {
    total[h] = 0.0f;
    largest[h] = -INFINITY;
    sum[h] = 0.0f;
  }
  for (int part = (first_index / KV_SPLIT + share) * KV_SPLIT; part <= index; part += KV_SPLIT * num_shares) {
    const int begin = max(part, first_index), end = min(part + KV_SPLIT, index + 1);
    for (int first = begin; first < end; first += GROUPS) {  // all sub-groups take the same number of turns
      const int j = min(first + group, end - 1);
      const float16 key = load_keys(cache_k + place_in_cache(block_table, j, kv_head, num_kv_heads) * D + lane * 16);
      for (int h = 0; h < num_heads; ++h) {
        const float score = score_scale * lanes_sum(dot16(vload16(0, query[h] + lane * 16), key), lane);
        if (lane == 0) scores[h][j - part] = score;
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    float part_largest[MAX_HEADS], part_sum[MAX_HEADS], values[MAX_HEADS];
    UNROLL
    for (int h = 0; h < MAX_HEADS; ++h) {
      float mine = -INFINITY;
      for (int j = begin + item; j < end && h < num_heads; j += ITEMS) mine = fmax(mine, scores[h][j - part]);
      part_largest[h] = group_max(mine, shared);
      float weights = 0.0f;
      for (int j = begin + item; j < end && h < num_heads; j += ITEMS) {
        const float weight = exp(scores[h][j - part] - part_largest[h]);
        scores[h][j - part] = weight;
        weights += weight;
      }
      part_sum[h] = group_sum(weights, shared);  // also: all weights are written
      values[h] = 0.0f;
    }
    for (int j = begin; j < end; ++j) {
      const float value = kv_to_f32(cache_v[place_in_cache(block_table, j, kv_head, num_kv_heads) * D + item]);
      UNROLL
      for (int h = 0; h < MAX_HEADS; ++h) values[h] = fma(scores[h][j - part], value, values[h]);
    }
    UNROLL
    for (int h = 0; h < MAX_HEADS; ++h) {
      if (h >= num_heads) continue;
      const float now_largest = fmax(largest[h], part_largest[h]), before = exp(largest[h] - now_largest), now = exp(part_largest[h] - now_largest);
      sum[h] = sum[h] * before + part_sum[h] * now;
      total[h] = total[h] * before + values[h] * now;
      largest[h] = now_largest;
    }
    barrier(CLK_LOCAL_MEM_FENCE);  // all scores are read
  }
  __local int arrived;
  UNROLL
  for (int h = 0; h < MAX_HEADS; ++h) {
    if (h >= num_heads) continue;
    const int head = head0 + h;
    if (num_shares > 1) {
      __global float* to = shares + (((long)local_row * num_q_heads + head) * num_shares + share) * PART;
      to[item] = total[h] * value_scale;
      if (item == 0) {
        to[D] = largest[h];
        to[D + 1] = sum[h];
      }
    } else {
      const long at = ((long)row * num_q_heads + head) * D + item;
      const float factor = sum[h] > 0.0f ? value_scale / sum[h] : sum[h];
      out[at] = index < 0 ? narrow(0.0f) : narrow(gated(total[h] * factor, widen(gate[at])));
    }
  }
  atomic_work_item_fence(CLK_GLOBAL_MEM_FENCE, memory_order_release, memory_scope_device);  // the item's part of the shares is seen before its group is counted
  barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
  __global atomic_int* count = arrivals + (long)local_row * num_kv_heads + kv_head;
  if (item == 0) arrived = num_shares == 1 ? 0 : atomic_fetch_add_explicit(count, 1, memory_order_acq_rel, memory_scope_device);
  barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
  if (num_shares == 1 || arrived != num_shares - 1) return;
  atomic_work_item_fence(CLK_GLOBAL_MEM_FENCE, memory_order_acquire, memory_scope_device);
  if (item == 0) atomic_store_explicit(count, 0, memory_order_relaxed, memory_scope_device);
  for (int h = 0; h < num_heads; ++h) {
    const long at = ((long)row * num_q_heads + head0 + h) * D + item;
    const float value = index < 0 ? 0.0f : merged(shares + ((long)local_row * num_q_heads + head0 + h) * num_shares * PART, num_shares, item);
    out[at] = index < 0 ? narrow(0.0f) : narrow(gated(value, widen(gate[at])));
  }
}
