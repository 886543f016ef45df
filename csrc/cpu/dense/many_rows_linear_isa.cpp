// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for many rows of x, as in prompts and in training.
//
// After Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008): both
// matrices are copied, as float32, into panels, each as many rows as a tile of y has, in the order
// in which the tile's sums read them. Of x, a part is copied first that the last cache holds. Of a
// panel of W, a worker copies a block, which fills the first-level cache, and the panels of x
// stream past it, while the next block is asked for. A tile's sums leave the registers only between
// blocks.
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

constexpr int64_t kBlock = 256;  // of the inner dimension
constexpr int64_t kAhead = 64;  // numbers of each row of a tile that are asked for before their use

// A part of x is about so many rows, each of which needs all of W once more, and so many floats.
constexpr int64_t kPartRows = 1024, kPartFloats = int64_t{1} << 20;
// Outputs whose sums are kept while the parts of a row of x follow each other.
constexpr int64_t kPartColumns = 4096;

// A block of W that is packed next: a part of it is asked for with each tile, so that all of it is
// in the second-level cache by then. The processor does not foresee so many short runs.
class NextBlock {
 public:
  NextBlock(const ManyRowsLinearProblem& p, int64_t row, int64_t begin, int64_t end,
            int64_t tiles) {
    const int64_t size = bytes_of(p.weight_dtype), rows = min(kTileColumns, p.out - row);
    const auto [row_stride, column_stride] = p.weight_strides;
    if (rows <= 0 || begin == end) return;
    run_ = static_cast<const char*>(p.weight) + (row * row_stride + begin * column_stride) * size;
    if (column_stride == 1) {
      set_runs(rows, row_stride * size, (end - begin) * size, tiles);
    } else if (row_stride == 1) {
      set_runs(end - begin, column_stride * size, rows * size, tiles);
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

class ManyRowsLinear {
 public:
  ManyRowsLinear(const ManyRowsLinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        part_rows_(length_of_parts(p.rows, kPartRows, kTileRows)),
        part_in_(min(p.in, length_of_parts(p.in, kPartFloats / part_rows_, kBlock))),
        part_columns_(is_whole() ? p.out : min(round_up(p.out, kTileColumns), kPartColumns)) {}

  Status run() const {
    const int64_t workers = workers_for(threads_, p_.rows * p_.in * p_.out);
    const int64_t x_size = round_up(part_rows_ * part_in_, kTileColumns);
    const int64_t panel_sums = part_rows_ * kTileColumns;
    const int64_t shared_sums = is_whole() ? 0 : part_rows_ * part_columns_;
    const int64_t own_sums = is_whole() && p_.in > kBlock ? panel_sums : 0;
    const int64_t own_size = kTileColumns * kBlock + own_sums;  // of a worker
    const Buffer buffer((x_size + shared_sums + workers * own_size) *
                        static_cast<int64_t>(sizeof(float)));
    if (!buffer.data()) return Status::out_of_memory;
    float* const x = reinterpret_cast<float*>(buffer.data());
    float* const sums = x + x_size;
    for_parts([&](const Part& part) {
      if (part.column == 0 || !is_whole()) copy(part, workers, x);
      const int64_t panels = ceil_div(part.column_end - part.column, kTileColumns);
      run_tasks(threads_, workers, panels, [&](int64_t worker, int64_t panel) {
        float* const w = sums + shared_sums + worker * own_size;
        compute(part, part.column + panel * kTileColumns, x, w,
                is_whole() ? w + kTileColumns * kBlock : sums + panel * panel_sums);
      });
    });
    return Status::ok;
  }

 private:
  // Rows [row, row_end) of x, of which the numbers [begin, end), and outputs.
  struct Part {
    int64_t row, row_end, column, column_end, begin, end;
    int64_t tiles() const { return ceil_div(row_end - row, kTileRows); }
  };

  // Of parts as large as each other, which are of about the length that is wanted.
  static int64_t length_of_parts(int64_t length, int64_t wanted, int64_t unit) {
    const int64_t parts = max(1, (length + wanted / 2) / wanted);
    return max(unit, round_up(ceil_div(length, parts), unit));
  }

  // Whether a part has all of a row of x.
  bool is_whole() const { return part_in_ == p_.in; }

  template <class Body>
  void for_parts(Body body) const {
    for (int64_t row = 0; row < p_.rows; row += part_rows_) {
      const int64_t row_end = min(p_.rows, row + part_rows_);
      for (int64_t column = 0; column < p_.out; column += part_columns_) {
        const int64_t column_end = min(p_.out, column + part_columns_);
        int64_t begin = 0;
        do {
          const int64_t end = min(p_.in, begin + part_in_);
          body(Part{row, row_end, column, column_end, begin, end});
          begin = end;
        } while (begin < p_.in);
      }
    }
  }

  // x gets a part's numbers, of one block after the other the panels.
  void copy(const Part& part, int64_t workers, float* x) const {
    run_tasks(threads_, workers, part.tiles(), [&](int64_t, int64_t tile) {
      for (int64_t begin = part.begin; begin < part.end; begin += kBlock) {
        const int64_t end = min(part.end, begin + kBlock);
        float* const block = x + (begin - part.begin) * part.tiles() * kTileRows;
        pack_x(part.row + tile * kTileRows, begin, end, block + tile * kTileRows * (end - begin));
      }
    });
  }

  void pack_x(int64_t row, int64_t begin, int64_t end, float* to) const {
    with_number(p_.x_dtype, p_.dtype, [&](auto number) {
      const Matrix<decltype(number)> x(p_.x, p_.rows, p_.x_strides);
      x.template pack<kTileRows>(row, begin, end, to);
    });
  }

  void pack_weight(int64_t row, int64_t begin, int64_t end, float* to) const {
    with_number(p_.weight_dtype, p_.dtype, [&](auto number) {
      const Matrix<decltype(number)> weight(p_.weight, p_.out, p_.weight_strides);
      weight.template pack<kTileColumns>(row, begin, end, to);
    });
  }

  // The outputs of a panel of W for a part, of which x has the panels; w, for a block of W's panel,
  // is the worker's own memory, and sums (of all tiles) what was added up of earlier parts.
  void compute(const Part& part, int64_t column, const float* x, float* w, float* sums) const {
    int64_t begin = part.begin;
    do {
      const int64_t end = min(part.end, begin + kBlock);
      pack_weight(column, begin, end, w);
      float* tile_sums = sums;
      NextBlock next = end < part.end ? block_after(part, column, end)
                                      : block_after(part, column + kTileColumns, part.begin);
      for (int64_t r = part.row; r < part.row_end; r += kTileRows) {
        next.ask_for_more();
        add_up_tile(r, column, begin, end, x, w, tile_sums);
        x += (end - begin) * kTileRows;
        tile_sums += kTileSize;
      }
      begin = end;
    } while (begin < part.end);
  }

  NextBlock block_after(const Part& part, int64_t column, int64_t begin) const {
    return NextBlock(p_, column, begin, min(part.end, begin + kBlock), part.tiles());
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
      ask_for_soon(x + kAhead * kTileRows);  // which the processor itself does up to a page's end
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
    with_dtype_but_double(p_.y_dtype, [&](auto scalar) {
      HFLA_UNROLL
      for (int64_t v = 0; v < kTileVectors; ++v) {
        const int64_t c = column + v * W, count = min(W, p_.out - c);
        if (count <= 0) break;
        const V bias = load_bias(c, count);
        auto* y = static_cast<decltype(scalar)*>(p_.y) + row * p_.out;
        HFLA_UNROLL
        for (int64_t r = 0; r < kTileRows; ++r, y += p_.out) {
          if (row + r < p_.rows) store_vector(y, 1, c, count, sum[r][v] + bias);
        }
      }
    });
  }

  V load_bias(int64_t column, int64_t count) const {
    if (!p_.bias) return V{};
    return with_number(p_.weight_dtype, p_.dtype, [&](auto number) {
      return load_vector(static_cast<const decltype(number)*>(p_.bias), 1, column, count);
    });
  }

  const ManyRowsLinearProblem& p_;
  const Threads& threads_;
  const int64_t part_rows_, part_in_, part_columns_;
};

}  // namespace

Status many_rows_linear(const ManyRowsLinearProblem& problem, const Threads& threads) {
  return ManyRowsLinear(problem, threads).run();
}

}  // namespace hfla::HFLA_ISA
