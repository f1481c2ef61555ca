// The loops of VectorMath for one kind of Lanes (lanes_avx2.h, lanes_avx512.h). Included below a target pragma, after everything that is to stay
// portable: see vector_math_avx2.cpp. Nothing here is shared between instruction sets, since every function has Lanes in its type.

namespace quern::cpu {

template <class Lanes>
class VectorLoops {
 public:
  static constexpr VectorMath math() {
    return {.load = load,
            .store = store,
            .round = round,
            .dots = dots,
            .add_products = add_products,
            .max = max_of,
            .exp_minus = exp_minus,
            .rms_norm = rms_norm,
            .multiply_silu = multiply_silu,
            .gate = gate,
            .convolve = convolve};
  }

 private:
  // Elements of a row, whole lanes first. `n` of the last piece is below 16.

  static Lanes load_element(const std::byte* source, DType dtype, int64_t i) {
    switch (dtype) {
      case DType::kF32: return Lanes::load(reinterpret_cast<const float*>(source) + i);
      case DType::kBF16: return Lanes::load_bf16(source + 2 * i);
      case DType::kE4M3: return Lanes::load_e4m3(source + i);
      default: CHECK_UNREACHABLE();
    }
  }
  static Lanes load_last(const std::byte* source, DType dtype, int64_t i, int64_t n) {
    alignas(64) std::byte copy[kLanes * sizeof(float)] = {};
    std::memcpy(copy, source + static_cast<size_t>(i) * dtype_size(dtype), static_cast<size_t>(n) * dtype_size(dtype));
    return load_element(copy, dtype, 0);
  }
  static void load(const std::byte* source, DType dtype, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) load_element(source, dtype, i).store(out + i);
    if (i < n) load_last(source, dtype, i, n - i).store(out + i, n - i);
  }
  static void store(const float* source, int64_t n, DType dtype, std::byte* out) {
    if (dtype == DType::kF32) {
      std::memcpy(out, source, static_cast<size_t>(n) * sizeof(float));
      return;
    }
    CHECK(dtype == DType::kBF16);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) Lanes::load(source + i).store_bf16(out + 2 * i);
    if (i == n) return;
    alignas(32) std::byte last[2 * kLanes];
    Lanes::load(source + i, n - i).store_bf16(last);
    std::memcpy(out + 2 * i, last, static_cast<size_t>(n - i) * 2);
  }
  /// x[i] = f(x[i], y[i])
  template <class F>
  static void map(float* x, const float* y, int64_t n, const F& f) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) f(Lanes::load(x + i), Lanes::load(y + i)).store(x + i);
    if (i < n) f(Lanes::load(x + i, n - i), Lanes::load(y + i, n - i)).store(x + i, n - i);
  }

  /// e^x within 2 units in the last place; 0 below -104, infinity above 88.8, NaN of NaN. Taylor's series to the seventh power of the
  /// remainder after a power of two, which is at most ln(2) / 2: the eighth term is below 6e-9.
  static Lanes exp(Lanes x) {
    x = min(Lanes::broadcast(89.5f), max(Lanes::broadcast(-105.0f), x));
    const Lanes n = (x * Lanes::broadcast(1.44269504f)).nearest_integer();
    Lanes r = fma(n, Lanes::broadcast(-0.693359375f), x);  // ln 2 in two parts, the first one exact with any n
    r = fma(n, Lanes::broadcast(2.12194440e-4f), r);
    Lanes p = fma(Lanes::broadcast(1.0f / 5040), r, Lanes::broadcast(1.0f / 720));
    p = fma(p, r, Lanes::broadcast(1.0f / 120));
    p = fma(p, r, Lanes::broadcast(1.0f / 24));
    p = fma(p, r, Lanes::broadcast(1.0f / 6));
    p = fma(p, r, Lanes::broadcast(0.5f));
    p = fma(p, r, Lanes::broadcast(1.0f));
    p = fma(p, r, Lanes::broadcast(1.0f));
    return p.times_power_of_two(n);
  }
  static Lanes one_plus_exp_of_minus(const Lanes& x) { return Lanes::broadcast(1.0f) + exp(Lanes::broadcast(0.0f) - x); }
  static Lanes silu(const Lanes& x) { return x / one_plus_exp_of_minus(x); }
  static Lanes sigmoid(const Lanes& x) { return Lanes::broadcast(1.0f) / one_plus_exp_of_minus(x); }
  static Lanes rounded(DType dtype, const Lanes& x) { return dtype == DType::kBF16 ? x.rounded_bf16() : x; }

  template <int R, int C>
  static void dot_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t length, float* out, int64_t out_stride) {
    Lanes sum[R][C];
    for (auto& row : sum)
      for (Lanes& s : row) s = Lanes::broadcast(0.0f);
    const auto add = [&](const auto& load) {
      Lanes x[R];
      for (int r = 0; r < R; ++r) x[r] = load(a + r * a_stride);
      for (int c = 0; c < C; ++c) {
        const Lanes y = load(b + c * b_stride);
        for (int r = 0; r < R; ++r) sum[r][c] = fma(x[r], y, sum[r][c]);
      }
    };
    int64_t i = 0;
    for (; i + kLanes <= length; i += kLanes) add([i](const float* x) { return Lanes::load(x + i); });
    if (i < length) add([i, length](const float* x) { return Lanes::load(x + i, length - i); });
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) out[r * out_stride + c] = sum[r][c].sum();
  }
  template <int R>
  static void dot_rows(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t columns, int64_t length, float* out,
                       int64_t out_stride) {
    int64_t c = 0;
    for (; c + Lanes::kDotColumns <= columns; c += Lanes::kDotColumns)
      dot_tile<R, Lanes::kDotColumns>(a, a_stride, b + c * b_stride, b_stride, length, out + c, out_stride);
    for (; c < columns; ++c) dot_tile<R, 1>(a, a_stride, b + c * b_stride, b_stride, length, out + c, out_stride);
  }
  static void dots(const float* a, int64_t a_stride, int64_t rows, const float* b, int64_t b_stride, int64_t columns, int64_t length, float* out,
                   int64_t out_stride) {
    for_rows<Lanes::kDotRows>(rows, [&]<int R>(int64_t r) {
      dot_rows<R>(a + r * a_stride, a_stride, b, b_stride, columns, length, out + r * out_stride, out_stride);
    });
  }

  /// P pieces of 16 elements of R outputs; `load` and `store` see the element and the piece.
  template <int R, int P, class Load, class Store>
  static void product_tile(const float* factors, int64_t row_step, int64_t term_step, const float* terms, int64_t term_stride,
                           int64_t num_terms, float* out, int64_t out_stride, const Load& load, const Store& store) {
    Lanes sum[R][P];
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) sum[r][p] = load(out + r * out_stride + p * kLanes);
    for (int64_t j = 0; j < num_terms; ++j) {
      Lanes term[P];
      for (int p = 0; p < P; ++p) term[p] = load(terms + j * term_stride + p * kLanes);
      for (int r = 0; r < R; ++r) {
        const Lanes factor = Lanes::broadcast(factors[r * row_step + j * term_step]);
        for (int p = 0; p < P; ++p) sum[r][p] = fma(factor, term[p], sum[r][p]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) store(sum[r][p], out + r * out_stride + p * kLanes);
  }
  static void add_products(const float* factors, int64_t row_step, int64_t term_step, int64_t rows, const float* terms, int64_t term_stride,
                           int64_t num_terms, int64_t width, float* out, int64_t out_stride) {
    const auto load = [](const float* x) { return Lanes::load(x); };
    const auto store = [](const Lanes& sum, float* x) { sum.store(x); };
    for_rows<Lanes::kSumRows>(rows, [&]<int R>(int64_t r) {
      const float* f = factors + r * row_step;
      float* y = out + r * out_stride;
      int64_t i = 0;
      for (; i + Lanes::kSumPieces * kLanes <= width; i += Lanes::kSumPieces * kLanes)
        product_tile<R, Lanes::kSumPieces>(f, row_step, term_step, terms + i, term_stride, num_terms, y + i, out_stride, load, store);
      for (; i + kLanes <= width; i += kLanes)
        product_tile<R, 1>(f, row_step, term_step, terms + i, term_stride, num_terms, y + i, out_stride, load, store);
      if (i == width) return;
      const int64_t n = width - i;
      product_tile<R, 1>(
          f, row_step, term_step, terms + i, term_stride, num_terms, y + i, out_stride, [n](const float* x) { return Lanes::load(x, n); },
          [n](const Lanes& sum, float* x) { sum.store(x, n); });
    });
  }
  /// body<R>(first row) over all rows: R as large as it may be, then smaller ones.
  template <int R, class Body>
  static void for_rows(int64_t rows, const Body& body) {
    int64_t r = 0;
    for (; r + R <= rows; r += R) body.template operator()<R>(r);
    if constexpr (R > 1)
      if (r < rows) for_rows<R - 1>(rows - r, [&]<int N>(int64_t n) { body.template operator()<N>(r + n); });
  }

  static float max_of(const float* x, int64_t n) {
    const float lowest = -std::numeric_limits<float>::infinity();
    Lanes best = Lanes::broadcast(lowest);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) best = max(best, Lanes::load(x + i));
    float result = best.largest();
    for (; i < n; ++i) result = std::max(result, x[i]);
    return result;
  }
  static float exp_minus(float* x, int64_t n, float shift) {
    const Lanes s = Lanes::broadcast(shift);
    Lanes sum = Lanes::broadcast(0.0f);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      const Lanes y = exp(Lanes::load(x + i) - s);
      y.store(x + i);
      sum = sum + y;
    }
    if (i < n) {
      const Lanes y = exp(Lanes::load(x + i, n - i) - s).first(n - i);
      y.store(x + i, n - i);
      sum = sum + y;
    }
    return sum.sum();
  }

  static void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    float square = 0;
    dot_tile<1, 1>(x, 0, x, 0, n, &square, 0);
    const Lanes scale = Lanes::broadcast(1.0f / std::sqrt(square / static_cast<float>(n) + eps));
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) (Lanes::load(x + i) * scale * Lanes::load(weight + i)).store(out + i);
    if (i < n) (Lanes::load(x + i, n - i) * scale * Lanes::load(weight + i, n - i)).store(out + i, n - i);
  }
  static void round(DType dtype, float factor, float* x, int64_t n) {
    const Lanes f = Lanes::broadcast(factor);
    map(x, x, n, [&](const Lanes& a, const Lanes&) { return f * rounded(dtype, a); });
  }
  static void multiply_silu(DType dtype, float* x, const float* z, int64_t n) {
    map(x, z, n, [&](const Lanes& a, const Lanes& b) { return a * rounded(dtype, silu(b)); });
  }
  static void gate(DType dtype, float* x, float factor, const float* gate, int64_t n) {
    const Lanes f = Lanes::broadcast(factor);
    map(x, gate, n, [&](const Lanes& a, const Lanes& g) { return rounded(dtype, a * f) * rounded(dtype, sigmoid(g)); });
  }
  static void convolve(const std::byte* const* columns, DType dtype, const float* taps, int64_t tap_stride, int64_t n, float* y) {
    const auto piece = [&](int64_t i, const auto& load_column, const auto& load_tap) {
      Lanes sum = Lanes::broadcast(0.0f);
      for (int64_t tap = 0; tap < 4; ++tap)
        if (columns[tap] != nullptr) sum = fma(load_tap(taps + tap * tap_stride + i), load_column(columns[tap], i), sum);
      return rounded(dtype, silu(sum));
    };
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
      piece(
          i, [dtype](const std::byte* column, int64_t at) { return load_element(column, dtype, at); },
          [](const float* x) { return Lanes::load(x); })
          .store(y + i);
    if (i == n) return;
    const int64_t last = n - i;
    piece(
        i, [dtype, last](const std::byte* column, int64_t at) { return load_last(column, dtype, at, last); },
        [last](const float* x) { return Lanes::load(x, last); })
        .store(y + i, last);
  }
};

}  // namespace quern::cpu
