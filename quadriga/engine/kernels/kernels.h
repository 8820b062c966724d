// The library's C interface: what `library.py` mirrors with ctypes. All tensors are float32,
// row-major and contiguous; every pointer outlives the call.
#pragma once

#include <cstdint>

extern "C" {

// A linear projection [out, in] or a norm's scale [size]; null members are absent.
struct QuadrigaAffine {
  const float* weight;
  const float* bias;
};

struct QuadrigaLayer {
  QuadrigaAffine attn_norm, qkv, out, mlp_norm, up, down;
  const float* q_norm;  // [head_dim], null without qk norm
  const float* k_norm;
  float* keys;  // [num_rows, capacity / kBlock, kv_heads, kBlock, head_dim]
  float* values;
  int64_t window;  // positions a token sees, itself included; 0 is all
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
};

struct QuadrigaHead {
  int64_t has_norm, embed, vocab;  // embed: width of the head's input
  QuadrigaAffine norm;
  const float* project;  // [embed, hidden], or null where embed = hidden
  const float* weight;   // [vocab, embed]
};

// How K and V of a layer are made of a hidden state that skips it.
struct QuadrigaKVMap {
  QuadrigaAffine norm;
  QuadrigaAffine kv;  // [2 * kv_heads * head_dim, hidden]
};

// Null when the threads cannot be started.
void* quadriga_pool_new(int64_t threads);
void quadriga_pool_free(void* pool);

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
// `scratch` holds tokens · (hidden + embed) floats.
void quadriga_head(void* pool, const QuadrigaModel* model, const QuadrigaHead* head, int64_t tokens,
                   const float* x, float* scratch, float* logits, int64_t* best, float* probs);
}
