// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Backward: three more scans with the roles exchanged, in O(T) memory.
//
// Let dn_t = dy_t / den_t and v'_t = [v_t, 1], dn'_t = [dn_t, -⟨dn_t, y_t⟩]: the normaliser is one
// more value column, of ones, and a division's gradient one more entry. Then
//
//     W_t = e^{g_t} W_{t-1} + v'_t φ(k_t)ᵀ         dφ(q)_t = W_tᵀ dn'_t    forwards
//     U_t = e^{g_{t+1}} U_{t+1} + dn'_t φ(q_t)ᵀ    dφ(k)_t = U_tᵀ v'_t     backwards
//     R_t = e^{g_{t+1}} R_{t+1} + φ(q_t) dn_tᵀ     dv_t    = R_tᵀ φ(k_t)   backwards
//
// W = [S, z]ᵀ starts from the initial state. U = [R, dz]ᵀ is the gradient of the state; it starts
// from the gradient of the final one, and what it ends with, decayed by the first token, is the
// gradient of the initial one. It is kept in both layouts so that all scans run along vectors.
//
// The decay's gradient is e^{g_t} ⟨[S, z]_{t-1}, U_t⟩, which the recurrences above turn into
//
//     dg_t = dg_{t+1} + ⟨φ(q_t), dφ(q)_t⟩ - ⟨φ(k_t), dφ(k)_t⟩,    dg_T = ⟨[S, z]_T, U_T⟩,
//
// summed in double because much of it cancels. What the terms are rounded by would add up: every
// few segments the first scan keeps [S, z], from which the second has the sum itself. Where e^{g_t}
// is 0 so is dg_t, exactly, and the sum starts afresh.
//
// Tasks are as in forward; dq is one task, dk and dv are another. Of long sequences the sums are
// those of long_scan.h.

#include "cpu/linear_attention/kernels.h"
#include "cpu/linear_attention/long_scan.h"
#include "cpu/linear_attention/rows.h"
#include "cpu/linear_attention/states.h"

namespace hfla::HFLA_ISA {
namespace {

// e^g, and g.
template <class Acc>
struct Decays {
  Acc *decay, *logarithm;

  Decays from(int64_t i) const { return {decay + i, logarithm + i}; }
  void set(int64_t i, Acc factor, Acc log_factor) const {
    decay[i] = factor;
    logarithm[i] = log_factor;
  }
};

template <class Acc>
struct BackwardScratch {
  int64_t k_stride, v_stride;
  Acc *q, *k, *out_k;   // (rows, k_stride)
  Acc *v, *dn, *out_v;  // (rows, v_stride), with a column for the normaliser
  Decays<Acc> decays;   // (1 + rows,)
  Decays<Acc> last;    // (heads,) of the token that was visited last, which a state swept backwards
                       // has yet to undergo
  Sums<Acc> by_value;  // W or U: (heads, V + 1, K)
  Sums<Acc> by_key;    // R: (heads, K, V)
  ChunkWeights<Acc> weights;
  Window* windows;  // (heads,)
  const char** prefetch;

  BackwardScratch(Carver& carver, const Plan& plan)
      : k_stride(row_stride<Acc>(plan.sequences.K)),
        v_stride(row_stride<Acc>(plan.sequences.V + 1)),
        by_value(carver, plan.heads * (plan.sequences.V + 1) * k_stride, is_long(plan)),
        by_key(carver, plan.heads * plan.sequences.K * v_stride, is_long(plan)),
        weights(carver, plan.segment.rows, max(k_stride, v_stride), is_long(plan)) {
    const int64_t rows = plan.segment.rows, K = plan.sequences.K, V = plan.sequences.V;
    q = carver.take<Acc>(rows * k_stride);
    k = carver.take<Acc>(rows * k_stride);
    out_k = carver.take<Acc>(rows * k_stride);
    v = carver.take<Acc>(rows * v_stride);
    dn = carver.take<Acc>(rows * v_stride);
    out_v = carver.take<Acc>(rows * v_stride);
    decays = {carver.take<Acc>(1 + rows), carver.take<Acc>(1 + rows)};
    last = {carver.take<Acc>(plan.heads), carver.take<Acc>(plan.heads)};
    windows = carver.take<Window>(plan.heads);
    prefetch = carver.take<const char*>(
        rows * (3 * Upcoming::pairs_per_row<Acc>(K) + 4 * Upcoming::pairs_per_row<Acc>(V)));
  }
};

// ⟨φ(q), dφ(q)⟩ or ⟨φ(k), dφ(k)⟩ of every token and key-value head, a term per part of the columns.
struct Dots {
  double* data;  // (parts, Hkv, B T)
  int64_t heads, tokens;

  double& at(int64_t part, int64_t head, int64_t token) const {
    return data[(part * heads + head) * tokens + token];
  }
  // Those of a segment's batch row and head, by time.
  double* of(int64_t part, const Segment& segment) const {
    return data + (part * heads + segment.head) * tokens + segment.batch * segment.sequences.T;
  }
};

// Where decays have a gradient, the state is kept after so many segments of a piece: half as many
// would halve its error, and cost 2 % more of the time.
constexpr int64_t kAnchorSegments = 8;
constexpr int64_t kDotVectors = 64;  // products of a state that are summed up in floats

// What is kept there for every head: the state, and the decay's gradient of the token after it.
template <class Acc>
struct Anchors {
  const Plan& plan;
  int64_t tokens;      // from one to the next, from the piece's first token on
  int64_t state_size;  // of all columns
  Acc* states;         // (B, T / tokens, Hkv, state_size)
  double* gradients;   // (parts, B, T / tokens, Hkv)

  Anchors(Carver& carver, const Plan& plan, bool wanted)
      : plan(plan),
        tokens(kAnchorSegments * plan.segment.tokens),
        state_size((plan.sequences.V + 1) * row_stride<Acc>(plan.sequences.K)) {
    const int64_t count = wanted ? plan.sequences.B * per_row() * plan.sequences.Hkv : 0;
    states = carver.take<Acc>(count * state_size);
    gradients = carver.take<double>(plan.parts * count);
  }

  bool is_before(const Piece& piece, int64_t time) const {
    return time > piece.begin && time < piece.end && (time - piece.begin) % tokens == 0;
  }
  Acc* state(const Piece& piece, int64_t head, int64_t time) const {
    return states + index(piece, head, time) * state_size;
  }
  double& gradient(int64_t part, const Piece& piece, int64_t head, int64_t time) const {
    const Sequences& p = plan.sequences;
    return gradients[part * p.B * per_row() * p.Hkv + index(piece, head, time)];
  }

 private:
  int64_t per_row() const { return plan.sequences.T / tokens; }
  // They are so far apart, and from the beginning of their piece, that no two are in one place.
  int64_t index(const Piece& piece, int64_t head, int64_t time) const {
    return (piece.batch * per_row() + time / tokens - 1) * plan.sequences.Hkv + head;
  }
};

// The log decay at which e^g is zero.
template <class Acc>
bool forgets_all(Acc log_decay) {
  return log_decay <= Exp<Acc>::kZeroBelow;
}

template <class Acc>
class Backward {
  using Scratch = BackwardScratch<Acc>;

  struct Shared {
    PieceStates<Acc> forwards, backwards;
    Anchors<Acc> anchors;
    Dots q_dots, k_dots;

    Shared(Carver& carver, const Plan& plan, bool with_decay_gradient)
        : forwards(carver, plan),
          backwards(carver, plan),
          anchors(carver, plan, with_decay_gradient) {
      const Sequences& p = plan.sequences;
      const int64_t count = with_decay_gradient ? plan.parts * p.Hkv * p.B * p.T : 0;
      q_dots = {carver.take<double>(count), p.Hkv, p.B * p.T};
      k_dots = {carver.take<double>(count), p.Hkv, p.B * p.T};
    }
  };

 public:
  Backward(const LinearAttentionProblem& p, const LinearAttentionUpstream& input,
           const LinearAttentionGradients& result, const Threads& threads)
      : p_(p),
        input_(input),
        result_(result),
        threads_(for_decays(threads, p.log_decay.data)),
        key_vectors_(ceil_div(p.K, kLanes<Acc>)),
        value_vectors_(ceil_div(p.V, kLanes<Acc>)),
        value_rows_(p.V + (p.normalize ? 1 : 0)),
        plan_(make_plan(p, threads, max(key_vectors_, value_vectors_),
                        /*divides_time=*/true, kLevels)) {}

  Status run() {
    Carver measured(nullptr);
    Shared(measured, plan_, wants_decay_gradient());
    const Buffer buffer(measured.used());
    Workers<Scratch> workers(threads_, plan_);
    if (!buffer.data() || workers.out_of_memory()) return Status::out_of_memory;
    Carver carver(buffer.data());
    const Shared shared(carver, plan_, wants_decay_gradient());

    const int64_t tasks = plan_.num_tasks();
    const int64_t heads = p_.num_sequences * p_.Hkv;
    if (plan_.pieces > 1) {
      workers.run(2 * tasks,
                  [&](Scratch& s, int64_t i) { sum_piece(s, shared, i >= tasks, at(i % tasks)); });
      workers.run(heads, [&](Scratch&, int64_t i) { combine(shared, i / p_.Hkv, i % p_.Hkv); });
    }
    const auto of_queries = [&](Scratch& s, int64_t i) { differentiate_queries(s, shared, at(i)); };
    const auto of_keys_and_values = [&](Scratch& s, int64_t i) {
      differentiate_keys_and_values(s, shared, at(i));
    };
    if (wants_decay_gradient()) {
      workers.run(tasks, of_queries);
      workers.run(tasks, of_keys_and_values);
      workers.run(
          heads, [&](Scratch&, int64_t i) { differentiate_decay(shared, i / p_.Hkv, i % p_.Hkv); });
    } else {  // the longer tasks first
      workers.run(2 * tasks, [&](Scratch& s, int64_t i) {
        i < tasks ? of_keys_and_values(s, i) : of_queries(s, i - tasks);
      });
    }
    return Status::ok;
  }

 private:
  // A piece of a sequence, some heads, and a part of the columns.
  struct Task {
    Piece piece;
    int64_t piece_index, part;
    Heads heads;
    Columns keys, values;
  };

  Task at(int64_t i) const {
    const Plan::Task task = plan_.task(i);
    return {plan_.piece(task.piece),
            task.piece,
            task.part,
            task.heads,
            plan_.part(task.part, key_vectors_),
            plan_.part(task.part, value_vectors_)};
  }

  bool wants_decay_gradient() const { return result_.dlog_decay.data; }

  State<const Acc> initial_state(int64_t sequence, int64_t head) const {
    return state_of<const Acc>(p_, p_.initial_kv, p_.initial_z, sequence, head);
  }
  State<const Acc> final_gradient(int64_t sequence, int64_t head) const {
    return state_of<const Acc>(p_, input_.dkv, input_.dz, sequence, head);
  }

  // ---- states ----

  Sums<Acc> by_value(const Scratch& s, const Task& task, int64_t head) const {
    return s.by_value.from((head - task.heads.begin) * (p_.V + 1) * s.k_stride);
  }
  Sums<Acc> by_key(const Scratch& s, const Task& task, int64_t head) const {
    return s.by_key.from((head - task.heads.begin) * p_.K * s.v_stride);
  }
  Decays<Acc> last(const Scratch& s, const Task& task, int64_t head) const {
    return s.last.from(head - task.heads.begin);
  }
  Window& window(const Scratch& s, const Task& task, int64_t head) const {
    return s.windows[head - task.heads.begin];
  }

  Blocks<Acc> value_blocks(const Scratch& s, const Task& task, int64_t head) const {
    return {by_value(s, task, head).now, value_rows_, task.keys, kMaxBlock<Acc>};
  }
  // Its rows in tensors: of kv, transposed, and of z.
  template <class Element>
  Matrix<Element> transposed(Element* kv) const {
    return {kv, 0, p_.V, p_.K, 1, p_.V};
  }
  template <class Element>
  Matrix<Element> last_row(Element* z) const {
    return {z, p_.V, value_rows_, p_.K, 0, 1};
  }
  Blocks<Acc> key_blocks(const Scratch& s, const Task& task, int64_t head) const {
    return {by_key(s, task, head).now, p_.K, task.values, kMaxBlock<Acc>};
  }

  void load_by_value(Scratch& s, const Task& task, int64_t head, State<const Acc> from) const {
    const Blocks<Acc> state = value_blocks(s, task, head);
    clear_state(state);
    import_state<Acc>(state, transposed(from.kv));
    if (p_.normalize) import_state<Acc>(state, last_row(from.z));
    begin_sums(size_of(state), by_value(s, task, head));
    window(s, task, head) = {0, 0};
  }

  void store_by_value(Scratch& s, const Task& task, int64_t head, Acc scale, State<Acc> to) const {
    const Blocks<Acc> state = value_blocks(s, task, head);
    export_state<Acc>(state, scale, transposed(to.kv));
    if (p_.normalize) export_state<Acc>(state, scale, last_row(to.z));
  }

  void load_by_key(Scratch& s, const Task& task, int64_t head, State<const Acc> from) const {
    const Blocks<Acc> state = key_blocks(s, task, head);
    clear_state(state);
    import_state<Acc>(state, {from.kv, 0, p_.K, p_.V, p_.V, 1});
    begin_sums(size_of(state), by_key(s, task, head));
  }

  // Of a task that has both, or W alone, when task.values are none.
  void end_window_of(const Scratch& s, const Task& task, int64_t head, bool now) const {
    end_window(window(s, task, head), now, [&](double decay) {
      settle_sums(size_of(value_blocks(s, task, head)), decay, by_value(s, task, head));
      settle_sums(size_of(key_blocks(s, task, head)), decay, by_key(s, task, head));
    });
  }
  void end_windows(Role role, const Scratch& s, const Task& task) const {
    for (int64_t head = task.heads.begin; in_levels(role) && head < task.heads.end; ++head)
      end_window_of(s, task, head, true);
  }
  bool in_levels(Role role) const { return is_long(plan_) && writes(role); }

  // The rows of a segment, for one state.
  void scan_rows(Role role, const Scratch& s, const Scan<Acc>& rows, Columns columns,
                 Sums<Acc> state) const {
    if (columns.count() == 0) return;
    if (!in_levels(role)) return scan(role, rows, columns, state.now);
    weigh_chunks(role, rows, rows.decay ? s.decays.logarithm : nullptr, s.weights);
    scan_long(role, rows, s.weights, columns, state);
  }
  // After these rows.
  void advance_window(Role role, const Scratch& s, const Task& task, const Segment& segment,
                      const Acc* decay) const {
    if (!in_levels(role)) return;
    const Acc* const log_decay = decay ? s.decays.logarithm : nullptr;
    window(s, task, segment.head).add(segment.padded_rows(), log_decay);
    end_window_of(s, task, segment.head, false);
  }

  // What a piece's own tokens add to the state, or to its gradient, where time is divided.
  void sum_piece(Scratch& s, const Shared& shared, bool backwards, Task task) const {
    const PieceStates<Acc>& pieces = backwards ? shared.backwards : shared.forwards;
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      load_by_value(s, task, head, {nullptr, nullptr});
      if (task.part == 0) pieces.decay(task.piece_index, head) = 0;
    }
    double* const decays = task.part == 0 ? &pieces.decay(task.piece_index, 0) : nullptr;
    task.values = {0, 0};
    if (backwards) {
      sweep_backwards(Role::write, s, shared, task, decays);
    } else {
      sweep_forwards(Role::write, s, shared, task, decays);
    }
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      store_by_value(s, task, head, backwards ? *last(s, task, head).decay : 1,
                     pieces.at(task.piece_index, head));
    }
  }

  void combine(const Shared& shared, int64_t sequence, int64_t head) const {
    const int64_t first = sequence * plan_.pieces, last = first + plan_.pieces - 1;
    shared.forwards.combine({first, 1, plan_.pieces}, head, initial_state(sequence, head),
                            p_.is_causal);
    shared.backwards.combine({last, -1, plan_.pieces}, head, final_gradient(sequence, head),
                             p_.is_causal);
  }

  State<const Acc> incoming(const PieceStates<Acc>& pieces, const Task& task, int64_t head,
                            State<const Acc> of_sequence) const {
    if (plan_.pieces == 1) return of_sequence;
    const State<Acc> state = pieces.at(task.piece_index, head);
    return {state.kv, state.z};
  }

  // ---- gradients ----

  void differentiate_queries(Scratch& s, const Shared& shared, Task task) const {
    task.values = {0, 0};
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      load_by_value(
          s, task, head,
          incoming(shared.forwards, task, head, initial_state(task.piece.sequence, head)));
    }
    if (p_.is_causal) {
      sweep_forwards(Role::write_and_read, s, shared, task);
    } else {
      if (plan_.pieces == 1) sweep_forwards(Role::write, s, shared, task);
      sweep_forwards(Role::read, s, shared, task);
    }
  }

  void differentiate_keys_and_values(Scratch& s, const Shared& shared, const Task& task) const {
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      const State<const Acc> from =
          incoming(shared.backwards, task, head, final_gradient(task.piece.sequence, head));
      load_by_value(s, task, head, from);
      load_by_key(s, task, head, from);
    }
    if (p_.is_causal) {
      sweep_backwards(Role::write_and_read, s, shared, task);
    } else {
      if (plan_.pieces == 1) sweep_backwards(Role::write, s, shared, task);
      sweep_backwards(Role::read, s, shared, task);
    }
    for (int64_t head = task.heads.begin; task.piece.first && head < task.heads.end; ++head) {
      const State<Acc> to =
          state_of<Acc>(p_, result_.dinitial_kv, result_.dinitial_z, task.piece.sequence, head);
      const Acc decay = *last(s, task, head).decay;
      store_by_value(s, task, head, decay, {nullptr, to.z});
      export_state<Acc>(key_blocks(s, task, head), decay, {to.kv, 0, p_.K, p_.V, p_.V, 1});
    }
  }

  // The rows that a sweep stages or writes: of queries and keys, and of values.
  struct Tensors {
    TensorRows q, k, v, dy, y;
  };

  // All values, and the columns [begin, end) of queries and keys.
  Tensors tensors(int64_t begin, int64_t end) const {
    return {{p_.q, RowsPer::query_head, begin, end},
            {p_.k, RowsPer::token, begin, end},
            {p_.v, RowsPer::token, 0, p_.V},
            {input_.dy, RowsPer::query_head, 0, p_.V},
            {input_.forward.y, RowsPer::query_head, 0, p_.V}};
  }

  // dq. Adds the log decays to total_decays[head] if there are any.
  void sweep_forwards(Role role, Scratch& s, const Shared& shared, const Task& task,
                      double* total_decays = nullptr) const {
    const int64_t begin = task.keys.begin * kLanes<Acc>;
    const int64_t end = min(task.keys.end * kLanes<Acc>, p_.K);
    const Tensors at = tensors(begin, end);
    const TensorRows dq{result_.dq, RowsPer::query_head, begin, end};
    traverse(plan_, task.piece, task.heads, false,
             [&](const Segment& segment, const Segment& next) {
               if (writes(role)) {
                 stage_features<Acc>(p_.dtype, segment, at.k, p_.feature_map, {s.k, s.k_stride});
                 stage_values(s, segment, at.v);
               }
               if (reads(role)) {
                 stage_features<Acc>(p_.dtype, segment, at.q, p_.feature_map, {s.q, s.k_stride});
                 stage_output_gradients(s, segment);
               }
               const Acc* decay = stage_decays(s.decays, segment, total_decays);
               Upcoming upcoming = next_rows(s, next, at);
               if (reads(role)) upcoming.add(bytes_of(p_.dtype), dq);
               const RowArray<Acc> out{s.out_k, s.k_stride};
               scan_rows(role, s,
                         {segment.padded_rows(),
                          value_rows_,
                          s.dn,
                          s.v,
                          s.v_stride,
                          {s.k, s.k_stride},
                          out,
                          nullptr,
                          decay,
                          upcoming.get()},
                         task.keys, by_value(s, task, segment.head));
               advance_window(role, s, task, segment, decay);
               if (!reads(role)) return;
               keep_anchor(s, shared.anchors, task, segment);
               store_feature_gradients(segment, at.q, dq, {s.q, s.k_stride}, out, {s.k, s.k_stride},
                                       shared.q_dots.of(task.part, segment));
             });
    end_windows(role, s, task);
  }

  // dk and dv.
  void sweep_backwards(Role role, Scratch& s, const Shared& shared, const Task& task,
                       double* total_decays = nullptr) const {
    const bool all_keys = task.values.count() > 0;
    const int64_t begin = task.keys.begin * kLanes<Acc>;
    const int64_t end = min(task.keys.end * kLanes<Acc>, p_.K);
    const Tensors at = tensors(all_keys ? 0 : begin, all_keys ? p_.K : end);
    const TensorRows k{p_.k, RowsPer::token, begin, end};
    const TensorRows dk{result_.dk, RowsPer::token, begin, end};
    const TensorRows dv{result_.dv, RowsPer::token, task.values.begin * kLanes<Acc>,
                        min(task.values.end * kLanes<Acc>, p_.V)};
    for (int64_t i = 0; i < task.heads.count(); ++i) s.last.set(i, 1, 0);
    traverse(plan_, task.piece, task.heads, true, [&](const Segment& segment, const Segment& next) {
      if (writes(role)) {
        stage_features<Acc>(p_.dtype, segment, at.q, p_.feature_map, {s.q, s.k_stride});
        stage_output_gradients(s, segment);
      }
      if (reads(role)) {
        stage_features<Acc>(p_.dtype, segment, at.k, p_.feature_map, {s.k, s.k_stride});
        stage_values(s, segment, at.v);
      }
      const bool decays = stage_decays(s.decays.from(1), segment, total_decays);
      const Acc* const decay = decays ? s.decays.decay : nullptr;
      const Decays<Acc> last_of_head = last(s, task, segment.head);
      s.decays.set(0, *last_of_head.decay, *last_of_head.logarithm);
      Upcoming upcoming = next_rows(s, next, at);
      if (reads(role)) {
        upcoming.add(bytes_of(p_.dtype), dk);
        upcoming.add(bytes_of(p_.dtype), dv);
      }
      const RowArray<Acc> out_k{s.out_k, s.k_stride};
      scan_rows(role, s,
                {segment.padded_rows(),
                 value_rows_,
                 s.v,
                 s.dn,
                 s.v_stride,
                 {s.q, s.k_stride},
                 out_k,
                 nullptr,
                 decay,
                 upcoming.get()},
                task.keys, by_value(s, task, segment.head));
      const bool dv_in_place = reads(role) && in_place<Acc>(p_.dtype, segment, dv);
      const RowArray<Acc> out_v =
          dv_in_place ? rows_in_place<Acc>(segment, dv) : RowArray<Acc>{s.out_v, s.v_stride};
      scan_rows(role, s,
                {segment.padded_rows(),
                 p_.K,
                 s.k,
                 s.q,
                 s.k_stride,
                 {s.dn, s.v_stride},
                 out_v,
                 nullptr,
                 decay,
                 {}},
                task.values, by_key(s, task, segment.head));
      advance_window(role, s, task, segment, decay);
      const int64_t count = segment.padded_rows();
      if (decay) last_of_head.set(0, s.decays.decay[count], s.decays.logarithm[count]);
      if (!reads(role)) return;
      differentiate_anchor(s, shared.anchors, task, segment);
      store_feature_gradients(segment, k, dk, {s.k, s.k_stride}, out_k, {s.q, s.k_stride},
                              shared.k_dots.of(task.part, segment));
      if (!dv_in_place) store_rows<Acc>(p_.dtype, segment, dv, {s.out_v, s.v_stride});
    });
    end_windows(role, s, task);
  }

  // ---- rows in ----

  // All that either sweep reads: whatever its role does not need is asked for in vain.
  Upcoming next_rows(Scratch& s, const Segment& next, const Tensors& at) const {
    Upcoming upcoming(next, s.prefetch);
    const int64_t bytes = bytes_of(p_.dtype);
    upcoming.add(bytes, at.q);
    upcoming.add(bytes, at.k);
    upcoming.add(bytes, at.v);
    upcoming.add(bytes, at.dy);
    if (p_.normalize) upcoming.add(bytes, at.y);
    return upcoming;
  }

  // Null if there are none.
  const Acc* stage_decays(Decays<Acc> to, const Segment& segment, double* total_decays) const {
    if (!p_.log_decay.data) return nullptr;
    stage_decay(segment, p_.log_decay, to.decay, to.logarithm);
    if (total_decays) total_decays[segment.head] += sum_of_log_decays(segment.rows(), to.logarithm);
    return to.decay;
  }

  // [v, 1]
  void stage_values(Scratch& s, const Segment& segment, const TensorRows& v) const {
    stage_rows<Acc>(p_.dtype, segment, v, {s.v, s.v_stride});
    for (int64_t row = 0; row < segment.padded_rows(); ++row) s.v[row * s.v_stride + p_.V] = 0;
    for_each_present_row(segment, v.per,
                         [&](int64_t row, int64_t, int64_t) { s.v[row * s.v_stride + p_.V] = 1; });
  }

  // [dn, -⟨dn, y⟩]
  void stage_output_gradients(Scratch& s, const Segment& segment) const {
    with_dtype_of<Acc>(p_.dtype,
                       [&](auto scalar) { stage_output_gradients<decltype(scalar)>(s, segment); });
  }
  template <class Scalar>
  void stage_output_gradients(Scratch& s, const Segment& segment) const {
    const Acc* const den = static_cast<const Acc*>(input_.forward.den);
    for_each_row<const Scalar>(
        segment, input_.dy, RowsPer::query_head,
        [&](int64_t row, int64_t i, int64_t g, const Scalar* dy) {
          Acc* const dn = s.dn + row * s.v_stride;
          if (!p_.normalize) return load_row(dy, input_.dy.dim, 0, p_.V, dn);
          const int64_t token = segment.batch * p_.T + segment.time(i);
          const Acc scale = 1 / den[token * p_.Hq + segment.head * segment.group + g];
          const Scalar* const y =
              row_at<const Scalar>(input_.forward.y, RowsPer::query_head, segment, i, g);
          Vec<Acc> dot{};
          for_each_vector<Acc>(0, p_.V, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
            const Vec<Acc> x = load_vector(dy, input_.dy.dim, c, count) * scale;
            dot += x * load_vector(y, input_.forward.y.dim, c, count);
            store(dn + c, first_lanes<Acc>(count, x));
          });
          dn[p_.V] = -sum<Acc>(dot);
        },
        [&](int64_t row) { zero_row(s.dn + row * s.v_stride, 0, p_.V + 1); });
  }

  // ---- rows out ----

  // dx = dφ(x) φ'(x), and ⟨φ(x), dφ(x)⟩ for the decay. `staged` has room for x.
  void store_feature_gradients(const Segment& segment, const TensorRows& x, const TensorRows& dx,
                               RowArray<const Acc> mapped, RowArray<Acc> gradients,
                               RowArray<Acc> staged, double* dots) const {
    RowArray<const Acc> from = mapped;  // which is not looked at
    if (derivative_needs_x(p_.feature_map)) from = find_rows<Acc>(p_.dtype, segment, x, staged);
    with_feature_map(p_.feature_map, [&](auto map) {
      for_each_present_row(segment, dx.per, [&](int64_t row, int64_t i, int64_t g) {
        Vec<Acc> dot{};
        for (int64_t c = dx.begin; c < dx.end; c += kLanes<Acc>) {
          Acc* const to = gradients.data + row * gradients.stride + c;
          const Vec<Acc> f = load(mapped.data + row * mapped.stride + c), df = load(to);
          dot += f * df;
          store(to, df * map.derivative(load(from.data + row * from.stride + c), f));
        }
        if (!wants_decay_gradient()) return;
        double& sum_of_group = dots[segment.time(i)];
        const bool first_of_group = dx.per == RowsPer::token || g == 0;
        sum_of_group = (first_of_group ? 0 : sum_of_group) + sum<Acc>(dot);
      });
    });
    store_rows<Acc>(p_.dtype, segment, dx, {gradients.data, gradients.stride});
  }

  // ---- decay ----

  // W after a segment, and there ⟨W, e^g U⟩ of the token after it. A part has its own columns.
  void keep_anchor(const Scratch& s, const Anchors<Acc>& anchors, const Task& task,
                   const Segment& segment) const {
    const int64_t time = segment.first + segment.count;
    if (!wants_decay_gradient() || !anchors.is_before(task.piece, time)) return;
    const Blocks<Acc> state = value_blocks(s, task, segment.head);
    __builtin_memcpy(columns_of(anchors.state(task.piece, segment.head, time), task), state.data,
                     sizeof(Acc) * size_of(state));
  }
  void differentiate_anchor(const Scratch& s, const Anchors<Acc>& anchors, const Task& task,
                            const Segment& segment) const {
    const int64_t time = segment.time(segment.count - 1);
    if (!wants_decay_gradient() || !anchors.is_before(task.piece, time)) return;
    const Acc* const state = columns_of(anchors.state(task.piece, segment.head, time), task);
    const Blocks<Acc> gradient = value_blocks(s, task, segment.head);
    constexpr int64_t W = kLanes<Acc>;
    double dot = 0;
    for (int64_t row = 0; row < size_of(gradient); row += kDotVectors * W) {
      Vec<Acc> of_row{};
      for (int64_t i = row; i < min(row + kDotVectors * W, size_of(gradient)); i += W)
        of_row += load(state + i) * load(gradient.data + i);
      dot += sum<Acc>(of_row);
    }
    anchors.gradient(task.part, task.piece, segment.head, time) =
        *last(s, task, segment.head).decay * dot;
  }
  Acc* columns_of(Acc* state, const Task& task) const {
    return state + task.keys.begin * kLanes<Acc> * value_rows_;
  }

  // ⟨[S, z]_T, U_T⟩
  double dot_of_final_state(int64_t sequence, int64_t head) const {
    const State<const Acc> gradient = final_gradient(sequence, head);
    const State<const Acc> state =
        state_of<const Acc>(p_, input_.forward.kv, input_.forward.z, sequence, head);
    double dot = 0;
    for (int64_t e = 0; gradient.kv && e < p_.K * p_.V; ++e) {
      dot += static_cast<double>(state.kv[e]) * gradient.kv[e];
    }
    for (int64_t c = 0; gradient.z && c < p_.K; ++c) {
      dot += static_cast<double>(state.z[c]) * gradient.z[c];
    }
    return dot;
  }

  void differentiate_decay(const Shared& shared, int64_t sequence, int64_t head) const {
    double gradient = dot_of_final_state(sequence, head);
    for (int64_t i = plan_.pieces - 1; i >= 0; --i) {
      differentiate_decay(shared, plan_.piece(sequence * plan_.pieces + i), head, gradient);
    }
  }
  // gradient: of the token after the piece, then of its first one.
  void differentiate_decay(const Shared& shared, const Piece& piece, int64_t head,
                           double& gradient) const {
    const auto sum_of_parts = [&](auto of_part) {
      double sum = 0;
      for (int64_t part = 0; part < plan_.parts; ++part) sum += of_part(part);
      return sum;
    };
    for (int64_t offset = 0; offset < piece.length(); ++offset) {
      const Segment segment = segment_at(p_, piece, head, true, offset, 1);
      Acc& to = *row_at<Acc>(result_.dlog_decay, RowsPer::token, segment, 0, 0);
      to = 0;
      if (segment.masked(0)) continue;
      if (forgets_all(*row_at<const Acc>(p_.log_decay, RowsPer::token, segment, 0, 0))) {
        gradient = 0;
        continue;
      }
      const int64_t time = segment.time(0), token = segment.batch * p_.T + time;
      if (shared.anchors.is_before(piece, time)) {
        gradient = sum_of_parts(
            [&](int64_t part) { return shared.anchors.gradient(part, piece, head, time); });
      } else {
        gradient += sum_of_parts([&](int64_t part) {
          return shared.q_dots.at(part, head, token) - shared.k_dots.at(part, head, token);
        });
      }
      to = static_cast<Acc>(gradient);
    }
  }

  const LinearAttentionProblem& p_;
  const LinearAttentionUpstream& input_;
  const LinearAttentionGradients& result_;
  const Threads threads_;
  const int64_t key_vectors_, value_vectors_;
  const int64_t value_rows_;  // of W and U
  const Plan plan_;
};

}  // namespace

Status linear_attention_backward(const LinearAttentionProblem& problem,
                                 const LinearAttentionUpstream& input,
                                 const LinearAttentionGradients& result, const Threads& threads) {
  return with_acc(problem.dtype, [&](auto acc) {
    return Backward<decltype(acc)>(problem, input, result, threads).run();
  });
}

}  // namespace hfla::HFLA_ISA
