// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// x as a W of 8 or 4 bits is multiplied by it: as floats, or as integers of 16 bits.
//
// Inputs come in blocks, of a group's inputs at most Format::kBlock, whose sums of products are
// scaled together. For products of integers, a block of a row of x becomes integers of 16 bits and
// the power of two that one of them stands for, its step: numbers of half precision that are not
// much smaller than the largest stay what they are, and sums of their products with values are
// exact.
#pragma once

#include "cpu/common/memory.h"
#include "cpu/common/vec.h"
#include "cpu/dense/quantized_values.h"

namespace hfla::HFLA_ISA {
namespace {

// Of floats, as bits.
constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kHalfOfAStep = 0x100;    // what rounding to 15 bits may add
constexpr uint32_t kSmallestExponent = 15;  // below 2^-112 numbers count as 0

// Format::store_unit(inputs, to): puts a unit's inputs where its values meet them, as
// Format::Inputs are; Format::kLift: what was added to values before they are multiplied.
template <class Format>
class Inputs {
  using Input = typename Format::Input;
  using Lift = typename Format::Lift;

 public:
  explicit Inputs(const QuantizedLinearProblem& p)
      : p_(p),
        groups_(p.in / max(1, p.group)),
        blocks_(groups_ * ceil_div(p.group, Format::kBlock)),
        padded_group_(round_up(p.group, kUnit)),
        // Not a power of two, which would put all rows into the same few lines of the cache.
        stride_(groups_ * padded_group_ + kCacheLine / 2) {}

  int64_t groups() const { return groups_; }
  int64_t blocks() const { return blocks_; }                  // of a row
  int64_t stride() const { return stride_; }                  // from a row to the next
  int64_t padded() const { return groups_ * padded_group_; }  // inputs of a row

  // A row's.
  struct Row {
    const Input* inputs;  // padded to units, group by group
    const float* steps;   // for each block, of integers
    const Lift* lifts;    // what is to be added to sums of products, for values that are lifted
  };
  Row row(int64_t row) const {
    return {inputs_ + row * stride_, steps_ + row * blocks_, lifts_ + row * blocks_};
  }

  void carve(Carver& carver) {
    inputs_ = carver.take<Input>(p_.rows * stride_);
    steps_ = carver.take<float>(p_.rows * blocks_);
    lifts_ = carver.take<Lift>(p_.rows * blocks_);
  }

  // totals: (rows, totals_stride), to which the sum of each group is added.
  void stage(float* totals, int64_t totals_stride) const {
    stage(0, p_.rows, totals, totals_stride);
  }

  // The rows [begin, end) of them.
  void stage(int64_t begin, int64_t end, float* totals, int64_t totals_stride) const {
    with_dtype_but_double(p_.dtype, [&](auto scalar) {
      for (int64_t row = begin; row < end; ++row) {
        stage_row<decltype(scalar)>(row, totals + row * totals_stride);
      }
    });
  }

 private:
  template <class Scalar>
  void stage_row(int64_t row, float* totals) const {
    const Scalar* from = static_cast<const Scalar*>(p_.x) + row * p_.in;
    Input* to = inputs_ + row * stride_;
    int64_t block = row * blocks_;
    for (int64_t group = 0; group < groups_; ++group, from += p_.group, to += padded_group_) {
      for (int64_t c = 0; c < p_.group; c += Format::kBlock, ++block) {
        const int64_t inputs = min(Format::kBlock, p_.group - c);
        if constexpr (Format::kIsRounded)
          totals[group] += stage_integers(from + c, inputs, to + c, block);
        else
          totals[group] += stage_floats(from + c, inputs, to + c, block);
      }
    }
  }

  // `count` inputs in the order of their values in the vectors of units, zeros behind them. Returns
  // their sum.
  template <class Scalar>
  float stage_integers(const Scalar* from, int64_t count, int16_t* to, int64_t block) const {
    Bits largest{};
    for_each_vector<float>(0, count, [&](int64_t c, int64_t n) HFLA_INLINE_LAMBDA {
      const Bits magnitude = (Bits)load_vector(from, 1, c, n) & 0x7fffffff;
      // NaN is larger than inf, and that than all others.
      largest = select(magnitude > largest, magnitude, largest);
    });
    const Rounding rounding = rounding_of(largest);
    if (rounding.inverse == 0) {
      __builtin_memset(to, 0, sizeof *to * static_cast<size_t>(round_up(count, kUnit)));
      steps_[block] = rounding.step;
      lifts_[block] = 0;
      return rounding.step;
    }
    Ints sum{};
    const auto stage_unit = [&](const Scalar* unit) HFLA_INLINE_LAMBDA {
      int32_t integers[kUnit];
      HFLA_UNROLL
      for (int64_t i = 0; i < kUnit; i += W) {
        const Ints rounded = to_nearest(load(unit + i) * rounding.inverse);
        sum += rounded;
        store_lanes(integers + i, rounded);
      }
      Format::store_unit(integers, to);
      to += kUnit;
    };
    int64_t c = 0;
    for (; c + kUnit <= count; c += kUnit) stage_unit(from + c);
    if (c < count) {
      Scalar last[kUnit] = {};
      __builtin_memcpy(last, from + c, sizeof(Scalar) * static_cast<size_t>(count - c));
      stage_unit(last);
    }
    steps_[block] = rounding.step;
    lifts_[block] = sum_lanes<int32_t, W>(sum * -Format::kLift);
    return rounding.step * static_cast<float>(sum_lanes<int32_t, W>(sum));
  }

  template <class Scalar>
  float stage_floats(const Scalar* from, int64_t count, float* to, int64_t block) const {
    float sum = 0, lifted = 0;
    for (int64_t c = 0; c < count; c += kUnit, to += kUnit) {
      float x[kUnit] = {};
      for_each_vector<float>(c, min(count, c + kUnit), [&](int64_t i, int64_t n) {
        store(x + i - c, load_vector(from, 1, i, n));
      });
      HFLA_UNROLL
      for (int64_t place = 0; place < kUnit; ++place) {
        sum += x[place];
        if (Format::is_lifted(place)) lifted += x[place];
      }
      Format::store_unit(x, to);
    }
    lifts_[block] = -Format::kLift * lifted;
    return sum;
  }

  struct Rounding {
    float step, inverse;  // 0: the numbers are too small, or not finite, and count as 0 steps
  };

  // Of numbers of which the largest magnitude is among these. It becomes an integer of 15 bits.
  static Rounding rounding_of(Bits largest_of) {
    uint32_t largest = 0;
    for (int64_t lane = 0; lane < W; ++lane) {
      largest = largest_of[lane] > largest ? largest_of[lane] : largest;
    }
    if (largest >= kInfinity) return {__builtin_nanf(""), 0};
    const uint32_t exponent = (largest + kHalfOfAStep) >> 23;
    if (exponent < kSmallestExponent) return {0, 0};
    return {power_of_two(exponent - 14), power_of_two(127 + 141 - exponent)};
  }

  // Of a biased exponent.
  static float power_of_two(uint32_t exponent) {
    const uint32_t bits = exponent << 23;
    float result;
    __builtin_memcpy(&result, &bits, sizeof result);
    return result;
  }

  // Of magnitudes below 2^22: added to this number, they are in its lowest bits.
  static HFLA_INLINE Ints to_nearest(Floats x) { return (Ints)(x + 0x1.8p23f) - 0x4b400000; }

  const QuantizedLinearProblem& p_;
  const int64_t groups_, blocks_, padded_group_, stride_;
  Input* inputs_ = nullptr;  // (rows, stride)
  float* steps_ = nullptr;   // (rows, blocks)
  Lift* lifts_ = nullptr;    // (rows, blocks)
};

// Rows that are rounded at once: what they need lies in the caches, and what is made of W serves
// many.
constexpr int64_t kMostRows = 256;

// body(part) of a product's rows, until one fails.
template <class Body>
Status by_parts_of_rows(const QuantizedLinearProblem& problem, Body body) {
  QuantizedLinearProblem part = problem;
  const int64_t parts = max(1, ceil_div(problem.rows, kMostRows));
  for (int64_t i = 0, row = 0; i < parts; ++i, row += part.rows) {
    part.rows = (problem.rows - row) / (parts - i);
    const int64_t bytes = bytes_of(problem.dtype);
    part.x = static_cast<const char*>(problem.x) + row * problem.in * bytes;
    part.y = static_cast<char*>(problem.y) + row * problem.out * bytes;
    const Status status = body(part);
    if (status != Status::ok) return status;
  }
  return Status::ok;
}

}  // namespace
}  // namespace hfla::HFLA_ISA
