// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The op of kernels/decay_steps.h.

#include "torch/dense.h"
#include "torch/devices.h"
#include "torch/ops.h"

namespace hfla {
namespace {

// Checks a parameter (numbers,) of x's dtype or of floats; whether it is of floats.
bool check_parameter(const char* name, const Tensor& parameter, const Tensor& x, int64_t numbers) {
  const bool has_floats = parameter.dtype() == aoti_torch_dtype_float32();
  check_contiguous_tensor(name, parameter, x.device(), has_floats ? parameter.dtype() : x.dtype(),
                          {numbers});
  return has_floats;
}

// Elements between rows of x, all of whose dimensions but the last are rows.
int64_t row_stride_of(const Tensor& x) {
  int64_t stride = 0, rows = 1;  // a stride is known as soon as there is more than a row
  bool are_rows = x.dim() >= 1 && x.dim() <= Tensor::kMaxDim;
  for (int64_t d = x.dim() - 2; are_rows && d >= 0; --d) {
    if (x.size(d) <= 1) continue;
    if (rows == 1) stride = x.strides()[d];
    are_rows = x.strides()[d] == rows * stride;
    rows *= x.size(d);
  }
  check(are_rows && (x.size(x.dim() - 1) <= 1 || x.strides()[x.dim() - 1] == 1),
        "x must have rows that are equally far apart, got ", shape_of(x));
  return stride;
}

void decay_steps(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor bias = arguments.tensor();
  const Tensor A_log = arguments.tensor();
  DecayStepsProblem p{};
  p.rounds = arguments.boolean();
  p.dtype = dtype_but_double("x", x);
  p.row_stride = row_stride_of(x);
  p.columns = x.size(x.dim() - 1);
  p.rows = 1;
  for (int64_t d = 0; d < x.dim() - 1; ++d) p.rows *= x.size(d);
  p.has_float_bias = check_parameter("bias", bias, x, p.columns);
  const int32_t float32 = aoti_torch_dtype_float32();
  Tensor steps = Tensor::empty(float32, x.sizes(), x.dim(), x.device());
  Tensor log_decay = Tensor::empty(float32, x.sizes(), x.dim(), x.device());
  const int64_t groups = A_log.dim() == 1 ? A_log.size(0) : 0;
  check(p.columns == 0 || (groups > 0 && p.columns % groups == 0),
        "A_log must have shape (H,) where ", p.columns, " columns are a multiple of H, got ",
        shape_of(A_log));
  p.has_float_A_log = check_parameter("A_log", A_log, x, groups);
  if (p.columns == 0) return give_back(stack, steps, log_decay);  // of rows without number
  p.group = p.columns / groups;
  p.x = x.data();
  p.bias = bias.data();
  p.A_log = A_log.data();
  p.steps = static_cast<float*>(steps.mutable_data());
  p.log_decay = static_cast<float*>(log_decay.mutable_data());
  check_status(cpu(p.dtype).decay_steps(p, torch_threads()));
  give_back(stack, steps, log_decay);
}

constexpr char kDecaySteps[] = "decay_steps";

constexpr Op kOps[] = {
    op<decay_steps, kDecaySteps>("decay_steps(Tensor x, Tensor bias, Tensor A_log, bool rounds) "
                                 "-> (Tensor steps, Tensor log_decay)",
                                 false),
};

}  // namespace

const Ops decay_steps_ops = ops_of(kOps);

}  // namespace hfla
