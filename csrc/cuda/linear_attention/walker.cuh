// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// One block's walk through its piece: the state in registers, and chunk after chunk of tokens. All
// that waits for copies or other warps is in this file. Each visit to a chunk has three parts:
//
//     Loader   walker_loader.cuh    starts copies of the next visit's rows
//     Convert  walker_convert.cuh   makes operands of this one's, which are there by now
//     Compute  walker_products.cuh, walker_out.cuh
#pragma once

#include "cuda/common/copy_groups.cuh"
#include "cuda/linear_attention/feature_maps.cuh"
#include "cuda/linear_attention/walk.cuh"

namespace hfla::cuda {

template <class Scalar, class S, class Fixed>
class Walker {
  using Operands = typename OperandsOf<Scalar>::Type;
  using Element = typename Operands::Element;
  using Shared = WalkShared<Scalar, S, Fixed>;
  static constexpr int kDepth = Operands::kDepth;
  static constexpr int C = S::C, R = S::R, N = S::N;
  // Tiles of 8 columns that a warp has: of its part's, and behind them the normaliser's.
  static constexpr int kTilesC = S::kPartColumns / 8;
  static constexpr int kTilesN = kTilesC + (Fixed::kIsGradient ? 0 : 1);
  // Strips of 16 rows of the state that a warp has. Of the normaliser's, behind those of a
  // fixed-size gradient, it has tiles, lest one warp has a strip more than all others.
  static constexpr int kStateRows = Fixed::kIsGradient ? R - 16 : R;
  static constexpr int kStrips = (kStateRows / 16 + S::kStripWarps - 1) / S::kStripWarps;
  static constexpr int kExtraTiles = Fixed::kIsGradient ? kTilesC / S::kStripWarps : 0;
  static constexpr int kTogether = kDepth / 8;  // operands b that are loaded at once
  // Steps of kDepth tokens that tensor cores sum up, of which a warp keeps operands a in registers.
  static constexpr int kMostSumSteps = 64 / int(sizeof(typename Operands::A));
  static constexpr int kSumSteps = C / kDepth < kMostSumSteps ? C / kDepth : kMostSumSteps;
  static constexpr int kSumTokens = kSumSteps * kDepth;

 public:
  static constexpr int kSharedBytes = Shared::kBytes;

  DEV explicit Walker(const Walk& p)
      : p_(p),
        shared_{shared_memory()},
        place_(shared_.place()),
        decay_{Fixed::kIsFixed || !p.log_decay.data ? nullptr : shared_.decays()},
        warp_(thread_index() / 32 - part() * S::kStripWarps),
        g_(lane().g),
        t_(lane().t) {
    if (thread_index() == 0) shared_.place() = find_place(p);
    enter_rows(0);
    sync_block();
  }

  DEV void run() {
    if (place_.piece.sequence < 0) return;
    for (;;) {
      walk();
      if (Fixed::kIsFixed || rows_left_ <= R) return;
      enter_rows(row_begin_ + R);
      sync_block();
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
    place.writers = p.write.per_query ? int(p.group()) : 1;
    place.piece = find_piece(p.pieces, place.piece_index);
    const int64_t tokens = place.piece.end - place.piece.begin;
    place.chunks = int((tokens + C - 1) / C);
    place.last_tokens = int(tokens - int64_t(place.chunks - 1) * C);
    const auto begin_of = [&](const View& out) {
      return place.piece.batch * out.batch + place.piece.begin * out.time + place.head * out.head +
             place.column_block * S::kColumns * out.dim;
    };
    place.out = begin_of(p.out), place.second = begin_of(p.second);
    place.den = (place.piece.batch * p.T + place.piece.begin) * p.Hq + place.head;
    return place;
  }

  // The rows that the next walk has, as all threads find them after a barrier. Those that are still
  // in the last one have done with its sources.
  DEV void enter_rows(int64_t begin) {
    row_begin_ = begin;
    rows_left_ = (p_.read.width() > p_.write.width() ? p_.read.width() : p_.write.width()) - begin;
    if (thread_index() != 0) return;
    NO_UNROLL
    for (Which which = Which::read; which < Which::end; which = next(which)) {
      shared_.source(which) = make_source(which);
    }
  }

  DEV void walk() {
    visit_ = {};
    if (S::kStages > 1) start(visit_);
    load_state();
    float total_decay = 1;
    NO_UNROLL
    for (; visit_.chunk < place_.chunks; visit_ = after(visit_)) {
      visit();
      if (is_last_writer()) total_decay *= decay_.between(0, C);
    }
    store_state();
    if (p_.piece_decays && thread_index() == 0) {
      p_.piece_decays[place_.piece_index * p_.Hkv + place_.kv_head] = total_decay;
    }
  }

  // ---- the state, of which a warp has the strips of 16 rows warp, warp + kWarps, ... ----

  DEV bool strip_exists(int strip) const {
    if (Fixed::kIsFixed && kStateRows / 16 % S::kStripWarps == 0) return true;
    return strip < R / 16 && strip * 16 < rows_left_;
  }
  DEV int strip_of(int s) const { return warp_ + s * S::kStripWarps; }
  DEV int rows_here() const { return rows_left_ < R ? int(rows_left_) : R; }
  // The part of the columns that a warp has; warp_ is its number among those that have the same.
  DEV static int part() {
    return S::kWarps == S::kStripWarps ? 0 : thread_index() / 32 / S::kStripWarps;
  }
  DEV int column_of(int n) const {  // a warp's first, of tile n
    return n < kTilesC ? part() * S::kPartColumns + 8 * n : S::kColumns;
  }

  // The tile's last 8 columns are the normaliser and nothing.
  DEV bool has_normalizer() const { return p_.values.extra == Extra::one; }
  // As rows it has 16, of which others than ExtraColumns are zeros.
  DEV bool has_extra_rows() const { return kExtraTiles > 0 && p_.read.extra != Extra::none; }
  DEV int extra_column(int i) const { return column_of(warp_ * kExtraTiles + i); }

  // The first of the normaliser's rows, or kNoColumn.
  DEV int extra_row() const {
    if (Fixed::kIsFixed) return has_extra_rows() ? kStateRows : kNoColumn;
    const int64_t row = ExtraColumns::begin(p_.V) - row_begin_;
    return p_.transposed && row >= 0 && row < R ? int(row) : kNoColumn;
  }

  // Visits what a warp has of the state, by pairs of neighbours: row, column, and the two. Of what
  // several warps have, `once` only one of them.
  template <class Visit>
  DEV void for_each_state_pair(bool once, Visit visit) {
    for_each_strip_pair(once, visit);
    for_each_extra_pair(visit);
  }
  template <class Visit>
  DEV void for_each_strip_pair(bool once, Visit visit) {
    UNROLL
    for (int s = 0; s < kStrips; ++s) {
      if (!strip_exists(strip_of(s))) continue;
      UNROLL
      for (int n = 0; n < kTilesN; ++n) {
        if (once && n == kTilesC && part() != 0) continue;
        UNROLL
        for (int half = 0; half < 2; ++half) {
          visit(strip_of(s) * 16 + g_ + 8 * half, column_of(n) + 2 * t_, state_[s][n] + 2 * half);
        }
      }
    }
  }
  template <class Visit>
  DEV void for_each_extra_pair(Visit visit) {
    if (!has_extra_rows()) return;
    UNROLL
    for (int i = 0; i < kExtraTiles; ++i) {
      UNROLL
      for (int half = 0; half < 2; ++half) {
        visit(kStateRows + g_ + 8 * half, extra_column(i) + 2 * t_, extra_[i] + 2 * half);
      }
    }
  }

  // A state in device memory, from this block's first row and column on. Element (r, c) is
  // kv[r][c], or kv[c][r] if transposed; z is the last column, or row.
  struct StateInMemory {
    float *kv, *z;      // or null
    int row, column;    // strides of kv
    int rows, columns;  // of kv, from here to the last
    int extra_row;      // the first of the rows that z is, or kNoColumn
    bool extra_column;  // z is the column behind the tile's
    DEV float* at(int r, int c) const {
      if (c == S::kColumns) return extra_column && r < rows ? z + r : nullptr;
      if (c > S::kColumns || c >= columns) return nullptr;
      if (is_extra(r, 0)) return z + c;
      return kv && r < rows ? kv + int64_t(r) * row + int64_t(c) * column : nullptr;
    }
    DEV bool is_extra(int r, int i) const { return r == extra_row + i; }
  };
  DEV StateInMemory find_state(const States& states) const {
    const int64_t row = states.per_piece ? place_.piece_index : place_.piece.sequence;
    const int64_t at = row * p_.Hkv + place_.kv_head, r = row_begin_,
                  n = place_.column_block * S::kColumns;
    const int64_t keys = p_.transposed ? n : r, values = p_.transposed ? r : n;
    const int64_t rows = (p_.transposed ? p_.V : p_.K) - r,
                  columns = (p_.transposed ? p_.K : p_.V) - n;
    const int V = int(p_.V);
    return {states.kv ? states.kv + (at * p_.K + keys) * p_.V + values : nullptr,
            states.z ? states.z + at * p_.K + keys : nullptr,
            p_.transposed ? 1 : V,
            p_.transposed ? V : 1,
            int(rows < R ? rows : R),
            int(columns),
            states.z ? extra_row() : kNoColumn,
            states.z && !p_.transposed && has_normalizer()};
  }

  // In shared memory, for read_state.
  DEV void show_state() {
    const auto show = [&](int r, int c, const float* x) {
      const float pair[2] = {x[0], x[1]};
      shared_.state().set_run(r, c, pair);
    };
    const int extra = extra_row(), rest = extra + ExtraColumns::kRestOfState;
    const auto show_extra = [&](int r, int c, const float* x) {
      if (r != rest) show(r, c, x);
      if (r != extra) return;
      const float rests[2] = {x[0] - Operands::held(x[0]), x[1] - Operands::held(x[1])};
      show(rest, c, rests);
    };
    for_each_strip_pair(true, [&](int r, int c, const float* x) {
      Fixed::kIsFixed ? show(r, c, x) : show_extra(r, c, x);
    });
    for_each_extra_pair(show_extra);
  }

  // Both through shared memory, where the tiles are otherwise: neighbouring threads then load and
  // store neighbours.
  DEV void load_state() {
    if (!p_.from.kv && !p_.from.z) {
      for_each_state_pair(false, [](int, int, float* x) { x[0] = x[1] = 0; });
      return;
    }
    const auto staged = shared_.staged();
    const StateInMemory states = find_state(p_.from);
    constexpr int kAhead = 8;  // loads before the first is used, for the memory's latency
    NO_UNROLL
    for (int first = thread_index(); first < R * N; first += kAhead * S::kThreads) {
      float x[kAhead];
      UNROLL
      for (int a = 0; a < kAhead; ++a) {
        const int e = first + a * S::kThreads;
        const float* const from = e < R * N ? states.at(e / N, e % N) : nullptr;
        x[a] = from ? *from : 0;
      }
      UNROLL
      for (int a = 0; a < kAhead; ++a) {
        const int e = first + a * S::kThreads;
        if (e < R * N) staged.data[e / N * staged.kStride + e % N] = x[a];
      }
    }
    sync_block();
    for_each_state_pair(false, [&](int r, int c, float* x) {
      if (states.is_extra(r, 1)) --r;  // the same once more
      x[0] = staged.get(r, c), x[1] = staged.get(r, c + 1);
    });
  }

  DEV void store_state() {
    if (!p_.to.kv && !p_.to.z) return;
    if (p_.reads_per_query() && place_.head % p_.group() != 0)
      return;      // all of a group have the same
    sync_block();  // all have done with the tiles of the last chunk
    const auto staged = shared_.staged();
    for_each_state_pair(true, [&](int r, int c, const float* x) {
      float* const to = staged.data + r * staged.kStride + c;
      to[0] = x[0], to[1] = x[1];
    });
    sync_block();
    const StateInMemory states = find_state(p_.to);
    NO_UNROLL
    for (int e = thread_index(); e < R * N; e += S::kThreads) {
      const int c = e % N;
      // All blocks have the normaliser's column; the first stores it.
      if (c == S::kColumns && place_.column_block != 0) continue;
      const int r = e / N;
      float* const to = states.at(r, c);
      if (!to) continue;
      *to = staged.get(r, c);
      if (states.is_extra(r, 0)) *to += staged.get(r + ExtraColumns::kRestOfWritten, c);
    }
  }

  // ---- a visit ----

  DEV Visit after(Visit visit) const {
    visit.write_stage = (visit.write_stage + 1) % S::kStages;
    if (++visit.writer < place_.writers) return visit;
    visit.read_stage = (visit.read_stage + 1) % S::kStages;
    return {visit.chunk + 1, 0, visit.read_stage, visit.write_stage};
  }
  DEV bool is_last_writer() const { return visit_.writer == place_.writers - 1; }

  // Backwards in time, the chunk that is not full is the first one still.
  DEV int index_of(int chunk) const { return p_.reversed ? place_.chunks - 1 - chunk : chunk; }
  DEV int64_t offset_of(int chunk) const { return int64_t(index_of(chunk)) * C; }
  // So many tokens further in a tensor, with a token's stride.
  template <class T>
  DEV static T* advance(T* x, int64_t tokens, int64_t stride) {
    if constexpr (!Fixed::kIsFixed) return x + tokens * stride;
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    const uint32_t bytes = uint32_t(stride) * uint32_t(sizeof(T));
    return reinterpret_cast<T*>(reinterpret_cast<Byte*>(x) +
                                multiply_wide(uint32_t(tokens), bytes));
  }
  DEV int tokens_of(int chunk) const {
    return index_of(chunk) == place_.chunks - 1 ? place_.last_tokens : C;
  }

  // Whether a visit has rows of a tensor.
  DEV bool has(const Visit& visit, Which which) const {
    if (which == Which::of && !Fixed::kIsGradient) return false;
    if (which == Which::y && !Fixed::kFinds) return false;
    return is_read(which) ? p_.reads && visit.writer == 0 : p_.writes || p_.causal;
  }
  // Whether a visit's rows stay for all that write in its chunk.
  DEV static bool is_read(Which which) {
    return which == Which::read || which == Which::of || which == Which::y;
  }
  DEV static Which next(Which which) { return Which(int(which) + 1); }
  // Calls handle(which) for all that it has: with constants, where the walk has a fixed size, else
  // in one loop, since with a branch for every feature map its code is long.
  template <class Handle>
  DEV void for_each_tile(const Visit& visit, Handle handle) {
    if constexpr (Fixed::kIsFixed) {
      UNROLL
      for (int which = 0; which < int(Which::end); ++which) {
        if (has(visit, Which(which))) handle(Which(which));
      }
    } else {
      NO_UNROLL
      for (Which which = Which::read; which < Which::end; which = next(which)) {
        if (has(visit, which)) handle(which);
      }
    }
  }

  DEV void visit() {
    if (S::kStages == 1) {
      sync_block();  // all have done with the last one
      start(visit_);
    }
    copies_.template wait<0>();
    sync_block();  // what all threads have copied is there; with two stages the last one is done
    if (S::kStages > 1) start(after(visit_));
    chunk_ = place_.piece.begin + offset_of(visit_.chunk);
    const bool first = visit_.writer == 0;
    if (first) begin_chunk();
    convert();
    sync_block();
    if (p_.reads) read(first);
    if (p_.writes) write_chunk(first);
  }

  DEV void read(bool first) {
    ReadOperands operands = {};
    keep_operands(operands, read_tile());
    if (first) read_state<false>(operands);
    const bool stores = is_last_writer();
    const bool copies_of = !Fixed::kIsFixed && stores && p_.of.x.data;  // else it is in the ring
    if (copies_of) {
      if (first) sync_block();  // all have done with the state's tile
      start_of();
    }
    if (p_.causal) read_chunk<false>(operands, write_tile(), values_tile());
    if (copies_of) copies_.template wait<0>();
    if (stores) store_out();
    if constexpr (Fixed::kHasSecond) {
      keep_operands(operands, shared_.of(visit_.read_stage));
      read_state<true>(operands);
      if (p_.causal) read_chunk<true>(operands, values_tile(), write_tile());
      store_second();
    }
  }

  DEV void begin_chunk() {
    sum_decays();
    if (p_.reads) show_state();
    if constexpr (!Fixed::kIsFixed) {  // where the first product is added
      UNROLL
      for (int n = 0; n < kTilesN; ++n) {
        UNROLL
        for (int i = 0; i < 4; ++i) out_[n][i] = 0;
      }
    }
  }

  DEV auto read_tile() const { return shared_.read(visit_.read_stage); }
  DEV auto write_tile() const { return shared_.write(visit_.write_stage); }
  DEV auto values_tile() const { return shared_.values(visit_.write_stage); }
  DEV bool present(int token) const {
    return Fixed::kIsFixed ? token < tokens_of(visit_.chunk)
                           : shared_.present(visit_.read_stage)[token];
  }

  // ---- what it reads (walker_loader.cuh, walker_convert.cuh) ----

  static constexpr int kRun = 16 / int(sizeof(Scalar));  // elements of a tensor in one copy

  DEV static int stage_of(Which which, const Visit& visit) {
    return is_read(which) ? visit.read_stage : visit.write_stage;
  }
  DEV static int stride_of(Which which) {
    return which == Which::values                    ? Shared::ValuesTile::kStride
           : which == Which::of || which == Which::y ? Shared::OfTile::kStride
                                                     : Shared::RowsTile::kStride;
  }
  DEV int whole_runs(Which which) const {
    return Fixed::kIsFixed ? S::kColumns / kRun : shared_.source(which).whole;
  }
  DEV const Rows& rows_of(Which which) const {
    return which == Which::read    ? p_.read
           : which == Which::of    ? p_.of
           : which == Which::y     ? p_.y
           : which == Which::write ? p_.write
                                   : p_.values;
  }
  DEV static bool may_have_den_grad(Which which) {
    return !Fixed::kIsFixed ||
           (Fixed::kIsGradient && (which == Which::read || which == Which::write));
  }
  // Whether a tile's rows are divided here. Which ones may be is known with the walk.
  DEV bool divides(Which which) const {
    if (which == Which::read) return false;
    if (Fixed::kIsFixed && which != (Fixed::kIsGradient ? Which::values : Which::write))
      return false;
    return rows_of(which).den;
  }
  // Where a run is copied to: its last element comes where its last operand will be.
  DEV static Scalar* raw(Element* operands) {
    return reinterpret_cast<Scalar*>(operands + kRun) - kRun;
  }

  // The runs of all tokens that a thread has, of [first, first + count) in each: one, of every
  // step'th token. Threads of the next power of two go side by side.
  struct OwnRuns {
    int column, token, step;
    DEV OwnRuns(int first, int count) {
      int shift = 0;
      UNROLL
      for (int n = 1; n < 64; n *= 2) shift += count > n;
      const int run = thread_index() & ((1 << shift) - 1);
      column = (first + run) * kRun;
      token = run < count ? thread_index() >> shift : C;
      step = S::kThreads >> shift;
    }
  };
  static_assert(R / kRun <= 64 && R / kRun <= S::kThreads);
  // Whether a thread has an i-th run, of that token. Of a fixed-size walk all have as many of a
  // tile.
  static constexpr int kOwnRuns = C * S::kColumns / kRun / S::kThreads;
  DEV static bool has_run(int i, int token, int end) {
    return Fixed::kIsFixed ? i < kOwnRuns : token < end;
  }

  DEV Source<Scalar> make_source(Which which) const;
  DEV void start(const Visit& visit);
  DEV void copy_rows(Which which, const Visit& visit, int tokens);
  DEV void start_of();
  DEV void convert();
  DEV void convert_tile(Which which, bool all_present);
  template <FeatureMap map>
  DEV void convert_whole_runs(Which which);
  DEV void erase_absent(Which which);
  DEV void fetch_other_runs(Which which);
  DEV float element(Which which, int token, int c) const;
  DEV void set_normalizer_columns();
  DEV void set_extra_columns();
  DEV void find_extra_column();
  DEV void set_extra(Which which, int token, float x);
  DEV static float extra_element(Which which, float x, int i);
  DEV void sum_decays();

  // ---- its products (walker_products.cuh) ----

  DEV float read_weight(int i) const;
  DEV float write_weight(int j) const;
  template <bool reversed>
  DEV float score_weight(int i, int j) const;
  template <int at_once, bool with_extra, class Handle>
  DEV void for_each_row_step(Handle handle) const;
  // What a warp reads of a chunk, where the walk has a fixed size: for the state, and for each step
  // of tokens.
  struct ReadOperands {
    typename Operands::A kept[Fixed::kIsFixed ? R / kDepth : 1];
  };
  template <class Rows>
  DEV void keep_operands(ReadOperands& operands, const Rows& rows) const;
  DEV typename Operands::A operand(const ReadOperands& operands, int row) const;
  template <class Load>
  DEV void add_to_out(const typename Operands::A& a, bool first, Load load);
  template <bool second>
  DEV void read_state(const ReadOperands& operands);
  template <bool second, class Written, class Values>
  DEV void read_chunk(const ReadOperands& operands, const Written& written, const Values& values);
  DEV static void subtract_held(float (&scores)[kTogether][4]);
  template <bool reversed>
  DEV void weigh(float (&scores)[kTogether][4], int token) const;
  DEV void write_chunk(bool first_writer);
  DEV void write_extra_rows(int token);
  DEV void load_written(typename Operands::A (&a)[kSumSteps][kStrips], int token);
  template <int count>
  DEV void load_values_of(typename Operands::B (&b)[kSumSteps][count], int token, int column);
  template <int count>
  DEV void add_to_state(const typename Operands::A (&a)[kSumSteps][kStrips],
                        const typename Operands::B (&b)[kSumSteps][count], int n, float keep);
  template <int count>
  DEV static void sum_up(float (&sums)[count][4], const typename Operands::A& a,
                         const typename Operands::B (&b)[count], bool first);

  // ---- what it writes (walker_out.cuh) ----

  // Where a token's out is, from this warp's first column on, and the tensor that it is the
  // gradient of.
  struct Outs {
    Scalar* out;
    const Scalar* of;  // or null
    int columns;
    bool there;  // the token is not past the end
    bool wide;   // pairs are contiguous and aligned
    DEV bool has_pair(int c) const {
      return there && (Fixed::kIsFixed || (wide && c + 1 < columns));
    }
  };
  using Pair = Run<Scalar, 2>;

  DEV bool is_gradient() const { return Fixed::kIsFixed ? Fixed::kIsGradient : bool(p_.of.x.data); }
  DEV void store_out();
  DEV void store_second();
  DEV void add_partial(int token, int half, bool last);
  DEV Outs make_outs(int token) const { return make_outs(token, p_.out, place_.out); }
  DEV Outs make_outs(int token, const View& out, int64_t begin) const;
  DEV Pair* copied_of(int n, int half) const;
  DEV Pair pair_of(int n, int half) const;
  DEV float make_pairs(Pair (&pairs)[kTilesC], const Outs& outs, int half, float scale,
                       bool present) const;
  DEV void make_plain_pairs(Pair (&pairs)[kTilesC], int half, float scale, bool present) const;
  template <FeatureMap map>
  DEV float make_gradients(Pair (&pairs)[kTilesC], const Outs& outs, int half, float scale,
                           bool present) const;
  DEV void store_pairs(const Outs& outs, const Pair (&pairs)[kTilesC]) const;
  DEV void store_sums(const Outs& outs, int token, float den, float dot) const;
  DEV float store_others(const Outs& outs, int half, float scale, bool present);
  DEV float picked_out(int n, int i) const;

  const Walk& p_;
  const Shared shared_;
  const Place& place_;
  const DecaySums decay_;
  const int warp_, g_, t_;
  int64_t row_begin_ = 0, rows_left_ = 0;  // of this walk, and from there to the last
  Visit visit_;
  int64_t chunk_ = 0;  // time of its first token
  CopyGroups copies_;
  float state_[kStrips][kTilesN][4];
  float extra_[kExtraTiles + 1][4];  // the last is not used
  float out_[kTilesN][4];
};

}  // namespace hfla::cuda
