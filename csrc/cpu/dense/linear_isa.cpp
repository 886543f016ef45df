// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for few rows of x, as when tokens are generated one by one.
//
// With so few rows the time goes by in reading W, so a worker walks through consecutive outputs,
// which are one stretch of memory, and asks for what comes kPrefetchBytes later. Several rows of x
// share what is loaded of W; with many, the multiply-adds take longer than the reading, and several
// outputs share what is loaded of x.
//
// Each number of rows adds up in an order of its own, which the outputs' places and the threads do
// not change.

#include "cpu/common/memory.h"
#include "cpu/common/tasks.h"
#include "cpu/common/vec.h"
#include "cpu/dense/kernels.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kPrefetchBytes = 8192;
constexpr int64_t kTaskBytes = 65536;  // of W

// Rows of x that are read together, at most, and with more rows than that the outputs that are
// computed together: as many sums as registers hold.
constexpr int kMaxRows = 4;
constexpr int kOutputs = kVectorBytes == 64 ? 6 : 3;

// Sums that are under way at once, so that no multiply-add waits for the one before.
constexpr int kChains = 8;

template <class Scalar>
class Linear {
  using Acc = AccOf<Scalar>;
  static constexpr int64_t W = kLanes<Acc>;

 public:
  Linear(const LinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        weight_(static_cast<const Scalar*>(p.weight)),
        padded_rows_(p.rows / kMaxRows * kMaxRows + rows_together(p.rows % kMaxRows)),
        // Whole vectors, and not a power of two, which would put all rows into the same few lines
        // of the cache.
        x_stride_(round_up(p.in, W) + kCacheLine / static_cast<int64_t>(sizeof(Acc))),
        task_outputs_(round_up(
            max(1, kTaskBytes / max(1, p.in * static_cast<int64_t>(sizeof(Scalar)))), kOutputs)) {}

  Status run() {
    const int64_t tasks = ceil_div(p_.out, task_outputs_);
    const int64_t workers = p_.in * p_.out < kSerialWork ? 1 : min(tasks, max(1, threads_.count));
    const int64_t x_size = padded_rows_ * x_stride_;
    // The last row is read in whole vectors, too.
    const int64_t sums_size = round_up(padded_rows_ * task_outputs_ + W - 1, W);
    const Buffer buffer((x_size + workers * sums_size) * static_cast<int64_t>(sizeof(Acc)));
    if (!buffer.data()) return Status::out_of_memory;
    Acc* const x = reinterpret_cast<Acc*>(buffer.data());
    Acc* const sums = x + x_size;
    stage_x(x);
    run_tasks(threads_, workers, tasks, [&](int64_t worker, int64_t task) {
      const int64_t begin = task * task_outputs_;
      compute(x, begin, min(p_.out, begin + task_outputs_), sums + worker * sums_size);
    });
    return Status::ok;
  }

 private:
  // How many rows of x are read together where so many are left: a power of two.
  static constexpr int64_t rows_together(int64_t left) {
    if (left == 0) return 0;
    int64_t rows = kMaxRows;
    while (rows / 2 >= left) rows /= 2;
    return rows;
  }

  // x in Acc, with zeros up to whole vectors, and rows of zeros up to `padded_rows`.
  void stage_x(Acc* to) const {
    const Scalar* from = static_cast<const Scalar*>(p_.x);
    for (int64_t row = 0; row < p_.rows; ++row, from += p_.in, to += x_stride_) {
      int64_t c = 0;
      for (; c + W <= p_.in; c += W) store(to + c, load(from + c));
      if (c < p_.in) store(to + c, load_some(from + c, 1, p_.in - c));
    }
    const int64_t missing = padded_rows_ - p_.rows;
    __builtin_memset(to, 0, sizeof(Acc) * static_cast<size_t>(missing * x_stride_));
  }

  // The outputs [begin, end) of all rows; sums (rows, task_outputs) is the worker's own memory.
  void compute(const Acc* x, int64_t begin, int64_t end, Acc* sums) const {
    int64_t output = begin;
    if (p_.rows > kMaxRows) {
      for (; output + kOutputs <= end; output += kOutputs) {
        add_up_rows<kOutputs>(x, output, sums + output - begin);
      }
    }
    for (; output < end; ++output) add_up_rows<1>(x, output, sums + output - begin);
    for (int64_t row = 0; row < p_.rows; ++row) finish(sums + row * task_outputs_, row, begin, end);
  }

  // `outputs` outputs of all rows. They are in the cache after the first rows.
  template <int outputs>
  void add_up_rows(const Acc* x, int64_t output, Acc* sums) const {
    for (int64_t row = 0; row < p_.rows; row += kMaxRows) {
      add_up_together<outputs, kMaxRows>(x, row, output, sums);
    }
  }

  template <int outputs, int rows>
  void add_up_together(const Acc* x, int64_t row, int64_t output, Acc* sums) const {
    if constexpr (rows > 1) {
      if (rows_together(p_.rows - row) < rows) {
        return add_up_together<outputs, rows / 2>(x, row, output, sums);
      }
    }
    add_up<outputs, rows>(x, row, output, sums);
  }

  template <int outputs, int rows>
  void add_up(const Acc* x, int64_t row, int64_t output, Acc* sums) const {
    constexpr int chains = outputs == 1 ? max(1, kChains / rows) : 1;
    const Scalar* const w = weight_ + output * p_.in;
    x += row * x_stride_;
    Vec<Acc> sum_of[outputs][rows][chains] = {};
    int64_t c = 0;
    for (; c + chains * W <= p_.in; c += chains * W) {
      HFLA_UNROLL
      for (int chain = 0; chain < chains; ++chain) {
        multiply_add<outputs, rows, chains>(w, x, c + chain * W, W, sum_of, chain);
      }
    }
    for (; c < p_.in; c += W) {
      multiply_add<outputs, rows, chains>(w, x, c, min(W, p_.in - c), sum_of, 0);
    }
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) {
      HFLA_UNROLL
      for (int r = 0; r < rows; ++r) {
        HFLA_UNROLL
        for (int chain = 1; chain < chains; ++chain) sum_of[o][r][0] += sum_of[o][r][chain];
        sums[(row + r) * task_outputs_ + o] = sum<Acc>(sum_of[o][r][0]);
      }
    }
  }

  // One vector of each output's weights, `count` of whose lanes are in the row.
  template <int outputs, int rows, int chains>
  HFLA_INLINE void multiply_add(const Scalar* w, const Acc* x, int64_t c, int64_t count,
                                Vec<Acc> (&sum_of)[outputs][rows][chains], int chain) const {
    HFLA_UNROLL
    for (int o = 0; o < outputs; ++o) {
      const Scalar* const at = w + o * p_.in + c;
      __builtin_prefetch(reinterpret_cast<const char*>(at) + kPrefetchBytes);
      const Vec<Acc> weight = count == W ? load(at) : load_some(at, 1, count);
      HFLA_UNROLL
      for (int r = 0; r < rows; ++r) sum_of[o][r][chain] += weight * load(x + r * x_stride_ + c);
    }
  }

  void finish(const Acc* sums, int64_t row, int64_t begin, int64_t end) const {
    const Scalar* const bias = static_cast<const Scalar*>(p_.bias);
    Scalar* const y = static_cast<Scalar*>(p_.y) + row * p_.out;
    for (int64_t c = begin; c < end; c += W) {
      const int64_t count = min(W, end - c);
      Vec<Acc> result = load(sums + c - begin);
      if (bias) result += count == W ? load(bias + c) : load_some(bias + c, 1, count);
      if (count == W)
        store(y + c, result);
      else
        store_some(y + c, 1, count, result);
    }
  }

  const LinearProblem& p_;
  const Threads& threads_;
  const Scalar* const weight_;
  const int64_t padded_rows_, x_stride_, task_outputs_;
};

}  // namespace

Status linear(const LinearProblem& problem, const Threads& threads) {
  return with_dtype(problem.dtype,
                    [&](auto scalar) { return Linear<decltype(scalar)>(problem, threads).run(); });
}

}  // namespace hfla::HFLA_ISA
