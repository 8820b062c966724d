// The library's C interface: what `library.py` mirrors with ctypes. Matrices are stored in one of
// the forms of forms.h, all other tensors are float32; all are row-major and contiguous, and every
// pointer outlives the call.
#pragma once

#include <cstdint>

extern "C" {

struct QuadrigaMatrix {
  const uint8_t* rows;  // null where there is none
  int64_t form;         // its number in `Form` of matrix.py
};

struct QuadrigaLinear {
  QuadrigaMatrix weight;  // [out, in]
  const float* bias;      // [out] or null
};

// What an adapter adds to a projection of x [in]: up · (down · x).
struct QuadrigaLowRank {
  int64_t rank;       // 0 where the adapter leaves the projection as it is
  const float* down;  // [rank, in]
  const float* up;    // [out, rank]
};

struct QuadrigaNorm {
  const float* weight;  // [size], null where there is no scale
  const float* bias;    // [size] or null
};

struct QuadrigaLayer {
  QuadrigaNorm attn_norm;
  QuadrigaLinear qkv, out;
  QuadrigaNorm mlp_norm;
  QuadrigaLinear up, down;
  const float* q_norm;  // [head_dim], null without qk norm
  const float* k_norm;
  float* keys;  // [num_rows, capacity / kBlock, kv_heads, kBlock, head_dim]
  float* values;
  int64_t window;  // positions a token sees, itself included; 0 is all
  // Of each projection, one for every adapter of the model; null where there are no adapters.
  const QuadrigaLowRank *qkv_loras, *out_loras, *up_loras, *down_loras;
};

struct QuadrigaModel {
  int64_t hidden, heads, kv_heads, head_dim, ffn;
  int64_t capacity;  // of a row, a multiple of kBlock
  int64_t layer_norm;  // 1: LayerNorm, 0: RMSNorm
  int64_t activation;  // 0 silu, 1 relu, 2 gelu, 3 gelu by tanh
  int64_t gated, pre_norm;
  double norm_eps;
  const float* cos;  // [capacity, head_dim / 2], null without RoPE
  const float* sin;
  const QuadrigaLayer* layers;
  // Layers whose K and V were computed, per position: [num_rows, capacity]. A layer reads what is
  // missing from the deepest one that was computed. Null: nothing is missing.
  const uint8_t* depths;
  const int64_t* adapter_of;  // [num_rows]: adapter of a row's tokens, -1 for none; null: of no row
  int64_t max_rank;           // largest `rank` of all adapters and projections
  // Makes n summands of this engine the totals over all ranks, in place; null where it is whole.
  void (*total)(float* summands, int64_t n);
};

struct QuadrigaHead {
  int64_t has_norm, embed, vocab;  // embed: width of the head's input
  int64_t mlp_width;  // of what is added to x before the norm; 0 where nothing is
  QuadrigaNorm mlp_norm;
  QuadrigaLinear mlp_up, mlp_down;  // as a layer's
  QuadrigaNorm norm;
  QuadrigaMatrix project;  // [embed, hidden], or none where embed = hidden
  QuadrigaMatrix weight;   // [vocab, embed]
};

// How K and V of a layer are made of a hidden state that skips it.
struct QuadrigaKVMap {
  QuadrigaNorm norm;
  QuadrigaLinear kv;  // [2 * kv_heads * head_dim, hidden]
};

// Null when the threads cannot be started.
void* quadriga_pool_new(int64_t threads);
void quadriga_pool_free(void* pool);

// Rows `ids` of a matrix of k columns as floats: out [count, k].
void quadriga_rows(const QuadrigaMatrix* matrix, int64_t k, int64_t count, const int64_t* ids,
                   float* out);

// Floats of scratch memory that a pass over `tokens` tokens needs.
int64_t quadriga_scratch(const QuadrigaModel* model, int64_t tokens);

// Run layers [first, stop) over x [tokens, hidden], in place, and store K and V of every token at
// (rows[t], positions[t]). A token sees what its row holds up to its own position.
void quadriga_layers(void* pool, const QuadrigaModel* model, int64_t first, int64_t stop,
                     int64_t tokens, float* x, const int64_t* rows, const int64_t* positions,
                     float* scratch);

// Store K and V of tokens that skipped layers [first, stop), by the map of each layer (`maps` has one
// for every layer of the model) from the hidden states x [tokens, hidden] with which they left.
void quadriga_project_kv(void* pool, const QuadrigaModel* model, const QuadrigaKVMap* maps,
                         int64_t first, int64_t stop, int64_t tokens, const float* x,
                         const int64_t* rows, const int64_t* positions, float* scratch);

// Norm and head over x [tokens, hidden]: logits [tokens, vocab]; into `best` the first index of each
// row's maximum, into `probs` [tokens, 2] the two largest probabilities; either may be null.
// `scratch` holds tokens · (2 · hidden + embed + 2 · mlp_width) floats.
void quadriga_head(void* pool, const QuadrigaModel* model, const QuadrigaHead* head, int64_t tokens,
                   const float* x, float* scratch, float* logits, int64_t* best, float* probs);
}
