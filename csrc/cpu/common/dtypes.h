// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What tensors hold, what is computed with instead, and the one switch from a dtype to these types.
#pragma once

#include "cpu/common/isa.h"

namespace hfla::HFLA_ISA {
namespace {

// What a tensor holds. The two halves are only ever converted, so bits are enough.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// The accumulation type: float, or double where the tensors are double.
template <class Scalar>
struct AccOfScalar {
  using type = float;
};
template <>
struct AccOfScalar<double> {
  using type = double;
};
template <class Scalar>
using AccOf = typename AccOfScalar<Scalar>::type;

// Calls run(a number of the tensors' type), where none are double.
template <class Run>
HFLA_INLINE auto with_dtype_but_double(DType dtype, Run run) {
  switch (dtype) {
    case DType::f32:
      return run(float{});
    case DType::bf16:
      return run(BFloat16{});
    case DType::f16:
      return run(Float16{});
    case DType::f64:
      break;
  }
  __builtin_unreachable();
}

// Whether this instruction set has kernels of doubles, and of all else. setup.py leaves out what
// another one's serve.
#ifdef HFLA_WITHOUT_DOUBLE
constexpr bool kHasDouble = false;
#else
constexpr bool kHasDouble = true;
#endif
#ifdef HFLA_DOUBLE_ALONE
constexpr bool kHasOthers = false;
#else
constexpr bool kHasOthers = true;
#endif

// Calls run(a number of the type of some tensor beside those that choose the kernels), which
// returns a Status.
template <class Run>
HFLA_INLINE Status with_any_dtype(DType dtype, Run run) {
  if (dtype == DType::f64) return run(double{});
  return with_dtype_but_double(dtype, run);
}

// Calls run(a number of the tensors' type), which returns a Status.
template <class Run>
HFLA_INLINE Status with_dtype(DType dtype, Run run) {
  if constexpr (!kHasOthers) {
    return run(double{});
  } else if constexpr (kHasDouble) {
    return with_any_dtype(dtype, run);
  } else {
    return with_dtype_but_double(dtype, run);
  }
}

// Calls run(a number of the tensors' type), where that is accumulated as Acc.
template <class Acc, class Run>
HFLA_INLINE auto with_dtype_of(DType dtype, Run run) {
  if constexpr (sizeof(Acc) == sizeof(double)) {
    return run(double{});
  } else {
    return with_dtype_but_double(dtype, run);
  }
}

// Calls run(a number of the type that tensors of the dtype are accumulated in), which returns a
// Status.
template <class Run>
HFLA_INLINE Status with_acc(DType dtype, Run run) {
  if constexpr (kHasDouble) {
    if (!kHasOthers || dtype == DType::f64) return run(double{});
  }
  if constexpr (kHasOthers) return run(float{});
}

template <class Acc>
constexpr DType dtype_of = sizeof(Acc) == sizeof(double) ? DType::f64 : DType::f32;

// Whether that is the type that tensors of the dtype are accumulated in.
HFLA_INLINE constexpr bool is_acc(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f64;
}

}  // namespace
}  // namespace hfla::HFLA_ISA
