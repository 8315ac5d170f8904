// How does one new token of each of a few rows attend to the prompt they share and to their own past?
//
// A prompt's keys and values are packed for products with all its queries at once. Own keys lie in blocks of 16 positions
// [capacity / 16, head_size, 16], which are read to their end, and own values as [capacity, head_size]. The order of every
// sum is that of one query alone, whatever is computed beside it.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "heads.h"
#include "linear.h"
#include "softmax.h"

struct Heads {
  int64_t heads, kv_heads, size;  // query heads, key heads, numbers per head
  int64_t own, prompt;            // capacity of the own (times 16) and of the prompt cache (times 32) in positions

  int64_t own_part(int64_t slot, int64_t kv) const { return (slot * kv_heads + kv) * size * own; }  // keys or values
  int64_t prompt_keys(int64_t slot, int64_t kv) const {  // where those of a prompt begin
    return (slot * kv_heads + kv) * prompt * padded(size, INPUT_BLOCK);
  }
  int64_t prompt_values(int64_t slot, int64_t kv) const { return (slot * kv_heads + kv) * prompt * padded(size, PANEL); }
};

// score[j, i] = sum over d of q[j, d] keys[i, d], for QUERIES queries and VECTORS blocks of positions.
template <int QUERIES, int VECTORS, typename T>
inline void score_block(const float* q, const T* keys, float* score, int64_t stride, int64_t size) {
  floats sum[QUERIES][VECTORS] = {};
  for (int64_t d = 0; d < size; d++) {
    floats key[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) key[v] = load(keys + (v * size + d) * LANES);
#pragma GCC unroll 4
    for (int j = 0; j < QUERIES; j++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) sum[j][v] += q[j * size + d] * key[v];
  }
#pragma GCC unroll 4
  for (int j = 0; j < QUERIES; j++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) store(sum[j][v], score + j * stride + v * LANES);
}

template <int QUERIES, typename T>
inline void score_few(const float* q, const T* keys, float* score, int64_t stride, int64_t length, int64_t size) {
  int64_t first = 0;
  for (; first + 3 * LANES < length; first += 4 * LANES)  // the last block may end within it
    score_block<QUERIES, 4>(q, keys + first * size, score + first, stride, size);
  if (first + 2 * LANES < length)
    score_block<QUERIES, 3>(q, keys + first * size, score + first, stride, size);
  else if (first + LANES < length)
    score_block<QUERIES, 2>(q, keys + first * size, score + first, stride, size);
  else if (first < length)
    score_block<QUERIES, 1>(q, keys + first * size, score + first, stride, size);
}

// Gives `work` as many of `count` queries at a time as fit into registers: how many, as a constant, and the first.
template <typename Work>
inline void by_few(int64_t count, Work work) {
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) work(std::integral_constant<int, 4>{}, j);
  for (; j + 2 <= count; j += 2) work(std::integral_constant<int, 2>{}, j);
  if (j < count) work(std::integral_constant<int, 1>{}, j);
}

// The scores of `count` queries for `length` positions, and of no meaning up to the end of the last block of 16.
template <typename T>
void score_keys(const float* q, int64_t count, const T* keys, float* score, int64_t stride, int64_t length,
                int64_t size) {
  by_few(count, [&](auto few, int64_t j) {
    score_few<few>(q + j * size, keys, score + j * stride, stride, length, size);
  });
}

// out[j, d] += sum over i of weight[j, i] values[i, d], for QUERIES queries and VECTORS * 16 numbers.
template <int QUERIES, int VECTORS, typename T>
inline void mix_block(const float* weight, int64_t stride, const T* values, float* out, int64_t out_stride,
                      int64_t length, int64_t size) {
  floats sum[QUERIES][VECTORS];
#pragma GCC unroll 4
  for (int j = 0; j < QUERIES; j++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) sum[j][v] = load(out + j * out_stride + v * LANES);
  for (int64_t i = 0; i < length; i++) {
    floats value[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) value[v] = load(values + i * size + v * LANES);
#pragma GCC unroll 4
    for (int j = 0; j < QUERIES; j++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) sum[j][v] += weight[j * stride + i] * value[v];
  }
#pragma GCC unroll 4
  for (int j = 0; j < QUERIES; j++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) store(sum[j][v], out + j * out_stride + v * LANES);
}

template <int QUERIES, typename T>
inline void mix_few(const float* weight, int64_t stride, const T* values, float* out, int64_t out_stride, int64_t length,
                    int64_t size) {
  int64_t d = 0;
  for (; d + 4 * LANES <= size; d += 4 * LANES)
    mix_block<QUERIES, 4>(weight, stride, values + d, out + d, out_stride, length, size);
  for (; d + LANES <= size; d += LANES)
    mix_block<QUERIES, 1>(weight, stride, values + d, out + d, out_stride, length, size);
  for (; d < size; d++)
    for (int j = 0; j < QUERIES; j++)
      for (int64_t i = 0; i < length; i++) out[j * out_stride + d] += weight[j * stride + i] * widen(values[i * size + d]);
}

// Adds the values of `length` positions, weighted for each of `count` queries.
template <typename T>
void mix_values(const float* weight, int64_t stride, int64_t count, const T* values, float* out, int64_t length,
                int64_t size, int64_t out_stride) {
  by_few(count, [&](auto few, int64_t j) {
    mix_few<few>(weight + j * stride, stride, values, out + j * out_stride, out_stride, length, size);
  });
}

// Asks for `count` numbers that are read soon, from far away.
template <typename T>
inline void fetch(const T* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + i, 0, 2);
}

// What a row of the batch is: its slot, its own tokens before this one, its prompt's slot, the prompt's tokens.
struct Place {
  int64_t slot, past, prompt, length;
};

template <typename T>
struct Caches {
  T *own_keys, *own_values;
  const T *prompt_keys, *prompt_values;
};

template <typename T>
struct Scratch {
  std::vector<float> q, out, score, sum;
  std::vector<T> narrow_q, p;
};

// Where the projected tokens lie, and what turns their heads: cosines and sines of each angle [angles, size / 2].
template <typename T>
struct Tokens {
  const T* qkv;
  int64_t stride;
  const float *query_norm, *key_norm;
  float epsilon;
  const float *cosine, *sine;
};

template <typename T>
inline void turn(const Tokens<T>& x, int64_t angle, const T* head, const float* norm, int64_t size, float* out) {
  widen_head(head, out, size);
  if (norm) norm_head<T>(out, norm, x.epsilon, size);
  rotate(out, x.cosine + angle * size / 2, x.sine + angle * size / 2, size);
}

// Rows [first, last) of one prompt, for one key head. Stores the new keys and values, then writes the rows' heads of
// this key head to mixed [rows, stride].
template <typename T>
void attend(const Tokens<T>& x, const Place* places, Caches<T> caches, Heads h, int64_t first, int64_t last, int64_t kv,
            T* mixed, int64_t mixed_stride, Scratch<T>& w) {
  const int64_t D = h.size, shared = h.heads / h.kv_heads, count = (last - first) * shared;
  const int64_t lines = padded(count, ROW_BLOCK), inputs = padded(D, INPUT_BLOCK), wide = padded(D, PANEL);
  const int64_t length = places[first].length, seen = padded(length, INPUT_BLOCK), stride = seen + h.own + LANES;
  const float scale = 1.0f / std::sqrt(float(D));
  w.q.resize(count * D + D), w.sum.resize(count);
  w.narrow_q.assign(lines * inputs, T{}), w.p.assign(lines * seen, T{});
  w.score.resize(lines * stride), w.out.resize(lines * wide);
  for (int64_t row = first; row < last; row++) {
    const Place at = places[row];
    const T* token = x.qkv + row * x.stride;
    const T* key = token + (h.heads + kv) * D;
    T* keys = caches.own_keys + h.own_part(at.slot, kv);
    T* values = caches.own_values + h.own_part(at.slot, kv);
    float* turned = w.q.data() + count * D;
    fetch(keys, at.past * D);
    turn(x, at.length + at.past, key, x.key_norm, D, turned);
    for (int64_t d = 0; d < D; d++) narrow(turned[d], keys[(at.past / LANES * D + d) * LANES + at.past % LANES]);
    std::memcpy(values + at.past * D, key + h.kv_heads * D, sizeof(T) * D);
    for (int64_t j = (row - first) * shared; j < (row - first + 1) * shared; j++) {
      float* q = w.q.data() + j * D;
      turn(x, at.length + at.past, token + (kv * shared + j % shared) * D, x.query_norm, D, q);
      narrow_head(q, w.narrow_q.data() + j * inputs, D);
    }
  }
  // Scores: the prompt's, then from position `seen` on the row's own.
  multiply_packed<false>(w.narrow_q.data(), inputs, caches.prompt_keys + h.prompt_keys(places[first].prompt, kv), inputs,
                  inputs, w.score.data(), stride, count, seen);
  for (int64_t row = first; row < last; row++) {
    const Place at = places[row];
    const T* keys = caches.own_keys + h.own_part(at.slot, kv);
    const int64_t j = (row - first) * shared;
    fetch(caches.own_values + h.own_part(at.slot, kv), at.past * D);
    score_keys(w.q.data() + j * D, shared, keys, w.score.data() + j * stride + seen, stride, at.past + 1, D);
  }
  for (int64_t j = 0; j < count; j++) {
    float *prompt = w.score.data() + j * stride, *own = prompt + seen;
    const int64_t past = places[first + j / shared].past;
    const float largest = largest_of(own, past + 1, largest_of(prompt, length, -INFINITY));
    w.sum[j] = exponentials(prompt, w.p.data() + j * seen, length, scale, largest) +
               exponentials(own, own, past + 1, scale, largest);
  }
  multiply_packed<false>(w.p.data(), seen, caches.prompt_values + h.prompt_values(places[first].prompt, kv), h.prompt, seen,
                  w.out.data(), wide, count, wide);
  for (int64_t row = first; row < last; row++) {
    const Place at = places[row];
    const T* values = caches.own_values + h.own_part(at.slot, kv);
    const int64_t j = (row - first) * shared;
    mix_values(w.score.data() + j * stride + seen, stride, shared, values, w.out.data() + j * wide, at.past + 1, D,
               wide);
    for (int64_t i = j; i < j + shared; i++) {
      T* to = mixed + row * mixed_stride + (kv * shared + i - j) * D;
      for (int64_t d = 0; d < D; d++) narrow(w.out[i * wide + d] / w.sum[i], to[d]);
    }
  }
}

// Packs the keys and values of prompts for `attend`. spans: start and length of each prompt in the packed sequence.
template <typename T>
void store_prompts(const Tokens<T>& x, const int64_t* spans, const int64_t* slots, int64_t prompts, T* keys, T* values,
                   Heads h) {
  const int64_t D = h.size, inputs = padded(D, INPUT_BLOCK);
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t number = 0; number < prompts; number++)
    for (int64_t kv = 0; kv < h.kv_heads; kv++) {
      T* packed_keys = keys + h.prompt_keys(slots[number], kv);
      T* packed_values = values + h.prompt_values(slots[number], kv);
      std::vector<float> turned(D);
      for (int64_t t = 0; t < spans[4 * number + 1]; t++) {
        const int64_t row = spans[4 * number] + t;
        const T* key = x.qkv + row * x.stride + (h.heads + kv) * D;
        turn(x, row, key, x.key_norm, D, turned.data());
        for (int64_t d = 0; d < D; d++) {
          narrow(turned[d], packed_keys[place(t, d, inputs, T{})]);
          packed_values[place(d, t, h.prompt, T{})] = key[h.kv_heads * D + d];
        }
      }
    }
}
