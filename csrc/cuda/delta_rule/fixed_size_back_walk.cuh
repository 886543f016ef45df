// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What goes from the last chunk to the first, in the words of fixed_size_chunk.cuh: dv, and dS' of
// every chunk as operands of products over columns. As forward's walk (fixed_size_walk.cuh), and
// transposed as there: two warps go from state to state; two make what of a chunk does not depend
// on states, a step before, store dv a step later, and load what comes.
#pragma once

#include "cuda/delta_rule/fixed_size_back_loader.cuh"
#include "cuda/delta_rule/fixed_size_state.cuh"

namespace hfla::cuda {

template <int K>
class BackStates {
  using Operands = Bf16Operands;
  using Shared = BackShared<K>;

 public:
  DEV BackStates(const FixedSizeDeltaRule& p, const FixedSizePlace& place)
      : p_(p),
        place_(place),
        part_(thread_index() / 32 * 16),
        there_(place.first_column + part_ < p.V),
        state_(p, place, 0, part_) {}

  DEV void load() {
    if (there_) state_.load(p_.upstream.dstate);
  }
  DEV void store() {
    if (there_) state_.store(p_.gradients.dinitial_state);
  }

  // Keeps dS' and leaves W; has dS afterwards.
  DEV void visit(int step) {
    if (!there_) return;
    const BackKeyStage<K> keys = Shared::keys(step);
    const BackStage passed = Shared::passed(step);
    keep(place_.chunks - 1 - step);
    FixedSizeValues values = {}, gradients = {};
    FixedSizeOperands a, rows;
    UNROLL
    for (int k = 0; k < K; k += Operands::kDepth) add_state(values, keys.k, k, state_.operand(k));
    add_passed(values, keys.unit.to(), passed);
    make_operands(a, values);
    add_transposed_triangle(gradients, keys.unit.m(), a);
    make_operands(a, gradients);
    UNROLL
    for (int i = 0; i < kFixedSizeTokens / 16; ++i) passed.gradients(i) = words_of(a[i]);
    scale(gradients, keys.unit.from(), -1);
    make_operands(a, gradients);
    UNROLL
    for (int i = 0; i < kFixedSizeTokens / 16; ++i) rows[i] = operand_of(passed.rows(i));
    state_.go_on(*keys.unit.whole(), [&](float (&sums)[2][4], int channel) {
      add_written(sums, keys.q, channel, rows);
      add_written(sums, keys.k, channel, a);
    });
  }

 private:
  // As operands of products over columns.
  DEV void keep(int chunk) const {
    LaneWords* const to = p_.state_words<K>(p_.state_gradients, place_.first_chunk + chunk,
                                            place_.head, place_.first_column + part_) +
                          thread_index() % 32;
    UNROLL
    for (int k = 0; k < K; k += Operands::kDepth) to[2 * k] = state_.transposed(state_.operand(k));
  }

  // values = l ∘ values + A'ᵀ dy.
  DEV static void add_passed(FixedSizeValues& values, const float* to, const BackStage& passed) {
    UNROLL
    for (int n = 0; n < kFixedSizeTokens / 8; ++n) {
      const auto l = numbers_of(to, n);
      const LaneWords sums = passed.sums(n);
      UNROLL
      for (int i = 0; i < 4; ++i) {
        values[n][i] = l.get(i % 2) * values[n][i] + bits_to_float(sums.x[i]);
      }
    }
  }

  const FixedSizeDeltaRule& p_;
  const FixedSizePlace& place_;
  const int part_;  // the warp's first column, of the block's
  const bool there_;
  FixedSizeState<K> state_;
};

template <int K>
class BackTokens {
  using Operands = Bf16Operands;
  using Shared = BackShared<K>;

 public:
  DEV BackTokens(const FixedSizeDeltaRule& p, const FixedSizePlace& place)
      : p_(p),
        place_(place),
        part_(thread_index() / 32 % (kFixedSizeColumns / 16) * 16),
        there_(place.first_column + part_ < p.V) {}

  // Leaves A'ᵀ dy and f' ∘ dy.
  DEV void prepare(int step) const {
    if (!there_) return;
    const BackRowStage tokens = Shared::tokens(step);
    const BackStage passed = Shared::passed(step);
    FixedSizeOperands dy;
    UNROLL
    for (int i = 0; i < kFixedSizeTokens / 16; ++i) {
      dy[i] = load_a_transposed<Operands>(tokens.dy, part_, 16 * i);
      float weights[Operands::kColumnsOfA];
      UNROLL
      for (int j = 0; j < Operands::kColumnsOfA; ++j) {
        weights[j] = tokens.unit.from()[16 * i + Operands::column_of_a(j)];
      }
      passed.rows(i) =
          words_of(Operands::load_a_transposed(tokens.dy, part_, 16 * i, true, weights));
    }
    FixedSizeValues sums = {};
    add_transposed_triangle(sums, tokens.unit.a(), dy);
    UNROLL
    for (int n = 0; n < kFixedSizeTokens / 8; ++n) {
      passed.sums(n) = {{float_to_bits(sums[n][0]), float_to_bits(sums[n][1]),
                         float_to_bits(sums[n][2]), float_to_bits(sums[n][3])}};
    }
  }

  // dv.
  DEV void store(int step) const {
    const BackStage passed = Shared::passed(step);
    if (!there_) return;
    const View& dv = p_.gradients.dv;
    const int chunk = place_.chunks - 1 - step;
    ColumnRows to(place_.rows<BFloat16>(dv, place_.head) + chunk * kFixedSizeTokens * dv.time +
                      place_.first_column + part_,
                  dv.time, place_.tokens_of(chunk));
    UNROLL
    for (int i = 0; i < kFixedSizeTokens / 16; ++i) {
      const LaneWords words = passed.gradients(i);
      to.store(words.x[0], words.x[1]);
      to.store(words.x[2], words.x[3]);
    }
  }

 private:
  const FixedSizeDeltaRule& p_;
  const FixedSizePlace& place_;
  const int part_;  // the warp's first column, of the block's
  const bool there_;
};

template <int K>
KERNEL LAUNCH_BOUNDS(kFixedSizeThreads, 1)
    delta_fixed_size_gradients_kernel(const GRID_CONSTANT FixedSizeDeltaRule p) {
  const FixedSizePlace place(p);
  const bool is_ahead = thread_index() >= kFixedSizeThreads / 2;
  CopyGroups copies;
  const BackTokens<K> tokens(p, place);
  BackStates<K> states(p, place);
  const int steps = place.chunks;
  if (!is_ahead) {
    states.load();
  } else if (steps > 0) {
    BackLoader<K>(p, place, copies).start_rows(0);
    copies.close();
  }
  for (int step = -1; step <= steps && steps > 0; ++step) {
    if (is_ahead) copies.wait<0>();
    sync_block();
    if (!is_ahead) {
      if (step >= 0 && step < steps) states.visit(step);
      continue;
    }
    BackLoader<K> loader(p, place, copies);
    if (step + 1 < steps) loader.start_keys(step + 1);
    if (step + 2 < steps) loader.start_rows(step + 2);
    copies.close();
    if (step + 1 < steps) tokens.prepare(step + 1);
    if (step > 0) tokens.store(step - 1);
  }
  if (!is_ahead) states.store();
}

}  // namespace hfla::cuda
