// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The half of a walk's warps that make outputs of what the other half has left (known_walk.cuh).
#pragma once

#include "cuda/delta_rule/known_loader.cuh"
#include "cuda/delta_rule/known_tokens.cuh"

namespace hfla::cuda {

template <int K>
class KnownOutputs {
  using Operands = Bf16Operands;
  using Shared = KnownShared<K>;

 public:
  DEV KnownOutputs(const KnownDeltaRule& p, const KnownPlace& place)
      : p_(p),
        place_(place),
        there_(first_column() < p.V),
        y_(place.rows<BFloat16>(p.result.y, place.head) + first_column()) {}

  // Of one chunk after the other.
  DEV void visit(int chunk) {
    if (!there_) return;
    const QueryStage<K> queries = Shared::queries(chunk);
    const StateStage<K> shown = Shared::states(chunk);
    KnownValues y = {};
    UNROLL
    for (int k = 0; k < K; k += Operands::kDepth) {
      add_state(y, queries.q, k, operand_of(shown.state(k / 16)));
    }
    scale(y, queries.unit.from());
    KnownOperands errors;
    UNROLL
    for (int i = 0; i < kKnownTokens / 16; ++i) errors[i] = operand_of(shown.errors(i));
    add_triangle(y, queries.unit.a(), errors);
    ColumnRows to(y_, p_.result.y.time, place_.tokens_of(chunk));
    UNROLL
    for (int n = 0; n < kKnownTokens / 8; ++n) {
      to.store(to_bf16_pair(y[n][0], y[n][1]), to_bf16_pair(y[n][2], y[n][3]));
    }
    y_ += kKnownTokens * p_.result.y.time;
  }

 private:
  DEV int first_column() const {
    return place_.first_column + thread_index() / 32 % (kKnownColumns / 16) * 16;
  }

  const KnownDeltaRule& p_;
  const KnownPlace& place_;
  const bool there_;
  BFloat16* y_;  // of the next chunk's first token
};

}  // namespace hfla::cuda
