// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for few rows of x, as when tokens are generated one by one.
//
// With a few rows the time goes by in reading W. One walk through memory does not ask for as much
// of it at once as a core may, so a worker walks through several stretches of consecutive outputs
// side by side. With more rows the multiply-adds take longer than the reading. Then the weights of
// the outputs that are side by side stay in the first-level cache, as floats, while all rows of x
// stream past them, a few at a time, and what comes next of W is asked for meanwhile. In between,
// where all rows are one tile, W streams past x, which stays in that cache.
//
// With AVX512-BF16 numbers of bfloat16 are multiplied as they are, two by two, and nothing is made
// a float. What it computes with counts as 0 where it is smaller than the smallest normal number,
// 2^-126. dispatch.cpp says where that is the faster way.
//
// A sum's order depends on the inner dimension only: not on the other rows, the output's place, nor
// the threads. interleaved_rows.h, which takes rows that fill vectors, has another one.

#include "cpu/common/memory.h"
#include "cpu/common/registers.h"
#include "cpu/common/sums_of_lanes.h"
#include "cpu/common/tasks.h"
#include "cpu/common/vec.h"
#include "cpu/dense/interleaved_rows.h"
#include "cpu/dense/kernels.h"
#include "cpu/dense/outputs.h"
#include "cpu/processor.h"

namespace hfla::HFLA_ISA {
namespace {

// A tile of y: as many sums as registers hold beside the rows of x and a vector of W.
constexpr int kTileRows = kHasManyRegisters ? 4 : 2;
constexpr int kTileOutputs = 6;

// So many rows are one tile, too, with fewer outputs, where there are registers for it. With five
// to seven, two passes take no longer.
constexpr int kTallRows = kHasManyRegisters ? 8 : 0;
constexpr int kTallOutputs = 3;

// How far ahead W is asked for where it is read once: for the first-level cache. AMD's processors
// are asked twice: far ahead for the second-level cache; and soon before it is needed for the
// first, where it takes no place from x, since it is said not to be needed again. Intel's would
// read at less than half the speed then (Granite Rapids).
//
// With one row processors see by themselves what they need, but for Intel's with fewer bytes than
// floats have; and asking takes longer than reading where W lies in a cache.
constexpr int64_t kBytesAhead = 2048;
constexpr int64_t kAmdsFarBytes = 4096, kAmdsNearBytes = 512;

// Of a row of W: a tile's weights stay in the first-level cache. What is not much longer is not
// divided, for walks through memory then go on without a break.
constexpr int64_t kBlockBytes = 2048;
constexpr int64_t kMaxUndividedBytes = 4096;

// Fewer passes over a tile's weights convert them each time.
constexpr int64_t kMinPassesToCopy = 3;

// What numbers of a dtype are multiplied as: floats. Two vectors are made at a time, between which
// numbers are divided in whichever way takes the fewest instructions: those of W and of x alike.
template <class Scalar>
struct FactorsOf {
  using Element = AccOf<Scalar>;
  using Vector = Vec<Element>;
  static constexpr int kVectors = 2;

  template <int vector, class Number>
  static HFLA_INLINE Vector load_vector(const Number* from) {
    return load(from + vector * kLanes<Element>);
  }
  template <int vector>
  static HFLA_INLINE Vector load_vector(const BFloat16* from) {
    const auto bits = (UIntVec<float>)load_lanes<uint16_t, 2 * kLanes<float>>(&from->bits);
    return (Vector)(vector == 0 ? bits << 16 : bits & 0xffff0000);
  }

  static HFLA_INLINE void store_vector(Element* to, Vector x) { store(to, x); }

  static HFLA_INLINE Vector multiply_add(Vector a, Vector b, Vector sum) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
// Themselves: each lane of a sum gets the products of two neighbours.
template <>
struct FactorsOf<BFloat16> {
  using Element = BFloat16;
  using Vector = VectorOf<uint16_t, 2 * kLanes<float>>::type;
  static constexpr int kVectors = 1;

  template <int>
  static HFLA_INLINE Vector load_vector(const BFloat16* from) {
    return load_lanes<uint16_t>(&from->bits);
  }

  static HFLA_INLINE void store_vector(BFloat16* to, Vector x) { store_lanes(&to->bits, x); }

  static HFLA_INLINE Vec<float> multiply_add(Vector a, Vector b, Vec<float> sum) {
    return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#endif

template <class Scalar>
class Linear {
  using Acc = AccOf<Scalar>;
  using Factors = FactorsOf<Scalar>;
  using Factor = typename Factors::Element;
  static constexpr int64_t W = kLanes<Acc>, kPair = 2 * W;
  static constexpr int64_t kNumberBytes = sizeof(Scalar), kFactorBytes = sizeof(Factor);
  static constexpr int64_t kLine = kCacheLine / kNumberBytes;
  static constexpr int64_t kFactors = kPair / Factors::kVectors;  // in a vector
  static constexpr bool kIsConverted = sizeof(Scalar) != sizeof(Factor);

  // Weights of outputs that are computed together, from one place of the inner dimension on.
  template <class Element>
  struct Weights {
    const Element* data;
    int64_t stride;
  };

  // A part [begin, end) of the inner dimension for a tile of y.
  struct Part {
    int64_t begin, end;
    Acc* sums;            // (rows, task_outputs)
    int64_t sums_stride;  // from one output of the tile to the next
    Acc* unfinished;      // vectors of sums (tile outputs, tile rows), between blocks
  };

  // Of W, which is asked for while a tile is computed.
  struct Ahead {
    const Scalar* data;
    int64_t stride;
    int64_t count;  // of stretches
  };

 public:
  Linear(const LinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        weight_(static_cast<const Scalar*>(p.weight)),
        // Not a power of two, which would put all rows into the same few lines of the cache.
        x_stride_(round_up(p.in, kPair) + kCacheLine / kFactorBytes),
        passes_(is_tall() ? 1 : ceil_div(p.rows, kTileRows)),
        block_(passes_ == 1 || p.in * kFactorBytes <= kMaxUndividedBytes
                   ? round_up(p.in, kPair)
                   : kBlockBytes / kFactorBytes),
        task_outputs_(task_outputs(p, threads, p.in * kNumberBytes, kTileOutputs, kTileOutputs)),
        asks_twice_(is_amds() && p.rows > 1),
        asks_soon_(passes_ == 1 && (p.rows > 1 || one_row_asks())),
        soon_(numbers_in(asks_twice_ ? kAmdsNearBytes : kBytesAhead)) {}

  Status run() { return run_by_tasks(*this, p_, threads_, task_outputs_); }

  void carve_shared(Carver& carver) { x_ = carver.take<Factor>(p_.rows * x_stride_); }

  // A worker's own memory.
  struct Own {
    Acc* sums;        // (rows, task_outputs); the last row is read in whole vectors, too
    Acc* unfinished;  // vectors of sums (rows of all passes, tile outputs), between blocks
    Factor* copy;     // (tile outputs, block): weights
  };

  Own carve_own(Carver& carver) const {
    Acc* const sums = carver.take<Acc>(p_.rows * task_outputs_ + W - 1);
    Acc* const unfinished = carver.take<Acc>(passes_ * kTileRows * kTileOutputs * W);
    return {sums, unfinished, carver.take<Factor>(kTileOutputs * block_)};
  }

  void stage_x() const {
    const Scalar* from = static_cast<const Scalar*>(p_.x);
    Factor* to = x_;
    for (int64_t row = 0; row < p_.rows; ++row, from += p_.in, to += x_stride_) {
      for (int64_t c = 0; c < p_.in; c += kPair) stage_vectors<0>(from + c, p_.in - c, to + c);
    }
  }

  // The outputs [begin, end) of all rows.
  void compute(const Own& own, int64_t begin, int64_t end) const {
    add_up_all(begin, end, own);
    for (int64_t row = 0; row < p_.rows; ++row) {
      finish(own.sums + row * task_outputs_, row, begin, end);
    }
  }

 private:
  static constexpr int64_t numbers_in(int64_t bytes) { return bytes / kNumberBytes; }

  bool one_row_asks() const {
    const int64_t bytes = p_.in * p_.out * kNumberBytes;
    return sizeof(Scalar) < sizeof(float) && bytes >= kOutOfCacheBytes && !is_amds();
  }

  bool is_tall() const { return kTallRows > 0 && p_.rows == kTallRows; }

  template <int vector>
  static HFLA_INLINE void stage_vectors(const Scalar* from, int64_t count, Factor* to) {
    Factors::store_vector(to + vector * kFactors, load_factors<vector>(from, count));
    if constexpr (vector + 1 < Factors::kVectors) stage_vectors<vector + 1>(from, count, to);
  }

  // One of the vectors that are made at a time, zeros where there are only `count` numbers.
  template <int vector, class Number>
  static HFLA_INLINE typename Factors::Vector load_factors(const Number* from, int64_t count) {
    if (count >= kPair) return Factors::template load_vector<vector>(from);
    Number numbers[kPair] = {};
    for (int64_t i = 0; i < count; ++i) numbers[i] = from[i];
    return Factors::template load_vector<vector>(numbers);
  }

  void add_up_all(int64_t begin, int64_t end, const Own& own) const {
    if constexpr (kTallRows > 0) {
      if (is_tall()) return add_up_outputs<kTallOutputs, kTallRows>(begin, end, own);
    }
    add_up_outputs<kTileOutputs, kTileRows>(begin, end, own);
  }

  // Stretches side by side, and what is left, in tiles of at most so many outputs and rows.
  template <int outputs, int tile_rows>
  void add_up_outputs(int64_t begin, int64_t end, const Own& own) const {
    const Scalar* const weight = weight_ + begin * p_.in;
    const int64_t stretch = (end - begin) / outputs;
    for (int64_t i = 0; i < stretch; ++i) {
      const Weights<Scalar> side_by_side{weight + i * p_.in, stretch * p_.in};
      add_up<outputs, tile_rows>(side_by_side, x_, own.sums + i, stretch, own);
    }
    for (int64_t i = stretch * outputs; i < end - begin; ++i) {
      add_up<1, tile_rows>({weight + i * p_.in, 0}, x_, own.sums + i, 0, own);
    }
  }

  // `outputs` outputs of all rows, whose sums are `sums_stride` apart.
  template <int outputs, int tile_rows>
  void add_up(Weights<Scalar> w, const Factor* x, Acc* sums, int64_t sums_stride,
              const Own& own) const {
    if (passes_ != 1) return add_up_in_passes<outputs>(w, x, sums, sums_stride, own);
    const Part whole{0, p_.in, sums, sums_stride, nullptr};
    const Ahead ahead{w.data + numbers_in(kAmdsFarBytes), w.stride, asks_twice_ ? outputs : 0};
    if constexpr (tile_rows == kTallRows) {
      add_up_tile<outputs, kTallRows, false>(w, own.copy, x, whole, ahead);
    } else {
      add_up_rows<outputs>(w, own.copy, x, p_.rows, whole, ahead);
    }
  }

  // The same where W is not read once.
  template <int outputs>
  void add_up_in_passes(Weights<Scalar> w, const Factor* x, Acc* sums, int64_t sums_stride,
                        const Own& own) const {
    Part part{0, 0, nullptr, sums_stride, nullptr};
    do {
      part.begin = part.end;
      part.end = min(p_.in, part.begin + block_);
      const int64_t length = part.end - part.begin;
      for (int64_t pass = 0; pass < passes_; ++pass) {
        const int64_t row = pass * kTileRows;
        const Factor* const rows = x + row * x_stride_ + part.begin;
        part.sums = sums + row * task_outputs_;
        part.unfinished = own.unfinished + row * kTileOutputs * W;
        // Behind these weights are the next, both in a row and from row to row.
        const Ahead ahead{w.data + pass * w.stride + length, passes_ * w.stride,
                          ceil_div(outputs - pass, passes_)};
        if (!kIsConverted || passes_ < kMinPassesToCopy) {
          add_up_rows<outputs>(w, own.copy, rows, p_.rows - row, part, ahead);
        } else if (pass == 0) {  // of several, so it has all rows of a tile
          add_up_tile<outputs, kTileRows, true>(w, own.copy, rows, part, ahead);
        } else {
          const Weights<Factor> copied{own.copy, block_};
          add_up_rows<outputs>(copied, own.copy, rows, p_.rows - row, part, ahead);
        }
      }
      w.data += length;
    } while (part.end < p_.in);
  }

  // A tile has fewer rows where no more are left.
  template <int outputs, int rows = kTileRows, class Element>
  void add_up_rows(Weights<Element> w, Factor* copy, const Factor* x, int64_t rows_left,
                   const Part& part, const Ahead& ahead) const {
    if constexpr (rows > 1) {
      if (rows_left < rows) {
        return add_up_rows<outputs, rows - 1>(w, copy, x, rows_left, part, ahead);
      }
    }
    add_up_tile<outputs, rows, false>(w, copy, x, part, ahead);
  }

  template <int outputs, int rows, bool copies, class Element>
  HFLA_NOINLINE void add_up_tile(Weights<Element> w, Factor* copy, const Factor* x,
                                 const Part& part, const Ahead& ahead) const {
    Vec<Acc> sum_of[outputs][rows] = {};
    const auto for_tile = [&](auto body) HFLA_INLINE_LAMBDA {
      HFLA_UNROLL
      for (int o = 0; o < outputs; ++o) {
        HFLA_UNROLL
        for (int r = 0; r < rows; ++r) body(o, r, part.unfinished + (o * rows + r) * W);
      }
    };
    if (part.begin > 0) {
      for_tile([&](int o, int r, const Acc* at) HFLA_INLINE_LAMBDA { sum_of[o][r] = load(at); });
    }
    const int64_t length = part.end - part.begin;
    const int64_t soon_count = asks_soon_ ? outputs : 0;
    int64_t c = 0;
    for (; c + kPair <= length; c += kPair) {
      for (int64_t i = 0; i < ahead.count; ++i) {
        HFLA_UNROLL
        for (int64_t line = 0; line < kPair; line += kLine) {
          ask_for(ahead.data + i * ahead.stride + c + line);
        }
      }
      for (int64_t i = 0; i < soon_count; ++i) {
        HFLA_UNROLL
        for (int64_t line = 0; line < kPair; line += kLine) {
          const auto* const soon = w.data + i * w.stride + c + line + soon_;
          asks_twice_ ? ask_for_once(soon) : ask_for_soon(soon);
        }
      }
      multiply_add<0, outputs, rows, copies>(w, copy, x, c, kPair, sum_of);
    }
    if (c < length) {
      // Copied weights have their zeros.
      const int64_t count = sizeof(Element) == sizeof(Scalar) ? length - c : kPair;
      multiply_add<0, outputs, rows, copies>(w, copy, x, c, count, sum_of);
    }
    if (part.end < p_.in) {
      for_tile([&](int o, int r, Acc* at) HFLA_INLINE_LAMBDA { store(at, sum_of[o][r]); });
    } else {
      for_sums_of_lanes<Acc>(sum_of, [&](int o, int r, Acc sum) HFLA_INLINE_LAMBDA {
        part.sums[r * task_outputs_ + o * part.sums_stride] = sum;
      });
    }
  }

  // A vector of each output's weights, of which only `count` are in the row, and the next one where
  // two are made at a time.
  template <int vector, int outputs, int rows, bool copies, class Element>
  HFLA_INLINE void multiply_add(Weights<Element> w, Factor* copy, const Factor* x, int64_t c,
                                int64_t count, Vec<Acc> (&sum_of)[outputs][rows]) const {
    constexpr int64_t first = vector * kFactors;
    const auto load_x = [&](int r) HFLA_INLINE_LAMBDA {
      return Factors::template load_vector<vector>(x + r * x_stride_ + c);
    };
    const auto load_weight = [&](int o) HFLA_INLINE_LAMBDA {
      auto weight = load_factors<vector>(w.data + o * w.stride + c, count);
      if constexpr (rows > 1) keep_in_register(weight);
      if constexpr (copies) Factors::store_vector(copy + o * block_ + c + first, weight);
      return weight;
    };
    // Of which there are fewer stay in registers.
    if constexpr (rows > outputs) {
      typename Factors::Vector weight_of[outputs];
      HFLA_UNROLL
      for (int o = 0; o < outputs; ++o) weight_of[o] = load_weight(o);
      HFLA_UNROLL
      for (int r = 0; r < rows; ++r) {
        const auto x_of_row = load_x(r);
        HFLA_UNROLL
        for (int o = 0; o < outputs; ++o) {
          sum_of[o][r] = Factors::multiply_add(weight_of[o], x_of_row, sum_of[o][r]);
        }
      }
    } else {
      typename Factors::Vector x_of[rows];
      HFLA_UNROLL
      for (int r = 0; r < rows; ++r) x_of[r] = load_x(r);
      HFLA_UNROLL
      for (int o = 0; o < outputs; ++o) {
        const auto weight = load_weight(o);
        HFLA_UNROLL
        for (int r = 0; r < rows; ++r) {
          sum_of[o][r] = Factors::multiply_add(weight, x_of[r], sum_of[o][r]);
        }
      }
    }
    if constexpr (vector + 1 < Factors::kVectors) {
      multiply_add<vector + 1, outputs, rows, copies>(w, copy, x, c, count, sum_of);
    }
  }

  void finish(const Acc* sums, int64_t row, int64_t begin, int64_t end) const {
    const Scalar* const bias = static_cast<const Scalar*>(p_.bias);
    Scalar* const y = static_cast<Scalar*>(p_.y) + row * p_.y_stride;
    for_each_vector<Acc>(begin, end, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      Vec<Acc> result = load(sums + c - begin);
      if (bias) result += load_vector(bias, 1, c, count);
      store_vector(y, 1, c, count, result);
    });
  }

  const LinearProblem& p_;
  const Threads& threads_;
  const Scalar* const weight_;
  const int64_t x_stride_, passes_, block_, task_outputs_;
  const bool asks_twice_, asks_soon_;
  const int64_t soon_;   // numbers ahead
  Factor* x_ = nullptr;  // (rows, x_stride)
};

}  // namespace

Status linear(const LinearProblem& problem, const Threads& threads) {
  return with_dtype(problem.dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    if constexpr (sizeof(typename FactorsOf<Scalar>::Element) == sizeof(float)) {
      if (InterleavedRows<Scalar>::takes(problem.rows)) {
        return InterleavedRows<Scalar>(problem, threads).run();
      }
    }
    return Linear<Scalar>(problem, threads).run();
  });
}

}  // namespace hfla::HFLA_ISA
