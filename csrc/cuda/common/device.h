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
#define PRAGMA(text) _Pragma(#text)
#define UNROLL_BY(count) PRAGMA(unroll count)
#define LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)

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

// The same number; but what follows from it is found anew, and not kept in registers since it was
// found before.
DEV int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// In one instruction, where a compiler may take several.
DEV uint64_t multiply_wide(uint32_t a, uint32_t b) {
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

// To about 2^-20 of it, and 0 in place of what is not normal.
DEV float fast_exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}
DEV float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEV float fast_reciprocal_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEV uint16_t to_bf16(float x) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
DEV uint32_t to_bf16_pair(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// Loads of 8 x 8 matrices of two-byte elements from shared memory: lane l gives the address of row
// l % 8 of matrix l / 8, of 16 aligned bytes, and gets of each matrix two neighbours, (l / 4,
// 2 (l % 4)) and the next, in the matrix or in its transpose.
template <bool transposed>
DEV void load_matrices(uint32_t (&x)[4], const void* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
  }
}
template <bool transposed>
DEV void load_matrices(uint32_t (&x)[2], const void* row) {  // lanes from 16 on give none
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(x[0]), "=r"(x[1])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(x[0]), "=r"(x[1])
                 : "r"(address)
                 : "memory");
  }
}

// A matrix of 8 x 8 such elements, of which a lane has two neighbours as above: those of its
// transpose.
DEV uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

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

// A kernel's code is loaded onto the current device by the first call that needs it; by this one,
// if it comes first. A launch then loads nothing, which a graph that is being captured may not do.
template <class... Parameters>
int load(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
}

// What was in this memory of the device is no longer needed.
inline void forget(void*, int64_t) {}

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

#include "cuda/common/emulator_products.h"

#endif
