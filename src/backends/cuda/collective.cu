#include "backends/cuda/async.cuh"
#include "backends/cuda/collective_args.h"
#include "backends/cuda/numeric.cuh"
#include "backends/cuda/system_scope.cuh"

// Messages between ranks from inside kernels: through memory of the receiver where ranks reach it (direct), or through page-locked host memory (staged). Only the addresses differ.
//
// Why no rank overwrites what another still reads. Block b of a rank meets block b of the others and no other block. What it writes takes turns between two places. It writes message n into the
// place of message n - 2 only after it has ended message n - 1, for which it has seen the other ranks' parts of n - 1; these were written by kernels that began after their kernel of n - 2 had
// ended (await_predecessor: everything before in the stream is complete), so nobody reads n - 2 any more. In a channel, the blocks of the receiver say what they have taken, and every block
// of the sender waits for all of them.
//
// Why what is read is whole. Small messages: a half line is one 64-bit word, written and read as one, so the number in it vouches for the data in it; nothing is ordered against anything else.
// A place holds number n - 2 until n arrives, since every block that has words of a round writes all of them, also those past the message's end; numbers may wrap. Bulk and channels: all threads
// of a block write, meet at its barrier, then one thread releases the block's number at system scope; the reader acquires it at system scope before its block's barrier.
//
// Blocks wait for blocks of other GPUs, never for blocks of their own grid, and the whole grid is resident at once (kExchangeBlocks), so none waits for one that cannot start.

namespace quern::cuda {

namespace {

/// One thread's wait. After kFastPolls it rests between polls, looks at the clock and whether anybody has stopped.
class Waiter {
 public:
  __device__ explicit Waiter(const WaitArgs& args) : args_(args) {}

  /// Whether to poll once more. False: the deadline has come, or a rank has stopped.
  __device__ bool goes_on() {
    if (++polls_ < kFastPolls) return true;
    polls_ = 0;
    __nanosleep(50);
    const uint64_t now = global_time_ns();
    if (begin_ == 0) begin_ = now;
    waited_ = now - begin_;
    if (look(&args_.counters->failed) != 0) return false;
    if (look(&args_.group->stopped) != 0) {
      kind_ = FaultKind::kStopped;
      return false;
    }
    return waited_ < args_.deadline_ns;
  }
  /// Tells the host, if this is the rank's first; then the others.
  __device__ void give_up(uint32_t missed, uint64_t number, uint64_t bytes) const {
    if (atomicCAS(&args_.counters->failed, 0u, 1u) != 0) return;
    Fault& fault = args_.group->faults[args_.rank];
    volatile Fault& record = fault;
    record.op = args_.op;
    record.missed = missed;
    record.number = number;
    record.bytes = bytes;
    record.waited_ns = waited_;
    release(reinterpret_cast<uint32_t*>(&fault.kind), static_cast<uint32_t>(kind_));
    release(&args_.group->stopped, 1);
  }

 private:
  static constexpr int kFastPolls = 128;
  const WaitArgs& args_;
  uint64_t begin_ = 0, waited_ = 0;
  FaultKind kind_ = FaultKind::kDeadline;
  int polls_ = 0;
};

/// kBytes of a message as 32-bit parts.
template <int kBytes>
struct Piece {
  uint32_t part[kBytes / 4];
};
template <int kBytes>
struct VectorOf;
template <>
struct VectorOf<8> {
  using type = uint2;
};
template <>
struct VectorOf<16> {
  using type = uint4;
};

/// Piece `i` of `bytes` bytes at any address; zeros past their end.
template <int kBytes>
__device__ inline Piece<kBytes> load_piece(const void* data, uint32_t i, uint32_t bytes) {
  using Vector = typename VectorOf<kBytes>::type;
  const uint32_t at = i * kBytes;
  const auto* from = static_cast<const unsigned char*>(data) + at;
  Piece<kBytes> piece{};
  if (at + kBytes <= bytes && reinterpret_cast<uintptr_t>(from) % kBytes == 0) {
    *reinterpret_cast<Vector*>(&piece) = *reinterpret_cast<const Vector*>(from);
  } else {
#pragma unroll
    for (uint32_t k = 0; k < kBytes; ++k)
      if (at + k < bytes) piece.part[k / 4] |= uint32_t{from[k]} << (8 * (k % 4));
  }
  return piece;
}
/// The first `count` bytes of a piece to any address.
template <int kBytes>
__device__ inline void store_bytes(unsigned char* to, const Piece<kBytes>& piece, uint32_t first, uint32_t count) {
#pragma unroll
  for (uint32_t k = 0; k < kBytes; ++k)
    if (k >= first && k - first < count) to[k - first] = static_cast<unsigned char>(piece.part[k / 4] >> (8 * (k % 4)));
}
template <int kBytes>
__device__ inline void store_piece(void* data, uint32_t i, uint32_t bytes, const Piece<kBytes>& piece) {
  using Vector = typename VectorOf<kBytes>::type;
  const uint32_t at = i * kBytes;
  auto* to = static_cast<unsigned char*>(data) + at;
  if (at + kBytes <= bytes && reinterpret_cast<uintptr_t>(to) % kBytes == 0)
    *reinterpret_cast<Vector*>(to) = *reinterpret_cast<const Vector*>(&piece);
  else if (at < bytes)
    store_bytes(to, piece, 0, bytes - at);
}

/// A sum over ranks of the elements of a piece, in f32 from zero on, as the kernel `combine` has it.
template <int kBytes>
struct PieceSum {
  float sum[kBytes / 2] = {};  // f32: the first half
  __device__ void add(DType dtype, const Piece<kBytes>& piece) {
#pragma unroll
    for (int p = 0; p < kBytes / 4; ++p) {
      if (dtype == DType::kBF16) {
        sum[2 * p] += __uint_as_float(piece.part[p] << 16);
        sum[2 * p + 1] += __uint_as_float(piece.part[p] & 0xffff0000u);
      } else {
        sum[p] += __uint_as_float(piece.part[p]);
      }
    }
  }
  [[nodiscard]] __device__ Piece<kBytes> rounded(DType dtype) const {
    Piece<kBytes> piece;
#pragma unroll
    for (int p = 0; p < kBytes / 4; ++p)
      piece.part[p] = dtype == DType::kBF16 ? uint32_t{__bfloat16_as_ushort(__float2bfloat16_rn(sum[2 * p]))} | uint32_t{__bfloat16_as_ushort(__float2bfloat16_rn(sum[2 * p + 1]))} << 16
                                            : __float_as_uint(sum[p]);
    return piece;
  }
};

/// x <- round(x + m) for piece `i`.
template <int kBytes>
__device__ inline void add_to_residual(const ExchangeArgs& args, uint32_t i, const Piece<kBytes>& m) {
  PieceSum<kBytes> sum;
  const Piece<kBytes> x = load_piece<kBytes>(args.x, i, args.max_bytes);
#pragma unroll
  for (int p = 0; p < kBytes / 4; ++p) {
    if (args.dtype == DType::kBF16) {
      sum.sum[2 * p] = __uint_as_float(x.part[p] << 16) + __uint_as_float(m.part[p] << 16);
      sum.sum[2 * p + 1] = __uint_as_float(x.part[p] & 0xffff0000u) + __uint_as_float(m.part[p] & 0xffff0000u);
    } else {
      sum.sum[p] = __uint_as_float(x.part[p]) + __uint_as_float(m.part[p]);
    }
  }
  store_piece(args.x, i, args.max_bytes, sum.rounded(args.dtype));
}

/// Piece `i` of rank `r`'s message to its rows.
template <int kBytes>
__device__ inline void place_rows(const ExchangeArgs& args, int r, uint32_t i, const Piece<kBytes>& piece) {
  using Vector = typename VectorOf<kBytes>::type;
  const uint32_t width = args.row_bytes[r], at = i * kBytes;
  if (at >= args.bytes[r]) return;
  uint32_t row = at / width, column = at - row * width, left = min(uint32_t{kBytes}, args.bytes[r] - at);
  auto* to = static_cast<unsigned char*>(args.all) + args.offsets[r] + int64_t{row} * args.stride + column;
  if (left == kBytes && column + kBytes <= width && reinterpret_cast<uintptr_t>(to) % kBytes == 0) {
    *reinterpret_cast<Vector*>(to) = *reinterpret_cast<const Vector*>(&piece);
    return;
  }
  for (uint32_t done = 0; left > 0; ++row, column = 0) {
    const uint32_t count = min(left, width - column);
    store_bytes(static_cast<unsigned char*>(args.all) + args.offsets[r] + int64_t{row} * args.stride + column, piece, done, count);
    done += count;
    left -= count;
  }
}

/// Whether this rank takes part: it does not once a wait was given up.
__device__ inline bool begins(const WaitArgs& wait) {
  release_successor();
  await_predecessor();
  return look(&wait.counters->failed) == 0;
}

template <bool kAdds>
__device__ void exchange_small(const ExchangeArgs& args) {
  if (!begins(args.wait)) return;
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  ExchangeCounters& counters = *args.wait.counters;
  const uint32_t num_words = (args.max_bytes + 7) / 8;
  const auto has_words = [&](int round) { return (round * kExchangeBlocks + block) * kSmallThreads < static_cast<int>(num_words); };
  const auto word_of = [&](int round) { return static_cast<uint32_t>((round * kExchangeBlocks + block) * kSmallThreads + thread); };
  Piece<8> own[kSmallRounds];
  uint32_t numbers[kSmallRounds];
#pragma unroll
  for (int round = 0; round < kSmallRounds; ++round) {
    if (!has_words(round)) continue;
    numbers[round] = counters.words[block][round] + 1;
    own[round] = load_piece<8>(args.mine, word_of(round), args.bytes[args.wait.rank]);
  }
#pragma unroll
  for (int round = 0; round < kSmallRounds; ++round) {
    if (!has_words(round)) continue;
    const uint64_t number = uint64_t{numbers[round]} << 32;
    const Line line{{number | own[round].part[0], number | own[round].part[1]}};
    for (int t = 0; t < args.num_targets; ++t) store_line(&args.targets[t]->lines[numbers[round] % 2][word_of(round)], line);
  }
  Waiter waiter(args.wait);
#pragma unroll
  for (int round = 0; round < kSmallRounds; ++round) {
    const uint32_t word = word_of(round);
    if (!has_words(round) || word >= num_words) continue;
    const uint32_t number = numbers[round];
    const auto line_of = [&](int r) { return &args.sources[r]->lines[number % 2][word]; };
    const auto is_there = [&](const Line& line) { return line.half[0] >> 32 == number && line.half[1] >> 32 == number; };
    PieceSum<8> sum;
    for (int r = 0; r < args.num_ranks; ++r) {
      Piece<8> piece = own[round];
      if (r != args.wait.rank) {
        Line line = load_line(line_of(r));
        while (!is_there(line)) {
          if (!waiter.goes_on()) {
            uint32_t missed = 0;
            for (int other = 0; other < args.num_ranks; ++other)
              if (other != args.wait.rank && !is_there(load_line(line_of(other)))) missed |= 1u << other;
            waiter.give_up(missed, counters.calls[block] + 1, args.bytes[args.wait.rank]);
            return;
          }
          line = load_line(line_of(r));
        }
        piece.part[0] = static_cast<uint32_t>(line.half[0]);
        piece.part[1] = static_cast<uint32_t>(line.half[1]);
      }
      if constexpr (kAdds)
        sum.add(args.dtype, piece);
      else
        place_rows(args, r, word, piece);
    }
    if constexpr (kAdds) add_to_residual(args, word, sum.rounded(args.dtype));
  }
  __syncthreads();  // all have read the counters
  if (thread < kSmallRounds && has_words(thread)) ++counters.words[block][thread];
  if (thread == 0) ++counters.calls[block];
}

__device__ inline Piece<16> as_piece(const uint4& v) { return {{v.x, v.y, v.z, v.w}}; }
__device__ inline uint4 as_vector(const Piece<16>& piece) { return {piece.part[0], piece.part[1], piece.part[2], piece.part[3]}; }
template <class Header>
__device__ inline uint4* data_of(Header* box, uint64_t capacity, int turn) {
  return reinterpret_cast<uint4*>(reinterpret_cast<unsigned char*>(box) + data_offset<Header>(capacity, turn));
}
template <class Header>
__device__ inline const uint4* data_of(const Header* box, uint64_t capacity, int turn) {
  return data_of(const_cast<Header*>(box), capacity, turn);
}

/// work(i) for the block's share of [begin, end); kBatch pieces at a time are in flight.
constexpr int kBatch = 4;
template <class Load, class Store>
__device__ inline void copy_pieces(uint32_t begin, uint32_t end, const Load& load, const Store& store) {
  for (uint32_t first = begin + threadIdx.x; first < end; first += kBatch * blockDim.x) {
    Piece<16> pieces[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
      if (first + k * blockDim.x < end) pieces[k] = load(first + k * blockDim.x);
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
      if (first + k * blockDim.x < end) store(first + k * blockDim.x, pieces[k]);
  }
}

/// All threads of the block have written: says so in every target.
__device__ inline void publish(const ExchangeArgs& args, uint32_t number, int phase) {
  __syncthreads();
  if (threadIdx.x == 0) __threadfence_system();  // the block's writes, seen through the barrier, come before what follows
  if (threadIdx.x == 0)
    for (int t = 0; t < args.num_targets; ++t) release(&args.targets[t]->arrived[number % 2][phase][blockIdx.x], number);
}
/// Until this block's number is there from every other rank. The same in all threads; false: given up.
__device__ inline bool await_all(const ExchangeArgs& args, uint32_t number, int phase) {
  bool there = true;
  const int r = static_cast<int>(threadIdx.x);
  const auto arrived = [&](int rank) { return acquire(&args.sources[rank]->arrived[number % 2][phase][blockIdx.x]) == number; };
  if (r < args.num_ranks && r != args.wait.rank) {
    Waiter waiter(args.wait);
    while (there && !arrived(r)) there = waiter.goes_on();
    if (!there) {
      uint32_t missed = 0;
      for (int other = 0; other < args.num_ranks; ++other)
        if (other != args.wait.rank && !arrived(other)) missed |= 1u << other;
      waiter.give_up(missed, args.wait.counters->calls[blockIdx.x] + 1, args.bytes[args.wait.rank]);
    }
  }
  return __syncthreads_and(there) != 0;
}

template <bool kAdds>
__device__ void exchange_bulk(const ExchangeArgs& args) {
  if (__syncthreads_and(begins(args.wait)) == 0) return;
  const uint32_t block = blockIdx.x;
  ExchangeCounters& counters = *args.wait.counters;
  const uint32_t number = counters.bulks[block] + 1;
  const int turn = static_cast<int>(number % 2), rank = args.wait.rank;
  const uint32_t num_pieces = (args.max_bytes + 15) / 16, share = (num_pieces + kExchangeBlocks - 1) / kExchangeBlocks;
  const uint32_t begin = min(block * share, num_pieces), end = min(begin + share, num_pieces);
  const auto part = [&](int r) { return begin + (end - begin) * static_cast<uint32_t>(r) / static_cast<uint32_t>(args.num_ranks); };  // of the block's share, rank r's begins here
  const auto mine = [&](uint32_t i) { return load_piece<16>(args.mine, i, args.bytes[rank]); };
  const auto theirs = [&](int r, uint32_t i) { return as_piece(load_shared_data(data_of(args.sources[r], args.capacity, turn) + i)); };
  const auto sum_of = [&](uint32_t i) {
    PieceSum<16> sum;
    for (int r = 0; r < args.num_ranks; ++r) sum.add(args.dtype, r == rank ? mine(i) : theirs(r, i));
    return sum.rounded(args.dtype);
  };
  const auto show = [&](uint32_t i, const Piece<16>& piece) {
    for (int t = 0; t < args.num_targets; ++t) store_shared_data(data_of(args.targets[t], args.capacity, turn) + i, as_vector(piece));
  };
  if (kAdds && args.two_phases != 0) {
    // A rank sees the others' partials of its part, and writes the sum where its own partial would stand, which nobody needs.
    for (int t = 0; t < args.num_targets; ++t) {
      const int to = args.target_ranks[t];
      uint4* const data = data_of(args.targets[t], args.capacity, turn);
      const auto store = [&](uint32_t i, const Piece<16>& piece) { store_shared_data(data + i, as_vector(piece)); };
      if (to >= 0) {
        copy_pieces(part(to), part(to + 1), mine, store);
      } else {
        copy_pieces(begin, part(rank), mine, store);
        copy_pieces(part(rank + 1), end, mine, store);
      }
    }
    publish(args, number, 0);
    if (!await_all(args, number, 0)) return;
    copy_pieces(part(rank), part(rank + 1), sum_of, [&](uint32_t i, const Piece<16>& m) {
      show(i, m);
      add_to_residual(args, i, m);
    });
    publish(args, number, 1);
    if (!await_all(args, number, 1)) return;
    for (int r = 0; r < args.num_ranks; ++r)
      if (r != rank)
        copy_pieces(part(r), part(r + 1), [&](uint32_t i) { return theirs(r, i); }, [&](uint32_t i, const Piece<16>& m) { add_to_residual(args, i, m); });
  } else {
    copy_pieces(begin, end, mine, show);
    publish(args, number, 0);
    if (!await_all(args, number, 0)) return;
    if constexpr (kAdds) {
      copy_pieces(begin, end, sum_of, [&](uint32_t i, const Piece<16>& m) { add_to_residual(args, i, m); });
    } else {
      for (int r = 0; r < args.num_ranks; ++r) {
        const auto store = [&](uint32_t i, const Piece<16>& piece) { place_rows(args, r, i, piece); };
        if (r == rank)
          copy_pieces(begin, end, mine, store);
        else
          copy_pieces(begin, end, [&](uint32_t i) { return theirs(r, i); }, store);
      }
    }
  }
  // `number` was read by every thread before a barrier.
  if (threadIdx.x == 0) {
    counters.bulks[block] = number;
    ++counters.calls[block];
  }
}

/// The block's share of the pieces of a message.
struct Share {
  uint32_t begin, end;
};
__device__ inline Share share_of(uint32_t bytes) {
  const uint32_t num_pieces = (bytes + 15) / 16, share = (num_pieces + kExchangeBlocks - 1) / kExchangeBlocks;
  const uint32_t begin = min(blockIdx.x * share, num_pieces);
  return {begin, min(begin + share, num_pieces)};
}
/// So many threads wait, each until is_there(its number). The same in all threads; false: given up.
template <class IsThere>
__device__ inline bool await_peer(const MessageArgs& args, uint32_t number, unsigned num_waiting, const IsThere& is_there) {
  bool there = true;
  if (threadIdx.x < num_waiting) {
    Waiter waiter(args.wait);
    while (there && !is_there(threadIdx.x)) there = waiter.goes_on();
    if (!there) waiter.give_up(1u << args.peer, number, args.bytes);
  }
  return __syncthreads_and(there) != 0;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kSmallThreads) gather_small(const __grid_constant__ ExchangeArgs args) { exchange_small<false>(args); }
extern "C" __global__ void __launch_bounds__(kSmallThreads) add_small(const __grid_constant__ ExchangeArgs args) { exchange_small<true>(args); }
extern "C" __global__ void __launch_bounds__(kBulkThreads, 1) gather_bulk(const __grid_constant__ ExchangeArgs args) { exchange_bulk<false>(args); }
extern "C" __global__ void __launch_bounds__(kBulkThreads, 1) add_bulk(const __grid_constant__ ExchangeArgs args) { exchange_bulk<true>(args); }

extern "C" __global__ void __launch_bounds__(kBulkThreads) send_message(const __grid_constant__ MessageArgs args) {
  if (__syncthreads_and(begins(args.wait)) == 0) return;
  uint32_t& sent = args.wait.counters->sent[args.peer][blockIdx.x];
  const uint32_t number = sent + 1;
  // A block's share depends on the size of the message: what it overwrites may be another block's to read.
  if (!await_peer(args, number, kExchangeBlocks, [&](unsigned block) { return static_cast<int32_t>(acquire(&args.taken[block]) - (number - 2)) >= 0; })) return;
  const Share share = share_of(args.bytes);
  uint4* const data = data_of(args.channel, args.capacity, static_cast<int>(number % 2));
  copy_pieces(share.begin, share.end, [&](uint32_t i) { return load_piece<16>(args.message, i, args.bytes); },
              [&](uint32_t i, const Piece<16>& piece) { store_shared_data(data + i, as_vector(piece)); });
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  release(&args.channel->arrived[number % 2][blockIdx.x], number);
  sent = number;
}

extern "C" __global__ void __launch_bounds__(kBulkThreads) receive_message(const __grid_constant__ MessageArgs args) {
  if (__syncthreads_and(begins(args.wait)) == 0) return;
  uint32_t& received = args.wait.counters->received[args.peer][blockIdx.x];
  const uint32_t number = received + 1;
  if (!await_peer(args, number, 1, [&](unsigned) { return acquire(&args.channel->arrived[number % 2][blockIdx.x]) == number; })) return;
  const Share share = share_of(args.bytes);
  const uint4* const data = data_of(static_cast<const Channel*>(args.channel), args.capacity, static_cast<int>(number % 2));
  copy_pieces(share.begin, share.end, [&](uint32_t i) { return as_piece(load_shared_data(data + i)); }, [&](uint32_t i, const Piece<16>& piece) { store_piece(args.message, i, args.bytes, piece); });
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  release(&args.taken[blockIdx.x], number);
  received = number;
}

/// One thread.
extern "C" __global__ void tell_passage(const __grid_constant__ PassageArgs args) {
  const uint32_t count = *args.count + (args.ends != 0 ? 0 : 1);
  if (args.ends != 0) {
    release(&args.passage->ended, count);
    return;
  }
  *args.count = count;
  volatile Passage& passage = *args.passage;
  passage.op = args.op;
  passage.bytes = args.bytes;
  release(&args.passage->begun, count);
}

extern "C" __global__ void __launch_bounds__(kBulkThreads) place_gathered(const __grid_constant__ PlaceArgs args) {
  const ExchangeArgs& exchange = args.exchange;
  for (int r = 0; r < exchange.num_ranks; ++r)
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i * 16 < exchange.bytes[r]; i += gridDim.x * blockDim.x)
      place_rows(exchange, r, i, load_piece<16>(static_cast<const unsigned char*>(exchange.mine) + exchange.capacity * static_cast<uint64_t>(r), i, exchange.bytes[r]));
}

}  // namespace quern::cuda
