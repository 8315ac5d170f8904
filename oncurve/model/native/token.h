// What happens to one token between the matrix products of a layer? The same in training and in a decode step.
#pragma once
#include <algorithm>
#include <cmath>

#include "number.h"

// sum = x + y (where there is a y; sum may be x itself), then out = sum / rms(sum) * w. Returns 1 / rms(sum).
template <typename T, typename Out>
inline float add_norm_token(const float* x, const T* y, float* sum, const float* w, float epsilon, Out* out,
                            int64_t width) {
  float squares = 0;
  if (y) {
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; i++) {
      sum[i] = x[i] + widen(y[i]);
      squares += sum[i] * sum[i];
    }
    x = sum;
  } else {
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; i++) squares += x[i] * x[i];
  }
  const float inverse = 1.0f / std::sqrt(squares / float(width) + epsilon);
#pragma omp simd
  for (int64_t i = 0; i < width; i++) narrow(x[i] * inverse * w[i], out[i]);
  return inverse;
}

// out = silu(gate) * up.
template <typename T>
inline void swiglu_token(const T* gate, const T* up, T* out, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; i++) {
    const float x = widen(gate[i]);
    narrow(x / (1.0f + exp_of(-std::max(x, -80.0f))) * widen(up[i]), out[i]);
  }
}
