// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for few rows of x, rounded to 16 bits, and a W of 8 bits with scales for groups
// of inputs: sums of products of integers. (rounded_int4_isa.cpp has those with 4 bits.)
//
// Eight bits of x would take about as many instructions: where no instruction adds up products of
// bytes, those of two bytes are words, too, and with more than two they overflow.
//
// As in linear_isa.cpp, a worker walks through several stretches of W side by side.

#include "cpu/common/memory.h"
#include "cpu/common/registers.h"
#include "cpu/common/sums_of_lanes.h"
#include "cpu/common/tasks.h"
#include "cpu/common/vec.h"
#include "cpu/dense/kernels.h"
#include "cpu/dense/quantized_groups.h"
#include "cpu/dense/quantized_shorts.h"
#include "cpu/dense/rounded_inputs.h"
#include "cpu/dense/rounded_int4.h"
#if defined(__AVX512VNNI__)
#include "cpu/dense/rounded_interleaved_rows.h"
#endif
#include "cpu/processor.h"

namespace hfla::HFLA_ISA {
namespace {

// How far ahead W is asked for, but on AMD's processors, which see by themselves what is needed.
constexpr int64_t kBytesAhead = 2048;

// Rows of x that are read together, at most, and outputs that are computed together.
constexpr int kTileRows = 4;
constexpr int tile_outputs(int rows) { return rows == 1 ? 4 : rows == 2 ? 3 : 2; }
constexpr int64_t kTaskMultiple = 12;  // of all these

class RoundedInt8 {
 public:
  RoundedInt8(const QuantizedLinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        weight_(static_cast<const int8_t*>(p.weight)),
        inputs_(p),
        row_bytes_(p.in),
        last_bytes_(p.group % kUnit),
        asks_(p.in * p.out >= kOutOfCacheBytes && !is_amds()),
        task_outputs_(task_outputs(p, threads, row_bytes_, tile_outputs(1), kTaskMultiple)),
        groups_(p, task_outputs_),
        blocks_(inputs_.blocks()),
        x_stride_(inputs_.stride()),
        scale_out_step_(groups_.scale_out_step()),
        scale_group_step_(groups_.scale_group_step()) {}

  Status run() { return run_by_tasks(*this, p_, threads_, task_outputs_); }

  using Groups = GroupSums<false>;

  void carve_shared(Carver& carver) {
    inputs_.carve(carver);
    totals_ = groups_.carve_totals(carver);
  }

  // A worker's own, for a task.
  Groups::Own carve_own(Carver& carver) const { return groups_.carve_own(carver); }

  void stage_x() const {
    groups_.clear(totals_);
    inputs_.stage(totals_.of_x, groups_.totals_stride());
  }

  // The outputs [begin, end) of all rows.
  void compute(const Groups::Own& own, int64_t begin, int64_t end) const {
    groups_.begin(own, totals_, begin, end);
    for (int64_t row = 0; row < p_.rows; row += kTileRows) {
      with_count<kTileRows>(
          p_.rows - row, [&](auto rows) { add_up_rows<rows.value>(own, row, begin, end - begin); });
    }
    groups_.finish(own, begin, end);
  }

 private:
  template <int rows>
  void add_up_rows(const Groups::Own& own, int64_t row, int64_t begin, int64_t count) const {
    constexpr int outputs = tile_outputs(rows);
    const int64_t stretch = count / outputs;
    for (int64_t i = 0; i < stretch; ++i) {
      add_up<outputs, rows>({begin + i, stretch}, row, own, i);
    }
    for (int64_t i = stretch * outputs; i < count; ++i)
      add_up<1, rows>({begin + i, 0}, row, own, i);
  }

  // Outputs that are computed together.
  struct Outputs {
    int64_t first, stretch;  // from one to the next
  };

  // `place`: of the first output in the task.
  template <int outputs, int rows>
  HFLA_INLINE void add_up(Outputs of, int64_t row, const Groups::Own& own, int64_t place) const {
    Floats sums[outputs][rows] = {};
    if (p_.group == kUnit) {
      add_up_units<outputs, rows>(of, row, groups_.scales_of(own, place), sums);
    } else {
      add_up_blocks<outputs, rows>(of, row, groups_.scales_of(own, place), sums);
    }
    for_sums_of_lanes<float>(sums, [&](int o, int r, float sum) HFLA_INLINE_LAMBDA {
      own.sums[(row + r) * groups_.sums_stride() + place + o * of.stretch] += sum;
    });
  }

  // Where every group is a unit.
  template <int outputs, int rows>
  HFLA_NOINLINE void add_up_units(Outputs of, int64_t row, const float* scales,
                                  Floats (&result)[outputs][rows]) const {
    const int8_t* weight = weight_ + of.first * row_bytes_;
    const int16_t* x = inputs_.row(row).integers;
    const float* steps = inputs_.row(row).steps;
    const int64_t stretch_bytes = of.stretch * row_bytes_;
    const int64_t scale_stretch = of.stretch * scale_out_step_;
    Floats sums[outputs][rows] = {};
    for (int64_t group = 0; group < blocks_; ++group) {
      Ints integers[outputs][rows] = {};
      multiply_add<outputs, rows>(weight, stretch_bytes, x, integers);
      add_scaled<outputs, rows>(scales, scale_stretch, steps, integers, sums);
      weight += EightBitShorts::kBytes;
      x += kUnit;
      scales += scale_group_step_;
      ++steps;
    }
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) {
      HFLA_UNROLL
      for (int r = 0; r < rows; ++r) result[o][r] = sums[o][r];
    }
  }

  template <int outputs, int rows>
  HFLA_NOINLINE void add_up_blocks(Outputs of, int64_t row, const float* scales,
                                   Floats (&result)[outputs][rows]) const {
    const int8_t* weight = weight_ + of.first * row_bytes_;
    const int16_t* x = inputs_.row(row).integers;
    const float* steps = inputs_.row(row).steps;
    const int64_t stretch_bytes = of.stretch * row_bytes_;
    const int64_t scale_stretch = of.stretch * scale_out_step_;
    Floats sums[outputs][rows] = {};
    for (int64_t group = 0; group < groups_.count(); ++group, scales += scale_group_step_) {
      for (int64_t c = 0; c < p_.group; c += kBlock, ++steps) {
        Ints integers[outputs][rows] = {};
        int64_t left = min(kBlock, p_.group - c);
        for (; left >= kUnit; left -= kUnit, weight += EightBitShorts::kBytes, x += kUnit) {
          multiply_add<outputs, rows>(weight, stretch_bytes, x, integers);
        }
        if (left > 0) {
          int8_t last[outputs * EightBitShorts::kBytes] = {};
          for (int o = 0; o < outputs; ++o) {
            copy_last(weight + o * stretch_bytes, last + o * EightBitShorts::kBytes);
          }
          multiply_add<outputs, rows>(last, EightBitShorts::kBytes, x, integers);
          weight += last_bytes_;
          x += kUnit;
        }
        add_scaled<outputs, rows>(scales, scale_stretch, steps, integers, sums);
      }
    }
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) {
      HFLA_UNROLL
      for (int r = 0; r < rows; ++r) result[o][r] = sums[o][r];
    }
  }

  // A block's sums of integers, of a weight's scale and x's step.
  template <int outputs, int rows>
  HFLA_INLINE void add_scaled(const float* scales, int64_t scale_stretch, const float* steps,
                              const Ints (&integers)[outputs][rows],
                              Floats (&sums)[outputs][rows]) const {
    Floats step[rows];
    HFLA_UNROLL
    for (int r = 0; r < rows; ++r) {
      step[r] = broadcast(steps[r * blocks_]);
      keep_in_register(step[r]);  // else numbers are multiplied, and each product broadcast
    }
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) {
      const Floats scale = broadcast(scales[o * scale_stretch]);
      HFLA_UNROLL
      for (int r = 0; r < rows; ++r) {
        sums[o][r] += (scale * step[r]) * __builtin_convertvector(integers[o][r], Floats);
      }
    }
  }

  // What a group has beyond whole units. The rest of a unit meets zeros in x.
  void copy_last(const int8_t* from, int8_t* to) const {
    for (int64_t i = 0; i < last_bytes_; ++i) to[i] = from[i];
  }

  // A unit of each output.
  template <int outputs, int rows>
  HFLA_INLINE void multiply_add(const int8_t* weight, int64_t stretch_bytes, const int16_t* x,
                                Ints (&integers)[outputs][rows]) const {
    EightBitShorts::Unit units[outputs];
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) {
      const int8_t* const from = weight + o * stretch_bytes;
      if (asks_) ask_for_soon(from + kBytesAhead);
      units[o] = EightBitShorts::load(from);
    }
    HFLA_UNROLL
    for (int i = 0; i < kShortVectors; ++i) {
      HFLA_UNROLL
      for (int o = 0; o < outputs; ++o) {
        const Shorts values = EightBitShorts::shorts(units[o], i);
        HFLA_UNROLL
        for (int r = 0; r < rows; ++r) {
          const Shorts inputs = load_lanes<int16_t>(x + r * x_stride_ + i * kShorts);
          integers[o][r] = add_pairs(integers[o][r], values, inputs);
        }
      }
    }
  }

  const QuantizedLinearProblem& p_;
  const Threads& threads_;
  const int8_t* const weight_;
  RoundedInputs<EightBitShorts> inputs_;
  const int64_t row_bytes_, last_bytes_;
  const bool asks_;
  const int64_t task_outputs_;
  const Groups groups_;
  const int64_t blocks_, x_stride_, scale_out_step_, scale_group_step_;
  Groups::Totals totals_{};
};

// The rows of a part.
Status rounded_rows(const QuantizedLinearProblem& p, const Threads& threads) {
#if defined(__AVX512VNNI__)
  if (interleaving_gains(p)) {
    return p.bits == 4 ? RoundedInterleavedRows<NibblesInOrder>(p, threads).run()
                       : RoundedInterleavedRows<BytesInOrder>(p, threads).run();
  }
#endif
  return p.bits == 4 ? rounded_int4(p, threads) : RoundedInt8(p, threads).run();
}

}  // namespace

Status rounded_linear(const QuantizedLinearProblem& problem, const Threads& threads) {
  return by_parts_of_rows(
      problem, [&](const QuantizedLinearProblem& part) { return rounded_rows(part, threads); });
}

}  // namespace hfla::HFLA_ISA
