// What does a decode step do between its matrix products? Each row has one new token, its own past, and a prompt whose
// keys and values it shares with its group.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "number.h"

namespace {

constexpr int64_t BLOCK = 32;  // positions whose scores are summed in registers

struct Shape {
  int64_t rows, own, prompt;           // rows; capacity of the own and of the prompt cache in positions
  int64_t heads, kv_heads, head_size;  // query heads, key heads, numbers per head
};

// score[i] = sum over d of q[d] keys[d, i] for `length` positions; keys lie as [head_size, capacity].
template <typename T>
inline void score_keys(const float* q, const T* keys, float* score, int64_t length, int64_t capacity, int64_t size) {
  int64_t first = 0;
  for (; first + BLOCK <= length; first += BLOCK) {
    float sum[BLOCK] = {};
    for (int64_t d = 0; d < size; d++) {
      const T* key = keys + d * capacity + first;
#pragma omp simd
      for (int64_t i = 0; i < BLOCK; i++) sum[i] += q[d] * widen(key[i]);
    }
    std::memcpy(score + first, sum, sizeof(sum));
  }
  for (int64_t i = first; i < length; i++) score[i] = 0;
  for (int64_t d = 0; d < size; d++) {
    const T* key = keys + d * capacity;
#pragma omp simd
    for (int64_t i = first; i < length; i++) score[i] += q[d] * widen(key[i]);
  }
}

// out[d] += sum over i of weight[i] values[i, d]; values lie as [capacity, head_size].
template <typename T>
inline void mix_values(const float* weight, const T* values, float* out, int64_t length, int64_t size) {
  int64_t first = 0;
  for (; first + 2 * BLOCK <= size; first += 2 * BLOCK) {
    float sum[2 * BLOCK];
    std::memcpy(sum, out + first, sizeof(sum));
    for (int64_t i = 0; i < length; i++) {
      const T* value = values + i * size + first;
#pragma omp simd
      for (int64_t d = 0; d < 2 * BLOCK; d++) sum[d] += weight[i] * widen(value[d]);
    }
    std::memcpy(out + first, sum, sizeof(sum));
  }
  if (first == size) return;
  for (int64_t i = 0; i < length; i++)
#pragma omp simd
    for (int64_t d = first; d < size; d++) out[d] += weight[i] * widen(values[i * size + d]);
}

// Rotates the new queries and keys, stores the new keys and values, attends to prompt and past.
// places: for each row its slot, own tokens before this one, its prompt's slot, the prompt's tokens.
template <typename T>
void attend(const T* qkv, const float* cosine, const float* sine, const int64_t* places, T* own_keys, T* own_values,
            const T* prompt_keys, const T* prompt_values, float scale, T* out, Shape s) {
  const int64_t D = s.head_size, half = D / 2, shared = s.heads / s.kv_heads;
#pragma omp parallel
  {
    std::vector<float> score(s.own + s.prompt + BLOCK), q(D), mixed(D);
#pragma omp for collapse(2) schedule(static)
    for (int64_t row = 0; row < s.rows; row++)
      for (int64_t kv = 0; kv < s.kv_heads; kv++) {
        const int64_t slot = places[4 * row], past = places[4 * row + 1];
        const int64_t prompt_slot = places[4 * row + 2], prompt_length = places[4 * row + 3];
        const float *c = cosine + row * half, *n = sine + row * half;
        const T* token = qkv + row * (s.heads + 2 * s.kv_heads) * D;
        const T* key = token + (s.heads + kv) * D;
        const T* value = key + s.kv_heads * D;
        T* keys = own_keys + (slot * s.kv_heads + kv) * D * s.own;
        T* values = own_values + (slot * s.kv_heads + kv) * D * s.own;
        const T* before_keys = prompt_keys + (prompt_slot * s.kv_heads + kv) * D * s.prompt;
        const T* before_values = prompt_values + (prompt_slot * s.kv_heads + kv) * D * s.prompt;
        for (int64_t i = 0; i < half; i++) {
          float a = widen(key[i]), b = widen(key[i + half]);
          narrow(a * c[i] - b * n[i], keys[i * s.own + past]);
          narrow(b * c[i] + a * n[i], keys[(i + half) * s.own + past]);
        }
        std::memcpy(values + past * D, value, sizeof(T) * D);
        for (int64_t head = kv * shared; head < (kv + 1) * shared; head++) {
          const T* query = token + head * D;
          for (int64_t i = 0; i < half; i++) {
            float a = widen(query[i]), b = widen(query[i + half]);
            q[i] = (a * c[i] - b * n[i]) * scale;
            q[i + half] = (b * c[i] + a * n[i]) * scale;
          }
          score_keys(q.data(), before_keys, score.data(), prompt_length, s.prompt, D);
          score_keys(q.data(), keys, score.data() + prompt_length, past + 1, s.own, D);
          const int64_t length = prompt_length + past + 1;
          float largest = -INFINITY, sum = 0;
          float* p = score.data();
#pragma omp simd reduction(max : largest)
          for (int64_t i = 0; i < length; i++) largest = std::max(largest, p[i]);
#pragma omp simd reduction(+ : sum)
          for (int64_t i = 0; i < length; i++) sum += p[i] = exp_of(p[i] - largest);
          std::fill(mixed.begin(), mixed.end(), 0.0f);
          mix_values(p, before_values, mixed.data(), prompt_length, D);
          mix_values(p + prompt_length, values, mixed.data(), past + 1, D);
          T* to = out + (row * s.heads + head) * D;
          for (int64_t i = 0; i < D; i++) narrow(mixed[i] / sum, to[i]);
        }
      }
  }
}

// The next token of each row from its logits and a uniform number, and its log-probability at the temperature: the first
// token whose cumulative probability exceeds the number. A temperature of 0 takes the largest logit.
template <typename T>
void draw(const T* logits, const double* uniform, float temperature, int64_t* tokens, float* logprobs, int64_t rows,
          int64_t width) {
  const float inverse = temperature > 0 ? 1.0f / temperature : 1.0f;
#pragma omp parallel
  {
    std::vector<float> e(width);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
      const T* z = logits + row * width;
      float largest = -INFINITY, sum = 0;
#pragma omp simd reduction(max : largest)
      for (int64_t i = 0; i < width; i++) largest = std::max(largest, widen(z[i]));
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < width; i++) sum += e[i] = exp_of((widen(z[i]) - largest) * inverse);
      int64_t token = 0;
      if (temperature > 0) {
        double total = 0, before = 0;
        for (int64_t i = 0; i < width; i++) total += e[i];
        const double threshold = uniform[row] * total;
        while (token < width - 1 && before + e[token] <= threshold) before += e[token++];
        while (token > 0 && e[token] == 0) token--;
      } else {
        while (token < width - 1 && widen(z[token]) != largest) token++;
      }
      tokens[row] = token;
      logprobs[row] = (widen(z[token]) - largest) * inverse - std::log(sum);
    }
  }
}

}  // namespace

#define EXPORT(name, T)                                                                                                \
  void attend_##name(const T* qkv, const float* cosine, const float* sine, const int64_t* places, T* own_keys,         \
                     T* own_values, const T* prompt_keys, const T* prompt_values, float scale, T* out,                 \
                     const int64_t* shape) {                                                                           \
    Shape s;                                                                                                           \
    std::memcpy(&s, shape, sizeof(Shape));                                                                             \
    attend<T>(qkv, cosine, sine, places, own_keys, own_values, prompt_keys, prompt_values, scale, out, s);             \
  }                                                                                                                    \
  void draw_##name(const T* logits, const double* uniform, float temperature, int64_t* tokens, float* logprobs,        \
                   int64_t rows, int64_t width) {                                                                      \
    draw<T>(logits, uniform, temperature, tokens, logprobs, rows, width);                                              \
  }

extern "C" {
EXPORT(float32, float)
EXPORT(bfloat16, bfloat16)
}
