#include "engine/prefix_cache.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace quern::engine {

using worker::StateOp;

namespace {

/// Sparse states shall not crowd out those where conversations branch: a whole window of them takes at most a quarter of all.
int32_t interval_from(const worker::WorkerLimits& limits, int32_t wanted) {
  constexpr int32_t kLeast = 1024;
  if (wanted > 0) return (wanted + kBlockSize - 1) / kBlockSize * kBlockSize;
  const int32_t share = std::max(limits.num_snapshots / 4, 1);
  const int32_t interval = (limits.max_model_len + share - 1) / share;
  return std::max((interval + kBlockSize - 1) / kBlockSize * kBlockSize, kLeast);
}

int32_t num_spare(const worker::WorkerLimits& limits, int32_t max_num_seqs) { return std::min(limits.num_snapshots / 4, max_num_seqs); }

/// The first `num_tokens` tokens of a sequence.
std::vector<int32_t> first_tokens(const Sequence& sequence, int32_t num_tokens) {
  const std::vector<int32_t>& prompt = sequence.request.prompt;
  const int32_t from_prompt = std::min(num_tokens, sequence.num_prompt());
  std::vector<int32_t> tokens(prompt.begin(), prompt.begin() + from_prompt);
  tokens.insert(tokens.end(), sequence.generated.begin(), sequence.generated.begin() + (num_tokens - from_prompt));
  return tokens;
}

/// How the rows of each block were computed, or will be.
std::vector<uint8_t> prompt_rows(const Sequence& sequence, int32_t num_blocks) {
  std::vector<uint8_t> rows = sequence.prefix.prompt_rows;
  rows.resize(std::min(rows.size(), static_cast<size_t>(num_blocks)));
  for (auto block = static_cast<int32_t>(rows.size()); block < num_blocks; ++block)
    rows.push_back(static_cast<uint8_t>(std::clamp(sequence.num_prompt() - block * kBlockSize, 0, kBlockSize)));
  return rows;
}

}  // namespace

PrefixCache::PrefixCache(const worker::WorkerLimits& limits, const PrefixCacheOptions& options, int32_t max_num_seqs, BlockPool& blocks)
    : options_(options),
      interval_(interval_from(limits, options.snapshot_interval)),
      snapshots_(options.enabled ? limits.num_snapshots : 0),
      host_blocks_(enabled() ? limits.num_host_blocks : 0),
      host_snapshots_(enabled() ? limits.num_host_snapshots : 0),
      index_({blocks, snapshots_, host_blocks_, host_snapshots_},
             {.snapshot_bytes = static_cast<double>(std::max<uint64_t>(limits.snapshot_bytes, 1)),
              .block_bytes = static_cast<double>(std::max<uint64_t>(limits.block_bytes, 1))},
             ops_) {
  for (int32_t i = 0; i < num_spare(limits, max_num_seqs) && enabled(); ++i) spare_.push_back(*snapshots_.acquire());
}

PrefixIndex::Hit PrefixCache::find(const Sequence& sequence, bool device_only) const {
  // Log-probabilities of a prompt need all its rows; and at least the last row is computed, since a token is drawn from it.
  const bool resumed = sequence.num_generated() > 0;
  if (!enabled() || (sequence.request.prompt_logprobs >= 0 && !resumed)) return {};
  const std::vector<int32_t> tokens = first_tokens(sequence, sequence.num_known() - 1);
  // After preemption the rows must be what they were before, so that the same tokens follow.
  std::vector<uint8_t> rows;
  if (resumed) rows = prompt_rows(sequence, static_cast<int32_t>(tokens.size()) / kBlockSize);
  return index_.find({.salt = sequence.request.cache_salt, .tokens = tokens, .prompt_rows = rows}, device_only);
}

bool PrefixCache::prepare(const PrefixIndex::Hit& hit) {
  if (hit.entry == 0 || hit.on_device()) return true;
  index_.pin(hit.entry);
  if (hit.snapshot || snapshots_.num_free() > 0 || index_.evict_snapshot()) return true;
  index_.unpin(hit.entry);
  return false;
}

void PrefixCache::let_go(const PrefixIndex::Hit& hit) {
  if (hit.entry != 0 && !hit.on_device()) index_.unpin(hit.entry);
}

bool PrefixCache::will_keep_more(const Sequence& other, const Sequence& waiting, int32_t num_rows) const {
  if (!enabled() || other.faulty || other.request.cache_salt != waiting.request.cache_salt) return false;
  if (waiting.num_generated() > 0 || waiting.request.prompt_logprobs >= 0) return false;
  const auto shares = [&](int32_t boundary) {
    if (boundary <= num_rows || boundary >= waiting.num_known() || !may_keep(other, boundary)) return false;
    const std::vector<int32_t>& prompt = waiting.request.prompt;
    const int32_t from_prompt = std::min(boundary, other.num_prompt());
    return std::equal(prompt.begin(), prompt.begin() + from_prompt, other.request.prompt.begin()) &&
           std::equal(prompt.begin() + from_prompt, prompt.begin() + boundary, other.generated.begin());
  };
  switch (other.state) {
    case SequenceState::kFinished: return shares(boundary_before(std::min(other.planned_rows, other.num_known())));
    case SequenceState::kRunning:
      return std::any_of(other.prefix.cuts.begin(), other.prefix.cuts.end(),
                         [&](int32_t cut) { return cut > other.prefix.kept_boundary && other.planned_rows < cut + kBlockSize && shares(cut); });
    case SequenceState::kWaiting:
    case SequenceState::kLeaving: return false;
  }
  CHECK_UNREACHABLE();
}

void PrefixCache::admit(Sequence& sequence, PrefixIndex::Hit hit) {
  if (!enabled()) {
    if (sequence.cached_tokens) ++num_recomputed_;
    sequence.cached_tokens = 0;
    return;
  }
  SequencePrefix& prefix = sequence.prefix;
  const int32_t begin = hit.num_rows(), from_host = hit.num_host_blocks * kBlockSize;
  if (hit.entry != 0 && !hit.on_device()) {
    index_.load(hit);
    index_.unpin(hit.entry);
  }
  if (sequence.cached_tokens) {
    ++(from_host > 0 ? num_swapped_ : num_recomputed_);
  } else {
    num_host_tokens_ += static_cast<uint64_t>(from_host);
    sequence.cached_tokens = begin;
    if (sequence.request.prompt_logprobs < 0) num_queried_tokens_ += static_cast<uint64_t>(sequence.num_prompt());
    num_hit_tokens_ += static_cast<uint64_t>(begin);
  }
  if (hit.entry != 0) index_.use(hit.entry);
  prefix.cuts.clear();
  for (const int32_t hint : sequence.request.cut_hints) prefix.cuts.push_back(boundary_before(std::clamp(hint, 0, sequence.num_prompt())));
  prefix.cuts.push_back(boundary_before(sequence.num_prompt() - 1));
  prefix.cuts.push_back(std::min(hit.num_known_blocks * kBlockSize, sequence.num_prompt()));
  std::sort(prefix.cuts.begin(), prefix.cuts.end());
  prefix.cuts.erase(std::unique(prefix.cuts.begin(), prefix.cuts.end()), prefix.cuts.end());
  std::erase_if(prefix.cuts, [begin](int32_t cut) { return cut <= begin || cut % kBlockSize != 0; });
  prefix.prompt_rows = std::move(hit.prompt_rows);
  prefix.restore = std::move(hit.snapshot);
  prefix.kept_boundary = begin;
  sequence.blocks = std::move(hit.blocks);
  sequence.planned_rows = sequence.known_rows = sequence.known_boundary = begin;
}

int32_t PrefixCache::cut(const Sequence& sequence, int32_t end) const {
  if (!enabled()) return end;
  const int32_t begin = sequence.planned_rows;
  const auto next = std::upper_bound(sequence.prefix.cuts.begin(), sequence.prefix.cuts.end(), begin);
  int32_t cut = (begin / interval_ + 1) * interval_;
  if (next != sequence.prefix.cuts.end()) cut = std::min(cut, *next);
  return end >= cut + kBlockSize ? cut : end;  // the state stands at the last boundary before the chunk's end
}

void PrefixCache::before_run(Sequence& sequence, int32_t num_rows, bool verify) {
  if (!enabled()) return;
  const std::optional<int32_t> stored = sequence.stored_boundary();
  if (!stored) return;
  SequencePrefix& prefix = sequence.prefix;
  const bool wanted = std::binary_search(prefix.cuts.begin(), prefix.cuts.end(), *stored) || *stored % interval_ == 0;
  if (wanted) keep(sequence, *stored);

  // Whether the tokens up to the next boundary will belong to the output is not known yet, and who cancels then has not seen them.
  const bool decodes = sequence.planned_rows >= sequence.num_given();
  const int32_t next = boundary_before(sequence.planned_rows + (verify ? 0 : num_rows));
  if (!decodes || next == *stored || *stored <= prefix.kept_boundary || !may_keep(sequence, *stored)) return;
  if (!prefix.fallback && !spare_.empty()) {
    prefix.fallback = std::move(spare_.back());
    spare_.pop_back();
  }
  if (!prefix.fallback) return;
  prefix.fallback_boundary = *stored;
  ops_.push_back({.kind = StateOp::Kind::kSnapshot, .slot = sequence.slot->index(), .snapshot = prefix.fallback->index(), .boundary = *stored});
}

void PrefixCache::keep_output(Sequence& sequence) {
  if (!enabled()) return;
  if (!sequence.faulty && sequence.slot && sequence.slot_sent) {
    const bool gone_past = sequence.known_boundary > sequence.num_known();  // by rows that turned out to lie behind the end
    if (!gone_past) keep(sequence, sequence.known_boundary);
    if (gone_past || sequence.interrupted || sequence.stopped) keep_fallback(sequence);
  }
  release(sequence);
}

void PrefixCache::keep_fallback(Sequence& sequence) {
  SequencePrefix& prefix = sequence.prefix;
  const int32_t boundary = prefix.fallback_boundary;
  if (!prefix.fallback || boundary > sequence.num_known() || boundary > prefix.proven_rows) return;
  const std::vector<int32_t> tokens = first_tokens(sequence, boundary);
  const std::vector<uint8_t> rows = prompt_rows(sequence, boundary / kBlockSize);
  const auto entry = index_.add({.salt = sequence.request.cache_salt, .tokens = tokens, .prompt_rows = rows}, sequence.blocks, *prefix.fallback);
  if (!entry) return;
  index_.confirm(*entry);
  prefix.fallback.reset();
  if (auto fresh = acquire()) spare_.push_back(*std::move(fresh));
}

void PrefixCache::keep_preempted(Sequence& sequence) {
  if (host_snapshots_.size() > 0 && sequence.slot_sent && sequence.known_boundary <= sequence.prefix.proven_rows) keep(sequence, sequence.known_boundary);
  release(sequence);
}

void PrefixCache::withdraw(Sequence& sequence) {
  for (const auto& [entry, boundary] : sequence.prefix.entries) index_.withdraw(entry);
  sequence.prefix.entries.clear();
}

void PrefixCache::prove(Sequence& sequence) {
  SequencePrefix& prefix = sequence.prefix;
  const int32_t before = std::exchange(prefix.proven_rows, sequence.known_rows);
  for (const auto& [entry, boundary] : prefix.entries)
    if (before < boundary && boundary <= prefix.proven_rows) index_.confirm(entry);
}

void PrefixCache::release(Sequence& sequence) {
  SequencePrefix& prefix = sequence.prefix;
  for (const auto& [entry, boundary] : prefix.entries)
    if (boundary > prefix.proven_rows) index_.withdraw(entry);
  prefix.proven_rows = 0;
  if (prefix.fallback) spare_.push_back(*std::move(prefix.fallback));
  prefix.fallback.reset();
  prefix.restore.reset();
}

/// Copies the state that the slot holds, which stands at `boundary`, if it is worth it and there is a place.
void PrefixCache::keep(Sequence& sequence, int32_t boundary) {
  SequencePrefix& prefix = sequence.prefix;
  if (boundary <= prefix.kept_boundary || !may_keep(sequence, boundary)) return;
  const std::vector<int32_t> tokens = first_tokens(sequence, boundary);
  const std::vector<uint8_t> rows = prompt_rows(sequence, boundary / kBlockSize);
  const PrefixKey key{.salt = sequence.request.cache_salt, .tokens = tokens, .prompt_rows = rows};
  prefix.kept_boundary = boundary;
  if (index_.contains(key)) return;
  std::optional<SnapshotRef> snapshot = acquire();
  if (!snapshot) return;
  const int32_t index = snapshot->index();
  const auto entry = index_.add(key, sequence.blocks, *std::move(snapshot));
  CHECK(entry.has_value());
  ops_.push_back({.kind = StateOp::Kind::kSnapshot, .slot = sequence.slot->index(), .snapshot = index, .boundary = boundary});
  prefix.entries.push_back({*entry, boundary});
  if (boundary <= prefix.proven_rows) index_.confirm(*entry);
}

bool PrefixCache::may_keep(const Sequence& sequence, int32_t boundary) const {
  if (sequence.num_known() < boundary) return false;
  if (options_.reuse_outputs) return true;
  const std::vector<uint8_t> rows = prompt_rows(sequence, boundary / kBlockSize);
  return std::all_of(rows.begin(), rows.end(), [](uint8_t n) { return n == kBlockSize; });
}

std::optional<SnapshotRef> PrefixCache::acquire() {
  std::optional<SnapshotRef> snapshot = snapshots_.acquire();
  if (!snapshot && index_.evict_snapshot()) snapshot = snapshots_.acquire();
  return snapshot;
}

}  // namespace quern::engine
