// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Backward: three sweeps, each of which keeps one state; no state of forward is stored, recomputed
// or inverted. From forward come e_t.
//
// 1. From the last token to the first, over the gradient of the state: w_t = β_t du_t, which is the
//    gradient of v_t, and the gradient of β_t (values_sweep.h).
// 2. From the first token to the last, over the state, transposed: dq_t and m_t (keys_sweep.h).
// 3. From the last to the first, over the gradient, transposed: p_t, and with it dk_t = p_t - m_t.
//
// The log decay's gradient needs no sweep. With q scaled, and per channel, or summed over channels,
//
//     dg_t = dg_{t+1} + q_t ∘ dq_t - k_t ∘ (p_t + m_t),    dg_{T+1} = Σ_columns S_T ∘ dS_T,
//
// summed in double because much of it cancels. Where e^{g_t} is 0 so is dg_t, exactly; where it is
// less than what the terms are rounded by, so is dg_t, which counts as 0. From there the sum starts
// afresh, without what was rounded before. So it does at anchors, after every few segments, where
// it is Σ_columns S ∘ R: else what the terms are rounded by would add up. With an erase key p, p ∘
// m is in the place of k ∘ m; where it asks before the decay, and adds along b, p ∘ m is no part of
// dg_t, but what the sum loses behind it, and b ∘ db is a term as k ∘ dk is. To have both states
// there, sweeps 2 and 3 take turns where there are decays: one stretch of tokens forwards, while S
// is kept at its anchors, and the same one backwards. Sweep 1 leaves the R that sweep 3 begins
// with.
//
// Sweep 1 goes by columns of values, which are independent, and sweeps 2 and 3 by columns of keys;
// they need all values of w_t. A task is a sequence, some heads and a part of the columns. If a
// task has all columns it does the three sweeps one after the other.
//
// B batch, T time, Hv heads of the state, K key dim, V value dim.

#include "cpu/delta_rule/backward_plan.h"
#include "cpu/delta_rule/kernels.h"
#include "cpu/delta_rule/values_sweep.h"
#include "cpu/sequences/blocks.h"

namespace hfla::HFLA_ISA {
namespace {

// What terms of order 1 are rounded by.
template <class Acc>
constexpr double kRounding = sizeof(Acc) == sizeof(float) ? 0x1p-24 : 0x1p-53;

template <class Acc>
class Backward {
  using Scratch = BackwardScratch<Acc>;
  using Shared = BackwardShared<Acc>;

 public:
  Backward(const DeltaRuleProblem& p, const DeltaRuleUpstream& input,
           const DeltaRuleGradients& result, const Threads& threads)
      : p_(p),
        input_(input),
        result_(result),
        threads_(for_decays(threads, p.log_decay.data)),
        decays_(decays_of(p.log_decay, p.decay_per_channel)),
        key_vectors_(ceil_div(p.K, kLanes<Acc>)),
        value_vectors_(ceil_div(p.V, kLanes<Acc>)),
        plan_(p, result, decays_, is_acc(p.dtype),
              make_plan(p, threads, min(key_vectors_, value_vectors_), /*divides_time=*/false)) {}

  Status run() {
    Carver measured(nullptr);
    Shared(measured, plan_);
    const Buffer buffer(measured.used());
    Workers<Scratch, BackwardPlan> workers(threads_, plan_);
    if (!buffer.data() || workers.out_of_memory()) return Status::out_of_memory;
    Carver carver(buffer.data());
    const Shared shared(carver, plan_);

    workers.run(plan_.num_tasks(), [&](Scratch& s, int64_t i) {
      const Task task = at(i, s, shared);
      differentiate_values(task);
      if (!plan_.has_all_columns()) return;
      differentiate_keys(task);
      for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
        finish_numbers(shared, task.piece, head);
      }
      if (plan_.finishes(plan_.q)) finish_heads(task, plan_.q);
      if (plan_.finishes(plan_.k)) finish_heads(task, plan_.k);
    });
    if (!plan_.has_all_columns()) {
      workers.run(plan_.num_tasks(),
                  [&](Scratch& s, int64_t i) { differentiate_keys(at(i, s, shared)); });
      workers.run(p_.num_sequences * p_.Hkv, [&](Scratch&, int64_t i) {
        finish_numbers(shared, whole_sequence(p_, i / p_.Hkv), i % p_.Hkv);
      });
    }
    const int64_t segments = ceil_div(p_.T, plan_.segment.tokens);
    workers.run(p_.B * segments, [&](Scratch& s, int64_t i) {
      const int64_t batch = i / segments, index = i % segments;
      if (!plan_.finishes(plan_.q)) finish_tokens(s, shared, batch, index, plan_.q);
      if (!plan_.finishes(plan_.k)) finish_tokens(s, shared, batch, index, plan_.k);
    });
    return Status::ok;
  }

 private:
  // A sequence, some heads and a part of the columns; and the memory for it.
  struct Task {
    Scratch& s;
    const Shared& shared;
    Piece piece;
    int64_t part;
    Heads heads;
    Columns keys, values;
  };

  Task at(int64_t i, Scratch& s, const Shared& shared) const {
    const Plan::Task task = plan_.task(i);
    return {s,
            shared,
            plan_.piece(task.piece),
            task.part,
            task.heads,
            plan_.part(task.part, key_vectors_),
            plan_.part(task.part, value_vectors_)};
  }

  bool is_per_channel() const { return decays_ == Decays::per_channel; }
  bool erases() const { return p_.erase_key.data; }

  // Calls body(segment) for all segments of a piece, of one head after the other. All of them go
  // forwards, but from the last to the first where the direction is backwards.
  template <class Body>
  void for_each_segment(const Piece& piece, Heads heads, Direction direction, Body body) const {
    const int64_t tokens = plan_.segment.tokens;
    const int64_t segments = ceil_div(piece.length(), tokens);
    for (int64_t i = 0; i < segments; ++i) {
      const int64_t index = direction == Direction::forwards ? i : segments - 1 - i;
      for (int64_t head = heads.begin; head < heads.end; ++head) {
        body(segment_at(p_, piece, head, false, index * tokens, tokens));
      }
    }
  }

  // ---- states ----

  Acc* state_of(const Task& task, int64_t head) const {
    return task.s.state + (head - task.heads.begin) * task.s.state_size;
  }
  Acc* gradient_of(const Task& task, int64_t head) const {
    return task.s.gradient + (head - task.heads.begin) * task.s.state_size;
  }
  // One head's state (K, V) in a tensor that may be absent.
  template <class Element, class Pointer>
  Element* in_tensor(Pointer states, const Piece& piece, int64_t head) const {
    const int64_t row = piece.sequence * p_.Hkv + head;
    return states ? static_cast<Element*>(states) + row * p_.K * p_.V : nullptr;
  }
  // A task's columns of values, or of keys where it is transposed.
  Blocks<Acc> by_key(const Task& task, int64_t head) const {
    return {state_of(task, head), p_.K, task.values, kSweepVectors<Acc>};
  }
  Blocks<Acc> by_value(const Task& task, Acc* state) const {
    return {state, p_.V, task.keys, kSweepVectors<Acc>};
  }
  void load_transposed(Blocks<Acc> state, const Acc* from) const {
    clear_state(state);
    import_state<Acc>(state, {from, 0, p_.V, p_.K, 1, p_.V});
  }
  // R of one head before a stretch, which is not its sequence's first: no two are in one place.
  Acc* gradient_before(const Shared& shared, int64_t batch, int64_t time, int64_t head) const {
    const int64_t stretches = p_.T / plan_.stretch;
    const int64_t row = batch * stretches + time / plan_.stretch - 1;
    return shared.gradients + (row * p_.Hkv + head) * p_.K * p_.V;
  }

  // ---- sweep 1 ----

  TensorRows all_values(const View& view) const { return {view, RowsPer::token, 0, p_.V}; }

  // Where w is kept, as a tensor (B, T, Hv, V).
  View kept_w(const Task& task) const {
    if (!plan_.keeps_w) return result_.dv;
    if (!plan_.has_all_columns()) return view_of(task.shared.w, p_.T, p_.Hkv, p_.V);
    return of_task(task.s.kept_w, task, task.heads.begin, p_.V);
  }
  // A task's array (heads, longest, columns) as a tensor, of which it is a part.
  View of_task(Acc* data, const Task& task, int64_t first_head, int64_t columns) const {
    const int64_t head_stride = plan_.longest * columns;
    return {data - first_head * head_stride - task.piece.begin * columns, 0, columns, head_stride,
            1};
  }

  // e of forward, or v without the delta rule.
  RowArray<const Acc> find_errors(const Scratch& s, const Segment& segment, int64_t begin,
                                  int64_t end) const {
    const RowArray<Acc> to{s.errors, s.v_stride};
    if (p_.delta) return find_rows<Acc>(segment, {input_.errors, RowsPer::token, begin, end}, to);
    return find_rows<Acc>(p_.dtype, segment, {p_.v, RowsPer::token, begin, end}, to);
  }

  void differentiate_values(const Task& task) const {
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      const Blocks<Acc> state = by_key(task, head);
      clear_state(state);
      import_state<Acc>(
          state, {in_tensor<const Acc>(input_.dstate, task.piece, head), 0, p_.K, p_.V, p_.V, 1});
    }
    for_each_segment(task.piece, task.heads, Direction::backwards, [&](const Segment& segment) {
      sweep_values_of(task, segment);
      const int64_t before = segment.first - task.piece.begin;
      if (before == 0 || before % plan_.stretch != 0) return;
      Acc* const to = gradient_before(task.shared, segment.batch, segment.first, segment.head);
      export_state<Acc>(by_key(task, segment.head), 1, {to, 0, p_.K, p_.V, p_.V, 1});
    });
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      export_state<Acc>(
          by_key(task, head), 1,
          {in_tensor<Acc>(result_.dinitial_state, task.piece, head), 0, p_.K, p_.V, p_.V, 1});
    }
  }

  void sweep_values_of(const Task& task, const Segment& segment) const {
    Scratch& s = task.s;
    const int64_t begin = task.values.begin * kLanes<Acc>;
    const int64_t end = min(task.values.end * kLanes<Acc>, p_.V);
    const View w_view = kept_w(task);
    const TensorRows w{w_view, RowsPer::token, begin, end};
    const bool w_in_place = in_place<Acc>(segment, w);
    const RowArray<Acc> w_rows =
        w_in_place ? rows_in_place<Acc>(segment, w) : RowArray<Acc>{s.w, s.v_stride};
    stage_weights(p_, decays_, segment, s.weights);
    __builtin_memset(s.dbeta, 0, sizeof(Acc) * plan_.segment.rows * kLanes<Acc>);
    const ValuesSweep<Acc> sweep{
        s.weights,
        blocks_of(segment),
        find_rows<Acc>(p_.dtype, segment, {input_.dy, RowsPer::token, begin, end},
                       {s.dy, s.v_stride}),
        find_errors(s, segment, begin, end),
        w_rows,
        {s.v, s.v_stride},
        plan_.wants_dbeta ? s.dbeta : nullptr};
    for_each_block<kSweepVectors<Acc>>(
        by_key(task, segment.head), [&](auto width, int64_t column, Acc* state) {
          with_rule(decays_, plan_.asks, [&](auto rule) {
            sweep_values<decltype(rule), decltype(width)::value>(sweep, column, state);
          });
        });
    if (!w_in_place) store_rows<Acc>(segment, w, w_rows);
    if (plan_.keeps_w) {
      const RowArray<Acc> dv = plan_.adds_along() ? RowArray<Acc>{s.v, s.v_stride} : w_rows;
      store_rows<Acc>(p_.dtype, segment, {result_.dv, RowsPer::token, begin, end}, dv);
    }
    for (int64_t i = 0; plan_.wants_dbeta && i < segment.count; ++i) {
      task.shared.dbeta.at(task.part, segment, i) =
          segment.masked(i) ? 0 : sum<Acc>(load(s.dbeta + i * kLanes<Acc>));
    }
  }

  // ---- sweeps 2 and 3 ----

  void differentiate_keys(const Task& task) const {
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      load_transposed(by_value(task, state_of(task, head)),
                      in_tensor<const Acc>(p_.initial_state, task.piece, head));
    }
    Piece stretch = task.piece;
    for (; stretch.begin < task.piece.end; stretch.begin = stretch.end) {
      stretch.end = min(stretch.begin + plan_.stretch, task.piece.end);
      differentiate_keys(task, stretch);
    }
  }

  void differentiate_keys(const Task& task, const Piece& stretch) const {
    for_each_segment(stretch, task.heads, Direction::forwards, [&](const Segment& segment) {
      const Blocks<Acc> state = by_value(task, state_of(task, segment.head));
      sweep_keys_of<Direction::forwards>(task, segment, state);
      if (ends_at_anchor(stretch, segment)) {
        __builtin_memcpy(anchor_of(task, stretch, segment), state.data,
                         sizeof(Acc) * size_of(state));
      }
    });
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      load_transposed(by_value(task, gradient_of(task, head)),
                      stretch.end == task.piece.end
                          ? in_tensor<const Acc>(input_.dstate, stretch, head)
                          : gradient_before(task.shared, stretch.batch, stretch.end, head));
    }
    for_each_segment(stretch, task.heads, Direction::backwards, [&](const Segment& segment) {
      const Blocks<Acc> gradient = by_value(task, gradient_of(task, segment.head));
      if (ends_at_anchor(stretch, segment)) {
        begin_suffix(task, segment.head, by_value(task, anchor_of(task, stretch, segment)),
                     gradient);
      }
      sweep_keys_of<Direction::backwards>(task, segment, gradient);
    });
  }

  // Whether the state after a segment is kept, and where.
  bool ends_at_anchor(const Piece& stretch, const Segment& segment) const {
    const int64_t end = segment.first + segment.count;
    return plan_.has_decays() && ((end - stretch.begin) % plan_.anchor == 0 || end == stretch.end);
  }
  Acc* anchor_of(const Task& task, const Piece& stretch, const Segment& segment) const {
    const int64_t head = segment.head - task.heads.begin;
    const int64_t index = (segment.first - stretch.begin) / plan_.anchor;
    return task.s.anchors + (head * kStretchAnchors + index) * task.s.state_size;
  }

  template <Direction direction>
  void sweep_keys_of(const Task& task, const Segment& segment,
                     Blocks<Acc> state_or_gradient) const {
    const int64_t blocks = ceil_div(segment.count, kBlockTokens);
    stage_value_weights(task, segment, blocks);
    stage_keys(task, segment, blocks * kBlockTokens);
    const KeysSweep<Acc> sweep{task.s.value_weights, blocks, task.s.keys};
    for_each_block<kSweepVectors<Acc>>(
        state_or_gradient, [&](auto width, int64_t column, Acc* state) {
          with_asks(plan_.asks, [&](auto rule) {
            with_flag(is_per_channel(), [&](auto per_channel) {
              sweep_keys<direction, decltype(rule), decltype(per_channel)::value,
                         decltype(width)::value>(sweep, column, state);
            });
          });
        });
    const Segment of_q = of_shared_head(segment, p_.q_group),
                  of_k = of_shared_head(segment, p_.k_group);
    const View q_view = sums(task, plan_.q), k_view = sums(task, plan_.k);
    const TensorRows dq = key_columns(task, q_view), dk = key_columns(task, k_view);
    const RowArray<const Acc> found_q{task.s.keys.dq, task.s.k_stride},
        found_k{task.s.keys.dk, task.s.k_stride};
    if constexpr (direction == Direction::forwards) {
      add_rows<Acc>(of_q, dq, plan_.q.is_first(segment.head, plan_.heads),
                    static_cast<Acc>(p_.scale), found_q);
      const bool first = plan_.k.is_first(segment.head, plan_.heads);
      if (erases()) {
        const Acc sign = plan_.adds_along() ? 1 : -1;
        add_rows<Acc>(segment, key_columns(task, result_.derase_key), true, sign, found_k);
      } else if (p_.delta) {
        add_rows<Acc>(of_k, dk, first, -1, found_k);
      }
      begin_decay_gradient(task, segment);
    } else {
      const bool first = plan_.asks != Asks::key && plan_.k.is_first(segment.head, plan_.heads);
      add_rows<Acc>(of_k, dk, first, 1, found_k);
      if (plan_.adds_along()) {
        const RowArray<const Acc> found{task.s.keys.dadd_along, task.s.k_stride};
        add_rows<Acc>(segment, key_columns(task, result_.dadd_along), true, 1, found);
      }
      end_decay_gradient(task, segment);
    }
  }

  void stage_value_weights(const Task& task, const Segment& segment, int64_t blocks) const {
    const View w_view = kept_w(task);
    stage_token_scalars<Acc>(segment, p_.beta, p_.beta.data ? 0 : 1, task.s.beta);
    if (decays_ == Decays::per_head) stage_decay<Acc>(segment, p_.log_decay, task.s.decay);
    ValueRows<Acc> rows{
        find_rows<Acc>(p_.dtype, segment, all_values(input_.dy), {task.s.dy, task.s.v_stride}),
        {},
        find_errors(task.s, segment, 0, p_.V),
        {},
        task.s.beta,
        decays_ == Decays::per_head ? task.s.decay : nullptr};
    if (plan_.adds_along()) {
      rows.values =
          find_rows<Acc>(p_.dtype, segment, all_values(p_.v), {task.s.v, task.s.v_stride});
    }
    if (p_.delta) rows.w = find_rows<Acc>(segment, all_values(w_view), {task.s.w, task.s.v_stride});
    for (int64_t b = 0; b < blocks; ++b) {
      with_asks(plan_.asks, [&](auto rule) {
        make_value_block<decltype(rule)>(task.s.value_weights, rows, b);
      });
    }
  }

  TensorRows key_columns(const Task& task, const View& view) const {
    return {view, RowsPer::token, task.keys.begin * kLanes<Acc>,
            min(task.keys.end * kLanes<Acc>, p_.K)};
  }

  // The task's columns of q, k and the decay.
  void stage_keys(const Task& task, const Segment& segment, int64_t rows) const {
    const auto stage = [&](const Segment& shared_segment, const View& view, Acc scale, Acc* to) {
      const RowArray<const Acc> from = find_rows<Acc>(
          p_.dtype, shared_segment, {view, RowsPer::token, 0, p_.K}, {to, task.s.k_stride});
      find_factors<Acc>(from, rows, p_.K, p_.normalize_qk, scale, task.s.factors);
      for_each_key(task, rows, [&](int64_t row, int64_t c) HFLA_INLINE_LAMBDA {
        store(to + row * task.s.k_stride + c,
              task.s.factors[row] * load(from.data + row * from.stride + c));
      });
    };
    stage(of_shared_head(segment, p_.q_group), p_.q, static_cast<Acc>(p_.scale), task.s.keys.q);
    stage(of_shared_head(segment, p_.k_group), p_.k, 1, task.s.keys.k);
    const auto stage_own = [&](const View& view, Acc* to, auto map) {
      const RowArray<const Acc> from =
          find_rows<Acc>(segment, key_columns(task, view), {to, task.s.k_stride});
      for_each_key(task, rows, [&](int64_t row, int64_t c) HFLA_INLINE_LAMBDA {
        store(to + row * task.s.k_stride + c, map(load(from.data + row * from.stride + c)));
      });
    };
    if (is_per_channel()) {
      stage_own(p_.log_decay, task.s.keys.decay, [](Vec<Acc> x) { return exp(x); });
    }
    if (erases()) {
      const Acc sign = plan_.adds_along() ? -1 : 1;
      stage_own(p_.erase_key, task.s.keys.erase_key, [&](Vec<Acc> x) { return sign * x; });
    }
    if (plan_.adds_along()) {
      stage_own(p_.add_along, task.s.keys.add_along, [](Vec<Acc> x) { return x; });
    }
  }

  // Calls body(row, column) for all vectors of staged rows in the task's columns of keys.
  template <class Body>
  HFLA_INLINE void for_each_key(const Task& task, int64_t rows, Body body) const {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t c = task.keys.begin; c < task.keys.end; ++c) body(row, c * kLanes<Acc>);
    }
  }

  // ---- sums over heads ----

  // Where a task adds up what the heads that share one of q or k give, as a tensor (B, T, H, K).
  View sums(const Task& task, const SharedHeads& of) const {
    const bool of_q = &of == &plan_.q;
    if (of.place == SumPlace::result) return of.result;
    if (of.place == SumPlace::task) {
      return of_task(of_q ? task.s.sums_q : task.s.sums_k, task, of.of(task.heads.begin), p_.K);
    }
    return partial_sums(task.shared, of, of.partial_of(task.heads.begin, plan_.heads));
  }

  View partial_sums(const Shared& shared, const SharedHeads& of, int64_t partial) const {
    Acc* const data = &of == &plan_.q ? shared.sums_q : shared.sums_k;
    return view_of(data + partial * plan_.between_partials(of), p_.T, of.count, p_.K);
  }

  // The heads of q or k of a task that alone adds to them.
  void finish_heads(const Task& task, const SharedHeads& of) const {
    const View view = sums(task, of);
    const Heads heads{of.of(task.heads.begin), of.of(task.heads.end - 1) + 1};
    for_each_segment(task.piece, heads, Direction::forwards,
                     [&](const Segment& segment) { finish_rows(task.s, segment, of, view); });
  }

  // A segment of a row of the batch, for all heads of q or k.
  void finish_tokens(Scratch& s, const Shared& shared, int64_t batch, int64_t index,
                     const SharedHeads& of) const {
    const Piece row{0, batch, 0, p_.T, true, true};
    const View view = of.place == SumPlace::result ? of.result : partial_sums(shared, of, 0);
    for (int64_t head = 0; head < of.count; ++head) {
      finish_rows(
          s, segment_at(p_, row, head, false, index * plan_.segment.tokens, plan_.segment.tokens),
          of, view);
    }
  }

  void finish_rows(Scratch& s, const Segment& segment, const SharedHeads& of,
                   const View& view) const {
    if (of.place == SumPlace::result && !p_.normalize_qk) return;
    const RowArray<Acc> gradient{s.keys.dq, s.k_stride};
    total_rows<Acc>(segment, {view, RowsPer::token, 0, p_.K}, of.partials,
                    plan_.between_partials(of), gradient);
    if (p_.normalize_qk) {
      const RowArray<const Acc> x = find_rows<Acc>(
          p_.dtype, segment, {of.input, RowsPer::token, 0, p_.K}, {s.keys.q, s.k_stride});
      find_factors<Acc>(x, segment.count, p_.K, true, 1, s.factors);
      differentiate_norm<Acc>(x, s.factors, segment.count, p_.K, gradient);
    }
    store_rows<Acc>(p_.dtype, segment, {of.result, RowsPer::token, 0, p_.K}, gradient);
  }

  // ---- β and decays ----

  // q_t ∘ dq_t - k_t ∘ m_t, or p_t ∘ m_t, which waits for the rest of it: per channel in the
  // result.
  void begin_decay_gradient(const Task& task, const Segment& segment) const {
    if (decays_ == Decays::none) return;
    with_flag(p_.delta && !plan_.adds_along(), [&](auto asks) {
      with_flag(is_per_channel(), [&](auto per_channel) {
        begin_decay_gradient<decltype(asks)::value, decltype(per_channel)::value>(task, segment);
      });
    });
  }
  template <bool asks, bool per_channel>
  void begin_decay_gradient(const Task& task, const Segment& segment) const {
    const KeyRows<Acc>& rows = task.s.keys;
    Acc* const asking = erases() ? rows.erase_key : rows.k;
    const TensorRows result = key_columns(task, result_.dlog_decay);
    for (int64_t i = 0; i < segment.count; ++i) {
      Vec<Acc> dot{};
      Acc* const to = row_at<Acc>(result, segment, i, 0);
      for (int64_t v = task.keys.begin; v < task.keys.end; ++v) {
        const int64_t c = v * kLanes<Acc>;
        Vec<Acc> term = load(rows.at(rows.q, i, c)) * load(rows.at(rows.dq, i, c));
        if (asks) term -= load(rows.at(asking, i, c)) * load(rows.at(rows.dk, i, c));
        if (segment.masked(i)) term = Vec<Acc>{};
        dot += term;
        if (per_channel) {
          store_vector<Acc>(to, result.view.dim, c, min(kLanes<Acc>, p_.K - c), term);
        }
      }
      if (!per_channel) task.shared.dlog_decay.at(task.part, segment, i) = sum<Acc>(dot);
    }
  }

  // The gradient of the decay so far: of every channel, or in the first place of the head.
  double* suffix_of(const Task& task, int64_t head) const {
    return task.s.suffix + (head - task.heads.begin) * task.s.k_stride;
  }

  // Between two tokens it is Σ_columns S ∘ R.
  void begin_suffix(const Task& task, int64_t head, Blocks<Acc> state, Blocks<Acc> gradient) const {
    double* const suffix = suffix_of(task, head);
    double sum_of_channels = 0;
    for_each_block<kSweepVectors<Acc>>(state, [&](auto width, int64_t column, Acc* block) {
      constexpr int vectors = decltype(width)::value;
      const Acc* of_gradient = gradient.data + (block - state.data);
      Vec<Acc> dots[vectors] = {};
      for (int64_t r = 0; r < p_.V; ++r) {
        HFLA_UNROLL
        for (int c = 0; c < vectors; ++c, block += kLanes<Acc>, of_gradient += kLanes<Acc>) {
          dots[c] += load(block) * load(of_gradient);
        }
      }
      for (int64_t i = 0; i < vectors * kLanes<Acc>; ++i) {
        suffix[column + i] = dots[i / kLanes<Acc>][i % kLanes<Acc>];
        sum_of_channels += suffix[column + i];
      }
    });
    if (!is_per_channel()) suffix[0] = sum_of_channels;
  }

  // The rest of it, -k_t ∘ p_t, and the sums over tokens.
  void end_decay_gradient(const Task& task, const Segment& segment) const {
    if (decays_ == Decays::none) return;
    const KeyRows<Acc>& rows = task.s.keys;
    double& suffix = *suffix_of(task, segment.head);
    for (int64_t i = segment.count - 1; i >= 0; --i) {
      if (segment.masked(i)) continue;
      if (is_per_channel()) {
        sum_decay_gradient(task, segment, i);
        continue;
      }
      Vec<Acc> dot{}, asked{};
      for (int64_t v = task.keys.begin; v < task.keys.end; ++v) {
        const int64_t c = v * kLanes<Acc>;
        dot += written(task, i, c);
        if (plan_.adds_along()) asked += erased(task, segment, i, c);
      }
      double& to = task.shared.dlog_decay.at(task.part, segment, i);
      suffix = task.s.decay[i] < kRounding<Acc> ? 0 : suffix + (to - sum<Acc>(dot));
      to = suffix;
      suffix += sum<Acc>(asked);
    }
  }

  // k_t ∘ p_t of a token and a vector of columns, and b_t ∘ db_t.
  Vec<Acc> written(const Task& task, int64_t i, int64_t column) const {
    const KeyRows<Acc>& rows = task.s.keys;
    const auto at = [&](Acc* of) { return load(rows.at(of, i, column)); };
    const Vec<Acc> k = at(rows.k) * at(rows.dk);
    return plan_.adds_along() ? k + at(rows.add_along) * at(rows.dadd_along) : k;
  }

  // -p_t ∘ m_t of a token and a vector of columns, with b.
  Vec<Acc> erased(const Task& task, const Segment& segment, int64_t i, int64_t column) const {
    const TensorRows result = key_columns(task, result_.derase_key);
    const Acc* const from = row_at<const Acc>(result, segment, i, 0);
    const int64_t count = min(kLanes<Acc>, p_.K - column);
    return -load(task.s.keys.at(task.s.keys.erase_key, i, column)) *
           load_vector<Acc>(from, result.view.dim, column, count);
  }

  void sum_decay_gradient(const Task& task, const Segment& segment, int64_t i) const {
    const KeyRows<Acc>& rows = task.s.keys;
    const TensorRows result = key_columns(task, result_.dlog_decay);
    Acc* const to = row_at<Acc>(result, segment, i, 0);
    for_each_vector<Acc>(
        result.begin, result.end, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
          const Vec<Acc> term =
              load_vector<Acc>(to, result.view.dim, c, count) - written(task, i, c);
          const Acc* const decay = rows.at(rows.decay, i, c);
          double* const sums = suffix_of(task, segment.head) + c;
          Acc lanes[kLanes<Acc>], asked[kLanes<Acc>];
          store(lanes, term);
          store(asked, plan_.adds_along() ? erased(task, segment, i, c) : Vec<Acc>{});
          for (int64_t lane = 0; lane < kLanes<Acc>; ++lane) {
            sums[lane] = decay[lane] < kRounding<Acc> ? 0 : sums[lane] + lanes[lane];
            lanes[lane] = static_cast<Acc>(sums[lane]);
            sums[lane] += asked[lane];
          }
          store_vector<Acc>(to, result.view.dim, c, count, load(lanes));
        });
  }

  // dβ, and dg of a decay per head, from those of the parts of the columns.
  void finish_numbers(const Shared& shared, const Piece& piece, int64_t head) const {
    const Segment segment = segment_at(p_, piece, head, false, 0, piece.length());
    const auto finish = [&](const View& result, const PartialNumbers& numbers) {
      for (int64_t i = 0; i < segment.count; ++i) {
        *row_at<Acc>(result, RowsPer::token, segment, i, 0) =
            static_cast<Acc>(numbers.total(plan_.parts, segment, i));
      }
    };
    if (plan_.wants_dbeta) finish(result_.dbeta, shared.dbeta);
    if (decays_ == Decays::per_head) finish(result_.dlog_decay, shared.dlog_decay);
  }

  const DeltaRuleProblem& p_;
  const DeltaRuleUpstream& input_;
  const DeltaRuleGradients& result_;
  const Threads threads_;
  const Decays decays_;
  const int64_t key_vectors_, value_vectors_;
  const BackwardPlan plan_;
};

}  // namespace

Status delta_rule_backward(const DeltaRuleProblem& problem, const DeltaRuleUpstream& input,
                           const DeltaRuleGradients& result, const Threads& threads) {
  return with_acc(problem.dtype, [&](auto acc) {
    return Backward<decltype(acc)>(problem, input, result, threads).run();
  });
}

}  // namespace hfla::HFLA_ISA
