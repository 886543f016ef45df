// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = weight x / rms(x) for each row of x, and its gradients.
//
// A row is read twice, the second time from the first-level cache. The gradient of the weight is
// added up run by run of rows, then over the runs of a block, then over the blocks, lest equal
// terms be rounded alike; in an order which depends on the shape only, so that results are the same
// to the bit with any number of threads.

#include "cpu/common/memory.h"
#include "cpu/common/row_sums.h"
#include "cpu/common/tasks.h"
#include "cpu/common/vec.h"
#include "cpu/dense/kernels.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kBlockSize = 32768;  // elements of x, at least, so that a block is worth a task
constexpr int64_t kMaxBlocks = 64;     // each of which has a gradient of the weight
constexpr int64_t kRunRows = 64;

template <class Scalar>
class RmsNorm {
  using Acc = AccOf<Scalar>;
  static constexpr int64_t W = kLanes<Acc>;

 public:
  RmsNorm(const RmsNormProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        x_(static_cast<const Scalar*>(p.x)),
        weight_(static_cast<const Scalar*>(p.weight)),
        block_rows_(max(ceil_div(kBlockSize, max(1, p.columns)), ceil_div(p.rows, kMaxBlocks))),
        blocks_(ceil_div(p.rows, block_rows_)),
        workers_(workers_for(threads, p.rows * p.columns)) {}

  Status forward(const RmsNormResult& result) const {
    run_tasks(threads_, workers_, blocks_, [&](int64_t, int64_t block) {
      for_rows(block, [&](int64_t row) { forward_row(result, row); });
    });
    return Status::ok;
  }

  Status backward(const RmsNormGradients& gradients) const {
    const int64_t stride = round_up(p_.columns, W), size = max(1, blocks_) * stride;
    const bool has_runs = block_rows_ > kRunRows;
    const int64_t bytes = size * static_cast<int64_t>(sizeof(Acc) + has_runs * sizeof(double)) +
                          stride * static_cast<int64_t>(sizeof(double));
    const Buffer buffer(bytes);
    if (!buffer.data()) return Status::out_of_memory;
    __builtin_memset(buffer.data(), 0, static_cast<size_t>(bytes));
    double* const total = reinterpret_cast<double*>(buffer.data());     // (stride,)
    double* const ended = total + stride;                               // (blocks, stride)
    Acc* const runs = reinterpret_cast<Acc*>(ended + has_runs * size);  // alike
    run_tasks(threads_, workers_, blocks_, [&](int64_t, int64_t block) {
      Acc* const run = runs + block * stride;
      int64_t rows = 0;
      for_rows(block, [&](int64_t row) {
        backward_row(gradients, row, run);
        if (!has_runs || ++rows % kRunRows != 0) return;
        for (int64_t c = 0; c < stride; ++c) ended[block * stride + c] += run[c];
        __builtin_memset(run, 0, sizeof(Acc) * stride);
      });
    });
    for (int64_t i = 0; i < blocks_; ++i) {
      for (int64_t c = 0; c < stride; ++c) total[c] += runs[i * stride + c];
      for (int64_t c = 0; has_runs && c < stride; ++c) total[c] += ended[i * stride + c];
    }
    for (int64_t c = 0; c < stride; ++c) runs[c] = static_cast<Acc>(total[c]);
    for_each_vector<Acc>(0, p_.columns, [&](int64_t c, int64_t count) {
      store_vector(static_cast<Scalar*>(gradients.dweight), 1, c, count, load(runs + c));
    });
    return Status::ok;
  }

 private:
  template <class Body>
  void for_rows(int64_t block, Body body) const {
    const int64_t end = min(p_.rows, (block + 1) * block_rows_);
    for (int64_t row = block * block_rows_; row < end; ++row) body(row);
  }

  void forward_row(const RmsNormResult& result, int64_t row) const {
    const Scalar* const x = x_ + row * p_.columns;
    Scalar* const y = static_cast<Scalar*>(result.y) + row * p_.columns;
    const Acc squares =
        sum_of_row<Acc>(p_.columns, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
          const Vec<Acc> part = load_vector(x, 1, c, count);
          return part * part;
        });
    const Acc mean = squares / static_cast<Acc>(p_.columns);
    const Acc inverse = 1 / square_root(mean + static_cast<Acc>(p_.eps));
    if (result.inverse_rms) static_cast<Acc*>(result.inverse_rms)[row] = inverse;
    for_each_vector<Acc>(0, p_.columns, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      store_vector(y, 1, c, count,
                   load_vector(weight_, 1, c, count) *
                       rounded<Scalar>(load_vector(x, 1, c, count) * inverse));
    });
  }

  // With g = weight dy and n = x / rms: dx = (g - n mean(g n)) / rms, and dweight += dy n.
  void backward_row(const RmsNormGradients& gradients, int64_t row, Acc* dweight) const {
    const Scalar* const x = x_ + row * p_.columns;
    const Scalar* const dy = static_cast<const Scalar*>(gradients.dy) + row * p_.columns;
    Scalar* const dx = static_cast<Scalar*>(gradients.dx) + row * p_.columns;
    const Acc inverse = static_cast<const Acc*>(gradients.inverse_rms)[row];
    const Acc sum = sum_of_row<Acc>(p_.columns, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      return load_vector(weight_, 1, c, count) * load_vector(dy, 1, c, count) *
             (load_vector(x, 1, c, count) * inverse);
    });
    const Acc mean = sum / static_cast<Acc>(p_.columns);
    for_each_vector<Acc>(0, p_.columns, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      const Vec<Acc> n = load_vector(x, 1, c, count) * inverse;
      const Vec<Acc> upstream = load_vector(dy, 1, c, count);
      store_vector(dx, 1, c, count,
                   (load_vector(weight_, 1, c, count) * upstream - n * mean) * inverse);
      store(dweight + c, load(dweight + c) + upstream * n);
    });
  }

  const RmsNormProblem& p_;
  const Threads& threads_;
  const Scalar *const x_, *const weight_;
  const int64_t block_rows_, blocks_, workers_;
};

}  // namespace

Status rms_norm(const RmsNormProblem& problem, const RmsNormResult& result,
                const Threads& threads) {
  return with_dtype(problem.dtype, [&](auto scalar) {
    return RmsNorm<decltype(scalar)>(problem, threads).forward(result);
  });
}

Status rms_norm_backward(const RmsNormProblem& problem, const RmsNormGradients& gradients,
                         const Threads& threads) {
  return with_dtype(problem.dtype, [&](auto scalar) {
    return RmsNorm<decltype(scalar)>(problem, threads).backward(gradients);
  });
}

}  // namespace hfla::HFLA_ISA
