// Sixteen numbers at a time: how are they loaded, widened and rounded? Compilers turn these into what the processor has.
#pragma once
#include <cstring>

#include "number.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

constexpr int64_t LANES = 16;
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t integers __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

inline floats load(const float* from) {
  floats x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

// Each as the lower half of a word.
inline words words_of(halves bits) {
#if defined(__AVX512F__)
  return (words)_mm512_cvtepu16_epi32((__m256i)bits);  // compilers do it in two halves
#else
  return __builtin_convertvector(bits, words);
#endif
}

inline floats load(const bfloat16* from) {
  halves bits;
  std::memcpy(&bits, from, sizeof(bits));
  return std::bit_cast<floats>(words_of(bits) << 16);
}

inline void store(floats x, float* to) { std::memcpy(to, &x, sizeof(x)); }

// Rounds as `narrow` does.
inline void store(floats x, bfloat16* to) {
  words u = std::bit_cast<words>(x);
  halves bits = __builtin_convertvector((u + 0x7fffu + ((u >> 16) & 1u)) >> 16, halves);
  std::memcpy(to, &bits, sizeof(bits));
}

// The first `count` numbers of x, and zeros.
inline floats first_of(floats x, int64_t count) {
  constexpr integers lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < int32_t(count) ? x : floats{};
}

inline float total(floats x) {
  float sum = 0;
#pragma GCC unroll 16
  for (int64_t lane = 0; lane < LANES; lane++) sum += x[lane];
  return sum;
}

// e^x of each number, as `exp_of` of one.
inline floats exp_of(floats x) {
  constexpr float whole = 12582912.0f;  // 1.5 * 2^23: no room for a fraction beside it
  const floats bounded = x > -87.0f ? x : floats{} - 87.0f;
  const floats n = (bounded * 1.44269504088896341f + whole) - whole;
  const floats r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
  floats p = floats{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const floats value = p * r * r + r + 1.0f;
  const floats scaled = value * std::bit_cast<floats>((__builtin_convertvector(n, integers) + 127) << 23);
  return x > -87.0f ? scaled : (x == x ? floats{} : x);
}

// Sixteen numbers of two lines side by side, one of each in turn; a line of floats alone is copied.
inline void interleave(const bfloat16* line, int64_t stride, bfloat16* to) {
  halves first, second;
  std::memcpy(&first, line, sizeof(first)), std::memcpy(&second, line + stride, sizeof(second));
  const words both = words_of(first) | words_of(second) << 16;
  std::memcpy(to, &both, sizeof(both));
}
inline void interleave(const float* line, int64_t, float* to) { std::memcpy(to, line, LANES * sizeof(float)); }
