// What does a decode step do? Each row has one new token, its own past, and a prompt whose keys and values it shares with
// its group. All layers are computed in one call, so that little besides the products and the attention takes time.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attend.h"
#include "token.h"

namespace {

constexpr int64_t QUERIES_TOGETHER = 16;  // of rows that share a prompt and read its keys once

struct Sizes {
  int64_t rows, most_rows;  // of this call, and of any with the same scratch
  int64_t layers, hidden, mlp;
  Heads heads;
  int64_t qkv_rank, output_rank, gate_up_rank, down_rank;  // of the adapters beside the matrices; 0: none

  // Numbers of a row of inputs: those of a matrix, and of the A of its adapter.
  int64_t x_stride() const {
    return padded(std::max(beside(hidden, qkv_rank), beside(hidden, gate_up_rank)), INPUT_BLOCK);
  }
  int64_t mixed_stride() const { return padded(beside(heads.heads * heads.size, output_rank), INPUT_BLOCK); }
  int64_t active_stride() const { return padded(beside(mlp, down_rank), INPUT_BLOCK); }
};

// Where the weights and caches of a layer lie. What a model does not have is null.
template <typename T>
struct Layer {
  const float* first_norm;
  const T* qkv;
  const float *qkv_bias, *query_norm, *key_norm;
  const T* output;
  const float* second_norm;
  const T *gate_up, *down;
  const T *qkv_a, *output_a, *gate_up_a, *down_a;
  Caches<T> caches;
};

// residual += added (where there is something added), then out = residual / rms(residual) * weight.
template <typename T, typename Out>
void add_norm(float* residual, const T* added, int64_t added_stride, const float* weight, float epsilon, Out* out,
              int64_t out_stride, int64_t rows, int64_t width) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    float* own = residual + row * width;
    add_norm_token(own, added ? added + row * added_stride : added, own, weight, epsilon, out + row * out_stride, width);
  }
}

// out = silu(gate) * up; a row of gate_up holds both side by side.
template <typename T>
void swiglu(const T* gate_up, int64_t stride, T* out, int64_t out_stride, int64_t rows, int64_t width) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; row++)
    swiglu_token(gate_up + row * stride, gate_up + row * stride + width, out + row * out_stride, width);
}

// Runs of neighbouring rows with one prompt: [first, last) of each.
std::vector<int64_t> runs_of(const Place* places, int64_t rows, int64_t most) {
  std::vector<int64_t> runs;
  for (int64_t first = 0; first < rows;) {
    int64_t last = first + 1;
    while (last < rows && last - first < most && places[last].prompt == places[first].prompt) last++;
    runs.push_back(first);
    runs.push_back(last);
    first = last;
  }
  return runs;
}

// All layers for one token per row: residual [rows, hidden] in, the normed output of the last layer out.
// Scratch is zero at first; what pads its rows stays so.
template <typename T>
void decode(const Layer<T>* layers, float* residual, const float* cosine, const float* sine, const Place* places,
            const float* last_norm, float epsilon, T* scratch, float* out, Sizes s) {
  const Heads h = s.heads;
  const int64_t shared = h.heads / h.kv_heads, rows = s.rows, lines = padded(s.most_rows, ROW_BLOCK);
  const int64_t queries = h.heads * h.size, qkv_width = (h.heads + 2 * h.kv_heads) * h.size;
  const int64_t x_stride = s.x_stride(), mixed_stride = s.mixed_stride(), active_stride = s.active_stride();
  const int64_t qkv_stride = padded(qkv_width, PANEL);
  const int64_t added_stride = padded(s.hidden, PANEL), gate_up_stride = padded(2 * s.mlp, PANEL);
  T *x = scratch, *mixed = x + lines * x_stride, *active = mixed + lines * mixed_stride;
  T *qkv = active + lines * active_stride, *added = qkv + lines * qkv_stride, *gate_up = added + lines * added_stride;
  const std::vector<int64_t> runs = runs_of(places, rows, std::max(int64_t(1), QUERIES_TOGETHER / shared));
  const int64_t num_runs = runs.size() / 2;
#pragma omp parallel
  {
    open_tiles();
    Scratch<T> own_scratch;
    for (int64_t number = 0; number < s.layers; number++) {
      const Layer<T>& layer = layers[number];
      const Tokens<T> tokens{qkv, qkv_stride, layer.query_norm, layer.key_norm, epsilon, cosine, sine};
      add_norm(residual, number ? added : nullptr, added_stride, layer.first_norm, epsilon, x, x_stride, rows, s.hidden);
      linear_beside(x, x_stride, layer.qkv_a, s.qkv_rank, layer.qkv, layer.qkv_bias, qkv, qkv_stride, rows, s.hidden,
                    qkv_width);
#pragma omp for collapse(2) schedule(dynamic, 1)
      for (int64_t run = 0; run < num_runs; run++)
        for (int64_t kv = 0; kv < h.kv_heads; kv++)
          attend(tokens, places, layer.caches, h, runs[2 * run], runs[2 * run + 1], kv, mixed, mixed_stride, own_scratch);
      linear_beside<T>(mixed, mixed_stride, layer.output_a, s.output_rank, layer.output, nullptr, added, added_stride,
                       rows, queries, s.hidden);
      add_norm(residual, added, added_stride, layer.second_norm, epsilon, x, x_stride, rows, s.hidden);
      linear_beside<T>(x, x_stride, layer.gate_up_a, s.gate_up_rank, layer.gate_up, nullptr, gate_up, gate_up_stride,
                       rows, s.hidden, 2 * s.mlp);
      swiglu(gate_up, gate_up_stride, active, active_stride, rows, s.mlp);
      linear_beside<T>(active, active_stride, layer.down_a, s.down_rank, layer.down, nullptr, added, added_stride, rows,
                       s.mlp, s.hidden);
    }
    add_norm(residual, added, added_stride, last_norm, epsilon, out, s.hidden, rows, s.hidden);
    close_tiles();
  }
}

// How many numbers `decode` needs as scratch.
int64_t scratch_of(Sizes s) {
  const Heads h = s.heads;
  return padded(s.most_rows, ROW_BLOCK) *
         (s.x_stride() + s.mixed_stride() + s.active_stride() + padded((h.heads + 2 * h.kv_heads) * h.size, PANEL) +
          padded(s.hidden, PANEL) + padded(2 * s.mlp, PANEL));
}

// Of sixteen numbers.
inline double sum_of(const float* from) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < LANES; i++) sum += from[i];
  return sum;
}

// The next token of each row from its logits and a uniform number, and its log-probability at the temperature: the first
// token whose cumulative probability exceeds the number. A temperature of 0 takes the largest logit.
void draw(const float* logits, const double* uniform, float temperature, int64_t* tokens, float* logprobs, int64_t rows,
          int64_t width) {
  const float inverse = temperature > 0 ? 1.0f / temperature : 1.0f;
#pragma omp parallel
  {
    std::vector<float> e(padded(width, LANES));  // its end stays zero
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
      const float* z = logits + row * width;
      const float largest = largest_of(z, width, -INFINITY);
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < width; i++) sum += e[i] = exp_of((z[i] - largest) * inverse);
      int64_t token = 0;
      if (temperature > 0) {
        double all = 0, before = 0;
        for (int64_t i = 0; i < width; i += LANES) all += sum_of(&e[i]);
        const double threshold = uniform[row] * all;
        for (; token + LANES < width; token += LANES) {
          const double after = before + sum_of(&e[token]);
          if (!(after <= threshold)) break;
          before = after;
        }
        while (token < width - 1 && before + e[token] <= threshold) before += e[token++];
        while (token > 0 && e[token] == 0) token--;
      } else {
        while (token < width - 1 && z[token] != largest) token++;
      }
      tokens[row] = token;
      logprobs[row] = (z[token] - largest) * inverse - std::log(sum);
    }
  }
}

}  // namespace

#define EXPORT(name, T)                                                                                                \
  void pack_##name(const float* matrix, T* packed, int64_t first, int64_t outputs, int64_t inputs, int64_t key) {      \
    pack(matrix, packed, first, outputs, inputs, key);                                                                 \
  }                                                                                                                    \
  void product_##name(const float* x, const T* packed, float* out, int64_t rows, int64_t inputs, int64_t outputs) {    \
    product<T>(x, packed, out, rows, inputs, outputs);                                                                 \
  }                                                                                                                    \
  void decode_##name(const int64_t* layers, float* residual, const float* cosine, const float* sine,                   \
                     const int64_t* places, const float* last_norm, float epsilon, T* scratch, float* out,             \
                     const int64_t* sizes) {                                                                           \
    Sizes s;                                                                                                           \
    std::memcpy(&s, sizes, sizeof(Sizes));                                                                             \
    decode<T>(reinterpret_cast<const Layer<T>*>(layers), residual, cosine, sine,                                       \
              reinterpret_cast<const Place*>(places), last_norm, epsilon, scratch, out, s);                            \
  }                                                                                                                    \
  void store_prompts_##name(const T* qkv, const float* cosine, const float* sine, const int64_t* spans,                \
                            const int64_t* slots, int64_t prompts, T* keys, T* values, const int64_t* heads) {         \
    Heads h;                                                                                                           \
    std::memcpy(&h, heads, sizeof(Heads));                                                                             \
    const int64_t stride = (h.heads + 2 * h.kv_heads) * h.size;                                                        \
    store_prompts<T>({qkv, stride, nullptr, nullptr, 0, cosine, sine}, spans, slots, prompts, keys, values, h);        \
  }

extern "C" {
EXPORT(float32, float)
EXPORT(bfloat16, bfloat16)

int64_t packed_size(int64_t outputs, int64_t inputs) { return padded(outputs, PANEL) * padded(inputs, INPUT_BLOCK); }
int64_t decode_scratch(const int64_t* sizes) {
  Sizes s;
  std::memcpy(&s, sizes, sizeof(Sizes));
  return scratch_of(s);
}
void draw_float32(const float* logits, const double* uniform, float temperature, int64_t* tokens, float* logprobs,
                  int64_t rows, int64_t width) {
  draw(logits, uniform, temperature, tokens, logprobs, rows, width);
}
}
