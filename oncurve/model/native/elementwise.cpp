// What happens to single tokens between the matrix products of a layer? Root-mean-square norms, SwiGLU, the head's softmax.
#include <algorithm>
#include <cmath>
#include <vector>

#include "softmax.h"
#include "token.h"

namespace {

// sum = x + y (where there is a y; sum may be x itself), then out = sum / rms(sum) * w; keeps 1 / rms for the backward
// pass. The output is of the type of y or in float32.
template <typename T, typename Out>
void add_norm(const float* x, const T* y, float* sum, const float* w, float epsilon, Out* out, float* scale,
              int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    const int64_t at = row * width;
    const float inverse = add_norm_token(x + at, y ? y + at : y, y ? sum + at : sum, w, epsilon, out + at, width);
    if (scale) scale[row] = inverse;
  }
}

// Gradients of the norm: grad_x += scale (g w - xhat mean(g w xhat)), grad_w += sum over rows of g xhat.
// Each of a fixed number of parts sums its own rows in order, so that the sum does not depend on the threads.
template <typename T>
void norm_backward(const T* g, const float* x, const float* w, const float* scale, float* grad_x, float* grad_w,
                   int64_t rows, int64_t width) {
  constexpr int64_t parts = 16;
  std::vector<float> sums(parts * width, 0.0f);
#pragma omp parallel for schedule(static)
  for (int64_t part = 0; part < parts; part++) {
    float* sum = sums.data() + part * width;
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++) {
      const float* own = x + row * width;
      const T* from = g + row * width;
      float* to = grad_x + row * width;
      float inverse = scale[row], dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t i = 0; i < width; i++) dot += widen(from[i]) * w[i] * own[i];
      float shift = dot * inverse * inverse * inverse / float(width);
#pragma omp simd
      for (int64_t i = 0; i < width; i++) {
        float value = widen(from[i]);
        to[i] += value * w[i] * inverse - own[i] * shift;
        sum[i] += value * own[i] * inverse;
      }
    }
  }
  for (int64_t part = 0; part < parts; part++)
    for (int64_t i = 0; i < width; i++) grad_w[i] += sums[part * width + i];
}

// out = silu(gate) * up; a row holds gate and up side by side.
template <typename T>
void swiglu(const T* gate_up, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row++)
    swiglu_token(gate_up + 2 * row * width, gate_up + (2 * row + 1) * width, out + row * width, width);
}

// Overwrites gate and up with their gradients, and writes out = silu(gate) * up once more for the weight's gradient.
template <typename T>
void swiglu_backward(const T* g, T* gate_up, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    T* gate = gate_up + 2 * row * width;
    T* up = gate + width;
    const T* from = g + row * width;
    T* to = out + row * width;
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
      float x = widen(gate[i]), u = widen(up[i]), value = widen(from[i]);
      float sigmoid = 1.0f / (1.0f + exp_of(-std::max(x, -80.0f)));
      float silu = x * sigmoid;
      narrow(silu * u, to[i]);
      narrow(value * u * (sigmoid + silu * (1.0f - sigmoid)), gate[i]);
      narrow(value * silu, up[i]);
    }
  }
}

// Of each row of logits: log p of the target, the entropy and the logarithm of the normalizer, at a temperature.
void head(const float* logits, const int64_t* targets, float inverse_temperature, float* logprobs, float* entropies,
          float* normalizers, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    const float* z = logits + row * width;
    const float largest = largest_of(z, width, -INFINITY);
    float sum = 0, weighted = 0;
#pragma omp simd reduction(+ : sum, weighted)
    for (int64_t i = 0; i < width; i++) {
      float shifted = (z[i] - largest) * inverse_temperature;
      float e = exp_of(shifted);
      sum += e;
      weighted += e * shifted;
    }
    float log_sum = std::log(sum);
    normalizers[row] = largest * inverse_temperature + log_sum;
    logprobs[row] = (z[targets[row]] - largest) * inverse_temperature - log_sum;
    entropies[row] = log_sum - weighted / sum;
  }
}

// Overwrites logits z with the gradient: (g_logprob (onehot - p) - g_entropy p (log p + H)) / temperature.
void head_backward(float* logits, const int64_t* targets, float inverse_temperature, const float* normalizers,
                   const float* entropies, const float* g_logprobs, const float* g_entropies, int64_t rows,
                   int64_t width) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    float* z = logits + row * width;
    float g = g_logprobs[row], h = g_entropies[row], entropy = entropies[row], normalizer = normalizers[row];
    float log_p = z[targets[row]] * inverse_temperature - normalizer;
    float p = exp_of(log_p);
    float of_target = (g * (1.0f - p) - h * p * (log_p + entropy)) * inverse_temperature;
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
      float l = z[i] * inverse_temperature - normalizer;
      z[i] = -exp_of(l) * (g + h * (l + entropy)) * inverse_temperature;
    }
    z[targets[row]] = of_target;
  }
}

}  // namespace

#define EXPORT(name, T)                                                                                                \
  void add_norm_##name(const float* x, const T* y, float* sum, const float* w, float epsilon, T* out, float* scale,      \
                       int64_t rows, int64_t width) {                                                                  \
    add_norm<T, T>(x, y, sum, w, epsilon, out, scale, rows, width);                                                    \
  }                                                                                                                    \
  void norm_backward_##name(const T* g, const float* x, const float* w, const float* scale, float* grad_x,             \
                            float* grad_w, int64_t rows, int64_t width) {                                              \
    norm_backward<T>(g, x, w, scale, grad_x, grad_w, rows, width);                                                     \
  }                                                                                                                    \
  void swiglu_##name(const T* gate_up, T* out, int64_t rows, int64_t width) { swiglu<T>(gate_up, out, rows, width); }  \
  void swiglu_backward_##name(const T* g, T* gate_up, T* out, int64_t rows, int64_t width) {                           \
    swiglu_backward<T>(g, gate_up, out, rows, width);                                                                  \
  }

extern "C" {
EXPORT(float32, float)
EXPORT(bfloat16, bfloat16)

void head_float32(const float* logits, const int64_t* targets, float inverse_temperature, float* logprobs,
                  float* entropies, float* normalizers, int64_t rows, int64_t width) {
  head(logits, targets, inverse_temperature, logprobs, entropies, normalizers, rows, width);
}
void head_backward_float32(float* logits, const int64_t* targets, float inverse_temperature, const float* normalizers,
                           const float* entropies, const float* g_logprobs, const float* g_entropies, int64_t rows,
                           int64_t width) {
  head_backward(logits, targets, inverse_temperature, normalizers, entropies, g_logprobs, g_entropies, rows, width);
}
// Copies of consecutive numbers of a weight, the first of them with the flat index `first`.
void dither_bfloat16(const float* x, bfloat16* out, int64_t key, int64_t first, int64_t count) {
  constexpr int64_t block = 8192;
#pragma omp parallel for schedule(static)
  for (int64_t start = 0; start < count; start += block) {
    const int64_t size = count - start < block ? count - start : block;
    dither(x + start, out + start, uint32_t(key), uint32_t(first + start), size);
  }
}
void add_norm_wide_bfloat16(const float* x, const bfloat16* y, float* sum, const float* w, float epsilon, float* out,
                            float* scale, int64_t rows, int64_t width) {
  add_norm<bfloat16, float>(x, y, sum, w, epsilon, out, scale, rows, width);
}
}
