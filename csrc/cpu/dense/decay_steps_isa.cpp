// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Step sizes of tokens, and how much they forget.

#include "cpu/common/exp.h"
#include "cpu/common/memory.h"
#include "cpu/common/tasks.h"
#include "cpu/dense/kernels.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kBlockRows = 64;  // whose steps need each rate, which takes an exponential, once
constexpr int64_t kWork = 16;       // of a step, in multiplications

// log(1 + e^x) = max(x, 0) + log(1 + t) with t = e^-|x|, and log(1 + t) = 2 artanh(t / (2 + t)).
HFLA_INLINE Vec<float> softplus(Vec<float> x) {
  constexpr float kArtanh[] = {1.0f / 15, 1.0f / 13, 1.0f / 11, 1.0f / 9,
                               1.0f / 7,  1.0f / 5,  1.0f / 3,  1.0f};  // of s^15 to s, s <= 1/3
  const Vec<float> t = bounded_exp(select(x < 0.0f, x, -x));
  const Vec<float> s = t / (2.0f + t);
  Vec<float> sum{};
  HFLA_UNROLL
  for (const float coefficient : kArtanh) sum = sum * (s * s) + coefficient;
  return at_least(0.0f, x) + 2.0f * s * sum;
}

template <class Scalar>
class DecaySteps {
  static constexpr int64_t W = kLanes<float>;

 public:
  explicit DecaySteps(const DecayStepsProblem& p) : p_(p) {}

  void compute(int64_t begin, int64_t end) const {
    for_each_vector<float>(0, p_.columns, [&](int64_t c, int64_t count) {
      const Vec<float> rate = rate_of(c, count);
      const Vec<float> bias = rounded_if_asked(load_float(p_.bias, p_.has_float_bias, c, count));
      for (int64_t row = begin; row < end; ++row) {
        const Scalar* const x = static_cast<const Scalar*>(p_.x) + row * p_.row_stride;
        const int64_t at = row * p_.columns;
        const Vec<float> sum = rounded_if_asked(load_vector(x, 1, c, count) + bias);
        const Vec<float> steps = rounded_if_asked(softplus(sum));
        store_vector(p_.steps + at, 1, c, count, steps);
        store_vector(p_.log_decay + at, 1, c, count, steps * rate);
      }
    });
  }

 private:
  // As Python's rates_of (ops/numerics.py): a rate of infinity times a step of 0 would be NaN.
  Vec<float> rate_of(int64_t c, int64_t count) const {
    constexpr float kMost = 62.1059867f;  // 0.7 log(the largest float)
    float lanes[W] = {};
    for (int64_t i = 0; i < count; ++i) {
      lanes[i] = load_float(p_.A_log, p_.has_float_A_log, (c + i) / p_.group, 1)[0];
    }
    return -bounded_exp(at_most(kMost, load(lanes)));
  }

  static Vec<float> load_float(const void* from, bool has_floats, int64_t c, int64_t count) {
    return has_floats ? load_vector(static_cast<const float*>(from), 1, c, count)
                      : load_vector(static_cast<const Scalar*>(from), 1, c, count);
  }

  Vec<float> rounded_if_asked(Vec<float> x) const { return p_.rounds ? rounded<Scalar>(x) : x; }

  const DecayStepsProblem& p_;
};

}  // namespace

Status decay_steps(const DecayStepsProblem& p, const Threads& threads) {
  if constexpr (!kHasOthers) return Status::ok;  // nobody asks these kernels
  return with_dtype_but_double(p.dtype, [&](auto scalar) {
    const DecaySteps<decltype(scalar)> steps(p);
    const int64_t workers = workers_for(threads, kWork * p.rows * p.columns);
    run_tasks(threads, workers, ceil_div(p.rows, kBlockRows), [&](int64_t, int64_t block) {
      steps.compute(block * kBlockRows, min(p.rows, (block + 1) * kBlockRows));
    });
    return Status::ok;
  });
}

}  // namespace hfla::HFLA_ISA
