// Products with matrices of fewer bits, whose rows lie interleaved so that nothing is summed across
// a vector.
//
// 16 rows are a group. It begins with what the rows have one of each (`kRowHeader`); then come, for
// every four bytes along the rows, those of all 16: a lane belongs to a row. x is rounded, row by
// row, to what the products take (`round`), once for all columns of the result.
//
// A result depends on its own row of x and its own row of W alone: sums along k are one chain, the
// same in every tile.
#pragma once

#include <utility>
#include <vector>

#include "linear.h"

namespace quadriga {

constexpr int64_t kGroupRows = 16;  // `GROUP_ROWS` of stored_forms.py
constexpr int kGroupVecs = kGroupRows / kLanes;

typedef int8_t SignedByteVec __attribute__((vector_size(kLanes)));

// Eight bits a weight, one float32 scale a row. Weights are stored as q + 128. Inputs are rounded, 64
// at a time, to whole multiples of a 127th of the greatest among them: by whole rows, a few large ones
// would take the digits of all others.
struct Int8 {
  using Sums = IntVec;
  static constexpr bool kInterleaved = true, kWidened = false;
  static constexpr int64_t kWeights = 4;      // in a lane
  static constexpr int64_t kBytes = 1;        // of a weight
  static constexpr int64_t kRowHeader = 4;    // its scale
  static constexpr int64_t kBlock = 64;       // inputs that share a scale
  static constexpr int64_t kBlockHeader = 8;  // their scale, and -128 times their sum

  QUADRIGA_INLINE Sums dot(Sums sums, IntVec w, IntVec x) {
#if defined(__AVX512VNNI__)
    return bits_of<IntVec>(_mm512_dpbusd_epi32(bits_of<__m512i>(sums), bits_of<__m512i>(w),
                                               bits_of<__m512i>(x)));
#elif defined(__AVX512BW__)
    // Products of two are summed in 32 bits; multiplying bytes would saturate at 16.
    const __m512i bytes = bits_of<__m512i>(w), four = bits_of<__m512i>(x);
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(255)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(four, 8), 8));
    const __m512i odd =
        _mm512_madd_epi16(_mm512_srli_epi16(bytes, 8), _mm512_srai_epi16(four, 8));
    return sums + bits_of<IntVec>(even) + bits_of<IntVec>(odd);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i bytes = bits_of<__m256i>(w), four = bits_of<__m256i>(x);
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8));
    const __m256i odd =
        _mm256_madd_epi16(_mm256_srli_epi16(bytes, 8), _mm256_srai_epi16(four, 8));
    return sums + bits_of<IntVec>(even) + bits_of<IntVec>(odd);
#else
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums += (w >> 8 * i & 255) * (x << (24 - 8 * i) >> 24);
    return sums;
#endif
  }

  // One block: its header, and its bytes.
  static void round(const float* x, int64_t k, uint8_t* header, uint8_t* out) {
    Vec top = {}, check = {};
    each(x, k, [&](int64_t, int64_t, Vec v) {
      top = max(top, max(v, -v));
      check += v * 0.0f;  // NaN where something is not finite: so is the result then
    });
    const float most = max_lane(top), scale = most / 127.0f + sum(check);
    const Vec factor = splat(most > 1e-30f ? 127.0f / most : 0.0f);
    const Vec magic = splat(12582912.0f);  // adding it rounds to the nearest integer
    IntVec total = {};
    each(x, k, [&](int64_t i, int64_t count, Vec v) {
      v *= factor;
      pin(v);  // multiplied, then added: the same with and without fused operations
      v = (v + magic) - magic;
      const IntVec q = __builtin_convertvector(v, IntVec);
      total += q;
      const SignedByteVec bytes = __builtin_convertvector(q, SignedByteVec);
      std::memcpy(out + i, &bytes, static_cast<size_t>(count));
    });
    int32_t offset = 0;
    for (int lane = 0; lane < kLanes; ++lane) offset -= total[lane] * 128;
    std::memcpy(header, &scale, 4);
    std::memcpy(header + 4, &offset, 4);
  }

  // What a block's sums start with: the weights' 128 of them all, taken back.
  QUADRIGA_INLINE Sums begin(const uint8_t* header) {
    return IntVec{} + read<int32_t>(header + 4);
  }

  QUADRIGA_INLINE Vec add(Vec total, Sums sums, const uint8_t* header) {
    return multiply_add(__builtin_convertvector(sums, Vec), splat(read<float>(header)), total);
  }

  // Results of a vector of rows whose scales lie at `scales`.
  QUADRIGA_INLINE Vec finish(Vec total, const uint8_t* scales) {
    return total * read<Vec>(scales);
  }

  static float value(const uint8_t* weight, const uint8_t* header) {
    return static_cast<float>(*weight - 128) * read<float>(header);
  }

  template <typename Body>
  QUADRIGA_INLINE void each(const float* x, int64_t k, const Body& body) {
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) body(i, kLanes, load(x + i));
    if (i < k) body(i, k - i, load_partial(x + i, k - i));
  }
};

// bfloat16, two weights in a lane; x is rounded to the same. Sums are float32.
struct BFloat16Pairs {
  using Sums = Vec;
  static constexpr bool kInterleaved = true;
#if defined(__AVX512BF16__)
  static constexpr bool kWidened = false;
#else
  static constexpr bool kWidened = true;
#endif
  static constexpr int64_t kWeights = 2;
  static constexpr int64_t kBytes = 2;
  static constexpr int64_t kRowHeader = 0;
  static constexpr int64_t kBlock = int64_t{1} << 40;  // whole rows
  static constexpr int64_t kBlockHeader = 0;

  QUADRIGA_INLINE Sums dot(Sums sums, IntVec w, IntVec x) {
#if defined(__AVX512BF16__)
    return bits_of<Vec>(_mm512_dpbf16_ps(bits_of<__m512>(sums), bits_of<__m512bh>(w),
                                         bits_of<__m512bh>(x)));
#else
    const auto second = [](IntVec pair) { return bits_of<Vec>(pair & ~0xFFFF); };
    const auto first = [](IntVec pair) { return bits_of<Vec>(pair << 16); };
    return multiply_add(first(w), first(x), multiply_add(second(w), second(x), sums));
#endif
  }

  static void round(const float* x, int64_t k, uint8_t*, uint8_t* out) {
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) round_some(load(x + i), kLanes, out + 2 * i);
    if (i < k) round_some(load_partial(x + i, k - i), k - i, out + 2 * i);
  }

  QUADRIGA_INLINE void round_some(Vec v, int64_t count, uint8_t* out) {
    const BitVec bits = bits_of<BitVec>(v);
    const IntVec is_number = v == v;
    BitVec rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;  // to the nearest, ties to even
    rounded = is_number ? rounded : BitVec{} + 0x7FC0;
    const HalfVec halves = __builtin_convertvector(rounded, HalfVec);
    std::memcpy(out, &halves, static_cast<size_t>(2 * count));
  }

  QUADRIGA_INLINE Sums begin(const uint8_t*) { return Sums{}; }
  QUADRIGA_INLINE Vec add(Vec, Sums sums, const uint8_t*) { return sums; }
  QUADRIGA_INLINE Vec finish(Vec total, const uint8_t*) { return total; }

  static float value(const uint8_t* weight, const uint8_t*) {
    const uint32_t bits = static_cast<uint32_t>(read<uint16_t>(weight)) << 16;
    return bits_of<float>(bits);
  }
};

QUADRIGA_INLINE void pin(IntVec& v) {
  Vec same = bits_of<Vec>(v);
  pin(same);
  v = bits_of<IntVec>(same);
}

// Bytes of the headers of a rounded row of x, which come first, and of all of it.
template <typename Form>
constexpr int64_t header_bytes(int64_t k) {
  return (k + Form::kBlock - 1) / Form::kBlock * Form::kBlockHeader;
}

template <typename Form>
constexpr int64_t input_bytes(int64_t k) {
  return header_bytes<Form>(k) + k * Form::kBytes;
}

// A row of x as products with a form read it.
template <typename Form>
static inline void round_row(const float* x, int64_t k, uint8_t* out) {
  uint8_t* rounded = out + header_bytes<Form>(k);
  for (int64_t i = 0; i < k; i += Form::kBlock, out += Form::kBlockHeader)
    Form::round(x + i, k - i < Form::kBlock ? k - i : Form::kBlock, out,
                rounded + i * Form::kBytes);
}

// The first n columns of vectors of results, one below the other: rows that fill the last group up
// have none.
template <int M, int N, typename Result>
QUADRIGA_INLINE void store_columns(int64_t n, float* out, int64_t ldo, const Result& result) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      const int64_t left = n - v * kLanes;
      if (left >= kLanes) store(out + m * ldo + v * kLanes, result(m, v));
      else if (left > 0) store_partial(out + m * ldo + v * kLanes, result(m, v), left);
    }
  }
}

// The first n columns of out[M, 16 · G] = x[M, k] · w[16 · G, k]ᵀ, with the next tile's weights fetched
// meanwhile.
template <typename Form, int M, int G>
QUADRIGA_INLINE void group_tile(int64_t n, const uint8_t* x, int64_t ldx, const uint8_t* w,
                                int64_t ldw, int64_t k, float* out, int64_t ldo) {
  constexpr int N = G * kGroupVecs;
  constexpr int64_t kLine = 4 * kGroupRows;  // bytes of all rows of a group
  constexpr int64_t kSteps = Form::kBlock / Form::kWeights;
  const int64_t steps = k / Form::kWeights;
  const uint8_t* weights = w + kGroupRows * Form::kRowHeader;
  const uint8_t* ahead = w + G * ldw;
  const uint8_t* rounded = x + header_bytes<Form>(k);
  Vec totals[M][N] = {};
  for (int64_t s = 0, block = 0; s < steps; block += Form::kBlockHeader) {
    typename Form::Sums sums[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) sums[m][v] = Form::begin(x + m * ldx + block);
    }
    const int64_t end = steps - s < kSteps ? steps : s + kSteps;
    for (; s < end; ++s) {
      IntVec ws[N];
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        __builtin_prefetch(ahead + (s * G + g) * kLine, 0, 2);
#pragma GCC unroll 4
        for (int v = 0; v < kGroupVecs; ++v) {
          ws[g * kGroupVecs + v] = read<IntVec>(weights + g * ldw + s * kLine + v * sizeof(IntVec));
          if constexpr (M > 1) pin(ws[g * kGroupVecs + v]);
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const IntVec four = IntVec{} + read<int32_t>(rounded + m * ldx + 4 * s);
#pragma GCC unroll 8
        for (int v = 0; v < N; ++v) sums[m][v] = Form::dot(sums[m][v], ws[v], four);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v)
        totals[m][v] = Form::add(totals[m][v], sums[m][v], x + m * ldx + block);
    }
  }
  store_columns<M, N>(n, out, ldo, [&](int m, int v) {
    const uint8_t* scales = w + v / kGroupVecs * ldw + v % kGroupVecs * kLanes * Form::kRowHeader;
    return Form::finish(totals[m][v], scales);
  });
}

constexpr int at_most_8(int count) { return count < 8 ? count : 8; }

constexpr int kGroupSums = kRegisters == 32 ? 24 : 8;            // vectors of sums in a tile
constexpr int kMostRows = at_most_8(kGroupSums / kGroupVecs);    // rows of x in a tile
constexpr int64_t kStripGroups = 3;  // that stay in a near cache for all rows of x

template <int M>
constexpr int kTileGroups = at_most_8(kGroupSums / (M * kGroupVecs));

// M rows of x against n rows of W, fewer than G + 1 groups.
template <typename Form, int M, int G>
QUADRIGA_INLINE void last_groups(int64_t n, const uint8_t* x, int64_t ldx, const uint8_t* w,
                                 int64_t ldw, int64_t k, float* out, int64_t ldo) {
  if constexpr (G > 0) {
    if (n > (G - 1) * kGroupRows) return group_tile<Form, M, G>(n, x, ldx, w, ldw, k, out, ldo);
    last_groups<Form, M, G - 1>(n, x, ldx, w, ldw, k, out, ldo);
  }
}

// m ≤ M rows of x against n rows of W.
template <typename Form, int M = kMostRows>
static void rows_of_groups(int64_t m, int64_t n, int64_t k, const uint8_t* x, int64_t ldx,
                           const uint8_t* w, float* out, int64_t ldo) {
  if constexpr (M > 0) {
    if (m < M) return rows_of_groups<Form, M - 1>(m, n, k, x, ldx, w, out, ldo);
    constexpr int G = kTileGroups<M>;
    const int64_t ldw = kGroupRows * (Form::kRowHeader + k * Form::kBytes);
    for (; n >= G * kGroupRows; n -= G * kGroupRows, w += G * ldw, out += G * kGroupRows)
      group_tile<Form, M, G>(G * kGroupRows, x, ldx, w, ldw, k, out, ldo);
    if (n) last_groups<Form, M, G>(n, x, ldx, w, ldw, k, out, ldo);
  }
}

// M rows of x [M, k] against a strip [k, 16 · G] of floats; meanwhile what begins at `ahead` is fetched,
// `stride` bytes a step.
template <int M, int G>
QUADRIGA_INLINE void wide_tile(int64_t n, const float* x, const float* strip, int64_t k, float* out,
                               int64_t ldo, const uint8_t* ahead, int64_t stride) {
  constexpr int N = G * kGroupVecs;
  Vec sums[M][N] = {};
  for (int64_t s = 0; s < k; ++s, strip += N * kLanes, ahead += stride) {
    __builtin_prefetch(ahead, 0, 2);
    Vec ws[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      ws[v] = load(strip + v * kLanes);
      pin(ws[v]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      int32_t bits;
      std::memcpy(&bits, x + m * k + s, 4);
      const Vec same = bits_of<Vec>(IntVec{} + bits);
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) sums[m][v] = multiply_add(ws[v], same, sums[m][v]);
    }
  }
  store_columns<M, N>(n, out, ldo, [&](int m, int v) { return sums[m][v]; });
}

template <int M, int G>
__attribute__((noinline)) static void wide_rows(int64_t m, int64_t n, const float* x,
                                                const float* strip, int64_t k, float* out,
                                                int64_t ldo, const uint8_t* ahead,
                                                int64_t stride) {
  if constexpr (M > 0) {
    if (m < M) return wide_rows<M - 1, G>(m, n, x, strip, k, out, ldo, ahead, stride);
    wide_tile<M, G>(n, x, strip, k, out, ldo, ahead, stride);
  }
}

constexpr int kWideGroups = kLanes == 16 ? 3 : 1;  // of float32 in a near cache at once
constexpr int kWideRows = at_most_8((kRegisters == 32 ? 24 : 12) / (kWideGroups * kGroupVecs));

// As `group_matmul`, where a processor would widen both factors of each product: here they are widened
// once, weights strip by strip. Sums are the same chains.
template <int G>
static void wide_matmul(int64_t m, int64_t n, int64_t k, const float* x, const uint8_t* w,
                        float* out, int64_t ldo) {
  constexpr int64_t kRows = G * kGroupRows;
  static thread_local std::vector<Vec> strip;
  if (strip.size() < static_cast<size_t>(kRows * k / kLanes)) strip.resize(kRows * k / kLanes);
  const int64_t group = kGroupRows * k * 2, lines = kGroupRows * 4;
  const int64_t blocks = (m + kWideRows - 1) / kWideRows;
  const int64_t fetching = blocks < kFetching ? blocks : kFetching;
  const int64_t stride = (G * group / fetching + k - 1) / k;
  for (; n > 0; n -= kRows, w += G * group, out += kRows) {
    if (n <= (G - 1) * kGroupRows) return wide_matmul<1>(m, n, k, x, w, out, ldo);
    for (int64_t s = 0; s < k / 2; ++s) {
      for (int v = 0; v < G * kGroupVecs; ++v) {
        const IntVec pairs = read<IntVec>(w + v / kGroupVecs * group + s * lines +
                                          v % kGroupVecs * static_cast<int64_t>(sizeof(IntVec)));
        strip[2 * s * G * kGroupVecs + v] = bits_of<Vec>(pairs & ~0xFFFF);
        strip[(2 * s + 1) * G * kGroupVecs + v] = bits_of<Vec>(pairs << 16);
      }
    }
    each_block(m, kWideRows, [&](int64_t count, int64_t at, int64_t b) {
      const uint8_t* ahead = w + G * group + (b < fetching ? b * k * stride : 0);
      wide_rows<kWideRows, G>(count, n, x + at * k, reinterpret_cast<const float*>(strip.data()), k,
                              out + at * ldo, ldo, ahead, b < fetching ? stride : 0);
    });
  }
}

// Rounded rows of x as floats [m, k], each pair's second first: the order of the chains.
static inline const float* widened(int64_t m, int64_t k, const uint8_t* x, int64_t ldx) {
  static thread_local std::vector<float> floats;
  if (floats.size() < static_cast<size_t>(m * k)) floats.resize(m * k);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t s = 0; s < k / 2; ++s) {
      const auto pair = read<uint32_t>(x + i * ldx + 4 * s);
      floats[i * k + 2 * s] = bits_of<float>(pair & 0xFFFF0000u);
      floats[i * k + 2 * s + 1] = bits_of<float>(pair << 16);
    }
  }
  return floats.data();
}

// out[m, n] = x[m, k] · w[n, k]ᵀ for rounded rows of x, `ldx` bytes apart; k fills whole lanes.
template <typename Form>
static inline void group_matmul(int64_t m, int64_t n, int64_t k, const uint8_t* x, int64_t ldx,
                                const uint8_t* w, float* out, int64_t ldo) {
  constexpr int64_t kRows = kStripGroups * kGroupRows;
  if (m <= kMostRows) return rows_of_groups<Form>(m, n, k, x, ldx, w, out, ldo);
  if constexpr (Form::kWidened)
    return wide_matmul<kWideGroups>(m, n, k, widened(m, k, x, ldx), w, out, ldo);
  const int64_t ldw = kGroupRows * (Form::kRowHeader + k * Form::kBytes);
  for (; n > 0; n -= kRows, w += kStripGroups * ldw, out += kRows) {
    each_block(m, kMostRows, [&](int64_t count, int64_t at, int64_t) {
      rows_of_groups<Form>(count, n < kRows ? n : kRows, k, x + at * ldx, ldx, w, out + at * ldo,
                           ldo);
    });
  }
}

// Row `id` of a matrix as floats.
template <typename Form>
static inline void expand_group_row(const uint8_t* w, int64_t id, int64_t k, float* out) {
  const int64_t lane = id % kGroupRows;
  const uint8_t* group = w + (id - lane) * (Form::kRowHeader + k * Form::kBytes);
  const uint8_t* weights = group + kGroupRows * Form::kRowHeader + 4 * lane;
  for (int64_t i = 0; i < k; ++i) {
    const int64_t line = i / Form::kWeights, within = i % Form::kWeights * Form::kBytes;
    out[i] = Form::value(weights + line * 4 * kGroupRows + within, group + lane * Form::kRowHeader);
  }
}

}  // namespace quadriga
