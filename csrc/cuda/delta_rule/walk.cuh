// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What goes from chunk to chunk, in the words of chunk.cuh. A block has a sequence, a head and some
// columns of its state, which it keeps in shared memory in float32; columns know nothing of each
// other. Three passes:
//
//     outputs     E = M (V - F S)    U = β E    y = Q S + A U    S' = from_C S + Lᵀ U
//     states      S' = from_C S + Lᵀ U with U known, and S of every chunk to device memory
//     gradients   from the last chunk to the first, with dy, and dS' to device memory:
//                 dU = L dS' + Aᵀ dy    D = Mᵀ dU    dv = W = β D
//                 dS = from_C dS' + Qᵀ dy - Fᵀ W
//
// M of the gradients is (1 + β N)⁻¹, so that D is the gradient of U with all that follows from it,
// which β's gradient needs where β is 0.
#pragma once

#include "cuda/delta_rule/stream.cuh"

namespace hfla::cuda {

constexpr int kDeltaWalkThreads = 128, kDeltaWalkWarps = kDeltaWalkThreads / 32;

enum class Pass { outputs, states, gradients };

template <class Scalar, int columns>
struct DeltaWalkShared {
  static constexpr int C = Chunk<Scalar>::C;
  using Element = typename Chunk<Scalar>::Element;
  using Rows = Tile<Element, C, columns>;
  char* units;
  Tile<float, 16, columns> state;  // as many rows as there are channels, in 16s
  Rows first, second, third;       // of the tokens
  int64_t bytes;

  BOTH DeltaWalkShared(SharedCarver carver, int64_t K) {
    units = carver.take<char>(kUnitPlaces * UnitTiles<Scalar>::kBytes);
    carver.take_tile(state, (K + 15) / 16 * 16);
    carver.take_tile(first, C);
    carver.take_tile(second, C);
    carver.take_tile(third, C);
    bytes = carver.used();
  }
};

template <class Scalar, int kColumns, Pass pass>
class DeltaWalk {
  using Operands = typename Chunk<Scalar>::Operands;
  using Shared = DeltaWalkShared<Scalar, kColumns>;
  using Unit = UnitTiles<Scalar>;
  static constexpr int C = Chunk<Scalar>::C;
  // A warp has a strip of 16 tokens and a part of the columns; of the state, all columns of every
  // fourth strip of 16 channels.
  static constexpr int kStrips = C / 16, kParts = kDeltaWalkWarps / kStrips;
  static constexpr int kTiles = kColumns / kParts / 8, kStateTiles = kColumns / 8;
  static constexpr bool kBackwards = pass == Pass::gradients;
  using Rows = float[kTiles][4];

 public:
  DEV explicit DeltaWalk(const DeltaRuleChunks& p)
      : p_(p),
        shared_(SharedCarver(shared_memory()), p.K),
        stream_(shared_.units, *this),
        warp_(thread_index() / 32),
        g_(lane().g),
        t_(lane().t) {
    const int64_t column_blocks = (p.V + kColumns - 1) / kColumns;
    first_column_ = block_index() % column_blocks * kColumns;
    head_ = block_index() / column_blocks % p.Hkv;
    sequence_ = block_index() / column_blocks / p.Hkv;
    chunks_ = p.pieces.num_pieces(sequence_);
  }

  DEV void run(const void* from, void* to) {
    stream_.start_first();
    load_state(static_cast<const float*>(from));
    for (int64_t i = 0; i < chunks_; ++i) {
      enter_chunk(i);
      if constexpr (pass == Pass::outputs) visit_for_outputs();
      if constexpr (pass == Pass::states) visit_for_states();
      if constexpr (pass == Pass::gradients) visit_for_gradients();
    }
    store_state(static_cast<float*>(to));
  }

  // The i'th of all units, in the order in which the pass needs them (stream.cuh).
  DEV FoundUnit find_unit(int64_t i) const {
    const Units units(p_.K);
    const int64_t of_chunk = pass == Pass::states ? units.pairs() : units.per_chunk();
    if (i >= chunks_ * of_chunk) return {nullptr, false};
    int64_t unit = i % of_chunk;
    if (pass == Pass::states) unit = units.of_last_keys(unit);
    if (kBackwards) unit = of_chunk - 1 - unit;
    return {p_.template unit<Scalar>(chunk_index(i / of_chunk), head_, unit),
            p_.delta || unit > units.of_scores()};
  }

 private:
  DEV int64_t chunk_index(int64_t i) const {
    return p_.pieces.first_piece(sequence_) + (kBackwards ? chunks_ - 1 - i : i);
  }

  DEV void enter_chunk(int64_t i) {
    chunk_ = chunk_index(i);
    const int64_t begin = p_.pieces.sequence_begin(sequence_) +
                          (chunk_ - p_.pieces.first_piece(sequence_)) * C;
    const int64_t end = p_.pieces.sequence_end(sequence_);
    piece_ = {sequence_, p_.pieces.cu_seqlens ? 0 : sequence_, begin, begin + C < end ? begin + C : end};
    UNROLL
    for (int half = 0; half < 2; ++half) {
      present_[half] = p_.present(piece_, token(half));
      beta_[half] = present_[half] && p_.beta.data
                        ? at_piece<const float>(p_.beta, piece_, head_)[token(half) * p_.beta.time]
                        : 1;
    }
  }

  // ---- a warp's tokens and columns ----

  DEV int strip() const { return warp_ % kStrips; }
  DEV int token(int half) const { return strip() * 16 + g_ + 8 * half; }
  DEV int part() const { return warp_ / kStrips * (kColumns / kParts); }
  DEV int column(int tile) const { return part() + 8 * tile + 2 * t_; }  // and the next

  // Rows of a tensor (B, T, Hv, V), zero where there is no token.
  template <class T>
  DEV void load_rows(const View& view, Rows& rows) const {
    UNROLL
    for (int half = 0; half < 2; ++half) {
      const T* const row = row_of<const T>(view, half);
      UNROLL
      for (int n = 0; n < kTiles; ++n) {
        const int64_t c = first_column_ + column(n);
        float* const to = rows[n] + 2 * half;
        to[0] = to[1] = 0;
        if (!present_[half] || !view.data || c >= p_.V) continue;
        if (has_pair(row, view, c)) {
          const auto pair = *reinterpret_cast<const Run<T, 2>*>(row + c);
          to[0] = pair.get(0), to[1] = pair.get(1);
        } else {
          to[0] = to_float(row[c * view.dim]);
          if (c + 1 < p_.V) to[1] = to_float(row[(c + 1) * view.dim]);
        }
      }
    }
  }

  template <class T>
  DEV void store_rows(const View& view, const Rows& rows) const {
    UNROLL
    for (int half = 0; half < 2; ++half) {
      if (piece_.begin + token(half) >= piece_.end) continue;
      T* const row = row_of<T>(view, half);
      UNROLL
      for (int n = 0; n < kTiles; ++n) {
        const int64_t c = first_column_ + column(n);
        float pair[2] = {rows[n][2 * half], rows[n][2 * half + 1]};
        if (!present_[half]) pair[0] = pair[1] = 0;
        if (c >= p_.V) continue;
        if (has_pair(row, view, c)) {
          *reinterpret_cast<Run<T, 2>*>(row + c) = make_run<T>(pair);
        } else {
          row[c * view.dim] = from_float<T>(pair[0]);
          if (c + 1 < p_.V) row[(c + 1) * view.dim] = from_float<T>(pair[1]);
        }
      }
    }
  }

  template <class T>
  DEV T* row_of(const View& view, int half) const {
    return at_piece<T>(view, piece_, head_) + token(half) * view.time;
  }
  template <class T>
  DEV bool has_pair(const T* row, const View& view, int64_t c) const {
    return view.dim == 1 && c + 1 < p_.V &&
           reinterpret_cast<uintptr_t>(row + c) % (2 * sizeof(T)) == 0;
  }

  // A contiguous tensor of floats, (B, T, Hv, V).
  DEV View own_rows(float* data) const {
    return {data, p_.T * p_.Hkv * p_.V, p_.Hkv * p_.V, p_.V, 1};
  }

  DEV void show(const typename Shared::Rows& tile, const Rows& rows, const float (&factor)[2]) const {
    UNROLL
    for (int n = 0; n < kTiles; ++n) {
      UNROLL
      for (int half = 0; half < 2; ++half) {
        const float pair[2] = {factor[half] * rows[n][2 * half],
                               factor[half] * rows[n][2 * half + 1]};
        tile.set_run(token(half), column(n), pair);
      }
    }
  }
  DEV void show(const typename Shared::Rows& tile, const Rows& rows) const {
    show(tile, rows, {1, 1});
  }

  DEV static void clear(Rows& rows) {
    UNROLL
    for (int n = 0; n < kTiles; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) rows[n][i] = 0;
    }
  }

  // ---- products for the warp's tokens ----

  // rows += keys S, of the channels from `first` on that a tile of a unit has.
  template <class Keys>
  DEV void read_state(Rows& rows, const Keys& keys, int64_t first) const {
    const int64_t left = (p_.K - first + 15) / 16 * 16;
    add_product<Operands>(
        rows, int(left < kUnitChannels ? left : kUnitChannels),
        [&](int k) { return Operands::load_a(keys, strip() * 16, k); },
        [&](auto& b, int k, int c) {
          load_b_of_floats<Operands>(b, shared_.state, int(first) + k, part() + c);
        });
  }

  // rows += weights others, the weights being lower triangular.
  template <class Weights>
  DEV void mix(Rows& rows, const Weights& weights, const typename Shared::Rows& others) const {
    add_product<Operands>(
        rows, 16 * (strip() + 1),
        [&](int k) { return Operands::load_a(weights, strip() * 16, k); },
        [&](auto& b, int k, int c) { Operands::load_b(b, others, k, part() + c); });
  }

  // rows += weightsᵀ others.
  template <class Weights>
  DEV void mix_back(Rows& rows, const Weights& weights, const typename Shared::Rows& others) const {
    const int first = strip() * 16;
    add_product<Operands>(
        rows, C - first,
        [&](int k) { return load_a_transposed<Operands>(weights, first, first + k); },
        [&](auto& b, int k, int c) { Operands::load_b(b, others, first + k, part() + c); });
  }

  // ---- the state ----

  DEV int64_t state_row(int64_t r) const { return r * p_.V + first_column_; }

  DEV void load_state(const float* states) {
    const float* const from =
        states ? states + p_.chunk_and_head(sequence_, head_) * p_.K * p_.V : nullptr;
    const int64_t size = (p_.K + 15) / 16 * 16 * kColumns;
    for (int64_t e = thread_index(); e < size; e += kDeltaWalkThreads) {
      const int64_t r = e / kColumns, c = e % kColumns;
      const bool there = from && r < p_.K && first_column_ + c < p_.V;
      shared_.state.data[r * shared_.state.kStride + c] = there ? from[state_row(r) + c] : 0;
    }
  }

  DEV void store_state(float* states) {
    if (!states) return;
    sync_block();
    float* const to = states + p_.chunk_and_head(sequence_, head_) * p_.K * p_.V;
    for (int64_t e = thread_index(); e < p_.K * kColumns; e += kDeltaWalkThreads) {
      const int64_t r = e / kColumns, c = e % kColumns;
      if (first_column_ + c < p_.V) to[state_row(r) + c] = shared_.state.get(int(r), int(c));
    }
  }

  // The 16 rows from `first` on become decay times themselves plus `more`. What they were goes to
  // `kept`, an array (chunks, Hv, K, V), or nowhere.
  DEV void update_rows(int64_t first, const float* decay, const float (&more)[kStateTiles][4],
                       float* kept) {
    if (kept) kept += p_.chunk_and_head(chunk_, head_) * p_.K * p_.V;
    UNROLL
    for (int half = 0; half < 2; ++half) {
      const int64_t r = first + g_ + 8 * half;
      UNROLL
      for (int n = 0; n < kStateTiles; ++n) {
        const int c = 8 * n + 2 * t_;
        float* const at = shared_.state.data + r * shared_.state.kStride + c;
        const Run<float, 2> before = *reinterpret_cast<const Run<float, 2>*>(at);
        const float after[2] = {decay[g_ + 8 * half] * before.get(0) + more[n][2 * half],
                                decay[g_ + 8 * half] * before.get(1) + more[n][2 * half + 1]};
        *reinterpret_cast<Run<float, 2>*>(at) = make_run<float>(after);
        if (!kept || r >= p_.K) continue;
        if (first_column_ + c < p_.V) kept[state_row(r) + c] = before.get(0);
        if (first_column_ + c + 1 < p_.V) kept[state_row(r) + c + 1] = before.get(1);
      }
    }
  }

  // more += keysᵀ rows, for the 16 channels from `first` on of a unit's tile.
  template <class Keys>
  DEV void write_rows(float (&more)[kStateTiles][4], const Keys& keys, int first,
                      const typename Shared::Rows& rows) const {
    add_product<Operands>(
        more, C, [&](int k) { return load_a_transposed<Operands>(keys, first, k); },
        [&](auto& b, int k, int c) { Operands::load_b(b, rows, k, c); });
  }

  // S' of S, with U in the second tile.
  DEV void write_last_keys(float* kept) {
    for (int64_t pair = 0; pair < Units(p_.K).pairs(); ++pair) {
      const Unit unit = stream_.next();
      for (int s = warp_; s < 2 * kUnitChannels / 16; s += kDeltaWalkWarps) {
        const int64_t channel = pair * 2 * kUnitChannels + 16 * s;
        if (channel >= p_.K) break;
        float more[kStateTiles][4] = {};
        const int in_tile = 16 * s % kUnitChannels;
        write_rows(more, 16 * s < kUnitChannels ? unit.first : unit.second, in_tile,
                   shared_.second);
        update_rows(channel, unit.decay + 16 * s, more, kept);
      }
    }
  }

  // ---- passes ----

  DEV void visit_for_outputs() {
    Rows values, held, out;
    load_rows<Scalar>(p_.v, values);
    clear(held);
    clear(out);
    for (int64_t slab = 0; slab < Units(p_.K).slabs; ++slab) {
      const Unit unit = stream_.next();
      if (p_.delta) read_state(held, unit.first, slab * kUnitChannels);
      read_state(out, unit.second, slab * kUnitChannels);
    }
    if (p_.delta) {
      UNROLL
      for (int n = 0; n < kTiles; ++n) {
        UNROLL
        for (int i = 0; i < 4; ++i) held[n][i] = values[n][i] - held[n][i];
      }
      show(shared_.first, held);
      clear(values);
    }
    const Unit scores = stream_.next();
    if (p_.delta) mix(values, scores.first, shared_.first);
    if (p_.result.errors.data) store_rows<float>(p_.result.errors, values);
    show(shared_.second, values, beta_);
    sync_block();
    mix(out, scores.second, shared_.second);
    store_rows<Scalar>(p_.result.y, out);
    write_last_keys(nullptr);
  }

  DEV void visit_for_states() {
    Rows errors;
    if (p_.delta) {
      load_rows<float>(p_.upstream.errors, errors);
    } else {
      load_rows<Scalar>(p_.v, errors);
    }
    sync_block();  // all have done with the second tile
    show(shared_.second, errors, beta_);
    write_last_keys(p_.states);
  }

  DEV void visit_for_gradients() {
    Rows dy, of_writes;
    load_rows<Scalar>(p_.upstream.dy, dy);
    clear(of_writes);
    const Units units(p_.K);
    for (int64_t pair = units.pairs() - 1; pair >= 0; --pair) {
      const Unit unit = stream_.next();
      const int64_t channel = pair * 2 * kUnitChannels;
      read_state(of_writes, unit.first, channel);
      if (channel + kUnitChannels < p_.K) {
        read_state(of_writes, unit.second, channel + kUnitChannels);
      }
    }
    show(shared_.first, dy);
    const Unit scores = stream_.next();
    mix_back(of_writes, scores.second, shared_.first);
    if (p_.delta) {
      show(shared_.second, of_writes);
      sync_block();
      clear(of_writes);
      mix_back(of_writes, scores.first, shared_.second);
      show(shared_.third, of_writes, {-beta_[0], -beta_[1]});
    }
    store_rows<float>(own_rows(p_.write_gradients), of_writes);
    UNROLL
    for (int n = 0; n < kTiles; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) of_writes[n][i] *= beta_[i / 2];
    }
    store_rows<Scalar>(p_.gradients.dv, of_writes);
    for (int64_t slab = units.slabs - 1; slab >= 0; --slab) {
      const Unit unit = stream_.next();
      const int64_t channel = slab * kUnitChannels + 16 * warp_;
      if (channel >= p_.K) continue;
      float more[kStateTiles][4] = {};
      write_rows(more, unit.second, 16 * warp_, shared_.first);
      if (p_.delta) write_rows(more, unit.first, 16 * warp_, shared_.third);
      update_rows(channel, unit.decay + 16 * warp_, more, p_.state_gradients);
    }
  }

  const DeltaRuleChunks& p_;
  const Shared shared_;
  UnitStream<Scalar, kDeltaWalkThreads, DeltaWalk> stream_;
  const int warp_, g_, t_;
  int64_t first_column_, head_, sequence_, chunks_;
  int64_t chunk_ = 0;
  Piece piece_;
  bool present_[2];
  float beta_[2];
};

template <class Scalar, int columns>
KERNEL LAUNCH_BOUNDS(kDeltaWalkThreads, 2)
    delta_outputs_kernel(const GRID_CONSTANT DeltaRuleChunks p) {
  DeltaWalk<Scalar, columns, Pass::outputs>(p).run(p.initial_state, p.result.state);
}

template <class Scalar, int columns>
KERNEL LAUNCH_BOUNDS(kDeltaWalkThreads, 2)
    delta_states_kernel(const GRID_CONSTANT DeltaRuleChunks p) {
  DeltaWalk<Scalar, columns, Pass::states>(p).run(p.initial_state, nullptr);
}

template <class Scalar, int columns>
KERNEL LAUNCH_BOUNDS(kDeltaWalkThreads, 2)
    delta_gradients_kernel(const GRID_CONSTANT DeltaRuleChunks p) {
  DeltaWalk<Scalar, columns, Pass::gradients>(p).run(p.upstream.dstate,
                                                     p.gradients.dinitial_state);
}

}  // namespace hfla::cuda
