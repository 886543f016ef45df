// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Backward's way forward: S of every chunk, of the errors that forward has kept, as operands of
// products over columns (fixed_size_chunk.cuh). A block has a sequence, a head and 32 columns, and
// each of its eight warps 16 of them and a quarter of the channels, which know nothing of the
// others. All load the next chunk meanwhile, and leave this one's errors as bfloat16.
#pragma once

#include "cuda/delta_rule/fixed_size_state.cuh"

namespace hfla::cuda {

constexpr int kStateThreads = 256;

template <int K>
struct StateWalkStage {
  FixedSizeRows<K> k;
  FixedSizeRows<kFixedSizeColumns, float> errors;
  float* end;  // a key unit's

  static constexpr int kErrorsAt = decltype(k)::kBytes;
  static constexpr int kEndAt = kErrorsAt + decltype(errors)::kBytes;
  static constexpr int kBytes = kEndAt + KeyUnit::kEndBytes;
  DEV explicit StateWalkStage(int chunk) {
    char* const at = shared_memory() + chunk % 2 * kBytes;
    k.data = reinterpret_cast<BFloat16*>(at);
    errors.data = reinterpret_cast<float*>(at + kErrorsAt);
    end = reinterpret_cast<float*>(at + kEndAt);
  }
};

template <int K>
class StateWalk {
  using Operands = Bf16Operands;
  using Stage = StateWalkStage<K>;
  static constexpr int kParts = kFixedSizeColumns / 16,
                       kChannels = K * kParts / (kStateThreads / 32);

 public:
  DEV StateWalk(const FixedSizeDeltaRule& p, const FixedSizePlace& place)
      : p_(p),
        place_(place),
        part_(thread_index() / 32 % kParts * 16),
        channel_(thread_index() / 32 / kParts * kChannels),
        there_(place.first_column + part_ < p.V),
        rows_(thread_index()),
        values_(thread_index()),
        k_(place.rows<const BFloat16>(p.k, place.head / int(p.k_group)) + rows_.row * p.k.time +
           rows_.column),
        errors_(place.rows<const float>(p.upstream.errors, place.head) + place.first_column +
                values_.row * p.upstream.errors.time + values_.column),
        state_(p, place, channel_, part_) {}

  DEV void run() {
    if (place_.chunks == 0) return;
    start(0);
    if (there_) state_.load(p_.initial_state);
    for (int chunk = 0; chunk < place_.chunks; ++chunk) {
      copies_.wait<0>();
      sync_block();
      if (chunk + 1 < place_.chunks) start(chunk + 1);
      const Stage stage(chunk);
      keep_errors(stage, chunk);
      if (there_) visit(stage, chunk);
    }
  }

 private:
  // Of one chunk after the other.
  DEV void start(int chunk) {
    const Stage to(chunk);
    const int tokens = place_.tokens_of(chunk);
    rows_.start(copies_, to.k, k_, p_.k.time, tokens);
    if (place_.first_column + values_.column < p_.V) {
      values_.start(copies_, to.errors, errors_, p_.upstream.errors.time, tokens);
    }
    const KeyUnit unit = p_.key_unit(place_.first_chunk + chunk, place_.head);
    start_copies<KeyUnit::kEndBytes, kStateThreads>(copies_, to.end, unit.to(), thread_index());
    copies_.close();
    k_ += kFixedSizeTokens * p_.k.time, errors_ += kFixedSizeTokens * p_.upstream.errors.time;
  }

  // In bfloat16, 8 columns of a token to a thread.
  DEV void keep_errors(const Stage& stage, int chunk) const {
    constexpr int kRun = 8, kRuns = kFixedSizeColumns / kRun;
    static_assert(kRuns * kFixedSizeTokens == kStateThreads);
    const int token = thread_index() / kRuns, column = thread_index() % kRuns * kRun;
    if (place_.first_column + column >= p_.V) return;
    float x[kRun];
    UNROLL
    for (int i = 0; i < kRun; i += 4) {
      const auto run = *reinterpret_cast<const Run<float, 4>*>(stage.errors.at(token, column + i));
      UNROLL
      for (int j = 0; j < 4; ++j) x[i + j] = run.get(j);
    }
    BFloat16* const to = p_.errors_of(place_.first_chunk + chunk, place_.head) + token * p_.V +
                         place_.first_column + column;
    *reinterpret_cast<Run<BFloat16, kRun>*>(to) = make_run<BFloat16>(x);
  }

  // Stores S, and has S' afterwards.
  DEV void visit(const Stage& stage, int chunk) {
    LaneWords* const to = p_.state_words<K>(p_.states, place_.first_chunk + chunk, place_.head,
                                            place_.first_column + part_) +
                          channel_ * 2 + thread_index() % 32;
    UNROLL
    for (int c = 0; c < kChannels; c += 16) to[c * 2] = state_.transposed(state_.operand(c));
    const auto [g, t] = lane();
    FixedSizeValues errors;
    UNROLL
    for (int n = 0; n < kFixedSizeTokens / 8; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) {
        errors[n][i] = stage.errors.get(8 * n + 2 * t + i % 2, part_ + g + i / 2 * 8);
      }
    }
    scale(errors, stage.end);
    FixedSizeOperands a;
    make_operands(a, errors);
    state_.go_on(stage.end[kFixedSizeTokens], [&](float (&sums)[2][4], int channel) {
      add_written(sums, stage.k, channel_ + channel, a);
    });
  }

  const FixedSizeDeltaRule& p_;
  const FixedSizePlace& place_;
  const int part_, channel_;  // the warp's first ones, of the block's
  const bool there_;
  const RowCopies<K, kStateThreads> rows_;
  const RowCopies<kFixedSizeColumns, kStateThreads, float> values_;
  const BFloat16* k_;
  const float* errors_;
  CopyGroups copies_;
  FixedSizeState<kChannels> state_;
};

template <int K>
KERNEL LAUNCH_BOUNDS(kStateThreads, 2)
    delta_fixed_size_states_kernel(const GRID_CONSTANT FixedSizeDeltaRule p) {
  const FixedSizePlace place(p);
  StateWalk<K>(p, place).run();
}

}  // namespace hfla::cuda
