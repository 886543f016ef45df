// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for few rows of x, as when tokens are generated one by one.
//
// With a few rows the time goes by in reading W. One walk through memory does not ask for as much
// of it at once as a core may, so a worker walks through several stretches of consecutive outputs
// side by side. With more rows the multiply-adds take longer than the reading. Then the weights of
// the outputs that are side by side stay in the first-level cache, as floats, while all rows of x
// stream past them, a few at a time, and what comes next of W is asked for meanwhile.
//
// A sum's order depends on the inner dimension only: not on the other rows, the output's place, nor
// the threads.

#include "cpu/common/memory.h"
#include "cpu/common/registers.h"
#include "cpu/common/tasks.h"
#include "cpu/common/vec.h"
#include "cpu/dense/kernels.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kStretchBytes = 32768;  // of W; in shorter ones reading does not get up to speed

// A tile of y: as many sums as registers hold beside the rows of x and a vector of W.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 4;
#else
constexpr int kTileRows = 2;
#endif
constexpr int kTileOutputs = 6;

// Of the inner dimension: a tile's weights stay in the first-level cache. What is not much longer
// is not divided, for walks through memory then go on without a break.
constexpr int64_t kBlock = 512;
constexpr int64_t kMaxUndivided = 1024;

// Fewer passes over a tile's weights convert them each time.
constexpr int64_t kMinPassesToCopy = 3;

// The first or the second half of two vectors' worth of elements, which are divided between the
// two in whichever way takes the fewest instructions: those of W and of x alike.
template <int half, class Scalar>
HFLA_INLINE Vec<AccOf<Scalar>> load_half(const Scalar* from) {
  return load(from + half * kLanes<AccOf<Scalar>>);
}
template <int half>
HFLA_INLINE Vec<float> load_half(const BFloat16* from) {
  const auto bits = (UIntVec<float>)load_lanes<uint16_t, 2 * kLanes<float>>(&from->bits);
  return (Vec<float>)(half == 0 ? bits << 16 : bits & 0xffff0000);
}

// The same where there are only `count` elements, and zeros for the others.
template <int half, class Scalar>
HFLA_INLINE Vec<AccOf<Scalar>> load_half(const Scalar* from, int64_t count) {
  constexpr int64_t all = 2 * kLanes<AccOf<Scalar>>;
  if (count >= all) return load_half<half>(from);
  Scalar elements[all] = {};
  for (int64_t i = 0; i < count; ++i) elements[i] = from[i];
  return load_half<half>(elements);
}

template <class Scalar>
class Linear {
  using Acc = AccOf<Scalar>;
  static constexpr int64_t W = kLanes<Acc>, kPair = 2 * W;
  static constexpr int64_t kLine = kCacheLine / static_cast<int64_t>(sizeof(Scalar));
  static constexpr bool kIsConverted = sizeof(Scalar) != sizeof(Acc);

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
        usable_threads_(p.in * p.out < kSerialWork ? 1 : max(1, threads.count)),
        // Not a power of two, which would put all rows into the same few lines of the cache.
        x_stride_(round_up(p.in, kPair) + kCacheLine / static_cast<int64_t>(sizeof(Acc))),
        passes_(ceil_div(p.rows, kTileRows)),
        block_(passes_ == 1 || p.in <= kMaxUndivided ? round_up(p.in, kPair) : kBlock),
        task_outputs_(task_outputs()) {}

  Status run() {
    const int64_t tasks = ceil_div(p_.out, task_outputs_);
    const int64_t workers = max(1, min(tasks, usable_threads_));
    const int64_t x_size = p_.rows * x_stride_;
    // The last row is read in whole vectors, too.
    const int64_t sums_size = round_up(p_.rows * task_outputs_ + W - 1, kPair);
    const int64_t unfinished_size = passes_ * kTileRows * kTileOutputs * W;
    const int64_t own_size = sums_size + unfinished_size + kTileOutputs * block_;
    const Buffer buffer((x_size + workers * own_size) * static_cast<int64_t>(sizeof(Acc)));
    if (!buffer.data()) return Status::out_of_memory;
    Acc* const x = reinterpret_cast<Acc*>(buffer.data());
    stage_x(x);
    run_tasks(threads_, workers, tasks, [&](int64_t worker, int64_t task) {
      Acc* const sums = x + x_size + worker * own_size;
      const int64_t begin = task * task_outputs_;
      compute(begin, min(p_.out, begin + task_outputs_), x, sums, sums + sums_size);
    });
    return Status::ok;
  }

 private:
  // Long stretches, but enough tasks for all threads.
  int64_t task_outputs() const {
    const int64_t row_bytes = max(1, p_.in * static_cast<int64_t>(sizeof(Scalar)));
    const int64_t outputs = kTileOutputs * ceil_div(kStretchBytes, row_bytes);
    return round_up(max(1, min(outputs, p_.out / (4 * usable_threads_))), kTileOutputs);
  }

  void stage_x(Acc* to) const {
    const Scalar* from = static_cast<const Scalar*>(p_.x);
    for (int64_t row = 0; row < p_.rows; ++row, from += p_.in, to += x_stride_) {
      for (int64_t c = 0; c < p_.in; c += kPair) {
        store(to + c, load_half<0>(from + c, p_.in - c));
        store(to + c + W, load_half<1>(from + c, p_.in - c));
      }
    }
  }

  // The outputs [begin, end) of all rows; sums (rows, task_outputs) and scratch are the worker's
  // own memory.
  void compute(int64_t begin, int64_t end, const Acc* x, Acc* sums, Acc* scratch) const {
    const Scalar* const weight = weight_ + begin * p_.in;
    const int64_t stretch = (end - begin) / kTileOutputs;
    for (int64_t i = 0; i < stretch; ++i) {
      add_up<kTileOutputs>({weight + i * p_.in, stretch * p_.in}, x, sums + i, stretch, scratch);
    }
    for (int64_t i = stretch * kTileOutputs; i < end - begin; ++i) {
      add_up<1>({weight + i * p_.in, 0}, x, sums + i, 0, scratch);
    }
    for (int64_t row = 0; row < p_.rows; ++row) finish(sums + row * task_outputs_, row, begin, end);
  }

  // `outputs` outputs of all rows, whose sums are `sums_stride` apart.
  template <int outputs>
  void add_up(Weights<Scalar> w, const Acc* x, Acc* sums, int64_t sums_stride, Acc* scratch) const {
    Acc* const copy = scratch + passes_ * kTileRows * kTileOutputs * W;
    Part part{0, 0, nullptr, sums_stride, nullptr};
    do {
      part.begin = part.end;
      part.end = min(p_.in, part.begin + block_);
      const int64_t length = part.end - part.begin;
      for (int64_t pass = 0; pass < passes_; ++pass) {
        const int64_t row = pass * kTileRows;
        const Acc* const rows = x + row * x_stride_ + part.begin;
        part.sums = sums + row * task_outputs_;
        part.unfinished = scratch + row * kTileOutputs * W;
        // Behind these weights are the next, both in a row and from row to row.
        const Ahead ahead{w.data + pass * w.stride + length, passes_ * w.stride,
                          passes_ == 1 ? 0 : ceil_div(outputs - pass, passes_)};
        if (!kIsConverted || passes_ < kMinPassesToCopy) {
          add_up_rows<outputs, false>(w, copy, rows, p_.rows - row, part, ahead);
        } else if (pass == 0) {
          add_up_rows<outputs, true>(w, copy, rows, p_.rows - row, part, ahead);
        } else {
          const Weights<Acc> copied{copy, block_};
          add_up_rows<outputs, false>(copied, copy, rows, p_.rows - row, part, ahead);
        }
      }
      w.data += length;
    } while (part.end < p_.in);
  }

  // A tile has fewer rows where no more are left.
  template <int outputs, bool copies, int rows = kTileRows, class Element>
  void add_up_rows(Weights<Element> w, Acc* copy, const Acc* x, int64_t rows_left, const Part& part,
                   const Ahead& ahead) const {
    if constexpr (rows > 1) {
      if (rows_left < rows) {
        return add_up_rows<outputs, copies, rows - 1>(w, copy, x, rows_left, part, ahead);
      }
    }
    add_up_tile<outputs, rows, copies>(w, copy, x, part, ahead);
  }

  template <int outputs, int rows, bool copies, class Element>
  HFLA_NOINLINE void add_up_tile(Weights<Element> w, Acc* copy, const Acc* x, const Part& part,
                                 const Ahead& ahead) const {
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
    int64_t c = 0;
    for (; c + kPair <= length; c += kPair) {
      for (int64_t i = 0; i < ahead.count; ++i) {
        HFLA_UNROLL
        for (int64_t line = 0; line < kPair; line += kLine) {
          __builtin_prefetch(ahead.data + i * ahead.stride + c + line, 0, 2);
        }
      }
      multiply_add<0, outputs, rows, copies>(w, copy, x, c, kPair, sum_of);
      multiply_add<1, outputs, rows, copies>(w, copy, x, c, kPair, sum_of);
    }
    if (c < length) {
      // Copied weights have their zeros.
      const int64_t count = sizeof(Element) == sizeof(Scalar) ? length - c : kPair;
      multiply_add<0, outputs, rows, copies>(w, copy, x, c, count, sum_of);
      multiply_add<1, outputs, rows, copies>(w, copy, x, c, count, sum_of);
    }
    if (part.end < p_.in) {
      for_tile([&](int o, int r, Acc* at) HFLA_INLINE_LAMBDA { store(at, sum_of[o][r]); });
    } else {
      for_tile([&](int o, int r, Acc*) HFLA_INLINE_LAMBDA {
        part.sums[r * task_outputs_ + o * part.sums_stride] = sum<Acc>(sum_of[o][r]);
      });
    }
  }

  // A vector of each output's weights, of whose two vectors only `count` elements are in the row.
  template <int half, int outputs, int rows, bool copies, class Element>
  HFLA_INLINE void multiply_add(Weights<Element> w, Acc* copy, const Acc* x, int64_t c,
                                int64_t count, Vec<Acc> (&sum_of)[outputs][rows]) const {
    Vec<Acc> x_of[rows];
    HFLA_UNROLL
    for (int r = 0; r < rows; ++r) x_of[r] = load(x + r * x_stride_ + c + half * W);
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) {
      Vec<Acc> weight = load_half<half>(w.data + o * w.stride + c, count);
      if constexpr (rows > 1) keep_in_register(weight);
      if constexpr (copies) store(copy + o * block_ + c + half * W, weight);
      HFLA_UNROLL
      for (int r = 0; r < rows; ++r) sum_of[o][r] += weight * x_of[r];
    }
  }

  void finish(const Acc* sums, int64_t row, int64_t begin, int64_t end) const {
    const Scalar* const bias = static_cast<const Scalar*>(p_.bias);
    Scalar* const y = static_cast<Scalar*>(p_.y) + row * p_.out;
    for_each_vector<Acc>(begin, end, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      Vec<Acc> result = load(sums + c - begin);
      if (bias) result += load_vector(bias, 1, c, count);
      store_vector(y, 1, c, count, result);
    });
  }

  const LinearProblem& p_;
  const Threads& threads_;
  const Scalar* const weight_;
  const int64_t usable_threads_, x_stride_, passes_, block_, task_outputs_;
};

}  // namespace

Status linear(const LinearProblem& problem, const Threads& threads) {
  return with_dtype(problem.dtype,
                    [&](auto scalar) { return Linear<decltype(scalar)>(problem, threads).run(); });
}

}  // namespace hfla::HFLA_ISA
