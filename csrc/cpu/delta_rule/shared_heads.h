// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Gradients of q and of k, which heads of the state share: their sums over these heads, and from
// there through the norm and to the tensors' dtype.
//
// A task goes through some heads of the state and adds up what they give. If no other task adds to
// the same head of q or k, then that is its gradient; else it is one of several partial sums. Sums
// are in the accumulation dtype, in the results themselves where that is theirs.
#pragma once

#include "cpu/delta_rule/weights.h"

namespace hfla::HFLA_ISA {
namespace {

// Where sums of dq or dk are kept.
enum class SumPlace {
  result,  // in the tensor of results
  task,    // in a task's memory, which finishes them
  call,    // in memory of the whole call, for partial sums
};

// One of q and k.
struct SharedHeads {
  View input, result;
  int64_t count;     // of heads
  int64_t group;     // heads of the state that share one
  int64_t partials;  // sums of each head
  SumPlace place;

  // The shared head of a head of the state, and which of its partial sums a task of so many heads
  // of the state adds to.
  int64_t of(int64_t head) const { return head / group; }
  int64_t partial_of(int64_t head, int64_t heads_of_task) const {
    return partials > 1 ? head % group / heads_of_task : 0;
  }
  // Whether a task of so many heads adds to its sums for the first time.
  bool is_first(int64_t head, int64_t heads_of_task) const {
    return head % min(group, heads_of_task) == 0;
  }
};

HFLA_INLINE SharedHeads share_heads(const Plan& plan, const View& input, const View& result,
                                    int64_t group, bool results_are_acc) {
  const int64_t partials = max(1, group / plan.heads);
  const SumPlace place = partials > 1      ? SumPlace::call
                         : results_are_acc ? SumPlace::result
                         : plan.parts == 1 ? SumPlace::task
                                           : SumPlace::call;
  return {input, result, plan.sequences.Hkv / group, group, partials, place};
}

// A (tokens, heads, columns) array in memory, as a tensor.
HFLA_INLINE View view_of(void* data, int64_t T, int64_t heads, int64_t columns) {
  return {data, T * heads * columns, heads * columns, columns, 1};
}

// to = factor from, or to += factor from.
template <class Acc>
void add_rows(const Segment& segment, const TensorRows& to, bool first, Acc factor,
              RowArray<const Acc> from) {
  unstage_rows<Acc>(segment, to, [&](int64_t row, int64_t, int64_t, Acc* out) {
    for_each_vector<Acc>(to.begin, to.end, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      Vec<Acc> x = factor * load(from.data + row * from.stride + c);
      if (!first) x += load_vector<Acc>(out, to.view.dim, c, count);
      store_vector<Acc>(out, to.view.dim, c, count, x);
    });
  });
}

// Adds up the partial sums of a shared head, which are `distance` apart, into rows.
template <class Acc>
void total_rows(const Segment& segment, const TensorRows& sums, int64_t partials, int64_t distance,
                RowArray<Acc> to) {
  for_each_row<const Acc>(
      segment, sums.view, sums.per,
      [&](int64_t row, int64_t, int64_t, const Acc* from) {
        for_each_vector<Acc>(
            sums.begin, sums.end, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
              Vec<Acc> total{};
              for (int64_t i = 0; i < partials; ++i) {
                total += load_vector<Acc>(from + i * distance, sums.view.dim, c, count);
              }
              store(to.data + row * to.stride + c, total);
            });
      },
      [&](int64_t row) { zero_row(to.data + row * to.stride, sums.begin, sums.end); });
}

// With x̂ = factor x, where the factor is the inverse norm: dx = factor (dx̂ - x̂ ⟨x̂, dx̂⟩), in place.
template <class Acc>
void differentiate_norm(RowArray<const Acc> x, const Acc* factors, int64_t count, int64_t columns,
                        RowArray<Acc> gradient) {
  for (int64_t row = 0; row < count; ++row) {
    const Acc* const from = x.data + row * x.stride;
    Acc* const to = gradient.data + row * gradient.stride;
    Vec<Acc> dot{};
    const auto normed = [&](int64_t c) HFLA_INLINE_LAMBDA { return factors[row] * load(from + c); };
    for (int64_t c = 0; c < columns; c += kLanes<Acc>) dot += normed(c) * load(to + c);
    const Acc along = sum<Acc>(dot);
    for (int64_t c = 0; c < columns; c += kLanes<Acc>) {
      store(to + c, factors[row] * (load(to + c) - along * normed(c)));
    }
  }
}

}  // namespace
}  // namespace hfla::HFLA_ISA
