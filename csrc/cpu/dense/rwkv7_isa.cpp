// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What lies between the products of an RWKV-7 layer: each token is read once.

#include "cpu/common/normal_exp.h"
#include "cpu/common/row_sums.h"
#include "cpu/common/tasks.h"
#include "cpu/dense/kernels.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kBlockRows = 16;  // of a task
constexpr int64_t kWork = 16;       // of a number, in multiplications

template <class Scalar>
class TokenMix {
 public:
  explicit TokenMix(const TokenMixProblem& p) : p_(p) {}

  void compute(int64_t row) const {
    const int64_t at = row * p_.columns, size = p_.rows * p_.columns;
    const Scalar* const x = static_cast<const Scalar*>(p_.x) + at;
    const Scalar* const before = static_cast<const Scalar*>(p_.before) + at;
    Scalar* const to = static_cast<Scalar*>(p_.to) + at;
    for_each_vector<float>(0, p_.columns, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      const Vec<float> now = load_vector(x, 1, c, count);
      const Vec<float> change = load_vector(before, 1, c, count) - now;
      for (int64_t i = 0; i < p_.count; ++i) {
        const Scalar* const mix = static_cast<const Scalar*>(p_.mixes[i]);
        store_vector(to + i * size, 1, c, count, now + change * load_vector(mix, 1, c, count));
      }
    });
  }

 private:
  const TokenMixProblem& p_;
};

template <class Scalar>
HFLA_INLINE Vec<float> sigmoid_of(const Scalar* x, const float* bias, int64_t c, int64_t count) {
  return gate_of(load_vector(x, 1, c, count) + load_vector(bias, 1, c, count));
}

template <class Scalar>
class Values {
 public:
  explicit Values(const RWKV7ValuesProblem& p) : p_(p) {}

  void compute(int64_t row) const {
    const int64_t at = row * p_.columns;
    const auto of = [&](const void* x) { return static_cast<const Scalar*>(x) + at; };
    const Scalar *const v = of(p_.v), *const first = of(p_.first), *const share = of(p_.share);
    Scalar* const to = static_cast<Scalar*>(p_.to) + at;
    for_each_vector<float>(0, p_.columns, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      const Vec<float> now = load_vector(v, 1, c, count);
      const Vec<float> change = load_vector(first, 1, c, count) - now;
      store_vector(to, 1, c, count,
                   now + change * rounded<Scalar>(sigmoid_of(share, p_.bias, c, count)));
    });
  }

 private:
  const RWKV7ValuesProblem& p_;
};

template <class Scalar>
class Keys {
 public:
  explicit Keys(const RWKV7KeysProblem& p) : p_(p) {}

  void compute(int64_t row) const {
    for (int64_t head = 0; head < p_.heads; ++head) {
      const int64_t c = head * p_.key_dim;
      compute_head(row * p_.heads * p_.key_dim + c, c);
    }
  }

 private:
  // Of the numbers from `at` on, and the parameters from c on.
  void compute_head(int64_t at, int64_t c) const {
    const auto of = [&](const void* x) { return static_cast<const Scalar*>(x) + at; };
    const auto to = [&](void* x) { return static_cast<Scalar*>(x) + at; };
    const auto parameter = [&](const void* x) { return static_cast<const Scalar*>(x) + c; };
    const Scalar *const k = of(p_.k), *const w = of(p_.w), *const a = of(p_.a);
    const Scalar *const k_k = parameter(p_.k_k), *const k_a = parameter(p_.k_a);
    const auto kappa = [&](int64_t i, int64_t count) HFLA_INLINE_LAMBDA {
      return rounded<Scalar>(load_vector(k, 1, i, count) * load_vector(k_k, 1, i, count));
    };
    const float squares =
        sum_of_row<float>(p_.key_dim, [&](int64_t i, int64_t count) HFLA_INLINE_LAMBDA {
          const Vec<float> part = kappa(i, count);
          return part * part;
        });
    const float norm = square_root(squares + p_.eps);
    for_each_vector<float>(0, p_.key_dim, [&](int64_t i, int64_t count) HFLA_INLINE_LAMBDA {
      const Vec<float> rate = sigmoid_of(a, p_.a_bias + c, i, count);
      const Vec<float> unit = kappa(i, count) / norm;
      store_vector(p_.log_decay + at, 1, i, count,
                   sigmoid_of(w, p_.w_bias + c, i, count) * -p_.largest);
      store_vector(
          to(p_.key), 1, i, count,
          load_vector(k, 1, i, count) * (1.0f + (rate - 1.0f) * load_vector(k_a, 1, i, count)));
      store_vector(to(p_.erased), 1, i, count, -unit);
      store_vector(to(p_.written), 1, i, count, unit * rate);
    });
  }

  const RWKV7KeysProblem& p_;
};

template <class Scalar>
class Read {
 public:
  explicit Read(const RWKV7ReadProblem& p) : p_(p) {}

  void compute(int64_t row) const {
    for (int64_t head = 0; head < p_.heads; ++head) compute_head(row * p_.heads + head, head);
  }

 private:
  void compute_head(int64_t at, int64_t head) const {
    const int64_t K = p_.key_dim, V = p_.value_dim;
    const auto part = [](const void* x, int64_t from) {
      return static_cast<const Scalar*>(x) + from;
    };
    const Scalar *const r = part(p_.r, at * K), *const k = part(p_.k, at * K);
    const Scalar* const r_k = part(p_.r_k, head * K);
    const float bonus = sum_of_row<float>(K, [&](int64_t i, int64_t count) HFLA_INLINE_LAMBDA {
      return load_vector(r, 1, i, count) * load_vector(k, 1, i, count) *
             load_vector(r_k, 1, i, count);
    });
    const Scalar *const y = part(p_.y, at * V), *const v = part(p_.v, at * V);
    const Scalar *const gate = part(p_.gate, at * V), *const bias = part(p_.bias, head * V);
    const Scalar* const weight = part(p_.weight, head * V);
    const float mean =
        sum_of_row<float>(V, [&](int64_t i, int64_t count)
                                 HFLA_INLINE_LAMBDA { return load_vector(y, 1, i, count); }) /
        static_cast<float>(V);
    const float squares = sum_of_row<float>(V, [&](int64_t i, int64_t count) HFLA_INLINE_LAMBDA {
      const Vec<float> x = first_lanes<float>(count, load_vector(y, 1, i, count) - mean);
      return x * x;
    });
    const float inverse = 1 / square_root(squares / static_cast<float>(V) + p_.eps);
    Scalar* const to = static_cast<Scalar*>(p_.to) + at * V;
    for_each_vector<float>(0, V, [&](int64_t i, int64_t count) HFLA_INLINE_LAMBDA {
      const Vec<float> normed = (load_vector(y, 1, i, count) - mean) * inverse;
      const Vec<float> sum = normed * load_vector(weight, 1, i, count) +
                             load_vector(bias, 1, i, count) + bonus * load_vector(v, 1, i, count);
      store_vector(to, 1, i, count, rounded<Scalar>(sum) * load_vector(gate, 1, i, count));
    });
  }

  const RWKV7ReadProblem& p_;
};

template <class Scalar>
class SquaredRelu {
 public:
  explicit SquaredRelu(const SquaredReluProblem& p) : p_(p) {}

  void compute(int64_t row) const {
    const Scalar* const x = static_cast<const Scalar*>(p_.x) + row * p_.columns;
    Scalar* const y = static_cast<Scalar*>(p_.y) + row * p_.columns;
    for_each_vector<float>(0, p_.columns, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      const Vec<float> positive = at_least(0.0f, load_vector(x, 1, c, count));
      store_vector(y, 1, c, count, positive * positive);
    });
  }

 private:
  const SquaredReluProblem& p_;
};

template <template <class> class Rows, class Problem>
Status for_rows(const Problem& p, int64_t numbers, const Threads& threads) {
  if constexpr (!kHasOthers) return Status::ok;  // nobody asks these kernels
  return with_dtype_but_double(p.dtype, [&](auto scalar) {
    const Rows<decltype(scalar)> rows(p);
    const int64_t workers = workers_for(threads, kWork * p.rows * numbers);
    run_tasks(threads, workers, ceil_div(p.rows, kBlockRows), [&](int64_t, int64_t block) {
      const int64_t end = min(p.rows, (block + 1) * kBlockRows);
      for (int64_t row = block * kBlockRows; row < end; ++row) rows.compute(row);
    });
    return Status::ok;
  });
}

}  // namespace

Status token_mix(const TokenMixProblem& p, const Threads& threads) {
  return for_rows<TokenMix>(p, p.columns, threads);
}

Status rwkv7_values(const RWKV7ValuesProblem& p, const Threads& threads) {
  return for_rows<Values>(p, p.columns, threads);
}

Status rwkv7_keys(const RWKV7KeysProblem& p, const Threads& threads) {
  return for_rows<Keys>(p, p.heads * p.key_dim, threads);
}

Status rwkv7_read(const RWKV7ReadProblem& p, const Threads& threads) {
  return for_rows<Read>(p, p.heads * p.value_dim, threads);
}

Status squared_relu(const SquaredReluProblem& p, const Threads& threads) {
  return for_rows<SquaredRelu>(p, p.columns, threads);
}

}  // namespace hfla::HFLA_ISA
