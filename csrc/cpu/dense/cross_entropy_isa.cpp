// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The loss of a language model, and the gradient of its logits.
//
// A row is read twice, the second time from a cache. The order of its sum depends on the number of
// words only.

#include "cpu/common/exp.h"
#include "cpu/common/row_sums.h"
#include "cpu/common/tasks.h"
#include "cpu/common/vec.h"
#include "cpu/dense/kernels.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kTaskWords = 32768;  // at least, so that a task is worth its while

template <class Scalar>
class CrossEntropy {
  using Acc = AccOf<Scalar>;
  using V = Vec<Acc>;
  static constexpr int64_t W = kLanes<Acc>;

 public:
  CrossEntropy(const CrossEntropyProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        logits_(static_cast<const Scalar*>(p.logits)),
        task_rows_(ceil_div(kTaskWords, max(1, p.words))),
        workers_(workers_for(threads, p.rows * p.words)) {}

  Status forward(const CrossEntropyResult& result) const {
    for_rows([&](int64_t row) {
      const Scalar* const x = logits_ + row * p_.words;
      const Acc largest = largest_of(x);
      static_cast<Acc*>(result.largest)[row] = largest;
      static_cast<Acc*>(result.sums)[row] = sum_of_exp(x, largest);
      static_cast<Acc*>(result.gaps)[row] = counts(row) ? largest - number(x[p_.labels[row]]) : 0;
    });
    return Status::ok;
  }

  Status backward(const CrossEntropyGradients& gradients) const {
    for_rows([&](int64_t row) {
      const Scalar* const x = logits_ + row * p_.words;
      Scalar* const dx = static_cast<Scalar*>(gradients.dlogits) + row * p_.words;
      if (!counts(row)) {
        const size_t bytes = static_cast<size_t>(p_.words) * sizeof(Scalar);
        if (bytes > 0) __builtin_memset(dx, 0, bytes);  // else there may be no memory
        return;
      }
      const Acc scale = static_cast<const Acc*>(gradients.dlosses)[row];
      const Acc normalizer = static_cast<const Acc*>(gradients.normalizers)[row];
      for_each_vector<Acc>(0, p_.words, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
        store_vector(dx, 1, c, count, exp(load_vector(x, 1, c, count) - normalizer) * scale);
      });
      // Before rounding: what a confident model has left to learn is the small difference.
      const int64_t label = p_.labels[row];
      const V probability = exp(broadcast(number(x[label]) - normalizer));
      store_some(dx + label, 1, 1, (probability - 1) * scale);
    });
    return Status::ok;
  }

 private:
  template <class Body>
  void for_rows(Body body) const {
    run_tasks(threads_, workers_, ceil_div(p_.rows, task_rows_), [&](int64_t, int64_t task) {
      const int64_t end = min(p_.rows, (task + 1) * task_rows_);
      for (int64_t row = task * task_rows_; row < end; ++row) body(row);
    });
  }

  bool counts(int64_t row) const { return p_.labels[row] != p_.ignore_index; }

  static HFLA_INLINE Acc number(const Scalar& x) { return load_some(&x, 1, 1)[0]; }

  // A NaN may be left out: the sum of the row is one.
  Acc largest_of(const Scalar* x) const {
    const Acc none = -static_cast<Acc>(__builtin_inf());
    V most[kChains];
    for (V& m : most) m = broadcast(none);
    int64_t c = 0;
    for (; c + kChains * W <= p_.words; c += kChains * W) {
      HFLA_UNROLL
      for (int64_t i = 0; i < kChains; ++i) most[i] = larger(most[i], load(x + c + i * W));
    }
    for (; c + W <= p_.words; c += W) most[0] = larger(most[0], load(x + c));
    HFLA_UNROLL
    for (int64_t i = 1; i < kChains; ++i) most[0] = larger(most[0], most[i]);
    Acc largest = none;
    for (int64_t i = 0; i < W; ++i) largest = most[0][i] > largest ? most[0][i] : largest;
    for (; c < p_.words; ++c) largest = number(x[c]) > largest ? number(x[c]) : largest;
    return largest;
  }

  static HFLA_INLINE V larger(V a, V b) { return select(b > a, b, a); }

  Acc sum_of_exp(const Scalar* x, Acc largest) const {
    return sum_of_row<Acc>(p_.words, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      const V part = bounded_exp(load_vector(x, 1, c, count) - largest);
      return count == W ? part : first_lanes<Acc>(count, part);
    });
  }

  const CrossEntropyProblem& p_;
  const Threads& threads_;
  const Scalar* const logits_;
  const int64_t task_rows_, workers_;
};

}  // namespace

Status cross_entropy(const CrossEntropyProblem& problem, const CrossEntropyResult& result,
                     const Threads& threads) {
  return with_dtype(problem.dtype, [&](auto scalar) {
    return CrossEntropy<decltype(scalar)>(problem, threads).forward(result);
  });
}

Status cross_entropy_backward(const CrossEntropyProblem& problem,
                              const CrossEntropyGradients& gradients, const Threads& threads) {
  return with_dtype(problem.dtype, [&](auto scalar) {
    return CrossEntropy<decltype(scalar)>(problem, threads).backward(gradients);
  });
}

}  // namespace hfla::HFLA_ISA
