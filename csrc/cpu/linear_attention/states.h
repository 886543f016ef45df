// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// States in the layout of tensors: those that an op is given and gives back, and those between the
// pieces of a sequence.
#pragma once

#include "cpu/common/exp.h"
#include "cpu/sequences/plan.h"

namespace hfla::HFLA_ISA {
namespace {

// One head's state in the layout of the tensors: kv (K, V), z (K,) or null.
template <class Acc>
struct State {
  Acc *kv, *z;
};

// The state of a sequence's head in tensors that may be absent.
template <class Acc, class Pointer>
HFLA_INLINE State<Acc> state_of(const HeadSizes& p, Pointer kv, Pointer z, int64_t sequence,
                                int64_t head) {
  const int64_t row = sequence * p.Hkv + head;
  return {kv ? static_cast<Acc*>(kv) + row * p.K * p.V : nullptr,
          z ? static_cast<Acc*>(z) + row * p.K : nullptr};
}

// Where time is divided: for every piece and head the state that its own tokens add up to, and the
// sum of its log decays; after `combine`, the state that comes into the piece, and its decay.
template <class Acc>
struct PieceStates {
  const HeadSizes& sizes;
  Acc* states;     // (num_pieces, Hkv, K V + K)
  double* decays;  // (num_pieces, Hkv)

  PieceStates(Carver& carver, const Plan& plan) : sizes(plan.sequences) {
    const int64_t count = plan.pieces > 1 ? plan.num_pieces() * sizes.Hkv : 0;
    states = carver.take<Acc>(count * (sizes.K * sizes.V + sizes.K));
    decays = carver.take<double>(count);
  }

  State<Acc> at(int64_t piece, int64_t head) const {
    const int64_t size = sizes.K * sizes.V;
    Acc* kv = states + (piece * sizes.Hkv + head) * (size + sizes.K);
    return {kv, kv + size};
  }

  double& decay(int64_t piece, int64_t head) const { return decays[piece * sizes.Hkv + head]; }

  // Pieces of one sequence in the order in which a sweep visits them.
  struct Order {
    int64_t first, step, count;
  };

  // For one head of one sequence. Not causal: all pieces get the state after the last.
  void combine(Order pieces, int64_t head, State<const Acc> initial, bool is_causal) const {
    const int64_t size = sizes.K * sizes.V;
    for (int64_t i = 0; i < pieces.count; ++i) {
      double& of_piece = decay(pieces.first + i * pieces.step, head);
      of_piece = exp(broadcast(of_piece))[0];
    }
    for (int64_t e = 0; e < size + sizes.K; ++e) {
      const bool in_kv = e < size;
      const Acc* from = in_kv ? initial.kv : initial.z;
      double carry = from ? from[in_kv ? e : e - size] : 0;
      for (int64_t i = 0; i < pieces.count; ++i) {
        Acc& slot = at(pieces.first + i * pieces.step, head).kv[e];
        const Acc added = slot;
        slot = static_cast<Acc>(carry);
        carry = decay(pieces.first + i * pieces.step, head) * carry + added;
      }
      if (is_causal) continue;
      for (int64_t i = 0; i < pieces.count; ++i) {
        at(pieces.first + i * pieces.step, head).kv[e] = static_cast<Acc>(carry);
      }
    }
  }
};

}  // namespace
}  // namespace hfla::HFLA_ISA
