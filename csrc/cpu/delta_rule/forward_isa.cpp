// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Forward: the formulas of weights.h, and the state after the last token, as a value or in the slot
// that the state before the first one was in.
//
// A task is one sequence, some heads of the state and a range of value columns. It sweeps over the
// sequence a segment at a time, of one head after the other: stage what no column changes, then for
// each block of columns go from one block of tokens to the next. v is read, and y and e are
// written, where they are if that is possible.
//
// B batch, T time, Hv heads of the state, K key dim, V value dim.

#include "cpu/delta_rule/kernels.h"
#include "cpu/delta_rule/pass.h"
#include "cpu/sequences/blocks.h"

namespace hfla::HFLA_ISA {
namespace {

// The widest block of columns, in vectors: every weight that is loaded serves so many. Two writes
// of a token leave registers for one. Doubles are for comparisons, and have one width only.
template <class Acc>
constexpr int widest_block(Asks asks) {
  return sizeof(Acc) == sizeof(double) || asks == Asks::and_adds_along ? 1 : 2;
}

struct ForwardPlan : Plan {
  Decays decays;
  Asks asks;
};

// What a scan reads and writes beside the weights and the state.
template <class Acc>
struct ScanRows {
  RowArray<const Acc> values;  // (tokens, columns)
  RowArray<Acc> out, errors;   // (tokens, columns); errors without data are not wanted
};

// From what a block's tokens read of the state to what they give and write: `sum` comes in as the
// sums of reads, `written` goes out as what k̂ is multiplied with, or k where the decay is per head.
template <class Rule, int width, class Acc>
HFLA_INLINE void solve_block(const BlockTerms<Acc>& terms, const ScanRows<Acc>& rows, int64_t first,
                             int64_t column,
                             const Vec<Acc> (&sum)[(Rule::delta ? 2 : 1) * kBlockTokens][width],
                             Vec<Acc> (&written)[Rule::writes * kBlockTokens][width]) {
  constexpr int C = kBlockTokens;
  constexpr bool delta = Rule::delta, per_head = Rule::decays == Decays::per_head;
  constexpr int of_queries = delta ? C : 0;  // place in `sum`
  constexpr bool along = Rule::along;
  Vec<Acc> u[C][width], erased[C][width];
  HFLA_UNROLL
  for (int i = 0; i < C; ++i) {
    const Acc from_start = per_head ? terms.from_start[i] : Acc(1);
    const Acc asked_from_start = per_head ? terms.asked_from_start[i] : Acc(1);
    HFLA_UNROLL
    for (int c = 0; c < width; ++c) {
      const int64_t at = column + c * kLanes<Acc>;
      const Vec<Acc> v = load(rows.values.data + (first + i) * rows.values.stride + at);
      Vec<Acc> e = along ? Vec<Acc>{} : v;
      if constexpr (delta) {
        e -= asked_from_start * sum[i][c];
        HFLA_UNROLL
        for (int j = 0; j < i; ++j) {
          e -= terms.pairs.keys[i][j] * u[j][c];
          if constexpr (along) e -= terms.pairs.keys_along[i][j] * erased[j][c];
        }
        if (rows.errors.data) store(rows.errors.data + (first + i) * rows.errors.stride + at, e);
      }
      u[i][c] = terms.beta[i] * (along ? v : e);
      erased[i][c] = e;
      Vec<Acc> out = from_start * sum[of_queries + i][c];
      HFLA_UNROLL
      for (int j = 0; j <= i; ++j) {
        out += terms.pairs.queries[i][j] * u[j][c];
        if constexpr (along) out += terms.pairs.queries_along[i][j] * erased[j][c];
      }
      store(rows.out.data + (first + i) * rows.out.stride + at, out);
      written[i][c] = per_head ? terms.to_end[i] * u[i][c] : u[i][c];
      if constexpr (along) written[C + i][c] = per_head ? terms.to_end[i] * e : e;
    }
  }
}

// All tokens of a segment, for the block of columns that begins at `column`.
template <class Rule, int width, class Acc>
HFLA_NOINLINE void scan_columns(const Weights<Acc>& w, int64_t blocks, const ScanRows<Acc>& rows,
                                int64_t column, Acc* state, Pace pace) {
  constexpr Decays decays = Rule::decays;
  constexpr bool delta = Rule::delta;
  constexpr int C = kBlockTokens, reads = (delta ? 2 : 1) * C, writes = Rule::writes * C;
  using At = Tile<Acc, Rule>;
  constexpr Shrink shrink = shrink_of(decays);
  Vec<Acc> written[writes][width], sum[reads][width], none[1][width] = {};
  const auto weights = [&](int64_t writer, int64_t reader) HFLA_INLINE_LAMBDA {
    const Acc* const from = w.template tiles_of<Rule>(writer);
    const Acc* const to = w.template tiles_of<Rule>(reader);
    return PassWeights<Acc>{from + At::kKeysOut, to + (delta ? At::kKeys : At::kQueries),
                            from + At::kDecay, w.terms[writer].whole};
  };
  pass<0, reads, width, At::kSize, shrink>(w.K, weights(0, 0), state, none, sum, pace);
  solve_block<Rule>(w.terms[0], rows, 0, column, sum, written);
  for (int64_t block = 1; block < blocks; ++block) {
    pass<writes, reads, width, At::kSize, shrink>(w.K, weights(block - 1, block), state, written,
                                                  sum, pace);
    solve_block<Rule>(w.terms[block], rows, block * C, column, sum, written);
  }
  pass<writes, 0, width, At::kSize, shrink>(w.K, weights(blocks - 1, blocks - 1), state, written,
                                            none, pace);
}

template <class Acc>
struct ForwardScratch {
  int64_t v_stride;
  Weights<Acc> weights;
  Acc *v, *out, *errors;  // (rows, v_stride)
  Acc* state;             // (heads, K v_stride)
  const char** prefetch;

  ForwardScratch(Carver& carver, const ForwardPlan& plan)
      : v_stride(row_stride<Acc>(plan.sequences.V)), weights(carver, plan, plan.decays, plan.asks) {
    const int64_t rows = plan.segment.rows, K = plan.sequences.K, V = plan.sequences.V;
    v = carver.take<Acc>(rows * v_stride);
    out = carver.take<Acc>(rows * v_stride);
    errors = carver.take<Acc>(rows * v_stride);
    state = carver.take<Acc>(plan.heads * K * v_stride);
    prefetch = carver.take<const char*>(
        rows * 5 * (Upcoming::pairs_per_row<Acc>(K) + Upcoming::pairs_per_row<Acc>(V)));
  }
};

template <class Acc>
class Forward {
  using Scratch = ForwardScratch<Acc>;

 public:
  // slots: null, where states are values.
  Forward(const DeltaRuleProblem& p, const DeltaRuleResult& result, const DeltaRuleSlots* slots,
          const Threads& threads)
      : p_(p),
        result_(result),
        slots_(slots),
        threads_(for_decays(threads, p.log_decay.data)),
        value_vectors_(ceil_div(p.V, kLanes<Acc>)),
        plan_{make_plan(p, threads, ceil_div(value_vectors_, widest_block<Acc>(asks_of(p))),
                        /*divides_time=*/false),
              decays_of(p.log_decay, p.decay_per_channel), asks_of(p)} {}

  Status run() {
    Workers<Scratch, ForwardPlan> workers(threads_, plan_);
    if (workers.out_of_memory()) return Status::out_of_memory;
    const int64_t channels = p_.decay_per_channel ? p_.K : 1;
    if (slots_ && has_positive_log_decay<Acc>(p_, *slots_, p_.log_decay, channels, threads_)) {
      return Status::positive_log_decay;
    }
    workers.run(plan_.num_tasks(), [&](Scratch& s, int64_t i) { attend(s, plan_.task(i)); });
    return positive_log_decay_ ? Status::positive_log_decay : Status::ok;
  }

 private:
  void attend(Scratch& s, const Plan::Task& task) {
    const Piece piece = plan_.piece(task.piece);
    if (slots_ && slot_of(*slots_, piece.sequence) < 0) return;
    const Columns columns = plan_.part(task.part, value_vectors_);
    const auto blocks_of = [&](int64_t head) {
      return Blocks<Acc>{state_of(s, task, head), p_.K, columns, widest_block<Acc>(plan_.asks)};
    };
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      clear_state(blocks_of(head));
      import_state<Acc>(blocks_of(head),
                        {initial_state(piece.sequence, head), 0, p_.K, p_.V, p_.V, 1});
    }
    const Tensors at = tensors(columns);
    traverse(plan_, piece, task.heads, false, [&](const Segment& segment, const Segment& next) {
      advance(s, segment, next, at, columns, state_of(s, task, segment.head));
    });
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      export_state<Acc>(blocks_of(head), 1,
                        {final_state(piece.sequence, head), 0, p_.K, p_.V, p_.V, 1});
    }
  }

  Acc* state_of(const Scratch& s, const Plan::Task& task, int64_t head) const {
    return s.state + (head - task.heads.begin) * p_.K * s.v_stride;
  }

  // One head's state (K, V); null: zeros.
  const Acc* initial_state(int64_t sequence, int64_t head) const {
    if (slots_) return in_slot(slot_before(*slots_, sequence), head);
    return p_.initial_state ? static_cast<const Acc*>(p_.initial_state) + in_order(sequence, head)
                            : nullptr;
  }
  Acc* final_state(int64_t sequence, int64_t head) const {
    if (slots_) return in_slot(slot_of(*slots_, sequence), head);
    return static_cast<Acc*>(result_.state) + in_order(sequence, head);
  }
  int64_t in_order(int64_t sequence, int64_t head) const {
    return (sequence * p_.Hkv + head) * p_.K * p_.V;
  }
  Acc* in_slot(int64_t slot, int64_t head) const {
    return slot < 0
               ? nullptr
               : static_cast<Acc*>(slots_->state) + slot * slots_->state_slot + head * p_.K * p_.V;
  }

  // The rows that a task reads and writes for its columns.
  struct Tensors {
    TensorRows q, k, v, y, errors;
  };
  Tensors tensors(Columns columns) const {
    const int64_t begin = columns.begin * kLanes<Acc>;
    const int64_t end = min(columns.end * kLanes<Acc>, p_.V);
    return {{p_.q, RowsPer::token, 0, p_.K},
            {p_.k, RowsPer::token, 0, p_.K},
            {p_.v, RowsPer::token, begin, end},
            {result_.y, RowsPer::token, begin, end},
            {result_.errors, RowsPer::token, begin, end}};
  }

  // The tokens of a segment; `state` is of its head.
  void advance(Scratch& s, const Segment& segment, const Segment& next, const Tensors& at,
               Columns columns, Acc* state) {
    if (!stage_weights(p_, plan_.decays, segment, s.weights)) {
      __atomic_store_n(&positive_log_decay_, true, __ATOMIC_RELAXED);
    }
    const bool wants_errors = p_.delta && result_.errors.data;
    const bool y_in_place = in_place<Acc>(p_.dtype, segment, at.y);
    const bool errors_in_place = wants_errors && in_place<Acc>(segment, at.errors);
    ScanRows<Acc> rows{find_rows<Acc>(p_.dtype, segment, at.v, {s.v, s.v_stride}),
                       {s.out, s.v_stride},
                       {wants_errors ? s.errors : nullptr, s.v_stride}};
    if (y_in_place) rows.out = rows_in_place<Acc>(segment, at.y);
    if (errors_in_place) rows.errors = rows_in_place<Acc>(segment, at.errors);
    scan(s.weights, blocks_of(segment), rows, columns, state, upcoming_rows(s, next, at));
    if (!y_in_place) store_rows<Acc>(p_.dtype, segment, at.y, {s.out, s.v_stride});
    if (wants_errors && !errors_in_place) {
      store_rows<Acc>(segment, at.errors, {s.errors, s.v_stride});
    }
  }

  void scan(const Weights<Acc>& w, int64_t blocks, const ScanRows<Acc>& rows, Columns columns,
            Acc* state, const Prefetch& prefetch) const {
    const int64_t parts = ceil_div(columns.count(), widest_block<Acc>(plan_.asks));
    const int64_t tiles = (blocks + 1) * ceil_div(p_.K, kLanes<Acc>);
    with_rule(plan_.decays, plan_.asks, [&](auto rule) {
      using Rule = decltype(rule);
      constexpr int widest = widest_block<Acc>(Rule::asks);
      int64_t c = columns.begin, part = 0;
      for (; c + widest <= columns.end; c += widest, ++part) {
        scan_columns<Rule, widest>(w, blocks, rows, c * kLanes<Acc>, state,
                                   share_of(prefetch, part, parts, tiles));
        state += p_.K * widest * kLanes<Acc>;
      }
      if (widest > 1 && c < columns.end) {
        scan_columns<Rule, 1>(w, blocks, rows, c * kLanes<Acc>, state,
                              share_of(prefetch, part, parts, tiles));
      }
    });
  }

  Prefetch upcoming_rows(Scratch& s, const Segment& next, const Tensors& at) const {
    Upcoming upcoming(next, s.prefetch);
    const int64_t bytes = bytes_of(p_.dtype);
    upcoming.add(bytes, of_shared_head(next, p_.q_group), at.q);
    upcoming.add(bytes, of_shared_head(next, p_.k_group), at.k);
    if (plan_.decays == Decays::per_channel) {
      upcoming.add(sizeof(Acc), {p_.log_decay, RowsPer::token, 0, p_.K});
    }
    if (p_.erase_key.data) upcoming.add(sizeof(Acc), {p_.erase_key, RowsPer::token, 0, p_.K});
    if (p_.add_along.data) upcoming.add(sizeof(Acc), {p_.add_along, RowsPer::token, 0, p_.K});
    upcoming.add(bytes, at.v);
    upcoming.add(bytes, at.y);
    upcoming.add(sizeof(Acc), at.errors);
    return upcoming.get();
  }

  const DeltaRuleProblem& p_;
  const DeltaRuleResult& result_;
  const DeltaRuleSlots* const slots_;
  const Threads threads_;
  const int64_t value_vectors_;
  const ForwardPlan plan_;
  bool positive_log_decay_ = false;
};

Status run_forward(const DeltaRuleProblem& p, const DeltaRuleResult& result,
                   const DeltaRuleSlots* slots, const Threads& threads) {
  return with_acc(
      p.dtype, [&](auto acc) { return Forward<decltype(acc)>(p, result, slots, threads).run(); });
}

}  // namespace

Status delta_rule_forward(const DeltaRuleProblem& problem, const DeltaRuleResult& result,
                          const Threads& threads) {
  return run_forward(problem, result, nullptr, threads);
}

Status delta_rule_forward_in_slots(const DeltaRuleProblem& problem, const DeltaRuleSlots& slots,
                                   const View& y, const Threads& threads) {
  DeltaRuleResult result{};
  result.y = y;
  return run_forward(problem, result, &slots, threads);
}

}  // namespace hfla::HFLA_ISA
