// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The rules under which one set of sources serves every instruction set.
//
// Files named *_isa.cpp are compiled once per instruction set, with -DHFLA_ISA=<name> and that
// set's compiler flags, and live in namespace hfla::<name>. The linker would merge an inline
// function that two of these objects export, and an old CPU might then run the newest instructions.
// Hence: whatever the shared headers define is in an anonymous namespace, and nothing inline of the
// standard library is used.
#pragma once

#include "kernels/common.h"

#ifndef HFLA_ISA
#error "compile with -DHFLA_ISA=<the instruction set's name>"
#endif

#define HFLA_INLINE inline __attribute__((always_inline))
#define HFLA_NOINLINE __attribute__((noinline))  // once per task, from many places
#define HFLA_INLINE_LAMBDA __attribute__((always_inline))
#define HFLA_UNROLL _Pragma("GCC unroll 16")

namespace hfla::HFLA_ISA {

namespace {

constexpr int64_t kCacheLine = 64;  // bytes; where lines are longer, a fine alignment all the same

HFLA_INLINE constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
HFLA_INLINE constexpr int64_t max(int64_t a, int64_t b) { return a < b ? b : a; }
HFLA_INLINE int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }
HFLA_INLINE int64_t round_up(int64_t n, int64_t multiple) {
  return ceil_div(n, multiple) * multiple;
}

HFLA_INLINE float square_root(float x) { return __builtin_sqrtf(x); }
HFLA_INLINE double square_root(double x) { return __builtin_sqrt(x); }

}  // namespace
}  // namespace hfla::HFLA_ISA
