// How do the tokens of a packed sequence attend, and how does the gradient come back? A prompt attends to itself, each of
// its completions to the prompt and itself. No table of scores is kept: a tile of queries meets all its keys at once,
// inside the processor's caches, and the backward pass makes the probabilities again from their logarithmic sums.
//
// One item of work is a prompt's completions (or a prompt itself) and one key head. Its keys and values are packed once
// for all queries; products are summed in float32. Nothing depends on the number of threads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "heads.h"
#include "linear.h"
#include "softmax.h"

namespace {

constexpr int64_t TILE = 64;  // queries of a tile, at least: tokens of one row with their heads side by side

struct Sizes {
  int64_t heads, kv_heads, head_size;
  int64_t groups, prompts;  // groups of rows; the first of them are prompts
};

// Own tokens and prompt of a row, as runs of the packed sequence.
struct Span {
  int64_t own, own_length, prompt, prompt_length;
};

// What all calls read.
template <typename T>
struct Sequence {
  const T* qkv;
  const float *cosine, *sine;
  const Span* spans;
  const int64_t* group_starts;
  Sizes s;

  int64_t width() const { return (s.heads + 2 * s.kv_heads) * s.head_size; }
  const T* query(int64_t place, int64_t head) const { return qkv + place * width() + head * s.head_size; }
  const T* key(int64_t place, int64_t kv) const { return query(place, s.heads + kv); }
  const T* value(int64_t place, int64_t kv) const { return query(place, s.heads + s.kv_heads + kv); }
  const float* c(int64_t place) const { return cosine + place * s.head_size / 2; }
  const float* n(int64_t place) const { return sine + place * s.head_size / 2; }
};

// A matrix of few positions, packed to be multiplied from the right: with positions as outputs (scores), or with the
// numbers of a head as outputs and positions as inputs (mixtures). Both come from rows of numbers that end in zeros.
template <typename T>
struct Panels {
  static constexpr int64_t pair = sizeof(float) / sizeof(T);  // inputs that lie side by side
  std::vector<T> by_position, by_number;
  int64_t inputs = 0, positions = 0, numbers = 0;

  void reset(int64_t size, int64_t most, int64_t parts = 1) {
    inputs = parts * padded(size, INPUT_BLOCK), positions = most, numbers = padded(size, PANEL);
  }
  void put_positions(const std::vector<T>& rows, int64_t first, int64_t count) {
    by_position.resize(positions * inputs);
    for (int64_t n = 0; n < count; n++) {
      const T* from = rows.data() + n * inputs;
      T* to = by_position.data() + place(first + n, 0, inputs, T{});
      for (int64_t k = 0; k < inputs; k += pair) std::memcpy(to + k * PANEL, from + k, sizeof(float));
    }
  }
  void put_numbers(const std::vector<T>& rows, int64_t first, int64_t count) {
    by_number.resize(positions * numbers);
    for (int64_t n = 0; n < count; n += pair)
      for (int64_t d = 0; d < numbers; d += PANEL)
        interleave(rows.data() + n * inputs + d, inputs, by_number.data() + place(d, first + n, positions, T{}));
  }
};

// A rotated head is held as its rounding and what that left over, so that scores are exact to 16 bits of a mantissa:
// q k = q_high k_high + q_low k_high + q_high k_low. A float is its own rounding.
template <typename T>
constexpr int64_t PARTS = sizeof(T) == 2 ? 3 : 1;

template <typename T>
inline void split_head(const float* head, T* high, T* low, int64_t size) {
  for (int64_t d = 0; d < size; d++) {
    narrow(head[d], high[d]);
    narrow(head[d] - widen(high[d]), low[d]);
  }
}

// What a thread works in. Rows of queries and scores are padded with zeros.
template <typename T>
struct Scratch {
  Panels<T> keys, values, queries, gradients;
  std::vector<T> q, g, p, crossed, rows, low;
  std::vector<float> score, other, out, inverse, head;
  std::vector<float> grad_keys, grad_values;
};

// Where the positions of a group lie in its panels: the prompt first, then the own tokens of one row.
struct Room {
  int64_t prompt, own, all;
};

template <typename T>
Room room_of(const Sequence<T>& x, int64_t group) {
  const Span* first = x.spans + x.group_starts[group];
  int64_t longest = 0;
  for (int64_t row = x.group_starts[group]; row < x.group_starts[group + 1]; row++)
    longest = std::max(longest, x.spans[row].own_length);
  const int64_t prompt = padded(first->prompt_length, INPUT_BLOCK), own = padded(longest, INPUT_BLOCK);
  return {prompt, own, prompt + own};
}

// Packs the keys and values of a run of tokens from a position on, as the direction reads them.
template <bool BACKWARD, typename T>
void pack_run(const Sequence<T>& x, int64_t start, int64_t length, int64_t kv, int64_t position, Scratch<T>& w) {
  const int64_t D = x.s.head_size, part = padded(D, INPUT_BLOCK), count = padded(length, INPUT_BLOCK);
  w.head.resize(D), w.low.resize(D);
  w.rows.assign(count * w.keys.inputs, T{});
  for (int64_t t = 0; t < length; t++) {
    T* row = w.rows.data() + t * w.keys.inputs;
    widen_head(x.key(start + t, kv), w.head.data(), D);
    rotate(w.head.data(), x.c(start + t), x.n(start + t), D);
    split_head(w.head.data(), row, w.low.data(), D);
    if (PARTS<T> > 1) {
      std::copy_n(row, D, row + part);
      std::copy_n(w.low.data(), D, row + 2 * part);
    }
  }
  w.keys.put_positions(w.rows, position, count);
  if (BACKWARD) w.keys.put_numbers(w.rows, position, count);
  w.rows.assign(count * w.values.inputs, T{});
  for (int64_t t = 0; t < length; t++) std::copy_n(x.value(start + t, kv), D, w.rows.data() + t * w.values.inputs);
  if (BACKWARD)
    w.values.put_positions(w.rows, position, count);
  else
    w.values.put_numbers(w.rows, position, count);
}

// A tile: tokens [first, last) of a row, each with the query heads of one key head side by side.
struct Tile {
  int64_t first, last, shared, kv;
  int64_t count() const { return (last - first) * shared; }
  int64_t lines() const { return padded(std::max(count(), TILE), TILE); }
  int64_t token(int64_t line) const { return first + line / shared; }
  int64_t head(int64_t line) const { return kv * shared + line % shared; }
};

// The rotated queries of a tile [lines, inputs], in the parts that meet those of the keys.
template <typename T>
void read_queries(const Sequence<T>& x, const Span& span, const Tile& tile, Scratch<T>& w) {
  const int64_t D = x.s.head_size, inputs = w.keys.inputs, part = padded(D, INPUT_BLOCK);
  w.q.assign(tile.lines() * inputs, T{});
  for (int64_t line = 0; line < tile.count(); line++) {
    const int64_t at = span.own + tile.token(line);
    widen_head(x.query(at, tile.head(line)), w.head.data(), D);
    rotate(w.head.data(), x.c(at), x.n(at), D);
    T* q = w.q.data() + line * inputs;
    split_head(w.head.data(), q, w.low.data(), D);
    if (PARTS<T> > 1) {
      std::copy_n(w.low.data(), D, q + part);
      std::copy_n(q, D, q + 2 * part);
    }
  }
}

// out = x times the packed positions [lines, room.all]: those of the prompt, and the own ones up to the tile's last token.
template <typename T>
int64_t multiply_positions(const std::vector<T>& x, const Panels<T>& panels, const Tile& tile, const Room& room,
                           std::vector<float>& out) {
  const int64_t seen = room.prompt + padded(tile.last, INPUT_BLOCK);
  out.resize(tile.lines() * room.all);
  multiply_packed<false>(x.data(), panels.inputs, panels.by_position.data(), panels.inputs, panels.inputs, out.data(), room.all,
                  tile.lines(), seen);
  return seen;
}

// Sizes a table of probabilities, and makes zero what nobody sees: padding, and the tokens after a query's own.
template <typename T>
void blank(std::vector<T>& p, const Tile& tile, const Room& room, int64_t prompt, int64_t seen) {
  p.resize(tile.lines() * room.all);
  for (int64_t line = 0; line < tile.lines(); line++) {
    T* row = p.data() + line * room.all;
    const bool real = line < tile.count();
    std::fill(row + (real ? prompt : 0), row + room.prompt, T{});
    std::fill(row + room.prompt + (real ? tile.token(line) + 1 : 0), row + seen, T{});
  }
}

template <typename T>
void attend(const Sequence<T>& x, const Span& span, const Tile& tile, const Room& room, T* mixed, float* logs,
            Scratch<T>& w) {
  const int64_t D = x.s.head_size, wide = padded(D, PANEL), heads = x.s.heads, S = span.prompt_length;
  const float scale = 1.0f / std::sqrt(float(D));
  read_queries(x, span, tile, w);
  const int64_t seen = multiply_positions(w.q, w.keys, tile, room, w.score);
  blank(w.p, tile, room, S, seen);
  w.out.resize(tile.lines() * wide);
  w.inverse.resize(tile.lines());
  for (int64_t line = 0; line < tile.count(); line++) {
    const float *prompt = w.score.data() + line * room.all, *own = prompt + room.prompt;
    T* p = w.p.data() + line * room.all;
    const int64_t T_seen = tile.token(line) + 1;
    const float largest = largest_of(own, T_seen, largest_of(prompt, S, -INFINITY));
    const float sum = exponentials(prompt, p, S, scale, largest) +
                      exponentials(own, p + room.prompt, T_seen, scale, largest);
    w.inverse[line] = 1.0f / sum;
    logs[(span.own + tile.token(line)) * heads + tile.head(line)] = largest * scale + std::log(sum);
  }
  multiply_packed<false>(w.p.data(), room.all, w.values.by_number.data(), room.all, seen, w.out.data(), wide,
                  tile.lines(), wide);
  for (int64_t line = 0; line < tile.count(); line++) {
    T* to = mixed + ((span.own + tile.token(line)) * heads + tile.head(line)) * D;
    const float* from = w.out.data() + line * wide;
    for (int64_t d = 0; d < D; d++) narrow(from[d] * w.inverse[line], to[d]);
  }
}

// Gives each tile of a row to `work`.
template <typename Work>
void for_tiles(const Span& span, int64_t shared, int64_t kv, Work work) {
  const int64_t tokens = std::max(int64_t(1), TILE / shared);
  for (int64_t first = 0; first < span.own_length; first += tokens)
    work(Tile{first, std::min(first + tokens, span.own_length), shared, kv});
}

template <typename T>
void forward(const Sequence<T>& x, T* mixed, float* logs) {
  const int64_t shared = x.s.heads / x.s.kv_heads;
#pragma omp parallel
  {
    open_tiles();
    Scratch<T> w;
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t group = 0; group < x.s.groups; group++)
      for (int64_t kv = 0; kv < x.s.kv_heads; kv++) {
        const Room room = room_of(x, group);
        const Span& first = x.spans[x.group_starts[group]];
        w.keys.reset(x.s.head_size, room.all, PARTS<T>), w.values.reset(x.s.head_size, room.all);
        pack_run<false>(x, first.prompt, first.prompt_length, kv, 0, w);
        for (int64_t row = x.group_starts[group]; row < x.group_starts[group + 1]; row++) {
          const Span& span = x.spans[row];
          pack_run<false>(x, span.own, span.own_length, kv, room.prompt, w);
          for_tiles(span, shared, kv, [&](const Tile& tile) { attend(x, span, tile, room, mixed, logs, w); });
        }
      }
    close_tiles();
  }
}

// What the backward pass reads and writes.
template <typename T>
struct Gradients {
  const T* grad_mixed;
  const float* logs;
  float* grad_qkv;
};

// [lines, columns] to [columns, lines], the columns up to `seen`.
template <typename T>
void cross(const std::vector<T>& from, int64_t lines, int64_t columns, int64_t seen, std::vector<T>& to) {
  constexpr int64_t block = 16;
  to.resize(lines * columns);
  for (int64_t first = 0; first < seen; first += block)
    for (int64_t line = 0; line < lines; line += block)
      for (int64_t i = 0; i < block; i++) {
        T* row = to.data() + (first + i) * lines + line;
        const T* column = from.data() + line * columns + first + i;
#pragma GCC unroll 16
        for (int64_t j = 0; j < block; j++) row[j] = column[j * columns];
      }
}

// grad[position] += sum over the tile's lines of weight[line, position] rows[line].
template <typename T>
void add_mixture(const std::vector<T>& weight, const Panels<T>& rows, const Tile& tile, const Room& room, int64_t seen,
                 int64_t wide, std::vector<float>& grad, std::vector<T>& crossed) {
  const int64_t lines = tile.lines();
  cross(weight, lines, room.all, seen, crossed);
  multiply_packed<true>(crossed.data(), lines, rows.by_number.data(), lines, lines, grad.data(), wide, seen, wide);
}

// Scores become probabilities, 0 from `length` on to the end of the last vector; returns the sum of p grad, the mean
// gradient under them.
inline float weigh(float* score, const float* grad, int64_t length, float scale, float log_sum) {
  floats sum = {};
  for (int64_t i = 0; i < length; i += LANES) {
    const floats p = first_of(exp_of(load(score + i) * scale - log_sum), length - i);
    store(p, score + i);
    sum += p * load(grad + i);
  }
  return total(sum);
}

// Probabilities and the gradient of scores, p (grad - mean) scale, rounded to T.
template <typename T>
inline void derive(const float* p, const float* grad, int64_t length, float scale, float mean, T* to_p, T* to_score) {
  for (int64_t i = 0; i < length; i += LANES) {
    const floats weight = load(p + i);
    store(weight, to_p + i);
    store(weight * (load(grad + i) - mean) * scale, to_score + i);
  }
}

template <typename T>
void attend_backward(const Sequence<T>& x, const Span& span, const Tile& tile, const Room& room,
                     const Gradients<T>& at, Scratch<T>& w) {
  const int64_t D = x.s.head_size, wide = padded(D, PANEL), heads = x.s.heads, S = span.prompt_length;
  const int64_t g_inputs = w.values.inputs;
  const float scale = 1.0f / std::sqrt(float(D));
  read_queries(x, span, tile, w);
  w.g.assign(tile.lines() * g_inputs, T{});
  for (int64_t line = 0; line < tile.count(); line++) {
    const int64_t place = (span.own + tile.token(line)) * heads + tile.head(line);
    std::copy_n(at.grad_mixed + place * D, D, w.g.data() + line * g_inputs);
  }
  w.queries.reset(D, tile.lines(), PARTS<T>), w.gradients.reset(D, tile.lines());
  w.queries.put_numbers(w.q, 0, tile.lines()), w.gradients.put_numbers(w.g, 0, tile.lines());
  const int64_t seen = multiply_positions(w.q, w.keys, tile, room, w.score);
  multiply_positions(w.g, w.values, tile, room, w.other);
  blank(w.p, tile, room, S, seen);
  std::vector<T>& ds = w.q;  // the queries are packed, and not needed as rows again
  blank(ds, tile, room, S, seen);
  for (int64_t line = 0; line < tile.count(); line++) {
    const float log_sum = at.logs[(span.own + tile.token(line)) * heads + tile.head(line)];
    const int64_t start = line * room.all, own = start + room.prompt, seen_own = tile.token(line) + 1;
    float *score = w.score.data(), *grad = w.other.data();
    const float mean = weigh(score + start, grad + start, S, scale, log_sum) +
                       weigh(score + own, grad + own, seen_own, scale, log_sum);
    derive(score + start, grad + start, S, scale, mean, w.p.data() + start, ds.data() + start);
    derive(score + own, grad + own, seen_own, scale, mean, w.p.data() + own, ds.data() + own);
  }
  add_mixture(w.p, w.gradients, tile, room, seen, wide, w.grad_values, w.crossed);
  add_mixture(ds, w.queries, tile, room, seen, wide, w.grad_keys, w.crossed);
  w.out.resize(tile.lines() * wide);
  multiply_packed<false>(ds.data(), room.all, w.keys.by_number.data(), room.all, seen, w.out.data(), wide,
                  tile.lines(), wide);
  for (int64_t line = 0; line < tile.count(); line++) {
    const int64_t token = span.own + tile.token(line);
    float* to = at.grad_qkv + token * x.width() + tile.head(line) * D;
    float* gradient = w.out.data() + line * wide;
    rotate_back(gradient, x.c(token), x.n(token), D);
    std::copy_n(gradient, D, to);
  }
}

// Writes (own tokens) or adds (prompts, which other items write first) the gradients of keys and values.
template <typename T>
void write_run(const Sequence<T>& x, int64_t start, int64_t length, int64_t kv, int64_t position, bool add,
               const Gradients<T>& at, Scratch<T>& w) {
  const int64_t D = x.s.head_size, wide = padded(D, PANEL);
  for (int64_t t = 0; t < length; t++) {
    float *key = w.grad_keys.data() + (position + t) * wide, *value = w.grad_values.data() + (position + t) * wide;
    rotate_back(key, x.c(start + t), x.n(start + t), D);
    float* to_key = at.grad_qkv + (start + t) * x.width() + (x.s.heads + kv) * D;
    float* to_value = to_key + x.s.kv_heads * D;
    for (int64_t d = 0; d < D; d++) {
      to_key[d] = add ? to_key[d] + key[d] : key[d];
      to_value[d] = add ? to_value[d] + value[d] : value[d];
    }
  }
}

template <typename T>
void backward_item(const Sequence<T>& x, int64_t group, int64_t kv, const Gradients<T>& at, Scratch<T>& w) {
  const int64_t D = x.s.head_size, wide = padded(D, PANEL), shared = x.s.heads / x.s.kv_heads;
  const Room room = room_of(x, group);
  const Span& first = x.spans[x.group_starts[group]];
  w.keys.reset(D, room.all, PARTS<T>), w.values.reset(D, room.all);
  w.grad_keys.assign(room.all * wide, 0.0f), w.grad_values.assign(room.all * wide, 0.0f);
  pack_run<true>(x, first.prompt, first.prompt_length, kv, 0, w);
  for (int64_t row = x.group_starts[group]; row < x.group_starts[group + 1]; row++) {
    const Span& span = x.spans[row];
    if (row > x.group_starts[group]) {
      std::fill(w.grad_keys.begin() + room.prompt * wide, w.grad_keys.end(), 0.0f);
      std::fill(w.grad_values.begin() + room.prompt * wide, w.grad_values.end(), 0.0f);
    }
    pack_run<true>(x, span.own, span.own_length, kv, room.prompt, w);
    for_tiles(span, shared, kv, [&](const Tile& tile) { attend_backward(x, span, tile, room, at, w); });
    write_run(x, span.own, span.own_length, kv, room.prompt, false, at, w);
  }
  write_run(x, first.prompt, first.prompt_length, kv, 0, true, at, w);
}

template <typename T>
void backward(const Sequence<T>& x, const Gradients<T>& at) {
#pragma omp parallel
  {
    open_tiles();
    Scratch<T> w;
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t group = 0; group < x.s.prompts; group++)
      for (int64_t kv = 0; kv < x.s.kv_heads; kv++) backward_item(x, group, kv, at, w);
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t group = x.s.prompts; group < x.s.groups; group++)
      for (int64_t kv = 0; kv < x.s.kv_heads; kv++) backward_item(x, group, kv, at, w);
    close_tiles();
  }
}

template <typename T>
Sequence<T> sequence_of(const T* qkv, const float* cosine, const float* sine, const int64_t* spans,
                        const int64_t* group_starts, const int64_t* sizes) {
  Sizes s;
  std::memcpy(&s, sizes, sizeof(Sizes));
  return {qkv, cosine, sine, reinterpret_cast<const Span*>(spans), group_starts, s};
}

}  // namespace

#define EXPORT(name, T)                                                                                                \
  void attention_##name(const T* qkv, const float* cosine, const float* sine, const int64_t* spans,                    \
                        const int64_t* group_starts, T* mixed, float* logs, const int64_t* sizes) {                    \
    forward<T>(sequence_of(qkv, cosine, sine, spans, group_starts, sizes), mixed, logs);                               \
  }                                                                                                                    \
  void attention_backward_##name(const T* qkv, const float* cosine, const float* sine, const int64_t* spans,           \
                                 const int64_t* group_starts, const T* grad_mixed, const float* logs,                  \
                                 float* grad_qkv, const int64_t* sizes) {                                              \
    backward<T>(sequence_of(qkv, cosine, sine, spans, group_starts, sizes), {grad_mixed, logs, grad_qkv});             \
  }

extern "C" {
EXPORT(float32, float)
EXPORT(bfloat16, bfloat16)
}
