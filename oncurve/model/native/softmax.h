// How do scores become probabilities, when a query sees two runs of positions: its prompt and its own tokens?
#pragma once
#include <algorithm>
#include <cmath>

#include "vector.h"

// The largest of `length` scores and of what was the largest before. (Compilers do not vectorize the loop over std::max.)
inline float largest_of(const float* score, int64_t length, float largest) {
  if (length >= LANES) {
    floats most = load(score + length - LANES);
    for (int64_t i = 0; i + LANES <= length; i += LANES) {
      const floats x = load(score + i);
      most = most > x ? most : x;
    }
    for (int64_t lane = 0; lane < LANES; lane++) largest = std::max(largest, most[lane]);
  } else {
    for (int64_t i = 0; i < length; i++) largest = std::max(largest, score[i]);
  }
  return largest;
}

// p = exp(scale (score - largest)), rounded to T, and 0 from `length` on to the end of the last vector; returns the sum
// before rounding. p may be the scores themselves. (A loop over single numbers would take them one by one before the
// first aligned address and after the last whole vector, and longer for those than for all others.)
template <typename T>
inline float exponentials(const float* score, T* p, int64_t length, float scale, float largest) {
  floats sum = {};
  for (int64_t i = 0; i < length; i += LANES) {
    const floats e = first_of(exp_of((load(score + i) - largest) * scale), length - i);
    sum += e;
    store(e, p + i);
  }
  return total(sum);
}
