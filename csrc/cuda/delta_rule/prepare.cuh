// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// All chunks at a time: what tokens of a chunk are to each other and to its bounds, as units for
// the walks (chunk.cuh). A block has a chunk and a head, and goes over 32 channels at a time; sums
// over channels stay in registers.
//
// Where two blocks of 16 tokens meet, A and N are products of matrices. Within a block they are
// sums by single threads, in float32: a key goes on from token to token, and is decayed by each.
// Of the 136 pairs of a block a lane has those of keys j and 15 - j, which are 17 for every j, in a
// fourth of the channels.
#pragma once

#include "cuda/delta_rule/inverse.cuh"
#include "cuda/delta_rule/tokens.cuh"

namespace hfla::cuda {

template <class Scalar, bool erases>
struct PrepareShared {
  static constexpr int C = Chunk<Scalar>::C;
  using Matrix = typename Inverse<C>::Matrix;
  TokenNumbers numbers;
  Slab<Scalar, erases> slab;  // or else, afterwards:
  Matrix a, n, inverse;
  int64_t bytes;

  BOTH explicit PrepareShared(SharedCarver carver) : numbers(carver, C), slab(carver) {
    const int64_t first = carver.used();
    SharedCarver again = carver;
    again.take_back(numbers_bytes());
    again.take_tile(a, C);
    again.take_tile(n, C);
    again.take_tile(inverse, C);
    bytes = first > again.used() ? first : again.used();
  }
  BOTH static int64_t numbers_bytes() { return 3 * C * int64_t(sizeof(float)); }
};

template <class Scalar, bool erases>
class Prepare {
  using Shared = PrepareShared<Scalar, erases>;
  using Operands = typename Chunk<Scalar>::Operands;
  using Element = typename Chunk<Scalar>::Element;
  using Layout = UnitLayout<Scalar>;
  static constexpr int C = Chunk<Scalar>::C, kBlocks = Chunk<Scalar>::kBlocks;
  static constexpr int kBlock = kBlockTokens, kPairs = kBlocks * (kBlocks - 1) / 2;
  static constexpr int kMeetings = 2 * kPairs / kBlocks;  // of a warp: each pair with q and with k

 public:
  DEV explicit Prepare(const DeltaRuleChunks& p)
      : p_(p),
        shared_(SharedCarver(shared_memory())),
        warp_(thread_index() / 32),
        lane_(thread_index() % 32),
        head_(block_index() % p.Hkv),
        chunk_(block_index() / p.Hkv),
        piece_(find_piece(p.pieces, chunk_)) {}

  DEV void run() {
    if (piece_.sequence < 0) return;
    load_token_numbers<Scalar>(p_, piece_, head_, shared_.numbers);
    sync_block();
    const int64_t slabs = Units(p_.K).slabs * (kUnitChannels / kSlabChannels);
    for (int64_t slab = 0; slab < slabs; ++slab) {
      shared_.slab.load(p_, piece_, head_, slab * kSlabChannels, shared_.numbers);
      shared_.slab.decay_block();
      sync_block();
      if (Slab<Scalar, erases>::kTwice) {
        shared_.slab.decay_to_the_middle();
        sync_block();
      }
      store_rows(slab);
      if (slab * kSlabChannels < p_.K) {
        meet_others();
        meet_own_block();
      }
      sync_block();  // all have done with the slab
    }
    collect_scores();
    sync_block();
    store_scores();
  }

 private:
  // A lane's keys of a block, and its channels.
  DEV int first_key() const { return lane_ % 8; }
  DEV int first_channel() const { return lane_ / 8 * (kSlabChannels / 4); }

  // ---- to device memory ----

  DEV Element* tile_of(int64_t unit, int tile) const {
    return reinterpret_cast<Element*>(p_.template unit<Scalar>(chunk_, head_, unit)) +
           tile * Layout::kTile;
  }
  DEV float* tail_of(int64_t unit) const { return reinterpret_cast<float*>(tile_of(unit, 2)); }

  // Of 32 channels: F, Q, L and the chunk's decay.
  DEV void store_rows(int64_t slab) const {
    const Units units(p_.K);
    const int64_t wide_slab = slab / 2, pair = wide_slab / 2;
    const int column = int(slab % 2) * kSlabChannels + lane_, first = warp_ * kBlock;
    Element* const f = tile_of(wide_slab, 0) + column;
    Element* const q = tile_of(wide_slab, 1) + column;
    Element* const last = tile_of(units.of_last_keys(pair), int(wide_slab % 2)) + column;
    const Slab<Scalar, erases>& s = shared_.slab;
    float from = s.before(warp_, lane_), to = s.behind(warp_, lane_);
    UNROLL_BY(4)
    for (int i = first; i < first + kBlock; ++i) {
      const float before = from;
      from *= s.a.get(i, lane_);
      const float asking = (erases ? before : from) * s.asking().get(i, lane_);
      if (p_.delta) f[i * kUnitChannels] = from_float<Element>(asking);
      q[i * kUnitChannels] = from_float<Element>(from * s.q.get(i, lane_));
    }
    UNROLL_BY(4)
    for (int i = first + kBlock - 1; i >= first; --i) {
      last[i * kUnitChannels] = from_float<Element>(to * s.k.get(i, lane_));
      to *= s.a.get(i, lane_);
    }
    if (warp_ != 0) return;
    const float whole = s.before(kBlocks, lane_);
    tail_of(wide_slab)[column] = whole;
    tail_of(units.of_last_keys(pair))[wide_slab % 2 * kUnitChannels + column] = whole;
  }

  DEV void store_scores() const {
    const Units units(p_.K);
    Element* const m = tile_of(units.of_scores(), 0);
    Element* const a = tile_of(units.of_scores(), 1);
    for (int e = thread_index(); e < C * C; e += Chunk<Scalar>::kThreads) {
      const int i = e / C, j = e % C;
      a[i * kUnitChannels + j] = from_float<Element>(shared_.a.get(i, j));
      if (p_.delta) m[i * kUnitChannels + j] = from_float<Element>(shared_.inverse.get(i, j));
    }
  }

  // ---- scores ----

  struct Meeting {
    int later, earlier;  // blocks
    bool of_keys;        // N, else A
  };
  DEV Meeting meeting(int i) const {
    const int index = i * kBlocks + warp_, pair = index / 2;
    // All pairs with the first blocks, by twos: (1, 0), (3, 2), (2, 0), (2, 1), (3, 0), (3, 1).
    const int later = pair == 0 ? 1 : pair == 1 ? 3 : pair / 2 + 1;
    const int earlier = pair == 0 ? 0 : pair == 1 ? 2 : pair % 2;
    return {later, earlier, index % 2 == 1};
  }

  DEV void meet_others() {
    const Slab<Scalar, erases>& s = shared_.slab;
    UNROLL
    for (int i = 0; i < kMeetings; ++i) {
      const Meeting m = meeting(i);
      if (m.of_keys && !p_.delta) continue;
      const auto rows = m.of_keys ? s.k_rows : s.q_rows;
      const int row = s.row_of_later(m.later, m.earlier);
      const int column = s.row_of_earlier(m.later, m.earlier);
      add_product<Operands>(
          blocks_[i], kSlabChannels, [&](int k) { return Operands::load_a(rows, row, k); },
          [&](auto& b, int k, int c) {
            Operands::load_b_transposed(b, s.k_columns, k, column + c);
          });
    }
  }

  DEV void meet_own_block() {
    const Slab<Scalar, erases>& s = shared_.slab;
    const int first = warp_ * kBlock;
    NO_UNROLL
    for (int c = first_channel(); c < first_channel() + kSlabChannels / 4; ++c) {
      const float other = s.k.get(first + kBlock - 1 - first_key(), c);
      float key = s.k.get(first + first_key(), c);
      UNROLL
      for (int n = 0; n <= kBlock; ++n) {
        const bool second = n >= kBlock - first_key();  // of the two keys
        const int i = first + (second ? n - 1 : first_key() + n);
        const bool itself = n == 0 || n == kBlock - first_key();
        const float before = key;
        key = itself ? (second ? other : key) : key * s.a.get(i, c);
        own_a_[n] += s.q.get(i, c) * key;
        own_n_[n] += s.asking().get(i, c) * (erases ? before : key);
      }
    }
  }

  // All of A, and the inverse of 1 + N β, in shared memory.
  DEV void collect_scores() {
    for (int e = thread_index(); e < C * C; e += Chunk<Scalar>::kThreads) {
      shared_.a.data[e / C * Shared::Matrix::kStride + e % C] = 0;
      shared_.n.data[e / C * Shared::Matrix::kStride + e % C] = 0;
    }
    sync_block();
    const auto [g, t] = lane();
    UNROLL
    for (int i = 0; i < kMeetings; ++i) {
      const Meeting m = meeting(i);
      UNROLL
      for (int e = 0; e < 8; ++e) {
        const int row = m.later * kBlock + g + e % 4 / 2 * 8;
        const int column = m.earlier * kBlock + e / 4 * 8 + 2 * t + e % 2;
        set_score(m.of_keys, row, column, blocks_[i][e / 4][e % 4]);
      }
    }
    UNROLL
    for (int n = 0; n <= kBlock; ++n) {
      const bool second = n >= kBlock - first_key();
      const int j = second ? kBlock - 1 - first_key() : first_key();
      const int i = second ? n - 1 : first_key() + n;
      for (int lanes = 8; lanes < 32; lanes *= 2) {
        own_a_[n] += shuffle_xor(own_a_[n], lanes);
        own_n_[n] += shuffle_xor(own_n_[n], lanes);
      }
      if (lane_ >= 8) continue;
      set_score(false, warp_ * kBlock + i, warp_ * kBlock + j, own_a_[n]);
      if (i > j) set_score(true, warp_ * kBlock + i, warp_ * kBlock + j, own_n_[n]);
    }
    if (p_.delta) Inverse<C>::find(shared_.n, shared_.inverse);
  }

  DEV void set_score(bool of_keys, int i, int j, float x) const {
    const auto& tile = of_keys ? shared_.n : shared_.a;
    const float factor = of_keys ? shared_.numbers.beta[p_.backward ? i : j] : 1;
    tile.data[i * Shared::Matrix::kStride + j] = factor * x;
  }

  const DeltaRuleChunks& p_;
  const Shared shared_;
  const int warp_, lane_;
  const int64_t head_, chunk_;
  const Piece piece_;
  float blocks_[kMeetings][2][4] = {};
  float own_a_[kBlock + 1] = {}, own_n_[kBlock + 1] = {};
};

template <class Scalar, bool erases>
KERNEL LAUNCH_BOUNDS(Chunk<Scalar>::kThreads, 2)
    delta_prepare_kernel(const GRID_CONSTANT DeltaRuleChunks p) {
  Prepare<Scalar, erases>(p).run();
}

}  // namespace hfla::cuda
