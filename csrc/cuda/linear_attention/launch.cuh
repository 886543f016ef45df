// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// From a problem to launches: forward is one walk, backward three, each of which combines the
// states of pieces where sequences are cut.
//
// Let dn = dy / den and dn' = [dn, -⟨dn, y⟩]: the normaliser is one more value column, of ones, and
// its gradient one more entry. Then, in the words of walk.cuh,
//
//               read      write     values    state
//     y den     φ(q)      φ(k)      [v, 1]    [S, z]
//     dφ(q)     dn'       [v, 1]    φ(k)      [S, z]ᵀ
//     dφ(k)     [v, 1]    dn'       φ(q)      its gradientᵀ    backwards in time
//     dv        φ(k)      φ(q)      dn        its gradient     backwards in time
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

// Sizes of tiles: for narrow heads (and for devices with little shared memory), and for heads up to
// 128, without and with the normaliser's row. Of the wide one in bfloat16 two blocks fit into a
// multiprocessor, so that one computes while the other loads; with one more strip of rows it would
// not have the registers. Operands of four bytes take twice the memory.
template <class Scalar>
struct Tiles {
  using Narrow = BlockShape<32, 48, 32>;
  using Wide = BlockShape<64, 144, 32>;
  using Tall = Wide;
};
template <>
struct Tiles<BFloat16> {
  using Narrow = BlockShape<32, 48, 32>;
  using Wide = BlockShape<64, 128, 64>;
  using Tall = BlockShape<128, 144, 64>;
};
template <class Scalar>
struct NarrowTiles : Tiles<Scalar> {
  using Wide = typename Tiles<Scalar>::Narrow;
  using Tall = Wide;
};

template <class Scalar>
bool is_narrow(const HeadSizes& p, const CudaDevice& device) {
  using Narrow = typename Tiles<Scalar>::Narrow;
  return (p.K <= Narrow::kColumns && p.V <= Narrow::kColumns) ||
         device.shared_bytes < Walker<Scalar, typename Tiles<Scalar>::Tall>::kSharedBytes;
}

// Pieces long enough to be worth the states between them, and short enough to give every
// multiprocessor two blocks.
template <class S>
Pieces make_pieces(const Sequences& p, const CudaDevice& device) {
  constexpr int64_t chunk = S::C;
  Pieces pieces{p.cu_seqlens, p.T, p.num_sequences, 0};
  if (device.piece_length > 0) {
    pieces.length = ceil_div(device.piece_length, chunk) * chunk;
    return pieces;
  }
  constexpr int64_t kMinChunks = 4;
  const int64_t blocks = p.B * p.Hkv * ceil_div(p.V, S::kColumns);
  const int64_t wanted = ceil_div(2 * device.multiprocessors, blocks > 0 ? blocks : 1);
  const int64_t chunks = ceil_div(ceil_div(p.T, chunk), wanted);
  pieces.length = chunk * (chunks > kMinChunks ? chunks : kMinChunks);
  if (wanted <= 1) pieces.length = chunk * (ceil_div(p.T, chunk) + 1);
  return pieces;
}

inline Walk make_walk(const LinearAttentionProblem& p, const Pieces& pieces) {
  Walk walk{};
  static_cast<Sequences&>(walk) = p;
  walk.pieces = pieces;
  walk.log_decay = p.log_decay;
  walk.causal = p.is_causal;
  walk.eps = static_cast<float>(p.eps);
  walk.num_tokens = p.B * p.T;
  return walk;
}

template <class Scalar, class S>
void launch_walk(Launcher& launcher, const Walk& walk) {
  const int64_t column_blocks = ceil_div(walk.values.columns, S::kColumns);
  launcher.run(walk_kernel<Scalar, S>, walk.pieces.count() * walk.num_heads() * column_blocks,
               S::kThreads, Walker<Scalar, S>::kSharedBytes, walk);
}

// A whole walk over all sequences, from `initial` states to `final_state`s.
template <class Scalar, class S>
void run_walk(Launcher& launcher, Walk walk, const States& initial, const States& final_state) {
  const int64_t rows =
      walk.read.width() > walk.write.width() ? walk.read.width() : walk.write.width();
  const int64_t column_blocks = ceil_div(walk.values.columns, S::kColumns);
  walk.reads = walk.writes = true;
  if (rows > S::R) {
    walk.partial = launcher.take(walk.pieces.count() * walk.num_heads() * column_blocks *
                                 walk.pieces.length * S::N);
  }
  if (walk.causal && walk.pieces.whole()) {
    walk.from = initial;
    walk.to = final_state;
    return launch_walk<Scalar, S>(launcher, walk);
  }

  const int64_t states = walk.pieces.count() * walk.Hkv;
  const bool with_z = walk.transposed ? rows > walk.V : walk.values.extra == Extra::one;
  States piece_states;
  piece_states.kv = launcher.take(states * walk.K * walk.V);
  piece_states.z = with_z ? launcher.take(states * walk.K) : nullptr;
  piece_states.per_piece = true;

  Walk sums = walk;
  sums.reads = false;
  sums.to = piece_states;
  sums.piece_decays = launcher.take(states);
  launch_walk<Scalar, S>(launcher, sums);

  Combine combine{};
  static_cast<HeadSizes&>(combine) = walk;
  combine.pieces = walk.pieces;
  combine.causal = walk.causal, combine.reversed = walk.reversed;
  combine.initial = initial;
  combine.piece_states = piece_states;
  combine.final_state = final_state;
  combine.piece_decays = sums.piece_decays;
  const int64_t elements = walk.K * walk.V + (with_z ? walk.K : 0);
  launcher.run(combine_kernel,
               walk.pieces.num_sequences * walk.Hkv * ceil_div(elements, kCombineThreads),
               kCombineThreads, 0, combine);

  walk.writes = walk.causal;
  walk.from = piece_states;
  launch_walk<Scalar, S>(launcher, walk);
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

template <class Scalar, class T>
void forward(Launcher& launcher, const LinearAttentionProblem& p,
             const LinearAttentionResult& result, const CudaDevice& device) {
  using S = typename T::Wide;
  Walk walk = make_walk(p, make_pieces<S>(p, device));
  walk.read = {p.q, p.K, p.feature_map, true};
  walk.write = {p.k, p.K, p.feature_map};
  walk.values = {p.v, p.V};
  walk.values.extra = p.normalize ? Extra::one : Extra::none;
  walk.out = result.y;
  walk.divide = p.normalize;
  walk.den = static_cast<float*>(result.den);
  run_walk<Scalar, S>(launcher, walk,
                      input_states(p.initial_kv, p.normalize ? p.initial_z : nullptr),
                      output_states(result.kv, p.normalize ? result.z : nullptr));
}

// ---- backward ----

template <class Scalar, class T>
void backward(Launcher& launcher, const LinearAttentionProblem& p,
              const LinearAttentionUpstream& input, const LinearAttentionGradients& result,
              const CudaDevice& device) {
  using S = typename T::Wide;
  using Tall = typename T::Tall;  // whose chunk is a multiple of the other's
  const Pieces pieces = make_pieces<Tall>(p, device);
  const float* const den = p.normalize ? static_cast<const float*>(input.forward.den) : nullptr;
  const int64_t tokens = p.B * p.T, key_blocks = ceil_div(p.K, S::kColumns);

  float* den_grad = nullptr;
  if (den && input.dy.data) {
    den_grad = launcher.take(tokens * p.Hq);
    const NormalizerGradient arguments{p, input.dy, input.forward.y, den, den_grad};
    launcher.run(normalizer_gradient_kernel<Scalar>, ceil_div(tokens * p.Hq, kRowThreads / 32),
                 kRowThreads, 0, arguments);
  }

  const Rows queries{p.q, p.K, p.feature_map, true};
  const Rows keys{p.k, p.K, p.feature_map};
  Rows values{p.v, p.V};                                                 // [v, 1]
  Rows dn{input.dy, p.V, FeatureMap::identity, true, Extra::none, den};  // without the extra column
  Rows dn_and_more = dn;
  if (p.normalize) {
    values.extra = Extra::one;
    dn_and_more.extra = Extra::normalizer_gradient;
    dn_and_more.den_grad = den_grad;
  }
  const States initial = input_states(p.initial_kv, p.normalize ? p.initial_z : nullptr);
  const States final_gradient = input_states(input.dkv, p.normalize ? input.dz : nullptr);
  const bool decays = result.dlog_decay.data;

  Walk dq = make_walk(p, pieces);
  dq.read = dn_and_more, dq.write = values, dq.values = keys;
  dq.transposed = true;
  dq.out = result.dq;
  dq.of = queries;
  dq.dots = decays ? launcher.take(key_blocks * tokens * p.Hq) : nullptr;
  run_walk<Scalar, Tall>(launcher, dq, initial, {});

  Walk dk = make_walk(p, pieces);
  dk.read = values, dk.write = dn_and_more, dk.values = queries;
  dk.transposed = dk.reversed = true;
  dk.out = result.dk;
  dk.of = keys;
  dk.dots = decays ? launcher.take(key_blocks * tokens * p.Hkv) : nullptr;
  run_walk<Scalar, Tall>(launcher, dk, final_gradient, output_states(nullptr, result.dinitial_z));

  Walk dv = make_walk(p, pieces);
  dv.read = keys, dv.write = queries, dv.values = dn;
  dv.reversed = true;
  dv.out = result.dv;
  run_walk<Scalar, S>(launcher, dv, {final_gradient.kv, nullptr, false},
                      output_states(result.dinitial_kv, nullptr));

  if (!decays) return;
  DecayGradient arguments{};
  static_cast<Sequences&>(arguments) = p;
  arguments.pieces = pieces;
  arguments.num_tokens = tokens;
  arguments.column_blocks = key_blocks;
  arguments.log_decay = p.log_decay, arguments.dlog_decay = result.dlog_decay;
  arguments.q_dots = dq.dots, arguments.k_dots = dk.dots;
  arguments.state = input_states(input.forward.kv, p.normalize ? input.forward.z : nullptr);
  arguments.gradient = final_gradient;
  launcher.run(decay_gradient_kernel, p.num_sequences * p.Hkv, 32, 0, arguments);
}

// ---- by dtype ----

template <class Scalar>
void forward(Launcher& launcher, const LinearAttentionProblem& p,
             const LinearAttentionResult& result, const CudaDevice& device) {
  return is_narrow<Scalar>(p, device)
             ? forward<Scalar, NarrowTiles<Scalar>>(launcher, p, result, device)
             : forward<Scalar, Tiles<Scalar>>(launcher, p, result, device);
}

template <class Scalar>
void backward(Launcher& launcher, const LinearAttentionProblem& p,
              const LinearAttentionUpstream& input, const LinearAttentionGradients& result,
              const CudaDevice& device) {
  return is_narrow<Scalar>(p, device)
             ? backward<Scalar, NarrowTiles<Scalar>>(launcher, p, input, result, device)
             : backward<Scalar, Tiles<Scalar>>(launcher, p, input, result, device);
}

}  // namespace hfla::cuda
