// Vectors of float as wide as the machine has them, in GCC's portable vector extension, and the few
// functions over them that the kernels need. No fast-math: sums keep the order written here, which
// is what makes results independent of the batch.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace quadriga {

#define QUADRIGA_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int kLanes = 16;      // floats in a vector
constexpr int kRegisters = 32;  // vector registers
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kRegisters = 32;
#else
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
#endif

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(int32_t))));

QUADRIGA_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(Vec));
  return v;
}

// The first `count` lanes from memory, zeros in the others.
QUADRIGA_INLINE Vec load_partial(const float* p, int64_t count) {
  Vec v = {};
  std::memcpy(&v, p, static_cast<size_t>(count) * sizeof(float));
  return v;
}

// Keep a value in a register: compilers otherwise fold one load into each of its uses, and the loads
// become the bottleneck.
QUADRIGA_INLINE void pin(Vec& v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__AVX__)
  asm("" : "+x"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#else
  (void)v;
#endif
}

QUADRIGA_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(Vec)); }

QUADRIGA_INLINE void store_partial(float* p, Vec v, int64_t count) {
  std::memcpy(p, &v, static_cast<size_t>(count) * sizeof(float));
}

QUADRIGA_INLINE Vec splat(float x) { return Vec{} + x; }

// a · b + c, rounded once where the machine can. Left to contract, compilers do it in some tiles and
// not in others (GCC for Zen, which shuns chains of them), and results would depend on the batch.
QUADRIGA_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// Sum of the lanes, always as a balanced tree.
QUADRIGA_INLINE float sum(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

QUADRIGA_INLINE float max_lane(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  float best = lanes[0];
  for (int i = 1; i < kLanes; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

QUADRIGA_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }

// e^x to about 1 ulp, by range reduction to [-ln2/2, ln2/2] and a polynomial of degree 6.
// Below -87.3 the result is 0, above 88 it stays at e^88.
QUADRIGA_INLINE Vec exp(Vec x) {
  const Vec low = splat(-87.3f), high = splat(88.0f);
  IntVec vanishes = x < low;
  x = x > high ? high : x;
  x = vanishes ? low : x;
  Vec turns = x * 1.44269504088896341f;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  Vec n = (turns + magic) - magic;
  Vec r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntVec exponent = __builtin_convertvector(n, IntVec);
  IntVec bits = (exponent + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &bits, sizeof(Vec));
  p = p * scale;
  return vanishes ? Vec{} : p;
}

}  // namespace quadriga
