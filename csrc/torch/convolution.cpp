// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The ops of kernels/convolution.h: schemas, argument checks, allocation of results, calls of the
// kernels. Letters as there.

#include "torch/devices.h"
#include "torch/ops.h"
#include "torch/sequences.h"

namespace hfla {
namespace {

// Shared by forward and backward, in the order of both schemas.
struct Inputs {
  Tensor x, weight, bias, key_mask, cu_seqlens, initial_state;
};

// Braces evaluate from left to right.
Inputs take_inputs(Arguments& arguments) {
  return {arguments.tensor(),          arguments.tensor(),          arguments.optional_tensor(),
          arguments.optional_tensor(), arguments.optional_tensor(), arguments.optional_tensor()};
}

// (B, T, C), or (B, C) for 2 dims.
ConvolutionSizes check_sizes(const Tensor& x, const Tensor& weight, const Tensor& bias,
                             int64_t dim) {
  check_channels(x, dim);
  const int64_t C = x.size(dim - 1);
  const DType dtype = dtype_of("x", x);
  check(weight.dim() == 2 && weight.size(0) == C && weight.size(1) >= 1, "weight must have shape (",
        C, ", kernel size of 1 or more), got ", shape_of(weight));
  dtype_of("weight", weight);
  check_tensor("weight", weight, x.device(), weight.dtype(), {C, weight.size(1)});
  if (bias) {
    dtype_of("bias", bias);
    check_tensor("bias", bias, x.device(), bias.dtype(), {C});
  }
  return {x.size(0), C, weight.size(1), 0, dtype, false};
}

ConvolutionWeights convolution_weights(const char* name, const Tensor& tensor) {
  if (!tensor) return {};
  const int64_t* stride = tensor.strides();
  return {tensor.data(), dtype_of(name, tensor), stride[0], tensor.dim() == 2 ? stride[1] : 0};
}

// How many tokens a state (rows, S, C) holds.
int64_t check_state_length(const char* name, const Tensor& state, int64_t kernel_size) {
  check(state.dim() == 3 && state.size(1) >= kernel_size - 1, name,
        " must have shape (batch, tokens, channels) with ", kernel_size - 1,
        " tokens or more, got ", shape_of(state));
  return state.size(1);
}

ConvolutionProblem make_problem(const Inputs& in, bool silu) {
  ConvolutionProblem p{};
  static_cast<ConvolutionSizes&>(p) = check_sizes(in.x, in.weight, in.bias, 3);
  p.silu = silu;
  p.T = in.x.size(1);
  const Device device = in.x.device();
  set_sequences(p, in.key_mask, in.cu_seqlens, device);
  p.S = p.kernel_size - 1;
  if (in.initial_state) {
    p.S = check_state_length("initial_state", in.initial_state, p.kernel_size);
  }
  p.initial_state = check_optional("initial_state", in.initial_state, device, in.x.dtype(),
                                   {p.num_sequences, p.S, p.C});
  p.x = rows_of(in.x);
  p.weight = convolution_weights("weight", in.weight);
  p.bias = convolution_weights("bias", in.bias);
  return p;
}

void forward(StableIValue* stack) {
  Arguments arguments(stack);
  const Inputs in = take_inputs(arguments);
  const ConvolutionProblem p = make_problem(in, arguments.boolean());
  Tensor y = Tensor::empty(in.x.dtype(), {p.B, p.T, p.C}, in.x.device());
  Tensor state = Tensor::empty(in.x.dtype(), {p.num_sequences, p.S, p.C}, in.x.device());
  const ConvolutionResult result{y.mutable_data(), state.mutable_data()};
  check_status(cpu(p.dtype).convolution.forward(p, result, torch_threads()));
  give_back(stack, y, state);
}

void backward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor dy = arguments.optional_tensor();
  const Tensor dstate = arguments.optional_tensor();
  const Inputs in = take_inputs(arguments);
  const ConvolutionProblem p = make_problem(in, arguments.boolean());

  const int32_t dtype = in.x.dtype();
  const Device device = in.x.device();
  if (dy) check_tensor("dy", dy, device, dtype, {p.B, p.T, p.C});
  const ConvolutionUpstream upstream{
      rows_of(dy), check_optional("dstate", dstate, device, dtype, {p.num_sequences, p.S, p.C})};
  const auto gradient = [&](const Tensor& input) { return empty_like(input, dtype, device); };
  Tensor dx = gradient(in.x), dweight = gradient(in.weight), dbias = gradient(in.bias);
  Tensor dinitial_state = gradient(in.initial_state);
  ConvolutionGradients gradients{};
  gradients.dx = dx.mutable_data(), gradients.dweight = dweight.mutable_data();
  if (in.bias) gradients.dbias = dbias.mutable_data();
  if (in.initial_state) gradients.dinitial_state = dinitial_state.mutable_data();
  check_status(cpu(p.dtype).convolution.backward(p, upstream, gradients, torch_threads()));
  give_back(stack, dx, dweight, dbias, dinitial_state);
}

void step(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const Tensor bias = arguments.optional_tensor();
  const Tensor key_mask = arguments.optional_tensor();
  Tensor state = arguments.tensor();
  const bool silu = arguments.boolean();
  const Tensor state_indices = arguments.optional_tensor();

  ConvolutionStep p{};
  static_cast<ConvolutionSizes&>(p) = check_sizes(x, weight, bias, 2);
  p.silu = silu;
  p.key_mask = check_mask("key_mask", key_mask, x.device(), {p.B});
  p.S = check_state_length("state", state, p.kernel_size);
  const int64_t slots = num_slots(state, state_indices, p.B);
  check_slots_of_any_strides("state", state, x.device(), x.dtype(), {slots, p.S, p.C});
  p.slots = check_state_indices(state_indices, x.device(), p.B, slots);
  Tensor y = Tensor::empty(x.dtype(), {p.B, p.C}, x.device());

  p.x = token_of(x);
  p.weight = convolution_weights("weight", weight), p.bias = convolution_weights("bias", bias);
  p.state = rows_of(state);
  p.state.data = state.mutable_data();
  p.y = y.mutable_data();
  check_status(cpu(p.dtype).convolution.step(p, torch_threads()));
  give_back(stack, y);
}

constexpr char kForward[] = "short_convolution", kBackward[] = "short_convolution_backward",
               kStep[] = "short_convolution_step_";

constexpr Op kOps[] = {
    op<forward, kForward>(
        "short_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor? key_mask, "
        "Tensor? cu_seqlens, Tensor? initial_state, bool silu) -> (Tensor y, Tensor state)",
        false),
    op<backward, kBackward>("short_convolution_backward(Tensor? dy, Tensor? dstate, "
                            "Tensor x, Tensor weight, Tensor? bias, Tensor? key_mask, "
                            "Tensor? cu_seqlens, Tensor? initial_state, bool silu) "
                            "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)",
                            false),
    op<step, kStep>(
        "short_convolution_step_(Tensor x, Tensor weight, Tensor? bias, Tensor? key_mask, "
        "Tensor(a!) state, bool silu, Tensor? state_indices=None) -> Tensor y",
        false),
};

}  // namespace

const Ops convolution_ops = ops_of(kOps);

}  // namespace hfla
