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
