// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for few rows of x, rounded to 16 bits, and a W of 8 or 4 bits with scales for
// groups of inputs: sums of products of integers.
//
// Inputs come in blocks, of a group's inputs at most kBlock. A block of a row of x becomes integers
// of 16 bits and the power of two that one of them stands for, its step: numbers of half precision
// that are not much smaller than the largest stay what they are. Sums of their products with values
// are exact, and become floats, which are scaled, once for each block.
//
// Eight bits of x would take about as many instructions: where no instruction adds up products of
// bytes, those of two bytes are words, too, and with more than two they overflow.
//
// As in linear_isa.cpp, a worker walks through several stretches of W side by side.

#include "cpu/common/memory.h"
#include "cpu/common/registers.h"
#include "cpu/common/tasks.h"
#include "cpu/common/vec.h"
#include "cpu/dense/kernels.h"
#include "cpu/dense/quantized_groups.h"
#include "cpu/dense/quantized_shorts.h"
#include "cpu/dense/rounded_linear.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kStretchBytes = 32768;  // of W; in shorter ones reading does not get up to speed

// Sums of their products fit into 32 bits, and one large input spoils few others' accuracy.
constexpr int64_t kBlock = 256;
// Of floats, as bits.
constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kHalfOfAStep = 0x100;    // what rounding to 15 bits may add
constexpr uint32_t kSmallestExponent = 15;  // below 2^-112 numbers count as 0

// Rows of x that are read together, at most, and outputs that are computed together.
constexpr int kTileRows = 4;
constexpr int tile_outputs(int rows) { return rows == 1 ? 4 : rows == 2 ? 3 : 2; }
constexpr int64_t kTaskMultiple = 12;  // of all these

template <class Format>
class RoundedLinear {
 public:
  RoundedLinear(const QuantizedLinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        weight_(static_cast<const int8_t*>(p.weight)),
        row_bytes_(p.in * p.bits / 8),
        last_bytes_(p.group % kUnit * p.bits / 8),
        padded_group_(round_up(p.group, kUnit)),
        task_outputs_(task_outputs()),
        groups_(p, task_outputs_),
        blocks_(groups_.count() * ceil_div(p.group, kBlock)),
        // Not a power of two, which would put all rows into the same few lines of the cache.
        x_stride_(groups_.count() * padded_group_ + kCacheLine / 2),
        scale_out_step_(groups_.scale_out_step()),
        scale_group_step_(groups_.scale_group_step()) {}

  Status run() { return run_by_tasks(*this, p_, threads_, task_outputs_); }

  using Groups = GroupSums<false>;

  // Of all workers.
  struct Shared {
    int16_t* x;    // (rows, x_stride)
    float* steps;  // (rows, blocks)
    Groups::Totals totals;
  };

  void carve_shared(Carver& carver) {
    int16_t* const x = carver.take<int16_t>(p_.rows * x_stride_);
    float* const steps = carver.take<float>(p_.rows * blocks_);
    shared_ = {x, steps, groups_.carve_totals(carver)};
  }

  // A worker's own, for a task.
  Groups::Own carve_own(Carver& carver) const { return groups_.carve_own(carver); }

  void stage_x() const {
    with_dtype_but_double(p_.dtype, [&](auto scalar) { stage_x_of<decltype(scalar)>(); });
  }

  // The outputs [begin, end) of all rows.
  void compute(const Groups::Own& own, int64_t begin, int64_t end) const {
    groups_.begin(own, shared_.totals, begin, end);
    for (int64_t row = 0; row < p_.rows; row += kTileRows) {
      with_rows<kTileRows>(
          p_.rows - row, [&](auto rows) { add_up_rows<rows.value>(own, row, begin, end - begin); });
    }
    groups_.finish(own, begin, end);
  }

 private:
  // Long stretches, but enough tasks for all threads.
  int64_t task_outputs() const {
    const int64_t outputs = tile_outputs(1) * ceil_div(kStretchBytes, max(1, row_bytes_));
    const int64_t share = p_.out / (4 * max(1, threads_.count));
    return round_up(max(1, min(outputs, share)), kTaskMultiple);
  }

  // ---- x ----

  template <class Scalar>
  void stage_x_of() const {
    const Scalar* from = static_cast<const Scalar*>(p_.x);
    groups_.clear(shared_.totals);
    float* step = shared_.steps;
    for (int64_t row = 0; row < p_.rows; ++row) {
      int16_t* to = shared_.x + row * x_stride_;
      Groups::Totals totals = groups_.of_row(shared_.totals, row);
      for (int64_t group = 0; group < groups_.count(); ++group) {
        for (int64_t c = 0; c < p_.group; c += kBlock) {
          stage_block(from + c, min(kBlock, p_.group - c), to + c, step++, totals.of_x);
        }
        from += p_.group;
        to += padded_group_;
        totals = totals.next();
      }
    }
  }

  // `count` inputs in the order of their values in the vectors of units, zeros behind them.
  template <class Scalar>
  void stage_block(const Scalar* from, int64_t count, int16_t* to, float* step,
                   float* total) const {
    float x[kBlock + W] = {};
    Bits largest{};
    for_each_vector<float>(0, count, [&](int64_t c, int64_t n) HFLA_INLINE_LAMBDA {
      const Floats part = load_vector(from, 1, c, n);
      store(x + c, part);
      const Bits magnitude = (Bits)part & 0x7fffffff;  // NaN is larger than inf, and that than all
      largest = select(magnitude > largest, magnitude, largest);
    });
    const Rounding rounding = rounding_of(largest);
    Ints integers_total{};
    for (int64_t c = 0; c < count; c += kUnit, to += kUnit) {
      int32_t integers[kUnit];
      HFLA_UNROLL
      for (int64_t i = 0; i < kUnit; i += W) {
        const Ints rounded = to_nearest(load(x + c + i) * rounding.inverse);
        integers_total += rounded;
        store_lanes(integers + i, rounded);
      }
      for (int i = 0; i < kShortVectors; ++i) {
        HFLA_UNROLL
        for (int64_t lane = 0; lane < kShorts; ++lane) {
          to[i * kShorts + lane] = static_cast<int16_t>(integers[Format::place(i, lane)]);
        }
      }
    }
    *step = rounding.step;
    *total += rounding.step * static_cast<float>(sum_lanes<int32_t, W>(integers_total));
  }

  struct Rounding {
    float step, inverse;
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

  // ---- sums ----

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
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) {
      HFLA_UNROLL
      for (int r = 0; r < rows; ++r) {
        const int64_t at = (row + r) * groups_.sums_stride() + place + o * of.stretch;
        own.sums[at] += sum<float>(sums[o][r]);
      }
    }
  }

  // Where every group is a unit.
  template <int outputs, int rows>
  HFLA_NOINLINE void add_up_units(Outputs of, int64_t row, const float* scales,
                                  Floats (&result)[outputs][rows]) const {
    const int8_t* weight = weight_ + of.first * row_bytes_;
    const int16_t* x = shared_.x + row * x_stride_;
    const float* steps = shared_.steps + row * blocks_;
    const int64_t stretch_bytes = of.stretch * row_bytes_;
    const int64_t scale_stretch = of.stretch * scale_out_step_;
    Floats sums[outputs][rows] = {};
    for (int64_t group = 0; group < blocks_; ++group) {
      Ints integers[outputs][rows] = {};
      multiply_add<outputs, rows>(weight, stretch_bytes, x, integers);
      add_scaled<outputs, rows>(scales, scale_stretch, steps, integers, sums);
      weight += Format::kBytes;
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
    const int16_t* x = shared_.x + row * x_stride_;
    const float* steps = shared_.steps + row * blocks_;
    const int64_t stretch_bytes = of.stretch * row_bytes_;
    const int64_t scale_stretch = of.stretch * scale_out_step_;
    Floats sums[outputs][rows] = {};
    for (int64_t group = 0; group < groups_.count(); ++group, scales += scale_group_step_) {
      for (int64_t c = 0; c < p_.group; c += kBlock, ++steps) {
        Ints integers[outputs][rows] = {};
        int64_t left = min(kBlock, p_.group - c);
        for (; left >= kUnit; left -= kUnit, weight += Format::kBytes, x += kUnit) {
          multiply_add<outputs, rows>(weight, stretch_bytes, x, integers);
        }
        if (left > 0) {
          int8_t last[outputs * Format::kBytes] = {};
          for (int o = 0; o < outputs; ++o) {
            copy_last(weight + o * stretch_bytes, last + o * Format::kBytes);
          }
          multiply_add<outputs, rows>(last, Format::kBytes, x, integers);
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
    typename Format::Unit units[outputs];
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) units[o] = Format::load(weight + o * stretch_bytes);
    HFLA_UNROLL
    for (int i = 0; i < kShortVectors; ++i) {
      HFLA_UNROLL
      for (int o = 0; o < outputs; ++o) {
        const Shorts values = Format::shorts(units[o], i);
        HFLA_UNROLL
        for (int r = 0; r < rows; ++r) {
          const Shorts inputs = load_lanes<int16_t>(x + r * x_stride_ + i * kShorts);
          integers[o][r] += add_pairs(values, inputs);
        }
      }
    }
  }

  const QuantizedLinearProblem& p_;
  const Threads& threads_;
  const int8_t* const weight_;
  const int64_t row_bytes_, last_bytes_, padded_group_, task_outputs_;
  const Groups groups_;
  const int64_t blocks_, x_stride_, scale_out_step_, scale_group_step_;
  Shared shared_{};
};

}  // namespace

Status rounded_linear(const QuantizedLinearProblem& problem, const Threads& threads) {
  return problem.bits == 8 ? RoundedLinear<EightBitShorts>(problem, threads).run()
                           : RoundedLinear<FourBitShorts>(problem, threads).run();
}

}  // namespace hfla::HFLA_ISA
