// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What lies between the products of an RWKV-7 layer, without gradient (src/…/mixers/rwkv7.py has
// the formulas). Rows are tokens; whatever has no type here is of the problem's dtype.
#pragma once

#include "kernels/common.h"

namespace hfla {

// to[i] = x + (before - x) mixes[i], each a matrix (rows, columns)
struct TokenMixProblem {
  int64_t rows, columns, count;
  DType dtype;               // no double
  const void* x;             // (rows, columns)
  const void* before;        // (rows, columns)
  const void* const* mixes;  // count times (columns,)
  void* to;                  // (count, rows, columns)
};

// Of keys: rate = sigmoid(a + a_bias) and kappa = k k_k, divided by its norm in each head, give
//   log_decay = largest sigmoid(w + w_bias),  key = k (1 + (rate - 1) k_a),
//   erased = -kappa,  written = kappa rate
struct RWKV7KeysProblem {
  int64_t rows, heads, key_dim;
  DType dtype;
  float largest;  // in magnitude, of a log decay
  float eps;      // of the square of a norm
  const void* k;  // (rows, heads * key_dim), as w and a
  const void* w;
  const void* a;
  const float* w_bias;  // (heads * key_dim,), as a_bias
  const float* a_bias;
  const void* k_k;  // (heads * key_dim,), as k_a
  const void* k_a;
  float* log_decay;  // (rows, heads * key_dim), as all that follow
  void* key;
  void* erased;
  void* written;
};

// Of values: to = v + (first - v) sigmoid(share + bias), each of (rows, columns) but the bias
struct RWKV7ValuesProblem {
  int64_t rows, columns;
  DType dtype;
  const void* v;
  const void* first;
  const void* share;
  const float* bias;  // (columns,)
  void* to;
};

// Of what was read: its LayerNorm in each head, a bonus for the token itself, and a gate,
//   to = (weight (y - mean) / deviation + bias + v sum(r k r_k)) gate
struct RWKV7ReadProblem {
  int64_t rows, heads, key_dim, value_dim;
  DType dtype;
  float eps;
  const void* y;  // (rows, heads * value_dim), as v and gate
  const void* r;  // (rows, heads * key_dim), as k
  const void* k;
  const void* v;
  const void* gate;
  const void* r_k;     // (heads * key_dim,)
  const void* weight;  // (heads * value_dim,), as bias
  const void* bias;
  void* to;  // (rows, heads * value_dim)
};

// y = max(x, 0)^2 of (rows, columns), as its MLP needs it
struct SquaredReluProblem {
  int64_t rows, columns;
  DType dtype;
  const void* x;
  void* y;
};

struct RWKV7OnCpu {
  Status (*token_mix)(const TokenMixProblem&, const Threads&);
  Status (*values)(const RWKV7ValuesProblem&, const Threads&);
  Status (*keys)(const RWKV7KeysProblem&, const Threads&);
  Status (*read)(const RWKV7ReadProblem&, const Threads&);
  Status (*squared_relu)(const SquaredReluProblem&, const Threads&);
};

}  // namespace hfla
