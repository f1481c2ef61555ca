#include "backends/cpu/vector_math.h"

#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "backends/cpu/lanes.h"
#include "base/check.h"

// VectorMath for AVX2. Only functions below the pragma use these instructions, as in multiply_avx512.cpp.

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

#include "backends/cpu/lanes_avx2.h"
#include "backends/cpu/vector_loops.h"

namespace quern::cpu {

namespace {
constexpr VectorMath kMath = VectorLoops<Avx2Lanes>::math();
}  // namespace

const VectorMath& avx2_math() { return kMath; }

}  // namespace quern::cpu

#pragma GCC pop_options
