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
  int64_t ranks;  // that share the model: heads, kv_heads and ffn are of this one
  // Puts columns [tokens, width] of all ranks side by side: [tokens, ranks · width], good until the
  // next call; null: it failed. Null itself where there is one rank.
  const float* (*gather)(const float* columns, int64_t tokens, int64_t width);
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

// Rows that draft, and when they stop; arrays have an entry for each of the `count` rows. A draft's
// confidence is its probability, or by how much that exceeds the second largest.
struct QuadrigaDraft {
  int64_t count;
  int64_t most;              // passes over a row; `tokens` and `confidences` have room for as many
  const int64_t* rows;       // KV rows
  const int64_t* positions;  // of the newest drafts
  const int64_t* rooms;      // passes that each row may take, up to `most`
  double* survivals;         // probability that all drafts of the row agree; kept up to date
  int64_t* tokens;           // [count, 1 + most]: the newest draft, and behind it those made here
  float* confidences;        // [count, most], of those made here
  int64_t* num_run;          // 0; passes that each row took
  float* const* states;      // where each row's states go, [most, hidden]
  int64_t num_ends;
  const int64_t* ends;  // tokens that are not run
  int64_t num_edges;
  const double* edges;     // of confidence, ascending
  const double* chances;   // [num_edges + 1]: how often a draft agrees, by the edges below it
  double least;            // survival below which a row stops
  double token_s;          // what a token takes
  const double* needed_s;  // [most, count + 1]: the time that a pass over so many rows must spare
  int64_t margin;          // 1: confidence is the difference of the two largest probabilities
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

// Give the tokens of each row of logits [count, vocab] whose bit is not set no probability. Bits are
// bytes of which the lowest is the first token's, `stride` of them a row, whole words of 32 bits.
void quadriga_ban(int64_t count, int64_t vocab, const uint8_t* bits, int64_t stride, float* logits);

// Floats of scratch memory that drafting for `count` rows needs.
int64_t quadriga_draft_scratch(const QuadrigaModel* model, const QuadrigaHead* head, int64_t count);

// Draft on: run the newest draft of each row that may go on through layers [0, stop), and take the
// head's best token for the next, as long as the rows that go on are expected to be worth it.
//   embed: [vocab, hidden]; learned: [max positions, hidden] of what is added to it, or null.
void quadriga_draft(void* pool, const QuadrigaModel* model, const QuadrigaMatrix* embed,
                    const float* learned, int64_t stop, const QuadrigaHead* head,
                    const QuadrigaDraft* draft, float* scratch);
}
