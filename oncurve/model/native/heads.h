// How is one head of one token read and written? Normed where the model norms heads, and turned by its position.
#pragma once
#include <cmath>

#include "vector.h"

// Rotates a head by its position (rotary embedding): the halves of a head are the parts of complex numbers.
inline void rotate(float* head, const float* cosine, const float* sine, int64_t size) {
  const int64_t half = size / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cosine[i] - b * sine[i];
    head[i + half] = b * cosine[i] + a * sine[i];
  }
}

// The gradient before the rotation: a rotation back.
inline void rotate_back(float* head, const float* cosine, const float* sine, int64_t size) {
  const int64_t half = size / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cosine[i] + b * sine[i];
    head[i + half] = b * cosine[i] - a * sine[i];
  }
}

template <typename T>
inline void widen_head(const T* head, float* out, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; i++) out[i] = widen(head[i]);
}

template <typename T>
inline void narrow_head(const float* head, T* out, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; i++) narrow(head[i], out[i]);
}

// Root-mean-square norm, rounded as a tensor of type T would be.
template <typename T>
inline void norm_head(float* head, const float* weight, float epsilon, int64_t size) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < size; i++) squares += head[i] * head[i];
  const float inverse = 1.0f / std::sqrt(squares / float(size) + epsilon);
  for (int64_t i = 0; i < size; i++) {
    T rounded;
    narrow(head[i] * inverse * weight[i], rounded);
    head[i] = widen(rounded);
  }
}
