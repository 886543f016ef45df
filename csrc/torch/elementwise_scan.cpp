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
ElementwiseScanSizes check_x(const Tensor& x, int64_t dim) {
  check_channels(x, dim);
  return {x.size(0), x.size(dim - 1), dtype_of("x", x)};
}

ChannelSumsProblem make_problem(const Tensor& x, const Tensor& key_mask, const Tensor& cu_seqlens,
                                const Tensor& initial_state) {
  ChannelSumsProblem p{};
  static_cast<ElementwiseScanSizes&>(p) = check_x(x, 3);
  p.T = x.size(1);
  const Device device = x.device();
  set_sequences(p, key_mask, cu_seqlens, device);
  p.initial_state = check_optional("initial_state", initial_state, device,
                                   accumulation_dtype(p.dtype), {p.num_sequences, p.C});
  p.x = rows_of(x);
  return p;
}

ElementwiseScanProblem scan_problem(const Tensor& x, const Tensor& log_decay,
                                    const Tensor& key_mask, const Tensor& cu_seqlens,
                                    const Tensor& initial_state) {
  const ChannelSumsProblem p = make_problem(x, key_mask, cu_seqlens, initial_state);
  check_tensor("log_decay", log_decay, x.device(), accumulation_dtype(p.dtype), shape_of(x));
  return {p, rows_of(log_decay)};
}

RgLruProblem rg_lru_problem(const Tensor& x, const Tensor& input_gate, const Tensor& recurrent_gate,
                            const Tensor& rate, const Tensor& begins, const Tensor& initial_state) {
  const ChannelSumsProblem p = make_problem(x, Tensor(), Tensor(), initial_state);
  const Device device = x.device();
  check(input_gate.dim() == 4 && input_gate.size(3) >= 1,
        "input_gate must have shape (batch, time, heads, channels of a head), got ",
        shape_of(input_gate));
  const int64_t P = input_gate.size(3);
  check(p.C % P == 0, "input_gate must have heads that divide x's ", p.C, " channels, got ", P);
  check_tensor("input_gate", input_gate, device, x.dtype(), {p.B, p.T, p.C / P, P});
  check_tensor("recurrent_gate", recurrent_gate, device, x.dtype(), shape_of(input_gate));
  check_contiguous_tensor("rate", rate, device, accumulation_dtype(p.dtype), {p.C});
  return {p,
          P,
          input(input_gate),
          input(recurrent_gate),
          data_or_null(rate),
          check_mask("begins", begins, device, {p.B, p.T})};
}

// What a forward gives, and what of its gradients a backward is given.
struct Results {
  Tensor y, state;
  explicit Results(const ChannelSumsProblem& p, const Tensor& x)
      : y(Tensor::empty(x.dtype(), {p.B, p.T, p.C}, x.device())),
        state(Tensor::empty(accumulation_dtype(p.dtype), {p.num_sequences, p.C}, x.device())) {}
  ElementwiseScanResult data() { return {y.mutable_data(), state.mutable_data()}; }
};

ElementwiseScanUpstream check_upstream(const ChannelSumsProblem& p, const Tensor& x,
                                       const Tensor& dy, const Tensor& dstate) {
  const Device device = x.device();
  if (dy) check_tensor("dy", dy, device, x.dtype(), {p.B, p.T, p.C});
  return {
      rows_of(dy),
      check_optional("dstate", dstate, device, accumulation_dtype(p.dtype), {p.num_sequences, p.C}),
      nullptr};
}

void forward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor log_decay = arguments.tensor();
  const Tensor key_mask = arguments.optional_tensor();
  const Tensor cu_seqlens = arguments.optional_tensor();
  const Tensor initial_state = arguments.optional_tensor();
  const ElementwiseScanProblem p = scan_problem(x, log_decay, key_mask, cu_seqlens, initial_state);
  Results results(p, x);
  check_status(cpu(p.dtype).elementwise_scan.forward(p, results.data(), torch_threads()));
  give_back(stack, results.y, results.state);
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
  const ElementwiseScanProblem p = scan_problem(x, log_decay, key_mask, cu_seqlens, initial_state);
  const ElementwiseScanUpstream upstream = check_upstream(p, x, dy, dstate);
  const int32_t sums = accumulation_dtype(p.dtype);
  const Device device = x.device();
  Tensor dx = empty_like(x, sums, device), dlog_decay = empty_like(log_decay, sums, device);
  Tensor dinitial_state = empty_like(initial_state, sums, device);
  ElementwiseScanGradients gradients{dx.mutable_data(), dlog_decay.mutable_data(), nullptr};
  if (initial_state) gradients.dinitial_state = dinitial_state.mutable_data();
  check_status(cpu(p.dtype).elementwise_scan.backward(p, upstream, gradients, torch_threads()));
  give_back(stack, dx, dlog_decay, dinitial_state);
}

void rg_lru_forward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor input_gate = arguments.tensor();
  const Tensor recurrent_gate = arguments.tensor();
  const Tensor rate = arguments.tensor();
  const Tensor begins = arguments.optional_tensor();
  const Tensor initial_state = arguments.optional_tensor();
  const RgLruProblem p = rg_lru_problem(x, input_gate, recurrent_gate, rate, begins, initial_state);
  Results results(p, x);
  check_status(cpu(p.dtype).rg_lru.forward(p, results.data(), torch_threads()));
  give_back(stack, results.y, results.state);
}

void rg_lru_backward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor dy = arguments.optional_tensor();
  const Tensor dstate = arguments.optional_tensor();
  const Tensor y = arguments.tensor();
  const Tensor x = arguments.tensor();
  const Tensor input_gate = arguments.tensor();
  const Tensor recurrent_gate = arguments.tensor();
  const Tensor rate = arguments.tensor();
  const Tensor begins = arguments.optional_tensor();
  const Tensor initial_state = arguments.optional_tensor();
  const RgLruProblem p = rg_lru_problem(x, input_gate, recurrent_gate, rate, begins, initial_state);
  ElementwiseScanUpstream upstream = check_upstream(p, x, dy, dstate);
  const int32_t dtype = x.dtype(), sums = accumulation_dtype(p.dtype);
  const Device device = x.device();
  check_contiguous_tensor("y", y, device, dtype, {p.B, p.T, p.C});
  if (dtype == sums) upstream.y = y.data();
  Tensor dx = empty_like(x, sums, device), dinput_gate = empty_like(input_gate, sums, device);
  Tensor drecurrent_gate = empty_like(recurrent_gate, sums, device);
  Tensor drate = Tensor::empty(sums, {p.num_sequences, p.C}, device);
  Tensor dinitial_state = empty_like(initial_state, sums, device);
  RgLruGradients gradients{dx.mutable_data(), dinput_gate.mutable_data(),
                           drecurrent_gate.mutable_data(), drate.mutable_data(), nullptr};
  if (initial_state) gradients.dinitial_state = dinitial_state.mutable_data();
  check_status(cpu(p.dtype).rg_lru.backward(p, upstream, gradients, torch_threads()));
  give_back(stack, dx, dinput_gate, drecurrent_gate, drate, dinitial_state);
}

void step(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor log_decay = arguments.tensor();
  const Tensor key_mask = arguments.optional_tensor();
  Tensor state = arguments.tensor();
  const Tensor state_indices = arguments.optional_tensor();
  ElementwiseScanStep p{};
  static_cast<ElementwiseScanSizes&>(p) = check_x(x, 2);
  check_tensor("log_decay", log_decay, x.device(), accumulation_dtype(p.dtype), shape_of(x));
  const int64_t slots = num_slots(state, state_indices, p.B);
  check_slots_of_any_strides("state", state, x.device(), log_decay.dtype(), {slots, p.C});
  p.slots = check_state_indices(state_indices, x.device(), p.B, slots);
  Tensor y = Tensor::empty(x.dtype(), {p.B, p.C}, x.device());

  p.x = token_of(x), p.log_decay = token_of(log_decay);
  p.key_mask = check_mask("key_mask", key_mask, x.device(), {p.B});
  p.state = token_of(state);
  p.state.data = state.mutable_data();
  p.y = y.mutable_data();
  check_status(cpu(p.dtype).elementwise_scan.step(p, torch_threads()));
  give_back(stack, y);
}

constexpr char kForward[] = "elementwise_scan", kBackward[] = "elementwise_scan_backward",
               kStep[] = "elementwise_scan_step_", kRgLruForward[] = "rg_lru",
               kRgLruBackward[] = "rg_lru_backward";

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
    op<rg_lru_forward, kRgLruForward>(
        "rg_lru(Tensor x, Tensor input_gate, Tensor recurrent_gate, Tensor rate, Tensor? begins, "
        "Tensor? initial_state) -> (Tensor y, Tensor state)",
        false),
    op<rg_lru_backward, kRgLruBackward>(
        "rg_lru_backward(Tensor? dy, Tensor? dstate, Tensor y, Tensor x, Tensor input_gate, "
        "Tensor recurrent_gate, Tensor rate, Tensor? begins, Tensor? initial_state) "
        "-> (Tensor dx, Tensor dinput_gate, Tensor drecurrent_gate, Tensor drate, "
        "Tensor dinitial_state)",
        false),
};

}  // namespace

const Ops elementwise_scan_ops = ops_of(kOps);

}  // namespace hfla
