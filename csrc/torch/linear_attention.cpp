// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The ops of kernels/linear_attention.h: schemas, argument checks, allocation of results, calls of
// the kernels. Letters as in sequences.h.

#include "kernels/export.h"
#include "torch/devices.h"
#include "torch/ops.h"
#include "torch/sequences.h"

namespace hfla {
namespace {

FeatureMap check_feature_map(int64_t index) {
  constexpr int64_t count = static_cast<int64_t>(FeatureMap::count);
  check(index >= 0 && index < count, "feature_map must be an index from 0 to ", count - 1, ", got ",
        index);
  return static_cast<FeatureMap>(index);
}

// Shared by forward and backward, in the order of both schemas.
struct Inputs {
  Tensor q, k, v, log_decay, key_mask, cu_seqlens, initial_kv, initial_z;
};

struct Options {
  int64_t feature_map;
  bool normalize;
  double eps;
  bool is_causal;
};

// Braces evaluate from left to right.
Inputs take_inputs(Arguments& arguments) {
  return {arguments.tensor(),          arguments.tensor(),          arguments.tensor(),
          arguments.optional_tensor(), arguments.optional_tensor(), arguments.optional_tensor(),
          arguments.optional_tensor(), arguments.optional_tensor()};
}

Options take_options(Arguments& arguments) {
  return {arguments.integer(), arguments.boolean(), arguments.number(), arguments.boolean()};
}

// Of a state that changes in place.
void check_z(const Tensor& z, bool normalize) {
  check(bool(z) == normalize, "z must be ",
        normalize ? "given with normalize" : "None without normalize");
}

void set_initial_state(const Inputs& in, Device device, LinearAttentionProblem& p) {
  const int32_t acc = accumulation_dtype(p.dtype);
  const int64_t rows = p.num_sequences;
  p.initial_kv = check_optional("initial_kv", in.initial_kv, device, acc, {rows, p.Hkv, p.K, p.V});
  p.initial_z = check_optional("initial_z", in.initial_z, device, acc, {rows, p.Hkv, p.K});
  const bool expects_z = in.initial_kv && p.normalize;
  check(bool(in.initial_z) == expects_z, "initial_z must be ",
        expects_z ? "given with initial_kv" : "None without initial_kv or without normalize");
}

LinearAttentionProblem make_problem(const Inputs& in, const Options& options,
                                    LastBound last = LastBound::is_T) {
  const Dimensions d = check_qkv(in.q, in.k, in.v, 4);
  LinearAttentionProblem p{};
  p.feature_map = check_feature_map(options.feature_map);
  p.normalize = options.normalize;
  p.is_causal = options.is_causal;
  p.eps = options.eps;

  if (in.log_decay) {
    check(p.is_causal, "log_decay must be None when is_causal is False");
    check_tensor("log_decay", in.log_decay, d.device, accumulation_dtype(d.dtype),
                 {d.B, d.T, d.Hkv});
  }
  static_cast<Sequences&>(p) = check_sequences(d, in.key_mask, in.cu_seqlens, last);
  set_initial_state(in, d.device, p);

  p.q = input(in.q), p.k = input(in.k), p.v = input(in.v);
  p.log_decay = input(in.log_decay);
  return p;
}

// The kernels of CUDA keep states of pieces for backward.
int64_t piece_room(Device device, const LinearAttentionProblem& p) {
  return is_cuda(device) ? room_for_pieces(p) : 0;
}

// Of sequences of one token, from states to others.
LinearAttentionStep step_of(const LinearAttentionProblem& p, const LinearAttentionResult& result) {
  LinearAttentionStep step{};
  static_cast<HeadSizes&>(step) = p;
  static_cast<LinearAttentionOptions&>(step) = p;
  step.q = p.q, step.k = p.k, step.v = p.v, step.log_decay = p.log_decay;
  step.key_mask = p.key_mask;
  step.before = p.initial_kv, step.z_before = p.initial_z;
  step.kv = result.kv, step.z = result.z, step.den = result.den;
  step.kv_slot = p.Hkv * p.K * p.V, step.z_slot = p.Hkv * p.K;
  step.y = result.y;
  return step;
}

void forward(StableIValue* stack) {
  Arguments arguments(stack);
  const Inputs in = take_inputs(arguments);
  const Options options = take_options(arguments);
  const LinearAttentionProblem p = make_problem(in, options);

  const int32_t acc = accumulation_dtype(p.dtype);
  const Device device = in.q.device();
  const int64_t rows = p.num_sequences;
  const auto empty_if = [&](bool exists, std::initializer_list<int64_t> sizes) {
    return exists ? Tensor::empty(acc, sizes, device) : none(acc, device);
  };
  Tensor y = Tensor::empty(in.q.dtype(), {p.B, p.T, p.Hq, p.V}, device);
  Tensor den = empty_if(p.normalize, {p.B, p.T, p.Hq});
  Tensor kv = empty_if(true, {rows, p.Hkv, p.K, p.V});
  Tensor z = empty_if(p.normalize, {rows, p.Hkv, p.K});
  const int64_t room = piece_room(device, p);
  Tensor piece_states = Tensor::empty(acc, {room * piece_numbers(p)}, device);

  LinearAttentionResult result{};
  result.y = output(y);
  result.kv = kv.mutable_data();
  if (p.normalize) {
    result.den = den.mutable_data();
    result.z = z.mutable_data();
  }
  result.piece_states = piece_states.mutable_data();
  result.piece_room = room;
  run(
      device, p.dtype,
      [&](const CpuKernels& cpu, const Threads& threads) {
        if (p.T == 1 && p.initial_kv && !p.cu_seqlens) {
          return cpu.linear_attention.step(step_of(p, result), threads);
        }
        return cpu.linear_attention.forward(p, result, threads);
      },
      [&](const CudaKernels& cuda, const CudaPlace& place) {
        return cuda.linear_attention->forward(p, result, place);
      });
  give_back(stack, y, den, kv, z, piece_states);
}

void forward_in_slots(StableIValue* stack) {
  Arguments arguments(stack);
  const Inputs in{arguments.tensor(),
                  arguments.tensor(),
                  arguments.tensor(),
                  arguments.optional_tensor(),
                  arguments.optional_tensor(),
                  arguments.optional_tensor(),
                  Tensor(),
                  Tensor()};
  Tensor kv = arguments.tensor();
  Tensor z = arguments.optional_tensor();
  const Tensor state_indices = arguments.tensor();
  const Tensor is_new = arguments.optional_tensor();
  const int64_t feature_map = arguments.integer();
  const bool normalize = arguments.boolean();
  const double eps = arguments.number();
  const LinearAttentionProblem p =
      make_problem(in, {feature_map, normalize, eps, /*is_causal=*/true}, LastBound::at_most_T);

  const int32_t acc = accumulation_dtype(p.dtype);
  const Device device = in.q.device();
  LinearAttentionSlots slots{};
  const int64_t count = num_slots(kv, state_indices, p.num_sequences);
  slots.kv_slot = check_slots("kv", kv, device, acc, {count, p.Hkv, p.K, p.V});
  check_z(z, normalize);
  if (z) slots.z_slot = check_slots("z", z, device, acc, {count, p.Hkv, p.K});
  static_cast<SequenceSlots&>(slots) =
      check_sequence_slots(state_indices, is_new, device, p.num_sequences, count);
  slots.kv = kv.mutable_data();
  slots.z = z ? z.mutable_data() : nullptr;
  Tensor y = Tensor::empty(in.q.dtype(), {p.B, p.T, p.Hq, p.V}, device);
  clear_outputs(p, slots, y, p.Hq * p.V * bytes_of(p.dtype));
  check_status(
      cpu(p.dtype).linear_attention.forward_in_slots(p, slots, output(y), torch_threads()));
  give_back(stack, y);
}

// The results of forward, as backward reads them.
LinearAttentionResult check_forward_result(const LinearAttentionProblem& p, Device device,
                                           int32_t dtype, const Tensor& y, const Tensor& den,
                                           const Tensor& kv, const Tensor& z,
                                           const Tensor& piece_states) {
  const int32_t acc = accumulation_dtype(p.dtype);
  check_contiguous_tensor("y", y, device, dtype, {p.B, p.T, p.Hq, p.V});
  check_contiguous_tensor("kv", kv, device, acc, {p.num_sequences, p.Hkv, p.K, p.V});
  LinearAttentionResult result{};
  result.y = input(y);
  result.kv = input_data(kv);
  if (p.normalize) {
    check_contiguous_tensor("den", den, device, acc, {p.B, p.T, p.Hq});
    check_contiguous_tensor("z", z, device, acc, {p.num_sequences, p.Hkv, p.K});
    result.den = input_data(den);
    result.z = input_data(z);
  }
  result.piece_room = piece_room(device, p);
  check_contiguous_tensor("piece_states", piece_states, device, acc,
                          {result.piece_room * piece_numbers(p)});
  result.piece_states = input_data(piece_states);
  return result;
}

void backward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor dy = arguments.optional_tensor();
  const Tensor dkv = arguments.optional_tensor();
  const Tensor dz = arguments.optional_tensor();
  const Inputs in = take_inputs(arguments);
  const Tensor y = arguments.tensor();
  const Tensor den = arguments.tensor();
  const Tensor kv = arguments.tensor();
  const Tensor z = arguments.tensor();
  const Tensor piece_states = arguments.tensor();
  const Options options = take_options(arguments);
  const LinearAttentionProblem p = make_problem(in, options);

  const int32_t dtype = in.q.dtype();
  const int32_t acc = accumulation_dtype(p.dtype);
  const Device device = in.q.device();
  const int64_t rows = p.num_sequences;
  if (dy) check_tensor("dy", dy, device, dtype, {p.B, p.T, p.Hq, p.V});
  check(p.normalize || !dz, "dz must be None without normalize");
  LinearAttentionUpstream upstream{};
  upstream.dy = input(dy);
  upstream.dkv = check_optional("dkv", dkv, device, acc, {rows, p.Hkv, p.K, p.V});
  upstream.dz = check_optional("dz", dz, device, acc, {rows, p.Hkv, p.K});
  upstream.forward = check_forward_result(p, device, dtype, y, den, kv, z, piece_states);

  const auto gradient = [&](const Tensor& input) { return empty_like(input, acc, device); };
  Tensor dq = gradient(in.q), dk = gradient(in.k), dv = gradient(in.v);
  Tensor dlog_decay = gradient(in.log_decay);
  Tensor dinitial_kv = gradient(in.initial_kv), dinitial_z = gradient(in.initial_z);

  LinearAttentionGradients result{};
  result.dq = output(dq), result.dk = output(dk), result.dv = output(dv);
  if (in.log_decay) result.dlog_decay = output(dlog_decay);
  if (in.initial_kv) result.dinitial_kv = dinitial_kv.mutable_data();
  if (in.initial_z) result.dinitial_z = dinitial_z.mutable_data();
  run(
      device, p.dtype,
      [&](const CpuKernels& cpu, const Threads& threads) {
        return cpu.linear_attention.backward(p, upstream, result, threads);
      },
      [&](const CudaKernels& cuda, const CudaPlace& place) {
        return cuda.linear_attention->backward(p, upstream, result, place);
      });
  give_back(stack, dq, dk, dv, dlog_decay, dinitial_kv, dinitial_z);
}

void step(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor();
  const Tensor k = arguments.tensor();
  const Tensor v = arguments.tensor();
  const Tensor log_decay = arguments.optional_tensor();
  const Tensor key_mask = arguments.optional_tensor();
  Tensor kv = arguments.tensor();
  Tensor z = arguments.optional_tensor();
  const int64_t feature_map = arguments.integer();
  const bool normalize = arguments.boolean();
  const double eps = arguments.number();
  const Tensor state_indices = arguments.optional_tensor();

  const Dimensions d = check_qkv(q, k, v, 3);
  const int32_t acc = accumulation_dtype(d.dtype);
  if (log_decay) check_tensor("log_decay", log_decay, d.device, acc, {d.B, d.Hkv});
  LinearAttentionStep p{};
  const int64_t slots = num_slots(kv, state_indices, d.B);
  p.kv_slot = check_slots("kv", kv, d.device, acc, {slots, d.Hkv, d.K, d.V});
  check_z(z, normalize);
  if (z) p.z_slot = check_slots("z", z, d.device, acc, {slots, d.Hkv, d.K});
  p.slots = check_state_indices(state_indices, d.device, d.B, slots);
  Tensor y = Tensor::empty(q.dtype(), {d.B, d.Hq, d.V}, d.device);

  static_cast<HeadSizes&>(p) = d;
  p.feature_map = check_feature_map(feature_map);
  p.normalize = normalize;
  p.eps = eps;
  p.q = token_input(q), p.k = token_input(k), p.v = token_input(v);
  p.log_decay = token_input(log_decay);
  p.key_mask = check_mask("key_mask", key_mask, d.device, {d.B});
  p.kv = kv.mutable_data();
  p.z = z ? z.mutable_data() : nullptr;
  p.y = token_view(y.mutable_data(), y);
  run(
      d.device, p.dtype,
      [&](const CpuKernels& cpu, const Threads& threads) {
        return cpu.linear_attention.step(p, threads);
      },
      [&](const CudaKernels& cuda, void* stream) {
        return cuda.linear_attention->step(p, stream);
      });
  give_back(stack, y);
}

constexpr char kForward[] = "linear_attention", kBackward[] = "linear_attention_backward",
               kStep[] = "linear_attention_step_", kForwardInSlots[] = "linear_attention_";

constexpr Op kOps[] = {
    op<forward, kForward>(
        "linear_attention(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? key_mask, "
        "Tensor? cu_seqlens, Tensor? initial_kv, Tensor? initial_z, "
        "int feature_map, bool normalize, float eps, bool is_causal) "
        "-> (Tensor y, Tensor den, Tensor kv, Tensor z, Tensor piece_states)",
        true),
    op<backward, kBackward>("linear_attention_backward(Tensor? dy, Tensor? dkv, Tensor? dz, "
                            "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? key_mask, "
                            "Tensor? cu_seqlens, Tensor? initial_kv, Tensor? initial_z, "
                            "Tensor y, Tensor den, Tensor kv, Tensor z, Tensor piece_states, "
                            "int feature_map, bool normalize, float eps, bool is_causal) "
                            "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dlog_decay, "
                            "Tensor dinitial_kv, Tensor dinitial_z)",
                            true),
    op<step, kStep>(
        "linear_attention_step_(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? key_mask, "
        "Tensor(a!) kv, Tensor(b!)? z, int feature_map, bool normalize, float eps, "
        "Tensor? state_indices=None) -> Tensor y",
        true),
    op<forward_in_slots, kForwardInSlots>(
        "linear_attention_(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? key_mask, "
        "Tensor? cu_seqlens, Tensor(a!) kv, Tensor(b!)? z, Tensor state_indices, Tensor? is_new, "
        "int feature_map, bool normalize, float eps) -> Tensor y",
        false),
};

}  // namespace

const Ops linear_attention_ops = ops_of(kOps);

}  // namespace hfla

// "identity, elu+1, ...": the feature maps in the order of the ops' index, for Python, through
// ctypes.
HFLA_EXPORT const char* hfla_feature_maps() {
  static const std::string names = [] {
    std::string joined;
    for (const char* name : hfla::kFeatureMapNames)
      joined += (joined.empty() ? "" : ", ") + std::string(name);
    return joined;
  }();
  return names.c_str();
}
