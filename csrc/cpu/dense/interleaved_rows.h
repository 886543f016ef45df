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
#include "cpu/dense/outputs.h"
#include "cpu/dense/panels.h"
#include "kernels/linear.h"

namespace hfla::HFLA_ISA {
namespace {

template <class Scalar>
class InterleavedRows {
  // A tile of y: as many sums as registers hold beside the vectors of x and a weight.
  static constexpr int kTileOutputs = kHasManyRegisters ? 12 : 6;
  static constexpr int kTileVectors = 2;
  static constexpr int64_t kPanelRows = kTileVectors * W;

  static constexpr int64_t kBlock = 256;  // of the inner dimension
  static constexpr int64_t kNumberBytes = sizeof(Scalar);
  static constexpr int64_t kLine = kCacheLine / kNumberBytes;
  static constexpr int64_t kAhead = 512 / kNumberBytes;
  static constexpr bool kIsConverted = sizeof(Scalar) != sizeof(float);

 public:
  InterleavedRows(const LinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        weight_(static_cast<const Scalar*>(p.weight)),
        panels_(ceil_div(p.rows, kPanelRows)),
        task_outputs_(task_outputs(p, threads, p.in * kNumberBytes, kTileOutputs, kTileOutputs)) {}

  // Whether this is faster than linear_isa.cpp's way, where vectors are not shorter than AVX2's: if
  // few lanes would be empty; and copying weights has to be worth while.
  static bool takes(int64_t rows) {
    if (kVectorBytes < 32 || (kIsConverted && rows < kPanelRows)) return false;
    const int64_t lanes = round_up(rows, W), most_empty = lanes / (kIsConverted ? 16 : 8);
    return lanes - rows <= most_empty;
  }

  Status run() { return run_by_tasks(*this, p_, threads_, task_outputs_); }

  void carve_shared(Carver& carver) { x_ = carver.take<float>(sums_stride() * p_.in); }

  // A worker's own memory.
  struct Own {
    float* sums;  // (task_outputs, rows of all panels)
    float* copy;  // (kTileOutputs, kBlock): weights
  };

  Own carve_own(Carver& carver) const {
    float* const sums = carver.take<float>(round_up(task_outputs_, W) * sums_stride());
    return {sums, carver.take<float>(kIsConverted ? kTileOutputs * kBlock : 0)};
  }

  void stage_x() const {
    const int64_t strides[] = {p_.in, 1};
    const Matrix<Scalar> x(p_.x, p_.rows, strides);
    const int64_t blocks = ceil_div(p_.in, kBlock), workers = usable_threads(p_, threads_);
    run_tasks(threads_, workers, panels_ * blocks, [&](int64_t, int64_t i) {
      const int64_t row = i / blocks * kPanelRows, begin = i % blocks * kBlock;
      const int64_t end = min(p_.in, begin + kBlock);
      float* const panel = x_ + row * p_.in;
      if (has_two_vectors(row)) {
        x.template pack<kPanelRows>(row, begin, end, panel + begin * kPanelRows);
      } else {
        x.template pack<W>(row, begin, end, panel + begin * W);
      }
    });
  }

  // The outputs [begin, end) of all rows.
  void compute(const Own& own, int64_t begin, int64_t end) const {
    for_each_tile<kTileOutputs>(end - begin, [&](auto outputs, int64_t place, int64_t stretch) {
      add_up<outputs.value>(begin + place, stretch, place, own);
    });
    finish_lanes<Scalar>(p_, p_.y_stride, begin, end - begin, own.sums, sums_stride());
  }

 private:
  int64_t sums_stride() const { return panels_ * kPanelRows; }

  // Whether the panel from this row on has more rows than lanes.
  bool has_two_vectors(int64_t row) const { return p_.rows - row > W; }

  // `outputs` outputs of all rows, which are `stretch` apart; `place` of the first in the task.
  template <int outputs>
  void add_up(int64_t first, int64_t stretch, int64_t place, const Own& own) const {
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
          const float* const rows = x_ + panel * kPanelRows * p_.in;
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

  const LinearProblem& p_;
  const Threads& threads_;
  const Scalar* const weight_;
  const int64_t panels_, task_outputs_;
  float* x_ = nullptr;  // panel by panel (in, rows of the panel)
};

}  // namespace
}  // namespace hfla::HFLA_ISA
