// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The kernels of one dtype, as kernels/delta_rule.h names them.
#pragma once

#include "cuda/delta_rule/kernels.h"
#include "cuda/delta_rule/launch.cuh"
#include "cuda/delta_rule/step.cuh"

namespace hfla::cuda {

template <class Scalar>
int delta_table_forward(const DeltaRuleProblem& p, const DeltaRuleResult& result,
                        const CudaPlace& place) {
  return launch_at(
      place, [&](Launcher& launcher) { delta_forward<Scalar>(launcher, p, result, place.device); });
}

template <class Scalar>
int delta_table_backward(const DeltaRuleProblem& p, const DeltaRuleUpstream& input,
                         const DeltaRuleGradients& result, const CudaPlace& place) {
  return launch_at(place, [&](Launcher& launcher) {
    delta_backward<Scalar>(launcher, p, input, result, place.device);
  });
}

template <class Scalar>
int delta_table_step(const DeltaRuleStep& p, void* stream) {
  return delta_step<Scalar>(p, static_cast<Stream>(stream));
}

template <int K>
int delta_load_fixed_size() {
  return load_all(delta_fixed_size_prepare_kernel<K, false>,
                  delta_fixed_size_prepare_kernel<K, true>,
                  delta_fixed_size_outputs_kernel<K, false>,
                  delta_fixed_size_outputs_kernel<K, true>, delta_fixed_size_states_kernel<K>,
                  delta_fixed_size_gradients_kernel<K>, delta_fixed_size_token_gradients_kernel<K>);
}

template <class Scalar>
int delta_table_load() {
  if constexpr (std::is_same_v<Scalar, BFloat16>) {
    const int error = delta_load_fixed_size<64>();
    if (error) return error;
    const int error_of_128 = delta_load_fixed_size<128>();
    if (error_of_128) return error_of_128;
  }
  return load_all(
      delta_prepare_kernel<Scalar, false>, delta_prepare_kernel<Scalar, true>,
      delta_outputs_kernel<Scalar, kManyColumns<Scalar>>, delta_outputs_kernel<Scalar, kFewColumns>,
      delta_states_kernel<Scalar, kManyColumns<Scalar>>, delta_states_kernel<Scalar, kFewColumns>,
      delta_gradients_kernel<Scalar, kManyColumns<Scalar>>,
      delta_gradients_kernel<Scalar, kFewColumns>, delta_token_gradients_kernel<Scalar, false>,
      delta_token_gradients_kernel<Scalar, true>, delta_finish_kernel<Scalar>,
      delta_step_kernel<Scalar, 1>, delta_step_kernel<Scalar, 4>);
}

template <class Scalar>
constexpr DeltaRuleOnCuda kDeltaRuleTable = {delta_table_load<Scalar>, delta_table_forward<Scalar>,
                                             delta_table_backward<Scalar>,
                                             delta_table_step<Scalar>};

}  // namespace hfla::cuda
