// Matrices of any form: how many bytes they take, their rows, and products with them.
#pragma once

#include "forms.h"
#include "interleaved.h"
#include "linear.h"

namespace quadriga {

// Call body(Form()) with the form of that number: `Form` of matrix.py has the same order.
template <typename Body>
static inline auto with_form(int64_t form, const Body& body) {
  switch (form) {
    case 1: return body(BFloat16());
    case 2: return body(Float16());
    case 3: return body(Q8_0());
    case 4: return body(Q4_0());
    case 5: return body(Q4_1());
    case 6: return body(Int8());
    case 7: return body(BFloat16Pairs());
    default: return body(Float32());
  }
}

// Bytes of a row of k weights; of a whole group's, where rows are interleaved, divided by its rows.
static inline int64_t row_bytes(int64_t form, int64_t k) {
  return with_form(form, [k](auto f) -> int64_t {
    using Form = decltype(f);
    if constexpr (Form::kInterleaved) return Form::kRowHeader + k * Form::kBytes;
    else return row_bytes<Form>(k);
  });
}

// Multiply-adds that a lane does at once.
static inline int64_t products_per_lane(int64_t form) {
  return with_form(form, [](auto f) -> int64_t {
    using Form = decltype(f);
    if constexpr (Form::kInterleaved) return Form::kWeights;
    else return 1;
  });
}

// Row `id` of a matrix as floats.
static inline void expand_row_of(int64_t form, const uint8_t* w, int64_t id, int64_t k,
                                 float* out) {
  with_form(form, [&](auto f) {
    using Form = decltype(f);
    if constexpr (Form::kInterleaved) expand_group_row<Form>(w, id, k, out);
    else expand_row<Form>(w + id * row_bytes<Form>(k), k, out);
  });
}

// Rows of x as the products with a form take them, `stride` bytes apart.
struct Input {
  const uint8_t* rows;
  int64_t stride;

  Input from(int64_t row) const { return {rows + row * stride, stride}; }
};

// out[m, n] = x[m, k] · w[n, k]ᵀ, without bias.
static inline void matmul(int64_t form, int64_t m, int64_t n, int64_t k, Input x, const uint8_t* w,
                          float* out, int64_t ldo) {
  with_form(form, [&](auto f) {
    using Form = decltype(f);
    if constexpr (Form::kInterleaved)
      group_matmul<Form>(m, n, k, x.rows, x.stride, w, out, ldo);
    else
      matmul<Form>(m, n, k, reinterpret_cast<const float*>(x.rows), k, w, out, ldo);
  });
}

}  // namespace quadriga
