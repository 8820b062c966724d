// Attention of one token over its own KV row.
//
// A row is [blocks, kv_heads, kBlock, head_dim] for K and the same for V, and is walked in that
// order: memory sees two long linear streams, which is what its prefetchers are good at. Nothing is
// gathered, padded or copied, and a token reads exactly the positions it sees, so lengths may differ
// at will in a batch.
#pragma once

#include <vector>

#include "kernels.h"
#include "linear.h"

namespace quadriga {

constexpr int64_t kBlock = 16;  // positions; `KV_BLOCK` of kv_cache.py

// Where a head's vector of one position lies in a row [blocks, kv_heads, kBlock, dim].
static inline int64_t offset_in_row(int64_t position, int64_t head, int64_t kv_heads, int64_t dim) {
  return ((position / kBlock * kv_heads + head) * kBlock + position % kBlock) * dim;
}

// Positions [first, stop) of one row, as one layer sees them.
struct Context {
  const QuadrigaLayer* layers;
  int64_t layer;
  int64_t row;            // offset of the row in every layer's buffers
  const uint8_t* depths;  // per position, or null where every layer was computed
  int64_t first, stop;
  int64_t kv_heads, dim;

  // The layer whose K and V stand for a position.
  int64_t source(int64_t position) const {
    return depths && depths[position] <= layer ? depths[position] - 1 : layer;
  }

  // End of the run of positions from `j` on that share a block and a source.
  int64_t run_end(int64_t j) const {
    const int64_t block = (j / kBlock + 1) * kBlock;
    const int64_t end = block < stop ? block : stop;
    if (!depths) return end;
    int64_t next = j + 1;
    while (next < end && source(next) == source(j)) ++next;
    return next;
  }
};

// scores[M, n] of consecutive keys of one block.
template <int M>
static inline void score_block(const float* q, const float* keys, int64_t n, int64_t dim,
                               float* out, int64_t ldo) {
  constexpr int kN = kRegisters == 32 ? (M < 4 ? 8 : 4) : (M == 1 ? 8 : 8 / (M == 3 ? 4 : M));
  const auto* at = reinterpret_cast<const uint8_t*>(keys);
  const int64_t bytes = row_bytes<Float32>(dim);
  int64_t j = 0;
  if (dim % kLanes == 0) {
    for (; j + kN <= n; j += kN)
      tile<Float32, M, kN, true>(q, dim, at + j * bytes, bytes, dim, out + j, ldo,
                                 at + (j + kN) * bytes);
    for (; j < n; ++j) tile<Float32, M, 1, false>(q, dim, at + j * bytes, bytes, dim, out + j, ldo);
  }
  for (; j < n; ++j)
    for (int m = 0; m < M; ++m)
      out[m * ldo + j] = dot_with_rest<Float32>(q + m * dim, at + j * bytes, dim);
}

// Softmax of n scores, in place. Lanes past n become 0.
static inline void normalise_scores(float* s, int64_t n) {
  Vec top = splat(-INFINITY);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) top = max(top, load(s + i));
  float best = max_lane(top);
  for (; i < n; ++i) best = s[i] > best ? s[i] : best;
  for (i = n; i % kLanes; ++i) s[i] = -INFINITY;
  Vec total = {};
  for (i = 0; i < n; i += kLanes) {
    const Vec e = exp(load(s + i) - best);
    store(s + i, e);
    total += e;
  }
  const float scale = 1.0f / sum(total);
  for (i = 0; i < n; i += kLanes) store(s + i, load(s + i) * scale);
}

// out[m, …] += weights[m, n] · values[n, …] for D vectors of one head, of `width` lanes each, which
// is kLanes unless `Partial`.
template <int M, int D, bool Partial>
static inline void mix_columns(const float* weights, int64_t ldw, const float* values, int64_t n,
                               int64_t dim, int64_t width, float* out) {
  const auto get = [width](const float* p) { return Partial ? load_partial(p, width) : load(p); };
  Vec acc[M][D];
  for (int m = 0; m < M; ++m)
    for (int d = 0; d < D; ++d) acc[m][d] = get(out + m * dim + d * kLanes);
  for (int64_t j = 0; j < n; ++j) {
    Vec v[D];
    for (int d = 0; d < D; ++d) {
      __builtin_prefetch(values + (j + kBlock) * dim + d * kLanes, 0, 2);
      v[d] = get(values + j * dim + d * kLanes);
    }
    for (int m = 0; m < M; ++m) {
      const Vec p = splat(weights[m * ldw + j]);
      for (int d = 0; d < D; ++d) acc[m][d] = multiply_add(p, v[d], acc[m][d]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int d = 0; d < D; ++d)
      store_partial(out + m * dim + d * kLanes, acc[m][d], Partial ? width : kLanes);
}

template <int M>
static inline void mix_block(const float* weights, int64_t ldw, const float* values, int64_t n,
                             int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes)
    mix_columns<M, 2, false>(weights, ldw, values + d, n, dim, kLanes, out + d);
  for (; d + kLanes <= dim; d += kLanes)
    mix_columns<M, 1, false>(weights, ldw, values + d, n, dim, kLanes, out + d);
  if (d < dim) mix_columns<M, 1, true>(weights, ldw, values + d, n, dim, dim - d, out + d);
}

// Call body(first, std::integral_constant<int, M>) for 4 query heads at a time, then for the rest.
template <typename Body>
static inline void by_fours(int64_t group, const Body& body) {
  int64_t i = 0;
  for (; i + 4 <= group; i += 4) body(i, std::integral_constant<int, 4>());
  if (group - i == 3) body(i, std::integral_constant<int, 3>());
  if (group - i == 2) body(i, std::integral_constant<int, 2>());
  if (group - i == 1) body(i, std::integral_constant<int, 1>());
}

// Attention of one token for KV heads [h0, h1), `group` query heads each.
//   q, out: [heads, dim] of the token; q is scaled.
static inline void attend(const Context& c, int64_t group, int64_t h0, int64_t h1, const float* q,
                          float* out) {
  static thread_local std::vector<float> buffer;
  const int64_t dim = c.dim, n = c.stop - c.first;
  const int64_t ld = (n + kLanes - 1) / kLanes * kLanes;
  const auto needed = static_cast<size_t>((h1 - h0) * group * ld);
  if (buffer.size() < needed) buffer.resize(needed);
  // Call visit(i, m, layer, at, count, s): `m` query heads from `i` on meet `count` positions at
  // offset `at` of a layer's buffers, whose scores are s[m, count], rows `ld` apart.
  const auto walk = [&](const auto& visit) {
    for (int64_t j = c.first, next; j < c.stop; j = next) {
      next = c.run_end(j);
      const QuadrigaLayer& layer = c.layers[c.source(j)];
      for (int64_t h = h0; h < h1; ++h) {
        const int64_t at = c.row + offset_in_row(j, h, c.kv_heads, dim);
        by_fours(group, [&](int64_t head, auto m) {
          const int64_t i = h * group + head;
          visit(i, m, layer, at, next - j, &buffer[0] + (i - h0 * group) * ld + j - c.first);
        });
      }
    }
  };
  walk([&](int64_t i, auto m, const QuadrigaLayer& layer, int64_t at, int64_t count, float* s) {
    score_block<m>(q + i * dim, layer.keys + at, count, dim, s, ld);
  });
  for (int64_t i = 0; i < (h1 - h0) * group; ++i) normalise_scores(buffer.data() + i * ld, n);
  std::memset(out + h0 * group * dim, 0,
              static_cast<size_t>((h1 - h0) * group * dim) * sizeof(float));
  walk([&](int64_t i, auto m, const QuadrigaLayer& layer, int64_t at, int64_t count, float* s) {
    mix_block<m>(s, ld, layer.values + at, count, dim, out + i * dim);
  });
}

}  // namespace quadriga
