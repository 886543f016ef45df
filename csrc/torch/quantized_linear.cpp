// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The ops of kernels/quantized_linear.h. Scales and zero points lie as torchao's tensors have them:
// (out, groups) with 8 bits, (groups, out) with 4.

#include "kernels/quantized_linear.h"

#include "torch/dense.h"
#include "torch/devices.h"
#include "torch/ops.h"

namespace hfla {
namespace {

NumberType number_type(const char* name, const Tensor& tensor, bool may_be_int8) {
  const int32_t code = tensor.dtype();
  if (code == aoti_torch_dtype_float32()) return NumberType::f32;
  if (code == aoti_torch_dtype_bfloat16()) return NumberType::bf16;
  if (code == aoti_torch_dtype_float16()) return NumberType::f16;
  if (may_be_int8 && code == aoti_torch_dtype_int8()) return NumberType::i8;
  fail(name, " must be float32, bfloat16", may_be_int8 ? ", float16 or int8" : " or float16",
       ", got ", PrintedDType{code});
}

// x, the weight and the bias, which know nothing of groups.
void set_matrices(QuantizedLinearProblem& p, const Tensor& x, const Tensor& weight,
                  const Tensor& bias) {
  const Device device = x.device();
  check(device.type == aoti_torch_device_type_cpu(), "x must be on the CPU, got ", device);
  p.dtype = dtype_of("x", x);
  check(p.dtype != DType::f64, "x must be float32, bfloat16 or float16, got float64");
  p.rows = count_rows(x);
  p.in = x.size(x.dim() - 1);
  check(weight.dim() == 2, "weight must have two dimensions, got ", shape_of(weight));
  p.out = weight.size(0);
  check(p.in * p.bits % 8 == 0, "x must have an even number of inputs, got ", shape_of(x));
  check_contiguous_tensor("weight", weight, device, aoti_torch_dtype_int8(),
                          {p.out, p.in * p.bits / 8});
  p.bias = check_optional("bias", bias, device, x.dtype(), {p.out});
  p.x = x.data();
  p.weight = weight.data();
}

// Scales and zero points; `out_dim` is the dimension of outputs.
void set_groups(QuantizedLinearProblem& p, const Tensor& x, const Tensor& scale, const Tensor& zero,
                int64_t out_dim) {
  check(scale.dim() == 2, "scale must have two dimensions, got ", shape_of(scale));
  const int64_t groups = scale.size(1 - out_dim), outputs = scale.size(out_dim);
  const bool is_one = outputs == 1 && groups == 1;
  check(outputs == p.out || is_one, "scale must have ", p.out, " outputs in dimension ", out_dim,
        ", got ", shape_of(scale));
  check(p.in == 0 || (groups > 0 && p.in % groups == 0), "scale must have a number of groups in ",
        "dimension ", 1 - out_dim, " that divides ", p.in, " inputs, got ", shape_of(scale));
  p.group = p.in == 0 ? 0 : p.in / groups;
  check(p.group * p.bits % 8 == 0, "scale must have groups of an even number of inputs, got ",
        p.group);
  const auto view = [&](const Tensor& numbers, NumberType type) {
    const int64_t* strides = numbers.strides();
    return GroupNumbers{numbers.data(), type, is_one ? 0 : strides[out_dim], strides[1 - out_dim]};
  };
  const Device device = x.device();
  p.scale = view(scale, number_type("scale", scale, false));
  check_tensor("scale", scale, device, scale.dtype(), shape_of(scale));
  if (zero) {
    const NumberType type = number_type("zero_point", zero, p.bits == 8);
    check_tensor("zero_point", zero, device, zero.dtype(), shape_of(scale));
    p.zero = view(zero, type);
  }
}

template <int64_t bits>
void quantized_linear(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const Tensor scale = arguments.tensor();
  const Tensor zero_point = arguments.optional_tensor();
  const Tensor bias = arguments.optional_tensor();

  QuantizedLinearProblem p{};
  const bool rounds_x = arguments.boolean();
  p.bits = bits;
  set_matrices(p, x, weight, bias);
  set_groups(p, x, scale, zero_point, /*out_dim=*/bits == 8 ? 0 : 1);
  Tensor y = empty_outputs(x, p.out);
  if (p.out == 0) return give_back(stack, y);  // whose rows may be without number
  p.y = y.mutable_data();
  const auto product = rounds_x ? cpu(p.dtype).rounded_linear : cpu(p.dtype).quantized_linear;
  check_status(product(p, torch_threads()));
  give_back(stack, y);
}

void dequantize_int4(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const Tensor scale = arguments.tensor();
  const Tensor zero_point = arguments.optional_tensor();

  QuantizedLinearProblem p{};
  p.bits = 4;
  set_matrices(p, x, weight, Tensor());
  set_groups(p, x, scale, zero_point, /*out_dim=*/1);
  Tensor numbers = Tensor::empty(x.dtype(), {p.out, p.in}, x.device());
  if (p.out == 0 || p.in == 0) return give_back(stack, numbers);
  p.y = numbers.mutable_data();
  check_status(cpu(p.dtype).dequantize_int4(p, torch_threads()));
  give_back(stack, numbers);
}

constexpr char kInt8[] = "int8_linear", kInt4[] = "int4_linear", kNumbers[] = "dequantize_int4";

constexpr Op kOps[] = {
    op<quantized_linear<8>, kInt8>(
        "int8_linear(Tensor x, Tensor weight, Tensor scale, Tensor? zero_point, Tensor? bias, "
        "bool rounds_x=False) -> Tensor y",
        false),
    op<quantized_linear<4>, kInt4>(
        "int4_linear(Tensor x, Tensor weight, Tensor scale, Tensor? zero_point, Tensor? bias, "
        "bool rounds_x=False) -> Tensor y",
        false),
    op<dequantize_int4, kNumbers>(
        "dequantize_int4(Tensor x, Tensor weight, Tensor scale, Tensor? zero_point) "
        "-> Tensor numbers",
        false),
};

}  // namespace

const Ops quantized_linear_ops = ops_of(kOps);

}  // namespace hfla
