// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What products with quantised weights share, task by task: scales and zero points as floats, the
// sums of a task's outputs, and y.
//
// What zero points add to an output, group by group, is a product with the sum of the group's
// inputs: what a sum begins with.
#pragma once

#include "cpu/common/memory.h"
#include "cpu/dense/outputs.h"
#include "cpu/dense/quantized_values.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int kTogether = 4;  // vectors of sums, so that no addition waits for another

// Totals, of all workers, are sums of x over a group: (rows, totals_stride).
class GroupSums {
 public:
  // A worker's own, for a task.
  struct Own {
    float* sums;    // (rows, sums_stride)
    float* scales;  // (groups, sums_stride), or (task_outputs, totals_stride)
    float* zeros;   // the same
  };

  GroupSums(const QuantizedLinearProblem& p, int64_t task_outputs)
      : p_(p),
        task_outputs_(task_outputs),
        groups_(p.in / max(1, p.group)),
        sums_stride_(round_up(task_outputs, W)),
        totals_stride_(round_up(groups_, W)),
        are_outputs_together_(p.scale.out_stride == 1 || groups_ == 1),
        has_zeros_(p.zero.data != nullptr) {}

  int64_t count() const { return groups_; }
  int64_t sums_stride() const { return sums_stride_; }
  int64_t totals_stride() const { return totals_stride_; }

  // Of scales in Own, from an output to the next, and from a group to the next.
  int64_t scale_out_step() const { return are_outputs_together_ ? 1 : totals_stride_; }
  int64_t scale_group_step() const { return are_outputs_together_ ? sums_stride_ : 1; }

  // Where the scale of an output of this task and the first group is.
  const float* scales_of(const Own& own, int64_t output) const {
    return own.scales + output * scale_out_step();
  }
  const float* zeros_of(const Own& own, int64_t output) const {
    return own.zeros + output * scale_out_step();
  }

  int64_t totals_size() const { return p_.rows * totals_stride_; }

  // Makes totals 0, for the caller to add to.
  void clear(float* totals) const {
    __builtin_memset(totals, 0, sizeof(float) * static_cast<size_t>(totals_size()));
  }

  Own carve_own(Carver& carver) const {
    float* const sums = carver.take<float>(p_.rows * sums_stride_);
    Own own = carve_numbers(carver);
    own.sums = sums;
    return own;
  }

  // The same without sums.
  Own carve_numbers(Carver& carver) const {
    const int64_t size =
        are_outputs_together_ ? groups_ * sums_stride_ : task_outputs_ * totals_stride_;
    float* const scales = carver.take<float>(size);
    return {nullptr, scales, carver.take<float>(size)};
  }

  // Scales and zero points of the outputs [begin, end); and what sums begin with, for zero points,
  // and for values that are lifted: `lifts` (rows, groups), optional, each times a scale.
  void begin(const Own& own, const float* totals, const float* lifts, int64_t begin,
             int64_t end) const {
    const bool has_offsets = has_zeros_ || lifts;
    stage_numbers(p_.scale, begin, end, own.scales);
    if (has_offsets) stage_numbers(p_.zero, begin, end, own.zeros);
    __builtin_memset(own.sums, 0, sizeof(float) * static_cast<size_t>(p_.rows * sums_stride_));
    for (int64_t row = 0; has_offsets && row < p_.rows; ++row, totals += totals_stride_) {
      float* const sums = own.sums + row * sums_stride_;
      if (are_outputs_together_)
        begin_sums_of_outputs(own, end - begin, totals, lifts, sums);
      else
        begin_sums_by_groups(own, end - begin, totals, lifts, sums);
      if (lifts) lifts += groups_;
    }
  }

  // Scales and zero points of the outputs [begin, end).
  void stage_scales(const Own& own, int64_t begin, int64_t end) const {
    stage_numbers(p_.scale, begin, end, own.scales);
    if (has_zeros_) stage_numbers(p_.zero, begin, end, own.zeros);
  }

  // What the total of a group's inputs is multiplied by.
  HFLA_INLINE Floats offset(Floats zero, Floats scale) const {
    return p_.bits == 8 ? -zero * scale : zero;
  }

  // y of the outputs [begin, end) from their sums.
  void finish(const Own& own, int64_t begin, int64_t end) const {
    with_dtype_but_double(p_.dtype,
                          [&](auto scalar) { finish_of<decltype(scalar)>(own, begin, end); });
  }

 private:
  void begin_sums_of_outputs(const Own& own, int64_t outputs, const float* totals,
                             const float* lifts, float* sums) const {
    int64_t c = 0;
    for (; c + kTogether * W <= outputs; c += kTogether * W) {
      begin_sums<kTogether>(own, c, totals, lifts, sums);
    }
    for (; c < outputs; c += W) begin_sums<1>(own, c, totals, lifts, sums);
  }

  template <int vectors>
  void begin_sums(const Own& own, int64_t c, const float* totals, const float* lifts,
                  float* sums) const {
    Floats sum_of[vectors] = {};
    for (int64_t group = 0; group < groups_; ++group) {
      const Floats total = broadcast(totals[group]);
      const int64_t at = group * sums_stride_ + c;
      HFLA_UNROLL
      for (int i = 0; i < vectors; ++i) {
        const Floats scale = load(own.scales + at + i * W), zero = load(own.zeros + at + i * W);
        sum_of[i] += offset(zero, scale) * total;
        if (lifts) sum_of[i] += scale * broadcast(lifts[group]);
      }
    }
    HFLA_UNROLL
    for (int i = 0; i < vectors; ++i) store(sums + c + i * W, sum_of[i]);
  }

  void begin_sums_by_groups(const Own& own, int64_t outputs, const float* totals,
                            const float* lifts, float* sums) const {
    for (int64_t output = 0; output < outputs; ++output) {
      Floats sums_of_groups{};
      for (int64_t c = 0; c < groups_; c += W) {
        const Floats scale = load(own.scales + output * totals_stride_ + c);
        const Floats zero = load(own.zeros + output * totals_stride_ + c);
        sums_of_groups += offset(zero, scale) * load(totals + c);
        if (lifts) sums_of_groups += scale * load_vector(lifts, 1, c, min(W, groups_ - c));
      }
      sums[output] = sum<float>(sums_of_groups);
    }
  }

  // Numbers of a task's outputs as floats: a row of outputs for each group, or of groups for each
  // output, zeros behind it.
  void stage_numbers(const GroupNumbers& numbers, int64_t begin, int64_t end, float* to) const {
    const int64_t offset = begin * numbers.out_stride;
    const int64_t outputs = end - begin;
    if (are_outputs_together_) {
      prefetch_numbers(numbers, end);
      const int64_t strides[] = {numbers.group_stride, numbers.out_stride};
      store_numbers(numbers, offset, strides, groups_, outputs, to, sums_stride_);
    } else {
      const int64_t strides[] = {numbers.out_stride, numbers.group_stride};
      store_numbers(numbers, offset, strides, outputs, groups_, to, totals_stride_);
    }
  }

  // Those of the next task, for their groups are far from each other.
  void prefetch_numbers(const GroupNumbers& numbers, int64_t output) const {
    if (numbers.data == nullptr) return;
    const int64_t size = numbers.type == NumberType::f32 ? 4 : 2;
    const char* at = static_cast<const char*>(numbers.data) + output * size;
    for (int64_t group = 0; group < groups_; ++group, at += numbers.group_stride * size) {
      for (int64_t b = 0; b < task_outputs_ * size; b += kCacheLine) __builtin_prefetch(at + b);
    }
  }

  template <class Scalar>
  void finish_of(const Own& own, int64_t begin, int64_t end) const {
    const Scalar* const bias = static_cast<const Scalar*>(p_.bias);
    for (int64_t row = 0; row < p_.rows; ++row) {
      Scalar* const y = static_cast<Scalar*>(p_.y) + row * p_.out;
      for_each_vector<float>(begin, end, [&](int64_t c, int64_t count) {
        Floats result = load(own.sums + row * sums_stride_ + c - begin);
        if (bias) result += load_vector(bias, 1, c, count);
        store_vector(y, 1, c, count, result);
      });
    }
  }

  const QuantizedLinearProblem& p_;
  const int64_t task_outputs_, groups_, sums_stride_, totals_stride_;
  const bool are_outputs_together_, has_zeros_;
};

}  // namespace
}  // namespace hfla::HFLA_ISA
