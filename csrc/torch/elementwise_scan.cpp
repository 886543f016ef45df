// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The ops of kernels/elementwise_scan.h: schemas, argument checks, allocation of results, calls of
// the kernels. Letters as there.

#include "torch/devices.h"
#include "torch/ops.h"
#include "torch/sequences.h"

namespace hfla {
namespace {

// Of (B, T, C) for 3 dims, or (B, C) for 2.
ElementwiseScanSizes check_inputs(const Tensor& x, const Tensor& log_decay, const Tensor& key_mask,
                                  int64_t dim) {
  check(x.dim() == dim, "x must have shape ",
        dim == 3 ? "(batch, time, channels)" : "(batch, channels)", ", got ", shape_of(x));
  const int64_t B = x.size(0), C = x.size(dim - 1);
  check(C >= 1, "x must have a channel or more, got ", shape_of(x));
  const DType dtype = dtype_of("x", x);
  const Device device = x.device();
  check_tensor("log_decay", log_decay, device, accumulation_dtype(dtype), shape_of(x));
  if (key_mask) {
    const Shape of_tokens = {x.sizes(), dim - 1};
    check_tensor("key_mask", key_mask, device, aoti_torch_dtype_bool(), of_tokens);
    check(key_mask.is_contiguous(), "key_mask must be contiguous");
  }
  return {B, C, dtype};
}

// (B, T, C)
View rows_of(const Tensor& tensor) {
  if (!tensor) return {};
  const int64_t* stride = tensor.strides();
  return {input_data(tensor), stride[0], stride[1], 0, stride[2]};
}

// (B, C)
View token_of(const Tensor& tensor) {
  const int64_t* stride = tensor.strides();
  return {input_data(tensor), stride[0], 0, 0, stride[1]};
}

ElementwiseScanProblem make_problem(const Tensor& x, const Tensor& log_decay,
                                    const Tensor& key_mask, const Tensor& cu_seqlens,
                                    const Tensor& initial_state) {
  ElementwiseScanProblem p{};
  static_cast<ElementwiseScanSizes&>(p) = check_inputs(x, log_decay, key_mask, 3);
  p.T = x.size(1);
  const Device device = x.device();
  if (cu_seqlens) check_cu_seqlens(cu_seqlens, device, p.B, p.T);
  p.num_sequences = cu_seqlens ? cu_seqlens.size(0) - 1 : p.B;
  if (initial_state) {
    check_contiguous_tensor("initial_state", initial_state, device, accumulation_dtype(p.dtype),
                            {p.num_sequences, p.C});
  }
  p.key_mask = data_or_null<bool>(key_mask);
  p.cu_seqlens = data_or_null<int32_t>(cu_seqlens);
  p.x = rows_of(x), p.log_decay = rows_of(log_decay);
  p.initial_state = data_or_null(initial_state);
  return p;
}

void forward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor log_decay = arguments.tensor();
  const Tensor key_mask = arguments.optional_tensor();
  const Tensor cu_seqlens = arguments.optional_tensor();
  const Tensor initial_state = arguments.optional_tensor();
  const ElementwiseScanProblem p = make_problem(x, log_decay, key_mask, cu_seqlens, initial_state);
  Tensor y = Tensor::empty(x.dtype(), {p.B, p.T, p.C}, x.device());
  Tensor state = Tensor::empty(log_decay.dtype(), {p.num_sequences, p.C}, x.device());
  const ElementwiseScanResult result{y.mutable_data(), state.mutable_data()};
  check_status(cpu(p.dtype).elementwise_scan.forward(p, result, torch_threads()));
  give_back(stack, y, state);
}

void backward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor dy = arguments.optional_tensor();
  const Tensor dstate = arguments.optional_tensor();
  const Tensor x = arguments.tensor();
  const Tensor log_decay = arguments.tensor();
  const Tensor key_mask = arguments.optional_tensor();
  const Tensor cu_seqlens = arguments.optional_tensor();
  const Tensor initial_state = arguments.optional_tensor();
  const ElementwiseScanProblem p = make_problem(x, log_decay, key_mask, cu_seqlens, initial_state);

  const int32_t sums = accumulation_dtype(p.dtype);
  const Device device = x.device();
  if (dy) check_tensor("dy", dy, device, x.dtype(), {p.B, p.T, p.C});
  if (dstate) check_contiguous_tensor("dstate", dstate, device, sums, {p.num_sequences, p.C});
  Tensor dx = Tensor::empty(x.dtype(), {p.B, p.T, p.C}, device);
  Tensor dlog_decay = Tensor::empty(sums, {p.B, p.T, p.C}, device);
  Tensor dinitial_state =
      initial_state ? Tensor::empty(sums, {p.num_sequences, p.C}, device) : none(sums, device);
  ElementwiseScanGradients gradients{dx.mutable_data(), dlog_decay.mutable_data(), nullptr};
  if (initial_state) gradients.dinitial_state = dinitial_state.mutable_data();
  check_status(cpu(p.dtype).elementwise_scan.backward(p, {rows_of(dy), data_or_null(dstate)},
                                                      gradients, torch_threads()));
  give_back(stack, dx, dlog_decay, dinitial_state);
}

void step(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor log_decay = arguments.tensor();
  const Tensor key_mask = arguments.optional_tensor();
  Tensor state = arguments.tensor();
  const Tensor state_indices = arguments.optional_tensor();
  ElementwiseScanStep p{};
  static_cast<ElementwiseScanSizes&>(p) = check_inputs(x, log_decay, key_mask, 2);
  const int64_t slots = num_slots(state, state_indices, p.B);
  check_slots_of_any_strides("state", state, x.device(), log_decay.dtype(), {slots, p.C});
  p.slots = check_state_indices(state_indices, x.device(), p.B, slots);
  Tensor y = Tensor::empty(x.dtype(), {p.B, p.C}, x.device());

  p.x = token_of(x), p.log_decay = token_of(log_decay);
  p.key_mask = data_or_null<bool>(key_mask);
  p.state = token_of(state);
  p.state.data = state.mutable_data();
  p.y = y.mutable_data();
  check_status(cpu(p.dtype).elementwise_scan.step(p, torch_threads()));
  give_back(stack, y);
}

constexpr char kForward[] = "elementwise_scan", kBackward[] = "elementwise_scan_backward",
               kStep[] = "elementwise_scan_step_";

constexpr Op kOps[] = {
    op<forward, kForward>(
        "elementwise_scan(Tensor x, Tensor log_decay, Tensor? key_mask, Tensor? cu_seqlens, "
        "Tensor? initial_state) -> (Tensor y, Tensor state)",
        false),
    op<backward, kBackward>(
        "elementwise_scan_backward(Tensor? dy, Tensor? dstate, Tensor x, Tensor log_decay, "
        "Tensor? key_mask, Tensor? cu_seqlens, Tensor? initial_state) "
        "-> (Tensor dx, Tensor dlog_decay, Tensor dinitial_state)",
        false),
    op<step, kStep>(
        "elementwise_scan_step_(Tensor x, Tensor log_decay, Tensor? key_mask, Tensor(a!) state, "
        "Tensor? state_indices=None) -> Tensor y",
        false),
};

}  // namespace

const Ops elementwise_scan_ops = ops_of(kOps);

}  // namespace hfla
