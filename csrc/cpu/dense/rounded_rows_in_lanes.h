// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for rows of x that fill vectors, rounded to 16 bits, and a W of 8 or 4 bits with
// scales for groups of inputs: sums of products of integers.
//
// As in rows_in_lanes.h, a vector has numbers of as many rows as it has lanes: here two inputs of
// each, which an instruction multiplies by two weights and adds up. Values become integers of 16
// bits before that, in the first-level cache, a block at a time.
#pragma once

#include "cpu/common/memory.h"
#include "cpu/common/transpose.h"
#include "cpu/dense/outputs.h"
#include "cpu/dense/quantized_groups.h"
#include "cpu/dense/quantized_shorts.h"
#include "cpu/dense/rounded_inputs.h"

namespace hfla::HFLA_ISA {
namespace {

// A unit's values as integers of 16 bits in their order, two to a lane; x lies in that order, too.
struct BytesInOrder : EightBitShorts {
  static HFLA_INLINE Ints load_unit(const int8_t* from) { return (Ints)shorts(load(from), 0); }
};

// Values are made nonnegative, which x takes back.
struct NibblesInOrder {
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

// a b + c, rounded once. Of the generic form compilers would choose, from place to place, what is.
HFLA_INLINE Floats fused(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

// Whether rows in lanes are faster than the other products. With values of 4 bits few lanes may be
// empty, for those have less to gain.
bool rows_gain_in_lanes(const QuantizedLinearProblem& p) {
  if (p.in == 0) return false;
  if (p.bits == 8) return p.rows >= 10;
  const int64_t lanes = round_up(p.rows, W);
  return p.rows > W && lanes - p.rows <= lanes / 8;
}

template <class Format>
class RoundedRowsInLanes {
  // A tile of y: as many sums as registers hold beside the vectors of x and a pair of weights.
  static constexpr int kTileOutputs = 12;
  static constexpr int kTileVectors = 2;
  static constexpr int64_t kPanelRows = kTileVectors * W;

  static constexpr int64_t kUnitPairs = kUnit / 2;
  static constexpr int64_t kCopyStride = kBlock / 2;
  static constexpr int64_t kBytesAhead = 512;  // of W, which is asked for

 public:
  RoundedRowsInLanes(const QuantizedLinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        inputs_(p),
        row_bytes_(p.in * p.bits / 8),
        panels_(ceil_div(p.rows, kPanelRows)),
        lanes_(panels_ * kPanelRows),
        task_outputs_(task_outputs(p, threads, row_bytes_, kTileOutputs, kTileOutputs)),
        groups_(p, task_outputs_) {}

  Status run() { return run_by_tasks(*this, p_, threads_, task_outputs_); }

  using Groups = GroupSums<false>;

  void carve_shared(Carver& carver) {
    inputs_.carve(carver);
    totals_ = groups_.carve_totals(carver);
    x_ = carver.take<int32_t>(lanes_ * row_pairs());
    steps_ = carver.take<float>(lanes_ * inputs_.blocks());
    lifts_ = carver.take<int32_t>(lanes_ * inputs_.blocks());
    totals_in_lanes_ = carver.take<float>(lanes_ * groups_.count());
  }

  // A worker's own, for a task.
  struct Own {
    Groups::Own groups;
    float* sums;    // (task_outputs, lanes)
    int32_t* copy;  // (kTileOutputs, kCopyStride): pairs of weights
  };

  Own carve_own(Carver& carver) const {
    const Groups::Own groups = groups_.carve_numbers(carver);
    float* const sums = carver.take<float>(round_up(task_outputs_, W) * lanes_);
    return {groups, sums, carver.take<int32_t>(kTileOutputs * kCopyStride)};
  }

  void stage_x() const {
    groups_.clear(totals_);
    run_tasks(threads_, usable_threads(p_, threads_), ceil_div(p_.rows, W),
              [&](int64_t, int64_t i) { stage_rows(i * W); });
  }

  // The outputs [begin, end) of all rows.
  void compute(const Own& own, int64_t begin, int64_t end) const {
    groups_.stage_scales(own.groups, begin, end);
    for_each_tile<kTileOutputs>(end - begin, [&](auto outputs, int64_t place, int64_t stretch) {
      add_up<outputs.value>(begin + place, stretch, place, own);
    });
    with_dtype_but_double(p_.dtype, [&](auto scalar) {
      finish_lanes<decltype(scalar)>(p_, begin, end - begin, own.sums, lanes_);
    });
  }

 private:
  int64_t row_pairs() const { return inputs_.padded() / 2; }

  // Whether the panel from this row on has more rows than lanes.
  bool has_two_vectors(int64_t row) const { return p_.rows - row > W; }

  // W rows, into their panel: (pairs, rows of the panel); and (blocks or groups, lanes) of what
  // these have.
  void stage_rows(int64_t first) const {
    const int64_t rows = min(W, p_.rows - first), panel_row = first / kPanelRows * kPanelRows;
    inputs_.stage(first, first + rows, totals_.of_x, groups_.totals_stride());
    const auto row = [&](int64_t i) { return inputs_.row(first + i); };
    put_into_lanes(first, rows, inputs_.blocks(), [&](int64_t i) { return row(i).steps; }, steps_);
    put_into_lanes(first, rows, inputs_.blocks(), [&](int64_t i) { return row(i).lifts; }, lifts_);
    const auto totals = [&](int64_t i) { return groups_.of_row(totals_, first + i).of_x; };
    put_into_lanes(first, rows, groups_.count(), totals, totals_in_lanes_);
    const int64_t width = has_two_vectors(panel_row) ? kPanelRows : W;
    int32_t* const to = x_ + panel_row * row_pairs() + first - panel_row;
    for (int64_t pair = 0; pair < row_pairs(); pair += W) {
      Floats square[W] = {};
      HFLA_UNROLL
      for (int64_t i = 0; i < W; ++i) {
        if (i < rows) {
          __builtin_memcpy(&square[i], inputs_.row(first + i).integers + 2 * pair,
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

  // `count` numbers of each of W rows as (count, lanes), zeros for rows that are not there.
  template <class NumbersOf, class Number>
  void put_into_lanes(int64_t first, int64_t rows, int64_t count, NumbersOf numbers_of,
                      Number* to) const {
    for (int64_t lane = 0; lane < W; ++lane) {
      const Number* from = lane < rows ? numbers_of(lane) : nullptr;
      for (int64_t i = 0; i < count; ++i) to[i * lanes_ + first + lane] = from ? from[i] : 0;
    }
  }

  // Some groups' part of a tile, or a block's of a large group.
  struct Part {
    int64_t groups, units;  // of each
    int64_t block, group;   // the first
    bool begins_groups;
    const float *scales, *zeros;  // of the tile's first output and of all groups
    int64_t numbers_stride;       // from an output to the next
    float* sums;                  // (task_outputs, lanes), from the tile's first output on
    int64_t sums_stride;          // from an output to the next
    const int8_t* weight;         // of the first output
    int64_t weight_stride;
  };

  // `outputs` outputs of all rows, which are `stretch` apart; `place` of the first in the task.
  template <int outputs>
  void add_up(int64_t first, int64_t stretch, int64_t place, const Own& own) const {
    Part part{};
    part.scales = groups_.scales_of(own.groups, place);
    part.zeros = p_.zero.data ? groups_.zeros_of(own.groups, place) : nullptr;
    part.numbers_stride = stretch * groups_.scale_out_step();
    part.sums = own.sums + place * lanes_;
    part.sums_stride = stretch * lanes_;
    part.weight = static_cast<const int8_t*>(p_.weight) + first * row_bytes_;
    part.weight_stride = stretch * row_bytes_;
    const int64_t most_groups = max(1, kBlock / round_up(p_.group, kUnit));
    int64_t pair = 0;
    for (part.group = 0; part.group < groups_.count(); part.group += part.groups) {
      part.groups = min(most_groups, groups_.count() - part.group);
      for (int64_t c = 0; c < p_.group; c += kBlock) {
        const int64_t bytes = min(kBlock, p_.group - c) * Format::kBytes / kUnit;
        part.units = ceil_div(bytes, Format::kBytes);
        part.begins_groups = c == 0;
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
        part.block += part.groups;
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
      const int64_t in_block = (part.block + g) * lanes_ + row;
      Ints sum_of[outputs][vectors];
      HFLA_UNROLL
      for (int v = 0; v < vectors; ++v) {
        const Ints lift = load_lanes(lifts_ + in_block + v * W);
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
      add_scaled(part, g, row, sum_of);
    }
  }

  // The sums of integers of a group, or of a block of one.
  template <int outputs, int vectors>
  HFLA_INLINE void add_scaled(const Part& part, int64_t g, int64_t row,
                              const Ints (&sum_of)[outputs][vectors]) const {
    const int64_t group = part.group + g, number = group * groups_.scale_group_step();
    Floats step_of[vectors], total_of[vectors];
    HFLA_UNROLL
    for (int v = 0; v < vectors; ++v) {
      step_of[v] = load(steps_ + (part.block + g) * lanes_ + row + v * W);
      total_of[v] = load(totals_in_lanes_ + group * lanes_ + row + v * W);
    }
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) {
      const int64_t at = o * part.numbers_stride + number;
      const Floats scale = broadcast(part.scales[at]);
      HFLA_UNROLL
      for (int v = 0; v < vectors; ++v) {
        float* const sum = part.sums + o * part.sums_stride + row + v * W;
        Floats result = part.block + g == 0 ? Floats{} : load(sum);
        if (part.zeros && part.begins_groups) {
          const Floats offset = groups_.offset(broadcast(part.zeros[at]), scale);
          result = fused(offset, total_of[v], result);
        }
        const Floats sum_of_integers = __builtin_convertvector(sum_of[o][v], Floats);
        result = fused(scale * step_of[v], sum_of_integers, result);
        store(sum, result);
      }
    }
  }

  const QuantizedLinearProblem& p_;
  const Threads& threads_;
  RoundedInputs<Format> inputs_;
  const int64_t row_bytes_, panels_, lanes_;  // of all panels
  const int64_t task_outputs_;
  const Groups groups_;
  Groups::Totals totals_{};
  int32_t* x_ = nullptr;              // pairs of inputs, panel by panel
  float* steps_ = nullptr;            // (blocks, lanes)
  int32_t* lifts_ = nullptr;          // (blocks, lanes)
  float* totals_in_lanes_ = nullptr;  // (groups, lanes)
};

}  // namespace
}  // namespace hfla::HFLA_ISA
