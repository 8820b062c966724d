// The forms in which the rows of a matrix are stored, and how each becomes floats in registers.
//
// A form says how many weights one step along a row reads (`kStep`, whole vectors), how many bytes
// these take (`kStepBytes`), and reads them (`load`). The floats are, to the bit, those of the row
// written out in float32: every product of a scale and a quant has fewer digits than a float, so
// that it is exact, fused into a sum or not.
#pragma once

#include "simd.h"

#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace quadriga {

typedef uint8_t ByteVec __attribute__((vector_size(kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * sizeof(uint16_t))));
typedef uint32_t BitVec __attribute__((vector_size(kLanes * sizeof(uint32_t))));

template <typename To, typename From>
QUADRIGA_INLINE To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

template <typename V>
QUADRIGA_INLINE V read(const uint8_t* at) {
  V v;
  std::memcpy(&v, at, sizeof(V));
  return v;
}

// Widening by intrinsics where there are some: compilers take vectors of bytes apart, one by one.
#if defined(__AVX512F__)
QUADRIGA_INLINE BitVec widen_halves(const uint8_t* at) {
  return bits_of<BitVec>(_mm512_cvtepu16_epi32(read<__m256i>(at)));
}
QUADRIGA_INLINE IntVec widen_bytes(const uint8_t* at) {
  return bits_of<IntVec>(_mm512_cvtepu8_epi32(read<__m128i>(at)));
}
QUADRIGA_INLINE IntVec widen_signed(const uint8_t* at) {
  return bits_of<IntVec>(_mm512_cvtepi8_epi32(read<__m128i>(at)));
}
#elif defined(__AVX2__)
QUADRIGA_INLINE BitVec widen_halves(const uint8_t* at) {
  return bits_of<BitVec>(_mm256_cvtepu16_epi32(read<__m128i>(at)));
}
QUADRIGA_INLINE IntVec widen_bytes(const uint8_t* at) {
  return bits_of<IntVec>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(read<int64_t>(at))));
}
QUADRIGA_INLINE IntVec widen_signed(const uint8_t* at) {
  return bits_of<IntVec>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(read<int64_t>(at))));
}
#else
QUADRIGA_INLINE BitVec widen_halves(const uint8_t* at) {
  return __builtin_convertvector(read<HalfVec>(at), BitVec);
}
QUADRIGA_INLINE IntVec widen_bytes(const uint8_t* at) {
  return __builtin_convertvector(read<ByteVec>(at), IntVec);
}
QUADRIGA_INLINE IntVec widen_signed(const uint8_t* at) {
  return (widen_bytes(at) ^ 128) - 128;
}
#endif

QUADRIGA_INLINE Vec of_float16(HalfVec h) {
#if defined(__AVX512F__)
  return bits_of<Vec>(_mm512_cvtph_ps(bits_of<__m256i>(h)));
#elif defined(__AVX__) && defined(__F16C__)
  return bits_of<Vec>(_mm256_cvtph_ps(bits_of<__m128i>(h)));
#else
  // Exponent and digits as those of a float 2^112 times too small: the product is exact, also for
  // numbers below the normal ones.
  const BitVec wide = __builtin_convertvector(h, BitVec);
  const Vec size = bits_of<Vec>((wide & 0x7FFF) << 13) * 5.192296858534828e33f;
  return bits_of<Vec>(bits_of<BitVec>(size) | (wide & 0x8000) << 16);
#endif
}

// One float16 in all lanes.
QUADRIGA_INLINE Vec scale_at(const uint8_t* at) {
  return of_float16(HalfVec{} + read<uint16_t>(at));
}

QUADRIGA_INLINE Vec of_bfloat16(BitVec wide) { return bits_of<Vec>(wide << 16); }

struct Float32 {
  static constexpr bool kInterleaved = false;
  static constexpr int64_t kStep = kLanes, kStepBytes = 4 * kLanes;
  QUADRIGA_INLINE void load(const uint8_t* at, Vec* w) { w[0] = read<Vec>(at); }
};

struct BFloat16 {
  static constexpr bool kInterleaved = false;
  static constexpr int64_t kStep = kLanes, kStepBytes = 2 * kLanes;
  QUADRIGA_INLINE void load(const uint8_t* at, Vec* w) { w[0] = of_bfloat16(widen_halves(at)); }
};

struct Float16 {
  static constexpr bool kInterleaved = false;
  static constexpr int64_t kStep = kLanes, kStepBytes = 2 * kLanes;
  QUADRIGA_INLINE void load(const uint8_t* at, Vec* w) { w[0] = of_float16(read<HalfVec>(at)); }
};

constexpr int64_t kBlockWeights = 32;  // of every quantised form
constexpr int64_t kBlockVecs = kBlockWeights / kLanes;

// A scale d (float16) and 32 signed bytes q: d · q.
struct Q8_0 {
  static constexpr bool kInterleaved = false;
  static constexpr int64_t kStep = kBlockWeights, kStepBytes = 2 + 32;
  QUADRIGA_INLINE void load(const uint8_t* at, Vec* w) {
    const Vec d = scale_at(at);
#pragma GCC unroll 8
    for (int v = 0; v < kBlockVecs; ++v)
      w[v] = d * __builtin_convertvector(widen_signed(at + 2 + v * kLanes), Vec);
  }
};

// Four bits q each: the low halves of 16 bytes are the first 16 weights of a block, the high halves
// the other 16. Their floats are d · (q - 8) + m.
QUADRIGA_INLINE void load_nibbles(const uint8_t* at, Vec d, Vec m, int offset, Vec* w) {
#if defined(__AVX512F__)
  // The 16 values that a weight of this block may have, looked up by its low four bits.
  const Vec q = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const auto values = bits_of<__m512>(multiply_add(d, q - static_cast<float>(offset), m));
  const auto value = [&](IntVec i) {
    return bits_of<Vec>(_mm512_permutexvar_ps(bits_of<__m512i>(i), values));
  };
#else
  const auto value = [&](IntVec i) {
    return multiply_add(d, __builtin_convertvector((i & 15) - offset, Vec), m);
  };
#endif
#pragma GCC unroll 8
  for (int v = 0; v < kBlockVecs / 2; ++v) {
    const IntVec both = widen_bytes(at + v * kLanes);
    w[v] = value(both);
    w[v + kBlockVecs / 2] = value(both >> 4);
  }
}

// A scale d (float16) and 16 bytes of q: d · (q - 8).
struct Q4_0 {
  static constexpr bool kInterleaved = false;
  static constexpr int64_t kStep = kBlockWeights, kStepBytes = 2 + 16;
  QUADRIGA_INLINE void load(const uint8_t* at, Vec* w) {
    load_nibbles(at + 2, scale_at(at), -Vec{}, 8, w);  // adding -0 changes nothing
  }
};

// A scale d and a least value m (float16), and 16 bytes of q: d · q + m.
struct Q4_1 {
  static constexpr bool kInterleaved = false;
  static constexpr int64_t kStep = kBlockWeights, kStepBytes = 2 + 2 + 16;
  QUADRIGA_INLINE void load(const uint8_t* at, Vec* w) {
    load_nibbles(at + 4, scale_at(at), scale_at(at + 2), 0, w);
  }
};

// Bytes of a row of k weights.
template <typename Form>
constexpr int64_t row_bytes(int64_t k) {
  return k * Form::kStepBytes / Form::kStep;
}

// The last weights of a row, fewer than a step; blocks have none. Zeros in the other lanes.
template <typename Form>
static inline Vec load_rest(const uint8_t* at, int64_t count) {
  uint8_t padded[Form::kStepBytes] = {};
  Vec w[Form::kStep / kLanes];
  std::memcpy(padded, at, static_cast<size_t>(row_bytes<Form>(count)));
  Form::load(padded, w);
  return w[0];
}

// A row of k weights as floats.
template <typename Form>
static inline void expand_row(const uint8_t* row, int64_t k, float* out) {
  constexpr int kVecs = Form::kStep / kLanes;
  int64_t i = 0;
  for (; i + Form::kStep <= k; i += Form::kStep, row += Form::kStepBytes) {
    Vec w[kVecs];
    Form::load(row, w);
    for (int v = 0; v < kVecs; ++v) store(out + i + v * kLanes, w[v]);
  }
  if (i < k) store_partial(out + i, load_rest<Form>(row, k - i), k - i);
}

}  // namespace quadriga
