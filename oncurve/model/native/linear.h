// How are few rows multiplied with a matrix that is used again and again? The matrix is arranged beforehand as the
// processor reads it: panels of 16 outputs, and in a panel the inputs in order (for bfloat16 in pairs).
//
// Every output is summed over the inputs in their order, whatever the number of rows: a row's result does not depend on
// the rows beside it.
#pragma once
#include <algorithm>
#include <vector>

#include "vector.h"
#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

constexpr int64_t PANEL = LANES;    // outputs of a panel
constexpr int64_t ROW_BLOCK = 16;   // rows come padded to a multiple of this
constexpr int64_t ROWS_LEAST = 4;   // rows that are multiplied at least: fewer would take as long
constexpr int64_t ROWS_TOGETHER = 64; // rows whose sums with a panel are kept until they are written
constexpr int64_t INPUT_BLOCK = 32; // inputs come padded with zeros to a multiple of this

inline int64_t padded(int64_t n, int64_t block) { return (n + block - 1) / block * block; }

// Where input k of output n lies in a packed matrix with `inputs` (padded) inputs.
inline int64_t place(int64_t n, int64_t k, int64_t inputs, float) {
  return n / PANEL * PANEL * inputs + k * PANEL + n % PANEL;
}
inline int64_t place(int64_t n, int64_t k, int64_t inputs, bfloat16) {
  return n / PANEL * PANEL * inputs + k / 2 * 2 * PANEL + n % PANEL * 2 + k % 2;
}

// Writes a matrix [outputs, inputs] to the outputs from `first` on of a packed one, which is zero before; rounded by the
// thresholds of a key, or to the nearest where it is negative. In float nothing is rounded.
inline void pack(const float* matrix, float* packed, int64_t first, int64_t outputs, int64_t inputs, int64_t) {
  const int64_t all = padded(inputs, INPUT_BLOCK);
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < outputs; n++)
    for (int64_t k = 0; k < inputs; k++) packed[place(first + n, k, all, float{})] = matrix[n * inputs + k];
}
inline void pack(const float* matrix, bfloat16* packed, int64_t first, int64_t outputs, int64_t inputs, int64_t key) {
  const int64_t all = padded(inputs, INPUT_BLOCK);
#pragma omp parallel
  {
    std::vector<bfloat16> line(size_t(all), bfloat16{0});
#pragma omp for schedule(static)
    for (int64_t n = 0; n < outputs; n++) {
      const float* from = matrix + n * inputs;
      if (key < 0)
        nearest(from, line.data(), inputs);
      else
        dither(from, line.data(), uint32_t(key), uint32_t(n * inputs), inputs);
      bfloat16* to = packed + place(first + n, 0, all, bfloat16{});
      for (int64_t k = 0; k < all; k += 2) std::memcpy(to + k * PANEL, line.data() + k, 2 * sizeof(bfloat16));
    }
  }
}

// The sums of one row with a panel, in as many registers as the processor needs for them: compilers keep a vector that is
// wider than a register in memory, which makes products four times slower.
#if defined(__AVX512F__)
constexpr int64_t REGISTER = 16;
#elif defined(__AVX__)
constexpr int64_t REGISTER = 8;
#else
constexpr int64_t REGISTER = 4;
#endif
constexpr int64_t REGISTERS = PANEL / REGISTER;
typedef float sums_part __attribute__((vector_size(4 * REGISTER)));
typedef uint32_t words_part __attribute__((vector_size(4 * REGISTER)));

inline void start(sums_part* sum, const float* from) {
#pragma GCC unroll 4
  for (int64_t part = 0; part < REGISTERS; part++) std::memcpy(sum + part, from + part * REGISTER, sizeof(*sum));
}
inline void finish(const sums_part* sum, float* to) {
#pragma GCC unroll 4
  for (int64_t part = 0; part < REGISTERS; part++) std::memcpy(to + part * REGISTER, sum + part, sizeof(*sum));
}

// sum += x w over a pair of inputs (bfloat16) or one (float).
inline void multiply(sums_part* sum, const float* x, const float* w) {
#pragma GCC unroll 4
  for (int64_t part = 0; part < REGISTERS; part++) {
    sums_part weights;
    std::memcpy(&weights, w + part * REGISTER, sizeof(weights));
    sum[part] += *x * weights;
  }
}
template <typename X>
inline void multiply(sums_part* sum, const X* x, const bfloat16* w) {
#if defined(__AVX512BF16__)
  int32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
  *sum = (sums_part)_mm512_dpbf16_ps((__m512)*sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(w));
#else
#pragma GCC unroll 4
  for (int64_t part = 0; part < REGISTERS; part++) {
    words_part both;
    std::memcpy(&both, w + 2 * part * REGISTER, sizeof(both));
    sum[part] += widen(x[0]) * std::bit_cast<sums_part>(both << 16);
    sum[part] += widen(x[1]) * std::bit_cast<sums_part>(both & 0xffff0000u);
  }
#endif
}

// Panels that are multiplied together. With two, eight rows of inputs are read for sixteen sums; with one, sixteen are, and
// reading them takes longer than multiplying.
constexpr int64_t PANELS = REGISTERS == 1 ? 2 : 1;

// Panels side by side: where the first lies, and how many numbers lie between the beginnings of two of them.
template <typename T>
struct PackedPanels {
  const T* first;
  int64_t apart, count;
};
// Where the sums of the first panel go: a row every `stride` numbers, another panel every `apart` numbers.
struct Sums {
  float* first;
  int64_t stride, apart;
  Sums of(int64_t row, int64_t panel = 0) const { return {first + row * stride + panel * apart, stride, apart}; }
};

// out[r, n] = (ADD: out[r, n] +) sum over k of x[r, k] w[n, k] for COUNT panels of outputs and ROWS rows. Asks for the
// panels behind them meanwhile, which may have to come from far away.
template <bool ADD, int64_t COUNT, int64_t ROWS, typename X, typename T>
inline void multiply_tile(const X* x, int64_t x_stride, PackedPanels<T> w, int64_t inputs, Sums out) {
  constexpr int64_t step = sizeof(T) == 2 ? 2 : 1;
  const T* next = w.first + COUNT * w.apart;
  sums_part sum[COUNT][ROWS][REGISTERS] = {};
#pragma GCC unroll 2
  for (int64_t panel = 0; panel < COUNT; panel++)
#pragma GCC unroll 16
    for (int64_t row = 0; row < ROWS; row++)
      if (ADD) start(sum[panel][row], out.of(row, panel).first);
  for (int64_t k = 0; k < inputs; k += step) {
#pragma GCC unroll 2
    for (int64_t panel = 0; panel < COUNT; panel++) __builtin_prefetch(next + panel * w.apart + k * PANEL, 0, 2);
#pragma GCC unroll 16
    for (int64_t row = 0; row < ROWS; row++)
#pragma GCC unroll 2
      for (int64_t panel = 0; panel < COUNT; panel++)
        multiply(sum[panel][row], x + row * x_stride + k, w.first + panel * w.apart + k * PANEL);
  }
#pragma GCC unroll 2
  for (int64_t panel = 0; panel < COUNT; panel++)
#pragma GCC unroll 16
    for (int64_t row = 0; row < ROWS; row++) finish(sum[panel][row], out.of(row, panel).first);
}
// The same for any number of rows, as many at a time as the registers hold sums of, and for the last ones, of which a batch
// has fewer with every row that ends, in the smallest tile that holds them.
template <bool ADD, int64_t COUNT, typename X, typename T>
inline void multiply_rows(const X* x, int64_t x_stride, PackedPanels<T> w, int64_t inputs, Sums out, int64_t rows) {
  constexpr int64_t most = (REGISTERS == 1 ? 16 : 4) / COUNT, half = std::max(most / 2, ROWS_LEAST);
  for (int64_t row = 0; row < rows; row += most) {
    const X* from = x + row * x_stride;
    if (rows - row <= ROWS_LEAST)
      multiply_tile<ADD, COUNT, ROWS_LEAST>(from, x_stride, w, inputs, out.of(row));
    else if (rows - row <= half)
      multiply_tile<ADD, COUNT, half>(from, x_stride, w, inputs, out.of(row));
    else
      multiply_tile<ADD, COUNT, most>(from, x_stride, w, inputs, out.of(row));
  }
}
// The same for all panels. For one block of rows, reading the panels is what takes time, so that each is read once and by
// itself.
template <bool ADD, typename X, typename T>
inline void multiply_vectors(const X* x, int64_t x_stride, PackedPanels<T> w, int64_t inputs, Sums out, int64_t rows) {
  if (rows > ROW_BLOCK && w.count == PANELS) return multiply_rows<ADD, PANELS>(x, x_stride, w, inputs, out, rows);
  for (int64_t panel = 0; panel < w.count; panel++) {
    const PackedPanels<T> alone{w.first + panel * w.apart, w.apart, 1};
    multiply_rows<ADD, 1>(x, x_stride, alone, inputs, out.of(0, panel), rows);
  }
}

#if defined(__AMX_BF16__)
// The processor's matrix tiles must be asked for once, and set up in every thread that uses them.
inline bool has_tiles() {
  constexpr int request_permission = 0x1023, tile_data = 18;
  static const bool granted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return granted;
}
struct TileConfig {
  uint8_t palette = 1, rest[15] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline void open_tiles() {
  // Not on the stack: compilers believe that the instruction reads 8 bytes, and leave out the writes of the others.
  static const TileConfig config;
  if (has_tiles()) _tile_loadconfig(&config);
}
inline void close_tiles() {
  if (has_tiles()) _tile_release();
}

// Asks for the block of weights that comes a few blocks after this one: they are read once, from far away.
inline void fetch_ahead(const bfloat16* block) {
  constexpr int64_t ahead = 6 * INPUT_BLOCK * PANEL, line = 32;
#pragma GCC unroll 16
  for (int64_t i = 0; i < INPUT_BLOCK * PANEL; i += line) __builtin_prefetch(block + ahead + i);
}

// The same for four blocks of rows at a time, which read each weight once.
template <bool ADD>
inline void multiply_four(const bfloat16* x, int64_t x_stride, const bfloat16* panel, int64_t inputs, float* out,
                          int64_t out_stride) {
  const int64_t block = ROW_BLOCK * x_stride, line = x_stride * 2, to = ROW_BLOCK * out_stride, out_line = out_stride * 4;
  if (ADD) {
    _tile_loadd(0, out, out_line);
    _tile_loadd(1, out + to, out_line);
    _tile_loadd(2, out + 2 * to, out_line);
    _tile_loadd(3, out + 3 * to, out_line);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < inputs; k += INPUT_BLOCK) {
    fetch_ahead(panel + k * PANEL);
    _tile_loadd(4, panel + k * PANEL, 64);
    _tile_loadd(5, x + k, line);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, x + block + k, line);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(7, x + 2 * block + k, line);
    _tile_dpbf16ps(2, 7, 4);
    _tile_loadd(5, x + 3 * block + k, line);
    _tile_dpbf16ps(3, 5, 4);
  }
  _tile_stored(0, out, out_line);
  _tile_stored(1, out + to, out_line);
  _tile_stored(2, out + 2 * to, out_line);
  _tile_stored(3, out + 3 * to, out_line);
}
template <bool ADD>
inline void multiply_one(const bfloat16* x, int64_t x_stride, const bfloat16* panel, int64_t inputs, float* out,
                         int64_t out_stride) {
  if (ADD)
    _tile_loadd(0, out, out_stride * 4);
  else
    _tile_zero(0);
  for (int64_t k = 0; k < inputs; k += INPUT_BLOCK) {
    fetch_ahead(panel + k * PANEL);
    _tile_loadd(4, panel + k * PANEL, 64);
    _tile_loadd(5, x + k, x_stride * 2);
    _tile_dpbf16ps(0, 5, 4);
  }
  _tile_stored(0, out, out_stride * 4);
}
template <bool ADD>
inline void multiply_panels(const bfloat16* x, int64_t x_stride, PackedPanels<bfloat16> w, int64_t inputs, Sums out,
                            int64_t rows) {
  if (!has_tiles()) return multiply_vectors<ADD>(x, x_stride, w, inputs, out, rows);
  const int64_t blocks = padded(rows, ROW_BLOCK) / ROW_BLOCK;
  for (int64_t number = 0; number < w.count; number++) {
    const bfloat16* panel = w.first + number * w.apart;
    for (int64_t block = 0; block < blocks;) {
      const bool are_four = blocks - block >= 4;
      const int64_t row = block * ROW_BLOCK;
      float* to = out.of(row, number).first;
      if (are_four)
        multiply_four<ADD>(x + row * x_stride, x_stride, panel, inputs, to, out.stride);
      else
        multiply_one<ADD>(x + row * x_stride, x_stride, panel, inputs, to, out.stride);
      block += are_four ? 4 : 1;
    }
  }
}
#else
inline void open_tiles() {}
inline void close_tiles() {}
template <bool ADD>
inline void multiply_panels(const bfloat16* x, int64_t x_stride, PackedPanels<bfloat16> w, int64_t inputs, Sums out,
                            int64_t rows) {
  multiply_vectors<ADD>(x, x_stride, w, inputs, out, rows);
}
#endif
template <bool ADD, typename T>
inline void multiply_panels(const float* x, int64_t x_stride, PackedPanels<T> w, int64_t inputs, Sums out,
                            int64_t rows) {
  multiply_vectors<ADD>(x, x_stride, w, inputs, out, rows);
}

// The panels from output n on that are multiplied together, of a packed matrix with `wide` (padded) outputs of `all` inputs.
template <typename T>
inline PackedPanels<T> panels_at(const T* packed, int64_t all, int64_t n, int64_t wide) {
  return {packed + n * all, PANEL * all, std::min(PANELS, (wide - n) / PANEL)};
}

// out[r, n] = (ADD: out[r, n] +) sum over k < inputs of x[r, k] w[n, k] for so many rows and `outputs` (whole panels) of a
// packed matrix whose outputs hold `all` inputs each. Needs open_tiles; so does everything that calls it.
template <bool ADD, typename T>
void multiply_packed(const T* x, int64_t x_stride, const T* packed, int64_t all, int64_t inputs, float* out,
                     int64_t out_stride, int64_t rows, int64_t outputs) {
  for (int64_t n = 0; n < outputs; n += PANELS * PANEL)
    multiply_panels<ADD>(x, x_stride, panels_at(packed, all, n, outputs), inputs, Sums{out + n, out_stride, PANEL}, rows);
}

// The rows as `multiply_tile` reads them fastest. Without instructions for bfloat16 these are floats, widened once and not
// for every panel, in a buffer of the thread that its next call writes again; the products are the same to the bit.
#if defined(__AVX512BF16__)
template <typename T>
const T* readable(const T* x, int64_t) {
  return x;
}
#else
inline const float* readable(const float* x, int64_t) { return x; }
inline const float* readable(const bfloat16* x, int64_t count) {
  static thread_local std::vector<float> buffer;
  if (int64_t(buffer.size()) < count) buffer.resize(size_t(count));
  for (int64_t i = 0; i < count; i++) buffer[size_t(i)] = widen(x[i]);
  return buffer.data();
}
#endif

// out[r, n] = sum over k of x[r, k] w[n, k] + bias[n], rounded once. Rows of x hold the padded inputs, rows of out whole
// panels. Called by all threads of a parallel region, between open_tiles and close_tiles.
template <typename T>
void linear(const T* x, int64_t x_stride, const T* packed, const float* bias, T* out, int64_t out_stride, int64_t rows,
            int64_t inputs, int64_t outputs) {
  const int64_t all = padded(inputs, INPUT_BLOCK), wide = padded(outputs, PANEL);
  const auto* lines = readable(x, (padded(rows, ROW_BLOCK) - 1) * x_stride + all);
#pragma omp for schedule(static)
  for (int64_t n = 0; n < wide; n += PANELS * PANEL) {
    alignas(64) float buffer[PANELS * ROWS_TOGETHER * PANEL];
    const Sums sums{buffer, PANEL, ROWS_TOGETHER * PANEL};
    const PackedPanels<T> panels = panels_at(packed, all, n, wide);
    for (int64_t row = 0; row < rows; row += ROWS_TOGETHER) {
      const int64_t count = std::min(ROWS_TOGETHER, rows - row);
      for (int64_t panel = 0; panel < panels.count; panel++) {
        const floats first = bias ? load(bias + n + panel * PANEL) : floats{};
        for (int64_t i = 0; i < padded(count, ROW_BLOCK); i++) store(first, sums.of(i, panel).first);
      }
      multiply_panels<true>(lines + row * x_stride, x_stride, panels, all, sums, count);
      for (int64_t panel = 0; panel < panels.count; panel++)
        for (int64_t i = 0; i < count; i++)
          store(load(sums.of(i, panel).first), out + (row + i) * out_stride + n + panel * PANEL);
    }
  }
}

// Inputs of a matrix with an adapter of some rank beside it: its own, padded, then x A^T, with which its columns s B are
// multiplied. So W x and s B A x are one sum, which is rounded once: added to a rounded W x, most of a small adapter would
// be lost.
inline int64_t beside(int64_t inputs, int64_t rank) {
  return rank ? padded(inputs, INPUT_BLOCK) + padded(rank, PANEL) : inputs;
}

// The same as `linear` for such a matrix. `a` is the packed A; x has room for its outputs behind the padded inputs.
template <typename T>
void linear_beside(T* x, int64_t x_stride, const T* a, int64_t rank, const T* packed, const float* bias, T* out,
                   int64_t out_stride, int64_t rows, int64_t inputs, int64_t outputs) {
  if (rank) linear<T>(x, x_stride, a, nullptr, x + padded(inputs, INPUT_BLOCK), x_stride, rows, inputs, rank);
  linear<T>(x, x_stride, packed, bias, out, out_stride, rows, beside(inputs, rank), outputs);
}

// The sums themselves, without a bias, for rows of x and out that are not padded. x is rounded to the matrix's type.
template <typename T>
void product(const float* x, const T* packed, float* out, int64_t rows, int64_t inputs, int64_t outputs) {
  const int64_t all = padded(inputs, INPUT_BLOCK);
  std::vector<T> lines(padded(rows, ROW_BLOCK) * all);
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
      for (int64_t k = 0; k < inputs; k++) narrow(x[row * inputs + k], lines[row * all + k]);
    open_tiles();
    const auto* wide = readable(lines.data(), int64_t(lines.size()));
#pragma omp for schedule(static)
    for (int64_t n = 0; n < outputs; n += PANELS * PANEL) {
      alignas(64) float buffer[ROWS_TOGETHER * PANELS * PANEL];
      const Sums sums{buffer, PANELS * PANEL, PANEL};
      const PackedPanels<T> panels = panels_at(packed, all, n, padded(outputs, PANEL));
      const int64_t width = std::min(PANELS * PANEL, outputs - n);
      for (int64_t row = 0; row < rows; row += ROWS_TOGETHER) {
        const int64_t count = std::min(ROWS_TOGETHER, rows - row);
        multiply_panels<false>(wide + row * all, all, panels, all, sums, count);
        for (int64_t i = 0; i < count; i++)
          std::memcpy(out + (row + i) * outputs + n, sums.of(i).first, width * sizeof(float));
      }
    }
    close_tiles();
  }
}
