// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for many rows of x, as in prompts and in training.
//
// After Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008): both
// matrices are copied, as float32, into panels, each as many rows as a tile of y has, in the order
// in which the tile's sums read them. All of x is copied first, or as many rows of it as the last
// cache holds. Of a panel of W, a worker copies a block, which fills the first-level cache, and the
// panels of x stream past it, while the next block is asked for. So W is read once, and a tile's
// sums leave the registers only between blocks.
//
// A sum's order depends on the block's length only, not on the threads nor on other rows.

#include "cpu/common/memory.h"
#include "cpu/common/tasks.h"
#include "cpu/common/vec.h"
#include "cpu/dense/kernels.h"
#include "cpu/dense/panels.h"

namespace hfla::HFLA_ISA {
namespace {

// A tile of y: as many sums as registers hold beside two vectors of W and one number of x.
constexpr int64_t kTileRows = kHasManyRegisters ? 12 : 6;
constexpr int64_t kTileVectors = 2;
constexpr int64_t kTileColumns = kTileVectors * W;
constexpr int64_t kTileSize = kTileRows * kTileColumns;

constexpr int64_t kBlock = 256;                // of the inner dimension
constexpr int64_t kFloats = int64_t{1} << 20;  // of x that are copied at once, about
constexpr int64_t kMinRows = 16 * kTileRows;   // that are copied at once, even if it is more

// A block of W that is packed next: a part of it is asked for with each tile, so that all of it is
// in the second-level cache by then. The processor does not foresee so many short runs.
class NextBlock {
 public:
  template <class Scalar>
  NextBlock(const Matrix<Scalar>& w, int64_t row, int64_t begin, int64_t end, int64_t tiles) {
    constexpr int64_t size = sizeof(Scalar);
    const int64_t rows = min(kTileColumns, w.rows - row);
    if (rows <= 0 || begin == end) return;
    run_ = reinterpret_cast<const char*>(w.data + row * w.row_stride + begin * w.column_stride);
    if (w.column_stride == 1) {
      set_runs(rows, w.row_stride * size, (end - begin) * size, tiles);
    } else if (w.row_stride == 1) {
      set_runs(end - begin, w.column_stride * size, rows * size, tiles);
    }
  }

  HFLA_INLINE void ask_for_more() {
    for (int64_t n = min(at_once_, runs_); n > 0; --n, --runs_, run_ += stride_) {
      for (int64_t byte = 0; byte < bytes_; byte += kCacheLine) ask_for(run_ + byte);
    }
  }

 private:
  void set_runs(int64_t runs, int64_t stride, int64_t bytes, int64_t tiles) {
    runs_ = runs, stride_ = stride, bytes_ = bytes, at_once_ = ceil_div(runs, tiles);
  }

  const char* run_ = nullptr;
  int64_t runs_ = 0, stride_ = 0, bytes_ = 0;  // that are left; between them; of each
  int64_t at_once_ = 0;
};

template <class Scalar>
class ManyRowsLinear {
 public:
  ManyRowsLinear(const ManyRowsLinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        x_(p.x, p.rows, p.x_strides),
        weight_(p.weight, p.out, p.weight_strides),
        rows_together_(rows_of_parts(p.rows, p.in)) {}

  Status run() const {
    const int64_t workers =
        p_.rows * p_.in * p_.out < threads_.serial_work ? 1 : max(1, threads_.count);
    const int64_t x_size = rows_together_ * p_.in;
    const int64_t sums_size = p_.in > kBlock ? rows_together_ * kTileColumns : 0;
    const int64_t own_size = kTileColumns * kBlock + sums_size;  // of a worker
    const Buffer buffer((x_size + workers * own_size) * static_cast<int64_t>(sizeof(float)));
    if (!buffer.data()) return Status::out_of_memory;
    float* const x = reinterpret_cast<float*>(buffer.data());
    for (int64_t row = 0; row < p_.rows; row += rows_together_) {
      const int64_t end = min(p_.rows, row + rows_together_);
      run_tasks(threads_, workers, ceil_div(end - row, kTileRows), [&](int64_t, int64_t panel) {
        const int64_t r = panel * kTileRows;
        x_.template pack<kTileRows>(row + r, 0, p_.in, x + r * p_.in);
      });
      run_tasks(threads_, workers, ceil_div(p_.out, kTileColumns),
                [&](int64_t worker, int64_t panel) {
                  float* const w = x + x_size + worker * own_size;
                  compute(row, end, panel * kTileColumns, x, w, w + kTileColumns * kBlock);
                });
    }
    return Status::ok;
  }

 private:
  // Parts as large as each other, of about kFloats: each of them copies all of W.
  static int64_t rows_of_parts(int64_t rows, int64_t in) {
    const int64_t wanted = max(kMinRows, kFloats / max(1, in));
    const int64_t parts = max(1, (rows + wanted / 2) / wanted);
    return round_up(ceil_div(rows, parts), kTileRows);
  }

  // The outputs of a panel of W for the rows [row, row_end), of which x has the panels; w (a block
  // of W's panel) and sums (of all tiles) are the worker's own memory.
  void compute(int64_t row, int64_t row_end, int64_t column, const float* x, float* w,
               float* sums) const {
    int64_t begin = 0;
    do {
      const int64_t end = min(p_.in, begin + kBlock);
      weight_.template pack<kTileColumns>(column, begin, end, w);
      const float* x_block = x + begin * kTileRows;
      float* tile_sums = sums;
      NextBlock next = end < p_.in ? block_after(column, end, row_end - row)
                                   : block_after(column + kTileColumns, 0, row_end - row);
      for (int64_t r = row; r < row_end; r += kTileRows) {
        next.ask_for_more();
        add_up_tile(r, column, begin, end, x_block, w, tile_sums);
        x_block += p_.in * kTileRows;
        tile_sums += kTileSize;
      }
      begin = end;
    } while (begin < p_.in);
  }

  NextBlock block_after(int64_t column, int64_t begin, int64_t rows) const {
    const int64_t end = min(p_.in, begin + kBlock);
    return NextBlock(weight_, column, begin, end, ceil_div(rows, kTileRows));
  }

  // A block's part of the sums of a tile. What was added up before is in `sums`.
  HFLA_NOINLINE void add_up_tile(int64_t row, int64_t column, int64_t begin, int64_t end,
                                 const float* x, const float* w, float* sums) const {
    V sum[kTileRows][kTileVectors] = {};
    if (begin > 0) {
      for_tile([&](int64_t r, int64_t v) { sum[r][v] = load(sums + r * kTileColumns + v * W); });
    }
#pragma GCC unroll 4
    for (int64_t i = begin; i < end; ++i, w += kTileColumns, x += kTileRows) {
      V weight[kTileVectors];
      HFLA_UNROLL
      for (int64_t v = 0; v < kTileVectors; ++v) weight[v] = load(w + v * W);
      for_tile([&](int64_t r, int64_t v) { sum[r][v] += broadcast(x[r]) * weight[v]; });
    }
    if (end < p_.in) {
      for_tile([&](int64_t r, int64_t v) { store(sums + r * kTileColumns + v * W, sum[r][v]); });
    } else {
      finish(row, column, sum);
    }
  }

  template <class Body>
  HFLA_INLINE static void for_tile(Body body) {
    HFLA_UNROLL
    for (int64_t r = 0; r < kTileRows; ++r) {
      HFLA_UNROLL
      for (int64_t v = 0; v < kTileVectors; ++v) body(r, v);
    }
  }

  HFLA_INLINE void finish(int64_t row, int64_t column,
                          const V (&sum)[kTileRows][kTileVectors]) const {
    const Scalar* const bias = static_cast<const Scalar*>(p_.bias);
    HFLA_UNROLL
    for (int64_t v = 0; v < kTileVectors; ++v) {
      const int64_t c = column + v * W, count = min(W, p_.out - c);
      if (count <= 0) break;
      const V added = bias ? load_vector(bias, 1, c, count) : V{};
      Scalar* y = static_cast<Scalar*>(p_.y) + row * p_.out;
      HFLA_UNROLL
      for (int64_t r = 0; r < kTileRows; ++r, y += p_.out) {
        if (row + r < p_.rows) store_vector(y, 1, c, count, sum[r][v] + added);
      }
    }
  }

  const ManyRowsLinearProblem& p_;
  const Threads& threads_;
  const Matrix<Scalar> x_, weight_;
  const int64_t rows_together_;  // of x, that are copied at once
};

}  // namespace

Status many_rows_linear(const ManyRowsLinearProblem& problem, const Threads& threads) {
  return with_dtype_but_double(problem.dtype, [&](auto scalar) {
    return ManyRowsLinear<decltype(scalar)>(problem, threads).run();
  });
}

}  // namespace hfla::HFLA_ISA
