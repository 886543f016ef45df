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
#include "cuda/delta_rule/walk_rows.cuh"

namespace hfla::cuda {

enum class Pass { outputs, states, gradients };

template <class Scalar, int columns>
struct DeltaWalkShared {
  static constexpr int C = Chunk<Scalar>::C;
  using Rows = typename TokenRows<Scalar, columns>::Shown;
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
  // A warp has 16 tokens and a part of the columns; of the state, all columns of every fourth strip
  // of 16 channels.
  using Tokens = TokenRows<Scalar, kColumns>;
  using Values = typename Tokens::Values;
  static constexpr int kTiles = std::extent_v<Values>, kStateTiles = kColumns / 8;
  static constexpr bool kBackwards = pass == Pass::gradients;

 public:
  DEV explicit DeltaWalk(const DeltaRuleChunks& p)
      : p_(p),
        shared_(SharedCarver(shared_memory()), p.K),
        warp_(thread_index() / 32),
        g_(lane().g),
        t_(lane().t),
        first_column_(block_index() % column_blocks(p) * kColumns),
        head_(block_index() / column_blocks(p) % p.Hkv),
        sequence_(block_index() / column_blocks(p) / p.Hkv),
        chunks_(p.pieces.num_pieces(sequence_)),
        stream_(shared_.units),
        rows_(p, head_, first_column_) {}

  DEV void run(const void* from, void* to) {
    stream_.start(*this);
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
  DEV static int64_t column_blocks(const DeltaRuleChunks& p) {
    return (p.V + kColumns - 1) / kColumns;
  }

  DEV int64_t chunk_index(int64_t i) const {
    return p_.pieces.first_piece(sequence_) + (kBackwards ? chunks_ - 1 - i : i);
  }

  DEV void enter_chunk(int64_t i) {
    chunk_ = chunk_index(i);
    const int64_t length = p_.pieces.length, index = chunk_ - p_.pieces.first_piece(sequence_);
    const int64_t begin = p_.pieces.sequence_begin(sequence_) + index * length;
    const int64_t end = p_.pieces.sequence_end(sequence_);
    rows_.enter({sequence_, p_.pieces.cu_seqlens ? 0 : sequence_, begin,
                 begin + length < end ? begin + length : end});
  }

  DEV static void clear(Values& values) {
    UNROLL
    for (int n = 0; n < kTiles; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) values[n][i] = 0;
    }
  }

  // ---- products for the warp's tokens ----

  // values += keys S, of the channels from `first` on that a tile of a unit has.
  template <class Keys>
  DEV void read_state(Values& values, const Keys& keys, int64_t first) const {
    const int64_t left = (p_.K - first + 15) / 16 * 16;
    add_product<Operands>(
        values, int(left < kUnitChannels ? left : kUnitChannels),
        [&](int k) { return Operands::load_a(keys, rows_.first_token(), k); },
        [&](auto& b, int k, int c) {
          load_b_of_floats<Operands>(b, shared_.state, int(first) + k, rows_.part() + c);
        });
  }

  // values += weights others, the weights being lower triangular.
  template <class Weights>
  DEV void mix(Values& values, const Weights& weights, const typename Tokens::Shown& others) const {
    add_product<Operands>(
        values, rows_.first_token() + 16,
        [&](int k) { return Operands::load_a(weights, rows_.first_token(), k); },
        [&](auto& b, int k, int c) { Operands::load_b(b, others, k, rows_.part() + c); });
  }

  // values += weightsᵀ others.
  template <class Weights>
  DEV void mix_back(Values& values, const Weights& weights,
                    const typename Tokens::Shown& others) const {
    const int first = rows_.first_token();
    add_product<Operands>(
        values, C - first,
        [&](int k) { return load_a_transposed<Operands>(weights, first, first + k); },
        [&](auto& b, int k, int c) { Operands::load_b(b, others, first + k, rows_.part() + c); });
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
                      const typename Tokens::Shown& rows) const {
    add_product<Operands>(
        more, C, [&](int k) { return load_a_transposed<Operands>(keys, first, k); },
        [&](auto& b, int k, int c) { Operands::load_b(b, rows, k, c); });
  }

  // S' of S, with U in the second tile.
  DEV void write_last_keys(float* kept) {
    for (int64_t pair = 0; pair < Units(p_.K).pairs(); ++pair) {
      const Unit unit = stream_.next(*this);
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
    Values values, held, out;
    rows_.template load<Scalar>(p_.v, last_part(), values);
    clear(held);
    clear(out);
    for (int64_t slab = 0; slab < Units(p_.K).slabs; ++slab) {
      const Unit unit = stream_.next(*this);
      if (p_.delta) read_state(held, unit.first, slab * kUnitChannels);
      read_state(out, unit.second, slab * kUnitChannels);
    }
    if (p_.delta) {
      UNROLL
      for (int n = 0; n < kTiles; ++n) {
        UNROLL
        for (int i = 0; i < 4; ++i) held[n][i] = values[n][i] - held[n][i];
      }
      rows_.show(shared_.first, held, 1, 1);
      clear(values);
    }
    const Unit scores = stream_.next(*this);
    if (p_.delta) mix(values, scores.first, shared_.first);
    if (p_.result.errors.data) rows_.template store<float>(p_.result.errors, 0, values);
    rows_.show(shared_.second, values, rows_.beta(0), rows_.beta(1));
    sync_block();
    mix(out, scores.second, shared_.second);
    rows_.template store<Scalar>(p_.result.y, last_part(), out);
    write_last_keys(nullptr);
  }

  DEV void visit_for_states() {
    Values errors;
    if (p_.delta) {
      rows_.template load<float>(p_.upstream.errors, 0, errors);
    } else {
      rows_.template load<Scalar>(p_.v, 0, errors);
    }
    if (p_.add_along.data) {  // what the others write
      Values values;
      rows_.template load<Scalar>(p_.v, last_part(), values);
      UNROLL
      for (int n = 0; n < kTiles; ++n) {
        UNROLL
        for (int i = 0; i < 4; ++i) errors[n][i] += values[n][i];
      }
    }
    sync_block();  // all have done with the second tile
    rows_.show(shared_.second, errors, rows_.beta(0), rows_.beta(1));
    write_last_keys(p_.states);
  }

  DEV void visit_for_gradients() {
    Values dy, of_writes;
    rows_.template load<Scalar>(p_.upstream.dy, last_part(), dy);
    clear(of_writes);
    const Units units(p_.K);
    for (int64_t pair = units.pairs() - 1; pair >= 0; --pair) {
      const Unit unit = stream_.next(*this);
      const int64_t channel = pair * 2 * kUnitChannels;
      read_state(of_writes, unit.first, channel);
      if (channel + kUnitChannels < p_.K) {
        read_state(of_writes, unit.second, channel + kUnitChannels);
      }
    }
    rows_.show(shared_.first, dy, 1, 1);
    const Unit scores = stream_.next(*this);
    mix_back(of_writes, scores.second, shared_.first);
    if (p_.delta) {
      rows_.show(shared_.second, of_writes, 1, 1);
      sync_block();
      clear(of_writes);
      mix_back(of_writes, scores.first, shared_.second);
      rows_.show(shared_.third, of_writes, -rows_.beta(0), -rows_.beta(1));
    }
    for (int part = 0; part < p_.steps(); ++part) {
      rows_.template store<float>(write_gradients(part), part, of_writes);
    }
    UNROLL
    for (int n = 0; n < kTiles; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) of_writes[n][i] *= rows_.beta(i / 2);
    }
    rows_.template store<Scalar>(p_.gradients.dv, last_part(), of_writes);
    for (int64_t slab = units.slabs - 1; slab >= 0; --slab) {
      const Unit unit = stream_.next(*this);
      const int64_t channel = slab * kUnitChannels + 16 * warp_;
      if (channel >= p_.K) continue;
      float more[kStateTiles][4] = {};
      write_rows(more, unit.second, 16 * warp_, shared_.first);
      if (p_.delta) write_rows(more, unit.first, 16 * warp_, shared_.third);
      update_rows(channel, unit.decay + 16 * warp_, more, p_.state_gradients);
    }
  }

  // A contiguous tensor (B, T, Hv, V).
  DEV View write_gradients(int part) const {
    const int64_t token = p_.Hkv * p_.V, row = p_.T * token;
    return {p_.write_gradients + part * p_.B * row, row, token, p_.V, 1};
  }
  DEV int last_part() const { return p_.steps() - 1; }

  const DeltaRuleChunks& p_;
  const Shared shared_;
  const int warp_, g_, t_;
  const int64_t first_column_, head_, sequence_, chunks_;
  int64_t chunk_ = 0;
  UnitStream<Scalar> stream_;
  Tokens rows_;
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
  DeltaWalk<Scalar, columns, Pass::gradients>(p).run(p.upstream.dstate, p.gradients.dinitial_state);
}

}  // namespace hfla::cuda
