// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for some rows of x that fill vectors: with several users, or a short prompt.
//
// x is copied, as float32, into panels whose rows lie side by side, so that a vector has one input
// of as many rows as it has lanes. W is read once, as it lies, and each weight is multiplied by the
// vectors of its input. So nothing of W is rearranged, and no lanes have to be added up. Weights of
// half precision become floats before that, in the first-level cache, some at a time.
//
// As in linear_isa.cpp, a worker walks through several stretches of W side by side. Processors see
// by themselves what they need next of so many; asked for what is much further ahead, Intel's read
// more slowly.
//
// Blocks of the inner dimension are added up by themselves, which rounds less than one long sum. A
// sum's order depends on the inner dimension only: not on the other rows, the output's place, nor
// the threads.
#pragma once

#include "cpu/common/memory.h"
#include "cpu/common/tasks.h"
#include "cpu/dense/panels.h"
#include "kernels/linear.h"

namespace hfla::HFLA_ISA {
namespace {

template <class Scalar>
class RowsInLanes {
  // A tile of y: as many sums as registers hold beside the vectors of x and a weight.
  static constexpr int kTileOutputs = kHasManyRegisters ? 12 : 6;
  static constexpr int kTileVectors = 2;
  static constexpr int64_t kPanelRows = kTileVectors * W;

  static constexpr int64_t kBlock = 256;           // of the inner dimension
  static constexpr int64_t kStretchBytes = 32768;  // of W; shorter ones are read more slowly
  static constexpr int64_t kNumberBytes = sizeof(Scalar);
  static constexpr int64_t kLine = kCacheLine / kNumberBytes;
  static constexpr int64_t kAhead = 512 / kNumberBytes;
  static constexpr bool kIsConverted = sizeof(Scalar) != sizeof(float);

 public:
  RowsInLanes(const LinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        weight_(static_cast<const Scalar*>(p.weight)),
        usable_threads_(p.in * p.out < threads.serial_work ? 1 : max(1, threads.count)),
        panels_(ceil_div(p.rows, kPanelRows)),
        task_outputs_(task_outputs()) {}

  // Whether this is faster than linear_isa.cpp's way, where vectors are not shorter than AVX2's: if
  // few lanes would be empty; and copying weights has to be worth while.
  static bool takes(int64_t rows) {
    if (kVectorBytes < 32 || (kIsConverted && rows < kPanelRows)) return false;
    const int64_t lanes = round_up(rows, W), most_empty = lanes / (kIsConverted ? 16 : 8);
    return lanes - rows <= most_empty;
  }

  Status run() {
    const int64_t tasks = ceil_div(p_.out, task_outputs_);
    const int64_t workers = max(1, min(tasks, usable_threads_));
    Carver sizes(nullptr);
    carve_x(sizes);
    const int64_t x_bytes = sizes.used();
    carve_own(sizes);
    const int64_t own_bytes = sizes.used() - x_bytes;
    const Buffer buffer(x_bytes + workers * own_bytes);
    if (!buffer.data()) return Status::out_of_memory;
    Carver x_memory(buffer.data());
    float* const x = carve_x(x_memory);
    stage_x(x, workers);
    run_tasks(threads_, workers, tasks, [&](int64_t worker, int64_t task) {
      Carver own_memory(buffer.data() + x_bytes + worker * own_bytes);
      const int64_t begin = task * task_outputs_;
      compute(begin, min(p_.out, begin + task_outputs_), x, carve_own(own_memory));
    });
    return Status::ok;
  }

 private:
  // A worker's own memory.
  struct Own {
    float* sums;  // (task_outputs, rows of all panels)
    float* copy;  // (kTileOutputs, kBlock): weights
  };

  float* carve_x(Carver& carver) const { return carver.take<float>(sums_stride() * p_.in); }

  Own carve_own(Carver& carver) const {
    float* const sums = carver.take<float>(round_up(task_outputs_, W) * sums_stride());
    return {sums, carver.take<float>(kIsConverted ? kTileOutputs * kBlock : 0)};
  }

  int64_t sums_stride() const { return panels_ * kPanelRows; }

  // Long stretches, but enough tasks for all threads.
  int64_t task_outputs() const {
    const int64_t outputs = kTileOutputs * ceil_div(kStretchBytes, max(1, p_.in * kNumberBytes));
    return round_up(max(1, min(outputs, p_.out / (4 * usable_threads_))), kTileOutputs);
  }

  // Each panel as (in, rows of the panel).
  void stage_x(float* to, int64_t workers) const {
    const int64_t strides[] = {p_.in, 1};
    const Matrix<Scalar> x(p_.x, p_.rows, strides);
    const int64_t blocks = ceil_div(p_.in, kBlock);
    run_tasks(threads_, workers, panels_ * blocks, [&](int64_t, int64_t i) {
      const int64_t row = i / blocks * kPanelRows, begin = i % blocks * kBlock;
      const int64_t end = min(p_.in, begin + kBlock);
      float* const panel = to + row * p_.in;
      if (has_two_vectors(row)) {
        x.template pack<kPanelRows>(row, begin, end, panel + begin * kPanelRows);
      } else {
        x.template pack<W>(row, begin, end, panel + begin * W);
      }
    });
  }

  // Whether the panel from this row on has more rows than lanes.
  bool has_two_vectors(int64_t row) const { return p_.rows - row > W; }

  // The outputs [begin, end) of all rows.
  void compute(int64_t begin, int64_t end, const float* x, const Own& own) const {
    const int64_t count = end - begin, stretch = count / kTileOutputs;
    for (int64_t i = 0; i < stretch; ++i) add_up<kTileOutputs>(begin + i, stretch, i, x, own);
    if (int64_t i = stretch * kTileOutputs; i < count) {
      if (stretch > 0) {  // Some outputs are computed again, for a tile is faster than a few.
        i = count - kTileOutputs;
        add_up<kTileOutputs>(begin + i, 1, i, x, own);
      } else {
        for (; i < count; ++i) add_up<1>(begin + i, 1, i, x, own);
      }
    }
    finish(begin, count, own.sums);
  }

  // `outputs` outputs of all rows, which are `stretch` apart; `place` of the first in the task.
  template <int outputs>
  void add_up(int64_t first, int64_t stretch, int64_t place, const float* x, const Own& own) const {
    const Scalar* weight = weight_ + first * p_.in;
    const int64_t stride = stretch * p_.in;
    float* const sums = own.sums + place * sums_stride();
    int64_t begin = 0;
    do {
      const int64_t count = min(kBlock, p_.in - begin);
      if constexpr (kIsConverted) copy<outputs>(weight, stride, count, own.copy);
      for (int64_t panel = 0; panel < panels_; ++panel) {
        const Part part{begin, count, sums + panel * kPanelRows, stretch * sums_stride()};
        // Behind these weights are the next, both in a row and from row to row. After the first
        // panel they are there.
        const Ahead ahead{panel == 0 ? weight + kAhead : nullptr, stride};
        const auto add_up_panel = [&](const float* w, int64_t w_stride) {
          const float* const rows = x + panel * kPanelRows * p_.in;
          if (has_two_vectors(panel * kPanelRows)) {
            add_up_tile<outputs, kTileVectors>(w, w_stride, rows, part, ahead);
          } else {
            add_up_tile<outputs, 1>(w, w_stride, rows, part, ahead);
          }
        };
        if constexpr (kIsConverted) {
          add_up_panel(own.copy, kBlock);
        } else {
          add_up_panel(weight, stride);
        }
      }
      weight += count;
      begin += count;
    } while (begin < p_.in);
  }

  // A block's part of the sums of a tile.
  struct Part {
    int64_t begin, count;  // of the inner dimension
    float* sums;
    int64_t sums_stride;  // from one output of the tile to the next
  };

  // Of W, which is asked for while a tile is computed, if it is.
  struct Ahead {
    const Scalar* data;
    int64_t stride;
  };

  template <int outputs>
  HFLA_NOINLINE void copy(const Scalar* from, int64_t stride, int64_t count, float* to) const {
    for (int o = 0; o < outputs; ++o, from += stride, to += kBlock) {
      for_each_vector<float>(0, count, [&](int64_t c, int64_t n) HFLA_INLINE_LAMBDA {
        store(to + c, load_vector(from, 1, c, n));
      });
    }
  }

  template <int outputs, int vectors>
  HFLA_NOINLINE void add_up_tile(const float* w, int64_t w_stride, const float* x, const Part& part,
                                 const Ahead& ahead) const {
    V sum_of[outputs][vectors] = {};
    x += part.begin * vectors * W;
    for (int64_t line = 0; line < part.count; line += kLine) {
      if (ahead.data) {
        HFLA_UNROLL
        for (int o = 0; o < outputs; ++o) ask_for_soon(ahead.data + o * ahead.stride + line);
      }
      const int64_t end = min(part.count, line + kLine);
#pragma GCC unroll 4
      for (int64_t c = line; c < end; ++c, x += vectors * W) {
        V x_of[vectors];
        HFLA_UNROLL
        for (int v = 0; v < vectors; ++v) x_of[v] = load(x + v * W);
        HFLA_UNROLL
        for (int o = 0; o < outputs; ++o) {
          const V weight = broadcast(w[o * w_stride + c]);
          HFLA_UNROLL
          for (int v = 0; v < vectors; ++v) sum_of[o][v] += weight * x_of[v];
        }
      }
    }
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) {
      HFLA_UNROLL
      for (int v = 0; v < vectors; ++v) {
        float* const sum = part.sums + o * part.sums_stride + v * W;
        store(sum, part.begin == 0 ? sum_of[o][v] : load(sum) + sum_of[o][v]);
      }
    }
  }

  // y of `count` outputs of all rows, from their sums.
  void finish(int64_t begin, int64_t count, const float* sums) const {
    const Scalar* const bias = static_cast<const Scalar*>(p_.bias);
    for (int64_t row = 0; row < p_.rows; row += W) {
      const int64_t rows = min(W, p_.rows - row);
      for_each_vector<float>(0, count, [&](int64_t c, int64_t n) HFLA_INLINE_LAMBDA {
        V square[W];
        HFLA_UNROLL
        for (int64_t i = 0; i < W; ++i) square[i] = load(sums + (c + i) * sums_stride() + row);
        transpose(square);
        const V added = bias ? load_vector(bias, 1, begin + c, n) : V{};
        Scalar* const y = static_cast<Scalar*>(p_.y) + row * p_.out;
        HFLA_UNROLL
        for (int64_t i = 0; i < W; ++i) {
          if (i < rows) store_vector(y + i * p_.out, 1, begin + c, n, square[i] + added);
        }
      });
    }
  }

  const LinearProblem& p_;
  const Threads& threads_;
  const Scalar* const weight_;
  const int64_t usable_threads_, panels_, task_outputs_;
};

}  // namespace
}  // namespace hfla::HFLA_ISA
