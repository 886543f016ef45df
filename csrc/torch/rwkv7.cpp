// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The ops of kernels/rwkv7.h.

#include "kernels/rwkv7.h"

#include <vector>

#include "torch/dense.h"
#include "torch/devices.h"
#include "torch/ops.h"

namespace hfla {
namespace {

// Checks what has one number for each column.
const void* parameter(const char* name, const Tensor& tensor, const Tensor& x, int64_t columns,
                      int32_t dtype) {
  check_contiguous_tensor(name, tensor, x.device(), dtype, {columns});
  return tensor.data();
}

void token_mix(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor before = arguments.tensor();
  const std::vector<Tensor> mixes = arguments.tensors();
  TokenMixProblem p{};
  p.dtype = dtype_but_double("x", x);
  p.rows = count_rows(x);
  p.columns = x.size(x.dim() - 1);
  p.count = static_cast<int64_t>(mixes.size());
  check(before.dtype() == x.dtype() && before.is_contiguous() && count_rows(before) == p.rows &&
            before.size(before.dim() - 1) == p.columns,
        "before must be contiguous, and like x, got ", shape_of(before));
  std::vector<const void*> data;
  for (const Tensor& mix : mixes) {
    data.push_back(parameter("mixes", mix, x, p.columns, x.dtype()));
  }
  check(x.dim() < Tensor::kMaxDim, "x must have fewer dimensions, got ", shape_of(x));
  int64_t sizes[Tensor::kMaxDim] = {p.count};
  for (int64_t d = 0; d < x.dim(); ++d) sizes[d + 1] = x.size(d);
  Tensor to = Tensor::empty(x.dtype(), sizes, x.dim() + 1, x.device());
  p.x = x.data();
  p.before = before.data();
  p.mixes = data.data();
  p.to = to.mutable_data();
  if (p.columns > 0) check_status(cpu(p.dtype).rwkv7.token_mix(p, torch_threads()));
  give_back(stack, to);
}

void values(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor v = arguments.tensor();
  const Tensor first = arguments.tensor();
  const Tensor share = arguments.tensor();
  const Tensor bias = arguments.tensor();
  RWKV7ValuesProblem p{};
  p.dtype = dtype_but_double("v", v);
  check(v.dim() == 3, "v must have shape (B, T, features), got ", shape_of(v));
  p.rows = v.size(0) * v.size(1);
  p.columns = v.size(2);
  for (const auto& [name, x] : {std::pair{"v", &v}, {"first", &first}, {"share", &share}}) {
    check_contiguous_tensor(name, *x, v.device(), v.dtype(), {v.size(0), v.size(1), p.columns});
  }
  p.v = v.data();
  p.first = first.data();
  p.share = share.data();
  p.bias =
      static_cast<const float*>(parameter("bias", bias, v, p.columns, aoti_torch_dtype_float32()));
  Tensor to = Tensor::empty(v.dtype(), v.sizes(), v.dim(), v.device());
  p.to = to.mutable_data();
  if (p.columns > 0) check_status(cpu(p.dtype).rwkv7.values(p, torch_threads()));
  give_back(stack, to);
}

void keys(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor k = arguments.tensor();
  const Tensor w = arguments.tensor();
  const Tensor a = arguments.tensor();
  const Tensor w_bias = arguments.tensor();
  const Tensor a_bias = arguments.tensor();
  const Tensor k_k = arguments.tensor();
  const Tensor k_a = arguments.tensor();
  RWKV7KeysProblem p{};
  p.largest = static_cast<float>(arguments.number());
  p.eps = static_cast<float>(arguments.number());
  p.dtype = dtype_but_double("k", k);
  check(k.dim() == 4, "k must have shape (B, T, H, K), got ", shape_of(k));
  const int64_t B = k.size(0), T = k.size(1);
  p.rows = B * T;
  p.heads = k.size(2);
  p.key_dim = k.size(3);
  const int64_t columns = p.heads * p.key_dim;
  for (const auto& [name, x] : {std::pair{"k", &k}, {"w", &w}, {"a", &a}}) {
    check_contiguous_tensor(name, *x, k.device(), k.dtype(), {B, T, p.heads, p.key_dim});
  }
  const int32_t float32 = aoti_torch_dtype_float32();
  p.k = k.data();
  p.w = w.data();
  p.a = a.data();
  p.w_bias = static_cast<const float*>(parameter("w_bias", w_bias, k, columns, float32));
  p.a_bias = static_cast<const float*>(parameter("a_bias", a_bias, k, columns, float32));
  p.k_k = parameter("k_k", k_k, k, columns, k.dtype());
  p.k_a = parameter("k_a", k_a, k, columns, k.dtype());
  Tensor log_decay = Tensor::empty(float32, k.sizes(), k.dim(), k.device());
  Tensor key = Tensor::empty(k.dtype(), k.sizes(), k.dim(), k.device());
  Tensor erased = Tensor::empty(k.dtype(), k.sizes(), k.dim(), k.device());
  Tensor written = Tensor::empty(k.dtype(), k.sizes(), k.dim(), k.device());
  p.log_decay = static_cast<float*>(log_decay.mutable_data());
  p.key = key.mutable_data();
  p.erased = erased.mutable_data();
  p.written = written.mutable_data();
  if (columns > 0) check_status(cpu(p.dtype).rwkv7.keys(p, torch_threads()));
  give_back(stack, log_decay, key, erased, written);
}

void read(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor y = arguments.tensor();
  const Tensor r = arguments.tensor();
  const Tensor k = arguments.tensor();
  const Tensor v = arguments.tensor();
  const Tensor gate = arguments.tensor();
  const Tensor r_k = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const Tensor bias = arguments.tensor();
  RWKV7ReadProblem p{};
  p.eps = static_cast<float>(arguments.number());
  p.dtype = dtype_but_double("y", y);
  check(y.dim() == 4, "y must have shape (B, T, H, V), got ", shape_of(y));
  check(r.dim() == 4, "r must have shape (B, T, H, K), got ", shape_of(r));
  const int64_t B = y.size(0), T = y.size(1);
  p.rows = B * T;
  p.heads = y.size(2);
  p.value_dim = y.size(3);
  p.key_dim = r.size(3);
  for (const auto& [name, x] : {std::pair{"r", &r}, {"k", &k}}) {
    check_contiguous_tensor(name, *x, y.device(), y.dtype(), {B, T, p.heads, p.key_dim});
  }
  for (const auto& [name, x] : {std::pair{"y", &y}, {"v", &v}, {"gate", &gate}}) {
    check_contiguous_tensor(name, *x, y.device(), y.dtype(), {B, T, p.heads, p.value_dim});
  }
  p.y = y.data();
  p.r = r.data();
  p.k = k.data();
  p.v = v.data();
  p.gate = gate.data();
  p.r_k = parameter("r_k", r_k, y, p.heads * p.key_dim, y.dtype());
  p.weight = parameter("weight", weight, y, p.heads * p.value_dim, y.dtype());
  p.bias = parameter("bias", bias, y, p.heads * p.value_dim, y.dtype());
  Tensor to = Tensor::empty(y.dtype(), {B, T, p.heads * p.value_dim}, y.device());
  p.to = to.mutable_data();
  if (p.heads * p.value_dim > 0) check_status(cpu(p.dtype).rwkv7.read(p, torch_threads()));
  give_back(stack, to);
}

void squared_relu(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  SquaredReluProblem p{};
  p.dtype = dtype_but_double("x", x);
  p.rows = count_rows(x);
  p.columns = x.size(x.dim() - 1);
  Tensor y = Tensor::empty(x.dtype(), x.sizes(), x.dim(), x.device());
  p.x = x.data();
  p.y = y.mutable_data();
  if (p.columns > 0) check_status(cpu(p.dtype).rwkv7.squared_relu(p, torch_threads()));
  give_back(stack, y);
}

constexpr char kTokenMix[] = "token_mix", kValues[] = "rwkv7_values", kKeys[] = "rwkv7_keys",
               kRead[] = "rwkv7_read", kSquaredRelu[] = "squared_relu";

constexpr Op kOps[] = {
    op<token_mix, kTokenMix>("token_mix(Tensor x, Tensor before, Tensor[] mixes) -> Tensor", false),
    op<values, kValues>("rwkv7_values(Tensor v, Tensor first, Tensor share, Tensor bias) -> Tensor",
                        false),
    op<keys, kKeys>("rwkv7_keys(Tensor k, Tensor w, Tensor a, Tensor w_bias, Tensor a_bias, "
                    "Tensor k_k, Tensor k_a, float largest, float eps) -> (Tensor log_decay, "
                    "Tensor key, Tensor erased, Tensor written)",
                    false),
    op<read, kRead>("rwkv7_read(Tensor y, Tensor r, Tensor k, Tensor v, Tensor gate, Tensor r_k, "
                    "Tensor weight, Tensor bias, float eps) -> Tensor",
                    false),
    op<squared_relu, kSquaredRelu>("squared_relu(Tensor x) -> Tensor", false),
};

}  // namespace

const Ops rwkv7_ops = ops_of(kOps);

}  // namespace hfla
