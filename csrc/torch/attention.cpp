// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The ops of kernels/attention.h, and what joins one with sums over other tokens.

#include "kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "torch/devices.h"
#include "torch/ops.h"
#include "torch/sequences.h"

namespace hfla {
namespace {

// (B, H, T, D) as (B, T, H, D).
View heads_first(const Tensor& tensor) {
  const int64_t* stride = tensor.strides();
  return {input_data(tensor), stride[0], stride[2], stride[1], stride[3]};
}

// Of queries that see all of k and v.
AttentionProblem make_problem(const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
  AttentionProblem p{};
  p.scale = scale;
  p.dtype = dtype_of("q", q);
  check(q.dim() == 4, "q must have 4 dimensions (B, Hq, R, K), got ", shape_of(q));
  check(v.dim() == 4, "v must have 4 dimensions (B, Hkv, S, V), got ", shape_of(v));
  p.B = q.size(0), p.Hq = q.size(1), p.R = q.size(2), p.K = q.size(3);
  p.Hkv = v.size(1), p.S = v.size(2), p.V = v.size(3);
  check(p.Hkv > 0 && p.Hq % p.Hkv == 0, "v must have a number of heads that divides q's, ", p.Hq,
        ", got ", p.Hkv);
  const Device device = q.device();
  check_tensor("k", k, device, q.dtype(), {p.B, p.Hkv, p.S, p.K});
  check_tensor("v", v, device, q.dtype(), {p.B, p.Hkv, p.S, p.V});
  check(p.K <= 1 || k.strides()[3] == 1, "k must have its last dimension contiguous");
  check(p.V <= 1 || v.strides()[3] == 1, "v must have its last dimension contiguous");
  p.q = heads_first(q), p.k = heads_first(k), p.v = heads_first(v);
  return p;
}

Tensor run(AttentionProblem& p, const Tensor& q) {
  Tensor y = Tensor::empty(q.dtype(), {p.B, p.R, p.Hq, p.V}, q.device());
  p.y = y.mutable_data();
  check_status(cpu(p.dtype).attention(p, torch_threads()));
  return y;
}

void attention(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const Tensor mask = arguments.optional_tensor();
  AttentionProblem p = make_problem(q, k, v, arguments.number());
  if (mask) {
    const bool is_bool = mask.dtype() == aoti_torch_dtype_bool();
    check(mask.dim() == 4, "mask must have 4 dimensions (B, Hq, R, S), got ", shape_of(mask));
    check_tensor("mask", mask, q.device(), is_bool ? mask.dtype() : q.dtype(),
                 {p.B, p.Hq, p.R, p.S});
    p.mask_type = is_bool ? MaskType::kept : MaskType::added;
    p.mask = heads_first(mask);
  }
  Tensor y = run(p, q);
  give_back(stack, y);
}

// Writes x (B, H, 1, D) behind `used` tokens of (B, H, tokens, D).
void write_behind(const char* name, const Tensor& x, Tensor& tokens, int64_t used) {
  const int64_t B = tokens.size(0), H = tokens.size(1), D = tokens.size(3);
  check_tensor(name, x, tokens.device(), tokens.dtype(), {B, H, 1, D});
  check(D <= 1 || x.strides()[3] == 1, name, " must have its last dimension contiguous");
  const int64_t bytes = aoti_torch_dtype_element_size(x.dtype());
  const int64_t *from = x.strides(), *to = tokens.strides();
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      std::memcpy(static_cast<char*>(tokens.mutable_data()) +
                      (b * to[0] + h * to[1] + used * to[2]) * bytes,
                  static_cast<const char*>(x.data()) + (b * from[0] + h * from[1]) * bytes,
                  static_cast<size_t>(D * bytes));
    }
  }
}

void attention_step(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  Tensor keys = arguments.tensor(), values = arguments.tensor(), used = arguments.tensor();
  AttentionProblem p = make_problem(q, keys, values, arguments.number());
  check(p.R == 1, "q must have one token, got ", p.R);
  check_contiguous_tensor("used", used, q.device(), aoti_torch_dtype_int64(), {1});
  auto* const tokens = static_cast<int64_t*>(used.mutable_data());
  check(*tokens >= 0 && *tokens < p.S, "used must have a number from 0 to ", p.S - 1, ", got ",
        *tokens);
  write_behind("k", k, keys, *tokens);
  write_behind("v", v, values, *tokens);
  p.S = ++*tokens;
  Tensor y = run(p, q);
  give_back(stack, y);
}

// ---- a window ----

// What a row of window_count says: how many tokens were read, `most` for more, and which one of the
// window is the oldest, times most + 1. A sum's dtype holds such numbers as they are.
template <class Acc>
std::vector<WindowRow> read_rows(const WindowProblem& p, Tensor& count, int64_t count_slot,
                                 const int32_t* state_indices, const bool* key_mask) {
  auto* const counts = static_cast<Acc*>(count.mutable_data());
  const int64_t most = p.window + p.num_sinks, limit = p.window * (most + 1);
  check(limit <= (sizeof(Acc) == 4 ? int64_t{1} << 24 : int64_t{1} << 53),
        "window must have fewer tokens, got ", p.window);
  std::vector<WindowRow> rows(static_cast<size_t>(p.B));
  for (int64_t b = 0; b < p.B; ++b) {
    const int64_t slot = key_mask && !key_mask[b] ? -1 : state_indices ? state_indices[b] : b;
    rows[b] = {slot, 0, 0};
    if (slot < 0) continue;
    const Acc number = counts[slot * count_slot];
    check(number >= 0 && number < limit, "window_count must have numbers from 0 to ", limit - 1,
          ", got ", number);
    rows[b].oldest = static_cast<int64_t>(number) / (most + 1);
    rows[b].count = static_cast<int64_t>(number) % (most + 1);
  }
  for (const WindowRow& row : rows) {  // all are right: now they may change
    if (row.slot < 0) continue;
    counts[row.slot * count_slot] =
        static_cast<Acc>((row.oldest + 1) % p.window * (most + 1) + std::min(row.count + 1, most));
  }
  return rows;
}

template <class Acc>
void run_window_step(WindowProblem& p, Tensor& count, int64_t count_slot,
                     const int32_t* state_indices, const bool* key_mask) {
  const std::vector<WindowRow> rows = read_rows<Acc>(p, count, count_slot, state_indices, key_mask);
  std::vector<Acc> total(static_cast<size_t>(p.B * p.Hq));
  p.rows = rows.data();
  p.total = total.data();
  check_status(cpu(p.dtype).window_step(p, torch_threads()));
  for (int64_t b = 0; b < p.B; ++b) {
    Acc* const log_size = static_cast<Acc*>(p.out) + b * out_size(p) + p.Hq * p.V;
    for (int64_t h = 0; h < p.Hq; ++h) log_size[h] += std::log(total[b * p.Hq + h]);
  }
}

void window_step(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor(), kvf = arguments.tensor();
  Tensor window = arguments.tensor(), sinks = arguments.optional_tensor();
  Tensor count = arguments.tensor();
  const Tensor key_mask = arguments.optional_tensor();
  const Tensor state_indices = arguments.optional_tensor();
  WindowProblem p{};
  p.V = arguments.integer();
  p.dtype = dtype_of("q", q);
  check(q.dim() == 4 && q.size(1) == 1, "q must have shape (B, 1, Hq, K), got ", shape_of(q));
  check(window.dim() == 4, "window must have 4 dimensions (slots, W, Hkv, K + V + F), got ",
        shape_of(window));
  p.B = q.size(0), p.Hq = q.size(2), p.K = q.size(3);
  p.window = window.size(1), p.Hkv = window.size(2), p.F = window.size(3) - p.K - p.V;
  check(p.window > 0, "window must have a token, got ", shape_of(window));
  check(p.Hkv > 0 && p.Hq % p.Hkv == 0, "window must have a number of heads that divides q's, ",
        p.Hq, ", got ", p.Hkv);
  check(p.V >= 0 && p.F >= 0, "value_dim must be from 0 to ", window.size(3) - p.K,
        ", the features of window that are not of keys, got ", p.V);
  const Device device = q.device();
  const int64_t features = window.size(3), slots = num_slots(window, state_indices, p.B);
  const int32_t acc = accumulation_dtype(p.dtype);
  check_tensor("kvf", kvf, device, q.dtype(), {p.B, 1, p.Hkv, features});
  check(features <= 1 || kvf.strides()[3] == 1, "kvf must have its last dimension contiguous");
  p.tokens_slot =
      check_slots("window", window, device, q.dtype(), {slots, p.window, p.Hkv, features});
  if (sinks) {
    p.num_sinks = sinks.dim() == 4 ? sinks.size(1) : 0;
    p.sinks_slot =
        check_slots("sinks", sinks, device, q.dtype(), {slots, p.num_sinks, p.Hkv, p.K + p.V});
    p.sinks = sinks.mutable_data();
  }
  const int64_t count_slot = check_slots("window_count", count, device, acc, {slots, 1});
  const bool* const is_real = check_mask("key_mask", key_mask, device, {p.B, 1});
  const Slots of_rows = check_state_indices(state_indices, device, p.B, slots);
  Tensor out = Tensor::empty(acc, {p.B, 1, out_size(p)}, device);
  p.scale = 1 / std::sqrt(static_cast<double>(p.K));
  p.q = input(q), p.kvf = input(kvf);
  p.tokens = window.mutable_data();
  p.out = out.mutable_data();
  const auto run = p.dtype == DType::f64 ? run_window_step<double> : run_window_step<float>;
  run(p, count, count_slot, of_rows.state_indices, is_real);
  give_back(stack, out);
}

// Attention y to some tokens, whose denominators' logarithms are given, and to others, of which
// there are weighted sums, the denominator last, whose weights have factors of their own.
template <class Acc>
void join_sums(const View& y, const View& log_size, const View& sums, const Acc* log_factor,
               Acc least, int64_t B, int64_t T, int64_t H, int64_t V, Acc* out) {
  const auto at = [](const View& x, int64_t b, int64_t t, int64_t h) {
    return static_cast<const Acc*>(x.data) + b * x.batch + t * x.time + h * x.head;
  };
  for (int64_t i = 0; i < B * T * H; ++i, out += V) {
    const int64_t b = i / (T * H), t = i / H % T, h = i % H;
    const Acc *const recent = at(y, b, t, h), *const older = at(sums, b, t, h);
    const Acc sum = older[V * sums.dim], den = sum > least ? sum : 1;
    // of no tokens, the logarithm is -infinity
    const Acc gap = sum > least ? *at(log_size, b, t, h) - std::log(den) - log_factor[h]
                                : std::numeric_limits<Acc>::infinity();
    const Acc of_recent = 1 / (1 + std::exp(-gap)), of_older = 1 / (1 + std::exp(gap)) / den;
    for (int64_t c = 0; c < V; ++c) {
      out[c] = recent[c * y.dim] * of_recent + older[c * sums.dim] * of_older;
    }
  }
}

void join_with_sums(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor y = arguments.tensor(), log_size = arguments.tensor(), sums = arguments.tensor();
  const Tensor log_factor = arguments.tensor();
  const double least = arguments.number();
  const DType dtype = dtype_of("y", y);
  check(dtype == DType::f32 || dtype == DType::f64, "y must be float32 or float64, got ",
        PrintedDType{y.dtype()});
  check(y.dim() == 4, "y must have 4 dimensions (B, T, H, V), got ", shape_of(y));
  const int64_t B = y.size(0), T = y.size(1), H = y.size(2), V = y.size(3);
  const Device device = y.device();
  check_tensor("log_size", log_size, device, y.dtype(), {B, T, H});
  check_tensor("sums", sums, device, y.dtype(), {B, T, H, V + 1});
  check_contiguous_tensor("log_factor", log_factor, device, y.dtype(), {H});
  Tensor out = Tensor::empty(y.dtype(), {B, T, H, V}, device);
  const auto run = [&](auto number) {
    using Acc = decltype(number);
    join_sums<Acc>(input(y), input(log_size), input(sums),
                   static_cast<const Acc*>(log_factor.data()), static_cast<Acc>(least), B, T, H, V,
                   static_cast<Acc*>(out.mutable_data()));
  };
  dtype == DType::f64 ? run(double()) : run(float());
  give_back(stack, out);
}

constexpr char kAttention[] = "attention", kStep[] = "attention_step_";
constexpr char kWindowStep[] = "window_step_", kJoin[] = "join_with_sums";

constexpr Op kOps[] = {
    op<attention, kAttention>(
        "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor y", false),
    op<attention_step, kStep>(
        "attention_step_(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, "
        "Tensor(c!) used, float scale) -> Tensor y",
        false),
    op<window_step, kWindowStep>(
        "window_step_(Tensor q, Tensor kvf, Tensor(a!) window, Tensor(b!)? sinks, "
        "Tensor(c!) window_count, Tensor? key_mask, Tensor? state_indices, int value_dim) -> "
        "Tensor out",
        false),
    op<join_with_sums, kJoin>(
        "join_with_sums(Tensor y, Tensor log_size, Tensor sums, Tensor log_factor, float least) "
        "-> Tensor",
        false),
};

}  // namespace

const Ops attention_ops = ops_of(kOps);

}  // namespace hfla
