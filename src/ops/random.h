#pragma once

#include <cmath>
#include <cstdint>

#include "base/hash.h"

// Counter-based random numbers: a draw depends on (seed, sequence index, token id) and on nothing else, so the same request gives the
// same text whatever ran beside it and however many drafts were tried.

namespace quern::ops {

/// The part of a draw that all tokens of one position share.
constexpr uint64_t draw_key(uint64_t seed, int64_t index) { return hash_combine(hash_combine(0, seed), static_cast<uint64_t>(index)); }

/// The random bits of a token.
constexpr uint64_t uniform_bits(uint64_t key, int32_t token) { return hash_combine(key, static_cast<uint64_t>(static_cast<uint32_t>(token))); }
/// Uniform in the open interval (0, 1): odd multiples of 2^-53, all exact.
constexpr double uniform(uint64_t bits) { return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52; }
constexpr double uniform(uint64_t key, int32_t token) { return uniform(uniform_bits(key, token)); }

/// The standard Gumbel variate of a uniform one.
inline float gumbel(double u) { return static_cast<float>(-std::log(-std::log(u))); }

/// argmax_t (log p_t + gumbel(seed, index, t)) is a draw from p. `index` is that of the token drawn.
inline float gumbel(uint64_t seed, int64_t index, int32_t token) { return gumbel(uniform(draw_key(seed, index), token)); }

}  // namespace quern::ops
