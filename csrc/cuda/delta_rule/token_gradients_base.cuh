// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What the kernel of token gradients has in shared memory, and how it gets there and back: 32
// columns of values and states, and the gradients of numbers that a token has, β's and the decay's.
#pragma once

#include "cuda/delta_rule/tokens.cuh"

namespace hfla::cuda {

constexpr int kSlabColumns = 32;

template <class Scalar, bool erases>
struct TokenGradientsShared {
  static constexpr int C = Chunk<Scalar>::C, kBlocks = Chunk<Scalar>::kBlocks;
  using Element = typename Chunk<Scalar>::Element;
  TokenNumbers numbers;
  Slab<Scalar, erases> slab;
  Tile<Element, C, C> da, p;
  Tile<Element, C, kSlabColumns> dy, w, u;                     // of 32 columns
  Tile<Element, kSlabChannels, kSlabColumns> state, gradient;  // S and dS', of 32 channels
  FloatRows rows;    // in place of dy and w, when these are no longer needed
  float* end_dots;   // (32,): Σ_columns S' ∘ dS'
  float* sums;       // (blocks, 32): a block's part of the decay's gradient
  float* resets;     // (blocks, 32): 1 if the sum starts afresh in the block
  float* head_sums;  // (C,): a token's part, of all channels
  float* head_asks;  // (C,): what the sum loses behind a token, likewise; only with `erases`
  float* beta_dots;  // (C,)
  float* head_end;   // (1,): end_dots of all channels
  int64_t bytes;

  BOTH explicit TokenGradientsShared(SharedCarver carver) : numbers(carver, C), slab(carver) {
    carver.take_tile(da, C);
    carver.take_tile(p, C);
    SharedCarver again = carver;
    carver.take_tile(dy, C);
    carver.take_tile(w, C);
    rows.data = again.take<float>(C * FloatRows::kStride);
    if (again.used() > carver.used()) carver.take<char>(again.used() - carver.used());
    carver.take_tile(u, C);
    carver.take_tile(state, kSlabChannels);
    carver.take_tile(gradient, kSlabChannels);
    end_dots = carver.take<float>(kSlabChannels);
    sums = carver.take<float>(kBlocks * kSlabChannels);
    resets = carver.take<float>(kBlocks * kSlabChannels);
    head_sums = carver.take<float>(C);
    if (erases) head_asks = carver.take<float>(C);
    beta_dots = carver.take<float>(C);
    head_end = carver.take<float>(1);
    bytes = carver.used();
  }
};

template <class Scalar, bool erases>
class TokenGradientsBase {
 protected:
  using Element = typename Chunk<Scalar>::Element;
  using Shared = TokenGradientsShared<Scalar, erases>;
  static constexpr int C = Chunk<Scalar>::C, kBlocks = Chunk<Scalar>::kBlocks;
  static constexpr int kBlock = kBlockTokens;
  using OwnChannel = float[kBlock];  // of a warp's tokens, for the lane's channel

  DEV explicit TokenGradientsBase(const DeltaRuleChunks& p)
      : p_(p),
        shared_(SharedCarver(shared_memory())),
        warp_(thread_index() / 32),
        lane_(thread_index() % 32),
        head_(block_index() % p.Hkv),
        chunk_(block_index() / p.Hkv),
        piece_(find_piece(p.pieces, chunk_)) {}

  // ---- loads of 32 columns ----

  // Those of a tensor that the lane reads, of one of the warp's tokens after the other. Addresses
  // are added up: to multiply them takes longer than all else.
  template <class T>
  struct Elements {
    const T* at;
    int64_t step;
    DEV void go_on() { at += step; }
  };
  template <class T>
  DEV Elements<T> elements(const View& x, int64_t c) const {
    return {at_piece<const T>(x, piece_, head_) + first_token() * x.time + c * x.dim,
            tokens_on() * x.time};
  }

  // A warp has every kBlocks'th step, all of which are the same part of their tokens: the first
  // token, and how far it is from one to the next.
  DEV int part() const { return erases ? p_.part_of(warp_) : 0; }
  DEV int first_token() const { return erases ? p_.token_of(warp_) : warp_; }
  DEV int tokens_on() const { return erases ? p_.token_of(kBlocks) : kBlocks; }
  static_assert(kBlocks % 2 == 0);

  // dy, W and U. Adds to beta_dots if `first_time`.
  DEV void load_columns(int64_t column, bool first_time) const {
    const int64_t c = column + lane_;
    Elements<Scalar> dy = elements<Scalar>(p_.upstream.dy, c), v = elements<Scalar>(p_.v, c);
    Elements<float> errors = elements<float>(p_.upstream.errors, c);
    const int64_t row = part() * p_.B * p_.T + piece_.batch * p_.T + piece_.begin + first_token();
    Elements<float> d = {p_.write_gradients + (row * p_.Hkv + head_) * p_.V + c,
                         tokens_on() * p_.Hkv * p_.V};
    const int tokens = c < p_.V ? int(piece_.end - piece_.begin) : 0;
    const bool* const mask =
        p_.key_mask ? p_.key_mask + piece_.batch * p_.T + piece_.begin : nullptr;
    const bool reads = p_.upstream.dy.data && (!erases || part() == p_.steps() - 1);
    const bool asks = p_.delta && part() == 0;
    int token = first_token();
    UNROLL_BY(4)
    for (int step = warp_; step < C; step += kBlocks, token += tokens_on()) {
      float of_y = 0, of_write = 0, error = 0;
      if (token < tokens && (!mask || mask[token])) {
        if (reads) of_y = to_float(*dy.at);
        of_write = *d.at;
        error = asks ? *errors.at : to_float(*v.at);
      }
      dy.go_on(), v.go_on(), errors.go_on(), d.go_on();
      const float beta = shared_.numbers.beta[step];
      set(shared_.dy, step, of_y);
      set(shared_.w, step, beta * of_write);
      set(shared_.u, step, beta * error);
      if (!first_time) continue;
      float dot = error * of_write;
      for (int lanes = 16; lanes > 0; lanes /= 2) dot += shuffle_xor(dot, lanes);
      if (lane_ == 0) shared_.beta_dots[step] += dot;
    }
  }

  // S and dS' of 32 channels; adds to end_dots, which start with the first columns.
  DEV void load_states(int64_t channel, int64_t column) const {
    const int64_t size = p_.K * p_.V, here = p_.chunk_and_head(chunk_, head_);
    const int64_t last =
        p_.pieces.first_piece(piece_.sequence) + p_.pieces.num_pieces(piece_.sequence) - 1;
    const float* const states = p_.states + here * size;
    const float* const gradients = p_.state_gradients + here * size;
    const float* const after = chunk_ == last ? static_cast<const float*>(p_.upstream.state) +
                                                    p_.chunk_and_head(piece_.sequence, head_) * size
                                              : states + p_.Hkv * size;
    const int64_t c = column + lane_;
    const int channels = c < p_.V ? int(p_.K - channel) : 0;
    int64_t at = (channel + warp_) * p_.V + c;
    UNROLL_BY(4)
    for (int i = warp_; i < kSlabChannels; i += kBlocks, at += kBlocks * p_.V) {
      const bool there = i < channels;
      const float gradient = there ? gradients[at] : 0;
      set(shared_.state, i, there ? states[at] : 0);
      set(shared_.gradient, i, gradient);
      float dot = there ? after[at] * gradient : 0;
      for (int lanes = 16; lanes > 0; lanes /= 2) dot += shuffle_xor(dot, lanes);
      if (lane_ == 0) shared_.end_dots[i] = (column == 0 ? 0 : shared_.end_dots[i]) + dot;
    }
  }

  template <class Tile>
  DEV void set(const Tile& tile, int row, float x) const {
    tile.data[row * Tile::kStride + lane_] = from_float<Element>(x);
  }

  // ---- the decay's gradient ----

  // asked: what the sum loses behind a token, with `erases`.
  DEV void store_channel_decays(int64_t channel, const OwnChannel& parts,
                                const OwnChannel& asked) const {
    const Slab<Scalar, erases>& slab = shared_.slab;
    const int first = warp_ * kBlock, own = warp_ * kSlabChannels + lane_;
    float sum = 0, reset = 0;
    UNROLL
    for (int i = kBlock - 1; i >= 0; --i) {
      sum += parts[i];
      if (slab.a.get(first + i, lane_) == 0) sum = 0, reset = 1;
      if (erases) sum -= asked[i];
    }
    shared_.sums[own] = sum, shared_.resets[own] = reset;
    sync_block();
    sum = shared_.end_dots[lane_];
    for (int block = kBlocks - 1; block > warp_; --block) {
      const int at = block * kSlabChannels + lane_;
      sum = shared_.sums[at] + (shared_.resets[at] != 0 ? 0 : sum);
    }
    const View& to = p_.gradients.dlog_decay;
    float* const rows = at_piece<float>(to, piece_, head_) + (channel + lane_) * to.dim;
    UNROLL
    for (int i = kBlock - 1; i >= 0; --i) {
      const int step = first + i, token = token_of(step);
      sum += parts[i];
      if (slab.a.get(step, lane_) == 0) sum = 0;
      if (channel + lane_ < p_.K && piece_.begin + token < piece_.end && part_of(step) == 0) {
        rows[token * to.time] = p_.present(piece_, step) ? sum : 0;
      }
      if (erases) sum -= asked[i];
    }
  }

  DEV void add_head_decays(const OwnChannel& parts, const OwnChannel& asked) const {
    add_to_head(shared_.head_sums, parts);
    if (erases) add_to_head(shared_.head_asks, asked);
    float end = shared_.end_dots[lane_];
    for (int lanes = 16; lanes > 0; lanes /= 2) end += shuffle_xor(end, lanes);
    if (thread_index() == 0) *shared_.head_end += end;
  }

  DEV void add_to_head(float* sums, const OwnChannel& parts) const {
    UNROLL
    for (int i = 0; i < kBlock; ++i) {
      float sum = parts[i];
      for (int lanes = 16; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
      if (lane_ == 0) sums[warp_ * kBlock + i] += sum;
    }
  }

  DEV void store_head_decays() const {
    if (thread_index() == 0) {
      float sum = *shared_.head_end;
      for (int token = C - 1; token >= 0; --token) {
        sum += shared_.head_sums[token];
        if (shared_.slab.a.get(token, 0) == 0) sum = 0;
        shared_.head_sums[token] = sum;
        if (erases) sum -= shared_.head_asks[token];
      }
    }
    sync_block();
    store_numbers(p_.gradients.dlog_decay, shared_.head_sums);
  }

  DEV void store_numbers(const View& to, const float* numbers) const {
    const int step = thread_index(), token = token_of(step);
    if (step >= C || piece_.begin + token >= piece_.end || part_of(step) != 0) return;
    at_piece<float>(to, piece_, head_)[token * to.time] =
        p_.present(piece_, step) ? numbers[step] : 0;
  }
  DEV int token_of(int step) const { return erases ? p_.token_of(step) : step; }
  DEV int part_of(int step) const { return erases ? p_.part_of(step) : 0; }

  const DeltaRuleChunks& p_;
  const Shared shared_;
  const int warp_, lane_;
  const int64_t head_, chunk_;
  const Piece piece_;
};

}  // namespace hfla::cuda
