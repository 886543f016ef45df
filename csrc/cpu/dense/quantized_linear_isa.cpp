// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for few rows of x and a W of 8 or 4 bits with scales for groups of inputs.
//
// Nothing of x is rounded here (rounded_linear_isa.cpp does that): values become floats in
// registers, and are multiplied by x as it is. With few rows a worker walks through consecutive
// outputs, as in linear_isa.cpp, and scales sums of kUnit products. With more rows than kMaxRows,
// some outputs' values become floats in the first-level cache, scale included, which all rows then
// share. With AVX512-BF16 and an x of bfloat16 they become numbers of bfloat16 instead, which hold
// any value exactly, but no scale: so sums of a group's products are scaled, and groups have to be
// long. What of x is smaller than the smallest normal number, 2^-126, then counts as 0.

#include "cpu/common/memory.h"
#include "cpu/common/sums_of_lanes.h"
#include "cpu/common/tasks.h"
#include "cpu/common/vec.h"
#include "cpu/dense/kernels.h"
#include "cpu/dense/quantized_groups.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kPrefetchBytes = 8192;
constexpr int64_t kTaskBytes = 65536;  // of the weights

// Rows of x that are read together, at most.
constexpr int kMaxRows = 4;
// Outputs that are computed together, of `rows` rows: first of unpacked values, then of floats.
constexpr int unpacked_outputs(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
constexpr int kFloatOutputs = kVectorBytes == 64 ? 6 : 3;
constexpr int64_t kTaskMultiple = 12;  // of all these

constexpr int64_t kMinHalfGroup = 4 * kUnit;  // of which products of bfloat16 are the faster ones
#if defined(__AVX512BF16__)
constexpr bool kHasHalfProducts = true;
HFLA_INLINE Floats add_half_products(Floats sum, const BFloat16* a, const BFloat16* b) {
  const auto pairs = [](const BFloat16* from)
                         HFLA_INLINE_LAMBDA { return (__m512bh)_mm512_loadu_si512(from); };
  return (Floats)_mm512_dpbf16_ps((__m512)sum, pairs(a), pairs(b));
}
// A unit of values, which are exact.
HFLA_INLINE void store_halves(BFloat16* to, const Floats (&unit)[kVectors]) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)unit[1], (__m512)unit[0]));
}
#else
constexpr bool kHasHalfProducts = false;
HFLA_INLINE Floats add_half_products(Floats sum, const BFloat16*, const BFloat16*) { return sum; }
HFLA_INLINE void store_halves(BFloat16*, const Floats (&)[kVectors]) {}
#endif

template <class Format>
class QuantizedLinear {
 public:
  QuantizedLinear(const QuantizedLinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        weight_(static_cast<const int8_t*>(p.weight)),
        row_bytes_(p.in * p.bits / 8),
        last_bytes_(p.group % kUnit * p.bits / 8),
        padded_group_(round_up(p.group, kUnit)),
        task_outputs_(round_up(max(1, min(p.out, kTaskBytes / max(1, row_bytes_))), kTaskMultiple)),
        groups_(p, task_outputs_),
        // Not a power of two, which would put all rows into the same few lines of the cache.
        x_stride_(groups_.count() * padded_group_ + kCacheLine / 4),
        units_(groups_.count() * padded_group_ / kUnit),
        are_halves_(kHasHalfProducts && p.dtype == DType::bf16 && p.rows > kMaxRows &&
                    p.group >= kMinHalfGroup),
        sums_stride_(groups_.sums_stride()),
        scale_out_step_(groups_.scale_out_step()),
        scale_group_step_(groups_.scale_group_step()) {}

  Status run() { return run_by_tasks(*this, p_, threads_, task_outputs_); }

  using Groups = GroupSums<Format::kLift != 0>;

  // Of all workers.
  struct Shared {
    float* x;          // (rows, x_stride)
    BFloat16* half_x;  // the same in the place of x, where products are of bfloat16
    typename Groups::Totals totals;
  };

  // A worker's own, for a task.
  struct Own {
    typename Groups::Own groups;
    float* floats;     // (kFloatOutputs, x_stride): weights
    BFloat16* halves;  // the same in the place of floats, where products are of bfloat16
  };

  void carve_shared(Carver& carver) {
    const int64_t size = p_.rows * x_stride_;
    float* const x = carver.take<float>(are_halves_ ? 0 : size);
    BFloat16* const half_x = carver.take<BFloat16>(are_halves_ ? size : 0);
    shared_ = {x, half_x, groups_.carve_totals(carver)};
  }

  Own carve_own(Carver& carver) const {
    const typename Groups::Own groups = groups_.carve_own(carver);
    const int64_t size = kFloatOutputs * x_stride_;
    float* const floats = carver.take<float>(are_halves_ ? 0 : size);
    return {groups, floats, carver.take<BFloat16>(are_halves_ ? size : 0)};
  }

  // ---- x ----

  void stage_x() const {
    with_dtype_but_double(p_.dtype, [&](auto scalar) { stage_x_of<decltype(scalar)>(); });
  }

  // The outputs [begin, end) of all rows.
  void compute(const Own& own, int64_t begin, int64_t end) const {
    groups_.begin(own.groups, shared_.totals, begin, end);
    if (p_.rows <= kMaxRows) {
      with_count<kMaxRows>(p_.rows,
                           [&](auto rows) { add_up_unpacked<rows.value>(own, begin, end); });
    } else {
      int64_t output = begin;
      for (; output + kFloatOutputs <= end; output += kFloatOutputs) {
        add_up_shared<kFloatOutputs>(own, begin, output);
      }
      for (; output < end; ++output) add_up_shared<1>(own, begin, output);
    }
    groups_.finish(own.groups, begin, end);
  }

 private:
  template <class Scalar>
  void stage_x_of() const {
    const Scalar* from = static_cast<const Scalar*>(p_.x);
    groups_.clear(shared_.totals);
    for (int64_t row = 0; row < p_.rows; ++row) {
      int64_t to = row * x_stride_;
      auto totals = groups_.of_row(shared_.totals, row);
      for (int64_t group = 0; group < groups_.count(); ++group) {
        for (int64_t c = 0; c < p_.group; c += kUnit) {
          stage_unit(from + c, min(kUnit, p_.group - c), to + c, totals);
        }
        from += p_.group;
        to += padded_group_;
        totals = totals.next();
      }
    }
  }

  // `count` inputs in the order of their values in the vectors of a unit, zeros for the others.
  template <class Scalar>
  HFLA_INLINE void stage_unit(const Scalar* from, int64_t count, int64_t to,
                              const typename Groups::Totals& totals) const {
    float x[kUnit] = {};
    for_each_vector<float>(0, count,
                           [&](int64_t c, int64_t n) { store(x + c, load_vector(from, 1, c, n)); });
    float sum = 0, without = 0;
    HFLA_UNROLL
    for (int64_t place = 0; place < kUnit; ++place) {
      if (Format::is_lifted(place))
        sum += x[place];
      else
        without += x[place];
    }
    if constexpr (Format::kLift != 0) *totals.lifted -= Format::kLift * sum;
    *totals.of_x += sum + without;
    for (int64_t i = 0; i < kVectors; ++i) {
      float ordered[W];
      HFLA_UNROLL
      for (int64_t lane = 0; lane < W; ++lane) {
        const int64_t place = Format::place(i, lane);
        ordered[lane] = are_halves_ ? x[place] : x[place] * Format::multiplier(place);
      }
      const Floats vector = load(ordered);
      if (are_halves_)
        store(shared_.half_x + to + i * W, vector);
      else
        store(shared_.x + to + i * W, vector);
    }
  }

  // ---- few rows: sums of unpacked values ----

  template <int rows>
  void add_up_unpacked(const Own& own, int64_t begin, int64_t end) const {
    constexpr int outputs = unpacked_outputs(rows);
    int64_t output = begin;
    for (; output + outputs <= end; output += outputs) {
      add_up_unpacked_of<outputs, rows>(own, begin, output);
    }
    for (; output < end; ++output) add_up_unpacked_of<1, rows>(own, begin, output);
  }

  template <int outputs, int rows>
  void add_up_unpacked_of(const Own& own, int64_t begin, int64_t output) const {
    const int8_t* weight = weight_ + output * row_bytes_;
    const int8_t* ahead = weight + kPrefetchBytes;
    const float* x = shared_.x;
    const float* scales = groups_.scales_of(own.groups, output - begin);
    Floats sums[outputs][rows] = {};
    int64_t left = p_.group;  // of a group
    for (int64_t unit = 0; unit < units_; ++unit, x += kUnit) {
      // The rows of all outputs are one stretch of memory.
      HFLA_UNROLL
      for (int64_t b = 0; b < outputs * Format::kBytes; b += kCacheLine) {
        __builtin_prefetch(ahead + b);
      }
      ahead += outputs * Format::kBytes;
      if (__builtin_expect(left >= kUnit, 1)) {
        multiply_add<outputs, rows>(weight, row_bytes_, scales, x, sums);
        weight += Format::kBytes;
      } else {
        int8_t last[outputs * Format::kBytes] = {};
        for (int o = 0; o < outputs; ++o) {
          copy_last(weight + o * row_bytes_, last + o * Format::kBytes);
        }
        multiply_add<outputs, rows>(last, Format::kBytes, scales, x, sums);
        weight += last_bytes_;
      }
      left -= kUnit;
      if (left <= 0) {
        left = p_.group;
        scales += scale_group_step_;
      }
    }
    for_sums_of_lanes<float>(sums, [&](int o, int r, float sum) HFLA_INLINE_LAMBDA {
      own.groups.sums[r * sums_stride_ + output + o - begin] += sum;
    });
  }

  // What a group has beyond whole units. The rest of a unit meets zeros in x.
  void copy_last(const int8_t* from, int8_t* to) const {
    for (int64_t i = 0; i < last_bytes_; ++i) to[i] = from[i];
  }

  // A unit of each output. Its products are added up by themselves, and then scaled.
  template <int outputs, int rows>
  HFLA_INLINE void multiply_add(const int8_t* weight, int64_t row_bytes, const float* scales,
                                const float* x, Floats (&sums)[outputs][rows]) const {
    typename Format::Unit units[outputs];
    Floats products[outputs][rows];
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) units[o] = Format::load(weight + o * row_bytes);
    HFLA_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      HFLA_UNROLL
      for (int o = 0; o < outputs; ++o) {  // side by side, so that few wait for another
        const Floats floats = Format::floats(units[o], i);
        HFLA_UNROLL
        for (int r = 0; r < rows; ++r) {
          const Floats product = floats * load(x + r * x_stride_ + i * W);
          products[o][r] = i == 0 ? product : products[o][r] + product;
        }
      }
    }
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) {
      const Floats scale = broadcast(scales[o * scale_out_step_]);
      HFLA_UNROLL
      for (int r = 0; r < rows; ++r) sums[o][r] += scale * products[o][r];
    }
  }

  // ---- more rows: sums of floats, or of numbers of bfloat16 ----

  template <int outputs>
  void add_up_shared(const Own& own, int64_t begin, int64_t output) const {
    for (int o = 0; o < outputs; ++o) {
      if (are_halves_)
        make_halves(output + o, own.halves + o * x_stride_);
      else
        make_floats(own, begin, output + o, own.floats + o * x_stride_);
    }
    for (int64_t row = 0; row < p_.rows; row += kMaxRows) {
      with_count<kMaxRows>(min(kMaxRows, p_.rows - row), [&](auto rows) {
        if (are_halves_)
          add_up_halves_of<outputs, rows.value>(own, row, output - begin);
        else
          add_up_floats_of<outputs, rows.value>(own, row, output - begin);
      });
    }
  }

  // The weights of an output, but for what zero points and lifting add, in the order of x.
  void make_floats(const Own& own, int64_t begin, int64_t output, float* to) const {
    const float* scales = groups_.scales_of(own.groups, output - begin);
    for_units(output, [&](int64_t group, const int8_t* weight) HFLA_INLINE_LAMBDA {
      const Floats scale = broadcast(scales[group * scale_group_step_]);
      const typename Format::Unit unit = Format::load(weight);
      HFLA_UNROLL
      for (int i = 0; i < kVectors; ++i) store(to + i * W, Format::floats(unit, i) * scale);
      to += kUnit;
    });
  }

  // The same, but for scales.
  void make_halves(int64_t output, BFloat16* to) const {
    float multipliers[kUnit];
    for (int64_t i = 0; i < kUnit; ++i) {
      multipliers[i] = Format::multiplier(Format::place(i / W, i % W));
    }
    for_units(output, [&](int64_t, const int8_t* weight) HFLA_INLINE_LAMBDA {
      const typename Format::Unit unit = Format::load(weight);
      Floats floats[kVectors];
      HFLA_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        floats[i] = Format::floats(unit, i) * load(multipliers + i * W);
      }
      store_halves(to, floats);
      to += kUnit;
    });
  }

  // body(group, the unit's bytes) for all of an output.
  template <class Body>
  HFLA_INLINE void for_units(int64_t output, Body body) const {
    const int8_t* weight = weight_ + output * row_bytes_;
    for (int64_t group = 0; group < groups_.count(); ++group) {
      int64_t c = 0;
      for (; c + kUnit <= p_.group; c += kUnit, weight += Format::kBytes) {
        __builtin_prefetch(weight + kPrefetchBytes);
        body(group, weight);
      }
      if (c < p_.group) {
        int8_t last[Format::kBytes] = {};
        copy_last(weight, last);
        body(group, last);
        weight += last_bytes_;
      }
    }
  }

  template <int outputs, int rows>
  void add_up_floats_of(const Own& own, int64_t row, int64_t output) const {
    const float* const x = shared_.x + row * x_stride_;
    Floats sums[outputs][rows] = {};
    for (int64_t c = 0; c < groups_.count() * padded_group_; c += W) {
      HFLA_UNROLL
      for (int o = 0; o < outputs; ++o) {
        const Floats weight = load(own.floats + o * x_stride_ + c);
        HFLA_UNROLL
        for (int r = 0; r < rows; ++r) sums[o][r] += weight * load(x + r * x_stride_ + c);
      }
    }
    for_sums_of_lanes<float>(sums, [&](int o, int r, float sum) HFLA_INLINE_LAMBDA {
      own.groups.sums[(row + r) * sums_stride_ + output + o] += sum;
    });
  }

  template <int outputs, int rows>
  void add_up_halves_of(const Own& own, int64_t row, int64_t output) const {
    const BFloat16* x = shared_.half_x + row * x_stride_;
    const BFloat16* weight = own.halves;
    const float* scales = groups_.scales_of(own.groups, output);
    Floats sums[outputs][rows] = {};
    for (int64_t group = 0; group < groups_.count(); ++group, scales += scale_group_step_) {
      Floats products[outputs][rows] = {};
      for (int64_t c = 0; c < padded_group_; c += kUnit, x += kUnit, weight += kUnit) {
        HFLA_UNROLL
        for (int o = 0; o < outputs; ++o) {
          HFLA_UNROLL
          for (int r = 0; r < rows; ++r) {
            products[o][r] =
                add_half_products(products[o][r], weight + o * x_stride_, x + r * x_stride_);
          }
        }
      }
      HFLA_UNROLL
      for (int o = 0; o < outputs; ++o) {
        const Floats scale = broadcast(scales[o * scale_out_step_]);
        HFLA_UNROLL
        for (int r = 0; r < rows; ++r) sums[o][r] += scale * products[o][r];
      }
    }
    for_sums_of_lanes<float>(sums, [&](int o, int r, float sum) HFLA_INLINE_LAMBDA {
      own.groups.sums[(row + r) * sums_stride_ + output + o] += sum;
    });
  }

  const QuantizedLinearProblem& p_;
  const Threads& threads_;
  const int8_t* const weight_;
  const int64_t row_bytes_, last_bytes_, padded_group_, task_outputs_;
  const Groups groups_;
  const int64_t x_stride_, units_;
  const bool are_halves_;  // products
  const int64_t sums_stride_, scale_out_step_, scale_group_step_;
  Shared shared_{};
};

}  // namespace

Status quantized_linear(const QuantizedLinearProblem& problem, const Threads& threads) {
  return problem.bits == 8 ? QuantizedLinear<EightBits>(problem, threads).run()
                           : QuantizedLinear<FourBits>(problem, threads).run();
}

}  // namespace hfla::HFLA_ISA
