// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for few rows of x and a W of 8 or 4 bits with scales for groups of inputs.
//
// Nothing of x is rounded: values become floats in registers, and are multiplied by x as it is.
// With few rows a worker walks through consecutive outputs, as in linear_isa.cpp, and scales sums
// of kUnit products. With more rows than kMaxRows, some outputs' values become floats in the
// first-level cache, scale included, which all rows then share.
//
// What zero points add to an output, group by group, is a product with the sum of the group's
// inputs: what a sum begins with.

#include "cpu/common/memory.h"
#include "cpu/common/tasks.h"
#include "cpu/common/vec.h"
#include "cpu/dense/kernels.h"
#include "cpu/dense/quantized_values.h"

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

template <int number>
struct Constant {
  static constexpr int value = number;
};

// body(Constant<rows>), of at most kMaxRows.
template <class Body>
HFLA_INLINE void with_rows(int64_t rows, Body body) {
  static_assert(kMaxRows == 4);
  switch (rows) {
    case 1:
      return body(Constant<1>{});
    case 2:
      return body(Constant<2>{});
    case 3:
      return body(Constant<3>{});
    default:
      return body(Constant<4>{});
  }
}

template <class Format>
class QuantizedLinear {
 public:
  QuantizedLinear(const QuantizedLinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        weight_(static_cast<const int8_t*>(p.weight)),
        row_bytes_(p.in * p.bits / 8),
        groups_(p.in / max(1, p.group)),
        last_bytes_(p.group % kUnit * p.bits / 8),
        padded_group_(round_up(p.group, kUnit)),
        // Not a power of two, which would put all rows into the same few lines of the cache.
        x_stride_(groups_ * padded_group_ + kCacheLine / 4),
        units_(groups_ * padded_group_ / kUnit),
        task_outputs_(round_up(max(1, min(p.out, kTaskBytes / max(1, row_bytes_))), kTaskMultiple)),
        sums_stride_(round_up(task_outputs_, W)),
        totals_stride_(round_up(groups_, W)),
        are_outputs_together_(p.scale.out_stride == 1 || groups_ == 1),
        scale_out_step_(are_outputs_together_ ? 1 : totals_stride_),
        scale_group_step_(are_outputs_together_ ? sums_stride_ : 1),
        has_offsets_(p.zero.data != nullptr || Format::kLift != 0) {}

  Status run() {
    const int64_t tasks = ceil_div(p_.out, task_outputs_);
    const int64_t workers = p_.in * p_.out < kSerialWork ? 1 : min(tasks, max(1, threads_.count));
    Carver sizes(nullptr);
    carve_shared(sizes);
    const int64_t shared_bytes = sizes.used();
    carve_own(sizes);
    const int64_t own_bytes = sizes.used() - shared_bytes;
    const Buffer buffer(shared_bytes + workers * own_bytes);
    if (!buffer.data()) return Status::out_of_memory;
    Carver carver(buffer.data());
    shared_ = carve_shared(carver);
    stage_x();
    run_tasks(threads_, workers, tasks, [&](int64_t worker, int64_t task) {
      Carver own_memory(buffer.data() + shared_bytes + worker * own_bytes);
      const int64_t begin = task * task_outputs_;
      compute(carve_own(own_memory), begin, min(p_.out, begin + task_outputs_));
    });
    return Status::ok;
  }

 private:
  // Of all workers.
  struct Shared {
    float* x;       // (rows, x_stride)
    float* totals;  // (rows, totals_stride): sums of x over a group
    float* lifted;  // what to add for the inputs whose values have been lifted, of a scale of 1
  };

  // A worker's own, for a task.
  struct Own {
    float* sums;    // (rows, sums_stride)
    float* scales;  // (groups, sums_stride), or (task_outputs, totals_stride)
    float* zeros;   // the same
    float* floats;  // (kFloatOutputs, x_stride): weights
  };

  Shared carve_shared(Carver& carver) const {
    float* const x = carver.take<float>(p_.rows * x_stride_);
    float* const totals = carver.take<float>(p_.rows * totals_stride_);
    return {x, totals, carver.take<float>(p_.rows * totals_stride_)};
  }

  Own carve_own(Carver& carver) const {
    const int64_t scales_size =
        are_outputs_together_ ? groups_ * sums_stride_ : task_outputs_ * totals_stride_;
    float* const sums = carver.take<float>(p_.rows * sums_stride_);
    float* const scales = carver.take<float>(scales_size);
    float* const zeros = carver.take<float>(scales_size);
    return {sums, scales, zeros, carver.take<float>(kFloatOutputs * x_stride_)};
  }

  // ---- x ----

  void stage_x() const {
    with_dtype_but_double(p_.dtype, [&](auto scalar) { stage_x_of<decltype(scalar)>(); });
  }

  template <class Scalar>
  void stage_x_of() const {
    const Scalar* from = static_cast<const Scalar*>(p_.x);
    for (int64_t row = 0; row < p_.rows; ++row) {
      float* to = shared_.x + row * x_stride_;
      float* const totals = shared_.totals + row * totals_stride_;
      float* const lifted = shared_.lifted + row * totals_stride_;
      for (int64_t group = 0; group < groups_; ++group, from += p_.group, to += padded_group_) {
        totals[group] = lifted[group] = 0;
        for (int64_t c = 0; c < p_.group; c += kUnit) {
          stage_unit(from + c, min(kUnit, p_.group - c), to + c, totals + group, lifted + group);
        }
      }
      for (int64_t group = groups_; group < totals_stride_; ++group) {
        totals[group] = lifted[group] = 0;
      }
    }
  }

  // `count` inputs in the order of their values in the vectors of a unit, zeros for the others.
  template <class Scalar>
  HFLA_INLINE void stage_unit(const Scalar* from, int64_t count, float* to, float* total,
                              float* lifted) const {
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
    *lifted -= Format::kLift * sum;
    *total += sum + without;
    for (int64_t i = 0; i < kVectors; ++i) {
      HFLA_UNROLL
      for (int64_t lane = 0; lane < W; ++lane) {
        const int64_t place = Format::place(i, lane);
        to[i * W + lane] = x[place] * Format::multiplier(place);
      }
    }
  }

  // ---- a task ----

  // The outputs [begin, end) of all rows.
  void compute(const Own& own, int64_t begin, int64_t end) const {
    __builtin_memset(own.sums, 0, sizeof(float) * static_cast<size_t>(p_.rows * sums_stride_));
    stage_scales(own, begin, end);
    if (p_.rows <= kMaxRows) {
      with_rows(p_.rows, [&](auto rows) { add_up_unpacked<rows.value>(own, begin, end); });
    } else {
      int64_t output = begin;
      for (; output + kFloatOutputs <= end; output += kFloatOutputs) {
        add_up_floats<kFloatOutputs>(own, begin, output);
      }
      for (; output < end; ++output) add_up_floats<1>(own, begin, output);
    }
    finish(own, begin, end);
  }

  // Where the scale of an output of this task and the first group is.
  const float* scales_of(const Own& own, int64_t output) const {
    return own.scales + output * scale_out_step_;
  }

  // Scales; and what sums begin with, for zero points and lifting.
  void stage_scales(const Own& own, int64_t begin, int64_t end) const {
    stage_numbers(p_.scale, begin, end, own.scales);
    if (!has_offsets_) return;
    stage_numbers(p_.zero, begin, end, own.zeros);
    for (int64_t row = 0; row < p_.rows; ++row) {
      const float* const totals = shared_.totals + row * totals_stride_;
      const float* const lifted = shared_.lifted + row * totals_stride_;
      float* const sums = own.sums + row * sums_stride_;
      if (are_outputs_together_)
        begin_sums_of_outputs(own, end - begin, totals, lifted, sums);
      else
        begin_sums_by_groups(own, end - begin, totals, lifted, sums);
    }
  }

  void begin_sums_of_outputs(const Own& own, int64_t outputs, const float* totals,
                             const float* lifted, float* sums) const {
    constexpr int together = 4;  // vectors, so that no addition waits for another
    int64_t c = 0;
    for (; c + together * W <= outputs; c += together * W) {
      begin_sums<together>(own, c, totals, lifted, sums);
    }
    for (; c < outputs; c += W) begin_sums<1>(own, c, totals, lifted, sums);
  }

  template <int vectors>
  void begin_sums(const Own& own, int64_t c, const float* totals, const float* lifted,
                  float* sums) const {
    Floats sum_of[vectors] = {};
    for (int64_t group = 0; group < groups_; ++group) {
      const Floats total = broadcast(totals[group]), lift = broadcast(lifted[group]);
      const int64_t at = group * sums_stride_ + c;
      HFLA_UNROLL
      for (int i = 0; i < vectors; ++i) {
        const Floats scale = load(own.scales + at + i * W), zero = load(own.zeros + at + i * W);
        sum_of[i] += offset(zero, scale) * total + scale * lift;
      }
    }
    HFLA_UNROLL
    for (int i = 0; i < vectors; ++i) store(sums + c + i * W, sum_of[i]);
  }

  void begin_sums_by_groups(const Own& own, int64_t outputs, const float* totals,
                            const float* lifted, float* sums) const {
    for (int64_t output = 0; output < outputs; ++output) {
      Floats sums_of_groups{};
      for (int64_t c = 0; c < groups_; c += W) {
        const Floats scale = load(own.scales + output * totals_stride_ + c);
        const Floats zero = load(own.zeros + output * totals_stride_ + c);
        sums_of_groups += offset(zero, scale) * load(totals + c) + scale * load(lifted + c);
      }
      sums[output] = sum<float>(sums_of_groups);
    }
  }

  // What the total of a group's inputs is multiplied by.
  HFLA_INLINE Floats offset(Floats zero, Floats scale) const {
    return p_.bits == 8 ? -zero * scale : zero;
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
    const float* scales = scales_of(own, output - begin);
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
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) {
      HFLA_UNROLL
      for (int r = 0; r < rows; ++r) {
        own.sums[r * sums_stride_ + output + o - begin] += sum<float>(sums[o][r]);
      }
    }
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

  // ---- more rows: sums of floats ----

  template <int outputs>
  void add_up_floats(const Own& own, int64_t begin, int64_t output) const {
    for (int o = 0; o < outputs; ++o)
      make_floats(own, begin, output + o, own.floats + o * x_stride_);
    for (int64_t row = 0; row < p_.rows; row += kMaxRows) {
      with_rows(min(kMaxRows, p_.rows - row), [&](auto rows) {
        add_up_floats_of<outputs, rows.value>(own, row, output - begin);
      });
    }
  }

  // The weights of an output, but for what zero points and lifting add, in the order of x.
  void make_floats(const Own& own, int64_t begin, int64_t output, float* to) const {
    const int8_t* weight = weight_ + output * row_bytes_;
    for (int64_t group = 0; group < groups_; ++group) {
      const Floats scale = broadcast(scales_of(own, output - begin)[group * scale_group_step_]);
      int64_t c = 0;
      for (; c + kUnit <= p_.group; c += kUnit, weight += Format::kBytes, to += kUnit) {
        __builtin_prefetch(weight + kPrefetchBytes);
        store_floats(weight, scale, to);
      }
      if (c < p_.group) {
        int8_t last[Format::kBytes] = {};
        copy_last(weight, last);
        store_floats(last, scale, to);
        weight += last_bytes_;
        to += kUnit;
      }
    }
  }

  static HFLA_INLINE void store_floats(const int8_t* weight, Floats scale, float* to) {
    const typename Format::Unit unit = Format::load(weight);
    HFLA_UNROLL
    for (int i = 0; i < kVectors; ++i) store(to + i * W, Format::floats(unit, i) * scale);
  }

  template <int outputs, int rows>
  void add_up_floats_of(const Own& own, int64_t row, int64_t output) const {
    const float* const x = shared_.x + row * x_stride_;
    Floats sums[outputs][rows] = {};
    for (int64_t c = 0; c < groups_ * padded_group_; c += W) {
      HFLA_UNROLL
      for (int o = 0; o < outputs; ++o) {
        const Floats weight = load(own.floats + o * x_stride_ + c);
        HFLA_UNROLL
        for (int r = 0; r < rows; ++r) sums[o][r] += weight * load(x + r * x_stride_ + c);
      }
    }
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) {
      HFLA_UNROLL
      for (int r = 0; r < rows; ++r) {
        own.sums[(row + r) * sums_stride_ + output + o] += sum<float>(sums[o][r]);
      }
    }
  }

  // ---- y ----

  void finish(const Own& own, int64_t begin, int64_t end) const {
    with_dtype_but_double(p_.dtype,
                          [&](auto scalar) { finish_of<decltype(scalar)>(own, begin, end); });
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
  const Threads& threads_;
  const int8_t* const weight_;
  const int64_t row_bytes_, groups_, last_bytes_, padded_group_, x_stride_, units_, task_outputs_,
      sums_stride_, totals_stride_;
  const bool are_outputs_together_;
  const int64_t scale_out_step_, scale_group_step_;
  const bool has_offsets_;
  Shared shared_{};
};

}  // namespace

Status quantized_linear(const QuantizedLinearProblem& problem, const Threads& threads) {
  return problem.bits == 8 ? QuantizedLinear<EightBits>(problem, threads).run()
                           : QuantizedLinear<FourBits>(problem, threads).run();
}

}  // namespace hfla::HFLA_ISA
