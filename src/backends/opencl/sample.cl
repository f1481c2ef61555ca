// One group a run; its draws follow each other, since each sees the counts of those before. Every sum is over integers or in a fixed order. Nothing is sorted: the k-th
// token, and the last one of top-p, are found digit by digit of a key that orders tokens as (logit, lowest id).
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#define ITEMS PORTABLE_ITEMS(256, 1024)
#include "backends/opencl/numeric.clh"

#define MAX_STOP_IDS 64      // ops::kMaxStopIds
#define MAX_LOGIT_BIAS 1024  // ops::kMaxLogitBias
#define MAX_LOGPROBS 20      // ops::kMaxLogprobs
#define MAX_CANDIDATES 64    // ops::kMaxCandidates
#define GRID 64              // ops::kGrid
#define GREEDY_BELOW 1e-5f   // SamplingParams::greedy()
#define LOGPROB_FLOOR -9999.0f  // JSON has no infinity

// ops::SlotSampling
typedef struct {
  float temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty;
  int top_k, num_logprobs, min_tokens, num_generated, num_stop_ids, num_logit_bias;
  ulong seed;
  int stop_ids[MAX_STOP_IDS];
  int bias_ids[MAX_LOGIT_BIAS];
  float bias_values[MAX_LOGIT_BIAS];
} sampling_t;

// ops::SampleRun
typedef struct {
  int slot, num_rows, first_logits_row, verify, first_mask_row;
} sample_run_t;

// Larger keys are more likely tokens; of equal logits the lowest id has the largest.
ulong key_of(float logit, int id) {
  const uint bits = as_uint(logit + 0.0f);  // -0 becomes 0
  const uint ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return ((ulong)ordered << 32) | (0xffffffffu - (uint)id);
}
int id_of(ulong key) { return (int)(0xffffffffu - (uint)key); }

// base/hash.h and ops/random.h
ulong mix64(ulong z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ul;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebul;
  return z ^ (z >> 31);
}
ulong hash_combine(ulong a, ulong b) { return mix64(a + 0x9e3779b97f4a7c15ul + mix64(b)); }
double uniform_of(ulong key, int token) { return ((double)(hash_combine(key, (ulong)(uint)token) >> 12) + 0.5) * 0x1p-52; }

// What the items of a group share. A digit's weight is a sum of up to 2^18 numbers below 2^48, kept in four limbs of 12 bits.
#define LIMBS 4
typedef struct {
  uint weights[LIMBS][256];
  uint counts[256];
  ulong keys[ITEMS];
  double sums[ITEMS];
  ulong chosen, rest;
  float saved[MAX_LOGIT_BIAS];
} shared_t;

// The largest key of the group, in every item; 0 where there is none.
ulong largest_key(ulong key, __local shared_t* s) {
  const int item = (int)get_local_id(0);
  s->keys[item] = key;
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int half_size = ITEMS / 2; half_size > 0; half_size /= 2) {
    if (item < half_size) s->keys[item] = max(s->keys[item], s->keys[item + half_size]);
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  const ulong largest = s->keys[0];
  barrier(CLK_LOCAL_MEM_FENCE);
  return largest;
}
double total_of(double x, __local shared_t* s) {
  const int item = (int)get_local_id(0);
  s->sums[item] = x;
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int half_size = ITEMS / 2; half_size > 0; half_size /= 2) {
    if (item < half_size) s->sums[item] += s->sums[item + half_size];
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  const double sum = s->sums[0];
  barrier(CLK_LOCAL_MEM_FENCE);
  return sum;
}

// The logits of one draw: penalties, mask and stop ids act when a logit is read, the bias was added in place.
typedef struct {
  const __global float* logits;  // of ids [begin, end)
  int begin, end;
  const __global sampling_t* params;
  const __global int* counts;
  const __global uchar* in_prompt;
  const __global uint* mask;
  const __global int* before;  // [num_before]: tokens of the step that `counts` does not hold yet
  int num_before;
  bool masked, penalties, too_early;
} row_t;

// -infinity: not allowed.
float logit_at(const row_t* row, int id) {
  float x = row->logits[id - row->begin];
  if (row->penalties) {
    int count = row->counts[id];
    for (int i = 0; i < row->num_before; ++i) count += row->before[i] == id ? 1 : 0;
    if (count != 0 || row->in_prompt[id] != 0) {
      x = x > 0.0f ? x / row->params->repetition_penalty : x * row->params->repetition_penalty;
      if (count > 0) x = x - (row->params->frequency_penalty * (float)count + row->params->presence_penalty);
    }
  }
  if (row->masked && ((row->mask[id / 32] >> (id % 32)) & 1u) == 0) x = -INFINITY;
  if (row->too_early)
    for (int i = 0; i < row->params->num_stop_ids; ++i)
      if (row->params->stop_ids[i] == id) x = -INFINITY;
  return x;
}

// The smallest key of the `k` largest; 0 where no more than k tokens are allowed.
ulong kth_key(const row_t* row, long k, __local shared_t* s) {
  const int item = (int)get_local_id(0);
  ulong prefix = 0, known = 0;
  long wanted = k;
  bool found = false, all = false;
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int i = item; i < 256; i += ITEMS) s->counts[i] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int id = row->begin + item; id < row->end && !found && !all; id += ITEMS) {
      const float x = logit_at(row, id);
      const ulong key = key_of(x, id);
      if (x != -INFINITY && (key & known) == prefix) atomic_add(&s->counts[(key >> shift) & 255], 1u);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (item == 0 && !found && !all) {
      long above = 0;
      int digit = 255;
      while (digit >= 0 && above + s->counts[digit] < wanted) above += s->counts[digit--];
      s->chosen = digit < 0 ? 256 : (ulong)digit;
      s->rest = (ulong)(wanted - above);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (!found && !all) {
      all = s->chosen == 256;
      if (!all) {
        prefix |= s->chosen << shift;
        known |= (ulong)255 << shift;
        wanted = (long)s->rest;
        found = s->counts[s->chosen] == s->rest;  // the whole digit belongs to them
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  return all ? 0 : prefix;
}

// Probability relative to the best token's, in units of 2^-44.
ulong weight_of(float x, float best, float temperature) { return (ulong)((double)exp((x - best) / temperature) * 0x1p44); }

// What a nucleus has to hold, of the weights of all.
ulong wanted_weight(float top_p, ulong all) {
  const double part = ceil((double)top_p * (double)all);
  return part < 1 ? 1 : (ulong)part;
}

// The smallest key of the shortest prefix, most likely first, of the keys from `lowest` on that holds top_p of their probability.
ulong top_p_key(const row_t* row, ulong lowest, float best, __local shared_t* s) {
  const int item = (int)get_local_id(0);
  ulong prefix = 0, known = 0, wanted = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int i = item; i < 256; i += ITEMS)
      for (int limb = 0; limb < LIMBS; ++limb) s->weights[limb][i] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int id = row->begin + item; id < row->end; id += ITEMS) {
      const float x = logit_at(row, id);
      const ulong key = key_of(x, id);
      if (x == -INFINITY || key < lowest || (key & known) != prefix) continue;
      const ulong weight = weight_of(x, best, row->params->temperature);
      for (int limb = 0; limb < LIMBS; ++limb) atomic_add(&s->weights[limb][(key >> shift) & 255], (uint)(weight >> (12 * limb)) & 4095u);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (item == 0) {
      ulong all = 0;
      for (int i = 0; i < 256; ++i)
        for (int limb = 0; limb < LIMBS; ++limb) all += (ulong)s->weights[limb][i] << (12 * limb);
      if (shift == 56) wanted = wanted_weight(row->params->top_p, all);
      ulong above = 0;
      int digit = 255;
      for (; digit > 0; --digit) {
        ulong weight = 0;
        for (int limb = 0; limb < LIMBS; ++limb) weight += (ulong)s->weights[limb][digit] << (12 * limb);
        if (above + weight >= wanted) break;
        above += weight;
      }
      s->chosen = (ulong)digit;
      s->rest = wanted - above;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    prefix |= s->chosen << shift;
    known |= (ulong)255 << shift;
    wanted = s->rest;
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  return prefix;
}

// The best token, in every item; 0: none is allowed.
ulong first_key(const row_t* row, __local shared_t* s) {
  ulong mine = 0;
  for (int id = row->begin + (int)get_local_id(0); id < row->end; id += ITEMS) {
    const float x = logit_at(row, id);
    if (x != -INFINITY) mine = max(mine, key_of(x, id));
  }
  return largest_key(mine, s);
}

// Gumbel-max over the tokens that one item offers.
typedef struct {
  ulong key;
  float temperature, best;  // a score that some token has
  ulong drawn;              // the best score and its token
} chance_t;
chance_t chance_of(const __global sampling_t* p, long index) {
  chance_t chance = {hash_combine(hash_combine(0, p->seed), (ulong)index), p->temperature, -INFINITY, 0};
  return chance;
}
void offer(chance_t* chance, float x, int id) {
  const float scaled = x / chance->temperature;
  const double u = uniform_of(chance->key, id);
  // The variate is at most -log(1 - u), and e^x <= (1 - x / 8)^-8 for x < 0: most tokens lose without a logarithm.
  const double ahead = (double)chance->best - (double)scaled;
  if (ahead > 0) {
    double bound = 1.0 + ahead / 8;
    bound *= bound;
    bound *= bound;
    if ((1.0 - u) * bound * bound > 1.001) return;
  }
  const float score = scaled + (float)(-log(-log(u)));
  chance->best = fmax(chance->best, score);
  chance->drawn = max(chance->drawn, key_of(score, id));
}
// The best score and its token of those with the key `lowest_key`, and the logit `lowest`, or better; of none where not `random`.
ulong gumbel_key(const row_t* row, bool random, ulong lowest_key, float lowest, long index, __local shared_t* s) {
  chance_t chance = chance_of(row->params, index);
  for (int id = row->begin + (int)get_local_id(0); id < row->end && random; id += ITEMS) {
    const float x = logit_at(row, id);
    if (x != -INFINITY && x >= lowest && key_of(x, id) >= lowest_key) offer(&chance, x, id);
  }
  return largest_key(chance.drawn, s);
}

// Below this logit min-p drops a token.
float lowest_logit(const __global sampling_t* p, float best) { return p->min_p > 0.0f ? best + p->temperature * (float)log((double)p->min_p) : -INFINITY; }

// The token drawn, in every item; -1: none is allowed.
int draw_token(const row_t* row, long index, __local shared_t* s) {
  const __global sampling_t* p = row->params;
  const ulong first = first_key(row, s);
  const bool random = first != 0 && p->temperature >= GREEDY_BELOW;
  const float best = random ? logit_at(row, id_of(first)) : 0.0f;
  ulong lowest_key = 0;
  if (random && p->top_k > 0 && p->top_k < row->end) lowest_key = kth_key(row, p->top_k, s);
  if (random && p->top_p < 1.0f) lowest_key = top_p_key(row, lowest_key, best, s);
  const ulong drawn = gumbel_key(row, random, lowest_key, lowest_logit(p, best), index, s);
  if (first == 0) return -1;
  if (!random) return id_of(first);
  return drawn == 0 ? -1 : id_of(drawn);
}

// Log-probabilities of the whole raw row of n: the chosen token's, then the most likely ones'. An empty row writes nothing.
void write_logprobs(const __global float* row, int n, int token, int num_top, __global float* values, __global int* ids, __global int* rank_out, __local shared_t* s) {
  const int item = (int)get_local_id(0);
  const bool writes = item == 0 && n > 0;
  ulong mine = 0;
  for (int id = item; id < n; id += ITEMS) mine = max(mine, key_of(row[id], id));
  ulong top = largest_key(mine, s);
  const float best = n > 0 ? row[id_of(top)] : 0.0f, chosen = n > 0 ? row[token] : 0.0f;
  double weights = 0, before = 0;
  for (int id = item; id < n; id += ITEMS) {
    weights += (double)exp(row[id] - best);
    before += row[id] > chosen || (row[id] == chosen && id < token) ? 1.0 : 0.0;
  }
  const double log_sum = (double)best + log(total_of(weights, s));
  const double rank = 1.0 + total_of(before, s);
  if (writes) {
    *rank_out = (int)rank;
    values[0] = fmax((float)((double)chosen - log_sum), LOGPROB_FLOOR);
    ids[0] = token;
  }
  const int count = min(min(num_top, MAX_LOGPROBS), n);
  for (int i = 0; i < count; ++i) {
    if (writes) {
      values[1 + i] = fmax((float)((double)row[id_of(top)] - log_sum), LOGPROB_FLOOR);
      ids[1 + i] = id_of(top);
    }
    mine = 0;
    for (int id = item; id < n; id += ITEMS) {  // the next smaller key
      const ulong key = key_of(row[id], id);
      if (key < top) mine = max(mine, key);
    }
    top = largest_key(mine, s);
  }
}

bool is_stop(const __global sampling_t* params, int token) {
  for (int i = 0; i < params->num_stop_ids; ++i)
    if (params->stop_ids[i] == token) return true;
  return false;
}

// By one item, when a run has drawn its `tokens`.
void advance(sample_run_t run, bool verify, bool failed, int num_tokens, int cursor, __global sampling_t* params, __global int* counts, const __global int* tokens, __global int* num_sampled,
             __global int* non_finite, __global int* cursors, __global int* boundaries, __global int* last_tokens) {
  if (failed) {  // what was drawn before the bad row is taken back: the request fails as a whole
    for (int i = 0; i < num_tokens; ++i) --counts[tokens[i]];
    params->num_generated -= num_tokens;
    num_tokens = 0;
  }
  *num_sampled = num_tokens;
  *non_finite = failed ? 1 : 0;
  if (run.slot < 0) return;
  if (num_tokens > 0) last_tokens[run.slot] = tokens[num_tokens - 1];
  const int after = cursor + (verify ? num_tokens : run.num_rows);
  boundaries[run.slot] = (verify ? cursor : after) / GRID * GRID;  // where gdn_mix has left the state
  cursors[run.slot] = after;
}

PORTABLE __attribute__((reqd_work_group_size(ITEMS, 1, 1))) __kernel void sample(int vocab, int num_text_tokens, int k_max, int drafts_stride, PLACE(const sample_run_t, runs),
                                                                        PLACE(float, logits), PLACE(const uint, masks), PLACE(sampling_t, all_params), PLACE(int, all_counts),
                                                                        PLACE(const uchar, in_prompt), PLACE(int, cursors), PLACE(int, boundaries), PLACE(int, last_tokens),
                                                                        PLACE(const int, all_drafts), PLACE(int, tokens), PLACE(int, num_sampled), PLACE(int, non_finite),
                                                                        PLACE(float, logprobs), PLACE(int, logprob_ids), PLACE(int, chosen_rank)) {
  FIND(const sample_run_t, runs);
  FIND(float, logits);
  FIND(const uint, masks);
  FIND(sampling_t, all_params);
  FIND(int, all_counts);
  FIND(const uchar, in_prompt);
  FIND(int, cursors);
  FIND(int, boundaries);
  FIND(int, last_tokens);
  FIND(const int, all_drafts);
  FIND(int, tokens);
  FIND(int, num_sampled);
  FIND(int, non_finite);
  FIND(float, logprobs);
  FIND(int, logprob_ids);
  FIND(int, chosen_rank);
  __local shared_t s;
  const long number = (long)get_group_id(0), per_run = k_max + 1;
  const int item = (int)get_local_id(0);
  const sample_run_t run = runs[number];
  const bool is_run = run.slot >= 0;
  const long slot = is_run ? run.slot : 0;
  __global sampling_t* params = all_params + slot;
  __global int* counts = all_counts + slot * vocab;
  const __global int* drafts = all_drafts + slot * drafts_stride;
  const int cursor = cursors[slot];
  const bool verify = run.first_logits_row >= 0 && run.verify != 0;
  const int num_draws = !is_run || run.first_logits_row < 0 ? 0 : verify ? run.num_rows : 1;
  const int synthetic = run.verify - 2;  // ops::kSyntheticAcceptance: drafts that count as accepted; below 0: those that agree
  barrier(CLK_GLOBAL_MEM_FENCE);         // every item has read the cursor

  int num_tokens = 0;
  bool failed = false, ended = false;
  for (int draw = 0; draw < num_draws && !ended; ++draw) {
    __global float* row_logits = logits + (long)(run.first_logits_row + draw) * vocab;
    ulong bad = 0;
    for (int id = item; id < vocab; id += ITEMS)
      if ((as_uint(row_logits[id]) & 0x7fffffffu) >= 0x7f800000u) bad = 1;
    // Barriers stand in no branch here: a row that is not finite is one without tokens (PoCL 6.0 miscompiles the branch).
    const bool finite = largest_key(bad, &s) == 0;
    if (item == 0 && finite)
      for (int i = 0; i < params->num_logit_bias; ++i)
        if (params->bias_ids[i] >= 0 && params->bias_ids[i] < num_text_tokens) {
          s.saved[i] = row_logits[params->bias_ids[i]];
          row_logits[params->bias_ids[i]] = s.saved[i] + params->bias_values[i];
        }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    row_t row;
    row.logits = row_logits;
    row.begin = 0;
    row.end = finite ? num_text_tokens : 0;
    row.num_before = 0;
    row.params = params;
    row.counts = counts;
    row.in_prompt = in_prompt + slot * vocab;
    row.masked = run.first_mask_row >= 0;
    row.mask = masks + (row.masked ? (long)(run.first_mask_row + draw) * ((vocab + 31) / 32) : 0);
    row.penalties = params->presence_penalty != 0.0f || params->frequency_penalty != 0.0f || params->repetition_penalty != 1.0f;
    row.too_early = params->num_generated < params->min_tokens && params->num_stop_ids > 0;
    const int token = draw_token(&row, (long)cursor + (verify ? draw + 1 : run.num_rows), &s);
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (item == 0 && finite)
      for (int i = params->num_logit_bias - 1; i >= 0; --i)  // backwards: an id may be named twice
        if (params->bias_ids[i] >= 0 && params->bias_ids[i] < num_text_tokens) row_logits[params->bias_ids[i]] = s.saved[i];
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    failed = token < 0;
    const long entry = number * per_run + draw, width = 1 + MAX_LOGPROBS;
    write_logprobs(row_logits, failed || params->num_logprobs < 0 ? 0 : vocab, token, params->num_logprobs, logprobs + entry * width, logprob_ids + entry * width,
                   chosen_rank + entry, &s);
    ended = failed || is_stop(params, token) || (draw + 1 < num_draws && (synthetic >= 0 ? draw >= synthetic : drafts[draw] != token));
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (item == 0 && !failed) {
      tokens[number * per_run + num_tokens] = token;
      ++counts[token];
      ++params->num_generated;
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (!failed) ++num_tokens;
  }
  if (item == 0) advance(run, verify, failed, num_tokens, cursor, params, counts, tokens + number * per_run, num_sampled + number, non_finite + number, cursors, boundaries, last_tokens);
}

// Candidates of a part of the vocabulary; a group a (run, draw).
PORTABLE __attribute__((reqd_work_group_size(ITEMS, 1, 1))) __kernel void sample_candidates(int vocab, int num_text_tokens, int first_id, int width, int drafts_stride, int num_candidates,
                                                                                   PLACE(const sample_run_t, runs), PLACE(float, logits), PLACE(const uint, masks),
                                                                                   PLACE(const sampling_t, all_params), PLACE(const int, all_counts), PLACE(const uchar, in_prompt),
                                                                                   PLACE(const int, cursors), PLACE(const int, all_drafts), PLACE(ulong, candidates)) {
  FIND(const sample_run_t, runs);
  FIND(float, logits);
  FIND(const uint, masks);
  FIND(const sampling_t, all_params);
  FIND(const int, all_counts);
  FIND(const uchar, in_prompt);
  FIND(const int, cursors);
  FIND(const int, all_drafts);
  FIND(ulong, candidates);
  __local shared_t s;
  __local ulong listed[MAX_CANDIDATES];
  __local uint num_listed;
  const int item = (int)get_local_id(0), draw = (int)get_group_id(1);
  const sample_run_t run = runs[get_group_id(0)];
  const bool verify = run.first_logits_row >= 0 && run.verify != 0;
  // Barriers stand in no branch: a draw that there is not is a row without tokens.
  const bool is_draw = run.slot >= 0 && run.first_logits_row >= 0 && draw < (verify ? run.num_rows : 1);
  const long slot = is_draw ? run.slot : 0, row_number = is_draw ? run.first_logits_row + draw : 0;
  const __global sampling_t* params = all_params + slot;
  __global float* row_logits = logits + row_number * width;
  const int end = min(first_id + width, num_text_tokens);
  ulong bad = 0;
  for (int i = item; i < width && is_draw; i += ITEMS)
    if ((as_uint(row_logits[i]) & 0x7fffffffu) >= 0x7f800000u) bad = 1;
  const bool finite = largest_key(bad, &s) == 0;
  if (item == 0) {
    num_listed = 0;
    for (int i = 0; i < params->num_logit_bias && is_draw; ++i) {
      const int id = params->bias_ids[i];
      if (id >= first_id && id < end) row_logits[id - first_id] += params->bias_values[i];
    }
  }
  barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
  row_t row;
  row.logits = row_logits;
  row.begin = first_id;
  row.end = finite && is_draw ? end : first_id;
  row.params = params;
  row.counts = all_counts + slot * vocab;
  row.in_prompt = in_prompt + slot * vocab;
  row.masked = run.first_mask_row >= 0;
  row.mask = masks + (row.masked ? (long)(run.first_mask_row + draw) * ((vocab + 31) / 32) : 0);
  row.before = all_drafts + slot * drafts_stride;  // the row is reached by the drafts before it alone
  row.num_before = draw;
  row.penalties = params->presence_penalty != 0.0f || params->frequency_penalty != 0.0f || params->repetition_penalty != 1.0f;
  row.too_early = params->num_generated + draw < params->min_tokens && params->num_stop_ids > 0;
  const bool random = params->temperature >= GREEDY_BELOW, limits_k = random && params->top_k > 0 && params->top_k < num_text_tokens;
  const ulong first = first_key(&row, &s);
  const ulong drawn = gumbel_key(&row, random && !limits_k, 0, -INFINITY, (long)cursors[slot] + (verify ? draw + 1 : run.num_rows), &s);
  ulong lowest = 0;
  if (limits_k) lowest = kth_key(&row, params->top_k, &s);
  for (int id = row.begin + item; id < row.end && limits_k; id += ITEMS) {
    const float x = logit_at(&row, id);
    const ulong key = key_of(x, id);
    if (x != -INFINITY && key >= lowest) listed[atomic_inc(&num_listed)] = key;
  }
  const ulong only = limits_k ? 0 : random ? drawn : first;
  if (item == 0 && only != 0) {
    listed[0] = only;
    num_listed = 1;
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if (!is_draw) return;
  const int count = (int)num_listed;
  __global ulong* out = candidates + row_number * (1 + num_candidates);
  if (item == 0) out[0] = finite ? 1 : 0;
  if (item >= count && item < num_candidates) out[1 + item] = 0;
  if (item < count) {
    int larger = 0;
    for (int i = 0; i < count; ++i) larger += listed[i] > listed[item] ? 1 : 0;
    out[1 + larger] = listed[item];
  }
}

float logit_of(ulong key) {
  const uint ordered = (uint)(key >> 32);
  return as_float((ordered & 0x80000000u) != 0 ? ordered ^ 0x80000000u : ~ordered);
}

// From the candidates of all parts; a group a run.
PORTABLE __attribute__((reqd_work_group_size(ITEMS, 1, 1))) __kernel void sample_drawing(int vocab, int num_text_tokens, int k_max, int drafts_stride, int num_candidates, int num_parts,
                                                                                PLACE(const sample_run_t, runs), PLACE(const ulong, gathered), PLACE(sampling_t, all_params),
                                                                                PLACE(int, all_counts), PLACE(int, cursors), PLACE(int, boundaries), PLACE(int, last_tokens),
                                                                                PLACE(const int, all_drafts), PLACE(int, tokens), PLACE(int, num_sampled), PLACE(int, non_finite)) {
  FIND(const sample_run_t, runs);
  FIND(const ulong, gathered);
  FIND(sampling_t, all_params);
  FIND(int, all_counts);
  FIND(int, cursors);
  FIND(int, boundaries);
  FIND(int, last_tokens);
  FIND(const int, all_drafts);
  FIND(int, tokens);
  FIND(int, num_sampled);
  FIND(int, non_finite);
  __local shared_t s;
  __local ulong sorted[MAX_CANDIDATES], weights[MAX_CANDIDATES];
  __local int num_kept;
  const long number = (long)get_group_id(0), per_run = k_max + 1, per_part = 1 + num_candidates;
  const int item = (int)get_local_id(0), num_keys = num_parts * num_candidates;
  const sample_run_t run = runs[number];
  const bool is_run = run.slot >= 0;
  const long slot = is_run ? run.slot : 0;
  __global sampling_t* params = all_params + slot;
  __global int* counts = all_counts + slot * vocab;
  const __global int* drafts = all_drafts + slot * drafts_stride;
  const int cursor = cursors[slot];
  const bool verify = run.first_logits_row >= 0 && run.verify != 0;
  const int num_draws = !is_run || run.first_logits_row < 0 ? 0 : verify ? run.num_rows : 1;
  const int synthetic = run.verify - 2;  // ops::kSyntheticAcceptance: drafts that count as accepted; below 0: those that agree
  const bool sorts = params->temperature >= GREEDY_BELOW && params->top_k > 0 && params->top_k < num_text_tokens;
  barrier(CLK_GLOBAL_MEM_FENCE);  // every item has read the cursor

  int num_tokens = 0;
  bool failed = false, ended = false;
  for (int draw = 0; draw < num_draws && !ended; ++draw) {
    const __global ulong* words = gathered + (long)(run.first_logits_row + draw) * num_parts * per_part;
    bool finite = true;
    for (int part = 0; part < num_parts; ++part) finite = finite && words[part * per_part] != 0;
    ulong mine = 0;
    for (int i = item; i < num_keys && finite; i += ITEMS) mine = max(mine, words[i / num_candidates * per_part + 1 + i % num_candidates]);
    const ulong first = largest_key(mine, &s);
    for (int i = item; i < MAX_CANDIDATES; i += ITEMS) sorted[i] = 0;
    if (item == 0) num_kept = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = item; i < num_keys && sorts && first != 0; i += ITEMS) {
      const ulong key = words[i / num_candidates * per_part + 1 + i % num_candidates];
      int larger = 0;
      for (int other = 0; other < num_keys; ++other) larger += words[other / num_candidates * per_part + 1 + other % num_candidates] > key ? 1 : 0;
      if (key == 0 || larger >= params->top_k) continue;
      sorted[larger] = key;
      atomic_inc(&num_kept);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const float best = logit_of(first);
    if (item < num_kept) weights[item] = weight_of(logit_of(sorted[item]), best, params->temperature);
    barrier(CLK_LOCAL_MEM_FENCE);
    // Each item adds up for itself: PoCL 6.0 miscompiles a loop of one item that shortens what all keep.
    bool keeps = item < num_kept;
    if (params->top_p < 1.0f) {
      ulong all = 0, before = 0;
      for (int i = 0; i < num_kept; ++i) {
        all += weights[i];
        before += i < item ? weights[i] : 0;
      }
      keeps = keeps && before < wanted_weight(params->top_p, all);
    }
    chance_t chance = chance_of(params, (long)cursor + (verify ? draw + 1 : run.num_rows));
    if (keeps && logit_of(sorted[item]) >= lowest_logit(params, best)) offer(&chance, logit_of(sorted[item]), id_of(sorted[item]));
    const ulong drawn = largest_key(chance.drawn, &s);
    const ulong chosen = sorts ? drawn : first;
    const int token = chosen == 0 ? -1 : id_of(chosen);
    failed = token < 0;
    ended = failed || is_stop(params, token) || (draw + 1 < num_draws && (synthetic >= 0 ? draw >= synthetic : drafts[draw] != token));
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (item == 0 && !failed) {
      tokens[number * per_run + num_tokens] = token;
      ++counts[token];
      ++params->num_generated;
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (!failed) ++num_tokens;
  }
  if (item == 0) advance(run, verify, failed, num_tokens, cursor, params, counts, tokens + number * per_run, num_sampled + number, non_finite + number, cursors, boundaries, last_tokens);
}

// The most likely token below num_tokens of each row, as an id or as a key; a group a row.
ulong best_of_row(const __global float* row, int width, int num_tokens, int first_id, __local shared_t* s) {
  ulong mine = 0;
  for (int i = (int)get_local_id(0); i < width && first_id + i < num_tokens; i += ITEMS) mine = max(mine, key_of(row[i], first_id + i));
  return largest_key(mine, s);
}
PORTABLE __attribute__((reqd_work_group_size(ITEMS, 1, 1))) __kernel void argmax(PLACE(const float, logits), int vocab, int num_tokens, PLACE(int, ids)) {
  FIND(const float, logits);
  FIND(int, ids);
  __local shared_t s;
  const ulong best = best_of_row(logits + (long)get_group_id(0) * vocab, vocab, num_tokens, 0, &s);
  if (get_local_id(0) == 0) ids[get_group_id(0)] = id_of(best);
}
PORTABLE __attribute__((reqd_work_group_size(ITEMS, 1, 1))) __kernel void argmax_candidates(PLACE(const float, logits), int width, int num_tokens, int first_id, PLACE(ulong, keys)) {
  FIND(const float, logits);
  FIND(ulong, keys);
  __local shared_t s;
  const ulong best = best_of_row(logits + (long)get_group_id(0) * width, width, num_tokens, first_id, &s);
  if (get_local_id(0) == 0) keys[get_group_id(0)] = best;
}
// An item a row.
PORTABLE __kernel void argmax_of(PLACE(const ulong, gathered), int num_rows, int num_parts, PLACE(int, ids)) {
  FIND(const ulong, gathered);
  FIND(int, ids);
  const int row = (int)get_global_id(0);
  if (row >= num_rows) return;
  ulong best = 0;
  for (int part = 0; part < num_parts; ++part) best = max(best, gathered[(long)row * num_parts + part]);
  ids[row] = id_of(best);
}
