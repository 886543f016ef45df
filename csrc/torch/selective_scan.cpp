// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The ops of kernels/selective_scan.h: schemas, argument checks, allocation of results, calls of
// the kernels. Letters as there.

#include "torch/devices.h"
#include "torch/ops.h"
#include "torch/sequences.h"

namespace hfla {
namespace {

// Shared by forward and backward, in the order of both schemas; the step has them, too.
struct Inputs {
  Tensor x, dt, A, write, read, D, key_mask;
};

// Braces evaluate from left to right.
Inputs take_inputs(Arguments& arguments) {
  return {arguments.tensor(),         arguments.tensor(), arguments.tensor(),
          arguments.tensor(),         arguments.tensor(), arguments.optional_tensor(),
          arguments.optional_tensor()};
}

// Of (B, T, C) for 3 dims, or (B, C) for 2.
SelectiveScanSizes check_inputs(const Inputs& in, int64_t dim) {
  check_channels(in.x, dim);
  check(in.A.dim() == 2, "A must have shape (channels, states), got ", shape_of(in.A));
  const int64_t B = in.x.size(0), C = in.x.size(dim - 1), N = in.A.size(1);
  check(N >= 1, "A must have a state or more, got ", shape_of(in.A));
  const DType dtype = dtype_of("x", in.x);
  const int32_t sums = accumulation_dtype(dtype);
  const Device device = in.x.device();
  if (dim == 3) {
    const int64_t T = in.x.size(1);
    check_tensor("dt", in.dt, device, sums, {B, T, C});
    check_tensor("B", in.write, device, in.x.dtype(), {B, T, N});
    check_tensor("C", in.read, device, in.x.dtype(), {B, T, N});
  } else {
    check_tensor("dt", in.dt, device, sums, {B, C});
    check_tensor("B", in.write, device, in.x.dtype(), {B, N});
    check_tensor("C", in.read, device, in.x.dtype(), {B, N});
  }
  check_contiguous_tensor("A", in.A, device, sums, {C, N});
  if (in.D) check_contiguous_tensor("D", in.D, device, sums, {C});
  return {B, C, N, dtype};
}

SelectiveScanProblem make_problem(const Inputs& in, const Tensor& cu_seqlens,
                                  const Tensor& initial_state) {
  SelectiveScanProblem p{};
  static_cast<SelectiveScanSizes&>(p) = check_inputs(in, 3);
  p.T = in.x.size(1);
  const Device device = in.x.device();
  set_sequences(p, in.key_mask, cu_seqlens, device);
  p.initial_state = check_optional("initial_state", initial_state, device,
                                   accumulation_dtype(p.dtype), {p.num_sequences, p.C, p.N});
  p.x = rows_of(in.x), p.dt = rows_of(in.dt);
  p.write = rows_of(in.write), p.read = rows_of(in.read);
  p.A = in.A.data(), p.D = data_or_null(in.D);
  return p;
}

void forward(StableIValue* stack) {
  Arguments arguments(stack);
  const Inputs in = take_inputs(arguments);
  const Tensor cu_seqlens = arguments.optional_tensor();
  const Tensor initial_state = arguments.optional_tensor();
  const SelectiveScanProblem p = make_problem(in, cu_seqlens, initial_state);
  Tensor y = Tensor::empty(in.x.dtype(), {p.B, p.T, p.C}, in.x.device());
  Tensor state =
      Tensor::empty(accumulation_dtype(p.dtype), {p.num_sequences, p.C, p.N}, in.x.device());
  const SelectiveScanResult result{y.mutable_data(), state.mutable_data()};
  check_status(cpu(p.dtype).selective_scan.forward(p, result, torch_threads()));
  give_back(stack, y, state);
}

void backward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor dy = arguments.optional_tensor();
  const Tensor dstate = arguments.optional_tensor();
  const Inputs in = take_inputs(arguments);
  const Tensor cu_seqlens = arguments.optional_tensor();
  const Tensor initial_state = arguments.optional_tensor();
  const SelectiveScanProblem p = make_problem(in, cu_seqlens, initial_state);

  const int32_t sums = accumulation_dtype(p.dtype);
  const Device device = in.x.device();
  if (dy) check_tensor("dy", dy, device, in.x.dtype(), {p.B, p.T, p.C});
  const SelectiveScanUpstream upstream{
      rows_of(dy), check_optional("dstate", dstate, device, sums, {p.num_sequences, p.C, p.N})};
  const auto gradient = [&](const Tensor& input) { return empty_like(input, sums, device); };
  Tensor dx = gradient(in.x), ddt = gradient(in.dt), dA = gradient(in.A);
  Tensor dwrite = gradient(in.write), dread = gradient(in.read), dD = gradient(in.D);
  Tensor dinitial_state = gradient(initial_state);
  SelectiveScanGradients gradients{dx.mutable_data(),
                                   ddt.mutable_data(),
                                   dA.mutable_data(),
                                   dwrite.mutable_data(),
                                   dread.mutable_data(),
                                   nullptr,
                                   nullptr};
  if (in.D) gradients.dD = dD.mutable_data();
  if (initial_state) gradients.dinitial_state = dinitial_state.mutable_data();
  check_status(cpu(p.dtype).selective_scan.backward(p, upstream, gradients, torch_threads()));
  give_back(stack, dx, ddt, dA, dwrite, dread, dD, dinitial_state);
}

void step(StableIValue* stack) {
  Arguments arguments(stack);
  const Inputs in = take_inputs(arguments);
  Tensor state = arguments.tensor();
  const Tensor state_indices = arguments.optional_tensor();
  SelectiveScanStep p{};
  static_cast<SelectiveScanSizes&>(p) = check_inputs(in, 2);
  p.key_mask = check_mask("key_mask", in.key_mask, in.x.device(), {p.B});
  const int64_t slots = num_slots(state, state_indices, p.B);
  check_slots_of_any_strides("state", state, in.x.device(), accumulation_dtype(p.dtype),
                             {slots, p.C, p.N});
  p.slots = check_state_indices(state_indices, in.x.device(), p.B, slots);
  Tensor y = Tensor::empty(in.x.dtype(), {p.B, p.C}, in.x.device());

  p.x = token_of(in.x), p.dt = token_of(in.dt);
  p.write = token_of(in.write), p.read = token_of(in.read);
  p.A = in.A.data(), p.D = data_or_null(in.D);
  const int64_t* stride = state.strides();
  p.state = {state.mutable_data(), stride[0], 0, stride[1], stride[2]};
  p.y = y.mutable_data();
  check_status(cpu(p.dtype).selective_scan.step(p, torch_threads()));
  give_back(stack, y);
}

constexpr char kForward[] = "selective_scan", kBackward[] = "selective_scan_backward",
               kStep[] = "selective_scan_step_";

constexpr Op kOps[] = {
    op<forward, kForward>(
        "selective_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
        "Tensor? key_mask, Tensor? cu_seqlens, Tensor? initial_state) -> (Tensor y, Tensor state)",
        false),
    op<backward, kBackward>(
        "selective_scan_backward(Tensor? dy, Tensor? dstate, "
        "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
        "Tensor? key_mask, Tensor? cu_seqlens, Tensor? initial_state) "
        "-> (Tensor dx, Tensor ddt, Tensor dA, Tensor dB, Tensor dC, Tensor dD, "
        "Tensor dinitial_state)",
        false),
    op<step, kStep>(
        "selective_scan_step_(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
        "Tensor? key_mask, Tensor(a!) state, Tensor? state_indices=None) -> Tensor y",
        false),
};

}  // namespace

const Ops selective_scan_ops = ops_of(kOps);

}  // namespace hfla
