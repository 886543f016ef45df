// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What kernels are written with. One vocabulary, two worlds: nvcc makes CUDA of it, and any C++
// compiler a program that emulates one block at a time (emulator.h), for tests without a GPU.
//
// Kernels know nothing else of CUDA: no threadIdx, no __shared__, no intrinsics. Shared memory is
// one dynamic array, which the emulator fills with NaN before a block starts.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)

#include <cuda_runtime.h>

#define KERNEL static __global__ void
#define GRID_CONSTANT __grid_constant__
#define DEV __device__ __forceinline__
#define BOTH __host__ __device__ __forceinline__  // for the host, too
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
#define LAUNCH_BOUNDS(threads) __launch_bounds__(threads)

namespace hfla::cuda {

DEV int thread_index() { return threadIdx.x; }
DEV int64_t block_index() { return blockIdx.x; }

DEV char* shared_memory() {
  extern __shared__ __align__(16) char dynamic_shared_memory[];
  return dynamic_shared_memory;
}

DEV void sync_block() { __syncthreads(); }

// All 32 lanes take part in what follows.
template <class T>
DEV T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
template <class T>
DEV T shuffle_up(T value, int lanes) {  // unchanged in the first lanes
  return __shfl_up_sync(0xffffffffu, value, lanes);
}
template <class T>
DEV T shuffle_xor(T value, int lanes) {
  return __shfl_xor_sync(0xffffffffu, value, lanes);
}

DEV float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
DEV uint32_t float_to_bits(float x) { return __float_as_uint(x); }

// c += a b for 16 x 16 by 16 x 8 bf16, two to a register; the layout is PTX's.
DEV void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c += a b for 16 x 8 by 8 x 8 tf32: floats of which the last 13 bits are ignored.
DEV void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

using Stream = cudaStream_t;

// Returns cudaSuccess, or what the runtime says.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes,
           Stream stream, const Arguments&... arguments) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  constexpr int64_t kWithoutAsking = 48 << 10;
  if (shared_bytes > kWithoutAsking) {
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  kernel<<<dim3(unsigned(blocks)), dim3(unsigned(threads)), size_t(shared_bytes), stream>>>(
      arguments...);
  return cudaGetLastError();
}

}  // namespace hfla::cuda

#else

#include "cuda/emulator.h"

#endif
