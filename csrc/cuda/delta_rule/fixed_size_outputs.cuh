// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The half of a walk's warps that make outputs of what the other half has left
// (fixed_size_walk.cuh).
#pragma once

#include "cuda/delta_rule/fixed_size_loader.cuh"
#include "cuda/delta_rule/fixed_size_tokens.cuh"

namespace hfla::cuda {

template <int K>
class FixedSizeOutputs {
  using Operands = Bf16Operands;
  using Shared = FixedSizeShared<K>;

 public:
  DEV FixedSizeOutputs(const FixedSizeDeltaRule& p, const FixedSizePlace& place)
      : p_(p),
        place_(place),
        there_(first_column() < p.V),
        y_(place.rows<BFloat16>(p.result.y, place.head) + first_column()) {}

  // Of one chunk after the other.
  DEV void visit(int chunk) {
    if (!there_) return;
    const QueryStage<K> queries = Shared::queries(chunk);
    const StateStage<K> shown = Shared::states(chunk);
    FixedSizeValues y = {};
    UNROLL
    for (int k = 0; k < K; k += Operands::kDepth) {
      add_state(y, queries.q, k, operand_of(shown.state(k / 16)));
    }
    scale(y, queries.unit.from());
    FixedSizeOperands errors;
    UNROLL
    for (int i = 0; i < kFixedSizeTokens / 16; ++i) errors[i] = operand_of(shown.errors(i));
    add_triangle(y, queries.unit.a(), errors);
    ColumnRows to(y_, p_.result.y.time, place_.tokens_of(chunk));
    UNROLL
    for (int n = 0; n < kFixedSizeTokens / 8; ++n) {
      to.store(to_bf16_pair(y[n][0], y[n][1]), to_bf16_pair(y[n][2], y[n][3]));
    }
    y_ += kFixedSizeTokens * p_.result.y.time;
  }

 private:
  DEV int first_column() const {
    return place_.first_column + thread_index() / 32 % (kFixedSizeColumns / 16) * 16;
  }

  const FixedSizeDeltaRule& p_;
  const FixedSizePlace& place_;
  const bool there_;
  BFloat16* y_;  // of the next chunk's first token
};

}  // namespace hfla::cuda
