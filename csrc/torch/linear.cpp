// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The ops of kernels/linear.h.

#include <cstring>
#include <vector>

#include "torch/dense.h"
#include "torch/devices.h"
#include "torch/ops.h"

namespace hfla {
namespace {

// What both problems have: all but dtypes, the rows and strides of x (..., in), and y.
template <class Problem>
void set_matrices(Problem& p, const Tensor& x, const Tensor& weight, const Tensor& bias,
                  int32_t weight_dtype) {
  const Device device = x.device();
  p.in = x.size(x.dim() - 1);
  check(weight.dim() == 2, "weight must have shape (out, in), got ", shape_of(weight));
  p.out = weight.size(0);
  check_tensor("weight", weight, device, weight_dtype, {p.out, p.in});
  p.bias = check_optional("bias", bias, device, weight_dtype, {p.out});
  p.x = x.data();
  p.weight = weight.data();
}

void linear(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const Tensor bias = arguments.optional_tensor();

  LinearProblem p{};
  p.rows = count_rows(x);
  p.dtype = dtype_of("x", x);
  set_matrices(p, x, weight, bias, x.dtype());
  check(weight.is_contiguous(), "weight must be contiguous");
  Tensor y = empty_outputs(x, p.out);
  if (p.out == 0) return give_back(stack, y);  // whose rows may be without number
  p.y = y.mutable_data();
  p.y_stride = p.out;
  check_status(cpu(p.dtype).linear(p, torch_threads()));
  give_back(stack, y);
}

// What x, a weight or y has where products are in `dtype`: that, or float32.
DType dtype_of_factor(const char* name, int32_t its_dtype, int32_t dtype) {
  if (its_dtype != aoti_torch_dtype_float32()) {
    check(its_dtype == dtype, name, " must be ", PrintedDType{dtype}, " here, got ",
          PrintedDType{its_dtype});
  }
  return dtype_of(name, its_dtype);
}

void many_rows_linear(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const Tensor bias = arguments.optional_tensor();
  const auto dtype = static_cast<int32_t>(arguments.integer());
  const auto y_dtype = static_cast<int32_t>(arguments.integer());

  ManyRowsLinearProblem p{};
  check(x.dim() == 2, "x must have shape (rows, in), got ", shape_of(x));
  p.rows = x.size(0);
  p.dtype = dtype_of("dtype", dtype);
  check(p.dtype != DType::f64, "products must be in float32, bfloat16 or float16, got float64");
  p.x_dtype = dtype_of_factor("x", x.dtype(), dtype);
  p.weight_dtype = dtype_of_factor("weight", weight.dtype(), dtype);
  p.y_dtype = dtype_of_factor("y", y_dtype, dtype);
  set_matrices(p, x, weight, bias, weight.dtype());
  for (int64_t d = 0; d < 2; ++d) {
    p.x_strides[d] = x.strides()[d];
    p.weight_strides[d] = weight.strides()[d];
  }
  Tensor y = Tensor::empty(y_dtype, {p.rows, p.out}, x.device());
  if (p.out == 0) return give_back(stack, y);  // whose rows may be without number
  p.y = y.mutable_data();
  check_status(cpu(p.dtype).many_rows_linear(p, torch_threads()));
  give_back(stack, y);
}

// Which rows each expert has. Rows of no expert come last, under the number of experts.
std::vector<ExpertRows> chosen_experts(const Tensor& experts, int64_t num_experts) {
  const auto* const expert_of = static_cast<const int64_t*>(experts.data());
  const int64_t rows = experts.size(0);
  std::vector<ExpertRows> chosen;
  int64_t before = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t expert = expert_of[row];
    check(expert >= before && expert <= num_experts,
          "experts must rise from 0 to at most their number, ", num_experts, ", got ", expert,
          " in row ", row);
    before = expert;
    if (expert == num_experts) continue;
    if (chosen.empty() || chosen.back().expert != expert) chosen.push_back({expert, row, row});
    chosen.back().end = row + 1;
  }
  return chosen;
}

void expert_linear(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const Tensor experts = arguments.tensor();
  const Tensor bias = arguments.optional_tensor();

  ExpertLinearProblem p{};
  const Device device = x.device();
  check(x.dim() == 2, "x must have shape (rows, in), got ", shape_of(x));
  check(x.is_contiguous(), "x must be contiguous");
  check(weight.dim() == 3, "weight must have shape (experts, out, in), got ", shape_of(weight));
  const int64_t num_experts = weight.size(0);
  p.dtype = dtype_of("x", x);
  p.in = x.size(1);
  p.out = weight.size(1);
  check_contiguous_tensor("weight", weight, device, x.dtype(), {num_experts, p.out, p.in});
  check_contiguous_tensor("experts", experts, device, aoti_torch_dtype_int64(), {x.size(0)});
  p.bias = check_optional("bias", bias, device, x.dtype(), {num_experts, p.out});
  p.x = x.data();
  p.weight = weight.data();

  const std::vector<ExpertRows> chosen = chosen_experts(experts, num_experts);
  p.chosen = chosen.data();
  p.num_chosen = static_cast<int64_t>(chosen.size());
  Tensor y = empty_outputs(x, p.out);
  p.y = y.mutable_data();
  const int64_t computed = (chosen.empty() ? 0 : chosen.back().end) * p.out * bytes_of(p.dtype);
  const int64_t bytes = x.size(0) * p.out * bytes_of(p.dtype);
  if (bytes > computed) std::memset(static_cast<char*>(p.y) + computed, 0, bytes - computed);
  check_status(expert_linear(cpu(p.dtype).linear, p, torch_threads()));
  give_back(stack, y);
}

constexpr char kLinear[] = "linear", kManyRowsLinear[] = "many_rows_linear",
               kExpertLinear[] = "expert_linear";

constexpr Op kOps[] = {
    op<linear, kLinear>("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor y", false),
    op<many_rows_linear, kManyRowsLinear>("many_rows_linear(Tensor x, Tensor weight, Tensor? bias, "
                                          "int dtype, int y_dtype) -> Tensor y",
                                          false),
    op<expert_linear, kExpertLinear>(
        "expert_linear(Tensor x, Tensor weight, Tensor experts, Tensor? bias) -> Tensor y", false),
};

}  // namespace

const Ops linear_ops = ops_of(kOps);

}  // namespace hfla
