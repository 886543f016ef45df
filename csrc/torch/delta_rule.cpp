// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The ops of kernels/delta_rule.h: schemas, argument checks, allocation of results, calls of the
// kernels. Letters as there.

#include "torch/devices.h"
#include "torch/ops.h"
#include "torch/sequences.h"

namespace hfla {
namespace {

// Shared by forward and backward, in the order of both schemas.
struct Inputs {
  Tensor q, k, v, beta, log_decay, erase_key, add_along, key_mask, cu_seqlens, initial_state;
};

// Braces evaluate from left to right.
Inputs take_inputs(Arguments& arguments) {
  return {arguments.tensor(),          arguments.tensor(),          arguments.tensor(),
          arguments.optional_tensor(), arguments.optional_tensor(), arguments.optional_tensor(),
          arguments.optional_tensor(), arguments.optional_tensor(), arguments.optional_tensor(),
          arguments.optional_tensor()};
}

DeltaRuleOptions take_options(Arguments& arguments) {
  return {arguments.number(), arguments.boolean(), arguments.boolean()};
}

DeltaRuleGroups groups_of(const Dimensions& d, const Tensor& k, int64_t dim) {
  return {d.Hkv / d.Hq, d.Hkv / k.size(dim - 2)};
}

// With `numbers` per head, or these times K. Returns whether it is the latter.
bool check_log_decay(const Tensor& log_decay, const Dimensions& d,
                     std::initializer_list<int64_t> per_head,
                     std::initializer_list<int64_t> per_channel) {
  const bool has_channels = log_decay.dim() == static_cast<int64_t>(per_channel.size());
  check_tensor("log_decay", log_decay, d.device, accumulation_dtype(d.dtype),
               has_channels ? per_channel : per_head);
  return has_channels;
}

// Without an erase key there is nothing to check.
void check_erase(const Tensor& erase_key, const Tensor& add_along, const Tensor& beta,
                 const Dimensions& d, bool delta, std::initializer_list<int64_t> shape) {
  check(erase_key || !add_along, "add_along must be None without erase_key");
  if (!erase_key) return;
  const int32_t acc = accumulation_dtype(d.dtype);
  check(delta, "erase_key must be None without delta");
  check_tensor("erase_key", erase_key, d.device, acc, shape);
  if (!add_along) return;
  check(!beta, "beta must be None with add_along");
  check_tensor("add_along", add_along, d.device, acc, shape);
}

DeltaRuleProblem make_problem(const Inputs& in, const DeltaRuleOptions& options,
                              LastBound last = LastBound::is_T) {
  const Dimensions d = check_qkv(in.q, in.k, in.v, 4, SharedHeads::of_q_and_k);
  check(!is_cuda(d.device) || d.K <= kMostKeyDimOnCuda, "q must have a last dimension of up to ",
        kMostKeyDimOnCuda, " on CUDA, got ", shape_of(in.q));
  const int32_t acc = accumulation_dtype(d.dtype);
  DeltaRuleProblem p{};
  static_cast<DeltaRuleOptions&>(p) = options;
  static_cast<DeltaRuleGroups&>(p) = groups_of(d, in.k, 4);
  static_cast<Sequences&>(p) = check_sequences(d, in.key_mask, in.cu_seqlens, last);
  p.Hq = p.Hkv;
  if (in.beta) check_tensor("beta", in.beta, d.device, acc, {p.B, p.T, p.Hkv});
  p.decay_per_channel =
      in.log_decay && check_log_decay(in.log_decay, d, {p.B, p.T, p.Hkv}, {p.B, p.T, p.Hkv, p.K});
  check_erase(in.erase_key, in.add_along, in.beta, d, options.delta, {p.B, p.T, p.Hkv, p.K});
  p.initial_state = check_optional("initial_state", in.initial_state, d.device, acc,
                                   {p.num_sequences, p.Hkv, p.K, p.V});
  p.q = input(in.q), p.k = input(in.k), p.v = input(in.v);
  p.beta = input(in.beta), p.log_decay = input(in.log_decay);
  p.erase_key = input(in.erase_key), p.add_along = input(in.add_along);
  return p;
}

// Of sequences of one token, from states to others.
DeltaRuleStep step_of(const DeltaRuleProblem& p, const DeltaRuleResult& result) {
  DeltaRuleStep step{};
  static_cast<HeadSizes&>(step) = p;
  static_cast<DeltaRuleOptions&>(step) = p;
  static_cast<DeltaRuleGroups&>(step) = p;
  step.q = p.q, step.k = p.k, step.v = p.v, step.beta = p.beta, step.log_decay = p.log_decay;
  step.decay_per_channel = p.decay_per_channel;
  step.erase_key = p.erase_key, step.add_along = p.add_along;
  step.key_mask = p.key_mask;
  step.before = p.initial_state;
  step.state = result.state;
  step.state_slot = p.Hkv * p.K * p.V;
  step.y = result.y;
  return step;
}

void forward(StableIValue* stack) {
  Arguments arguments(stack);
  const Inputs in = take_inputs(arguments);
  const DeltaRuleOptions options = take_options(arguments);
  const bool keep_errors = arguments.boolean() && options.delta;
  const DeltaRuleProblem p = make_problem(in, options);

  const int32_t acc = accumulation_dtype(p.dtype);
  const Device device = in.q.device();
  Tensor y = Tensor::empty(in.q.dtype(), {p.B, p.T, p.Hkv, p.V}, device);
  Tensor errors =
      keep_errors ? Tensor::empty(acc, {p.B, p.T, p.Hkv, p.V}, device) : none(acc, device);
  Tensor state = Tensor::empty(acc, {p.num_sequences, p.Hkv, p.K, p.V}, device);

  DeltaRuleResult result{};
  result.y = output(y);
  if (keep_errors) result.errors = output(errors);
  result.state = state.mutable_data();
  run(
      device, p.dtype,
      [&](const CpuKernels& cpu, const Threads& threads) {
        if (p.T == 1 && p.initial_state && !p.cu_seqlens && !keep_errors) {
          return cpu.delta_rule.step(step_of(p, result), threads);
        }
        return cpu.delta_rule.forward(p, result, threads);
      },
      [&](const CudaKernels& cuda, const CudaPlace& place) {
        return cuda.delta_rule->forward(p, result, place);
      });
  give_back(stack, y, errors, state);
}

void forward_in_slots(StableIValue* stack) {
  Arguments arguments(stack);
  const Inputs in{arguments.tensor(),          arguments.tensor(),
                  arguments.tensor(),          arguments.optional_tensor(),
                  arguments.optional_tensor(), arguments.optional_tensor(),
                  arguments.optional_tensor(), arguments.optional_tensor(),
                  arguments.optional_tensor(), Tensor()};
  Tensor state = arguments.tensor();
  const Tensor state_indices = arguments.tensor();
  const Tensor is_new = arguments.optional_tensor();
  const DeltaRuleProblem p = make_problem(in, take_options(arguments), LastBound::at_most_T);

  const Device device = in.q.device();
  DeltaRuleSlots slots{};
  const int64_t count = num_slots(state, state_indices, p.num_sequences);
  slots.state_slot =
      check_slots("state", state, device, accumulation_dtype(p.dtype), {count, p.Hkv, p.K, p.V});
  static_cast<SequenceSlots&>(slots) =
      check_sequence_slots(state_indices, is_new, device, p.num_sequences, count);
  slots.state = state.mutable_data();
  Tensor y = Tensor::empty(in.q.dtype(), {p.B, p.T, p.Hkv, p.V}, device);
  clear_outputs(p, slots, y, p.Hkv * p.V * bytes_of(p.dtype));
  check_status(cpu(p.dtype).delta_rule.forward_in_slots(p, slots, output(y), torch_threads()));
  give_back(stack, y);
}

void backward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor dy = arguments.optional_tensor();
  const Tensor dstate = arguments.optional_tensor();
  const Inputs in = take_inputs(arguments);
  const Tensor errors = arguments.tensor();
  const Tensor state = arguments.tensor();
  const DeltaRuleProblem p = make_problem(in, take_options(arguments));

  const int32_t dtype = in.q.dtype();
  const int32_t acc = accumulation_dtype(p.dtype);
  const Device device = in.q.device();
  const int64_t rows = p.num_sequences;
  if (dy) check_tensor("dy", dy, device, dtype, {p.B, p.T, p.Hkv, p.V});
  if (p.delta) check_contiguous_tensor("errors", errors, device, acc, {p.B, p.T, p.Hkv, p.V});
  check_contiguous_tensor("state", state, device, acc, {rows, p.Hkv, p.K, p.V});
  DeltaRuleUpstream upstream{};
  upstream.dy = input(dy);
  upstream.dstate = check_optional("dstate", dstate, device, acc, {rows, p.Hkv, p.K, p.V});
  if (p.delta) upstream.errors = input(errors);
  upstream.state = state.data();

  const auto gradient = [&](const Tensor& input) { return empty_like(input, acc, device); };
  Tensor dq = gradient(in.q), dk = gradient(in.k), dv = gradient(in.v);
  Tensor dbeta = gradient(in.beta), dlog_decay = gradient(in.log_decay);
  Tensor derase_key = gradient(in.erase_key), dadd_along = gradient(in.add_along);
  Tensor dinitial_state = gradient(in.initial_state);
  DeltaRuleGradients result{};
  result.dq = output(dq), result.dk = output(dk), result.dv = output(dv);
  if (in.beta) result.dbeta = output(dbeta);
  if (in.log_decay) result.dlog_decay = output(dlog_decay);
  if (in.erase_key) result.derase_key = output(derase_key);
  if (in.add_along) result.dadd_along = output(dadd_along);
  if (in.initial_state) result.dinitial_state = dinitial_state.mutable_data();
  run(
      device, p.dtype,
      [&](const CpuKernels& cpu, const Threads& threads) {
        return cpu.delta_rule.backward(p, upstream, result, threads);
      },
      [&](const CudaKernels& cuda, const CudaPlace& place) {
        return cuda.delta_rule->backward(p, upstream, result, place);
      });
  give_back(stack, dq, dk, dv, dbeta, dlog_decay, derase_key, dadd_along, dinitial_state);
}

void step(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor();
  const Tensor k = arguments.tensor();
  const Tensor v = arguments.tensor();
  const Tensor beta = arguments.optional_tensor();
  const Tensor log_decay = arguments.optional_tensor();
  const Tensor erase_key = arguments.optional_tensor();
  const Tensor add_along = arguments.optional_tensor();
  const Tensor key_mask = arguments.optional_tensor();
  Tensor state = arguments.tensor();
  const DeltaRuleOptions options = take_options(arguments);
  const Tensor state_indices = arguments.optional_tensor();

  const Dimensions d = check_qkv(q, k, v, 3, SharedHeads::of_q_and_k);
  const int32_t acc = accumulation_dtype(d.dtype);
  DeltaRuleStep p{};
  static_cast<HeadSizes&>(p) = d;
  static_cast<DeltaRuleOptions&>(p) = options;
  static_cast<DeltaRuleGroups&>(p) = groups_of(d, k, 3);
  p.Hq = p.Hkv;
  if (beta) check_tensor("beta", beta, d.device, acc, {p.B, p.Hkv});
  p.decay_per_channel = log_decay && check_log_decay(log_decay, d, {p.B, p.Hkv}, {p.B, p.Hkv, p.K});
  check_erase(erase_key, add_along, beta, d, options.delta, {p.B, p.Hkv, p.K});
  p.key_mask = check_mask("key_mask", key_mask, d.device, {p.B});
  const int64_t slots = num_slots(state, state_indices, p.B);
  p.state_slot = check_slots("state", state, d.device, acc, {slots, p.Hkv, p.K, p.V});
  p.slots = check_state_indices(state_indices, d.device, p.B, slots);
  Tensor y = Tensor::empty(q.dtype(), {p.B, p.Hkv, p.V}, d.device);

  p.q = token_input(q), p.k = token_input(k), p.v = token_input(v);
  p.beta = token_input(beta), p.log_decay = token_input(log_decay);
  p.erase_key = token_input(erase_key), p.add_along = token_input(add_along);
  p.state = state.mutable_data();
  p.y = token_view(y.mutable_data(), y);
  run(
      d.device, p.dtype,
      [&](const CpuKernels& cpu, const Threads& threads) {
        return cpu.delta_rule.step(p, threads);
      },
      [&](const CudaKernels& cuda, void* stream) { return cuda.delta_rule->step(p, stream); });
  give_back(stack, y);
}

constexpr char kForward[] = "delta_rule", kBackward[] = "delta_rule_backward",
               kStep[] = "delta_rule_step_", kForwardInSlots[] = "delta_rule_";

constexpr Op kOps[] = {
    op<forward, kForward>(
        "delta_rule(Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? log_decay, "
        "Tensor? erase_key, Tensor? add_along, "
        "Tensor? key_mask, Tensor? cu_seqlens, Tensor? initial_state, "
        "float scale, bool normalize_qk, bool delta, bool keep_errors) "
        "-> (Tensor y, Tensor errors, Tensor state)",
        true),
    op<backward, kBackward>(
        "delta_rule_backward(Tensor? dy, Tensor? dstate, "
        "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? log_decay, "
        "Tensor? erase_key, Tensor? add_along, "
        "Tensor? key_mask, Tensor? cu_seqlens, Tensor? initial_state, "
        "Tensor errors, Tensor state, float scale, bool normalize_qk, bool delta) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbeta, Tensor dlog_decay, "
        "Tensor derase_key, Tensor dadd_along, Tensor dinitial_state)",
        true),
    op<step, kStep>(
        "delta_rule_step_(Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? log_decay, "
        "Tensor? erase_key, Tensor? add_along, "
        "Tensor? key_mask, Tensor(a!) state, float scale, bool normalize_qk, bool delta, "
        "Tensor? state_indices=None) -> Tensor y",
        true),
    op<forward_in_slots, kForwardInSlots>(
        "delta_rule_(Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? log_decay, "
        "Tensor? erase_key, Tensor? add_along, "
        "Tensor? key_mask, Tensor? cu_seqlens, Tensor(a!) state, Tensor state_indices, "
        "Tensor? is_new, float scale, bool normalize_qk, bool delta) -> Tensor y",
        false),
};

}  // namespace

const Ops delta_rule_ops = ops_of(kOps);

}  // namespace hfla
