// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Calls every CPU kernel on one thread, on several, and in a team of several, without PyTorch, so
// that ThreadSanitizer sees all that the threads share (scripts/sanitize.py builds and runs this).
// Results must agree; what they should be, the tests of the ops say.

#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cpu.h"
#include "torch/team.h"

namespace {

using namespace hfla;

constexpr int64_t kThreads = 4;
constexpr double kTolerance = 1e-4;  // pieces of a sequence are added up in another order

// Threads of our own: each takes the next part of the range.
void parallel_for(int64_t n, void (*body)(void*, int64_t, int64_t), void* context) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([=] { body(context, n * i / kThreads, n * (i + 1) / kThreads); });
  }
  for (std::thread& thread : threads) thread.join();
}

using Numbers = std::vector<float>;

// The tensors of one call, made as they are asked for: the same numbers in every call.
class Arrays {
 public:
  float* random(int64_t size, float low, float high) {
    float* const x = empty(size, /*is_result=*/false);
    std::uniform_real_distribution<float> numbers(low, high);
    for (int64_t i = 0; i < size; ++i) x[i] = numbers(engine_);
    return x;
  }
  float* empty(int64_t size, bool is_result = true) {
    arrays_.emplace_back(std::make_unique<Numbers>(size, 0.0f));
    if (is_result) results_.push_back(arrays_.back().get());
    return arrays_.back()->data();
  }
  int32_t* indices(int64_t size) {
    indices_.emplace_back(std::make_unique<std::vector<int32_t>>(size));
    return indices_.back()->data();
  }
  Numbers results() const {
    Numbers all;
    for (const Numbers* x : results_) all.insert(all.end(), x->begin(), x->end());
    return all;
  }

 private:
  std::mt19937 engine_{1};
  std::vector<std::unique_ptr<Numbers>> arrays_;
  std::vector<Numbers*> results_;
  std::vector<std::unique_ptr<std::vector<int32_t>>> indices_;
};

struct Sizes {
  int64_t B, T, H, K, V;
  int64_t heads(int64_t dim) const { return B * T * H * dim; }
};

// (B, T, H, D), or (B, T, H) for no D.
View view(float* data, const Sizes& s, int64_t dim) {
  const int64_t D = dim ? dim : 1;
  return {data, s.T * s.H * D, s.H * D, D, dim ? 1 : 0};
}

Sequences sequences(const Sizes& s, const std::vector<int32_t>& cu_seqlens) {
  Sequences p{};
  p.B = s.B, p.T = s.T, p.Hq = p.Hkv = s.H, p.K = s.K, p.V = s.V;
  p.dtype = DType::f32;
  p.num_sequences = cu_seqlens.empty() ? s.B : static_cast<int64_t>(cu_seqlens.size()) - 1;
  p.cu_seqlens = cu_seqlens.empty() ? nullptr : cu_seqlens.data();
  return p;
}

struct Case {
  Sizes sizes;
  std::vector<int32_t> cu_seqlens;
};

// Every second slot, in falling order: row b of a step has its state in slot 2 (B - 1 - b).
Slots every_second_slot(Arrays& a, int64_t B) {
  int32_t* const indices = a.indices(B);
  for (int64_t b = 0; b < B; ++b) indices[b] = static_cast<int32_t>(2 * (B - 1 - b));
  return {2 * B, indices};
}

// Many heads; few, so that columns are divided; one, so that time is; packed sequences.
const Case kCases[] = {
    {{2, 70, 5, 16, 24}, {}},
    {{1, 300, 1, 8, 40}, {}},
    {{1, 900, 1, 16, 4}, {}},
    {{1, 200, 3, 12, 20}, {0, 3, 3, 120, 200}},
};

bool succeeded(Status status) { return status == Status::ok; }

bool linear_attention(const CpuKernels& cpu, const Threads& threads, const Case& c, Arrays& a) {
  const Sizes& s = c.sizes;
  LinearAttentionProblem p{};
  static_cast<Sequences&>(p) = sequences(s, c.cu_seqlens);
  p.feature_map = FeatureMap::elu_plus_one, p.eps = 1e-6, p.normalize = p.is_causal = true;
  const int64_t kv = p.num_sequences * s.H * s.K * s.V, z = p.num_sequences * s.H * s.K;
  p.q = view(a.random(s.heads(s.K), -1, 1), s, s.K);
  p.k = view(a.random(s.heads(s.K), -1, 1), s, s.K);
  p.v = view(a.random(s.heads(s.V), -1, 1), s, s.V);
  p.log_decay = view(a.random(s.heads(1), -1, 0), s, 0);
  p.initial_kv = a.random(kv, 0, 1), p.initial_z = a.random(z, 0, 1);
  LinearAttentionResult result{view(a.empty(s.heads(s.V)), s, s.V), a.empty(s.heads(1)),
                               a.empty(kv), a.empty(z)};
  LinearAttentionUpstream upstream{};
  upstream.dy = view(a.random(s.heads(s.V), -1, 1), s, s.V);
  upstream.dkv = a.random(kv, -1, 1), upstream.dz = a.random(z, -1, 1);
  LinearAttentionGradients gradients{};
  gradients.dq = view(a.empty(s.heads(s.K)), s, s.K);
  gradients.dk = view(a.empty(s.heads(s.K)), s, s.K);
  gradients.dv = view(a.empty(s.heads(s.V)), s, s.V);
  gradients.dlog_decay = view(a.empty(s.heads(1)), s, 0);
  gradients.dinitial_kv = a.empty(kv), gradients.dinitial_z = a.empty(z);
  if (!succeeded(cpu.linear_attention.forward(p, result, threads))) return false;
  upstream.forward = result;
  return succeeded(cpu.linear_attention.backward(p, upstream, gradients, threads));
}

bool linear_attention_step(const CpuKernels& cpu, const Threads& threads, const Case& c,
                           Arrays& a) {
  const Sizes s{c.sizes.B * 8, 1, c.sizes.H, c.sizes.K, c.sizes.V};
  LinearAttentionStep p{};
  static_cast<HeadSizes&>(p) = sequences(s, {});
  p.feature_map = FeatureMap::elu_plus_one, p.eps = 1e-6, p.normalize = true;
  p.q = view(a.random(s.heads(s.K), -1, 1), s, s.K);
  p.k = view(a.random(s.heads(s.K), -1, 1), s, s.K);
  p.v = view(a.random(s.heads(s.V), -1, 1), s, s.V);
  p.slots = every_second_slot(a, s.B);
  p.kv_slot = s.H * s.K * s.V, p.z_slot = s.H * s.K;
  p.kv = a.empty(p.slots.count * p.kv_slot), p.z = a.empty(p.slots.count * p.z_slot);
  p.y = view(a.empty(s.heads(s.V)), s, s.V);
  return succeeded(cpu.linear_attention.step(p, threads));
}

bool linear_attention_in_slots(const CpuKernels& cpu, const Threads& threads, const Case& c,
                               Arrays& a) {
  const Sizes& s = c.sizes;
  LinearAttentionProblem p{};
  static_cast<Sequences&>(p) = sequences(s, c.cu_seqlens);
  p.feature_map = FeatureMap::elu_plus_one, p.eps = 1e-6, p.normalize = p.is_causal = true;
  p.q = view(a.random(s.heads(s.K), -1, 1), s, s.K);
  p.k = view(a.random(s.heads(s.K), -1, 1), s, s.K);
  p.v = view(a.random(s.heads(s.V), -1, 1), s, s.V);
  LinearAttentionSlots slots{};
  slots.state_indices = every_second_slot(a, p.num_sequences).state_indices;
  slots.kv_slot = s.H * s.K * s.V, slots.z_slot = s.H * s.K;
  slots.kv = a.empty(2 * p.num_sequences * slots.kv_slot);
  slots.z = a.empty(2 * p.num_sequences * slots.z_slot);
  const View y = view(a.empty(s.heads(s.V)), s, s.V);
  return succeeded(cpu.linear_attention.forward_in_slots(p, slots, y, threads));
}

bool delta_rule(const CpuKernels& cpu, const Threads& threads, const Case& c, bool per_channel,
                bool delta, Arrays& a) {
  const Sizes& s = c.sizes;
  DeltaRuleProblem p{};
  static_cast<Sequences&>(p) = sequences(s, c.cu_seqlens);
  p.scale = 0.25, p.normalize_qk = true, p.delta = delta;
  const int64_t shared = s.H;  // all heads share one of q and of k
  p.q_group = p.k_group = shared;
  const Sizes one{s.B, s.T, 1, s.K, s.V};
  const int64_t decays = per_channel ? s.K : 0;
  const int64_t state = p.num_sequences * s.H * s.K * s.V;
  p.q = view(a.random(one.heads(s.K), -1, 1), one, s.K);
  p.k = view(a.random(one.heads(s.K), -1, 1), one, s.K);
  p.v = view(a.random(s.heads(s.V), -1, 1), s, s.V);
  p.beta = view(a.random(s.heads(1), 0, 2), s, 0);
  p.log_decay = view(a.random(s.heads(per_channel ? s.K : 1), -1, 0), s, decays);
  p.decay_per_channel = per_channel;
  p.initial_state = a.random(state, 0, 1);
  DeltaRuleResult result{view(a.empty(s.heads(s.V)), s, s.V), {}, a.empty(state)};
  if (delta) result.errors = view(a.empty(s.heads(s.V)), s, s.V);
  DeltaRuleUpstream upstream{};
  upstream.dy = view(a.random(s.heads(s.V), -1, 1), s, s.V);
  upstream.dstate = a.random(state, -1, 1);
  DeltaRuleGradients gradients{};
  gradients.dq = view(a.empty(one.heads(s.K)), one, s.K);
  gradients.dk = view(a.empty(one.heads(s.K)), one, s.K);
  gradients.dv = view(a.empty(s.heads(s.V)), s, s.V);
  gradients.dbeta = view(a.empty(s.heads(1)), s, 0);
  gradients.dlog_decay = view(a.empty(s.heads(per_channel ? s.K : 1)), s, decays);
  gradients.dinitial_state = a.empty(state);
  if (!succeeded(cpu.delta_rule.forward(p, result, threads))) return false;
  upstream.errors = result.errors, upstream.state = result.state;
  return succeeded(cpu.delta_rule.backward(p, upstream, gradients, threads));
}

bool delta_rule_step(const CpuKernels& cpu, const Threads& threads, const Case& c, Arrays& a) {
  const Sizes s{c.sizes.B * 8, 1, c.sizes.H, c.sizes.K, c.sizes.V};
  DeltaRuleStep p{};
  static_cast<HeadSizes&>(p) = sequences(s, {});
  p.scale = 1, p.normalize_qk = true, p.delta = true, p.q_group = p.k_group = 1;
  p.q = view(a.random(s.heads(s.K), -1, 1), s, s.K);
  p.k = view(a.random(s.heads(s.K), -1, 1), s, s.K);
  p.v = view(a.random(s.heads(s.V), -1, 1), s, s.V);
  p.beta = view(a.random(s.heads(1), 0, 1), s, 0);
  p.slots = every_second_slot(a, s.B);
  p.state_slot = s.H * s.K * s.V;
  p.state = a.empty(p.slots.count * p.state_slot);
  p.y = view(a.empty(s.heads(s.V)), s, s.V);
  return succeeded(cpu.delta_rule.step(p, threads));
}

bool delta_rule_in_slots(const CpuKernels& cpu, const Threads& threads, const Case& c, Arrays& a) {
  const Sizes& s = c.sizes;
  DeltaRuleProblem p{};
  static_cast<Sequences&>(p) = sequences(s, c.cu_seqlens);
  p.scale = 0.25, p.normalize_qk = p.delta = true, p.q_group = p.k_group = 1;
  p.q = view(a.random(s.heads(s.K), -1, 1), s, s.K);
  p.k = view(a.random(s.heads(s.K), -1, 1), s, s.K);
  p.v = view(a.random(s.heads(s.V), -1, 1), s, s.V);
  p.beta = view(a.random(s.heads(1), 0, 1), s, 0);
  DeltaRuleSlots slots{};
  slots.state_indices = every_second_slot(a, p.num_sequences).state_indices;
  slots.state_slot = s.H * s.K * s.V;
  slots.state = a.empty(2 * p.num_sequences * slots.state_slot);
  const View y = view(a.empty(s.heads(s.V)), s, s.V);
  return succeeded(cpu.delta_rule.forward_in_slots(p, slots, y, threads));
}

// H K channels.
ConvolutionSizes convolution_sizes(const Sizes& s) {
  return {s.B, s.H * s.K, /*kernel_size=*/4, /*S=*/3, DType::f32, /*silu=*/true};
}

ConvolutionWeights convolution_weights(Arrays& a, int64_t channels, int64_t count) {
  return {a.random(channels * count, -1, 1), DType::f32, count, 1};
}

bool convolution(const CpuKernels& cpu, const Threads& threads, const Case& c, Arrays& a) {
  const Sizes s{c.sizes.B, 3 * c.sizes.T, 40, c.sizes.K, 0};
  std::vector<int32_t> bounds = c.cu_seqlens;
  for (int32_t& bound : bounds) bound *= 3;
  const Sequences whole = sequences(s, bounds);
  ConvolutionProblem p{};
  static_cast<ConvolutionSizes&>(p) = convolution_sizes(s);
  p.T = s.T, p.num_sequences = whole.num_sequences, p.cu_seqlens = whole.cu_seqlens;
  const int64_t tokens = s.B * s.T * p.C, state = p.num_sequences * p.S * p.C;
  const auto rows = [&](float* data) { return View{data, s.T * p.C, p.C, 0, 1}; };
  p.x = rows(a.random(tokens, -1, 1));
  p.weight = convolution_weights(a, p.C, p.kernel_size), p.bias = convolution_weights(a, p.C, 1);
  p.initial_state = a.random(state, -1, 1);
  const ConvolutionResult result{a.empty(tokens), a.empty(state)};
  const ConvolutionUpstream upstream{rows(a.random(tokens, -1, 1)), a.random(state, -1, 1)};
  const ConvolutionGradients gradients{a.empty(tokens), a.empty(p.C * p.kernel_size), a.empty(p.C),
                                       a.empty(state)};
  return succeeded(cpu.convolution.forward(p, result, threads)) &&
         succeeded(cpu.convolution.backward(p, upstream, gradients, threads));
}

bool convolution_step(const CpuKernels& cpu, const Threads& threads, const Case& c, Arrays& a) {
  const Sizes s{c.sizes.B * 40, 1, 40, c.sizes.K, 0};
  ConvolutionStep p{};
  static_cast<ConvolutionSizes&>(p) = convolution_sizes(s);
  p.x = {a.random(s.B * p.C, -1, 1), p.C, 0, 0, 1};
  p.weight = convolution_weights(a, p.C, p.kernel_size), p.bias = convolution_weights(a, p.C, 1);
  p.slots = every_second_slot(a, s.B);
  p.state = {a.empty(p.slots.count * p.S * p.C), p.S * p.C, p.C, 0, 1};
  p.y = a.empty(s.B * p.C);
  return succeeded(cpu.convolution.step(p, threads));
}

// H V channels, K sums each.
SelectiveScanSizes scan_sizes(const Sizes& s) { return {s.B, s.H * s.V, s.K, DType::f32}; }

bool selective_scan(const CpuKernels& cpu, const Threads& threads, const Case& c, Arrays& a) {
  const Sizes& s = c.sizes;
  const Sequences whole = sequences(s, c.cu_seqlens);
  SelectiveScanProblem p{};
  static_cast<SelectiveScanSizes&>(p) = scan_sizes(s);
  p.T = s.T, p.num_sequences = whole.num_sequences, p.cu_seqlens = whole.cu_seqlens;
  const int64_t tokens = s.B * s.T, state = p.num_sequences * p.C * p.N;
  const auto rows = [&](int64_t columns, float low) {
    return View{a.random(tokens * columns, low, 1), s.T * columns, columns, 0, 1};
  };
  p.x = rows(p.C, -1), p.dt = rows(p.C, 0), p.write = rows(p.N, -1), p.read = rows(p.N, -1);
  p.A = a.random(p.C * p.N, -2, 0), p.D = a.random(p.C, -1, 1);
  p.initial_state = a.random(state, -1, 1);
  const SelectiveScanResult result{a.empty(tokens * p.C), a.empty(state)};
  const SelectiveScanUpstream upstream{rows(p.C, -1), a.random(state, -1, 1)};
  const SelectiveScanGradients gradients{
      a.empty(tokens * p.C), a.empty(tokens * p.C), a.empty(p.C * p.N), a.empty(tokens * p.N),
      a.empty(tokens * p.N), a.empty(p.C),          a.empty(state)};
  return succeeded(cpu.selective_scan.forward(p, result, threads)) &&
         succeeded(cpu.selective_scan.backward(p, upstream, gradients, threads));
}

bool selective_scan_step(const CpuKernels& cpu, const Threads& threads, const Case& c, Arrays& a) {
  const Sizes s{c.sizes.B * 40, 1, c.sizes.H, c.sizes.K, c.sizes.V};
  SelectiveScanStep p{};
  static_cast<SelectiveScanSizes&>(p) = scan_sizes(s);
  const auto rows = [&](int64_t columns, float low) {
    return View{a.random(s.B * columns, low, 1), columns, 0, 0, 1};
  };
  p.x = rows(p.C, -1), p.dt = rows(p.C, 0), p.write = rows(p.N, -1), p.read = rows(p.N, -1);
  p.A = a.random(p.C * p.N, -2, 0), p.D = a.random(p.C, -1, 1);
  p.slots = every_second_slot(a, s.B);
  p.state = {a.empty(p.slots.count * p.C * p.N), p.C * p.N, 0, p.N, 1};
  p.y = a.empty(s.B * p.C);
  return succeeded(cpu.selective_scan.step(p, threads));
}

// Channels enough for several blocks of them.
ElementwiseScanSizes elementwise_scan_sizes(const Sizes& s) {
  return {s.B, 20 * s.H * s.V, DType::f32};
}

bool elementwise_scan(const CpuKernels& cpu, const Threads& threads, const Case& c, Arrays& a) {
  const Sequences whole = sequences(c.sizes, c.cu_seqlens);
  ElementwiseScanProblem p{};
  static_cast<ElementwiseScanSizes&>(p) = elementwise_scan_sizes(c.sizes);
  p.T = c.sizes.T, p.num_sequences = whole.num_sequences, p.cu_seqlens = whole.cu_seqlens;
  const int64_t numbers = p.B * p.T * p.C, state = p.num_sequences * p.C;
  const auto rows = [&](float low, float high) {
    return View{a.random(numbers, low, high), p.T * p.C, p.C, 0, 1};
  };
  p.x = rows(-1, 1), p.log_decay = rows(-2, 0);
  p.initial_state = a.random(state, -1, 1);
  const ElementwiseScanResult result{a.empty(numbers), a.empty(state)};
  const ElementwiseScanUpstream upstream{rows(-1, 1), a.random(state, -1, 1), nullptr};
  const ElementwiseScanGradients gradients{a.empty(numbers), a.empty(numbers), a.empty(state)};
  return succeeded(cpu.elementwise_scan.forward(p, result, threads)) &&
         succeeded(cpu.elementwise_scan.backward(p, upstream, gradients, threads));
}

// Heads of which a block has a part.
bool rg_lru(const CpuKernels& cpu, const Threads& threads, const Case& c, Arrays& a) {
  const Sequences whole = sequences(c.sizes, {});
  RgLruProblem p{};
  static_cast<ElementwiseScanSizes&>(p) = elementwise_scan_sizes(c.sizes);
  p.T = c.sizes.T, p.num_sequences = whole.num_sequences, p.P = 20 * c.sizes.V;
  const int64_t numbers = p.B * p.T * p.C, state = p.num_sequences * p.C;
  const auto rows = [&](float low, float high) {
    return View{a.random(numbers, low, high), p.T * p.C, p.C, p.P, 1};
  };
  p.x = rows(-1, 1), p.input_gate = rows(-2, 2), p.recurrent_gate = rows(-2, 2);
  p.rate = a.random(p.C, -2, 0), p.initial_state = a.random(state, -1, 1);
  float* const y = a.empty(numbers);
  ElementwiseScanUpstream upstream{rows(-1, 1), a.random(state, -1, 1), y};
  const RgLruGradients gradients{a.empty(numbers), a.empty(numbers), a.empty(numbers),
                                 a.empty(state), a.empty(state)};
  if (!succeeded(cpu.rg_lru.forward(p, {y, a.empty(state)}, threads)) ||
      !succeeded(cpu.rg_lru.backward(p, upstream, gradients, threads))) {
    return false;
  }
  upstream.y = nullptr;  // so that sums are computed again
  const RgLruGradients again{a.empty(numbers), a.empty(numbers), a.empty(numbers), a.empty(state),
                             a.empty(state)};
  return succeeded(cpu.rg_lru.backward(p, upstream, again, threads));
}

bool elementwise_scan_step(const CpuKernels& cpu, const Threads& threads, const Case& c,
                           Arrays& a) {
  ElementwiseScanStep p{};
  static_cast<ElementwiseScanSizes&>(p) =
      elementwise_scan_sizes({c.sizes.B * 40, 1, c.sizes.H, c.sizes.K, c.sizes.V});
  p.x = {a.random(p.B * p.C, -1, 1), p.C, 0, 0, 1};
  p.log_decay = {a.random(p.B * p.C, -2, 0), p.C, 0, 0, 1};
  p.slots = every_second_slot(a, p.B);
  p.state = {a.empty(p.slots.count * p.C), p.C, 0, 0, 1};
  p.y = a.empty(p.B * p.C);
  return succeeded(cpu.elementwise_scan.step(p, threads));
}

bool linear(const CpuKernels& cpu, const Threads& threads, const Case& c, Arrays& a) {
  const int64_t in = 16 * c.sizes.T, out = 701;
  for (const int64_t rows : {1, 7}) {  // without and with weights that are asked for in advance
    const LinearProblem p{rows,
                          in,
                          out,
                          DType::f32,
                          a.random(rows * in, -1, 1),
                          a.random(in * out, -1, 1),
                          a.random(out, -1, 1),
                          a.empty(rows * out),
                          out};
    if (!succeeded(cpu.linear(p, threads))) return false;
  }
  return true;
}

bool expert_linear(const CpuKernels& cpu, const Threads& threads, const Case& c, Arrays& a) {
  const int64_t in = 16 * c.sizes.T, out = 301;
  const ExpertRows chosen[] = {{0, 0, 1}, {2, 1, 4}, {3, 4, 5}};
  ExpertLinearProblem p{};
  p.in = in, p.out = out, p.dtype = DType::f32;
  p.x = a.random(5 * in, -1, 1);
  p.weight = a.random(4 * out * in, -1, 1);
  p.bias = a.random(4 * out, -1, 1);
  p.y = a.empty(5 * out);
  p.chosen = chosen, p.num_chosen = 3;
  return succeeded(hfla::expert_linear(cpu.linear, p, threads));
}

bool many_rows_linear(const CpuKernels& cpu, const Threads& threads, const Case& c, Arrays& a) {
  const int64_t rows = 20 * c.sizes.T, in = 300, out = 100;
  ManyRowsLinearProblem p{};
  p.rows = rows, p.in = in, p.out = out;
  p.dtype = p.x_dtype = p.weight_dtype = p.y_dtype = DType::f32;
  p.x = a.random(rows * in, -1, 1);
  p.weight = a.random(out * in, -1, 1);
  p.y = a.empty(rows * out);
  p.x_strides[0] = in, p.x_strides[1] = 1;
  p.weight_strides[0] = 1, p.weight_strides[1] = out;
  return succeeded(cpu.many_rows_linear(p, threads));
}

bool quantized_linear(const CpuKernels& cpu, const Threads& threads, const Case& c, Arrays& a) {
  const int64_t in = 32 * c.sizes.T, out = 700;
  for (const auto [rows, rounds_x] : {std::pair{3, false}, {7, false}, {1, true}, {7, true}}) {
    QuantizedLinearProblem p{};
    p.rows = rows, p.in = in, p.out = out, p.group = 32, p.bits = 4, p.dtype = DType::f32;
    p.x = a.random(rows * in, -1, 1);
    p.weight = a.random(in * out / 8, -1, 1);  // bits of any kind
    p.scale = {a.random(in / 32 * out, 0, 1), NumberType::f32, 1, out};
    p.zero = {a.random(in / 32 * out, -1, 1), NumberType::f32, 1, out};
    p.y = a.empty(rows * out);
    const auto product = rounds_x ? cpu.rounded_linear : cpu.quantized_linear;
    if (!succeeded(product(p, threads))) return false;
  }
  return true;
}

bool rms_norm(const CpuKernels& cpu, const Threads& threads, const Case& c, Arrays& a) {
  const int64_t rows = 10 * c.sizes.T, columns = 64;
  const RmsNormProblem p{
      rows, columns, DType::f32, 1e-6, a.random(rows * columns, -1, 1), a.random(columns, -1, 1)};
  const RmsNormResult result{a.empty(rows * columns), a.empty(rows)};
  const float* const dy = a.random(rows * columns, -1, 1);
  if (!succeeded(cpu.rms_norm.forward(p, result, threads))) return false;
  return succeeded(cpu.rms_norm.backward(
      p, {dy, result.inverse_rms, a.empty(rows * columns), a.empty(columns)}, threads));
}

bool cross_entropy(const CpuKernels& cpu, const Threads& threads, const Case& c, Arrays& a) {
  const int64_t rows = 10 * c.sizes.T, words = 300;
  const std::vector<int64_t> labels(static_cast<size_t>(rows), 7);
  const CrossEntropyProblem p{rows,          words, DType::f32, a.random(rows * words, -1, 1),
                              labels.data(), -100};
  const CrossEntropyResult result{a.empty(rows), a.empty(rows), a.empty(rows)};
  if (!succeeded(cpu.cross_entropy.forward(p, result, threads))) return false;
  return succeeded(
      cpu.cross_entropy.backward(p, {result.sums, result.largest, a.empty(rows * words)}, threads));
}

using Call = std::function<bool(const CpuKernels&, const Threads&, const Case&, Arrays&)>;

Call delta_rule_of(bool per_channel, bool delta) {
  return [=](const CpuKernels& cpu, const Threads& threads, const Case& c, Arrays& a) {
    return delta_rule(cpu, threads, c, per_channel, delta, a);
  };
}

const std::pair<const char*, Call> kCalls[] = {
    {"linear_attention", linear_attention},
    {"linear_attention_step", linear_attention_step},
    {"linear_attention_in_slots", linear_attention_in_slots},
    {"delta_rule, decay per head", delta_rule_of(false, true)},
    {"delta_rule, decay per channel", delta_rule_of(true, true)},
    {"delta_rule, decay per head, without delta", delta_rule_of(false, false)},
    {"delta_rule, decay per channel, without delta", delta_rule_of(true, false)},
    {"delta_rule_step", delta_rule_step},
    {"delta_rule_in_slots", delta_rule_in_slots},
    {"convolution", convolution},
    {"convolution_step", convolution_step},
    {"selective_scan", selective_scan},
    {"selective_scan_step", selective_scan_step},
    {"elementwise_scan", elementwise_scan},
    {"elementwise_scan_step", elementwise_scan_step},
    {"rg_lru", rg_lru},
    {"linear", linear},
    {"many_rows_linear", many_rows_linear},
    {"expert_linear", expert_linear},
    {"quantized_linear", quantized_linear},
    {"rms_norm", rms_norm},
    {"cross_entropy", cross_entropy},
};

// Three times in one team, which has many loops then, and asks for "weights" meanwhile.
bool call_in_team(const Call& call, const CpuKernels& cpu, const Case& c, Arrays (&arrays)[3]) {
  static const std::vector<char> weights(1 << 16);
  WeightPrefetch prefetch(kThreads);
  for (int64_t i = 0; i < 3; ++i) prefetch.add(i, weights.data(), int64_t(weights.size()));
  bool succeeded = true;
  auto calls = [&] {
    for (int64_t i = 0; i < 3; ++i) {
      prefetch.begin(i);
      succeeded &= call(cpu, Team::current()->threads(), c, arrays[i]);
    }
  };
  Team::run(
      {kThreads, parallel_for}, prefetch,
      [](void* all) { (*static_cast<decltype(calls)*>(all))(); }, &calls);
  return succeeded;
}

// The largest difference, of the largest number.
double difference(const Numbers& x, const Numbers& y) {
  double most = 0, size = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (!std::isfinite(x[i]) || !std::isfinite(y[i])) return INFINITY;
    most = std::fmax(most, std::fabs(double(x[i]) - y[i]));
    size = std::fmax(size, std::fabs(double(x[i])));
  }
  return size > 0 ? most / size : INFINITY;  // all zeros are no results
}

}  // namespace

int main() {
  const char* why_not = nullptr;
  const CpuKernels* const cpu = cpu_kernels(DType::f32, &why_not);
  if (!cpu) return std::fprintf(stderr, "%s\n", why_not), 1;
  for (const auto& [name, call] : kCalls) {
    for (const Case& c : kCases) {
      Arrays alone, together, team[3];
      const bool ran = call(*cpu, {1, parallel_for}, c, alone) &&
                       call(*cpu, {kThreads, parallel_for}, c, together) &&
                       call_in_team(call, *cpu, c, team);
      double error = ran ? difference(alone.results(), together.results()) : INFINITY;
      for (const Arrays& a : team) {
        error = std::fmax(error, difference(alone.results(), a.results()));
      }
      if (!(error <= kTolerance)) {
        return std::fprintf(stderr, "%s with %d tokens: one thread and several differ by %g\n",
                            name, static_cast<int>(c.sizes.T), error),
               1;
      }
    }
    std::printf("%s: on %d threads as on one\n", name, static_cast<int>(kThreads));
  }
}
