// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The op of kernels/sinusoids.h.

#include "torch/dense.h"
#include "torch/devices.h"
#include "torch/ops.h"

namespace hfla {
namespace {

void add_sinusoids(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor position_ids = arguments.tensor();
  const Tensor frequencies = arguments.tensor();
  SinusoidsProblem p{};
  p.scale = arguments.number();
  p.dtype = dtype_of("x", x);
  check(x.dim() == 3, "x must have shape (B, T, C), got ", shape_of(x));
  p.tokens = count_rows(x);
  p.columns = x.size(2);
  check(position_ids.dim() == 2, "position_ids must have shape (B or 1, T), got ",
        shape_of(position_ids));
  const int64_t B = position_ids.size(0) == 1 ? 1 : x.size(0);
  check_contiguous_tensor("position_ids", position_ids, x.device(), aoti_torch_dtype_int64(),
                          {B, x.size(1)});
  check(p.columns % 2 == 0, "x must have an even number of columns, got ", p.columns);
  check_contiguous_tensor("frequencies", frequencies, x.device(), aoti_torch_dtype_float32(),
                          {p.columns / 2});
  p.positions = B * x.size(1);
  Tensor y = Tensor::empty(x.dtype(), x.sizes(), x.dim(), x.device());
  if (p.columns == 0) return give_back(stack, y);  // whose tokens may be without number
  p.x = x.data();
  p.position = static_cast<const int64_t*>(position_ids.data());
  p.frequencies = static_cast<const float*>(frequencies.data());
  p.y = y.mutable_data();
  check_status(cpu(p.dtype).add_sinusoids(p));
  give_back(stack, y);
}

constexpr char kAddSinusoids[] = "add_sinusoids";

constexpr Op kOps[] = {
    op<add_sinusoids, kAddSinusoids>(
        "add_sinusoids(Tensor x, Tensor position_ids, Tensor frequencies, float scale) -> Tensor y",
        false),
};

}  // namespace

const Ops sinusoids_ops = ops_of(kOps);

}  // namespace hfla
