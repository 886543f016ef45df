// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What products of integers share where rows of x are in lanes: x as integers, what scales and zero
// points make of sums of integers, and the sums of a task's outputs.
#pragma once

#include "cpu/common/memory.h"
#include "cpu/dense/outputs.h"
#include "cpu/dense/quantized_groups.h"
#include "cpu/dense/quantized_inputs.h"

namespace hfla::HFLA_ISA {
namespace {

// a b + c, rounded once. Of the generic form compilers would choose, from place to place, what is.
HFLA_INLINE Floats fused(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

template <class Format>
class RoundedLanes {
 public:
  // lanes: of all panels.
  RoundedLanes(const QuantizedLinearProblem& p, int64_t lanes, int64_t task_outputs)
      : p_(p), inputs_(p), lanes_(lanes), task_outputs_(task_outputs), groups_(p, task_outputs) {}

  const Inputs<Format>& inputs() const { return inputs_; }
  int64_t groups() const { return groups_.count(); }

  void carve_shared(Carver& carver) {
    inputs_.carve(carver);
    totals_ = carver.take<float>(groups_.totals_size());
    steps_ = carver.take<float>(lanes_ * inputs_.blocks());
    lifts_ = carver.take<int32_t>(lanes_ * inputs_.blocks());
    totals_in_lanes_ = carver.take<float>(lanes_ * groups());
  }

  // A worker's own, for a task.
  struct Own {
    GroupSums::Own groups;
    float* sums;  // (task_outputs, lanes)
  };

  Own carve_own(Carver& carver) const {
    const GroupSums::Own groups = groups_.carve_numbers(carver);
    return {groups, carver.take<float>(round_up(task_outputs_, W) * lanes_)};
  }

  void clear() const { groups_.clear(totals_); }

  // The rows that a vector has from `first` on: as integers; and (blocks or groups, lanes) of what
  // these have.
  void stage(int64_t first, int64_t rows) const {
    inputs_.stage(first, first + rows, totals_, groups_.totals_stride());
    const auto row = [&](int64_t i) { return inputs_.row(first + i); };
    put_into_lanes(first, rows, inputs_.blocks(), [&](int64_t i) { return row(i).steps; }, steps_);
    put_into_lanes(first, rows, inputs_.blocks(), [&](int64_t i) { return row(i).lifts; }, lifts_);
    const auto totals = [&](int64_t i) { return totals_ + (first + i) * groups_.totals_stride(); };
    put_into_lanes(first, rows, groups(), totals, totals_in_lanes_);
  }

  // Outputs of a task that are computed together, and where they are: in a group, or a block of a
  // large one.
  struct Place {
    int64_t block, group;
    bool begins_group;
    const float *scales, *zeros;  // of the first output and of all groups
    int64_t numbers_stride;       // from an output to the next
    float* sums;                  // from the first output on
    int64_t sums_stride;          // from an output to the next

    Place after(int64_t groups) const {
      Place place = *this;
      place.block += groups, place.group += groups;
      return place;
    }
  };

  // The first group of outputs from the task's `output` on, which are `stretch` apart.
  Place first_place(const Own& own, int64_t output, int64_t stretch) const {
    return {0,
            0,
            true,
            groups_.scales_of(own.groups, output),
            p_.zero.data ? groups_.zeros_of(own.groups, output) : nullptr,
            stretch * groups_.scale_out_step(),
            own.sums + output * lanes_,
            stretch * lanes_};
  }

  // What sums of products begin with, of the rows that a vector has.
  HFLA_INLINE Ints lift(const Place& place, int64_t row) const {
    return load_lanes(lifts_ + place.block * lanes_ + row);
  }

  // What the rows of so many vectors have in a place, from a row on.
  template <int vectors>
  struct RowNumbers {
    Floats step[vectors], total[vectors];
  };
  template <int vectors>
  HFLA_INLINE RowNumbers<vectors> row_numbers(const Place& place, int64_t row) const {
    RowNumbers<vectors> numbers;
    HFLA_UNROLL
    for (int v = 0; v < vectors; ++v) {
      numbers.step[v] = load(steps_ + place.block * lanes_ + row + v * W);
      numbers.total[v] = load(totals_in_lanes_ + place.group * lanes_ + row + v * W);
    }
    return numbers;
  }
  // Adds an output's sums of integers.
  template <int vectors>
  HFLA_INLINE void add_scaled(const Place& place, const RowNumbers<vectors>& numbers, int64_t row,
                              int64_t o, const Ints (&integers)[vectors]) const {
    const int64_t at = o * place.numbers_stride + place.group * groups_.scale_group_step();
    const Floats scale = broadcast(place.scales[at]);
    HFLA_UNROLL
    for (int v = 0; v < vectors; ++v) {
      float* const sum = place.sums + o * place.sums_stride + row + v * W;
      Floats result = place.block == 0 ? Floats{} : load(sum);
      if (place.zeros && place.begins_group) {
        const Floats offset = groups_.offset(broadcast(place.zeros[at]), scale);
        result = fused(offset, numbers.total[v], result);
      }
      const Floats sum_of_integers = __builtin_convertvector(integers[v], Floats);
      result = fused(scale * numbers.step[v], sum_of_integers, result);
      store(sum, result);
    }
  }

  // Scales and zero points of the outputs [begin, end), and in the end y.
  void begin(const Own& own, int64_t begin, int64_t end) const {
    groups_.stage_scales(own.groups, begin, end);
  }
  void finish(const Own& own, int64_t begin, int64_t end) const {
    with_dtype_but_double(p_.dtype, [&](auto scalar) {
      finish_lanes<decltype(scalar)>(p_, p_.out, begin, end - begin, own.sums, lanes_);
    });
  }

 private:
  // `count` numbers of each of W rows as (count, lanes), zeros for rows that are not there.
  template <class NumbersOf, class Number>
  void put_into_lanes(int64_t first, int64_t rows, int64_t count, NumbersOf numbers_of,
                      Number* to) const {
    for (int64_t lane = 0; lane < W; ++lane) {
      const Number* from = lane < rows ? numbers_of(lane) : nullptr;
      for (int64_t i = 0; i < count; ++i) to[i * lanes_ + first + lane] = from ? from[i] : 0;
    }
  }

  const QuantizedLinearProblem& p_;
  Inputs<Format> inputs_;
  const int64_t lanes_, task_outputs_;
  const GroupSums groups_;
  float* totals_ = nullptr;           // (rows, groups)
  float* steps_ = nullptr;            // (blocks, lanes)
  int32_t* lifts_ = nullptr;          // (blocks, lanes)
  float* totals_in_lanes_ = nullptr;  // (groups, lanes)
};

}  // namespace
}  // namespace hfla::HFLA_ISA
