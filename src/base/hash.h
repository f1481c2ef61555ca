#pragma once

#include <cstdint>
#include <string_view>

namespace quern {

/// FNV-1a, 64 bits.
constexpr uint64_t fnv1a(std::string_view text, uint64_t hash = 0xcbf29ce484222325ull) {
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3ull;
  return hash;
}

/// The finalizer of splitmix64: a bijection of 64-bit values that mixes all bits.
constexpr uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

/// splitmix64: a sequence of 64-bit values from one seed.
class SplitMix64 {
 public:
  explicit constexpr SplitMix64(uint64_t seed) : state_(seed) {}
  constexpr uint64_t next() { return mix64(state_ += 0x9e3779b97f4a7c15ull); }

 private:
  uint64_t state_;
};

constexpr uint64_t hash_combine(uint64_t a, uint64_t b) { return mix64(a + 0x9e3779b97f4a7c15ull + mix64(b)); }

}  // namespace quern
