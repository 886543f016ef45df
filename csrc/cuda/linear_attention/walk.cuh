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
// A block walks through a piece of a sequence with the state in the accumulators of its warps (or
// of as many for each part of the columns):
//
//     warp w:  rows 16 w ... of the chunk:  inter = read state          (from shared memory)
//                                           scores = read writeᵀ        (masked, decayed)
//                                           out = inter + scores values (scores stay in registers)
//              rows of the state:           state += writeᵀ values
//
// Nothing but inputs, outputs and one state per piece passes through device memory. A block has
// `BlockShape::kColumns` columns of values; more columns are other blocks. More rows than its R are
// other walks of the same block, which add up their outs in `partial`.
//
// Where sequences and heads are too few to fill the GPU, or attention is not causal, sequences are
// cut into several pieces, with three launches: walks that only write, from zero; one that
// combines the states of pieces (combine.cuh); and the walks proper, each from its own state.
//
// Rows come by asynchronous copies to where their tiles are, and operands are made of them in
// place. Where shared memory has room for the tiles of two chunks, those of the next are filled
// while one is computed.
//
// Masked tokens, and those past the end of a piece, read, write and are all zeros and decay by
// nothing.
//
// R rows and N columns of the state, C tokens of a chunk; other letters as in kernels/common.h.
//
// Here is what a walk is told and what a block keeps of it; walker.cuh is the walk.
#pragma once

#include <type_traits>

#include "cuda/common/decays.cuh"
#include "cuda/common/operands.cuh"
#include "cuda/common/pieces.cuh"
#include "cuda/common/tiles.cuh"
#include "kernels/linear_attention.h"

namespace hfla::cuda {

// What stands at the end of a row, after the columns of the tensor.
enum class Extra { none, one, normalizer_gradient };

// The normaliser and its gradient are large numbers whose product cancels most of the others': one
// column, rounded as an operand, would lose what is left. Rounded, a = held(a) + rest(a), and
//
//     read      held(a)  rest(a)  held(a)  held(a)
//     write     held(b)  held(b)  rest(b)  0
//     state     held(z)  held(z)  Σ rest   rest(z)      of z = Σ held(b_j) values_jᵀ
//
// whose products are a b and a (z + Σ rest), but for those of two rests. As rows of the state they
// begin at a multiple of four, so a warp and a walk have all, and they cost nothing: rows come by
// sixteens.
struct ExtraColumns {
  static constexpr int kCount = 4, kRestOfWritten = 2, kRestOfState = 3;
  BOTH static int64_t begin(int64_t columns) { return (columns + kCount - 1) / kCount * kCount; }

  template <class Operands>
  DEV static float read(float x, int i) {
    const float held = Operands::held(x);
    return i == 1 ? x - held : held;
  }
  template <class Operands>
  DEV static float write(float x, int i) {
    const float held = Operands::held(x);
    return i < kRestOfWritten ? held : i == kRestOfWritten ? x - held : 0;
  }
};

// Rows of read, write or values: φ(x) / den of a tensor x, and perhaps one more number, which is
// not divided. What is read is divided after its products, as out.
struct Rows {
  View x;  // null: zeros
  int64_t columns;
  FeatureMap map = FeatureMap::identity;
  bool per_query = false;  // a row per query head
  Extra extra = Extra::none;
  const float* den = nullptr;       // (B, T, Hq); null: 1
  const float* den_grad = nullptr;  // (B, T, Hq): the extra number

  // As what is read or written has it.
  BOTH int64_t width() const {
    return extra == Extra::none ? columns : ExtraColumns::begin(columns) + ExtraColumns::kCount;
  }
};

// One state per row: kv (rows, Hkv, K, V) and z (rows, Hkv, K).
struct States {
  float *kv = nullptr, *z = nullptr;  // null: zeros to read, nowhere to write
  bool per_piece = false;             // rows are pieces, else sequences
};

struct Walk : Sequences {
  Pieces pieces;
  Rows read, write, values;
  View log_decay;
  bool causal, reversed;
  bool reads, writes;
  // Element (r, n) of the state is kv[r][n], or kv[n][r] if transposed; z is the last column, or
  // row.
  bool transposed;
  States from, to;      // `from` comes into a piece; `to` is what it ends with
  float* piece_decays;  // (pieces, Hkv): the product of a piece's decays; or null
  float* partial;       // (blocks, piece length, BlockShape::N) where R > BlockShape::R

  // out, or its product with the feature map's derivative at `of`.
  View out;
  bool divide;  // by the last column plus eps, which is stored in den
  float eps;
  float* den;          // (B, T, Hq)
  Rows of;             // the tensor whose gradient out is
  float* dots;         // (column blocks, B, T, heads): ⟨φ(x), dφ(x)⟩; or null
  int64_t num_tokens;  // B T
  // Or null: second_i = state φ(of_i) + Σ_j ⟨φ(of_i), values_j⟩ write_j, without the extra columns.
  View second;
  // Or of nothing: then what is read has -⟨read_i, y_i⟩ as its extra number, which is found here,
  // and left in found.
  Rows y;
  float* found;  // (B, T, Hq)

  BOTH bool reads_per_query() const { return reads && read.per_query; }
  BOTH int64_t num_heads() const { return reads_per_query() ? Hq : Hkv; }
  BOTH int64_t group() const { return Hq / Hkv; }
};

// The sizes of a block's tiles; how many chunks have tiles of their own: with two, the next chunk's
// rows are copied while this one is computed; with one, before that; and into how many parts the
// columns are divided, each of which has warps of its own.
template <int C_, int R_, int columns, int stages, int parts = 1>
struct BlockShape {
  static constexpr int C = C_, R = R_, kStages = stages;
  static constexpr int kColumns = columns, N = columns + 8;  // and the normaliser's, in a tile of 8
  static constexpr int kPartColumns = columns / parts;
  static constexpr int kStripWarps = C / 16, kWarps = kStripWarps * parts, kThreads = 32 * kWarps;
  static constexpr int kBlocks = kThreads < 256 ? 256 / kThreads : 1;  // 255 registers each
};

// What is known of a walk where its kernel is compiled: nothing,
struct AnyWalk {
  static constexpr bool kIsFixed = false, kIsGradient = false, kHasSecond = false, kFinds = false;
};
// or all that a chunk's instructions depend on. K and V are the shape's kColumns, rows are aligned
// and contiguous, no token is masked, nothing decays, 32 bits hold a token's offset. `map` is that
// of read and write; or of values, where out is a gradient by it: R then is 16 more, of which the
// first is the normaliser's. Such a walk may have a second out, which the same state gives;
// or find the extra number of what it reads.
template <FeatureMap map, bool is_gradient, bool has_second = false, bool finds = false>
struct FixedSizeWalk {
  static constexpr bool kIsFixed = true, kIsGradient = is_gradient, kHasSecond = has_second;
  static constexpr bool kFinds = finds;
  static constexpr FeatureMap kMap = map;
};

// What a block does. It is kept in shared memory, so that no thread spends registers on it, nor on
// what follows of it, while it does something else.
struct alignas(16) Place {
  int64_t column_block, head, kv_head, piece_index;
  int writers;  // heads that write in a chunk
  Piece piece;
  int chunks, last_tokens;  // of the piece, and of its last chunk in time
  // Offsets of the piece's first token: those of outs, from the first column on.
  int64_t out, den, second;
};

enum class Which { read, of, y, write, values, end };

constexpr int kNoColumn = -ExtraColumns::kCount;  // nor is one of those that follow

// Rows of a tensor as a block finds them, chunk after chunk; kept likewise.
template <class Scalar>
struct Source {
  const Scalar* x;                           // of the piece's first token and its first writer
  const float *den, *den_grad;               // of the same; den null: 1
  int64_t time, dim, writer, writer_of_den;  // strides
  FeatureMap map;
  int columns;  // that the tensor has here
  int whole;    // runs of 16 bytes among them, if these are contiguous and aligned
  int width;    // columns of the tile that are to be filled
  int extra;    // the first of the extra columns, or kNoColumn
};

// A chunk and one of the heads that write in it, with the stages of its tiles.
struct Visit {
  int chunk = 0, writer = 0;
  int read_stage = 0, write_stage = 0;  // what is read stays for all that write
};

template <class Scalar, class S, class Fixed>
struct WalkShared {
  using Element = typename OperandsOf<Scalar>::Type::Element;
  using RowsTile = Tile<Element, S::C, S::R>;
  using ValuesTile = Tile<Element, S::C, S::N>;
  // As it is, where out is known as its gradient; mapped, if it is read as well.
  using OfTile = Tile<Scalar, S::C, S::kColumns>;
  using StateTile = Tile<Element, S::R, S::N>;
  using Staged = Tile<float, S::R, S::N>;

  // A stage: tiles; and by token denominators, which one of the three may have, their gradients,
  // log decays and presence.
  static constexpr int kReadAt = 0, kWriteAt = RowsTile::kBytes, kValuesAt = 2 * kWriteAt;
  static constexpr int kOfAt = kValuesAt + ValuesTile::kBytes;
  static constexpr int kYAt = kOfAt + (Fixed::kIsGradient ? OfTile::kBytes : 0);
  static constexpr int kDensAt = kYAt + (Fixed::kFinds ? OfTile::kBytes : 0);
  static constexpr int kOfTokens = 4 * S::C;
  static constexpr int kPresentAt = kDensAt + 3 * kOfTokens;
  static constexpr int kStageBytes = kPresentAt + S::C;

  static constexpr int kTilesBytes = S::kStages * kStageBytes + StateTile::kBytes;
  // A state takes the place of tiles, but of none that copies are on their way to.
  static constexpr int kStagedAt = (S::kStages - 1) * kStageBytes;
  static constexpr int kStagedEnd = kStagedAt + Staged::kBytes;
  static constexpr int kTailAt = kTilesBytes > kStagedEnd ? kTilesBytes : kStagedEnd;
  static constexpr int kSourcesAt = kTailAt + int(sizeof(Place));
  static constexpr int kDecaysAt = kSourcesAt + int(Which::end) * int(sizeof(Source<Scalar>));
  static constexpr int kBytes = kDecaysAt + int(sizeof(DecaySum)) * (S::C + 1);
  static_assert(kStageBytes % 16 == 0 && StateTile::kBytes % 16 == 0);

  char* base;

  DEV Element* tile(Which which, int stage) const {
    const int at = which == Which::read    ? kReadAt
                   : which == Which::write ? kWriteAt
                   : which == Which::of    ? kOfAt
                   : which == Which::y     ? kYAt
                                           : kValuesAt;
    return at_stage<Element>(stage, at);
  }
  DEV RowsTile read(int stage) const { return {tile(Which::read, stage)}; }
  DEV RowsTile write(int stage) const { return {tile(Which::write, stage)}; }
  DEV ValuesTile values(int stage) const { return {tile(Which::values, stage)}; }
  DEV OfTile of(int stage) const { return {at_stage<Scalar>(stage, kOfAt)}; }
  DEV OfTile y(int stage) const { return {at_stage<Scalar>(stage, kYAt)}; }
  DEV float* dens(int stage) const { return at_stage<float>(stage, kDensAt); }
  DEV float* den_grads(int stage) const { return at_stage<float>(stage, kDensAt + kOfTokens); }
  DEV float* log_decays(int stage) const { return at_stage<float>(stage, kDensAt + 2 * kOfTokens); }
  DEV bool* present(int stage) const { return at_stage<bool>(stage, kPresentAt); }

  DEV StateTile state() const { return {at_stage<Element>(S::kStages, 0)}; }
  DEV Staged staged() const { return {at<float>(kStagedAt)}; }
  DEV Place& place() const { return *at<Place>(kTailAt); }
  DEV Source<Scalar>& source(Which which) const {
    return at<Source<Scalar> >(kSourcesAt)[int(which)];
  }
  DEV DecaySum* decays() const { return at<DecaySum>(kDecaysAt); }  // (C + 1,)

 private:
  template <class T>
  DEV T* at(int offset) const {
    return reinterpret_cast<T*>(base + offset);
  }
  template <class T>
  DEV T* at_stage(int stage, int offset) const {
    return at<T>(stage * kStageBytes + offset);
  }
};

}  // namespace hfla::cuda
