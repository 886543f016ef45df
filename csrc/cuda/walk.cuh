// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The recurrence that forward and backward are made of,
//
//     state = e^{g_i} state + write_i values_iᵀ        state: (R, N)
//     out_i = stateᵀ read_i
//
// by which forward is read = φ(q), write = φ(k), values = [v, 1], and the gradients are the same
// with the roles exchanged (launch.cuh). It is done a chunk of C tokens at a time, as products of
// matrices. With c_i = g_1 + ... + g_i within the chunk, and `state` what comes into it,
//
//     out_i = e^{c_i} stateᵀ read_i + Σ_{j≤i} e^{c_i - c_j} ⟨read_i, write_j⟩ values_j
//     state = e^{c_C} state + Σ_j e^{c_C - c_j} write_j values_jᵀ
//
// Backwards in time a token's own decay comes after it, not before: the same with c_C - c_i in
// place of c_i, and j ≥ i.
//
// A block walks through a piece of a sequence with the state in the accumulators of its warps:
//
//     warp w:  rows 16 w ... of the chunk:  inter = read state          (from shared memory)
//                                           scores = read writeᵀ        (masked, decayed)
//                                           out = inter + scores values (scores stay in registers)
//              rows of the state:           state += writeᵀ values
//
// Nothing but inputs, outputs and one state per piece passes through device memory. A block has
// `Shape::kColumns` columns of values; more columns are other blocks. More rows than Shape::R are
// other walks of the same block, which add up their outs in `partial`.
//
// Where sequences and heads are too few to fill the GPU, or attention is not causal, sequences are
// cut into several pieces, with three launches: walks that only write, from zero; a scan over the
// pieces (scan_kernel); and the walks proper, each from its own state.
//
// Masked tokens, and those past the end of a piece, read, write and are all zeros and decay by
// nothing.
//
// R rows and N columns of the state, C tokens of a chunk; other letters as in kernels.h.
#pragma once

#include <type_traits>

#include "cuda/numbers.h"

namespace hfla::cuda {

// ---- pieces ----

// How sequences are cut. Piece i of sequence n has an index that every block can find on its own,
// so that the host need not know cu_seqlens: with at most floor(length / L) + 1 pieces each,
// sequences that begin at s have their first at floor(s / L) + n, and never overlap. Some indices
// stay unused.
struct Pieces {
  const int32_t* cu_seqlens;  // null: all sequences have length T
  int64_t T, num_sequences;
  int64_t length;  // of a piece, a multiple of the chunk

  BOTH int64_t per_sequence() const {  // without cu_seqlens
    return T <= length ? 1 : (T + length - 1) / length;
  }
  BOTH int64_t count() const {
    return cu_seqlens ? T / length + num_sequences : num_sequences * per_sequence();
  }
  // Whether every sequence is one piece.
  BOTH bool whole() const { return T <= length; }

  // Nobody has checked cu_seqlens: wrong ones give a wrong answer, within the tensors.
  DEV int64_t bound(int64_t n) const {
    const int64_t at = cu_seqlens[n];
    return at < 0 ? 0 : at > T ? T : at;
  }
  DEV int64_t sequence_begin(int64_t n) const { return cu_seqlens ? bound(n) : 0; }
  DEV int64_t sequence_end(int64_t n) const { return cu_seqlens ? bound(n + 1) : T; }
  DEV int64_t first_piece(int64_t n) const {
    return cu_seqlens ? bound(n) / length + n : n * per_sequence();
  }
  DEV int64_t num_pieces(int64_t n) const {
    const int64_t tokens = sequence_end(n) - sequence_begin(n);
    return tokens <= length ? 1 : (tokens + length - 1) / length;
  }
};

struct Piece {
  int64_t sequence, batch, begin, end;  // sequence -1: there is no such piece
};

DEV Piece find_piece(const Pieces& pieces, int64_t index) {
  int64_t n = 0;
  if (!pieces.cu_seqlens) {
    n = index / pieces.per_sequence();
  } else {
    // The last sequence whose first piece is not after this one.
    int64_t end = pieces.num_sequences;
    while (end - n > 1) {
      const int64_t middle = (n + end) / 2;
      (pieces.first_piece(middle) <= index ? n : end) = middle;
    }
  }
  const int64_t i = index - pieces.first_piece(n);
  const int64_t begin = pieces.sequence_begin(n) + i * pieces.length;
  const int64_t end = pieces.sequence_end(n);
  return {i < pieces.num_pieces(n) ? n : -1, pieces.cu_seqlens ? 0 : n, begin,
          begin + pieces.length < end ? begin + pieces.length : end};
}

// ---- operands ----

// What stands at the end of a row, after the columns of the tensor.
enum class Extra { none, one, normalizer_gradient };

// Rows of read, write, values or out: φ(x) / den of a tensor x, and perhaps one more column.
struct Rows {
  View x;  // null: zeros
  int64_t columns;
  FeatureMap map = FeatureMap::identity;
  bool per_query = false;  // a row per query head
  Extra extra = Extra::none;
  const float* den = nullptr;       // (B, T, Hq); null: 1
  const float* den_grad = nullptr;  // (B, T, Hq): the extra column

  BOTH int64_t width() const { return columns + (extra == Extra::none ? 0 : 1); }
};

// One state per row: kv (rows, Hkv, K, V) and z (rows, Hkv, K).
struct States {
  float *kv = nullptr, *z = nullptr;  // null: zeros to read, nowhere to write
  bool per_piece = false;             // rows are pieces, else sequences
};

struct Walk {
  Pieces pieces;
  int64_t T, Hq, Hkv, K, V;
  Rows read, write, values;
  View log_decay;
  const bool* key_mask;
  bool causal, reversed;
  bool reads, writes;
  // Element (r, n) of the state is kv[r][n], or kv[n][r] if transposed; z is the last column, or
  // row.
  bool transposed;
  States from, to;      // `from` comes into a piece; `to` is what it ends with
  float* piece_decays;  // (pieces, Hkv): the product of a piece's decays; or null
  float* partial;       // (blocks, piece length, Shape::N) where R > Shape::R

  // out, or its product with the feature map's derivative at `of`.
  View out;
  bool divide;  // by the last column plus eps, which is stored in den
  float eps;
  float* den;          // (B, T, Hq)
  Rows of;             // the tensor whose gradient out is
  float* dots;         // (column blocks, B, T, heads): ⟨φ(x), dφ(x)⟩; or null
  int64_t num_tokens;  // B T

  BOTH bool reads_per_query() const { return reads && read.per_query; }
  BOTH int64_t num_heads() const { return reads_per_query() ? Hq : Hkv; }
  BOTH int64_t group() const { return Hq / Hkv; }
};

// The sizes of a block's tiles.
template <int C_, int R_, int columns>
struct Shape {
  static constexpr int C = C_, R = R_;
  static constexpr int kColumns = columns, N = columns + 8;  // and the normaliser's, in a tile of 8
  static constexpr int kWarps = C / 16, kThreads = 32 * kWarps;
  static constexpr int kBlocks = kThreads < 256 ? 256 / kThreads : 1;  // 255 registers each
  static constexpr int kStrips = (R / 16 + kWarps - 1) / kWarps;       // of the state, per warp
};

// Neighbours that are loaded or stored at once.
template <class T, int count>
struct alignas(sizeof(T) * count < 16 ? sizeof(T) * count : 16) Run {
  T x[count];
};

template <class T, int count>  // an even one
DEV Run<T, count> make_run(const float (&x)[count]) {
  Run<T, count> run;
  UNROLL
  for (int i = 0; i < count; i += 2) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      const uint32_t pair = to_bf16_pair(x[i], x[i + 1]);
      run.x[i].bits = uint16_t(pair), run.x[i + 1].bits = uint16_t(pair >> 16);
    } else {
      run.x[i] = from_float<T>(x[i]), run.x[i + 1] = from_float<T>(x[i + 1]);
    }
  }
  return run;
}
// A matrix in shared memory. Rows are an odd number of 16 bytes long, so that eight neighbours'
// runs are in different banks.
template <class Element, int rows, int columns>
struct Tile {
  static constexpr int kUnit = 16 / int(sizeof(Element));
  static constexpr int kStride = kUnit * ((columns + kUnit - 1) / kUnit | 1);
  static constexpr int kBytes = rows * kStride * int(sizeof(Element));
  Element* data;
  DEV float get(int r, int c) const { return to_float(data[r * kStride + c]); }
  DEV const Element* at(int r, int c) const { return data + r * kStride + c; }
  // Neighbours, from a multiple of count on.
  template <int count>
  DEV void set_run(int r, int c, const float (&x)[count]) {
    *reinterpret_cast<Run<Element, count>*>(data + r * kStride + c) = make_run<Element>(x);
  }
};

// Sums of log decays within a chunk, where position i + 1 is after token i. A decay to zero is
// counted instead of summed: differences of sums then stay finite. Sums may be large where their
// differences are not, so each is the sum of two floats.
struct DecaySum {
  float high, low;
  int resets;
};

struct DecaySums {
  const DecaySum* sums;  // (C + 1,); null: no decay

  DEV float between(int from, int to) const {  // e^{g_{from+1} + ... + g_to}
    if (!sums) return 1;
    const DecaySum a = sums[from], b = sums[to];
    return a.resets == b.resets ? expf((b.high - a.high) + (b.low - a.low)) : 0;
  }
};

// What a block does. It is kept in shared memory, so that no thread spends registers on it, nor on
// what follows of it, while it does something else.
struct Place {
  int64_t column_block, head, kv_head, piece_index;
  Piece piece;
};

template <class Operands, class S>
struct WalkShared {
  using Element = typename Operands::Element;
  Tile<Element, S::C, S::R> read, write;
  Tile<Element, S::C, S::N> values;
  Tile<Element, S::R, S::N> state;
  Place* place;
  DecaySum* decays;  // (C + 1,)
  bool* present;     // (C,)

  Tile<float, S::R, S::N> staged;  // a state, in place of all tiles

  static constexpr int kTileBytes =
      2 * decltype(read)::kBytes + decltype(values)::kBytes + decltype(state)::kBytes;
  static constexpr int kTailBytes = int(sizeof(Place)) + int(sizeof(DecaySum)) * (S::C + 1) + S::C;
  static constexpr int kBytes =
      (kTileBytes > decltype(staged)::kBytes ? kTileBytes : decltype(staged)::kBytes) + kTailBytes;
  DEV explicit WalkShared(char* base) {
    const auto take = [&](auto*& pointer, int bytes) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base);
      base += bytes;
    };
    staged.data = reinterpret_cast<float*>(base);
    char* const after = base + kBytes - kTailBytes;
    take(read.data, read.kBytes);
    take(write.data, write.kBytes);
    take(values.data, values.kBytes);
    take(state.data, state.kBytes);
    base = after;
    take(place, int(sizeof(Place)));
    take(decays, int(sizeof(DecaySum)) * (S::C + 1));
    take(present, S::C);
  }
};

// The element of a state at row r and column n of the walk, or null beyond its end.
DEV float* state_element(const Walk& p, const States& states, int64_t row, int64_t head, int64_t r,
                         int64_t n) {
  const int64_t k = p.transposed ? n : r, v = p.transposed ? r : n;
  const int64_t at = row * p.Hkv + head;
  if (k >= p.K || v > p.V) return nullptr;
  if (v == p.V) return states.z ? states.z + at * p.K + k : nullptr;
  return states.kv ? states.kv + (at * p.K + k) * p.V + v : nullptr;
}

// ---- the walk ----

template <class Scalar, class S>
class Walker {
  using Operands = typename OperandsOf<Scalar>::Type;
  static constexpr int kDepth = Operands::kDepth;
  static constexpr int C = S::C, R = S::R, N = S::N;
  static constexpr int kTilesN = N / 8;

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

  // The tile's last 8 columns are the normaliser and nothing.
  DEV bool has_normalizer() const { return p_.values.extra == Extra::one; }
  DEV int num_tiles_n() const { return has_normalizer() ? kTilesN : kTilesN - 1; }

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
    if (p_.reads) {
      load_rows(shared_.read, p_.read, place_.head, row_begin_, rows_left_);
      show_state();
    }
    const int64_t writers = p_.write.per_query ? p_.group() : 1;
    for (int64_t i = 0; i < writers; ++i) {
      const int64_t head = p_.write.per_query ? place_.kv_head * p_.group() + i : place_.kv_head;
      const int64_t values_head = p_.values.per_query ? head : place_.kv_head;
      if (i > 0) sync_block();
      if (p_.writes || p_.causal) {
        load_rows(shared_.write, p_.write, head, row_begin_, rows_left_);
        load_values(values_head);
      }
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

  // By the first warp, every lane C / 32 tokens.
  DEV void load_decays() {
    if (!decay_.sums || warp_ != 0) return;
    constexpr int kEach = C / 32;
    const int lane = thread_index();
    double own[kEach], sum = 0;
    int own_resets[kEach], resets = 0;
    UNROLL
    for (int i = 0; i < kEach; ++i) {
      const int token = lane * kEach + i;
      float g = 0;
      if (shared_.present[token]) {
        g = static_cast<const float*>(p_.log_decay.data)[place_.piece.batch * p_.log_decay.batch +
                                                         (chunk_ + token) * p_.log_decay.time +
                                                         place_.kv_head * p_.log_decay.head];
      }
      const bool reset = g <= kForgetsAll;
      own[i] = sum += reset ? 0 : g;
      own_resets[i] = resets += reset;
    }
    // Now those of the lanes before this one.
    const double all = sum;
    const int all_resets = resets;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const double more = shuffle_up(sum, lanes);
      const int more_resets = shuffle_up(resets, lanes);
      if (lane >= lanes) sum += more, resets += more_resets;
    }
    sum -= all, resets -= all_resets;
    UNROLL
    for (int i = 0; i < kEach; ++i) {
      const double total = sum + own[i];
      const float high = float(total);
      shared_.decays[lane * kEach + i + 1] = {high, float(total - high), resets + own_resets[i]};
    }
    if (lane == 0) shared_.decays[0] = {0, 0, 0};
  }

  static constexpr int kRun = 16 / int(sizeof(Scalar));  // elements of a tensor in one load
  static constexpr int kAhead =
      S::kThreads >= 256 ? 1 : 2;  // loads before the first is used; more would spill

  // Rows of `rows`, whose columns from `begin` on are `columns` and perhaps one more, to a tile.
  struct Source {
    const Rows& rows;
    const Scalar* x;  // of the chunk's first token, at `begin`
    int64_t token0;   // the row of den and den_grad that it has
    int columns;      // that the tensor has, from `begin` on
    int extra;        // the extra column, or -1
    bool wide;        // runs are contiguous and aligned
  };

  DEV Source make_source(const Rows& rows, int64_t head, int64_t begin, int most) const {
    const View& v = rows.x;
    const Scalar* const x = static_cast<const Scalar*>(v.data) + place_.piece.batch * v.batch +
                            chunk_ * v.time + head * v.head + begin * v.dim;
    const int64_t left = rows.columns - begin;
    Source source{rows,
                  x,
                  (place_.piece.batch * p_.T + chunk_) * p_.Hq + head,
                  int(left < 0      ? 0
                      : left < most ? left
                                    : most),
                  -1,
                  false};
    if (rows.extra != Extra::none && left >= 0 && left < most) source.extra = int(left);
    if (!v.data) source.columns = 0, source.extra = -1;
    source.wide = v.dim == 1 && v.time % kRun == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    return source;
  }

  DEV bool has_whole_run(const Source& from, int token, int c) const {
    return token < C && from.wide && c + kRun <= from.columns && shared_.present[token];
  }

  // Columns [c, c + kRun) of a row, and zeros where it has none: `whole` where it has them all.
  DEV void convert_run(float (&to)[kRun], const Source& from, const Run<Scalar, kRun>& whole,
                       int token, int c) const {
    const bool is_whole = has_whole_run(from, token, c);
    UNROLL
    for (int i = 0; i < kRun; ++i) to[i] = is_whole ? to_float(whole.x[i]) : 0;
    if (!shared_.present[token]) return;
    if (!is_whole) {
      UNROLL
      for (int i = 0; i < kRun; ++i) {
        if (c + i < from.columns) {
          to[i] = to_float(from.x[token * from.rows.x.time + (c + i) * from.rows.x.dim]);
        }
      }
    }
    const int64_t at = from.token0 + token * p_.Hq;
    if (from.rows.den) {
      const float scale = 1 / from.rows.den[at];
      UNROLL
      for (int i = 0; i < kRun; ++i) to[i] *= scale;
    } else {
      apply<Scalar>(from.rows.map, to);
    }
    if (is_whole) return;
    UNROLL
    for (int i = 0; i < kRun; ++i) {
      if (c + i >= from.columns) to[i] = 0;
      if (c + i == from.extra) {
        to[i] = from.rows.extra == Extra::one ? 1 : from.rows.den_grad[at];
      }
    }
  }

  // The first `columns` of a tile, a multiple of kRun.
  template <class T>
  DEV void load_tile(T& tile, const Source& from, int columns) {
    const int runs = columns / kRun;
    const int tokens_on = S::kThreads / runs, runs_on = S::kThreads % runs;  // to the next load
    struct Position {
      int token, run;
    };
    const auto next = [&](Position& at) {
      at.token += tokens_on, at.run += runs_on;
      if (at.run >= runs) at.run -= runs, ++at.token;
    };
    Position loading{thread_index() / runs, thread_index() % runs}, converting = loading;
    while (loading.token < C) {
      Run<Scalar, kRun> whole[kAhead];
      UNROLL
      for (int a = 0; a < kAhead; ++a, next(loading)) {
        if (has_whole_run(from, loading.token, loading.run * kRun)) {
          whole[a] = *reinterpret_cast<const Run<Scalar, kRun>*>(
              from.x + loading.token * from.rows.x.time + loading.run * kRun);
        }
      }
      UNROLL
      for (int a = 0; a < kAhead; ++a, next(converting)) {
        if (converting.token >= C) break;
        float x[kRun];
        convert_run(x, from, whole[a], converting.token, converting.run * kRun);
        tile.set_run(converting.token, converting.run * kRun, x);
      }
    }
  }

  // Columns from `begin` on, as many as the products of this walk use.
  template <class T>
  DEV void load_rows(T& tile, const Rows& rows, int64_t head, int64_t begin, int64_t left) {
    const int columns = left < R ? (int(left) + 15) / 16 * 16 : R;
    load_tile(tile, make_source(rows, head, begin, columns), columns);
  }

  // This block's columns, and the normaliser's behind them.
  DEV void load_values(int64_t head) {
    Source from = make_source(p_.values, head, place_.column_block * S::kColumns, S::kColumns);
    from.extra = -1;
    load_tile(shared_.values, from, S::kColumns);
    for (int token = thread_index(); token < C; token += S::kThreads) {
      for (int c = 0; c < 8; c += kRun) {
        float x[kRun] = {};
        if (c == 0 && has_normalizer()) x[0] = shared_.present[token] ? 1 : 0;
        shared_.values.set_run(token, S::kColumns + c, x);
      }
    }
  }

  // Weights. Position i + 1 is after token i; backwards in time all of it is mirrored.
  DEV float read_weight(int i) const {
    return p_.reversed ? decay_.between(i + 1, C) : decay_.between(0, i + 1);
  }
  DEV float write_weight(int j) const {
    return p_.reversed ? decay_.between(0, j + 1) : decay_.between(j + 1, C);
  }
  DEV float score_weight(int i, int j) const {
    if (p_.reversed ? j < i : j > i) return 0;
    return p_.reversed ? decay_.between(i + 1, j + 1) : decay_.between(j + 1, i + 1);
  }

  // out = read state, decayed. A warp has the rows 16 warp ... of the chunk.
  DEV void read_state() {
    const int first = 16 * warp_;
    UNROLL
    for (int n = 0; n < kTilesN; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) out_[n][i] = 0;
    }
    NO_UNROLL
    for (int r = 0; r < R; r += kDepth) {
      if (r >= rows_left_) break;
      const auto a = Operands::load_a(shared_.read, first, r);
      UNROLL
      for (int n = 0; n < kTilesN; ++n) {
        if (n >= num_tiles_n()) break;
        Operands::multiply(out_[n], a, Operands::load_b(shared_.state, r, 8 * n));
      }
    }
    if (!p_.causal || !decay_.sums) return;
    const float weights[2] = {read_weight(first + g_), read_weight(first + g_ + 8)};
    UNROLL
    for (int n = 0; n < kTilesN; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) out_[n][i] *= weights[i / 2];
    }
  }

  // out += (read writeᵀ, masked and decayed) values.
  DEV void read_chunk() {
    const int first = 16 * warp_;
    constexpr int kTilesAtOnce = kDepth / 8;  // make an operand
    NO_UNROLL
    for (int token = 0; token < C; token += kDepth) {
      // Tokens that come later than all of these rows.
      if (p_.reversed ? token + kDepth <= first : token > first + 15) continue;
      float scores[kTilesAtOnce][4] = {};
      NO_UNROLL
      for (int r = 0; r < R; r += kDepth) {
        if (r >= rows_left_) break;
        const auto a = Operands::load_a(shared_.read, first, r);
        UNROLL
        for (int n = 0; n < kTilesAtOnce; ++n) {
          Operands::multiply(scores[n], a,
                             Operands::load_b_transposed(shared_.write, r, token + 8 * n));
        }
      }
      UNROLL
      for (int n = 0; n < kTilesAtOnce; ++n) {
        UNROLL
        for (int i = 0; i < 4; ++i) {
          const float weight =
              score_weight(first + g_ + 8 * (i / 2), token + 8 * n + 2 * t_ + i % 2);
          scores[n][i] = weight == 0 ? 0 : weight * scores[n][i];  // 0, even of inf
        }
      }
      const auto a = Operands::from_accumulators(scores);
      UNROLL
      for (int n = 0; n < kTilesN; ++n) {
        if (n >= num_tiles_n()) break;
        Operands::multiply(out_[n], a,
                           Operands::load_b_for_accumulators(shared_.values, token, 8 * n));
      }
    }
  }

  // state = decay state + writeᵀ values, decayed.
  DEV void write_chunk(bool first_writer) {
    const float decay = first_writer ? decay_.between(0, C) : 1;
    for_each_state_element([&](int, int, float& x) { x *= decay; });
    NO_UNROLL
    for (int token = 0; token < C; token += kDepth) {
      float weights[Operands::kColumnsOfA] = {};
      if (decay_.sums) {
        UNROLL
        for (int i = 0; i < Operands::kColumnsOfA; ++i) {
          weights[i] = write_weight(token + Operands::column_of_a(i));
        }
      }
      typename Operands::A a[S::kStrips];
      UNROLL
      for (int s = 0; s < S::kStrips; ++s) {
        if (!strip_exists(strip_of(s))) continue;
        a[s] = Operands::load_a_transposed(shared_.write, strip_of(s) * 16, token, decay_.sums,
                                           weights);
      }
      UNROLL
      for (int n = 0; n < kTilesN; ++n) {
        if (n >= num_tiles_n()) break;
        const auto b = Operands::load_b(shared_.values, token, 8 * n);
        UNROLL
        for (int s = 0; s < S::kStrips; ++s) {
          if (strip_exists(strip_of(s))) Operands::multiply(state_[s][n], a[s], b);
        }
      }
    }
  }

  // ---- out ----

  DEV void store_out() {
    const bool last = rows_left_ <= R;
    UNROLL
    for (int half = 0; half < 2; ++half) {  // rows g and g + 8 of the warp's strip
      const int token = 16 * warp_ + g_ + 8 * half;
      finish_before();  // one half's addresses are enough for the registers
      if (p_.partial) add_partial(token, half, last);
      if (!last) continue;
      // In the normaliser's tile the first lane of four has the column.
      const float den = shuffle(out_[kTilesN - 1][2 * half], thread_index() % 32 / 4 * 4) + p_.eps;
      float dot = 0;
      const int64_t t = chunk_ + token;
      if (t < place_.piece.end) {
        const bool present = shared_.present[token];
        const Outs outs = make_outs(t);
        const float scale = p_.divide ? 1 / den : 1;
        UNROLL
        for (int n = 0; n < kTilesN - 1; ++n) {
          const float pair[2] = {out_[n][2 * half] * scale, out_[n][2 * half + 1] * scale};
          store_pair(outs, 8 * n + 2 * t_, pair, present, dot);
        }
        if (p_.divide && place_.column_block == 0 && t_ == 0) {
          p_.den[(place_.piece.batch * p_.T + t) * p_.Hq + place_.head] = den;
        }
      }
      if (!p_.dots) continue;
      dot += shuffle_xor(dot, 1);
      dot += shuffle_xor(dot, 2);
      if (t_ == 0 && t < place_.piece.end) {
        const int64_t row = place_.column_block * p_.num_tokens + place_.piece.batch * p_.T + t;
        p_.dots[row * p_.num_heads() + place_.head] = dot;
      }
    }
  }

  // out = what earlier walks have come to, and this one.
  DEV void add_partial(int token, int half, bool last) {
    float* const row =
        p_.partial + (block_index() * p_.pieces.length + chunk_ - place_.piece.begin + token) * N;
    UNROLL
    for (int n = 0; n < kTilesN; ++n) {
      UNROLL
      for (int i = 0; i < 2; ++i) {
        float& x = out_[n][2 * half + i];
        float& sum = row[8 * n + 2 * t_ + i];
        if (row_begin_ > 0) x += sum;
        if (!last) sum = x;
      }
    }
  }

  // Where a token's out is, from this block's first column on, and the tensor that it is the
  // gradient of.
  struct Outs {
    Scalar* out;
    const Scalar* of;  // or null
    int columns;
    bool wide;  // pairs are contiguous and aligned
  };

  DEV Outs make_outs(int64_t t) const {
    const int64_t begin = place_.column_block * S::kColumns;
    const auto row = [&](const View& v) {
      return static_cast<Scalar*>(v.data) + place_.piece.batch * v.batch + t * v.time +
             place_.head * v.head + begin * v.dim;
    };
    const View& of = p_.of.x;
    Outs outs{row(p_.out), of.data ? row(of) : nullptr, int(p_.values.columns - begin), false};
    constexpr uintptr_t kPair = 2 * sizeof(Scalar);
    outs.wide = p_.out.dim == 1 && reinterpret_cast<uintptr_t>(outs.out) % kPair == 0 &&
                (!outs.of || (of.dim == 1 && reinterpret_cast<uintptr_t>(outs.of) % kPair == 0));
    return outs;
  }

  // Columns c and c + 1 of out, if it has them.
  DEV void store_pair(const Outs& outs, int c, const float (&x)[2], bool present, float& dot) {
    if (outs.wide && c + 1 < outs.columns) {
      float result[2] = {x[0], x[1]};
      if (outs.of) {
        const auto of = *reinterpret_cast<const Run<Scalar, 2>*>(outs.of + c);
        UNROLL
        for (int i = 0; i < 2; ++i) result[i] = gradient(to_float(of.x[i]), x[i], present, dot);
      }
      UNROLL
      for (int i = 0; i < 2; ++i) result[i] = present ? result[i] : 0;
      *reinterpret_cast<Run<Scalar, 2>*>(outs.out + c) = make_run<Scalar>(result);
      return;
    }
    UNROLL
    for (int i = 0; i < 2; ++i) {
      if (c + i >= outs.columns) continue;
      float result = x[i];
      if (outs.of) {
        result = gradient(to_float(outs.of[(c + i) * p_.of.x.dim]), x[i], present, dot);
      }
      outs.out[(c + i) * p_.out.dim] = from_float<Scalar>(present ? result : 0);
    }
  }

  // By the feature map's argument, of what is the gradient by its value.
  DEV float gradient(float argument, float x, bool present, float& dot) const {
    if (present) dot += x * apply<Scalar>(p_.of.map, argument);
    return x * derivative<Scalar>(p_.of.map, argument);
  }

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

template <class Scalar, class S>
KERNEL LAUNCH_BOUNDS(S::kThreads, S::kBlocks) walk_kernel(const GRID_CONSTANT Walk p) {
  Walker<Scalar, S>(p).run();
}

// ---- the scan over pieces ----

// For every element of every sequence's states: from what the pieces add, in `pieces`, to what
// comes into each of them (or to the total, if not causal), and to the last state.
struct Scan {
  Pieces pieces;
  int64_t Hkv, K, V;
  bool causal, reversed;
  States initial, piece_states, final_state;
  const float* piece_decays;  // (pieces, Hkv)
};

constexpr int kScanThreads = 128;

KERNEL LAUNCH_BOUNDS(kScanThreads, 8) scan_kernel(const GRID_CONSTANT Scan p) {
  const int64_t elements = p.K * p.V + (p.piece_states.z ? p.K : 0);
  const int64_t blocks = (elements + kScanThreads - 1) / kScanThreads;
  const int64_t head = block_index() / blocks % p.Hkv, n = block_index() / blocks / p.Hkv;
  const int64_t e = block_index() % blocks * kScanThreads + thread_index();
  if (e >= elements) return;

  const auto element = [&](const States& states, int64_t row) -> float* {
    const int64_t at = row * p.Hkv + head;
    if (e < p.K * p.V) return states.kv ? states.kv + at * p.K * p.V + e : nullptr;
    return states.z ? states.z + at * p.K + e - p.K * p.V : nullptr;
  };
  const int64_t first = p.pieces.first_piece(n), count = p.pieces.num_pieces(n);
  const float* const initial = element(p.initial, n);
  float carry = initial ? *initial : 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t piece = first + (p.reversed ? count - 1 - i : i);
    float* const slot = element(p.piece_states, piece);
    const float added = *slot;
    *slot = carry;
    carry = p.piece_decays[piece * p.Hkv + head] * carry + added;
  }
  if (!p.causal) {
    for (int64_t i = 0; i < count; ++i) *element(p.piece_states, first + i) = carry;
  }
  float* const to = element(p.final_state, n);
  if (to) *to = carry;
}

}  // namespace hfla::cuda
