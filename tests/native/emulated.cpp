// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The CUDA kernels, emulated, for tests/native/test_cuda_kernels.py to call through ctypes.

#include "cuda/common/device.h"
#include "cuda/delta_rule/kernels.h"
#include "kernels/cuda.h"

// The delta rule's kernels are tried through the ops, by test_cuda_ops.py.
const hfla::DeltaRuleOnCuda hfla::cuda::delta_rule_f32{}, hfla::cuda::delta_rule_bf16{},
    hfla::cuda::delta_rule_f16{};

namespace {

const hfla::LinearAttentionOnCuda& kernels(hfla::DType dtype) {
  return *hfla::cuda_kernels(dtype)->linear_attention;
}

}  // namespace

extern "C" {

// For a comparison with the structures as Python declares them.
int64_t size_of_problems() {
  return sizeof(hfla::LinearAttentionProblem) + sizeof(hfla::LinearAttentionResult) +
         sizeof(hfla::LinearAttentionUpstream) + sizeof(hfla::LinearAttentionGradients) +
         sizeof(hfla::LinearAttentionStep) + sizeof(hfla::CudaDevice) + sizeof(hfla::CudaPlace);
}

// As the first op on a device does.
int load_kernels() {
  int error = 0;
  for (const auto dtype : {hfla::DType::f32, hfla::DType::bf16, hfla::DType::f16}) {
    error = error ? error : kernels(dtype).load();
  }
  return error;
}

// Launches need them again.
void unload_kernels() { hfla::cuda::emulator::machine().loaded.clear(); }

void set_most_shared_bytes(int64_t bytes) {
  hfla::cuda::emulator::machine().most_shared_bytes = bytes;
}

// Of a launch since the last call.
int64_t most_blocks() {
  const int64_t most = hfla::cuda::emulator::machine().most_blocks;
  hfla::cuda::emulator::machine().most_blocks = 0;
  return most;
}

void set_schedule(unsigned schedule) { hfla::cuda::emulator::machine().schedule = schedule; }

// Leaves out a barrier, in one warp or (-1) all.
void set_missing_barrier(int line, int warp) {
  hfla::cuda::emulator::machine().missing_barrier = line;
  hfla::cuda::emulator::machine().missing_in_warp = warp;
}

// Leaves out a wait for copies.
void set_missing_wait(int line) { hfla::cuda::emulator::machine().missing_wait = line; }

// The error of the last call that failed.
const char* emulator_error() {
  static std::string error;
  error.swap(hfla::cuda::emulator::machine().error);
  hfla::cuda::emulator::machine().error.clear();
  return error.c_str();
}

int forward(const hfla::LinearAttentionProblem* p, const hfla::LinearAttentionResult* result,
            const hfla::CudaPlace* place) {
  return kernels(p->dtype).forward(*p, *result, *place);
}

int backward(const hfla::LinearAttentionProblem* p, const hfla::LinearAttentionUpstream* input,
             const hfla::LinearAttentionGradients* result, const hfla::CudaPlace* place) {
  return kernels(p->dtype).backward(*p, *input, *result, *place);
}

int step(const hfla::LinearAttentionStep* p) { return kernels(p->dtype).step(*p, nullptr); }

// The sum of `count` ones times `x` as tensor cores accumulate it: all in one accumulator, or in
// one that starts afresh for each `fresh` of them.
float accumulated(int64_t count, float x, int64_t fresh) {
  using namespace hfla::cuda;
  const double products[8] = {x, x, x, x, x, x, x, x};
  float sum = 0, chunk = 0;
  for (int64_t i = 0; i < count; i += 8) {
    emulator::add_products(chunk, products, 8, 8);
    if ((i + 8) % fresh == 0) sum += chunk, chunk = 0;
  }
  return sum + chunk;
}

const char* feature_map_name(int64_t index) { return hfla::kFeatureMapNames[index]; }
}
