// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for few rows of x and a W of 8 or 4 bits with scales for groups of inputs, where
// nothing of x is rounded (rounded_linear_isa.cpp does that).
//
// With few rows, values become floats in registers (quantized_rows.h). With more, some outputs'
// values become floats in the first-level cache, scale included, which all rows then share.

#include "cpu/dense/kernels.h"
#include "cpu/dense/quantized_rows.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int kTileRows = 4;
constexpr int kTileOutputs = kVectorBytes == 64 ? 6 : 3;
constexpr int64_t kTaskBytes = 65536;  // of W
constexpr int64_t kPrefetchBytes = 8192;

template <class Format>
class SharedFloats {
 public:
  SharedFloats(const QuantizedLinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        row_bytes_(p.in * p.bits / 8),
        last_bytes_(p.group % kUnit * p.bits / 8),
        task_outputs_(round_up(max(1, min(p.out, kTaskBytes / max(1, row_bytes_))), kTileOutputs)),
        groups_(p, task_outputs_),
        inputs_(p) {}

  Status run() { return run_by_tasks(*this, p_, threads_, task_outputs_); }

  void carve_shared(Carver& carver) {
    inputs_.carve(carver);
    totals_ = carver.take<float>(groups_.totals_size());
  }

  // A worker's own, for a task.
  struct Own {
    GroupSums::Own groups;
    float* floats;  // (kTileOutputs, stride of x)
  };

  Own carve_own(Carver& carver) const {
    const GroupSums::Own groups = groups_.carve_own(carver);
    return {groups, carver.take<float>(kTileOutputs * inputs_.stride())};
  }

  void stage_x() const {
    groups_.clear(totals_);
    inputs_.stage(totals_, groups_.totals_stride());
  }

  // The outputs [begin, end) of all rows.
  void compute(const Own& own, int64_t begin, int64_t end) const {
    groups_.begin(own.groups, totals_, nullptr, begin, end);
    int64_t output = begin;
    for (; output + kTileOutputs <= end; output += kTileOutputs) {
      add_up_rows<kTileOutputs>(own, begin, output);
    }
    for (; output < end; ++output) add_up_rows<1>(own, begin, output);
    groups_.finish(own.groups, begin, end);
  }

 private:
  template <int outputs>
  void add_up_rows(const Own& own, int64_t begin, int64_t output) const {
    for (int o = 0; o < outputs; ++o) {
      make_floats(output + o, groups_.scales_of(own.groups, output + o - begin),
                  own.floats + o * inputs_.stride());
    }
    for (int64_t row = 0; row < p_.rows; row += kTileRows) {
      with_count<kTileRows>(min(kTileRows, p_.rows - row), [&](auto rows) {
        add_up<outputs, rows.value>(own, row, output - begin);
      });
    }
  }

  // The weights of an output, but for what zero points add, in the order of x.
  void make_floats(int64_t output, const float* scales, float* to) const {
    const int8_t* weight = static_cast<const int8_t*>(p_.weight) + output * row_bytes_;
    const auto store_unit = [&](const int8_t* from, Floats scale) HFLA_INLINE_LAMBDA {
      const typename Format::Unit unit = Format::load(from);
      HFLA_UNROLL
      for (int i = 0; i < kVectors; ++i, to += W) {
        store(to, (Format::values(unit, i) - Format::lift(i)) * scale);
      }
    };
    for (int64_t group = 0; group < groups_.count(); ++group) {
      const Floats scale = broadcast(*scales);
      int64_t c = 0;
      for (; c + kUnit <= p_.group; c += kUnit, weight += Format::kBytes) {
        __builtin_prefetch(weight + kPrefetchBytes);
        store_unit(weight, scale);
      }
      if (c < p_.group) {
        int8_t last[Format::kBytes] = {};
        for (int64_t i = 0; i < last_bytes_; ++i) last[i] = weight[i];
        store_unit(last, scale);
        weight += last_bytes_;
      }
      scales += groups_.scale_group_step();
    }
  }

  template <int outputs, int rows>
  void add_up(const Own& own, int64_t row, int64_t output) const {
    const float* const x = inputs_.row(row).inputs;
    const int64_t stride = inputs_.stride();
    Floats sums[outputs][rows] = {};
    for (int64_t c = 0; c < inputs_.padded(); c += W) {
      HFLA_UNROLL
      for (int o = 0; o < outputs; ++o) {
        const Floats weight = load(own.floats + o * stride + c);
        HFLA_UNROLL
        for (int r = 0; r < rows; ++r) sums[o][r] += weight * load(x + r * stride + c);
      }
    }
    for_sums_of_lanes<float>(sums, [&](int o, int r, float sum) HFLA_INLINE_LAMBDA {
      own.groups.sums[(row + r) * groups_.sums_stride() + output + o] += sum;
    });
  }

  const QuantizedLinearProblem& p_;
  const Threads& threads_;
  const int64_t row_bytes_, last_bytes_, task_outputs_;
  const GroupSums groups_;
  Inputs<Format> inputs_;
  float* totals_ = nullptr;  // (rows, groups)
};

template <class Format>
Status quantized_rows(const QuantizedLinearProblem& p, const Threads& threads) {
  return p.rows > kTileRows ? SharedFloats<Format>(p, threads).run()
                            : QuantizedRows<Format>(p, threads).run();
}

}  // namespace

Status quantized_linear(const QuantizedLinearProblem& problem, const Threads& threads) {
  return problem.bits == 8 ? quantized_rows<EightBits>(problem, threads)
                           : quantized_rows<FourBits>(problem, threads);
}

}  // namespace hfla::HFLA_ISA
