// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The kernels of one dtype, as kernels/linear_attention.h names them.
#pragma once

#include "cuda/linear_attention/kernels.h"
#include "cuda/linear_attention/launch.cuh"
#include "cuda/linear_attention/step.cuh"

namespace hfla::cuda {

template <class Scalar>
int table_forward(const LinearAttentionProblem& p, const LinearAttentionResult& result,
                  const CudaPlace& place) {
  return launch_at(place,
                   [&](Launcher& launcher) { forward<Scalar>(launcher, p, result, place.device); });
}

template <class Scalar>
int table_backward(const LinearAttentionProblem& p, const LinearAttentionUpstream& input,
                   const LinearAttentionGradients& result, const CudaPlace& place) {
  return launch_at(place, [&](Launcher& launcher) {
    backward<Scalar>(launcher, p, input, result, place.device);
  });
}

template <class Scalar>
int table_step(const LinearAttentionStep& p, void* stream) {
  return step<Scalar>(p, static_cast<Stream>(stream));
}

template <class Scalar, class... K>
int load_walks(Kernels<K...>) {
  return load_all(walk_kernel<Scalar, typename K::S, typename K::Fixed>...);
}

template <class Scalar>
int table_load() {
  int error = load_walks<Scalar>(typename General<Scalar>::All{});
  if (!error) error = load_walks<Scalar>(typename Special<Scalar>::All{});
  if (error) return error;
  return load_all(combine_kernel, normalizer_gradient_kernel<Scalar>, state_dots_kernel,
                  decay_sums_kernel, decay_gradient_kernel, step_kernel<Scalar, 1, 1>,
                  step_kernel<Scalar, 1, 4>, step_kernel<Scalar, 4, 1>, step_kernel<Scalar, 4, 4>);
}

template <class Scalar>
constexpr LinearAttentionOnCuda kTable = {table_load<Scalar>, table_forward<Scalar>,
                                          table_backward<Scalar>, table_step<Scalar>};

}  // namespace hfla::cuda
