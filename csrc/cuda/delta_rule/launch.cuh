// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// From a problem to launches (chunk.cuh). Nothing here waits for the device or allocates: the
// caller provides a workspace, and all decisions depend on shapes alone, so that a CUDA graph can
// record it.
#pragma once

#include "cuda/common/launcher.cuh"
#include "cuda/delta_rule/finish.cuh"
#include "cuda/delta_rule/fixed_size_back_walk.cuh"
#include "cuda/delta_rule/fixed_size_prepare.cuh"
#include "cuda/delta_rule/fixed_size_state_walk.cuh"
#include "cuda/delta_rule/fixed_size_token_gradients.cuh"
#include "cuda/delta_rule/fixed_size_walk.cuh"
#include "cuda/delta_rule/prepare.cuh"
#include "cuda/delta_rule/token_gradients.cuh"
#include "cuda/delta_rule/walk.cuh"

namespace hfla::cuda {

// Columns of the state that a block has: more than few where there are blocks enough for the
// device, and the memory. Operands of four bytes take few only: they are not the ones to be fast,
// and each kernel takes long to compile.
constexpr int kFewColumns = 16;
template <class Scalar>
constexpr int kManyColumns = sizeof(typename Chunk<Scalar>::Element) == 2 ? 32 : kFewColumns;

template <class Scalar, int columns>
int64_t delta_walk_bytes(int64_t K) {
  return DeltaWalkShared<Scalar, columns>(SharedCarver(nullptr), K).bytes;
}

template <class Scalar>
bool takes_many_columns(const DeltaRuleChunks& p, const CudaDevice& device) {
  const int64_t blocks = p.num_sequences * p.Hkv * ceil_div(p.V, kManyColumns<Scalar>);
  return blocks >= device.multiprocessors &&
         delta_walk_bytes<Scalar, kManyColumns<Scalar>>(p.K) <= device.shared_bytes;
}

// One of the walks, as the kernel for many and the one for few columns.
template <class Scalar, class Kernel>
void run_delta_walk(Launcher& launcher, const DeltaRuleChunks& p, const CudaDevice& device,
                    Kernel many, Kernel few) {
  const int64_t heads = p.num_sequences * p.Hkv;
  if (takes_many_columns<Scalar>(p, device)) {
    launcher.run(many, heads * ceil_div(p.V, kManyColumns<Scalar>), kDeltaWalkThreads,
                 delta_walk_bytes<Scalar, kManyColumns<Scalar>>(p.K), p);
  } else {
    launcher.run(few, heads * ceil_div(p.V, kFewColumns), kDeltaWalkThreads,
                 delta_walk_bytes<Scalar, kFewColumns>(p.K), p);
  }
}

// Calls run(whether there is an erase key), as a constant.
template <class Run>
void with_erases(const DeltaRuleProblem& p, Run run) {
  p.erase_key.data ? run(std::true_type()) : run(std::false_type());
}

template <class Scalar>
DeltaRuleChunks prepare_chunks(Launcher& launcher, const DeltaRuleProblem& p, bool backward) {
  DeltaRuleChunks chunks{};
  static_cast<DeltaRuleProblem&>(chunks) = p;
  chunks.pieces = {p.cu_seqlens, p.T, p.num_sequences, Chunk<Scalar>::C / chunks.steps()};
  chunks.backward = backward;
  const int64_t blocks = chunks.pieces.count() * p.Hkv;
  chunks.units = launcher.take<char>(blocks * Units(p.K).per_chunk() * UnitLayout<Scalar>::kBytes);
  with_erases(p, [&](auto erases) {
    constexpr bool kErases = decltype(erases)::value;
    launcher.run(delta_prepare_kernel<Scalar, kErases>, blocks, Chunk<Scalar>::kThreads,
                 PrepareShared<Scalar, kErases>(SharedCarver(nullptr)).bytes, chunks);
  });
  return chunks;
}

// Gradients of q or k, summed over the heads that share one.
template <class Scalar>
void finish_rows(Launcher& launcher, const DeltaRuleProblem& p, const View& x, const View& dx,
                 const float* dy, int64_t group, double scale, bool normalize) {
  const int heads = int(p.Hkv / group), blocks = int(ceil_div(p.T, kFinishTokens));
  const FinishRows arguments{x,     dx,    dy,     p.key_mask,   p.T,      p.K,
                             p.Hkv, heads, blocks, float(scale), normalize};
  launcher.run(delta_finish_kernel<Scalar>, p.B * heads * blocks, kFinishThreads, 0, arguments);
}

// ---- where all sizes are fixed ----

template <int K>
bool is_fixed_size(const DeltaRuleProblem& p) {
  return p.K == K && p.V % 16 == 0 && p.delta && !p.erase_key.data && !p.key_mask &&
         !p.decay_per_channel && has_plain_rows<BFloat16>(p.q) && has_plain_rows<BFloat16>(p.k) &&
         p.T <= INT32_MAX / 2;
}
template <int K>
bool is_fixed_size_forward(const DeltaRuleProblem& p, const DeltaRuleResult& result,
                           const CudaDevice& device) {
  return is_fixed_size<K>(p) && has_plain_rows<BFloat16>(p.v) &&
         has_plain_rows<BFloat16>(result.y) && (!result.errors.data || result.errors.dim == 1) &&
         FixedSizeShared<K>::kBytes <= device.shared_bytes;
}
template <int K>
bool is_fixed_size_backward(const DeltaRuleProblem& p, const DeltaRuleUpstream& input,
                            const DeltaRuleGradients& result, const CudaDevice& device) {
  const int64_t bytes = GradientShared<K>(SharedCarver(nullptr)).bytes;
  return is_fixed_size<K>(p) && has_plain_rows<BFloat16>(input.dy) &&
         has_plain_rows<float>(input.errors) && has_plain_rows<BFloat16>(result.dq) &&
         has_plain_rows<BFloat16>(result.dk) && has_plain_rows<BFloat16>(result.dv) &&
         BackShared<K>::kBytes <= device.shared_bytes && bytes <= device.shared_bytes;
}

template <int K, bool backward>
FixedSizeDeltaRule prepare_fixed_size(Launcher& launcher, const DeltaRuleProblem& p) {
  FixedSizeDeltaRule fixed{};
  static_cast<DeltaRuleProblem&>(fixed) = p;
  fixed.pieces = {p.cu_seqlens, p.T, p.num_sequences, kFixedSizeTokens};
  const int64_t chunks = fixed.pieces.count() * p.Hkv;
  fixed.units = launcher.take<char>(chunks * kFixedSizeUnitBytes);
  if (backward) fixed.token_units = launcher.take(chunks * TokenUnit::kBytes / 4);
  launcher.run(delta_fixed_size_prepare_kernel<K, backward>, chunks, kFixedSizeThreads,
               FixedSizePrepareShared<K>(SharedCarver(nullptr)).bytes, fixed);
  return fixed;
}

template <int K>
void run_fixed_size_forward(Launcher& launcher, const DeltaRuleProblem& p,
                            const DeltaRuleResult& result) {
  FixedSizeDeltaRule fixed = prepare_fixed_size<K, false>(launcher, p);
  fixed.result = result;
  launcher.run(result.errors.data ? delta_fixed_size_outputs_kernel<K, true>
                                  : delta_fixed_size_outputs_kernel<K, false>,
               p.num_sequences * p.Hkv * ceil_div(p.V, kFixedSizeColumns), kFixedSizeThreads,
               FixedSizeShared<K>::kBytes, fixed);
}

template <int K>
void run_fixed_size_backward(Launcher& launcher, const DeltaRuleProblem& p,
                             const DeltaRuleUpstream& input, const DeltaRuleGradients& result) {
  FixedSizeDeltaRule fixed = prepare_fixed_size<K, true>(launcher, p);
  fixed.upstream = input, fixed.gradients = result;
  const int64_t chunks = fixed.pieces.count() * p.Hkv, rows = p.B * p.T * p.Hkv;
  const int64_t walks = p.num_sequences * p.Hkv * ceil_div(p.V, kFixedSizeColumns);
  fixed.states = launcher.take<LaneWords>(chunks * K * p.V / 8);
  fixed.state_gradients = launcher.take<LaneWords>(chunks * K * p.V / 8);
  fixed.errors = launcher.take<BFloat16>(chunks * kFixedSizeTokens * p.V);
  if (p.q_group > 1) fixed.dq = launcher.take(rows * K);
  if (p.k_group > 1) fixed.dk = launcher.take(rows * K);
  launcher.run(delta_fixed_size_states_kernel<K>, walks, kStateThreads,
               2 * StateWalkStage<K>::kBytes, fixed);
  launcher.run(delta_fixed_size_gradients_kernel<K>, walks, kFixedSizeThreads,
               BackShared<K>::kBytes, fixed);
  launcher.run(delta_fixed_size_token_gradients_kernel<K>, chunks, kFixedSizeGradientThreads,
               GradientShared<K>(SharedCarver(nullptr)).bytes, fixed);
  const auto sum_over_heads = [&](const View& dx, const float* dy, int64_t group) {
    if (group > 1) finish_rows<BFloat16>(launcher, p, dx, dx, dy, group, 1, false);
  };
  sum_over_heads(result.dq, fixed.dq, p.q_group);
  sum_over_heads(result.dk, fixed.dk, p.k_group);
}

// Whether sizes were fixed, and it has been run. Templates, lest other dtypes' files have these
// kernels.
template <class Scalar>
bool fixed_size_forward(Launcher& launcher, const DeltaRuleProblem& p,
                        const DeltaRuleResult& result, const CudaDevice& device) {
  const bool is_64 = is_fixed_size_forward<64>(p, result, device);
  const bool is_128 = is_fixed_size_forward<128>(p, result, device);
  if (is_64) run_fixed_size_forward<64>(launcher, p, result);
  if (is_128) run_fixed_size_forward<128>(launcher, p, result);
  return is_64 || is_128;
}
template <class Scalar>
bool fixed_size_backward(Launcher& launcher, const DeltaRuleProblem& p,
                         const DeltaRuleUpstream& input, const DeltaRuleGradients& result,
                         const CudaDevice& device) {
  const bool is_64 = is_fixed_size_backward<64>(p, input, result, device);
  const bool is_128 = is_fixed_size_backward<128>(p, input, result, device);
  if (is_64) run_fixed_size_backward<64>(launcher, p, input, result);
  if (is_128) run_fixed_size_backward<128>(launcher, p, input, result);
  return is_64 || is_128;
}

// ---- forward and backward ----

template <class Scalar>
void delta_forward(Launcher& launcher, const DeltaRuleProblem& p, const DeltaRuleResult& result,
                   const CudaDevice& device) {
  if constexpr (std::is_same_v<Scalar, BFloat16>) {
    if (fixed_size_forward<Scalar>(launcher, p, result, device)) return;
  }
  DeltaRuleChunks chunks = prepare_chunks<Scalar>(launcher, p, false);
  chunks.result = result;
  run_delta_walk<Scalar>(launcher, chunks, device,
                         delta_outputs_kernel<Scalar, kManyColumns<Scalar>>,
                         delta_outputs_kernel<Scalar, kFewColumns>);
}

template <class Scalar>
void delta_backward(Launcher& launcher, const DeltaRuleProblem& p, const DeltaRuleUpstream& input,
                    const DeltaRuleGradients& result, const CudaDevice& device) {
  if constexpr (std::is_same_v<Scalar, BFloat16>) {
    if (fixed_size_backward<Scalar>(launcher, p, input, result, device)) return;
  }
  DeltaRuleChunks chunks = prepare_chunks<Scalar>(launcher, p, true);
  chunks.upstream = input, chunks.gradients = result;
  const int64_t blocks = chunks.pieces.count() * p.Hkv, rows = p.B * p.T * p.Hkv;
  chunks.states = launcher.take(blocks * p.K * p.V);
  chunks.state_gradients = launcher.take(blocks * p.K * p.V);
  chunks.write_gradients = launcher.take(chunks.steps() * rows * p.V);
  chunks.dq = launcher.take(rows * p.K);
  chunks.dk = launcher.take(rows * p.K);
  run_delta_walk<Scalar>(launcher, chunks, device,
                         delta_states_kernel<Scalar, kManyColumns<Scalar>>,
                         delta_states_kernel<Scalar, kFewColumns>);
  run_delta_walk<Scalar>(launcher, chunks, device,
                         delta_gradients_kernel<Scalar, kManyColumns<Scalar>>,
                         delta_gradients_kernel<Scalar, kFewColumns>);
  with_erases(p, [&](auto erases) {
    constexpr bool kErases = decltype(erases)::value;
    launcher.run(delta_token_gradients_kernel<Scalar, kErases>, blocks, Chunk<Scalar>::kThreads,
                 TokenGradientsShared<Scalar, kErases>(SharedCarver(nullptr)).bytes, chunks);
  });
  finish_rows<Scalar>(launcher, p, p.q, result.dq, chunks.dq, p.q_group, p.scale, p.normalize_qk);
  finish_rows<Scalar>(launcher, p, p.k, result.dk, chunks.dk, p.k_group, 1, p.normalize_qk);
}

}  // namespace hfla::cuda
