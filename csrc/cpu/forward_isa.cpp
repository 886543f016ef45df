// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Forward: y_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t + eps), and the state after the last token.
//
// A task is one piece of a sequence, some key-value heads and a range of value columns. It sweeps
// over the piece a segment at a time, of one head after the other: stage φ(q), φ(k) and the decays,
// advance the normaliser, scan each block of columns, divide. v is read, and y written, where they
// are if that is possible. Not causal: one sweep that only writes the state, then one that only
// reads it.
//
// B batch, T time, Hq, Hkv heads, K key dim, V value dim.

#include "cpu/stage.h"

namespace hfla::HFLA_ISA {
namespace {

template <class Acc>
struct ForwardScratch {
  int64_t k_stride, v_stride;
  Acc *q, *k;          // (rows, k_stride)
  Acc *v, *out;        // (rows, v_stride)
  Acc *decay, *scale;  // (rows,)
  Acc* den_terms;      // (rows, lanes)
  Acc *state, *z;      // (heads, K v_stride), (heads, k_stride)
  const char** prefetch;

  ForwardScratch(Carver& carver, const Problem& p, const Plan& plan, const SegmentShape& shape)
      : k_stride(shape.stride<Acc>(p.K)), v_stride(shape.stride<Acc>(p.V)) {
    q = carver.take<Acc>(shape.rows * k_stride);
    k = carver.take<Acc>(shape.rows * k_stride);
    v = carver.take<Acc>(shape.rows * v_stride);
    out = carver.take<Acc>(shape.rows * v_stride);
    decay = carver.take<Acc>(shape.rows);
    scale = carver.take<Acc>(shape.rows);
    den_terms = carver.take<Acc>(shape.rows * kLanes<Acc>);
    state = carver.take<Acc>(plan.heads * p.K * v_stride);
    z = carver.take<Acc>(plan.heads * k_stride);
    prefetch = carver.take<const char*>(
        shape.rows * 2 * (Upcoming::pairs_per_row<Acc>(p.K) + Upcoming::pairs_per_row<Acc>(p.V)));
  }
};

template <class Scalar>
class Forward {
  using Acc = AccOf<Scalar>;
  using Scratch = ForwardScratch<Acc>;

 public:
  Forward(const Problem& p, const ForwardResult& result, const Threads& threads)
      : p_(p),
        result_(result),
        threads_(threads),
        value_vectors_(ceil_div(p.V, kLanes<Acc>)),
        plan_(make_plan(p, threads, value_vectors_)),
        shape_(p) {}

  Status run() {
    const Buffer piece_buffer(PieceStates<Acc>::bytes_needed(p_, plan_));
    Workers<Scratch> workers(threads_, plan_, p_, shape_);
    if (!piece_buffer.data() || workers.out_of_memory()) return Status::out_of_memory;
    Carver carver(piece_buffer.data());
    const PieceStates<Acc> pieces(carver, p_, plan_);

    const int64_t tasks = plan_.num_tasks(p_);
    if (plan_.pieces > 1) {
      workers.run(tasks, [&](Scratch& s, int64_t i) { sum_piece(s, pieces, plan_.task(p_, i)); });
      workers.run(p_.num_sequences * p_.Hkv, [&](Scratch&, int64_t i) {
        const int64_t sequence = i / p_.Hkv, head = i % p_.Hkv;
        pieces.combine(p_, sequence * plan_.pieces, 1, plan_.pieces, head,
                       initial_state(sequence, head));
      });
    }
    workers.run(tasks, [&](Scratch& s, int64_t i) { attend(s, pieces, plan_.task(p_, i)); });
    return positive_log_decay_ ? Status::positive_log_decay : Status::ok;
  }

 private:
  State<const Acc> initial_state(int64_t sequence, int64_t head) const {
    return state_of<const Acc>(p_, p_.initial_kv, p_.normalize ? p_.initial_z : nullptr, sequence,
                               head);
  }

  // What a piece's own tokens add to the state, where time is divided.
  void sum_piece(Scratch& s, const PieceStates<Acc>& pieces, const Plan::Task& task) {
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      load_state(s, task, head, {nullptr, nullptr});
      if (task.part == 0) pieces.decay(p_, task.piece, head) = 1;
    }
    sweep(Role::write, s, task, task.part == 0 ? &pieces.decay(p_, task.piece, 0) : nullptr);
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      store_state(s, task, head, pieces.at(p_, task.piece, head));
    }
  }

  void attend(Scratch& s, const PieceStates<Acc>& pieces, const Plan::Task& task) {
    const Piece piece = plan_.piece(p_, task.piece);
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      if (plan_.pieces > 1) {
        const State<Acc> incoming = pieces.at(p_, task.piece, head);
        load_state(s, task, head, {incoming.kv, incoming.z});
      } else {
        load_state(s, task, head, initial_state(piece.sequence, head));
      }
    }
    if (p_.is_causal) {
      sweep(Role::write_and_read, s, task);
    } else {
      if (plan_.pieces == 1) sweep(Role::write, s, task);
      sweep(Role::read, s, task);
    }
    for (int64_t head = task.heads.begin; piece.last && head < task.heads.end; ++head) {
      store_state(
          s, task, head,
          state_of<Acc>(p_, result_.kv, p_.normalize ? result_.z : nullptr, piece.sequence, head));
    }
  }

  Acc* kv_of(const Scratch& s, const Plan::Task& task, int64_t head) const {
    return s.state + (head - task.heads.begin) * p_.K * s.v_stride;
  }
  Acc* z_of(const Scratch& s, const Plan::Task& task, int64_t head) const {
    return s.z + (head - task.heads.begin) * s.k_stride;
  }

  void load_state(Scratch& s, const Plan::Task& task, int64_t head, State<const Acc> from) const {
    const Columns columns = plan_.part(task.part, value_vectors_);
    Acc *const kv = kv_of(s, task, head), *const z = z_of(s, task, head);
    clear_state(kv, p_.K, columns);
    import_state<Acc>(kv, p_.K, 0, p_.K, columns, {from.kv, p_.V, 1, p_.V});
    __builtin_memset(z, 0, sizeof(Acc) * s.k_stride);
    if (from.z) __builtin_memcpy(z, from.z, sizeof(Acc) * p_.K);
  }

  // All parts have computed z; the first one stores it.
  void store_state(const Scratch& s, const Plan::Task& task, int64_t head, State<Acc> to) const {
    export_state<Acc>(kv_of(s, task, head), p_.K, 0, p_.K, plan_.part(task.part, value_vectors_), 1,
                      {to.kv, p_.V, 1, p_.V});
    if (to.z && task.part == 0) __builtin_memcpy(to.z, z_of(s, task, head), sizeof(Acc) * p_.K);
  }

  // Multiplies the decays into total_decays[head] if there are any.
  void sweep(Role role, Scratch& s, const Plan::Task& task, Acc* total_decays = nullptr) {
    const Columns columns = plan_.part(task.part, value_vectors_);
    const int64_t begin = columns.begin * kLanes<Acc>;
    const int64_t end = min(columns.end * kLanes<Acc>, p_.V);
    for_each_visit(
        p_, plan_.piece(p_, task.piece), task.heads, false, shape_.tokens,
        [&](const Visit& visit, const Visit& next) {
          const RowArray<const Acc> v = stage(role, s, visit, begin, end);
          const Acc* decay = p_.log_decay.data ? s.decay : nullptr;
          for (int64_t row = 0; decay && total_decays && row < visit.rows(); ++row) {
            total_decays[visit.head] *= decay[row];
          }
          if (p_.normalize) {
            scan_normalizer(role, visit.padded_rows(), s.q, s.k, s.k_stride, decay, p_.K,
                            z_of(s, task, visit.head), s.den_terms, s.scale);
            if (reads(role)) invert_denominators(s, visit, task.part == 0);
          }
          const bool y_in_place = reads(role) && in_place<Scalar>(visit, result_.y, begin, end);
          const RowArray<Acc> out =
              y_in_place ? rows_in_place<Acc, Scalar>(visit, result_.y, Rows::per_query)
                         : RowArray<Acc>{s.out, s.v_stride};
          scan<Acc>(role,
                    {visit.padded_rows(), p_.K, s.q, s.k, s.k_stride, v.data, out.data, v.stride,
                     out.stride, p_.normalize ? s.scale : nullptr, decay,
                     upcoming_rows(role, s, next, begin, end)},
                    columns, kv_of(s, task, visit.head));
          if (reads(role) && !y_in_place) {
            store_rows<Scalar>(visit, result_.y, Rows::per_query, begin, end, s.out, s.v_stride);
          }
        });
  }

  Prefetch upcoming_rows(Role role, Scratch& s, const Visit& next, int64_t begin,
                         int64_t end) const {
    Upcoming upcoming(next, s.prefetch);
    if (reads(role)) {
      upcoming.add<Scalar>(p_.q, Rows::per_query, 0, p_.K);
      upcoming.add<Scalar>(result_.y, Rows::per_query, begin, end);
    }
    if (writes(role)) {
      upcoming.add<Scalar>(p_.k, Rows::per_token, 0, p_.K);
      upcoming.add<Scalar>(p_.v, Rows::per_token, begin, end);
    }
    return upcoming.get();
  }

  // Returns where v is.
  RowArray<const Acc> stage(Role role, Scratch& s, const Visit& visit, int64_t begin, int64_t end) {
    if (reads(role)) {
      stage_rows<Scalar>(visit, p_.q, Rows::per_query, p_.feature_map, 0, p_.K, s.q, s.k_stride);
    }
    if (!writes(role)) return {};
    stage_rows<Scalar>(visit, p_.k, Rows::per_token, p_.feature_map, 0, p_.K, s.k, s.k_stride);
    if (p_.log_decay.data && !stage_decay(visit, s.decay)) {
      __atomic_store_n(&positive_log_decay_, true, __ATOMIC_RELAXED);
    }
    if (in_place<Scalar>(visit, p_.v, begin, end)) {
      return rows_in_place<const Acc, const Scalar>(visit, p_.v, Rows::per_token);
    }
    stage_rows<Scalar>(visit, p_.v, Rows::per_token, FeatureMap::identity, begin, end, s.v,
                       s.v_stride);
    return {s.v, s.v_stride};
  }

  // s.scale: from φ(q)ᵀ z to 1 / (φ(q)ᵀ z + eps).
  void invert_denominators(Scratch& s, const Visit& visit, bool store_den) const {
    Acc* const den = static_cast<Acc*>(result_.den);
    for (int64_t row = 0; row < visit.padded_rows(); ++row)
      s.scale[row] += static_cast<Acc>(p_.eps);
    for (int64_t i = 0; store_den && i < visit.count; ++i) {
      Acc* const to = den + (visit.batch * p_.T + visit.time(i)) * p_.Hq + visit.head * visit.group;
      for (int64_t g = 0; g < visit.group; ++g) to[g] = s.scale[i * visit.group + g];
    }
    for (int64_t row = 0; row < visit.padded_rows(); ++row) s.scale[row] = 1 / s.scale[row];
  }

  const Problem& p_;
  const ForwardResult& result_;
  const Threads& threads_;
  const int64_t value_vectors_;
  const Plan plan_;
  const SegmentShape shape_;
  bool positive_log_decay_ = false;
};

}  // namespace

Status forward(const Problem& problem, const ForwardResult& result, const Threads& threads) {
  switch (problem.dtype) {
    case DType::f32:
      return Forward<float>(problem, result, threads).run();
    case DType::bf16:
      return Forward<BFloat16>(problem, result, threads).run();
    case DType::f16:
      return Forward<Float16>(problem, result, threads).run();
    case DType::f64:
      return Forward<double>(problem, result, threads).run();
  }
  __builtin_unreachable();
}

}  // namespace hfla::HFLA_ISA
