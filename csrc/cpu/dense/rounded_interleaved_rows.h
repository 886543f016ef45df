// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for rows of x that fill vectors, rounded to 16 bits, and a W of 8 or 4 bits with
// scales for groups of inputs: sums of products of integers.
//
// As in interleaved_rows.h, a vector has numbers of as many rows as it has lanes: here two inputs
// of each, which an instruction multiplies by two weights and adds up. Values become integers of 16
// bits before that, in the first-level cache, a block at a time.
#pragma once

#include "cpu/common/memory.h"
#include "cpu/common/transpose.h"
#include "cpu/dense/outputs.h"
#include "cpu/dense/quantized_shorts.h"
#include "cpu/dense/rounded_lanes.h"

namespace hfla::HFLA_ISA {
namespace {

// A unit's values as integers of 16 bits in their order, two to a lane; x lies in that order, too.
struct BytesInOrder : EightBitShorts {
  static HFLA_INLINE Ints load_unit(const int8_t* from) { return (Ints)values(load(from), 0); }
};

// Values are made nonnegative, which x takes back.
struct NibblesInOrder : IntegerFormat {
  static constexpr int32_t kLift = 8;
  static constexpr int64_t kBytes = kUnit / 2;

  static HFLA_INLINE void store_unit(const int32_t* integers, int16_t* to) {
    EightBitShorts::store_unit(integers, to);
  }

  static HFLA_INLINE Ints load_unit(const int8_t* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const Bits words = (Bits)_mm512_maskz_cvtepu8_epi32(-1, bytes);
    return (Ints)(((words | (words << 12)) & 0x000f000f) ^ 0x00080008);
  }
};

// Whether rows in lanes are faster than the other products. With values of 4 bits few lanes may be
// empty, for those have less to gain.
bool interleaving_gains(const QuantizedLinearProblem& p) {
  if (p.in == 0) return false;
  if (p.bits == 8) return p.rows >= 10;
  const int64_t lanes = round_up(p.rows, W);
  return p.rows > W && lanes - p.rows <= lanes / 8;
}

template <class Format>
class RoundedInterleavedRows {
  using Lanes = RoundedLanes<Format>;

  // A tile of y: as many sums as registers hold beside the vectors of x and a pair of weights.
  static constexpr int kTileOutputs = 12;
  static constexpr int kTileVectors = 2;
  static constexpr int64_t kPanelRows = kTileVectors * W;

  static constexpr int64_t kUnitPairs = kUnit / 2;
  static constexpr int64_t kCopyStride = kBlock / 2;
  static constexpr int64_t kBytesAhead = 512;  // of W, which is asked for

 public:
  RoundedInterleavedRows(const QuantizedLinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        row_bytes_(p.in * p.bits / 8),
        panels_(ceil_div(p.rows, kPanelRows)),
        task_outputs_(task_outputs(p, threads, row_bytes_, kTileOutputs, kTileOutputs)),
        lanes_(p, panels_ * kPanelRows, task_outputs_) {}

  Status run() { return run_by_tasks(*this, p_, threads_, task_outputs_); }

  void carve_shared(Carver& carver) {
    lanes_.carve_shared(carver);
    x_ = carver.take<int32_t>(panels_ * kPanelRows * row_pairs());
  }

  // A worker's own, for a task.
  struct Own {
    typename Lanes::Own lanes;
    int32_t* copy;  // (kTileOutputs, kCopyStride): pairs of weights
  };

  Own carve_own(Carver& carver) const {
    const typename Lanes::Own lanes = lanes_.carve_own(carver);
    return {lanes, carver.take<int32_t>(kTileOutputs * kCopyStride)};
  }

  void stage_x() const {
    lanes_.clear();
    run_tasks(threads_, usable_threads(p_, threads_), ceil_div(p_.rows, W),
              [&](int64_t, int64_t i) { stage_rows(i * W); });
  }

  // The outputs [begin, end) of all rows.
  void compute(const Own& own, int64_t begin, int64_t end) const {
    lanes_.begin(own.lanes, begin, end);
    for_each_tile<kTileOutputs>(end - begin, [&](auto outputs, int64_t place, int64_t stretch) {
      add_up<outputs.value>(begin + place, stretch, place, own);
    });
    lanes_.finish(own.lanes, begin, end);
  }

 private:
  int64_t row_pairs() const { return lanes_.inputs().padded() / 2; }

  // Whether the panel from this row on has more rows than lanes.
  bool has_two_vectors(int64_t row) const { return p_.rows - row > W; }

  // W rows, into their panel: (pairs, rows of the panel).
  void stage_rows(int64_t first) const {
    const int64_t rows = min(W, p_.rows - first), panel_row = first / kPanelRows * kPanelRows;
    lanes_.stage(first, rows);
    const int64_t width = has_two_vectors(panel_row) ? kPanelRows : W;
    int32_t* const to = x_ + panel_row * row_pairs() + first - panel_row;
    for (int64_t pair = 0; pair < row_pairs(); pair += W) {
      Floats square[W] = {};
      HFLA_UNROLL
      for (int64_t i = 0; i < W; ++i) {
        if (i < rows) {
          __builtin_memcpy(&square[i], lanes_.inputs().row(first + i).inputs + 2 * pair,
                           sizeof square[i]);
        }
      }
      transpose(square);
      HFLA_UNROLL
      for (int64_t i = 0; i < W; ++i) {
        __builtin_memcpy(to + (pair + i) * width, &square[i], sizeof square[i]);
      }
    }
  }

  // Some groups' part of a tile, or a block's of a large group.
  struct Part {
    int64_t groups, units;        // of each
    typename Lanes::Place place;  // of the first
    const int8_t* weight;         // of the first output
    int64_t weight_stride;
  };

  // `outputs` outputs of all rows, which are `stretch` apart; `place` of the first in the task.
  template <int outputs>
  void add_up(int64_t first, int64_t stretch, int64_t place, const Own& own) const {
    Part part{};
    part.place = lanes_.first_place(own.lanes, place, stretch);
    part.weight = static_cast<const int8_t*>(p_.weight) + first * row_bytes_;
    part.weight_stride = stretch * row_bytes_;
    const int64_t most_groups = max(1, kBlock / round_up(p_.group, kUnit));
    int64_t pair = 0;
    int64_t& group = part.place.group;
    for (; group < lanes_.groups(); group += part.groups) {
      part.groups = min(most_groups, lanes_.groups() - group);
      for (int64_t c = 0; c < p_.group; c += kBlock) {
        const int64_t bytes = min(kBlock, p_.group - c) * Format::kBytes / kUnit;
        part.units = ceil_div(bytes, Format::kBytes);
        part.place.begins_group = c == 0;
        copy<outputs>(part, bytes, own.copy);
        for (int64_t row = 0; row < p_.rows; row += kPanelRows) {
          const int32_t* const panel = x_ + row * row_pairs();
          if (has_two_vectors(row)) {
            add_up_tile<outputs, kTileVectors>(part, own.copy, panel + pair * kPanelRows, row);
          } else {
            add_up_tile<outputs, 1>(part, own.copy, panel + pair * W, row);
          }
        }
        part.weight += part.groups * bytes;
        part.place.block += part.groups;
        pair += part.groups * part.units * kUnitPairs;
      }
    }
  }

  // Each group's `bytes` of each output, and zeros up to a whole unit.
  template <int outputs>
  HFLA_NOINLINE void copy(const Part& part, int64_t bytes, int32_t* to) const {
    for (int o = 0; o < outputs; ++o) {
      const int8_t* from = part.weight + o * part.weight_stride;
      int32_t* unit = to + o * kCopyStride;
      for (int64_t group = 0; group < part.groups; ++group, from += bytes) {
        int64_t b = 0;
        for (; b + Format::kBytes <= bytes; b += Format::kBytes, unit += kUnitPairs) {
          store_lanes(unit, Format::load_unit(from + b));
        }
        if (b < bytes) {
          int8_t last[Format::kBytes] = {};
          for (int64_t i = b; i < bytes; ++i) last[i - b] = from[i];
          store_lanes(unit, Format::load_unit(last));
          unit += kUnitPairs;
        }
      }
    }
  }

  // For the rows of a panel, of which x has the pairs.
  template <int outputs, int vectors>
  HFLA_NOINLINE void add_up_tile(const Part& part, const int32_t* w, const int32_t* x,
                                 int64_t row) const {
    const int8_t* ahead = part.weight + kBytesAhead;
    for (int64_t g = 0; g < part.groups; ++g) {
      const typename Lanes::Place place = part.place.after(g);
      Ints sum_of[outputs][vectors];
      HFLA_UNROLL
      for (int v = 0; v < vectors; ++v) {
        const Ints lift = lanes_.lift(place, row + v * W);
        HFLA_UNROLL
        for (int o = 0; o < outputs; ++o) sum_of[o][v] = lift;
      }
      for (int64_t unit = 0; unit < part.units; ++unit, ahead += Format::kBytes) {
        // Behind these weights are the next, both in a row and from row to row. After the first
        // panel they are there.
        if (row == 0 && (part.units * g + unit) * Format::kBytes % kCacheLine == 0) {
          HFLA_UNROLL
          for (int o = 0; o < outputs; ++o) ask_for_soon(ahead + o * part.weight_stride);
        }
#pragma GCC unroll 4
        for (int64_t i = 0; i < kUnitPairs; ++i, ++w, x += vectors * W) {
          Shorts x_of[vectors];
          HFLA_UNROLL
          for (int v = 0; v < vectors; ++v) x_of[v] = (Shorts)load_lanes(x + v * W);
          HFLA_UNROLL
          for (int o = 0; o < outputs; ++o) {
            const Shorts pair = (Shorts)(w[o * kCopyStride] - Ints{});
            HFLA_UNROLL
            for (int v = 0; v < vectors; ++v) sum_of[o][v] = add_pairs(sum_of[o][v], pair, x_of[v]);
          }
        }
      }
      const auto numbers = lanes_.template row_numbers<vectors>(place, row);
      HFLA_UNROLL
      for (int o = 0; o < outputs; ++o) lanes_.add_scaled(place, numbers, row, o, sum_of[o]);
    }
  }

  const QuantizedLinearProblem& p_;
  const Threads& threads_;
  const int64_t row_bytes_, panels_;
  const int64_t task_outputs_;
  Lanes lanes_;
  int32_t* x_ = nullptr;  // pairs of inputs, panel by panel
};

}  // namespace
}  // namespace hfla::HFLA_ISA
