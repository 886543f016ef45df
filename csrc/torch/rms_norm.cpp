// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The ops of kernels/rms_norm.h.

#include "torch/dense.h"
#include "torch/devices.h"
#include "torch/ops.h"

namespace hfla {
namespace {

RmsNormProblem make_rms_norm_problem(const Tensor& x, const Tensor& weight, double eps) {
  RmsNormProblem p{};
  p.dtype = dtype_of("x", x);
  p.rows = count_rows(x);
  p.columns = x.size(x.dim() - 1);
  check_contiguous_tensor("weight", weight, x.device(), x.dtype(), {p.columns});
  p.eps = eps;
  p.x = x.data();
  p.weight = weight.data();
  return p;
}

void rms_norm(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const RmsNormProblem p = make_rms_norm_problem(x, weight, arguments.number());
  Tensor y = empty_like(x, x.dtype(), x.device());
  if (p.columns == 0) return give_back(stack, y);  // whose rows may be without number
  check_status(cpu(p.dtype).rms_norm.forward(p, {y.mutable_data(), nullptr}, torch_threads()));
  give_back(stack, y);
}

void rms_norm_forward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const RmsNormProblem p = make_rms_norm_problem(x, weight, arguments.number());
  Tensor y = empty_like(x, x.dtype(), x.device());
  Tensor inverse_rms = Tensor::empty(accumulation_dtype(p.dtype), {p.rows}, x.device());
  const RmsNormResult result{y.mutable_data(), inverse_rms.mutable_data()};
  check_status(cpu(p.dtype).rms_norm.forward(p, result, torch_threads()));
  give_back(stack, y, inverse_rms);
}

void rms_norm_backward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor dy = arguments.tensor();
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const Tensor inverse_rms = arguments.tensor();
  const RmsNormProblem p = make_rms_norm_problem(x, weight, /*eps=*/0);
  check_tensor("dy", dy, x.device(), x.dtype(), shape_of(x));
  check(dy.is_contiguous(), "dy must be contiguous");
  check_contiguous_tensor("inverse_rms", inverse_rms, x.device(), accumulation_dtype(p.dtype),
                          {p.rows});
  Tensor dx = empty_like(x, x.dtype(), x.device());
  Tensor dweight = empty_like(weight, x.dtype(), x.device());
  const RmsNormGradients gradients{dy.data(), inverse_rms.data(), dx.mutable_data(),
                                   dweight.mutable_data()};
  check_status(cpu(p.dtype).rms_norm.backward(p, gradients, torch_threads()));
  give_back(stack, dx, dweight);
}

constexpr char kRmsNorm[] = "rms_norm", kForward[] = "rms_norm_forward",
               kBackward[] = "rms_norm_backward";

constexpr Op kOps[] = {
    op<rms_norm, kRmsNorm>("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor y", false),
    op<rms_norm_forward, kForward>(
        "rms_norm_forward(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor inverse_rms)",
        false),
    op<rms_norm_backward, kBackward>(
        "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor inverse_rms) "
        "-> (Tensor dx, Tensor dweight)",
        false),
};

}  // namespace

const Ops rms_norm_ops = ops_of(kOps);

}  // namespace hfla
