// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for few rows of x, rounded to 16 bits, and a W of 4 bits with scales for groups
// of inputs.
//
// A tile is W outputs, next to each other in memory, for up to kTileRows rows of x. Their sums of
// integers lie in the lanes of one vector, so that scales and zero points are one multiplication
// each for all of them, and are read as they lie. What a row gets does not depend on which rows it
// is computed with.
//
// A worker takes tiles from kStretches stretches of W in turn, and asks for those of the next turn:
// rows of a tile are too short for the processor to see where they lead. Tiles of several stretches
// side by side, as in linear_isa.cpp, take longer here.
//
// One row of x is multiplied by a pair of tiles, along their outputs (nibble_rows.h), where there
// are instructions that make that faster. Sums are the same to the last bit.

#include "cpu/common/memory.h"
#include "cpu/common/tasks.h"
#include "cpu/common/vec.h"
#include "cpu/dense/kernels.h"
#include "cpu/dense/nibble_rows.h"
#include "cpu/dense/quantized_groups.h"
#include "cpu/dense/quantized_inputs.h"
#include "cpu/dense/quantized_nibbles.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kTaskBytes = 131072;  // of W
// By measurements on Intel's Granite Rapids, and for AVX2 on AMD's Zen 3.
constexpr int64_t kStretches = kVectorBytes == 64 ? 2 : 1;
constexpr int64_t kTurnsAhead = kStretches == 1 ? 2 : 1;  // what is asked for
constexpr int kTileRows = kVectorBytes == 64 ? 8 : 4;     // as many as registers have sums for
constexpr int64_t kUnitBytes = kUnit / 2;
constexpr int64_t kUnitVectors = kUnit * static_cast<int64_t>(sizeof(int16_t)) / kVectorBytes;
constexpr int kPair = 2;                   // tiles whose scales are in one line of the cache
constexpr int64_t kPairBytesAhead = 8192;  // of W, up to whole tiles

class RoundedInt4 {
 public:
  RoundedInt4(const QuantizedLinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        inputs_(p),
        row_bytes_(p.in / 2),
        last_bytes_(p.group % kUnit / 2),
        walks_along_(kWalksAlongRows && p.rows == 1 && p.in > 0 && p.group % kUnit == 0),
        pair_bytes_ahead_(round_up(kPairBytesAhead, max(1, W * row_bytes_))),
        padded_units_(round_up(p.in / kUnit, kChunkUnits)),
        task_outputs_(task_outputs()) {}

  Status run() { return run_by_tasks(*this, p_, threads_, task_outputs_); }

  void carve_shared(Carver& carver) {
    inputs_.carve(carver);
    totals_ = carver.take<float>(p_.rows * inputs_.groups());
    if (walks_along_) chunks_ = carver.take<Ints>(padded_units_ * kUnitVectors);
  }

  // A worker's own, for outputs that are fewer than a tile has, and numbers that lie otherwise.
  struct Own {
    int8_t* weight;         // (W, row_bytes)
    float *scales, *zeros;  // (groups, W)
    int32_t* unit_sums;     // (kPair, units, W), where it walks along outputs
  };

  Own carve_own(Carver& carver) const {
    int8_t* const weight = carver.take<int8_t>(W * row_bytes_);
    float* const scales = carver.take<float>(inputs_.groups() * W);
    float* const zeros = carver.take<float>(inputs_.groups() * W);
    const int64_t sums = walks_along_ ? kPair * padded_units_ * W : 0;
    return {weight, scales, zeros, carver.take<int32_t>(sums)};
  }

  void stage_x() const {
    __builtin_memset(totals_, 0, sizeof(float) * static_cast<size_t>(p_.rows * inputs_.groups()));
    inputs_.stage(totals_, inputs_.groups());
    if (walks_along_) store_chunks(inputs_.row(0).inputs, p_.in / kUnit, chunks_);
  }

  // The outputs [begin, end) of all rows.
  void compute(const Own& own, int64_t begin, int64_t end) const {
    if constexpr (kWalksAlongRows) {
      if (walks_along_ && are_numbers_together()) {
        for (; begin + kPair * W <= end; begin += kPair * W) compute_pair(own, begin);
      }
    }
    const int8_t* const weight = weight_of(begin);
    const int64_t stretch = (end - begin) / (kStretches * W) * W;
    int64_t output = 0;
    for (; output < stretch; output += W) {
      for (int64_t i = 0; i < kStretches; ++i) {
        // Behind the last tiles of all stretches is the next task.
        const int64_t next = output + kTurnsAhead * W;
        const int8_t* ahead = weight + (next < stretch ? next : kStretches * next) * row_bytes_;
        ahead += i * (W * row_bytes_ / kStretches);
        compute_whole(own, begin + i * stretch + output, {ahead, stretch * row_bytes_});
      }
    }
    for (output = begin + kStretches * stretch; output + W <= end; output += W) {
      compute_whole(own, output, {weight_of(output), 0});
    }
    if (output < end) compute_part(own, output, end - output);
  }

 private:
  // Long tasks, but enough of them for all threads.
  int64_t task_outputs() const {
    const int64_t share = p_.out / (4 * max(1, threads_.count));
    return round_up(max(1, min(kTaskBytes / max(1, row_bytes_), share)),
                    walks_along_ ? kPair * W : W);
  }

  const int8_t* weight_of(int64_t output) const {
    return static_cast<const int8_t*>(p_.weight) + output * row_bytes_;
  }

  // What is asked for while a tile is computed: a share of as many bytes as the tile has, of each
  // stretch.
  struct Ahead {
    const int8_t* data;
    int64_t stretch;  // bytes
  };

  template <class Number>
  struct Tile {
    int64_t first, count;
    const int8_t* weight;
    Ahead ahead;
    const Number *scales, *zeros;       // zeros: optional
    int64_t scale_stride, zero_stride;  // from a group to the next
  };

  // Whether those of W outputs are vectors, of one type.
  bool are_numbers_together() const {
    const bool has_zeros = p_.zero.data != nullptr;
    return p_.scale.out_stride == 1 &&
           (!has_zeros || (p_.zero.out_stride == 1 && p_.zero.type == p_.scale.type));
  }

  void compute_whole(const Own& own, int64_t first, const Ahead& ahead) const {
    if (!are_numbers_together()) return compute_staged(own, first, W, weight_of(first), ahead);
    with_numbers(p_.scale, [&](const auto* scales) {
      if (sizeof(*scales) == sizeof(float) || p_.rows == 1) {
        return compute_as_it_lies(first, ahead, scales + first);
      }
      const auto* zeros = static_cast<decltype(scales)>(p_.zero.data);
      const Tile<float> tile{
          first, W, weight_of(first), ahead, own.scales, zeros ? own.zeros : nullptr, W, W};
      stage_together(scales + first, p_.scale.group_stride, own.scales);
      if (zeros) stage_together(zeros + first, p_.zero.group_stride, own.zeros);
      compute_tile(tile);
    });
  }

  // Zero points are of the scales' type.
  template <class Number>
  void compute_as_it_lies(int64_t first, const Ahead& ahead, const Number* scales) const {
    const Number* zeros = static_cast<const Number*>(p_.zero.data);
    if (zeros) zeros += first;
    compute_tile<Number>({first, W, weight_of(first), ahead, scales, zeros, p_.scale.group_stride,
                          p_.zero.group_stride});
  }

  void compute_part(const Own& own, int64_t first, int64_t count) const {
    if (row_bytes_ > 0) {  // else there is no weight at all
      __builtin_memset(own.weight, 0, static_cast<size_t>(W * row_bytes_));
      __builtin_memcpy(own.weight, weight_of(first), static_cast<size_t>(count * row_bytes_));
    }
    compute_staged(own, first, count, own.weight, {own.weight, 0});
  }

  void compute_staged(const Own& own, int64_t first, int64_t count, const int8_t* weight,
                      const Ahead& ahead) const {
    stage_numbers(p_.scale, first, count, own.scales);
    stage_numbers(p_.zero, first, count, own.zeros);
    compute_tile<float>({first, count, weight, ahead, own.scales, own.zeros, W, W});
  }

  void stage_numbers(const GroupNumbers& numbers, int64_t first, int64_t count, float* to) const {
    const int64_t strides[] = {numbers.group_stride, numbers.out_stride};
    store_numbers(numbers, first * numbers.out_stride, strides, inputs_.groups(), count, to, W);
  }

  // As floats, which kernels of several rows are compiled for alone. With stage_numbers(), which
  // takes any order and asks for nothing ahead, products of 8 rows took 9 % longer.
  template <class Number>
  void stage_together(const Number* from, int64_t stride, float* to) const {
    for (int64_t group = 0; group < inputs_.groups(); ++group, from += stride) {
      ask_for(reinterpret_cast<const char*>(from) + kCacheLine);
      store(to + group * W, load_together(from));
    }
  }

  template <class Number>
  void compute_tile(const Tile<Number>& tile) const {
    const auto compute_rows = [&](auto rows, int64_t row) {
      if (p_.group == kUnit)
        add_up<rows.value, true>(tile, row);
      else
        add_up<rows.value, false>(tile, row);
    };
    int64_t row = 0;
    const auto compute_by = [&](auto rows) {
      for (; row + rows.value <= p_.rows; row += rows.value) compute_rows(rows, row);
    };
    if constexpr (sizeof(Number) == sizeof(float)) {  // of other types only one row is computed
      if constexpr (kTileRows == 8) compute_by(Constant<8>{});
      compute_by(Constant<4>{});
      compute_by(Constant<2>{});
    }
    compute_by(Constant<1>{});
  }

  // W numbers. GCC makes four instructions of the generic form.
  template <class Number>
  static HFLA_INLINE Floats load_together(const Number* from) {
    return load_number_vector(from, 1, W);
  }
#if defined(__AVX2__) && !defined(__AVX512F__)
  static HFLA_INLINE Floats load_together(const BFloat16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
  }
#endif

  template <int rows, bool is_unit, class Number>
  HFLA_NOINLINE void add_up(const Tile<Number>& tile, int64_t row) const {
    const int8_t* weight = tile.weight;
    const int8_t* ahead = tile.ahead.data;
    const int64_t row_bytes = row_bytes_, x_stride = inputs_.stride(), blocks = inputs_.blocks();
    const int64_t groups = inputs_.groups();
    auto inputs = inputs_.row(row);
    const float* totals = totals_ + row * groups;
    const Number *scales = tile.scales, *zeros = tile.zeros;
    Floats sums[rows] = {};
    for (int64_t group = 0; group < groups; ++group) {
      const Floats scale = load_together(scales);
      ask_for(reinterpret_cast<const char*>(scales) + kCacheLine);
      scales += tile.scale_stride;
      if (zeros) {
        const Floats zero = load_together(zeros);
        ask_for(reinterpret_cast<const char*>(zeros) + kCacheLine);
        zeros += tile.zero_stride;
        HFLA_UNROLL
        for (int r = 0; r < rows; ++r) sums[r] += zero * broadcast(totals[r * groups + group]);
      }
      int64_t in_group = is_unit ? kUnit : p_.group;
      do {
        NibbleSums integers[rows];
        int64_t left = is_unit ? kUnit : min(kBlock, in_group);
        in_group -= left;
        for (; left >= kUnit; left -= kUnit) {
          HFLA_UNROLL
          for (int64_t b = 0; b < W * kUnitBytes / kStretches; b += kCacheLine) {
            HFLA_UNROLL
            for (int64_t i = 0; i < kStretches; ++i) {
              ask_for(ahead + i * tile.ahead.stretch + b);
            }
          }
          ahead += W * kUnitBytes / kStretches;
          multiply_add<rows>(weight, row_bytes, inputs.inputs, x_stride, integers);
          weight += kUnitBytes;
          inputs.inputs += kUnit;
        }
        if (!is_unit && left > 0) {
          int8_t last[W * kUnitBytes] = {};
          for (int o = 0; o < W; ++o) {
            for (int64_t i = 0; i < last_bytes_; ++i)
              last[o * kUnitBytes + i] = weight[o * row_bytes + i];
          }
          multiply_add<rows>(last, kUnitBytes, inputs.inputs, x_stride, integers);
          weight += last_bytes_;
          inputs.inputs += kUnit;
        }
        HFLA_UNROLL
        for (int r = 0; r < rows; ++r) {
          const Ints total = integers[r].total() + inputs.lifts[r * blocks];
          sums[r] +=
              scale * broadcast(inputs.steps[r * blocks]) * __builtin_convertvector(total, Floats);
        }
        ++inputs.steps;
        ++inputs.lifts;
      } while (!is_unit && in_group > 0);
    }
    HFLA_UNROLL
    for (int r = 0; r < rows; ++r) finish(tile.first, tile.count, row + r, sums[r]);
  }

  template <int rows>
  static HFLA_INLINE void multiply_add(const int8_t* weight, int64_t row_bytes, const int16_t* x,
                                       int64_t x_stride, NibbleSums (&integers)[rows]) {
    Words words[kUnitWords];
    load_words(weight, row_bytes, words);
    HFLA_UNROLL
    for (int word = 0; word < kUnitWords; ++word) {
      HFLA_UNROLL
      for (int part = 0; part < Nibbles::kParts; ++part) {
        const Shorts values = nibbles_of(words[word], part);
        HFLA_UNROLL
        for (int r = 0; r < rows; ++r) integers[r].add(values, x + r * x_stride, part, word);
      }
    }
  }

  void compute_pair(const Own& own, int64_t first) const {
    const GroupNumbers* const numbers[] = {&p_.scale, &p_.zero};
    static_assert(kPair == 2);
    for (int tile = 0; tile < kPair; ++tile) {
      sum_units(weight_of(first + tile * W), row_bytes_, chunks_, p_.in / kUnit, pair_bytes_ahead_,
                next_lines(*numbers[tile], first), own.unit_sums + tile * padded_units_ * W);
    }
    with_numbers(p_.scale, [&](const auto* scales) { scale_pair(own, first, scales + first); });
  }

  // Where the numbers of the next pair are, one line for each group: all of them in half precision,
  // half of them in float32.
  Lines next_lines(const GroupNumbers& numbers, int64_t first) const {
    if (numbers.data == nullptr) return {};
    const int64_t size = numbers.type == NumberType::f32 ? 4 : 2, next = first + kPair * W;
    return {static_cast<const char*>(numbers.data) + next * size, numbers.group_stride * size,
            inputs_.groups()};
  }

  // As add_up() does it, in the same order.
  template <class Number>
  HFLA_NOINLINE void scale_pair(const Own& own, int64_t first, const Number* scales) const {
    const Number* zeros = static_cast<const Number*>(p_.zero.data);
    if (zeros) zeros += first;
    const float *totals = totals_, *steps = inputs_.row(0).steps;
    const int32_t *lifts = inputs_.row(0).lifts, *units = own.unit_sums;
    Floats sums[kPair] = {};
    for (int64_t group = 0; group < inputs_.groups(); ++group) {
      Floats scale[kPair];
      HFLA_UNROLL
      for (int t = 0; t < kPair; ++t) scale[t] = load_together(scales + t * W);
      scales += p_.scale.group_stride;
      if (zeros) {
        HFLA_UNROLL
        for (int t = 0; t < kPair; ++t) {
          sums[t] += load_together(zeros + t * W) * broadcast(totals[group]);
        }
        zeros += p_.zero.group_stride;
      }
      for (int64_t c = 0; c < p_.group; c += kBlock, ++steps, ++lifts) {
        const int64_t count = min(kBlock, p_.group - c) / kUnit;
        HFLA_UNROLL
        for (int t = 0; t < kPair; ++t) {
          Ints total = *lifts - Ints{};
          for (int64_t i = 0; i < count; ++i) {
            total += load_lanes(units + (t * padded_units_ + i) * W);
          }
          sums[t] += scale[t] * broadcast(*steps) * __builtin_convertvector(total, Floats);
        }
        units += count * W;
      }
    }
    HFLA_UNROLL
    for (int t = 0; t < kPair; ++t) finish(first + t * W, W, 0, sums[t]);
  }

  HFLA_INLINE void finish(int64_t first, int64_t count, int64_t row, Floats sum) const {
    with_dtype_but_double(p_.dtype, [&](auto scalar) {
      using Scalar = decltype(scalar);
      if (p_.bias) sum += load_vector(static_cast<const Scalar*>(p_.bias), 1, first, count);
      store_vector(static_cast<Scalar*>(p_.y) + row * p_.out, 1, first, count, sum);
    });
  }

  const QuantizedLinearProblem& p_;
  const Threads& threads_;
  Inputs<Nibbles> inputs_;
  const int64_t row_bytes_, last_bytes_;
  const bool walks_along_;
  const int64_t pair_bytes_ahead_;
  const int64_t padded_units_;  // of a row, up to whole chunks
  const int64_t task_outputs_;
  float* totals_ = nullptr;  // (rows, groups)
  Ints* chunks_ = nullptr;   // (padded_units,), of one row where it walks along outputs
};

}  // namespace

Status rounded_int4(const QuantizedLinearProblem& problem, const Threads& threads) {
  return RoundedInt4(problem, threads).run();
}

}  // namespace hfla::HFLA_ISA
