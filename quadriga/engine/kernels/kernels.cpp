// A transformer's forward pass on CPUs: see kernels.h for the interface, linear.h and attention.h
// for where the time goes.
#include "kernels.h"

#include <algorithm>
#include <vector>

#include "attention.h"
#include "matrix.h"
#include "pool.h"
#include "simd.h"

namespace quadriga {
namespace {

constexpr int64_t kTokenBlock = 128;  // rows of x that stay in the second-level cache

// Chunks are sized by what they cost, in rough nanoseconds: long enough to be worth claiming, short
// enough that no thread waits long for another's last one.
constexpr double kChunkNs = 2000.0;
constexpr double kInlineNs = 2000.0;        // less than this is not worth sharing
constexpr double kNsPerMultiplyAdd = 0.02;  // at about 100 GFLOP/s
constexpr double kNsPerByte = 0.04;         // at about 25 GB/s
constexpr double kNsPerRounding = 0.3;

int64_t pieces_per_chunk(double ns_per_piece) {
  const auto pieces = static_cast<int64_t>(kChunkNs / ns_per_piece);
  return pieces < 1 ? 1 : pieces;
}

void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  Vec squares = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = load(x + i);
    squares += v * v;
  }
  if (i < n) {
    const Vec v = load_partial(x + i, n - i);
    squares += v * v;
  }
  const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps);
  for (i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

void layer_norm(const float* x, const QuadrigaNorm& a, int64_t n, float eps, float* out) {
  double total = 0.0, squares = 0.0;
  for (int64_t i = 0; i < n; ++i) total += x[i];
  const double mean = total / static_cast<double>(n);
  for (int64_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const float scale =
      static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(n) + eps));
  const float shift = static_cast<float>(mean);
  for (int64_t i = 0; i < n; ++i) {
    const float v = (x[i] - shift) * scale;
    out[i] = a.weight ? v * a.weight[i] + a.bias[i] : v;
  }
}

Vec activate(int64_t kind, Vec v) {
  if (kind == 0) return v / (exp(-v) + 1.0f);
  if (kind == 1) return max(v, Vec{});
  if (kind == 2) {
    for (int j = 0; j < kLanes; ++j) v[j] = 0.5f * v[j] * (1.0f + std::erf(v[j] * 0.70710678f));
    return v;
  }
  const Vec inner = 0.7978845608f * (v + 0.044715f * v * v * v);
  return v * (1.0f - 1.0f / (exp(2.0f * inner) + 1.0f));  // 0.5 (1 + tanh a) = 1 - 1/(e^2a + 1)
}

// x = act(x) ∘ up, or act(x) where `up` is null.
void activate(int64_t kind, float* x, const float* up, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = activate(kind, load(x + i));
    store(x + i, up ? v * load(up + i) : v);
  }
  if (i == n) return;
  const Vec v = activate(kind, load_partial(x + i, n - i));
  store_partial(x + i, up ? v * load_partial(up + i, n - i) : v, n - i);
}

// Rotate the halves of a head against each other.
void rotate(float* head, const float* cos, const float* sin, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

// The first index of a row's maximum, that maximum, and the largest of the others.
struct TopTwo {
  int64_t index;
  float first, second;
};

TopTwo top_two(const float* row, int64_t n) {
  TopTwo top = {0, row[0], -INFINITY};
  for (int64_t i = 1; i < n; ++i) {
    if (row[i] <= top.second) continue;
    if (row[i] > top.first) {
      top = {i, row[i], top.first};
    } else {
      top.second = row[i];
    }
  }
  return top;
}

// Softmax of the two largest logits of a row.
void probabilities(const float* row, int64_t n, const TopTwo& top, float* out) {
  Vec total = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) total += exp(load(row + i) - top.first);
  float rest = 0.0f;
  for (; i < n; ++i) rest += std::exp(row[i] - top.first);
  out[0] = 1.0f / (sum(total) + rest);
  out[1] = n > 1 ? out[0] * std::exp(top.second - top.first) : 0.0f;
}

// One pass over a fixed set of tokens.
class PassRunner {
 public:
  // rows: of each token; low_rank: scratch, [tokens, max_rank]. Both null in passes without adapters.
  PassRunner(Pool& pool, const QuadrigaModel& model, int64_t tokens, const int64_t* rows = nullptr,
             float* low_rank = nullptr)
      : pool_(pool), model_(model), tokens_(tokens), low_rank_(low_rank) {
    if (!rows || !model.adapter_of) return;
    for (int64_t t = 0; t < tokens && !rows_; ++t)
      if (model.adapter_of[rows[t]] >= 0) rows_ = rows;
  }

  // Share `count` pieces of `ns` nanoseconds each; little work stays on this thread.
  template <typename Body>
  void share(int64_t count, double ns, const Body& body) {
    const double total = ns * static_cast<double>(count);
    const int64_t chunk = total < kInlineNs ? count : pieces_per_chunk(ns);
    pool_.run((count + chunk - 1) / chunk, [&](int64_t i) {
      const int64_t end = (i + 1) * chunk < count ? (i + 1) * chunk : count;
      for (int64_t piece = i * chunk; piece < end; ++piece) body(piece);
    });
  }

  void normalise(const float* x, const QuadrigaNorm& norm, float* out) {
    const int64_t n = model_.hidden;
    const float eps = static_cast<float>(model_.norm_eps);
    const double ns = static_cast<double>(n) * (model_.layer_norm ? 1.0 : 0.1);
    share(tokens_, ns, [&](int64_t t) {
      if (model_.layer_norm)
        layer_norm(x + t * n, norm, n, eps, out + t * n);
      else
        rms_norm(x + t * n, norm.weight, n, eps, out + t * n);
    });
  }

  // x [tokens, k] as products with a form take it; valid until the next input.
  Input input(const float* x, int64_t k, int64_t form) {
    static thread_local std::vector<uint8_t> rounded;
    return with_form(form, [&](auto f) -> Input {
      using Form = decltype(f);
      if constexpr (!Form::kInterleaved) {
        return {reinterpret_cast<const uint8_t*>(x), k * static_cast<int64_t>(sizeof(float))};
      } else {
        const int64_t stride = input_bytes<Form>(k);
        const auto needed = static_cast<size_t>(tokens_ * stride);
        if (rounded.size() < needed) rounded.resize(needed);
        uint8_t* rows = rounded.data();
        share(tokens_, kNsPerRounding * static_cast<double>(k),
              [=](int64_t t) { round_row<Form>(x + t * k, k, rows + t * stride); });
        return {rows, stride};
      }
    });
  }

  // out[tokens, n] = x[tokens, k] · Wᵀ, handed to `finish(t0, t1, n0, n1)` block by block.
  template <typename Finish>
  void project(Input x, int64_t k, const QuadrigaMatrix& w, int64_t n, float* out, int64_t ldo,
               const Finish& finish) {
    const int64_t ldw = row_bytes(w.form, k);
    const int64_t blocks = (tokens_ + kTokenBlock - 1) / kTokenBlock;
    const int64_t chunk = chunk_rows(w.form, n, k);
    const int64_t chunks = (n + chunk - 1) / chunk;
    pool_.run(blocks * chunks, [&](int64_t i) {
      const int64_t t0 = i % blocks * kTokenBlock, n0 = i / blocks * chunk;
      const int64_t t1 = t0 + kTokenBlock < tokens_ ? t0 + kTokenBlock : tokens_;
      const int64_t n1 = n0 + chunk < n ? n0 + chunk : n;
      matmul(w.form, t1 - t0, n1 - n0, k, x.from(t0), w.rows + n0 * ldw, out + t0 * ldo + n0, ldo);
      finish(t0, t1, n0, n1);
    });
  }

  // The low-rank products of a projection's tokens: low_rank_ = x · downᵀ, which `add_up` goes on
  // with. A token's are its own, whichever tokens and adapters stand beside it.
  void project_down(const float* x, int64_t k, const QuadrigaLowRank* loras) {
    if (!rows_ || !loras) return;
    const double ns = 4 * kNsPerByte * static_cast<double>(k * model_.max_rank);
    share(tokens_, ns, [&](int64_t t) {
      const QuadrigaLowRank* lora = lora_of(loras, t);
      if (!lora) return;
      matmul<Float32>(1, lora->rank, k, x + t * k, k,
                      reinterpret_cast<const uint8_t*>(lora->down),
                      low_rank_ + t * model_.max_rank, lora->rank);
    });
  }

  // Add to outputs [n0, n1) of tokens [t0, t1) what their adapters make; `first` is the row of `up`
  // that belongs to output 0, and `out` has `ldo` outputs a token.
  void add_up(const QuadrigaLowRank* loras, int64_t t0, int64_t t1, int64_t n0, int64_t n1,
              int64_t first, float* out, int64_t ldo) const {
    if (!rows_ || !loras) return;
    static thread_local std::vector<float> added;
    if (added.size() < static_cast<size_t>(n1 - n0)) added.resize(n1 - n0);
    for (int64_t t = t0; t < t1; ++t) {
      const QuadrigaLowRank* lora = lora_of(loras, t);
      if (!lora) continue;
      const float* up = lora->up + (first + n0) * lora->rank;
      matmul<Float32>(1, n1 - n0, lora->rank, low_rank_ + t * model_.max_rank, lora->rank,
                      reinterpret_cast<const uint8_t*>(up), added.data(), n1 - n0);
      for (int64_t j = n0; j < n1; ++j) out[t * ldo + j] += added[j - n0];
    }
  }

  void project(const float* x, int64_t k, const QuadrigaLinear& a, int64_t n, float* out,
               const QuadrigaLowRank* loras = nullptr) {
    project_down(x, k, loras);
    const Input in = input(x, k, a.weight.form);
    project(in, k, a.weight, n, out, n, [&](int64_t t0, int64_t t1, int64_t n0, int64_t n1) {
      add_up(loras, t0, t1, n0, n1, 0, out, n);
      if (!a.bias) return;
      for (int64_t t = t0; t < t1; ++t)
        for (int64_t j = n0; j < n1; ++j) out[t * n + j] += a.bias[j];
    });
  }

  // x += y · Wᵀ + bias, where each rank has k columns of y and as many rows of W as any other;
  // `buffer` [tokens, hidden] takes the product.
  void project_back(const float* y, int64_t k, const QuadrigaLinear& a, float* buffer, float* x,
                    const QuadrigaLowRank* loras) {
    if (!model_.gather) return project_add(y, k, a, buffer, x, loras);
    const int64_t n = model_.hidden / model_.ranks;
    const float* all = model_.gather(y, tokens_, k);
    if (!all) return;
    project(all, k * model_.ranks, a, n, buffer, loras);
    all = model_.gather(buffer, tokens_, n);
    for (int64_t i = 0; all && i < tokens_ * model_.hidden; ++i) x[i] += all[i];
  }

  // The same of this rank alone.
  void project_add(const float* y, int64_t k, const QuadrigaLinear& a, float* buffer, float* x,
                   const QuadrigaLowRank* loras = nullptr) {
    const int64_t n = model_.hidden;
    project_down(y, k, loras);
    const Input in = input(y, k, a.weight.form);
    project(in, k, a.weight, n, buffer, n, [&](int64_t t0, int64_t t1, int64_t n0, int64_t n1) {
      add_up(loras, t0, t1, n0, n1, 0, buffer, n);
      for (int64_t t = t0; t < t1; ++t)
        for (int64_t j = n0; j < n1; ++j)
          x[t * n + j] += a.bias ? buffer[t * n + j] + a.bias[j] : buffer[t * n + j];
    });
  }

  // An MLP's first half: out[tokens, n] = act(x · Gateᵀ) ∘ (x · Upᵀ), or act(x · Upᵀ).
  //   buffer: [tokens, n] for the up projection where there is a gate.
  void project_activate(const float* x, const QuadrigaLinear& a, int64_t n, float* out,
                        float* buffer, const QuadrigaLowRank* loras = nullptr) {
    const int64_t k = model_.hidden;
    const int64_t ldw = row_bytes(a.weight.form, k);
    project_down(x, k, loras);
    const Input in = input(x, k, a.weight.form);
    project(in, k, a.weight, n, out, n, [&](int64_t t0, int64_t t1, int64_t n0, int64_t n1) {
      if (model_.gated)
        matmul(a.weight.form, t1 - t0, n1 - n0, k, in.from(t0), a.weight.rows + (n + n0) * ldw,
               buffer + t0 * n + n0, n);
      add_up(loras, t0, t1, n0, n1, 0, out, n);
      if (model_.gated) add_up(loras, t0, t1, n0, n1, n, buffer, n);
      for (int64_t t = t0; t < t1; ++t) {
        float* gate = out + t * n;
        float* up = model_.gated ? buffer + t * n : nullptr;
        for (int64_t j = n0; a.bias && j < n1; ++j) {
          gate[j] += a.bias[j];
          if (up) up[j] += a.bias[n + j];
        }
        activate(model_.activation, gate + n0, up ? up + n0 : nullptr, n1 - n0);
      }
    });
  }

  // Per token: norms and rotation of Q and K, scale of Q, K and V into the cache.
  //   qkv: [tokens, heads + 2 · kv_heads, head_dim]; `heads` is 0 where there are no queries.
  void place_heads(float* qkv, int64_t heads, const QuadrigaLayer& layer, const int64_t* rows,
                   const int64_t* positions) {
    const int64_t dim = model_.head_dim, kv = model_.kv_heads;
    const float eps = static_cast<float>(model_.norm_eps);
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    const int64_t width = (heads + 2 * kv) * dim;
    share(tokens_, 0.5 * static_cast<double>(width), [&](int64_t t) {
      const int64_t position = positions[t];
      for (int64_t h = 0; h < heads + kv; ++h) {
        float* head = qkv + t * width + h * dim;
        const bool is_query = h < heads;
        if (layer.q_norm) rms_norm(head, is_query ? layer.q_norm : layer.k_norm, dim, eps, head);
        if (model_.cos)
          rotate(head, model_.cos + position * (dim / 2), model_.sin + position * (dim / 2), dim);
        for (int64_t i = 0; is_query && i < dim; ++i) head[i] *= scale;
      }
      const size_t bytes = static_cast<size_t>(dim) * sizeof(float);
      for (int64_t h = 0; h < kv; ++h) {
        const int64_t at = rows[t] * row_size() + offset_in_row(position, h, kv, dim);
        const float* key = qkv + t * width + (heads + h) * dim;
        std::memcpy(layer.keys + at, key, bytes);
        std::memcpy(layer.values + at, key + kv * dim, bytes);
      }
    });
  }

  void attention(const float* qkv, int64_t layer, const int64_t* rows, const int64_t* positions,
                 float* out) {
    const int64_t dim = model_.head_dim, kv = model_.kv_heads, group = model_.heads / kv;
    const int64_t width = (model_.heads + 2 * kv) * dim;
    // All KV heads of a token at a time, unless there are too few tokens to go round.
    const int64_t per_chunk = tokens_ >= 4 * pool_.threads() ? kv : 1;
    pool_.run(tokens_ * (kv / per_chunk), [&](int64_t i) {
      const int64_t t = i * per_chunk / kv, h = i * per_chunk % kv;
      attend(context(layer, rows[t], positions[t]), group, h, h + per_chunk, qkv + t * width,
             out + t * model_.heads * dim);
    });
  }

 private:
  // The adapter of a token for one projection; null where it has none.
  const QuadrigaLowRank* lora_of(const QuadrigaLowRank* loras, int64_t t) const {
    const int64_t adapter = model_.adapter_of[rows_[t]];
    return adapter >= 0 && loras[adapter].rank ? loras + adapter : nullptr;
  }

  int64_t row_size() const { return model_.capacity * model_.kv_heads * model_.head_dim; }

  // What a token at `position` of `row` sees in a layer.
  Context context(int64_t layer, int64_t row, int64_t position) const {
    const int64_t stop = position + 1, window = model_.layers[layer].window;
    const int64_t first = window && stop > window ? stop - window : 0;
    const uint8_t* depths = model_.depths ? model_.depths + row * model_.capacity : nullptr;
    return {model_.layers, layer, row * row_size(), depths, first, stop, model_.kv_heads,
            model_.head_dim};
  }

  // Rows of W per chunk of a product with [n, k]: whole register tiles, and whole cache lines of
  // the output, which two threads must not share.
  int64_t chunk_rows(int64_t form, int64_t n, int64_t k) const {
    if (pool_.threads() == 1) return n;
    const int64_t tokens = tokens_ < kTokenBlock ? tokens_ : kTokenBlock;
    const double compute = kNsPerMultiplyAdd * static_cast<double>(tokens * k) /
                           static_cast<double>(products_per_lane(form));
    const double reading = kNsPerByte * static_cast<double>(row_bytes(form, k));
    constexpr int64_t kUnit = 48;
    static_assert(kUnit % kStrip == 0 && kUnit % (kStripGroups * kGroupRows) == 0);
    static_assert(kUnit * sizeof(float) % 64 == 0);
    const int64_t rows = pieces_per_chunk(compute > reading ? compute : reading);
    return (rows + kUnit - 1) / kUnit * kUnit;
  }

  Pool& pool_;
  const QuadrigaModel& model_;
  int64_t tokens_;
  const int64_t* rows_ = nullptr;  // of the tokens, where one of them has an adapter
  float* low_rank_;
};

// Whether a row may run its newest draft.
bool goes_on(const QuadrigaDraft& d, int64_t r) {
  const int64_t newest = d.tokens[r * (1 + d.most) + d.num_run[r]];
  return d.num_run[r] < d.rooms[r] && d.survivals[r] > 0.0 && d.survivals[r] >= d.least &&
         std::find(d.ends, d.ends + d.num_ends, newest) == d.ends + d.num_ends;
}

// A row's newest draft was run, and this is the next.
void drafted(const QuadrigaDraft& d, int64_t r, int64_t token, const float* probs) {
  const float confidence = d.margin ? probs[0] - probs[1] : probs[0];
  const double* above = std::upper_bound(d.edges, d.edges + d.num_edges, confidence);
  d.confidences[r * d.most + d.num_run[r]] = confidence;
  d.survivals[r] *= d.chances[above - d.edges];
  d.tokens[r * (1 + d.most) + ++d.num_run[r]] = token;
}

}  // namespace
}  // namespace quadriga

extern "C" {

void* quadriga_pool_new(int64_t threads) {
  try {
    return new quadriga::Pool(static_cast<int>(threads));
  } catch (...) {  // no memory, or no more threads for this user
    return nullptr;
  }
}

void quadriga_pool_free(void* pool) { delete static_cast<quadriga::Pool*>(pool); }

void quadriga_rows(const QuadrigaMatrix* matrix, int64_t k, int64_t count, const int64_t* ids,
                   float* out) {
  for (int64_t i = 0; i < count; ++i)
    quadriga::expand_row_of(matrix->form, matrix->rows, ids[i], k, out + i * k);
}

int64_t quadriga_scratch(const QuadrigaModel* m, int64_t tokens) {
  const int64_t q = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim;
  return tokens * (m->hidden + q + 2 * kv + q + 2 * m->ffn + m->max_rank);
}

void quadriga_layers(void* pool, const QuadrigaModel* model, int64_t first, int64_t stop,
                     int64_t tokens, float* x, const int64_t* rows, const int64_t* positions,
                     float* scratch) {
  const QuadrigaModel& m = *model;
  const int64_t q = m.heads * m.head_dim, width = q + 2 * m.kv_heads * m.head_dim;
  float* h = scratch;                    // [tokens, hidden]
  float* qkv = h + tokens * m.hidden;    // [tokens, width]
  float* mixed = qkv + tokens * width;   // [tokens, q]
  float* up = mixed + tokens * q;        // [tokens, ffn]
  float* spare = up + tokens * m.ffn;    // [tokens, ffn]
  float* low_rank = spare + tokens * m.ffn;  // [tokens, max_rank]
  quadriga::PassRunner pass(*static_cast<quadriga::Pool*>(pool), m, tokens, rows, low_rank);
  for (int64_t i = first; i < stop; ++i) {
    const QuadrigaLayer& layer = m.layers[i];
    if (m.pre_norm) pass.normalise(x, layer.attn_norm, h);
    pass.project(m.pre_norm ? h : x, m.hidden, layer.qkv, width, qkv, layer.qkv_loras);
    pass.place_heads(qkv, m.heads, layer, rows, positions);
    pass.attention(qkv, i, rows, positions, mixed);
    pass.project_back(mixed, q, layer.out, h, x, layer.out_loras);
    if (!m.pre_norm) pass.normalise(x, layer.attn_norm, x);
    if (m.pre_norm) pass.normalise(x, layer.mlp_norm, h);
    pass.project_activate(m.pre_norm ? h : x, layer.up, m.ffn, up, spare, layer.up_loras);
    pass.project_back(up, m.ffn, layer.down, h, x, layer.down_loras);
    if (!m.pre_norm) pass.normalise(x, layer.mlp_norm, x);
  }
}

void quadriga_project_kv(void* pool, const QuadrigaModel* model, const QuadrigaKVMap* maps,
                         int64_t first, int64_t stop, int64_t tokens, const float* x,
                         const int64_t* rows, const int64_t* positions, float* scratch) {
  const QuadrigaModel& m = *model;
  quadriga::PassRunner pass(*static_cast<quadriga::Pool*>(pool), m, tokens);
  const int64_t width = 2 * m.kv_heads * m.head_dim;
  float* h = scratch;                 // [tokens, hidden]
  float* kv = h + tokens * m.hidden;  // [tokens, width]
  for (int64_t i = first; i < stop; ++i) {
    if (m.pre_norm) pass.normalise(x, maps[i].norm, h);
    pass.project(m.pre_norm ? h : x, m.hidden, maps[i].kv, width, kv);
    pass.place_heads(kv, 0, m.layers[i], rows, positions);
  }
}

void quadriga_head(void* pool, const QuadrigaModel* model, const QuadrigaHead* head, int64_t tokens,
                   const float* x, float* scratch, float* logits, int64_t* best, float* probs) {
  quadriga::PassRunner pass(*static_cast<quadriga::Pool*>(pool), *model, tokens);
  const float* input = x;
  if (head->mlp_width) {
    float* own = scratch + tokens * (model->hidden + head->embed);  // [tokens, hidden]
    float* up = own + tokens * model->hidden;                       // [tokens, mlp_width]
    float* spare = up + tokens * head->mlp_width;                   // [tokens, mlp_width]
    std::copy(x, x + tokens * model->hidden, own);
    pass.normalise(x, head->mlp_norm, scratch);
    pass.project_activate(scratch, head->mlp_up, head->mlp_width, up, spare);
    pass.project_add(up, head->mlp_width, head->mlp_down, scratch, own);
    input = own;
  }
  if (head->has_norm) {
    pass.normalise(input, head->norm, scratch);
    input = scratch;
  }
  if (head->project.rows) {
    float* projected = scratch + tokens * model->hidden;
    pass.project(input, model->hidden, {head->project, nullptr}, head->embed, projected);
    input = projected;
  }
  pass.project(input, head->embed, {head->weight, nullptr}, head->vocab, logits);
  if (!best && !probs) return;
  pass.share(tokens, 0.7 * static_cast<double>(head->vocab), [&](int64_t t) {
    const quadriga::TopTwo top = quadriga::top_two(logits + t * head->vocab, head->vocab);
    if (best) best[t] = top.index;
    if (probs) quadriga::probabilities(logits + t * head->vocab, head->vocab, top, probs + 2 * t);
  });
}

void quadriga_ban(int64_t count, int64_t vocab, const uint8_t* bits, int64_t stride,
                  float* logits) {
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t i = 0; i < vocab; i += 32) {
      const uint8_t* of = bits + t * stride + i / 8;
      const uint32_t word = of[0] | of[1] << 8 | of[2] << 16 | static_cast<uint32_t>(of[3]) << 24;
      float* to = logits + t * vocab + i;
      if (word == ~0u) continue;
      if (vocab - i >= 32) {  // a constant number, which compilers make vectors of
        for (int j = 0; j < 32; ++j) to[j] = word >> j & 1 ? to[j] : -INFINITY;
      } else {
        for (int j = 0; j < vocab - i; ++j) to[j] = word >> j & 1 ? to[j] : -INFINITY;
      }
    }
  }
}

int64_t quadriga_draft_scratch(const QuadrigaModel* m, const QuadrigaHead* head, int64_t count) {
  const int64_t wide = std::max(m->hidden, head->embed);
  const int64_t of_head = count * (2 * m->hidden + wide + 2 * head->mlp_width);
  return count * (m->hidden + head->vocab) + std::max(quadriga_scratch(m, count), of_head);
}

void quadriga_draft(void* pool, const QuadrigaModel* model, const QuadrigaMatrix* embed,
                    const float* learned, int64_t stop, const QuadrigaHead* head,
                    const QuadrigaDraft* draft, float* scratch) {
  const QuadrigaDraft& d = *draft;
  const int64_t hidden = model->hidden;
  float* x = scratch;                             // [count, hidden]
  float* logits = x + d.count * hidden;           // [count, vocab]
  float* of_pass = logits + d.count * head->vocab;
  std::vector<int64_t> numbers(5 * d.count);
  int64_t* going = numbers.data();
  int64_t *rows = going + d.count, *positions = rows + d.count;
  int64_t *ids = positions + d.count, *best = ids + d.count;
  std::vector<float> probs(2 * d.count);
  for (int64_t pass = 0; pass < d.most; ++pass) {
    int64_t count = 0;
    double expected = 0.0;  // tokens
    for (int64_t r = 0; r < d.count; ++r) {
      if (!quadriga::goes_on(d, r)) continue;
      going[count] = r;
      rows[count] = d.rows[r];
      positions[count] = d.positions[r] + d.num_run[r];
      ids[count++] = d.tokens[r * (1 + d.most) + d.num_run[r]];
      expected += d.survivals[r];
    }
    if (!count || expected * d.token_s <= d.needed_s[pass * (d.count + 1) + count]) return;
    quadriga_rows(embed, hidden, count, ids, x);
    for (int64_t i = 0; learned && i < count; ++i)
      for (int64_t j = 0; j < hidden; ++j) x[i * hidden + j] += learned[positions[i] * hidden + j];
    quadriga_layers(pool, model, 0, stop, count, x, rows, positions, of_pass);
    quadriga_head(pool, model, head, count, x, of_pass, logits, best, probs.data());
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = going[i];
      std::copy_n(x + i * hidden, hidden, d.states[r] + d.num_run[r] * hidden);
      quadriga::drafted(d, r, best[i], probs.data() + 2 * i);
    }
  }
}
}
