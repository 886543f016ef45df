// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The ops of kernels/linear.h.

#include "torch/dense.h"
#include "torch/devices.h"
#include "torch/ops.h"

namespace hfla {
namespace {

// What both problems have: all but the rows and strides of x (..., in), and y.
template <class Problem>
void set_matrices(Problem& p, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const Device device = x.device();
  p.dtype = dtype_of("x", x);
  p.in = x.size(x.dim() - 1);
  check(weight.dim() == 2, "weight must have shape (out, in), got ", shape_of(weight));
  p.out = weight.size(0);
  check_tensor("weight", weight, device, x.dtype(), {p.out, p.in});
  if (bias) check_contiguous_tensor("bias", bias, device, x.dtype(), {p.out});
  p.x = x.data();
  p.weight = weight.data();
  p.bias = data_or_null(bias);
}

void linear(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const Tensor bias = arguments.optional_tensor();

  LinearProblem p{};
  p.rows = count_rows(x);
  set_matrices(p, x, weight, bias);
  check(weight.is_contiguous(), "weight must be contiguous");
  Tensor y = empty_outputs(x, p.out);
  p.y = y.mutable_data();
  check_status(cpu(p.dtype).linear(p, torch_threads()));
  give_back(stack, y);
}

void many_rows_linear(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const Tensor bias = arguments.optional_tensor();

  ManyRowsLinearProblem p{};
  check(x.dim() == 2, "x must have shape (rows, in), got ", shape_of(x));
  p.rows = x.size(0);
  set_matrices(p, x, weight, bias);
  check(p.dtype != DType::f64, "x must be float32, bfloat16 or float16, got float64");
  for (int64_t d = 0; d < 2; ++d) {
    p.x_strides[d] = x.strides()[d];
    p.weight_strides[d] = weight.strides()[d];
  }
  Tensor y = empty_outputs(x, p.out);
  p.y = y.mutable_data();
  check_status(cpu(p.dtype).many_rows_linear(p, torch_threads()));
  give_back(stack, y);
}

constexpr char kLinear[] = "linear", kManyRowsLinear[] = "many_rows_linear";

constexpr Op kOps[] = {
    op<linear, kLinear>("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor y", false),
    op<many_rows_linear, kManyRowsLinear>(
        "many_rows_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor y", false),
};

}  // namespace

const Ops linear_ops = ops_of(kOps);

}  // namespace hfla
