// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The seam between the torch bindings, which check arguments and allocate results, and the kernels,
// which compute. Plain structs and pointers: no torch, no standard library, so that a kernel file
// can be compiled once per instruction set without exporting an inline function of either.
//
// Shapes: B batch, T time, Hq query heads, Hkv key-value heads, K key dim, V value dim, N packed
// sequences. Strides count elements, not bytes. "acc" is float, or double for f64 inputs.
#pragma once

#include <cstdint>

namespace hfla {

enum class DType : int32_t { f32, bf16, f16, f64 };

// In the order of FEATURE_MAPS in _ops.py.
enum class FeatureMap : int64_t { identity, elu_plus_one, relu, relu2, silu, exp, count };

// A tensor (B, T, H, D) read or written through its strides; log_decay has no D.
struct View {
  void* data = nullptr;  // null: the argument is absent
  int64_t batch = 0, time = 0, head = 0, dim = 0;
};

// Everything that forward and backward read alike. q, k, v share `dtype`; the rest is acc.
struct Problem {
  int64_t B, T, Hq, Hkv, K, V;
  int64_t num_sequences;  // rows of a state: N with cu_seqlens, else B
  const int32_t*
      cu_seqlens;  // (N + 1,) checked by the caller, B == 1; null: each batch row is one sequence
  DType dtype;
  FeatureMap feature_map;
  bool normalize, is_causal;
  double eps;
  View q, k, v;                        // (B, T, Hq, K), (B, T, Hkv, K), (B, T, Hkv, V)
  View log_decay;                      // (B, T, Hkv) acc, optional, never without is_causal
  const bool* key_mask;                // (B, T) contiguous, optional
  const void *initial_kv, *initial_z;  // (rows, Hkv, K, V), (rows, Hkv, K) contiguous, optional
};

struct ForwardResult {
  View y;        // (B, T, Hq, V) of dtype
  void* den;     // (B, T, Hq) acc, contiguous; null when not normalised
  void *kv, *z;  // final state, contiguous, shaped as initial_kv and initial_z; z null when not
                 // normalised
};

struct BackwardInput {
  View dy;               // (B, T, Hq, V) of dtype, optional
  const void *dkv, *dz;  // gradients of the final state, contiguous, optional
  ForwardResult forward;
};

struct BackwardResult {
  View dq, dk, dv;                 // shaped as q, k, v, of dtype
  View dlog_decay;                 // (B, T, Hkv) acc; null when there is no log_decay
  void *dinitial_kv, *dinitial_z;  // null when there is no initial state
};

// One token for every batch row; the time stride of the views is unused.
struct StepProblem {
  int64_t B, Hq, Hkv, K, V;
  DType dtype;
  FeatureMap feature_map;
  bool normalize;
  double eps;
  View q, k, v;          // (B, Hq, K), (B, Hkv, K), (B, Hkv, V)
  View log_decay;        // (B, Hkv) acc, optional
  const bool* key_mask;  // (B,) contiguous, optional
  void *kv, *z;  // (B, Hkv, K, V), (B, Hkv, K) acc, contiguous, updated in place; z null when not
                 // normalised
  View y;        // (B, Hq, V) of dtype
};

// y = x weightᵀ + bias; everything is contiguous and of one dtype.
struct LinearProblem {
  int64_t rows, in, out;
  DType dtype;
  const void* x;       // (rows, in)
  const void* weight;  // (out, in)
  const void* bias;    // (out,), optional
  void* y;             // (rows, out)
};

// y = weight x / sqrt(mean(x²) + eps) for each row of x; everything is contiguous, and of one dtype
// but for inverse_rms.
struct RmsNormProblem {
  int64_t rows, columns;
  DType dtype;
  double eps;
  const void* x;       // (rows, columns)
  const void* weight;  // (columns,)
};

struct RmsNormResult {
  void* y;            // (rows, columns); x / rms is rounded to dtype before it is multiplied
  void* inverse_rms;  // (rows,) acc, optional
};

struct RmsNormGradients {
  const void* dy;           // (rows, columns)
  const void* inverse_rms;  // (rows,) acc, as forward gave it
  void* dx;                 // (rows, columns)
  void* dweight;            // (columns,)
};

// What a kernel found while it read; the bindings turn it into an error with the op's name.
enum class Status : int32_t { ok, positive_log_decay, out_of_memory };

// The caller's threads. body(context, begin, end) runs over disjoint ranges that cover [0, n).
struct Threads {
  int64_t count;
  void (*parallel_for)(int64_t n, void (*body)(void* context, int64_t begin, int64_t end),
                       void* context);
};

// One table per instruction set, all compiled from the same sources.
struct CpuKernels {
  const char* instruction_set;
  Status (*forward)(const Problem&, const ForwardResult&, const Threads&);
  Status (*backward)(const Problem&, const BackwardInput&, const BackwardResult&, const Threads&);
  Status (*step)(const StepProblem&, const Threads&);
  Status (*linear)(const LinearProblem&, const Threads&);
  Status (*rms_norm)(const RmsNormProblem&, const RmsNormResult&, const Threads&);
  Status (*rms_norm_backward)(const RmsNormProblem&, const RmsNormGradients&, const Threads&);
};

// Chosen once, by CPUID; HF_LINEAR_ATTENTION_CPU_ISA forces one. Null, with a reason, when the
// forced one can't run here.
const CpuKernels* cpu_kernels(const char** why_not);

// What CUDA kernels are chosen by.
struct CudaDevice {
  int64_t multiprocessors;
  int64_t shared_bytes;      // that a block may have
  int64_t piece_length = 0;  // tokens, at least, that a block walks through; 0: chosen
};

// For one dtype; float64 has none. Pointers are the device's. All calls are asynchronous, and
// return cudaSuccess or another cudaError_t.
struct CudaKernels {
  // With no workspace, nothing is launched, and *workspace_bytes says how much is needed.
  int (*forward)(const Problem&, const ForwardResult&, const CudaDevice&, void* workspace,
                 int64_t* workspace_bytes, void* stream);
  int (*backward)(const Problem&, const BackwardInput&, const BackwardResult&, const CudaDevice&,
                  void* workspace, int64_t* workspace_bytes, void* stream);
  int (*step)(const StepProblem&, void* stream);
};

extern const CudaKernels cuda_kernels_f32, cuda_kernels_bf16, cuda_kernels_f16;

// csrc/cuda/runtime.cpp: a device as it is, and a cudaError_t in words.
int cuda_device(int32_t index, CudaDevice* device);
const char* cuda_error_text(int error);

}  // namespace hfla
