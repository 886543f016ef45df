// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// From a problem to launches: forward is one walk, backward three, of which forward and the second
// combine the states of pieces where sequences are cut; the others have these from them.
//
// Let dy' = [dy, -⟨dy, y⟩]: the normaliser is one more value column, of ones, and its gradient one
// more entry. Then, in the words of walk.cuh,
//
//                 read      write       values      state
//     y den       φ(q)      φ(k)        [v, 1]      [S, z]
//     dφ(q) den   dy'       [v, 1]      φ(k)        [S, z]ᵀ
//     dφ(k)       [v, 1]    dy'         φ(q)/den    its gradientᵀ    backwards in time
//     dv          φ(k)      φ(q)/den    dy          its gradient     backwards in time
//
// Where the walk has a fixed size, the first also finds ⟨dy, y⟩, and one has both of the last two:
// its state, transposed, is that of dv.
//
// Nothing here waits for the device or allocates: the caller provides a workspace, and all
// decisions depend on shapes alone, so that a CUDA graph can record it.
#pragma once

#include "cuda/common/launcher.cuh"
#include "cuda/linear_attention/combine.cuh"
#include "cuda/linear_attention/decay_gradient.cuh"
#include "cuda/linear_attention/walk_kernel.cuh"

namespace hfla::cuda {

// ---- walks ----

// What a kernel is compiled from: its tiles, and what it knows of the walk.
template <class S_, class Fixed_>
struct KernelOf {
  using S = S_;
  using Fixed = Fixed_;
};
template <class... K>
struct Kernels {};

// For any walk, by the sizes of tiles, the smaller before the larger. Of the middle ones in
// bfloat16 two blocks fit into a multiprocessor; with one more strip of rows, for the normaliser's
// beside 128, these would not have the registers. Operands of four bytes take twice the memory,
// which two stages of the larger ones would leave to one block. Where there is none for two stages,
// one is better than smaller tiles.
template <int C, int R, int columns, int stages>
using ForAny = KernelOf<BlockShape<C, R, columns, stages>, AnyWalk>;
template <class Scalar>
struct General {
  using All = Kernels<ForAny<32, 48, 32, 2>, ForAny<64, 144, 32, 1>>;
};
template <>
struct General<BFloat16> {
  using All = Kernels<ForAny<32, 48, 32, 2>, ForAny<64, 80, 64, 2>, ForAny<64, 128, 64, 2>,
                      ForAny<64, 128, 64, 1>, ForAny<128, 144, 64, 2>, ForAny<128, 144, 64, 1>>;
};

// For those of fixed sizes, where they are called most: a block has all of a head, with two warps
// for every strip of a chunk.
template <int D, FeatureMap map>
using Forward = KernelOf<BlockShape<64, D, D, 2, 2>, FixedSizeWalk<map, false>>;
template <int D, FeatureMap map>
using Gradient = KernelOf<BlockShape<64, D + 16, D, 2, 2>, FixedSizeWalk<map, true>>;
template <int D, FeatureMap map>
using TwoGradients = KernelOf<BlockShape<64, D + 16, D, 2, 2>, FixedSizeWalk<map, true, true>>;
template <int D, FeatureMap map>
using FindingGradient =
    KernelOf<BlockShape<64, D + 16, D, 2, 2>, FixedSizeWalk<map, true, false, true>>;
template <class Scalar>
struct Special {
  using All = Kernels<>;
};
template <>
struct Special<BFloat16> {
  using All =
      Kernels<Forward<64, FeatureMap::elu_plus_one>, Gradient<64, FeatureMap::elu_plus_one>,
              TwoGradients<64, FeatureMap::elu_plus_one>,
              FindingGradient<64, FeatureMap::elu_plus_one>, Forward<128, FeatureMap::elu_plus_one>,
              Gradient<128, FeatureMap::elu_plus_one>, TwoGradients<128, FeatureMap::elu_plus_one>,
              FindingGradient<128, FeatureMap::elu_plus_one>, Forward<64, FeatureMap::identity>,
              Gradient<64, FeatureMap::identity>, TwoGradients<64, FeatureMap::identity>,
              FindingGradient<64, FeatureMap::identity>, Forward<128, FeatureMap::identity>,
              Gradient<128, FeatureMap::identity>, TwoGradients<128, FeatureMap::identity>,
              FindingGradient<128, FeatureMap::identity>>;
};

inline int64_t rows_of(const Walk& walk) {
  return walk.read.width() > walk.write.width() ? walk.read.width() : walk.write.width();
}
template <class K>
int64_t column_blocks_of(const Walk& walk) {
  return ceil_div(walk.values.columns, K::S::kColumns);
}

template <class Scalar, class K>
constexpr int kSharedBytesOf = Walker<Scalar, typename K::S, typename K::Fixed>::kSharedBytes;

// Blocks that a multiprocessor has room for.
template <class Scalar, class K>
int64_t blocks_at_once(const CudaDevice& device) {
  const int64_t fitting = device.shared_bytes / kSharedBytesOf<Scalar, K>;
  return fitting < K::S::kBlocks ? fitting : int64_t(K::S::kBlocks);
}

// How good a kernel is for a walk.
struct Fitness {
  int64_t rounds;   // that its blocks make through a sequence
  int64_t threads;  // of a multiprocessor; 0: it has no room for a block

  bool better_than(const Fitness& other) const {
    if (threads == 0 || other.threads == 0) return threads > other.threads;
    return rounds != other.rounds ? rounds < other.rounds : threads > other.threads;
  }
};

template <class Scalar, class K>
Fitness fitness(const Walk& walk, const CudaDevice& device) {
  return {ceil_div(rows_of(walk), K::S::R) * column_blocks_of<K>(walk),
          blocks_at_once<Scalar, K>(device) * K::S::kThreads};
}

// Calls visit(kernel) with the best kernel, and the first of those that are as good.
template <class Scalar, class Visit, class K, class... Others>
auto with_best(const Walk& walk, const CudaDevice& device, Visit visit, Kernels<K, Others...>) {
  if constexpr (sizeof...(Others) > 0) {
    const Fitness here = fitness<Scalar, K>(walk, device);
    if ((fitness<Scalar, Others>(walk, device).better_than(here) || ...)) {
      return with_best<Scalar>(walk, device, visit, Kernels<Others...>{});
    }
  }
  return visit(K{});
}

// Whether a walk is what a kernel is compiled for: by its shape,
template <class K>
bool has_shape_of(const Walk& walk) {
  using Fixed = typename K::Fixed;
  constexpr bool is_gradient = Fixed::kIsGradient;
  constexpr FeatureMap of_rows = is_gradient ? FeatureMap::identity : Fixed::kMap,
                       of_values = is_gradient ? Fixed::kMap : FeatureMap::identity;
  if (Fixed::kHasSecond != bool(walk.second.data)) return false;
  if (Fixed::kHasSecond && walk.group() > 1) return false;
  return Fixed::kFinds == bool(walk.y.x.data) && walk.K == K::S::kColumns &&
         walk.V == K::S::kColumns && !walk.key_mask && !walk.log_decay.data &&
         walk.T <= INT32_MAX && is_gradient == bool(walk.of.x.data) && walk.read.map == of_rows &&
         walk.write.map == of_rows && walk.values.map == of_values;
}

// and by how rows lie that it has.
template <class Scalar>
bool rows_are_plain(const Walk& walk) {
  const auto is_plain = [](const View& x) { return !x.data || has_plain_rows<Scalar>(x); };
  return has_plain_rows<Scalar>(walk.read.x) && has_plain_rows<Scalar>(walk.write.x) &&
         has_plain_rows<Scalar>(walk.values.x) && has_plain_rows<Scalar>(walk.out) &&
         is_plain(walk.of.x) && is_plain(walk.y.x) && is_plain(walk.second);
}

// Calls visit(kernel) with the best of those for any walk,
template <class Scalar, class Visit>
auto with_general_kernel(const Walk& walk, const CudaDevice& device, Visit visit) {
  return with_best<Scalar>(walk, device, visit, typename General<Scalar>::All{});
}

// with that which knows its shape, or such a one,
template <class Scalar, class Visit>
auto with_kernel_of_shape(const Walk& walk, const CudaDevice& device, Visit visit, Kernels<>) {
  return with_general_kernel<Scalar>(walk, device, visit);
}
template <class Scalar, class Visit, class K, class... Others>
auto with_kernel_of_shape(const Walk& walk, const CudaDevice& device, Visit visit,
                          Kernels<K, Others...>) {
  if (has_shape_of<K>(walk) && blocks_at_once<Scalar, K>(device) > 0) return visit(K{});
  return with_kernel_of_shape<Scalar>(walk, device, visit, Kernels<Others...>{});
}
template <class Scalar, class Visit>
auto with_kernel_of_shape(const Walk& walk, const CudaDevice& device, Visit visit) {
  return with_kernel_of_shape<Scalar>(walk, device, visit, typename Special<Scalar>::All{});
}

// and with that which does it.
template <class Scalar, class Visit>
auto with_kernel(const Walk& walk, const CudaDevice& device, Visit visit) {
  if (rows_are_plain<Scalar>(walk)) return with_kernel_of_shape<Scalar>(walk, device, visit);
  return with_general_kernel<Scalar>(walk, device, visit);
}

// As many pieces as make the walk end first. Their blocks fill the device in rounds. What they add
// is summed up before, which takes two fifths of the walk, and states are stored and loaded
// between, as long as four chunks take.
template <class Scalar, class K>
Pieces make_pieces(const Walk& walk, const CudaDevice& device, int64_t chunk) {
  Pieces pieces{walk.cu_seqlens, walk.T, walk.num_sequences, 0};
  if (device.piece_length > 0) {
    pieces.length = ceil_div(device.piece_length, chunk) * chunk;
    return pieces;
  }
  constexpr int64_t kMinChunks = 4;  // of a piece
  const int64_t places = device.multiprocessors * blocks_at_once<Scalar, K>(device);
  const int64_t blocks = walk.B * walk.num_heads() * column_blocks_of<K>(walk);
  const int64_t chunks = ceil_div(walk.T, chunk);
  int64_t best = 1, least = INT64_MAX;
  for (int64_t count = 1; count == 1 || (count <= places && count * kMinChunks <= chunks);
       ++count) {
    const int64_t rounds = ceil_div(blocks * count, places > 0 ? places : 1);
    const int64_t of_a_piece = ceil_div(chunks, count);
    const int64_t time = rounds * (count > 1 ? 7 * of_a_piece + 5 * 4 : 5 * of_a_piece);
    if (time < least) best = count, least = time;
  }
  pieces.length = chunk * (best > 1 ? ceil_div(chunks, best) : chunks + 1);
  return pieces;
}

// By the walk's shape, so that backward knows how forward was cut, however rows lie by then: with
// whole chunks of either kernel that may do it.
template <class Scalar>
Pieces make_pieces(const Walk& walk, const CudaDevice& device) {
  const int64_t general = with_general_kernel<Scalar>(
      walk, device, [](auto kernel) { return int64_t(decltype(kernel)::S::C); });
  return with_kernel_of_shape<Scalar>(walk, device, [&](auto kernel) {
    using K = decltype(kernel);
    return make_pieces<Scalar, K>(walk, device, general > K::S::C ? general : K::S::C);
  });
}

inline Walk make_walk(const LinearAttentionProblem& p) {
  Walk walk{};
  static_cast<Sequences&>(walk) = p;
  walk.reads = walk.writes = true;
  walk.log_decay = p.log_decay;
  walk.causal = p.is_causal;
  walk.eps = static_cast<float>(p.eps);
  walk.num_tokens = p.B * p.T;
  return walk;
}

template <class Scalar, class K>
void launch_walk(Launcher& launcher, const Walk& walk) {
  using S = typename K::S;
  launcher.run(walk_kernel<Scalar, S, typename K::Fixed>,
               walk.pieces.count() * walk.num_heads() * column_blocks_of<K>(walk), S::kThreads,
               kSharedBytesOf<Scalar, K>, walk);
}

// How a walk's sequences are cut, and the states that come into the pieces; null where each is one.
struct Cut {
  Pieces pieces{};
  States states;
};

// The states that come into pieces: from what each adds, from zero. They are left in `room`, if
// there is one.
template <class Scalar, class K>
States combine_pieces(Launcher& launcher, const Walk& walk, const States& initial,
                      const States& final_state, const States& room) {
  const int64_t states = walk.pieces.count() * walk.Hkv;
  const bool with_z = walk.transposed ? rows_of(walk) > walk.V : walk.values.extra == Extra::one;
  States piece_states = room;
  if (!room.kv) {
    piece_states.kv = launcher.take(states * walk.K * walk.V);
    piece_states.z = with_z ? launcher.take(states * walk.K) : nullptr;
    piece_states.per_piece = true;
  }

  Walk sums = walk;
  sums.reads = false;
  sums.to = piece_states;
  sums.piece_decays = launcher.take(states);
  launch_walk<Scalar, K>(launcher, sums);

  Combine combine{};
  static_cast<HeadSizes&>(combine) = walk;
  combine.pieces = walk.pieces;
  combine.causal = walk.causal, combine.reversed = walk.reversed;
  combine.initial = initial;
  combine.piece_states = piece_states;
  combine.final_state = final_state;
  combine.piece_decays = sums.piece_decays;
  const int64_t blocks = combine_blocks(walk.K * walk.V) + (with_z ? combine_blocks(walk.K) : 0);
  launcher.run(combine_kernel, walk.pieces.num_sequences * walk.Hkv * blocks, kCombineThreads, 0,
               combine);
  return piece_states;
}

// A whole walk over all sequences, from `initial` states to `final_state`s: in one launch, or in
// pieces. Where one before it had the same state, and it was cut, it goes by that one's pieces.
// What states come into them stays, in `room` or in the workspace, for such a walk.
template <class Scalar>
Cut run_walk(Launcher& launcher, const CudaDevice& device, Walk walk, const States& initial,
             const States& final_state, const Cut& before = {}, const States& room = {}) {
  return with_kernel<Scalar>(walk, device, [&](auto kernel) {
    using K = decltype(kernel);
    const bool is_cut = before.states.kv && before.pieces.length % K::S::C == 0;
    walk.pieces = is_cut ? before.pieces : make_pieces<Scalar>(walk, device);
    Cut cut{walk.pieces, is_cut ? before.states : States{}};
    if (!is_cut && (!walk.causal || !walk.pieces.whole())) {
      cut.states = combine_pieces<Scalar, K>(launcher, walk, initial, final_state, room);
    }
    if (cut.states.kv) {
      walk.from = cut.states;
      walk.writes = walk.causal;
    } else {
      walk.from = initial;
      walk.to = final_state;
    }
    const Launcher::Scope scope(launcher);  // the next walk has the same memory
    if (rows_of(walk) > K::S::R) {
      walk.partial = launcher.take(walk.pieces.count() * walk.num_heads() *
                                   column_blocks_of<K>(walk) * walk.pieces.length * K::S::N);
    }
    launch_walk<Scalar, K>(launcher, walk);
    return cut;
  });
}

// States that are only read.
inline States input_states(const void* kv, const void* z) {
  return {static_cast<float*>(const_cast<void*>(kv)), static_cast<float*>(const_cast<void*>(z)),
          false};
}
inline States output_states(void* kv, void* z) {
  return {static_cast<float*>(kv), static_cast<float*>(z), false};
}

// ---- forward ----

inline Walk forward_walk(const LinearAttentionProblem& p, const LinearAttentionResult& result) {
  Walk walk = make_walk(p);
  walk.read = {p.q, p.K, p.feature_map, true};
  walk.write = {p.k, p.K, p.feature_map};
  walk.values = {p.v, p.V};
  walk.values.extra = p.normalize ? Extra::one : Extra::none;
  walk.out = result.y;
  walk.divide = p.normalize;
  walk.den = static_cast<float*>(result.den);
  return walk;
}

// How forward is cut, and the states that come into its pieces, which are kept for backward: where
// it is, and there is room. If it is not causal that is the last one, for all.
template <class Scalar>
Cut kept_cut(const LinearAttentionProblem& p, const LinearAttentionResult& result,
             const CudaDevice& device) {
  const Pieces pieces = make_pieces<Scalar>(forward_walk(p, result), device);
  if (!p.is_causal) return {pieces, output_states(result.kv, p.normalize ? result.z : nullptr)};
  if (pieces.whole() || pieces.count() > result.piece_room) return {};
  float* const kv = static_cast<float*>(result.piece_states);
  float* const z = kv + pieces.count() * p.Hkv * p.K * p.V;
  return {pieces, {kv, p.normalize ? z : nullptr, true}};
}

template <class Scalar>
void forward(Launcher& launcher, const LinearAttentionProblem& p,
             const LinearAttentionResult& result, const CudaDevice& device) {
  const States room = p.is_causal ? kept_cut<Scalar>(p, result, device).states : States{};
  run_walk<Scalar>(launcher, device, forward_walk(p, result),
                   input_states(p.initial_kv, p.normalize ? p.initial_z : nullptr),
                   output_states(result.kv, p.normalize ? result.z : nullptr), {}, room);
}

// ---- backward ----

// Where a walk's kernel leaves the dot products of what the decay's gradient is made of.
template <class Scalar>
Dots take_dots(Launcher& launcher, const CudaDevice& device, const Walk& walk) {
  const int64_t column_blocks = with_kernel<Scalar>(
      walk, device, [&](auto kernel) { return column_blocks_of<decltype(kernel)>(walk); });
  return {launcher.take(column_blocks * walk.num_tokens * walk.num_heads()), column_blocks};
}

// A template, as all that launches: kernels are static, and an inline function would be that of
// another dtype's file, with its kernels.
template <class Scalar>
void run_decay_gradient(Launcher& launcher, DecayGradient arguments) {
  const int64_t heads = arguments.num_sequences * arguments.Hkv;
  Pieces& pieces = arguments.pieces;
  pieces = {arguments.cu_seqlens, arguments.T, arguments.num_sequences, kDecayTokens};
  if (arguments.gradient.kv || arguments.gradient.z) {
    arguments.state_dots = launcher.take<double>(heads * kStateParts);
    launcher.run(state_dots_kernel, heads * kStateParts, 32, 0, arguments);
  }
  if (!pieces.whole()) {
    arguments.piece_sums = launcher.take<DecayItem>(pieces.count() * arguments.Hkv);
    launcher.run(decay_sums_kernel, pieces.count() * arguments.Hkv, 32, 0, arguments);
  }
  launcher.run(decay_gradient_kernel, pieces.count() * arguments.Hkv, 32, 0, arguments);
}

template <class Scalar>
void backward(Launcher& launcher, const LinearAttentionProblem& p,
              const LinearAttentionUpstream& input, const LinearAttentionGradients& result,
              const CudaDevice& device) {
  const float* const den = p.normalize ? static_cast<const float*>(input.forward.den) : nullptr;
  const int64_t tokens = p.B * p.T;

  float* const den_grad = den && input.dy.data ? launcher.take(tokens * p.Hq) : nullptr;

  const Rows queries{p.q, p.K, p.feature_map, true};
  const Rows keys{p.k, p.K, p.feature_map};
  Rows queries_over_den = queries;
  queries_over_den.den = den;
  Rows values{p.v, p.V};                               // [v, 1]
  Rows dy{input.dy, p.V, FeatureMap::identity, true};  // without the extra column
  Rows dy_and_more = dy;
  if (p.normalize) {
    values.extra = Extra::one;
    dy_and_more.extra = Extra::normalizer_gradient;
    dy_and_more.den_grad = den_grad;
  }
  const States initial = input_states(p.initial_kv, p.normalize ? p.initial_z : nullptr);
  const States final_gradient = input_states(input.dkv, p.normalize ? input.dz : nullptr);
  const bool decays = result.dlog_decay.data;
  DecayGradient of_decay{};

  Walk dq = make_walk(p);
  dq.read = dy_and_more, dq.write = values, dq.values = keys;
  dq.read.den = den;
  dq.transposed = true;
  dq.out = result.dq;
  dq.of = queries;
  if (den_grad) {
    Walk finding = dq;
    finding.read.den_grad = nullptr;
    finding.y = {input.forward.y, p.V, FeatureMap::identity, true};
    finding.found = den_grad;
    if (with_kernel<Scalar>(finding, device,
                            [](auto kernel) { return decltype(kernel)::Fixed::kFinds; })) {
      dq = finding;
    } else {
      const NormalizerGradient arguments{p, input.dy, input.forward.y, den_grad};
      launcher.run(normalizer_gradient_kernel<Scalar>, ceil_div(tokens * p.Hq, kRowThreads / 32),
                   kRowThreads, 0, arguments);
    }
  }
  if (decays) of_decay.q = take_dots<Scalar>(launcher, device, dq);
  dq.dots = of_decay.q.dots;
  {
    const Launcher::Scope scope(launcher);
    run_walk<Scalar>(launcher, device, dq, initial, {}, kept_cut<Scalar>(p, input.forward, device));
  }

  Walk dk = make_walk(p);
  dk.read = values, dk.write = dy_and_more, dk.values = queries_over_den;
  dk.transposed = dk.reversed = true;
  dk.out = result.dk;
  dk.of = keys;
  if (decays) of_decay.k = take_dots<Scalar>(launcher, device, dk);
  dk.dots = of_decay.k.dots;
  dk.second = result.dv;
  const bool has_dv = with_kernel<Scalar>(
      dk, device, [](auto kernel) { return decltype(kernel)::Fixed::kHasSecond; });
  if (!has_dv) dk.second = {};

  Walk dv = make_walk(p);  // whose state is that of dk, but for the normaliser's
  dv.read = keys, dv.write = queries_over_den, dv.values = dy;
  dv.reversed = true;
  dv.out = result.dv;
  {
    const Launcher::Scope scope(launcher);
    const States last = output_states(result.dinitial_kv, result.dinitial_z);
    const Cut cut = run_walk<Scalar>(launcher, device, dk, final_gradient, last);
    const States without_z = {final_gradient.kv, nullptr, false};
    if (!has_dv) run_walk<Scalar>(launcher, device, dv, without_z, {}, cut);
  }

  if (!decays) return;
  static_cast<Sequences&>(of_decay) = p;
  of_decay.num_tokens = tokens;
  of_decay.log_decay = p.log_decay, of_decay.dlog_decay = result.dlog_decay;
  of_decay.state = input_states(input.forward.kv, p.normalize ? input.forward.z : nullptr);
  of_decay.gradient = final_gradient;
  run_decay_gradient<Scalar>(launcher, of_decay);
}

}  // namespace hfla::cuda
