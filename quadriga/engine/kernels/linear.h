// y = x · Wᵀ for row-major x [m, k] and W [n, k], as torch stores them: nothing is repacked.
//
// Each output is one chain of vector multiply-adds along k followed by one tree over the lanes, the
// same for every tile shape. So a row's result does not depend on which rows are computed beside
// it: prefill, decode, and any batch agree to the bit.
#pragma once

#include <utility>

#include "simd.h"

namespace quadriga {

template <int H, int... I>
static inline Vec fold(Vec a, Vec b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (I / H * 2 * H + I % H)...) +
         __builtin_shufflevector(a, b, (I / H * 2 * H + I % H + H)...);
#else
  const IntVec low = {(I / H * 2 * H + I % H)...};
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + H);
#endif
}

// `Count` vectors folded into one, without loops, so that they never leave their registers.
template <int Count>
static inline Vec fold_all(const Vec* v) {
  if constexpr (Count == 1) {
    return v[0];
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
    return fold<kLanes / Count>(fold_all<Count / 2>(v), fold_all<Count / 2>(v + Count / 2), lanes);
  }
}

template <int H>
static inline Vec fold_rest(Vec v) {
  if constexpr (H == 0) {
    return v;
  } else {
    return fold_rest<H / 2>(fold<H>(v, v, std::make_integer_sequence<int, kLanes>()));
  }
}

// Sums of several vectors at once: lane i of the result is the sum over the lanes of v[i]. Each
// fold adds the halves of blocks of 2 H lanes, packing the results of two vectors into one: the
// tree of `sum`, to the bit.
template <int Count>
static inline Vec sums(const Vec* v) {
  return fold_rest<kLanes / Count / 2>(fold_all<Count>(v));
}

// One step of a tile along k: acc[m * N + n] += x[m] * w[n].
template <int M, int N, typename Load>
static inline void tile_step(const float* x, int64_t ldx, const float* w, int64_t ldw, Vec* acc,
                             const Load& load_at) {
  Vec xs[M];
  for (int m = 0; m < M; ++m) xs[m] = load_at(x + m * ldx);
  for (int n = 0; n < N; ++n) {
    Vec wn = load_at(w + n * ldw);
    pin(wn);
    for (int m = 0; m < M; ++m) acc[m * N + n] += xs[m] * wn;
  }
}

template <int Group, int... I>
static inline void store_sums(const Vec* acc, float* out, std::integer_sequence<int, I...>) {
  (store_partial(out + I * Group, sums<Group>(acc + I * Group), Group), ...);
}

// `Whole`: k is a multiple of kLanes. A rest would call memcpy, around which no vector register
// survives, so the common case is compiled without it.
template <int M, int N, int P, bool Whole>
static inline void tile_body(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t k,
                             float* out, int64_t ldo, const float* ahead) {
  constexpr int kGroup = kLanes < 8 ? kLanes : 8;  // vectors summed at once
  constexpr int kGroups = (M * N + kGroup - 1) / kGroup;
  Vec acc[kGroups * kGroup] = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    for (int p = 0; p < P; ++p) __builtin_prefetch(ahead + p * ldw + i, 0, 3);
    tile_step<M, N>(x + i, ldx, w + i, ldw, acc, [](const float* p) { return load(p); });
  }
  if constexpr (!Whole) {
    const int64_t rest = k - i;
    tile_step<M, N>(x + i, ldx, w + i, ldw, acc,
                    [rest](const float* p) { return load_partial(p, rest); });
  }
  float flat[kGroups * kGroup];
  store_sums<kGroup>(acc, flat, std::make_integer_sequence<int, kGroups>());
  for (int m = 0; m < M; ++m) std::memcpy(out + m * ldo, flat + m * N, N * sizeof(float));
}

// out[M, N] = x[M, k] · w[N, k]ᵀ, while P rows from `ahead` on are fetched into the cache.
template <int M, int N, int P = 0>
static inline void tile(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t k,
                        float* out, int64_t ldo, const float* ahead = nullptr) {
  if (k % kLanes == 0)
    tile_body<M, N, P, true>(x, ldx, w, ldw, k, out, ldo, ahead);
  else
    tile_body<M, N, P, false>(x, ldx, w, ldw, k, out, ldo, ahead);
}

// All rows of x against N rows of W; meanwhile the next N rows of W come in, P with each tile.
template <int N, int P>
static inline void tile_rows(int64_t m, const float* x, int64_t ldx, const float* w, int64_t ldw,
                             int64_t k, float* out, int64_t ldo, const float* end) {
  int64_t i = 0;
  const float* ahead = w + N * ldw;
  for (; i + kTileM <= m; i += kTileM, ahead += P * ldw) {
    if (ahead < w + 2 * N * ldw && ahead < end)
      tile<kTileM, N, P>(x + i * ldx, ldx, w, ldw, k, out + i * ldo, ldo, ahead);
    else
      tile<kTileM, N>(x + i * ldx, ldx, w, ldw, k, out + i * ldo, ldo);
  }
  const float* rest = x + i * ldx;
  float* out_rest = out + i * ldo;
  if (m - i == 3) tile<3, N, P>(rest, ldx, w, ldw, k, out_rest, ldo, ahead);
  if (m - i == 2) tile<2, N, P>(rest, ldx, w, ldw, k, out_rest, ldo, ahead);
  if (m - i == 1) tile<1, N, P>(rest, ldx, w, ldw, k, out_rest, ldo, ahead);
}

// One row of x against N rows of W, read one after the other, end to end: with a single token memory
// is the limit, and it serves one long stream two to three times as fast as several short ones.
template <int N>
static inline void stream_rows(const float* x, const float* w, int64_t ldw, int64_t k, float* out) {
  Vec acc[N] = {};
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n)
    for (int64_t i = 0; i < k; i += kLanes) acc[n] += load(x + i) * load(w + n * ldw + i);
  store_partial(out, sums<N>(acc), N);
}

// out[m, n] = x[m, k] · w[n, k]ᵀ, without bias.
static inline void matmul(int64_t m, int64_t n, int64_t k, const float* x, int64_t ldx,
                          const float* w, int64_t ldw, float* out, int64_t ldo) {
  const int64_t tiles = (m + kTileM - 1) / kTileM;
  const float* end = w + n * ldw;
  int64_t j = 0;
  if (m == 1 && k % kLanes == 0) {
    constexpr int kRows = kLanes < 8 ? kLanes : 8;
    for (; j + kRows <= n; j += kRows) stream_rows<kRows>(x, w + j * ldw, ldw, k, out + j);
  }
  for (; j + kTileN <= n; j += kTileN) {
    const float* wj = w + j * ldw;
    if (tiles == 1)
      tile_rows<kTileN, kTileN>(m, x, ldx, wj, ldw, k, out + j, ldo, end);
    else if (tiles < 6)
      tile_rows<kTileN, (kTileN + 1) / 2>(m, x, ldx, wj, ldw, k, out + j, ldo, end);
    else
      tile_rows<kTileN, 1>(m, x, ldx, wj, ldw, k, out + j, ldo, end);
  }
  for (; j < n; ++j) tile_rows<1, 1>(m, x, ldx, w + j * ldw, ldw, k, out + j, ldo, end);
}

}  // namespace quadriga
