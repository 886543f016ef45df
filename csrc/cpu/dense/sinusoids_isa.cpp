// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Embeddings of a few tokens, with their positions, in one thread: libm's sines of a token take
// some microseconds.

#include "cpu/common/vec.h"
#include "cpu/dense/kernels.h"

namespace hfla::HFLA_ISA {
namespace {

template <class Scalar>
class Sinusoids {
  using Acc = AccOf<Scalar>;
  static constexpr int64_t W = kLanes<Acc>;

 public:
  explicit Sinusoids(const SinusoidsProblem& p) : p_(p), half_(p.columns / 2) {}

  void add_to(int64_t token) const {
    const Scalar* const x = static_cast<const Scalar*>(p_.x) + token * p_.columns;
    Scalar* const y = static_cast<Scalar*>(p_.y) + token * p_.columns;
    const int64_t position = p_.position[token % p_.positions];
    const Vec<Acc> scale = broadcast(static_cast<Acc>(p_.scale));
    for_each_vector<Acc>(0, p_.columns, [&](int64_t c, int64_t count) {
      store_vector(y, 1, c, count, load_vector(x, 1, c, count) * scale);
    });
    // A loop of its own: in one of both, a product and a sum would be rounded together.
    for_each_vector<Acc>(0, p_.columns, [&](int64_t c, int64_t count) {
      Acc waves[W] = {};
      for (int64_t i = 0; i < count; ++i) waves[i] = wave(position, c + i);
      store_vector(y, 1, c, count, load_vector(y, 1, c, count) + rounded<Scalar>(load(waves)));
    });
  }

 private:
  float wave(int64_t position, int64_t c) const {
    if (c < half_) return __builtin_sinf(angle(position, p_.frequencies[c]));
    return __builtin_cosf(angle(position, p_.frequencies[c - half_]));
  }

  // As Python's angles_of (ops/numerics.py), to the bit.
  static float angle(int64_t position, float frequency) {
    constexpr int64_t kEarlyPositions = 4096;
    constexpr double kTurn = 6.283185307179586;
    if (position < kEarlyPositions) return static_cast<float>(position) * frequency;
    return static_cast<float>(__builtin_fmod(static_cast<double>(position) * frequency, kTurn));
  }

  const SinusoidsProblem& p_;
  const int64_t half_;
};

}  // namespace

Status add_sinusoids(const SinusoidsProblem& p) {
  return with_dtype(p.dtype, [&](auto scalar) {
    const Sinusoids<decltype(scalar)> sinusoids(p);
    for (int64_t token = 0; token < p.tokens; ++token) sinusoids.add_to(token);
    return Status::ok;
  });
}

}  // namespace hfla::HFLA_ISA
