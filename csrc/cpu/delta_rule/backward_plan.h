// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// How backward's work is divided, and the memory it takes: of a task in proportion to a state, a
// segment and, where w or sums over heads can't be in the results themselves, to a sequence; of the
// whole call what its tasks have to tell each other.
#pragma once

#include "cpu/delta_rule/keys_sweep.h"
#include "cpu/delta_rule/shared_heads.h"
#include "cpu/delta_rule/values_sweep.h"
#include "cpu/sequences/blocks.h"

namespace hfla::HFLA_ISA {
namespace {

// The widest block of columns, in vectors.
template <class Acc>
constexpr int kSweepVectors = sizeof(Acc) == sizeof(double) ? 1 : 2;  // doubles: for comparisons

// Of sequences with decays: after how many segments the state is kept, and how many of these states
// make a stretch: so few that they stay in the second-level cache.
constexpr int64_t kAnchorSegments = 2, kStretchAnchors = 8;

// What is done where, apart from the division into tasks.
struct BackwardPlan : Plan {
  SharedHeads q, k;
  Decays decays;
  Asks asks;
  int64_t anchor, stretch;  // tokens
  bool wants_dbeta;
  bool keeps_w;  // w has memory of its own: dv is not of the accumulation dtype, or not w

  BackwardPlan(const DeltaRuleProblem& p, const DeltaRuleGradients& result, Decays its_decays,
               bool results_are_acc, const Plan& plan)
      : Plan(with_fitting_heads(plan, p)),
        q(share_heads(*this, p.q, result.dq, p.q_group, results_are_acc)),
        k(share_heads(*this, p.k, result.dk, p.k_group, results_are_acc)),
        decays(its_decays),
        asks(asks_of(p)),
        anchor(kAnchorSegments * segment.tokens),
        stretch(has_decays() ? kStretchAnchors * anchor : max(1, longest)),
        wants_dbeta(result.dbeta.data),
        keeps_w(!results_are_acc || adds_along()) {}

  // Of two numbers, the heads of a task and those that share one of q or k, one divides the other.
  static Plan with_fitting_heads(Plan plan, const DeltaRuleGroups& groups) {
    const auto fits = [&](int64_t group) {
      return group % plan.heads == 0 || plan.heads % group == 0;
    };
    while (!fits(groups.q_group) || !fits(groups.k_group)) plan.heads /= 2;
    return plan;
  }

  bool adds_along() const { return asks == Asks::and_adds_along; }
  bool has_decays() const { return decays != Decays::none; }
  // Whether a task has all columns.
  bool has_all_columns() const { return parts == 1; }
  // Whether a task alone adds to its heads of q or k, and to all their columns.
  bool finishes(const SharedHeads& shared) const {
    return has_all_columns() && shared.place != SumPlace::call;
  }
  // The distance from one partial sum to the next in memory of the whole call.
  int64_t between_partials(const SharedHeads& shared) const {
    return sequences.B * sequences.T * shared.count * sequences.K;
  }
};

template <class Acc>
struct BackwardScratch {
  int64_t k_stride, v_stride, state_size;
  Weights<Acc> weights;
  ValueWeights<Acc> value_weights;
  Acc *dy, *errors, *w, *v;       // (rows, v_stride); v: also dv
  KeyRows<Acc> keys;              // (rows, k_stride)
  Acc *beta, *decay, *factors;    // (rows,)
  Acc* dbeta;                     // (rows, lanes), for the sums
  Acc* state;                     // (heads, state_size), of sweeps 1 and 2
  Acc* gradient;                  // (heads, state_size), of sweep 3
  Acc* anchors;                   // (heads, kStretchAnchors, state_size), states of sweep 2
  double* suffix;                 // (heads, k_stride), of the decay's gradient
  Acc *kept_w, *sums_q, *sums_k;  // (heads, longest, columns), where a task keeps them

  BackwardScratch(Carver& carver, const BackwardPlan& plan)
      : k_stride(row_stride<Acc>(plan.sequences.K)),
        v_stride(row_stride<Acc>(plan.sequences.V)),
        state_size(max(plan.sequences.K * v_stride, plan.sequences.V * k_stride)),
        weights(carver, plan, plan.decays, plan.asks),
        value_weights(carver, plan.sequences.V, plan.segment, plan.adds_along()) {
    const int64_t rows = plan.segment.rows, K = plan.sequences.K, V = plan.sequences.V;
    dy = carver.take<Acc>(rows * v_stride);
    errors = carver.take<Acc>(rows * v_stride);
    w = carver.take<Acc>(rows * v_stride);
    const bool along = plan.adds_along(), erases = along || plan.asks == Asks::erase_key;
    v = carver.take<Acc>(along ? rows * v_stride : 0);
    keys.stride = k_stride;
    keys.q = carver.take<Acc>(rows * k_stride);
    keys.k = carver.take<Acc>(rows * k_stride);
    keys.decay = carver.take<Acc>(plan.decays == Decays::per_channel ? rows * k_stride : 0);
    keys.erase_key = carver.take<Acc>(erases ? rows * k_stride : 0);
    keys.add_along = carver.take<Acc>(along ? rows * k_stride : 0);
    keys.dadd_along = carver.take<Acc>(along ? rows * k_stride : 0);
    keys.dq = carver.take<Acc>(rows * k_stride);
    keys.dk = carver.take<Acc>(rows * k_stride);
    beta = carver.take<Acc>(rows);
    decay = carver.take<Acc>(rows);
    factors = carver.take<Acc>(rows);
    dbeta = carver.take<Acc>(rows * kLanes<Acc>);
    state = carver.take<Acc>(plan.heads * state_size);
    gradient = carver.take<Acc>(plan.heads * state_size);
    anchors = carver.take<Acc>(plan.has_decays() ? plan.heads * kStretchAnchors * state_size : 0);
    suffix = carver.take<double>(plan.heads * k_stride);
    const int64_t tokens = plan.heads * plan.longest;
    kept_w = carver.take<Acc>(plan.keeps_w && plan.has_all_columns() ? tokens * V : 0);
    sums_q = carver.take<Acc>(plan.q.place == SumPlace::task ? tokens * K : 0);
    sums_k = carver.take<Acc>(plan.k.place == SumPlace::task ? tokens * K : 0);
  }
};

// A number for every token and head, in a term per part of the columns.
struct PartialNumbers {
  double* data;  // (parts, Hv, B T)
  int64_t heads, tokens;

  PartialNumbers(Carver& carver, const Plan& plan, bool wanted)
      : heads(plan.sequences.Hkv), tokens(plan.sequences.B * plan.sequences.T) {
    data = carver.take<double>(wanted ? plan.parts * heads * tokens : 0);
  }
  double& at(int64_t part, const Segment& segment, int64_t i) const {
    return data[(part * heads + segment.head) * tokens + segment.batch * segment.sequences.T +
                segment.time(i)];
  }
  double total(int64_t parts, const Segment& segment, int64_t i) const {
    double sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += at(part, segment, i);
    return sum;
  }
};

// Memory of the whole call.
template <class Acc>
struct BackwardShared {
  PartialNumbers dbeta, dlog_decay;
  Acc* gradients;        // (B, T / stretch, Hv, K, V) of the states after stretches but the last
  Acc* w;                // (B, T, Hv, V)
  Acc *sums_q, *sums_k;  // (partials, B, T, their heads, K)

  BackwardShared(Carver& carver, const BackwardPlan& plan)
      : dbeta(carver, plan, plan.wants_dbeta),
        dlog_decay(carver, plan, plan.decays == Decays::per_head) {
    const Sequences& p = plan.sequences;
    const int64_t stretches = plan.has_decays() ? p.B * (p.T / plan.stretch) : 0;
    gradients = carver.take<Acc>(stretches * p.Hkv * p.K * p.V);
    w = carver.take<Acc>(plan.keeps_w && !plan.has_all_columns() ? p.B * p.T * p.Hkv * p.V : 0);
    sums_q = take_sums(carver, plan, plan.q);
    sums_k = take_sums(carver, plan, plan.k);
  }

 private:
  static Acc* take_sums(Carver& carver, const BackwardPlan& plan, const SharedHeads& shared) {
    const bool here = shared.place == SumPlace::call;
    return carver.take<Acc>(here ? shared.partials * plan.between_partials(shared) : 0);
  }
};

}  // namespace
}  // namespace hfla::HFLA_ISA
