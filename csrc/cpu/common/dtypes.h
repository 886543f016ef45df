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

// Calls run(a number of the tensors' type), which returns a Status.
template <class Run>
HFLA_INLINE Status with_dtype(DType dtype, Run run) {
  if (dtype == DType::f64) return run(double{});
  return with_dtype_but_double(dtype, run);
}

}  // namespace
}  // namespace hfla::HFLA_ISA
