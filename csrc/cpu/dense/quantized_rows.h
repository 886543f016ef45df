// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for few rows of x, and a W of 8 or 4 bits with scales for groups of inputs.
//
// As in linear_isa.cpp, a worker walks through several stretches of W side by side, and the inputs
// of an output lie in the lanes of a vector. What is multiplied, floats or integers, is up to the
// format.
#pragma once

#include "cpu/common/memory.h"
#include "cpu/common/registers.h"
#include "cpu/common/sums_of_lanes.h"
#include "cpu/common/tasks.h"
#include "cpu/common/vec.h"
#include "cpu/dense/outputs.h"
#include "cpu/dense/quantized_groups.h"
#include "cpu/dense/quantized_inputs.h"
#include "cpu/processor.h"

namespace hfla::HFLA_ISA {
namespace {

template <class Format>
class QuantizedRows {
  using Sum = typename Format::Sum;

  // How far ahead W is asked for, but on AMD's processors, which see by themselves what is needed.
  static constexpr int64_t kBytesAhead = 2048;

  // Outputs that are computed together.
  static constexpr int tile_outputs(int rows) {
    return rows == 1 ? 4 : Format::kIsRounded ? (rows == 2 ? 3 : 2) : rows == 2 ? 2 : 1;
  }
  static constexpr int64_t kTaskMultiple = 12;  // of all these
  static constexpr int kTileRows = 4;           // of x, that are read together, at most

 public:
  QuantizedRows(const QuantizedLinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        weight_(static_cast<const int8_t*>(p.weight)),
        inputs_(p),
        row_bytes_(p.in * p.bits / 8),
        last_bytes_(p.group % kUnit * p.bits / 8),
        asks_(row_bytes_ * p.out >= kOutOfCacheBytes && !is_amds()),
        task_outputs_(task_outputs(p, threads, row_bytes_, tile_outputs(1), kTaskMultiple)),
        groups_(p, task_outputs_),
        scale_out_step_(groups_.scale_out_step()) {}

  Status run() { return run_by_tasks(*this, p_, threads_, task_outputs_); }

  void carve_shared(Carver& carver) {
    inputs_.carve(carver);
    totals_ = carver.take<float>(groups_.totals_size());
  }

  // A worker's own, for a task.
  GroupSums::Own carve_own(Carver& carver) const { return groups_.carve_own(carver); }

  void stage_x() const {
    groups_.clear(totals_);
    inputs_.stage(totals_, groups_.totals_stride());
  }

  // The outputs [begin, end) of all rows.
  void compute(const GroupSums::Own& own, int64_t begin, int64_t end) const {
    groups_.begin(own, totals_, lifts(), begin, end);
    for (int64_t row = 0; row < p_.rows; row += kTileRows) {
      with_count<kTileRows>(
          p_.rows - row, [&](auto rows) { add_up_rows<rows.value>(own, row, begin, end - begin); });
    }
    groups_.finish(own, begin, end);
  }

 private:
  // For each group, where values are lifted.
  const float* lifts() const {
    if constexpr (Format::kIsRounded || Format::kLift == 0)
      return nullptr;
    else
      return inputs_.row(0).lifts;
  }

  template <int rows>
  void add_up_rows(const GroupSums::Own& own, int64_t row, int64_t begin, int64_t count) const {
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
  HFLA_INLINE void add_up(Outputs of, int64_t row, const GroupSums::Own& own, int64_t place) const {
    Floats sums[outputs][rows] = {};
    const float* const scales = groups_.scales_of(own, place);
    if (p_.group == kUnit)
      add_up_groups<outputs, rows, 1>(of, row, scales, sums);
    else if (p_.group == 2 * kUnit)
      add_up_groups<outputs, rows, 2>(of, row, scales, sums);
    else
      add_up_groups<outputs, rows, 0>(of, row, scales, sums);
    for_sums_of_lanes<float>(sums, [&](int o, int r, float sum) HFLA_INLINE_LAMBDA {
      own.sums[(row + r) * groups_.sums_stride() + place + o * of.stretch] += sum;
    });
  }

  // units: of every group, or 0 for any number of values.
  template <int outputs, int rows, int units>
  HFLA_NOINLINE void add_up_groups(Outputs of, int64_t row, const float* scales,
                                   Floats (&result)[outputs][rows]) const {
    const int8_t* weight = weight_ + of.first * row_bytes_;
    auto x = inputs_.row(row);
    const int64_t stretch_bytes = of.stretch * row_bytes_;
    const int64_t scale_stretch = of.stretch * scale_out_step_;
    Floats sums[outputs][rows] = {};
    for (int64_t group = 0; group < groups_.count(); ++group) {
      const int64_t size = units > 0 ? units * kUnit : p_.group;
      for (int64_t c = 0; c < size; c += Format::kBlock, ++x.steps) {
        Sum products[outputs][rows] = {};
        int64_t left = min(Format::kBlock, size - c);
        const auto multiply_add_next = [&]() HFLA_INLINE_LAMBDA {
          multiply_add<outputs, rows>(weight, stretch_bytes, x.inputs, products);
          weight += Format::kBytes;
          x.inputs += kUnit;
        };
        if constexpr (units > 0) {
          HFLA_UNROLL
          for (; left >= kUnit; left -= kUnit) multiply_add_next();
        } else {
          for (; left >= kUnit; left -= kUnit) multiply_add_next();
        }
        if (units == 0 && left > 0) {  // the rest of a unit meets zeros in x
          int8_t last[outputs * Format::kBytes] = {};
          for (int o = 0; o < outputs; ++o) {
            for (int64_t i = 0; i < last_bytes_; ++i) {
              last[o * Format::kBytes + i] = weight[o * stretch_bytes + i];
            }
          }
          multiply_add<outputs, rows>(last, Format::kBytes, x.inputs, products);
          weight += last_bytes_;
          x.inputs += kUnit;
        }
        add_scaled<outputs, rows>(scales, scale_stretch, x.steps, products, sums);
      }
      scales += groups_.scale_group_step();
    }
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) {
      HFLA_UNROLL
      for (int r = 0; r < rows; ++r) result[o][r] = sums[o][r];
    }
  }

  // A block's sums of products, of a weight's scale and x's step.
  template <int outputs, int rows>
  HFLA_INLINE void add_scaled(const float* scales, int64_t scale_stretch, const float* steps,
                              const Sum (&products)[outputs][rows],
                              Floats (&sums)[outputs][rows]) const {
    Floats step[rows];
    if constexpr (Format::kIsRounded) {
      HFLA_UNROLL
      for (int r = 0; r < rows; ++r) {
        step[r] = broadcast(steps[r * inputs_.blocks()]);
        keep_in_register(step[r]);  // else numbers are multiplied, and each product broadcast
      }
    }
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) {
      const Floats scale = broadcast(scales[o * scale_stretch]);
      HFLA_UNROLL
      for (int r = 0; r < rows; ++r) {
        if constexpr (Format::kIsRounded) {
          sums[o][r] += (scale * step[r]) * __builtin_convertvector(products[o][r], Floats);
        } else {
          sums[o][r] += scale * products[o][r];
        }
      }
    }
  }

  // A unit of each output.
  template <int outputs, int rows>
  HFLA_INLINE void multiply_add(const int8_t* weight, int64_t stretch_bytes,
                                const typename Format::Input* x,
                                Sum (&products)[outputs][rows]) const {
    typename Format::Unit units[outputs];
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) {
      const int8_t* const from = weight + o * stretch_bytes;
      if (asks_) ask_for_soon(from + kBytesAhead);
      units[o] = Format::load(from);
    }
    HFLA_UNROLL
    for (int i = 0; i < kUnit / Format::kInputs; ++i) {
      HFLA_UNROLL
      for (int o = 0; o < outputs; ++o) {  // side by side, so that few wait for another
        const auto values = Format::values(units[o], i);
        HFLA_UNROLL
        for (int r = 0; r < rows; ++r) {
          products[o][r] = Format::multiply_add(products[o][r], values,
                                                x + r * inputs_.stride() + i * Format::kInputs);
        }
      }
    }
  }

  const QuantizedLinearProblem& p_;
  const Threads& threads_;
  const int8_t* const weight_;
  Inputs<Format> inputs_;
  const int64_t row_bytes_, last_bytes_;
  const bool asks_;
  const int64_t task_outputs_;
  const GroupSums groups_;
  const int64_t scale_out_step_;
  float* totals_ = nullptr;  // (rows, groups)
};

}  // namespace
}  // namespace hfla::HFLA_ISA
