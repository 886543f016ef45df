// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The op of kernels/attention.h.

#include "kernels/attention.h"

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

void attention(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const Tensor mask = arguments.optional_tensor();
  AttentionProblem p{};
  p.scale = arguments.number();
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
  if (mask) {
    const bool is_bool = mask.dtype() == aoti_torch_dtype_bool();
    check(mask.dim() == 4, "mask must have 4 dimensions (B, Hq, R, S), got ", shape_of(mask));
    check_tensor("mask", mask, device, is_bool ? mask.dtype() : q.dtype(), {p.B, p.Hq, p.R, p.S});
    p.mask_type = is_bool ? MaskType::kept : MaskType::added;
    p.mask = heads_first(mask);
  }
  Tensor y = Tensor::empty(q.dtype(), {p.B, p.R, p.Hq, p.V}, device);
  p.q = heads_first(q), p.k = heads_first(k), p.v = heads_first(v);
  p.y = y.mutable_data();
  check_status(cpu(p.dtype).attention(p, torch_threads()));
  give_back(stack, y);
}

constexpr char kAttention[] = "attention";

constexpr Op kOps[] = {
    op<attention, kAttention>(
        "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor y", false),
};

}  // namespace

const Ops attention_ops = ops_of(kOps);

}  // namespace hfla
