// How do the tokens of packed rows get to attention and back? Each row reads its own tokens and those of its prompt,
// both of them runs of neighbours in the packed sequence.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "number.h"

namespace {

struct Shape {
  int64_t rows, own, prompt;           // rows of a block, padded to `own` queries and `prompt` + `own` keys
  int64_t heads, kv_heads, head_size;  // query heads, key heads, numbers per head
};

// Rotates a head by its position (rotary embedding): the halves of a head are the parts of complex numbers.
template <typename T>
inline void rotate(const T* from, const float* cosine, const float* sine, float* to, int64_t half) {
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    float a = widen(from[i]), b = widen(from[i + half]);
    to[i] = a * cosine[i] - b * sine[i];
    to[i + half] = b * cosine[i] + a * sine[i];
  }
}

// The gradient before the rotation, added to what is there: a rotation back.
inline void add_rotated_back(const float* from, const float* cosine, const float* sine, float* to, int64_t half) {
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    to[i] += from[i] * cosine[i] + from[i + half] * sine[i];
    to[i + half] += from[i + half] * cosine[i] - from[i] * sine[i];
  }
}

// q [rows, heads, own, D], k and v [rows, kv_heads, prompt + own, D] from qkv [N, (heads + 2 kv_heads) D]; 0 on padding.
// spans: for each row (start, length) of its own tokens and (start, length) of its prompt's.
template <typename T>
void gather(const T* qkv, const float* cosine, const float* sine, const int64_t* spans, float* q, float* k, float* v,
            Shape s) {
  const int64_t D = s.head_size, half = D / 2, stride = (s.heads + 2 * s.kv_heads) * D, keys = s.prompt + s.own;
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t row = 0; row < s.rows; row++) {
    for (int64_t head = 0; head < s.heads + s.kv_heads; head++) {
      const int64_t *own = spans + 4 * row, *prompt = own + 2;
      if (head < s.heads) {
        float* to = q + (row * s.heads + head) * s.own * D;
        for (int64_t t = 0; t < own[1]; t++) {
          int64_t place = own[0] + t;
          rotate(qkv + place * stride + head * D, cosine + place * half, sine + place * half, to + t * D, half);
        }
        std::memset(to + own[1] * D, 0, sizeof(float) * (s.own - own[1]) * D);
        continue;
      }
      int64_t kv = head - s.heads;
      float* to_k = k + (row * s.kv_heads + kv) * keys * D;
      float* to_v = v + (row * s.kv_heads + kv) * keys * D;
      for (int64_t t = 0; t < keys; t++) {
        bool in_prompt = t < s.prompt;
        int64_t inside = in_prompt ? t : t - s.prompt;
        const int64_t* span = in_prompt ? prompt : own;
        if (inside >= span[1]) {
          std::memset(to_k + t * D, 0, sizeof(float) * D);
          std::memset(to_v + t * D, 0, sizeof(float) * D);
          continue;
        }
        int64_t place = span[0] + inside;
        const T* key = qkv + place * stride + (s.heads + kv) * D;
        const T* value = key + s.kv_heads * D;
        rotate(key, cosine + place * half, sine + place * half, to_k + t * D, half);
#pragma omp simd
        for (int64_t i = 0; i < D; i++) to_v[t * D + i] = widen(value[i]);
      }
    }
  }
}

// The gradient of gather, added to grad_qkv [N, ...] in float32. Rows of one prompt follow each other and share a
// thread, because they add to the same places; `groups` holds the first row of each prompt and the number of rows.
void gather_backward(const float* grad_q, const float* grad_k, const float* grad_v, const float* cosine,
                     const float* sine, const int64_t* spans, const int64_t* groups, int64_t num_groups,
                     float* grad_qkv, Shape s) {
  const int64_t D = s.head_size, half = D / 2, stride = (s.heads + 2 * s.kv_heads) * D, keys = s.prompt + s.own;
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int64_t group = 0; group < num_groups; group++) {
    for (int64_t head = 0; head < s.heads + s.kv_heads; head++) {
      for (int64_t row = groups[group]; row < groups[group + 1]; row++) {
        const int64_t *own = spans + 4 * row, *prompt = own + 2;
        if (head < s.heads) {
          const float* from = grad_q + (row * s.heads + head) * s.own * D;
          for (int64_t t = 0; t < own[1]; t++) {
            int64_t place = own[0] + t;
            add_rotated_back(from + t * D, cosine + place * half, sine + place * half,
                             grad_qkv + place * stride + head * D, half);
          }
          continue;
        }
        int64_t kv = head - s.heads;
        const float* from_k = grad_k + (row * s.kv_heads + kv) * keys * D;
        const float* from_v = grad_v + (row * s.kv_heads + kv) * keys * D;
        for (int part = 0; part < 2; part++) {
          const int64_t* span = part ? own : prompt;
          int64_t first = part ? s.prompt : 0;
          for (int64_t t = 0; t < span[1]; t++) {
            int64_t place = span[0] + t;
            float* to = grad_qkv + place * stride + (s.heads + kv) * D;
            add_rotated_back(from_k + (first + t) * D, cosine + place * half, sine + place * half, to, half);
            float* to_value = to + s.kv_heads * D;
            const float* from = from_v + (first + t) * D;
#pragma omp simd
            for (int64_t i = 0; i < D; i++) to_value[i] += from[i];
          }
        }
      }
    }
  }
}

// out [N, heads D] from o [rows, heads, own, D], without the padding.
template <typename T>
void scatter(const float* o, const int64_t* spans, T* out, Shape s) {
  const int64_t D = s.head_size;
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t row = 0; row < s.rows; row++)
    for (int64_t head = 0; head < s.heads; head++) {
      const float* from = o + (row * s.heads + head) * s.own * D;
      for (int64_t t = 0; t < spans[4 * row + 1]; t++) {
        T* to = out + ((spans[4 * row] + t) * s.heads + head) * D;
#pragma omp simd
        for (int64_t i = 0; i < D; i++) narrow(from[t * D + i], to[i]);
      }
    }
}

// The gradient of scatter: g_o [rows, heads, own, D] from g [N, heads D], 0 on padding.
template <typename T>
void scatter_backward(const T* g, const int64_t* spans, float* g_o, Shape s) {
  const int64_t D = s.head_size;
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t row = 0; row < s.rows; row++)
    for (int64_t head = 0; head < s.heads; head++) {
      float* to = g_o + (row * s.heads + head) * s.own * D;
      int64_t length = spans[4 * row + 1];
      for (int64_t t = 0; t < length; t++) {
        const T* from = g + ((spans[4 * row] + t) * s.heads + head) * D;
#pragma omp simd
        for (int64_t i = 0; i < D; i++) to[t * D + i] = widen(from[i]);
      }
      std::memset(to + length * D, 0, sizeof(float) * (s.own - length) * D);
    }
}

// Scores [rows, heads, own, prompt + own] become probabilities in place: a token sees its prompt and its row up to itself.
void softmax(float* scores, const int64_t* spans, float scale, Shape s) {
  const int64_t keys = s.prompt + s.own;
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t row = 0; row < s.rows; row++)
    for (int64_t line = 0; line < s.heads * s.own; line++) {
      float* score = scores + (row * s.heads * s.own + line) * keys;
      const int64_t t = line % s.own, own_length = spans[4 * row + 1], prompt_length = spans[4 * row + 3];
      if (t >= own_length) {
        std::memset(score, 0, sizeof(float) * keys);
        continue;
      }
      float* mine = score + s.prompt;
      float largest = -INFINITY, sum = 0;
#pragma omp simd reduction(max : largest)
      for (int64_t i = 0; i < prompt_length; i++) largest = std::max(largest, score[i]);
#pragma omp simd reduction(max : largest)
      for (int64_t i = 0; i <= t; i++) largest = std::max(largest, mine[i]);
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < prompt_length; i++) sum += score[i] = exp_of((score[i] - largest) * scale);
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i <= t; i++) sum += mine[i] = exp_of((mine[i] - largest) * scale);
      float inverse = 1.0f / sum;
#pragma omp simd
      for (int64_t i = 0; i < prompt_length; i++) score[i] *= inverse;
#pragma omp simd
      for (int64_t i = 0; i <= t; i++) mine[i] *= inverse;
      std::memset(score + prompt_length, 0, sizeof(float) * (s.prompt - prompt_length));
      std::memset(mine + t + 1, 0, sizeof(float) * (s.own - t - 1));
    }
}

// The gradient of the probabilities becomes that of the scores in place: p (g - sum(p g)) scale.
void softmax_backward(float* g, const float* p, float scale, int64_t lines, int64_t keys) {
#pragma omp parallel for schedule(static)
  for (int64_t line = 0; line < lines; line++) {
    float* to = g + line * keys;
    const float* own = p + line * keys;
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < keys; i++) dot += to[i] * own[i];
#pragma omp simd
    for (int64_t i = 0; i < keys; i++) to[i] = own[i] * (to[i] - dot) * scale;
  }
}

}  // namespace

#define EXPORT(name, T)                                                                                                \
  void gather_##name(const T* qkv, const float* cosine, const float* sine, const int64_t* spans, float* q, float* k,   \
                     float* v, const int64_t* shape) {                                                                 \
    Shape s;                                                                                                           \
    std::memcpy(&s, shape, sizeof(Shape));                                                                             \
    gather<T>(qkv, cosine, sine, spans, q, k, v, s);                                                                   \
  }                                                                                                                    \
  void scatter_##name(const float* o, const int64_t* spans, T* out, const int64_t* shape) {                            \
    Shape s;                                                                                                           \
    std::memcpy(&s, shape, sizeof(Shape));                                                                             \
    scatter<T>(o, spans, out, s);                                                                                      \
  }                                                                                                                    \
  void scatter_backward_##name(const T* g, const int64_t* spans, float* g_o, const int64_t* shape) {                   \
    Shape s;                                                                                                           \
    std::memcpy(&s, shape, sizeof(Shape));                                                                             \
    scatter_backward<T>(g, spans, g_o, s);                                                                             \
  }

extern "C" {
EXPORT(float32, float)
EXPORT(bfloat16, bfloat16)

void gather_backward_float32(const float* grad_q, const float* grad_k, const float* grad_v, const float* cosine,
                             const float* sine, const int64_t* spans, const int64_t* groups, int64_t num_groups,
                             float* grad_qkv, const int64_t* shape) {
  Shape s;
  std::memcpy(&s, shape, sizeof(Shape));
  gather_backward(grad_q, grad_k, grad_v, cosine, sine, spans, groups, num_groups, grad_qkv, s);
}
void softmax_float32(float* scores, const int64_t* spans, float scale, const int64_t* shape) {
  Shape s;
  std::memcpy(&s, shape, sizeof(Shape));
  softmax(scores, spans, scale, s);
}
void softmax_backward_float32(float* g, const float* p, float scale, int64_t lines, int64_t keys) {
  softmax_backward(g, p, scale, lines, keys);
}
}
