// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// One block's walk through its piece: the state in registers, and chunk after chunk of tokens. All
// that waits for other warps is in this file.
#pragma once

#include "cuda/linear_attention/feature_maps.cuh"
#include "cuda/linear_attention/walk.cuh"

namespace hfla::cuda {

template <class Scalar, class S>
class Walker {
  using Operands = typename OperandsOf<Scalar>::Type;
  using Element = typename Operands::Element;
  static constexpr int kDepth = Operands::kDepth;
  static constexpr int C = S::C, R = S::R, N = S::N;
  static constexpr int kTilesN = N / 8;
  static constexpr int kTogether = kDepth / 8;  // operands b that are loaded at once
  // Steps of kDepth tokens that tensor cores sum up, of which a warp keeps operands a in registers.
  static constexpr int kMostSumSteps = 64 / int(sizeof(typename Operands::A));
  static constexpr int kSumSteps = C / kDepth < kMostSumSteps ? C / kDepth : kMostSumSteps;
  static constexpr int kSumTokens = kSumSteps * kDepth;

 public:
  static constexpr int kSharedBytes = WalkShared<Operands, S>::kBytes;

  DEV explicit Walker(const Walk& p)
      : p_(p),
        shared_(shared_memory()),
        place_(*shared_.place),
        decay_{p.log_decay.data ? shared_.decays : nullptr},
        warp_(thread_index() / 32),
        g_(lane().g),
        t_(lane().t) {
    if (thread_index() == 0) *shared_.place = find_place(p);
    sync_block();
  }

  DEV void run() {
    if (place_.piece.sequence < 0) return;
    const int64_t rows = p_.read.width() > p_.write.width() ? p_.read.width() : p_.write.width();
    for (row_begin_ = 0; row_begin_ < rows; row_begin_ += R) {
      rows_left_ = rows - row_begin_;
      load_state();
      float total_decay = 1;
      const int64_t length = place_.piece.end - place_.piece.begin;
      for (int64_t offset = 0; offset < length; offset += C) {
        // Backwards in time, the chunk that is not full is the first one still.
        const int64_t aligned = p_.reversed ? (length - 1) / C * C - offset : offset;
        chunk_ = place_.piece.begin + aligned;
        visit_chunk();
        total_decay *= decay_.between(0, C);
      }
      store_state();
      if (p_.piece_decays && thread_index() == 0) {
        p_.piece_decays[place_.piece_index * p_.Hkv + place_.kv_head] = total_decay;
      }
    }
  }

 private:
  DEV static Place find_place(const Walk& p) {
    const int64_t column_blocks = (p.values.columns + S::kColumns - 1) / S::kColumns;
    Place place;
    place.column_block = block_index() % column_blocks;
    place.head = block_index() / column_blocks % p.num_heads();
    place.piece_index = block_index() / column_blocks / p.num_heads();
    place.kv_head = p.reads_per_query() ? place.head / p.group() : place.head;
    place.piece = find_piece(p.pieces, place.piece_index);
    return place;
  }

  // ---- the state, of which a warp has the strips of 16 rows warp, warp + kWarps, ... ----

  DEV bool strip_exists(int strip) const { return strip < R / 16 && strip * 16 < rows_left_; }
  DEV int strip_of(int s) const { return warp_ + s * S::kWarps; }
  DEV int rows_here() const { return rows_left_ < R ? int(rows_left_) : R; }

  // The tile's last 8 columns are the normaliser and nothing.
  DEV bool has_normalizer() const { return p_.values.extra == Extra::one; }

  // Column c of the tile in the matrix of values, or its width if there is none.
  DEV int64_t global_column(int c) const {
    const int64_t n = place_.column_block * S::kColumns + c;
    if (c < S::kColumns) return n < p_.values.columns ? n : p_.values.width();
    return c == S::kColumns && has_normalizer() ? p_.values.columns : p_.values.width();
  }

  template <class Visit>
  DEV void for_each_state_element(Visit visit) {
    UNROLL
    for (int s = 0; s < S::kStrips; ++s) {
      if (!strip_exists(strip_of(s))) continue;
      UNROLL
      for (int n = 0; n < kTilesN; ++n) {
        UNROLL
        for (int i = 0; i < 4; ++i) {
          visit(strip_of(s) * 16 + g_ + 8 * (i / 2), 8 * n + 2 * t_ + i % 2, state_[s][n][i]);
        }
      }
    }
  }

  DEV float* element_of(const States& states, int r, int c) const {
    const int64_t n = global_column(c);
    if (r >= rows_left_ || n == p_.values.width()) return nullptr;
    const int64_t row = states.per_piece ? place_.piece_index : place_.piece.sequence;
    return state_element(p_, states, row, place_.kv_head, row_begin_ + r, n);
  }

  // In shared memory, for read_state.
  DEV void show_state() {
    UNROLL
    for (int s = 0; s < S::kStrips; ++s) {
      if (!strip_exists(strip_of(s))) continue;
      UNROLL
      for (int n = 0; n < kTilesN; ++n) {
        UNROLL
        for (int half = 0; half < 2; ++half) {
          const float pair[2] = {state_[s][n][2 * half], state_[s][n][2 * half + 1]};
          shared_.state.set_run(strip_of(s) * 16 + g_ + 8 * half, 8 * n + 2 * t_, pair);
        }
      }
    }
  }

  // Both through shared memory, where the tiles are otherwise: neighbouring threads then load and
  // store neighbours.
  DEV void load_state() {
    if (!p_.from.kv && !p_.from.z) {
      for_each_state_element([](int, int, float& x) { x = 0; });
      return;
    }
    sync_block();  // all have done with the tiles of the last walk
    NO_UNROLL
    for (int e = thread_index(); e < R * N; e += S::kThreads) {
      const float* const from = element_of(p_.from, e / N, e % N);
      shared_.staged.data[e / N * shared_.staged.kStride + e % N] = from ? *from : 0;
    }
    sync_block();
    for_each_state_element([&](int r, int c, float& x) { x = shared_.staged.get(r, c); });
  }

  DEV void store_state() {
    if (!p_.to.kv && !p_.to.z) return;
    if (p_.reads_per_query() && place_.head % p_.group() != 0)
      return;      // all of a group have the same
    sync_block();  // all have done with the tiles of the last chunk
    for_each_state_element(
        [&](int r, int c, float& x) { shared_.staged.data[r * shared_.staged.kStride + c] = x; });
    sync_block();
    NO_UNROLL
    for (int e = thread_index(); e < R * N; e += S::kThreads) {
      const int c = e % N;
      // All blocks have the normaliser's column; the first stores it.
      if (c == S::kColumns && place_.column_block != 0) continue;
      float* const to = element_of(p_.to, e / N, c);
      if (to) *to = shared_.staged.get(e / N, c);
    }
  }

  // ---- a chunk ----

  DEV void visit_chunk() {
    sync_block();  // all have done with the last one
    load_presence();
    sync_block();
    load_decays();
    if (p_.reads) show_state();
    UNROLL
    for (int n = 0; n < kTilesN; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) out_[n][i] = 0;
    }
    const int64_t writers = p_.write.per_query ? p_.group() : 1;
    for (int64_t i = 0; i < writers; ++i) {
      const int64_t head = p_.write.per_query ? place_.kv_head * p_.group() + i : place_.kv_head;
      if (i > 0) sync_block();
      load_tiles(head, i == 0);
      sync_block();
      if (p_.reads && i == 0) read_state();
      if (p_.reads && p_.causal) read_chunk();
      if (p_.reads && i == writers - 1) store_out();
      if (p_.writes) write_chunk(i == 0);
    }
  }

  DEV void load_presence() {
    for (int i = thread_index(); i < C; i += S::kThreads) {
      const int64_t t = chunk_ + i;
      shared_.present[i] =
          t < place_.piece.end && (!p_.key_mask || p_.key_mask[place_.piece.batch * p_.T + t]);
    }
  }

  // ---- what a chunk reads (walker_rows.cuh) ----

  static constexpr int kRun = 16 / int(sizeof(Scalar));  // elements of a tensor in one load
  static constexpr int kAhead = 4;  // loads before the first is used, for the memory's latency

  // Rows of a tensor on their way to a tile.
  struct Source {
    Element* to;
    int stride, width;  // of the tile; columns of it that are to be filled, a multiple of kRun
    const Scalar* x;    // of the chunk's first token, at the first column
    int64_t time, dim;
    const float *den, *den_grad;  // of the chunk's first token; den null: 1
    FeatureMap map;
    int columns;  // that the tensor has, from the first on
    int extra;    // the extra column, or -1
    bool wide;    // runs are contiguous and aligned
  };
  enum class Which { read, write, values, end };

  // The runs of all rows that a thread has, of [first, first + count) in each.
  struct OwnRuns {
    int first, count, token, run;
    DEV OwnRuns(int first, int count)
        : first(first), count(count), token(thread_index() / count), run(thread_index() % count) {}
    DEV bool done() const { return token >= C; }
    DEV int column() const { return (first + run) * kRun; }
    DEV void next() {
      token += S::kThreads / count, run += S::kThreads % count;
      if (run >= count) run -= count, ++token;
    }
  };

  DEV void load_decays();
  DEV void load_tiles(int64_t writer_head, bool first_writer);
  DEV Source make_source(Which which, int64_t head) const;
  DEV bool has_whole_run(const Source& from, const OwnRuns& at) const;
  template <FeatureMap map>
  DEV void load_whole_runs(const Source& from);
  DEV void load_other_runs(const Source& from);
  DEV float element(const Source& from, int token, int c) const;
  DEV void load_normalizer_columns();

  // ---- its products (walker_products.cuh) ----

  DEV float read_weight(int i) const;
  DEV float write_weight(int j) const;
  DEV float score_weight(int i, int j) const;
  template <class Load>
  DEV void add_to_out(const typename Operands::A& a, Load load);
  DEV void read_state();
  DEV void read_chunk();
  DEV void write_chunk(bool first_writer);
  DEV void load_written(typename Operands::A (&a)[kSumSteps][S::kStrips], int token);
  template <int count>
  DEV void load_values_of(typename Operands::B (&b)[kSumSteps][count], int token, int column);
  template <int count>
  DEV void add_to_state(const typename Operands::A (&a)[kSumSteps][S::kStrips],
                        const typename Operands::B (&b)[kSumSteps][count], int n, float keep);

  // ---- what it writes (walker_out.cuh) ----

  // Where a token's out is, from this block's first column on, and the tensor that it is the
  // gradient of.
  struct Outs {
    Scalar* out;
    const Scalar* of;  // or null
    int columns;
    bool there;  // the token is not past the end
    bool wide;   // pairs are contiguous and aligned
    DEV bool has_pair(int c) const { return there && wide && c + 1 < columns; }
  };
  using Pair = Run<Scalar, 2>;

  DEV void store_out();
  DEV void add_partial(int token, int half, bool last);
  DEV Outs make_outs(int token) const;
  DEV void load_of(Pair (&of)[kTilesN - 1], const Outs& outs) const;
  DEV float make_pairs(Pair (&pairs)[kTilesN - 1], const Outs& outs, int half, float scale,
                       bool present) const;
  template <FeatureMap map>
  DEV float make_gradients(Pair (&pairs)[kTilesN - 1], const Outs& outs, int half,
                           bool present) const;
  DEV void store_pairs(const Outs& outs, const Pair (&pairs)[kTilesN - 1]) const;
  DEV void store_sums(const Outs& outs, int token, float den, float dot) const;
  DEV float store_others(const Outs& outs, int half, float scale, bool present);
  DEV float picked_out(int n, int i) const;

  const Walk& p_;
  WalkShared<Operands, S> shared_;
  const Place& place_;
  const DecaySums decay_;
  const int warp_, g_, t_;
  int64_t row_begin_ = 0, rows_left_ = 0;  // of this walk, and from there to the last
  int64_t chunk_ = 0;                      // time of its first token
  float state_[S::kStrips][kTilesN][4];
  float out_[kTilesN][4];
};

}  // namespace hfla::cuda
