// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias in bfloat16 for few rows of x, with AMX.
//
// A tile of W is 16 outputs by 32 inputs, read as it lies in memory. x is copied into panels of 16
// rows, in which the inputs of a tile lie as a product of tiles reads them: in pairs, a pair of all
// rows after the other. Such a product takes 16 cycles, less than reading its tile of W from memory
// does. So up to kTogether panels cost hardly more than one row.
//
// As in linear_isa.cpp, a worker walks through several stretches of W side by side: each of a
// tile's outputs is the next of another stretch.
//
// Sums are float32, and their order depends on the inner dimension only. What AMX computes with
// counts as 0 where it is smaller than the smallest normal number, 2^-126.

#include "cpu/common/memory.h"
#include "cpu/common/tasks.h"
#include "cpu/common/transpose.h"
#include "cpu/dense/kernels.h"
#include "cpu/dense/outputs.h"
#include "cpu/dense/tiles.h"

namespace hfla::avx512 {
Status linear(const LinearProblem&, const Threads&);
}

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kTileInputs = 32;  // of a row
constexpr int64_t kTileSize = kTileRows * kTileInputs;
constexpr int kTogether = 4;          // panels
constexpr int64_t kBytesAhead = 256;  // of each stretch, what is asked for

template <int sums, int weights, int inputs>
HFLA_INLINE void multiply_add_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(weights), "i"(inputs));
}

// Those of panels come first.
constexpr int kWeights = kTogether;
constexpr int inputs_tile(int panel) { return kWeights + 1 + panel % (7 - kWeights); }

// ---- the product ----

class TileLinear {
 public:
  TileLinear(const LinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        panels_(ceil_div(p.rows, kTileRows)),
        whole_blocks_(p.in / kTileInputs),
        blocks_(ceil_div(p.in, kTileInputs)),
        task_outputs_(task_outputs(p, threads, p.in * 2, kTileRows, kTileRows)) {}

  Status run() { return run_by_tasks(*this, p_, threads_, task_outputs_); }

  void carve_shared(Carver& carver) { x_ = carver.take<BFloat16>(panels_ * blocks_ * kTileSize); }

  // A worker's own.
  struct Own {
    float* sums;     // (panels, tiles of a task, outputs of a tile, rows of a panel)
    BFloat16* last;  // a tile of inputs that are no whole one
    BFloat16* rest;  // (kTileRows, blocks * kTileInputs): outputs that are no whole tile
  };

  Own carve_own(Carver& carver) const {
    float* const sums = carver.take<float>(panels_ * task_outputs_ * kTileRows);
    BFloat16* const last = carver.take<BFloat16>(kTileSize);
    return {sums, last, carver.take<BFloat16>(blocks_ * kTileSize)};
  }

  void stage_x() const {
    BFloat16* to = x_;
    for (int64_t row = 0; row < p_.rows; row += kTileRows) {
      for (int64_t block = 0; block < blocks_; ++block, to += kTileSize) {
        stage_tile(row, block * kTileInputs, to);
      }
    }
  }

  // The outputs [begin, end) of all rows.
  void compute(const Own& own, int64_t begin, int64_t end) const {
    const BFloat16* const weight = static_cast<const BFloat16*>(p_.weight);
    const int64_t stretch = (end - begin) / kTileRows;
    const Tiles tiles;
    for (int64_t i = 0; i < stretch; ++i) {
      add_up({weight + (begin + i) * p_.in, stretch * p_.in}, own, own.sums + i * kSumsSize);
    }
    // Walk by walk, kTileRows outputs of each.
    for (int64_t walk = 0; walk < kTileRows; ++walk) {
      for (int64_t i = 0; i < stretch; i += kTileRows) {
        finish(own.sums + i * kSumsSize + walk * kTileRows, kSumsSize, begin + walk * stretch + i,
               min(kTileRows, stretch - i));
      }
    }
    const int64_t output = begin + stretch * kTileRows;
    if (output < end) {
      const int64_t stride = blocks_ * kTileInputs;
      for (int64_t i = 0; i < kTileRows; ++i) {
        for (int64_t c = 0; c < stride; c += kTileInputs) {
          const int64_t columns = output + i < end ? min(kTileInputs, p_.in - c) : 0;
          copy_some(weight + (output + i) * p_.in + c, columns, own.rest + i * stride + c);
        }
      }
      add_up({own.rest, stride}, own, own.sums);
      finish(own.sums, kTileRows, output, end - output);
    }
  }

 private:
  // Pairs are moved as if they were floats.
  void stage_tile(int64_t row, int64_t column, BFloat16* to) const {
    const BFloat16* from = static_cast<const BFloat16*>(p_.x) + row * p_.in + column;
    const int64_t rows = min(kTileRows, p_.rows - row);
    const int64_t columns = min(kTileInputs, p_.in - column);
    BFloat16 inputs[kTileRows][kTileInputs] = {};
    for (int64_t r = 0; r < rows; ++r) copy_some(from + r * p_.in, columns, inputs[r]);
    Vec<float> pairs[kTileRows];
    __builtin_memcpy(pairs, inputs, sizeof pairs);
    transpose(pairs);
    __builtin_memcpy(to, pairs, sizeof pairs);
  }

  // `count` elements, of a tile's row at most, and zeros behind them.
  static HFLA_INLINE void copy_some(const BFloat16* from, int64_t count, BFloat16* to) {
    const __mmask32 mask = static_cast<__mmask32>((int64_t{1} << count) - 1);
    _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(mask, from));
  }

  // Of kTileRows outputs.
  struct Weights {
    const BFloat16* data;
    int64_t stride;  // from one to the next
  };

  // Of all rows; sums: of the first panel.
  void add_up(const Weights& w, const Own& own, float* sums) const {
    if (whole_blocks_ < blocks_) {
      const int64_t c = whole_blocks_ * kTileInputs;
      for (int64_t i = 0; i < kTileRows; ++i) {
        copy_some(w.data + i * w.stride + c, p_.in - c, own.last + i * kTileInputs);
      }
    }
    for (int64_t panel = 0; panel < panels_; panel += kTogether) {
      with_count<kTogether>(panels_ - panel, [&](auto panels) {
        add_up_panels<panels.value>(w, x_ + panel * blocks_ * kTileSize, own.last,
                                    sums + panel * panel_sums());
      });
    }
  }

  // In `sums`, from one panel to the next.
  int64_t panel_sums() const { return task_outputs_ * kTileRows; }

  // last: the tile of the inputs that are no whole one
  template <int panels>
  HFLA_NOINLINE void add_up_panels(Weights w, const BFloat16* x, const BFloat16* last,
                                   float* sums) const {
    for_panels<panels>([](auto panel) HFLA_INLINE_LAMBDA { clear_tile<panel.value>(); });
    const int64_t panel_size = blocks_ * kTileSize;
    const auto multiply = [&](Weights tile) HFLA_INLINE_LAMBDA {
      load_tile<kWeights>(tile.data, 2 * tile.stride);
      for_panels<panels>([&](auto panel) HFLA_INLINE_LAMBDA {
        constexpr int inputs = inputs_tile(panel.value);
        load_tile<inputs>(x + panel.value * panel_size, kRowBytes);
        multiply_add_tiles<panel.value, kWeights, inputs>();
      });
      x += kTileSize;
    };
    for (int64_t block = 0; block < whole_blocks_; ++block, w.data += kTileInputs) {
      HFLA_UNROLL
      for (int64_t i = 0; i < kTileRows; ++i) {
        ask_for_soon(reinterpret_cast<const char*>(w.data + i * w.stride) + kBytesAhead);
      }
      multiply(w);
    }
    if (whole_blocks_ < blocks_) multiply({last, kTileInputs});
    for_panels<panels>([&](auto panel) HFLA_INLINE_LAMBDA {
      store_tile<panel.value>(sums + panel.value * panel_sums());
    });
  }

  // `count` outputs that are next to each other, of all rows, from the sums of the first panel:
  // vectors (outputs, rows) that are `stride` apart.
  void finish(const float* sums, int64_t stride, int64_t output, int64_t count) const {
    Vec<float> bias{};
    if (p_.bias) bias = load_vector(static_cast<const BFloat16*>(p_.bias), 1, output, count);
    BFloat16* y = static_cast<BFloat16*>(p_.y);
    for (int64_t row = 0; row < p_.rows; row += kTileRows, sums += panel_sums()) {
      Vec<float> sums_of[kTileRows] = {};
      for (int64_t i = 0; i < count; ++i) sums_of[i] = load(sums + i * stride);
      transpose(sums_of);
      for (int64_t i = 0; i < min(kTileRows, p_.rows - row); ++i, y += p_.y_stride) {
        store_vector(y, 1, output, count, sums_of[i] + bias);
      }
    }
  }

  const LinearProblem& p_;
  const Threads& threads_;
  const int64_t panels_, whole_blocks_, blocks_, task_outputs_;
  BFloat16* x_ = nullptr;  // (panels, blocks, pairs of inputs, rows of a panel, 2)
};

}  // namespace

Status linear(const LinearProblem& problem, const Threads& threads) {
  if (problem.dtype != DType::bf16) return avx512::linear(problem, threads);
  return TileLinear(problem, threads).run();
}

}  // namespace hfla::HFLA_ISA
