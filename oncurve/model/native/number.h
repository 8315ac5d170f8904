// How is a bfloat16 read and written, and how is e^x computed so that a compiler can vectorize it?
#pragma once
#include <bit>
#include <cstdint>

// The upper half of a float: 8 bits of exponent, 7 of mantissa.
struct bfloat16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bfloat16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

// Rounds to nearest, ties to even. A NaN stays one as long as its mantissa is not all in the lower half, as in torch.
inline void narrow(float x, float& out) { out = x; }
inline void narrow(float x, bfloat16& out) {
  uint32_t u = std::bit_cast<uint32_t>(x);
  out.bits = uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// The threshold of the number with a flat index in a weight: see algorithm/rounding.py, which gives the same.
inline uint32_t threshold(uint32_t key, uint32_t index) {
  uint32_t h = index * 0x9e3779b1u + key;
  h = (h ^ h >> 16) * 0x85ebca6bu;
  h = (h ^ h >> 13) * 0xc2b2ae35u;
  return (h ^ h >> 16) & 0xffffu;
}

// Consecutive numbers of a weight, the first of them with the flat index `first`: each is rounded up in size where its
// lower half reaches past its threshold, and what is not finite stays. Compilers vectorize the loop.
inline void dither(const float* __restrict x, bfloat16* __restrict out, uint32_t key, uint32_t first, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const uint32_t u = std::bit_cast<uint32_t>(x[i]);
    const int32_t size = int32_t(u & 0x7fffffffu);
    const uint32_t is_finite = size < 0x7f800000 ? ~0u : 0u, is_nan = size > 0x7f800000 ? ~0u : 0u;
    out[i].bits = uint16_t((u + (threshold(key, first + uint32_t(i)) & is_finite) | (is_nan & 0x400000u)) >> 16);
  }
}
inline void nearest(const float* __restrict x, bfloat16* __restrict out, int64_t count) {
  for (int64_t i = 0; i < count; i++) narrow(x[i], out[i]);
}

// e^x for x <= 88 with a relative error of 2e-7 (Cephes' polynomial); below -87 it is 0.
inline float exp_of(float x) {
  float bounded = x > -87.0f ? x : -87.0f;
  float n = __builtin_floorf(bounded * 1.44269504088896341f + 0.5f);
  float r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  float value = p * r * r + r + 1.0f;
  float scaled = value * std::bit_cast<float>(uint32_t(int32_t(n) + 127) << 23);
  return x > -87.0f ? scaled : (x == x ? 0.0f : x);
}
