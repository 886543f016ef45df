// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The ops of kernels/linear.h.

#include "torch/dense.h"
#include "torch/devices.h"
#include "torch/ops.h"

namespace hfla {
namespace {

void linear(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const Tensor bias = arguments.optional_tensor();

  const Device device = x.device();
  LinearProblem p{};
  p.dtype = dtype_of("x", x);
  p.rows = count_rows(x);
  const int64_t dim = x.dim();
  p.in = x.size(dim - 1);
  check(weight.dim() == 2, "weight must have shape (out, in), got ", shape_of(weight));
  p.out = weight.size(0);
  check_contiguous_tensor("weight", weight, device, x.dtype(), {p.out, p.in});
  if (bias) check_contiguous_tensor("bias", bias, device, x.dtype(), {p.out});

  int64_t sizes[Tensor::kMaxDim];
  for (int64_t d = 0; d < dim - 1; ++d) sizes[d] = x.size(d);
  sizes[dim - 1] = p.out;
  Tensor y = Tensor::empty(x.dtype(), sizes, dim, device);

  p.x = x.data();
  p.weight = weight.data();
  p.bias = data_or_null(bias);
  p.y = y.mutable_data();
  check_status(cpu().linear(p, torch_threads()));
  give_back(stack, y);
}

void many_rows_linear(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const Tensor bias = arguments.optional_tensor();

  const Device device = x.device();
  ManyRowsLinearProblem p{};
  p.dtype = dtype_of("x", x);
  check(p.dtype != DType::f64, "x must be float32, bfloat16 or float16, got float64");
  check(x.dim() == 2, "x must have shape (rows, in), got ", shape_of(x));
  check(weight.dim() == 2, "weight must have shape (out, in), got ", shape_of(weight));
  p.rows = x.size(0);
  p.in = x.size(1);
  p.out = weight.size(0);
  check_tensor("weight", weight, device, x.dtype(), {p.out, p.in});
  if (bias) check_contiguous_tensor("bias", bias, device, x.dtype(), {p.out});

  const int64_t sizes[] = {p.rows, p.out};
  Tensor y = Tensor::empty(x.dtype(), sizes, 2, device);

  for (int64_t d = 0; d < 2; ++d) {
    p.x_strides[d] = x.strides()[d];
    p.weight_strides[d] = weight.strides()[d];
  }
  p.x = x.data();
  p.weight = weight.data();
  p.bias = data_or_null(bias);
  p.y = y.mutable_data();
  check_status(cpu().many_rows_linear(p, torch_threads()));
  give_back(stack, y);
}

constexpr char kLinear[] = "linear", kManyRowsLinear[] = "many_rows_linear";

constexpr Op kOps[] = {
    {kLinear, "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor y", boxed<linear, kLinear>,
     false},
    {kManyRowsLinear, "many_rows_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor y",
     boxed<many_rows_linear, kManyRowsLinear>, false},
};

}  // namespace

const Ops linear_ops = ops_of(kOps);

}  // namespace hfla
