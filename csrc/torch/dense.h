// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What ops on the last dimension of a tensor share.
#pragma once

#include "torch/checks.h"

namespace hfla {

// Of x as a matrix: all its dimensions but the last one together.
inline int64_t count_rows(const Tensor& x) {
  check(x.dim() >= 1 && x.dim() <= Tensor::kMaxDim, "x must have 1 to ", Tensor::kMaxDim,
        " dimensions, got ", shape_of(x));
  check(x.is_contiguous(), "x must be contiguous");
  int64_t rows = 1;
  for (int64_t d = 0; d < x.dim() - 1; ++d) rows *= x.size(d);
  return rows;
}

// Of an op that has no kernel of doubles.
inline DType dtype_but_double(const char* name, const Tensor& x) {
  const DType dtype = dtype_of(name, x);
  check(dtype != DType::f64, name, " must not be float64");
  return dtype;
}

// For x (..., in), new memory of (..., out).
inline Tensor empty_outputs(const Tensor& x, int64_t out) {
  const int64_t dim = x.dim();
  int64_t sizes[Tensor::kMaxDim];
  for (int64_t d = 0; d < dim - 1; ++d) sizes[d] = x.size(d);
  sizes[dim - 1] = out;
  return Tensor::empty(x.dtype(), sizes, dim, x.device());
}

}  // namespace hfla
