// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Calls of the delta rule, and of the general form of linear attention, which has its kernels.
#pragma once

#include <string>
#include <vector>

#include "case.h"

namespace checked {

inline const hfla::DeltaRuleOnCuda& delta_kernels(hfla::DType dtype) {
  return *hfla::cuda_kernels(dtype)->delta_rule;
}

enum class DecayOf { nothing, head, channel };

// One number for each head is that of all its channels.
inline hfla::View decays(Tensors& tensors, int64_t T, int64_t H, int64_t D) {
  hfla::View view = tensors.tensor(T, H, D, hfla::DType::f32);
  if (D == 1) view.dim = 0;
  return view;
}

// Where tokens forget, and now and then all.
inline hfla::View random_decay(Tensors& tensors, int64_t T, int64_t H, int64_t D) {
  const hfla::View view = decays(tensors, T, H, D);
  tensors.fill(view, T, H, D, [](int64_t i) {
    const float x = random_number(99, uint64_t(i));
    return i % 11 == 7 ? -200 : -x * x;
  });
  return view;
}

inline hfla::View random_beta(Tensors& tensors, int64_t T, int64_t H) {
  const hfla::View beta = tensors.tensor(T, H, 1, hfla::DType::f32);
  tensors.fill(beta, T, H, 1, [](int64_t i) { return (1 + random_number(98, uint64_t(i))) / 2; });
  return beta;
}

struct DeltaRule {
  hfla::DType dtype;
  int64_t multiprocessors;  // of the device: few, and a block takes many columns
  int64_t T, K, V, B = 1, Hv = 2, groups = 1;
  DecayOf decay = DecayOf::head;
  bool delta = true, mask = true, backward = true, keep_errors = true;
  bool erase = false, along = false;  // an erase key; and what it finds is added along another

  int64_t decays() const { return decay == DecayOf::channel ? K : 1; }
};

inline hfla::DeltaRuleProblem problem_of(const DeltaRule& c, Tensors& tensors, int64_t B) {
  const int64_t T = c.T, Hv = c.Hv, H = Hv / c.groups, K = c.K, V = c.V;
  hfla::DeltaRuleProblem p{};
  p.B = p.num_sequences = B, p.Hq = p.Hkv = Hv, p.K = K, p.V = V, p.dtype = c.dtype, p.T = T;
  p.scale = 0.5, p.normalize_qk = c.delta, p.delta = c.delta;
  p.q_group = p.k_group = c.groups;
  p.q = tensors.random(T, H, K, c.dtype);
  p.k = tensors.random(T, H, K, c.dtype);
  p.v = tensors.random(T, Hv, V, c.dtype);
  if (!c.along) p.beta = random_beta(tensors, T, Hv);
  if (c.erase) p.erase_key = tensors.random(T, Hv, K, hfla::DType::f32);
  if (c.along) p.add_along = tensors.random(T, Hv, K, hfla::DType::f32);
  p.decay_per_channel = c.decay == DecayOf::channel;
  if (c.decay != DecayOf::nothing) p.log_decay = random_decay(tensors, T, Hv, c.decays());
  if (c.mask) p.key_mask = tensors.mask(T);
  p.initial_state = tensors.random_array(Hv * K * V);
  return p;
}

inline bool run(const DeltaRule& c, Tensors& tensors, int64_t B) {
  constexpr auto kF32 = hfla::DType::f32;
  const int64_t T = c.T, Hv = c.Hv, H = Hv / c.groups, K = c.K, V = c.V;
  const hfla::DeltaRuleProblem p = problem_of(c, tensors, B);
  hfla::DeltaRuleResult y{};
  y.y = tensors.tensor(T, Hv, V, c.dtype);
  if (c.delta && c.keep_errors) y.errors = tensors.tensor(T, Hv, V, kF32);
  y.state = tensors.array(Hv * K * V);
  const hfla::CudaDevice device{c.multiprocessors, 227 << 10};
  const auto& table = delta_kernels(c.dtype);
  if (!with_workspace(tensors, device, [&](auto place) { return table.forward(p, y, place); })) {
    return false;
  }
  tensors.read("y", y.y, T, Hv, V, c.dtype);
  tensors.read("state", static_cast<float*>(y.state), Hv * K * V);
  if (!c.backward) return true;

  hfla::DeltaRuleUpstream up{};
  up.dy = tensors.random(T, Hv, V, c.dtype);
  up.dstate = tensors.random_array(Hv * K * V);
  up.errors = y.errors, up.state = y.state;
  hfla::DeltaRuleGradients d{};
  d.dq = tensors.tensor(T, H, K, c.dtype);
  d.dk = tensors.tensor(T, H, K, c.dtype);
  d.dv = tensors.tensor(T, Hv, V, c.dtype);
  if (!c.along) d.dbeta = tensors.tensor(T, Hv, 1, kF32);
  if (c.erase) d.derase_key = tensors.tensor(T, Hv, K, kF32);
  if (c.along) d.dadd_along = tensors.tensor(T, Hv, K, kF32);
  if (c.decay != DecayOf::nothing) d.dlog_decay = decays(tensors, T, Hv, c.decays());
  d.dinitial_state = tensors.array(Hv * K * V);
  if (!with_workspace(tensors, device,
                      [&](auto place) { return table.backward(p, up, d, place); })) {
    return false;
  }
  tensors.read("dq", d.dq, T, H, K, c.dtype);
  tensors.read("dk", d.dk, T, H, K, c.dtype);
  tensors.read("dv", d.dv, T, Hv, V, c.dtype);
  if (!c.along) tensors.read("dbeta", d.dbeta, T, Hv, 1, kF32);
  if (c.erase) tensors.read("derase_key", d.derase_key, T, Hv, K, kF32);
  if (c.along) tensors.read("dadd_along", d.dadd_along, T, Hv, K, kF32);
  if (c.decay != DecayOf::nothing) {
    tensors.read("dlog_decay", d.dlog_decay, T, Hv, c.decays(), kF32);
  }
  tensors.read("dinitial_state", static_cast<float*>(d.dinitial_state), Hv * K * V);
  return true;
}

struct DeltaStep {
  hfla::DType dtype;
  int64_t K, V, groups = 1;
  bool per_channel = false, erase = false, along = false;
};

inline bool run(const DeltaStep& c, Tensors& tensors, int64_t B) {
  const int64_t Hv = 2, H = Hv / c.groups, K = c.K, V = c.V;
  hfla::DeltaRuleStep p{};
  p.B = B, p.Hq = p.Hkv = Hv, p.K = K, p.V = V, p.dtype = c.dtype;
  p.scale = 0.5, p.normalize_qk = p.delta = true;
  p.q_group = p.k_group = c.groups;
  p.q = tensors.random(1, H, K, c.dtype);
  p.k = tensors.random(1, H, K, c.dtype);
  p.v = tensors.random(1, Hv, V, c.dtype);
  if (!c.along) p.beta = random_beta(tensors, 1, Hv);
  if (c.erase) p.erase_key = tensors.random(1, Hv, K, hfla::DType::f32);
  if (c.along) p.add_along = tensors.random(1, Hv, K, hfla::DType::f32);
  p.decay_per_channel = c.per_channel;
  p.log_decay = random_decay(tensors, 1, Hv, c.per_channel ? K : 1);
  p.state = tensors.random_array(Hv * K * V);
  p.slots.count = B, p.state_slot = Hv * K * V;
  p.y = tensors.tensor(1, Hv, V, c.dtype);
  if (delta_kernels(c.dtype).step(p, nullptr) != 0) return false;
  tensors.read("y", p.y, 1, Hv, V, c.dtype);
  tensors.read("state", static_cast<float*>(p.state), Hv * K * V);
  return true;
}

inline void add_delta_rule(std::vector<Case>& cases, hfla::DType dtype) {
  const auto add = [&](const char* name, bool small, const DeltaRule& c) {
    cases.push_back(make_case(name, c, c.B));
    cases.back().small = small;
  };
  constexpr int64_t kFew = 1, kMany = 1000;  // multiprocessors
  add("delta rule", true, {dtype, kMany, 70, 16, 16});
  add("delta rule, many columns", false, {dtype, kFew, 70, 16, 32});
  DeltaRule c{dtype, kMany, 37, 13, 35, 2, 2, 2, DecayOf::channel};
  add("delta rule per channel, odd sizes", true, c);
  DeltaRule erasing = c;
  erasing.erase = true;
  add("delta rule with an erase key, odd sizes", true, erasing);
  erasing.along = true, erasing.groups = 1;
  add("delta rule along another direction, odd sizes", true, erasing);
  DeltaRule wide{dtype, kMany, 40, 70, 8, 1, 1};
  wide.erase = wide.along = true;
  add("delta rule along another direction, many channels", false, wide);
  c.delta = false;
  add("general form, odd sizes", true, c);
  add("delta rule, more channels than a unit has", false, {dtype, kMany, 40, 136, 8, 1, 1});
  if (dtype != hfla::DType::bf16) return;
  // Kernels of their own; of forward's, with and without errors to keep; of backward's, with rows
  // of gradients that heads share and that they don't.
  for (const int64_t K : {64, 128}) {
    DeltaRule fixed{dtype, kMany, 150, K, kAll ? 112 : 48, 1, 1};
    fixed.mask = false;
    add("delta rule of a fixed size", K == 64, fixed);
    fixed.T = 70, fixed.V = 48, fixed.keep_errors = fixed.backward = false;
    add("delta rule of a fixed size, without errors", false, fixed);
  }
  DeltaRule shared{dtype, kMany, 20, 64, 16, 1, 2, 2};
  shared.mask = false;
  add("delta rule of a fixed size, shared heads", true, shared);
}

inline void add_delta_steps(std::vector<Case>& cases, hfla::DType dtype) {
  const auto add = [&](const char* name, const DeltaStep& c) {
    cases.push_back(make_case(name, c, 2));
    cases.back().small = true;
  };
  add("step of the delta rule", {dtype, 16, 16});
  add("step of the delta rule, odd sizes", {dtype, 7, 13, 2, true});
  add("step of the delta rule, wide", {dtype, 136, 260});
  add("step of the delta rule with an erase key", {dtype, 7, 13, 2, true, true});
  add("step of the delta rule along another direction", {dtype, 7, 13, 1, true, true, true});
}

}  // namespace checked
