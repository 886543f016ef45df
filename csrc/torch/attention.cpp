// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The op of kernels/attention.h.

#include "kernels/attention.h"

#include <cstring>

#include "torch/devices.h"
#include "torch/ops.h"
#include "torch/sequences.h"

namespace hfla {
namespace {

// (B, H, T, D) as (B, T, H, D).
View heads_first(const Tensor& tensor) {
  const int64_t* stride = tensor.strides();
  return {input_data(tensor), stride[0], stride[2], stride[1], stride[3]};
}

// Of queries that see all of k and v.
AttentionProblem make_problem(const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
  AttentionProblem p{};
  p.scale = scale;
  p.dtype = dtype_of("q", q);
  check(q.dim() == 4, "q must have 4 dimensions (B, Hq, R, K), got ", shape_of(q));
  check(v.dim() == 4, "v must have 4 dimensions (B, Hkv, S, V), got ", shape_of(v));
  p.B = q.size(0), p.Hq = q.size(1), p.R = q.size(2), p.K = q.size(3);
  p.Hkv = v.size(1), p.S = v.size(2), p.V = v.size(3);
  check(p.Hkv > 0 && p.Hq % p.Hkv == 0, "v must have a number of heads that divides q's, ", p.Hq,
        ", got ", p.Hkv);
  const Device device = q.device();
  check_tensor("k", k, device, q.dtype(), {p.B, p.Hkv, p.S, p.K});
  check_tensor("v", v, device, q.dtype(), {p.B, p.Hkv, p.S, p.V});
  check(p.K <= 1 || k.strides()[3] == 1, "k must have its last dimension contiguous");
  check(p.V <= 1 || v.strides()[3] == 1, "v must have its last dimension contiguous");
  p.q = heads_first(q), p.k = heads_first(k), p.v = heads_first(v);
  return p;
}

Tensor run(AttentionProblem& p, const Tensor& q) {
  Tensor y = Tensor::empty(q.dtype(), {p.B, p.R, p.Hq, p.V}, q.device());
  p.y = y.mutable_data();
  check_status(cpu(p.dtype).attention(p, torch_threads()));
  return y;
}

void attention(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const Tensor mask = arguments.optional_tensor();
  AttentionProblem p = make_problem(q, k, v, arguments.number());
  if (mask) {
    const bool is_bool = mask.dtype() == aoti_torch_dtype_bool();
    check(mask.dim() == 4, "mask must have 4 dimensions (B, Hq, R, S), got ", shape_of(mask));
    check_tensor("mask", mask, q.device(), is_bool ? mask.dtype() : q.dtype(),
                 {p.B, p.Hq, p.R, p.S});
    p.mask_type = is_bool ? MaskType::kept : MaskType::added;
    p.mask = heads_first(mask);
  }
  Tensor y = run(p, q);
  give_back(stack, y);
}

// Writes x (B, H, 1, D) behind `used` tokens of (B, H, tokens, D).
void write_behind(const char* name, const Tensor& x, Tensor& tokens, int64_t used) {
  const int64_t B = tokens.size(0), H = tokens.size(1), D = tokens.size(3);
  check_tensor(name, x, tokens.device(), tokens.dtype(), {B, H, 1, D});
  check(D <= 1 || x.strides()[3] == 1, name, " must have its last dimension contiguous");
  const int64_t bytes = aoti_torch_dtype_element_size(x.dtype());
  const int64_t *from = x.strides(), *to = tokens.strides();
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      std::memcpy(static_cast<char*>(tokens.mutable_data()) +
                      (b * to[0] + h * to[1] + used * to[2]) * bytes,
                  static_cast<const char*>(x.data()) + (b * from[0] + h * from[1]) * bytes,
                  static_cast<size_t>(D * bytes));
    }
  }
}

void attention_step(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  Tensor keys = arguments.tensor(), values = arguments.tensor(), used = arguments.tensor();
  AttentionProblem p = make_problem(q, keys, values, arguments.number());
  check(p.R == 1, "q must have one token, got ", p.R);
  check_contiguous_tensor("used", used, q.device(), aoti_torch_dtype_int64(), {1});
  auto* const tokens = static_cast<int64_t*>(used.mutable_data());
  check(*tokens >= 0 && *tokens < p.S, "used must have a number from 0 to ", p.S - 1, ", got ",
        *tokens);
  write_behind("k", k, keys, *tokens);
  write_behind("v", v, values, *tokens);
  p.S = ++*tokens;
  Tensor y = run(p, q);
  give_back(stack, y);
}

constexpr char kAttention[] = "attention", kStep[] = "attention_step_";

constexpr Op kOps[] = {
    op<attention, kAttention>(
        "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor y", false),
    op<attention_step, kStep>(
        "attention_step_(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, "
        "Tensor(c!) used, float scale) -> Tensor y",
        false),
};

}  // namespace

const Ops attention_ops = ops_of(kOps);

}  // namespace hfla
