// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Forward: y_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t + eps), and the state after the last token.
//
// A task is one piece of a sequence, one key-value head and a range of value columns. It sweeps
// over the piece a segment at a time: stage φ(q), φ(k), v and the decays, advance the normaliser,
// scan each block of columns, divide. Not causal: one sweep that only writes the state, then one
// that only reads it.
//
// B batch, T time, Hq, Hkv heads, K key dim, V value dim.

#include "cpu/stage.h"

namespace hfla::HFLA_ISA {
namespace {

template <class Acc>
struct ForwardScratch {
  int64_t k_stride, v_stride;
  Acc *q, *k;    // (rows, k_stride)
  Acc *v, *out;  // (rows, v_stride)
  Acc *decay, *den;
  Acc *state, *z;

  ForwardScratch(Carver& carver, const Problem& p, const SegmentShape& shape)
      : k_stride(shape.stride<Acc>(p.K)), v_stride(shape.stride<Acc>(p.V)) {
    q = carver.take<Acc>(shape.rows * k_stride);
    k = carver.take<Acc>(shape.rows * k_stride);
    v = carver.take<Acc>(shape.rows * v_stride);
    out = carver.take<Acc>(shape.rows * v_stride);
    decay = carver.take<Acc>(shape.rows);
    den = carver.take<Acc>(shape.rows);
    state = carver.take<Acc>(p.K * v_stride);
    z = carver.take<Acc>(k_stride);
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

    const auto run_pieces = [&](auto task) {
      workers.run(plan_.num_pieces(p_) * p_.Hkv * plan_.parts, [&](Scratch& s, int64_t i) {
        const int64_t part = i % plan_.parts, head = i / plan_.parts % p_.Hkv;
        task(s, i / plan_.parts / p_.Hkv, head, part);
      });
    };
    if (plan_.pieces > 1) {
      run_pieces([&](Scratch& s, int64_t piece, int64_t head, int64_t part) {
        sum_piece(s, pieces, piece, head, part);
      });
      workers.run(p_.num_sequences * p_.Hkv, [&](Scratch&, int64_t i) {
        const int64_t sequence = i / p_.Hkv, head = i % p_.Hkv;
        pieces.combine(p_, sequence * plan_.pieces, 1, plan_.pieces, head,
                       initial_state(sequence, head));
      });
    }
    run_pieces([&](Scratch& s, int64_t piece, int64_t head, int64_t part) {
      attend(s, pieces, piece, head, part);
    });
    return positive_log_decay_ ? Status::positive_log_decay : Status::ok;
  }

 private:
  State<const Acc> initial_state(int64_t sequence, int64_t head) const {
    return state_of<const Acc>(p_, p_.initial_kv, p_.normalize ? p_.initial_z : nullptr, sequence,
                               head);
  }

  // What a piece's own tokens add to the state, where time is divided.
  void sum_piece(Scratch& s, const PieceStates<Acc>& pieces, int64_t index, int64_t head,
                 int64_t part) {
    const Columns columns = plan_.part(part, value_vectors_);
    load_state(s, columns, {nullptr, nullptr});
    Acc decay = 1;
    sweep(Role::write, s, plan_.piece(p_, index), head, columns, part == 0, &decay);
    const State<Acc> sum = pieces.at(p_, index, head);
    store_state(s, columns, {sum.kv, part == 0 ? sum.z : nullptr});
    if (part == 0) pieces.decay(p_, index, head) = decay;
  }

  void attend(Scratch& s, const PieceStates<Acc>& pieces, int64_t index, int64_t head,
              int64_t part) {
    const Columns columns = plan_.part(part, value_vectors_);
    const Piece piece = plan_.piece(p_, index);
    if (plan_.pieces > 1) {
      const State<Acc> incoming = pieces.at(p_, index, head);
      load_state(s, columns, {incoming.kv, incoming.z});
    } else {
      load_state(s, columns, initial_state(piece.sequence, head));
    }
    if (p_.is_causal) {
      sweep(Role::write_and_read, s, piece, head, columns, part == 0);
    } else {
      if (plan_.pieces == 1) sweep(Role::write, s, piece, head, columns, part == 0);
      sweep(Role::read, s, piece, head, columns, part == 0);
    }
    if (!piece.last) return;
    const State<Acc> final_state =
        state_of<Acc>(p_, result_.kv, p_.normalize ? result_.z : nullptr, piece.sequence, head);
    store_state(s, columns, {final_state.kv, part == 0 ? final_state.z : nullptr});
  }

  void load_state(Scratch& s, Columns columns, State<const Acc> from) const {
    clear_state(s.state, p_.K, columns);
    import_state<Acc>(s.state, p_.K, 0, p_.K, columns, {from.kv, p_.V, 1, p_.V});
    __builtin_memset(s.z, 0, sizeof(Acc) * s.k_stride);
    if (from.z) __builtin_memcpy(s.z, from.z, sizeof(Acc) * p_.K);
  }

  void store_state(const Scratch& s, Columns columns, State<Acc> to) const {
    export_state<Acc>(s.state, p_.K, 0, p_.K, columns, 1, {to.kv, p_.V, 1, p_.V});
    if (to.z) __builtin_memcpy(to.z, s.z, sizeof(Acc) * p_.K);
  }

  // `first_part`: this task also stores what all parts compute. Multiplies the decays into
  // *total_decay if there is one.
  void sweep(Role role, Scratch& s, const Piece& piece, int64_t head, Columns columns,
             bool first_part, Acc* total_decay = nullptr) {
    for (int64_t offset = 0; offset < piece.length(); offset += shape_.tokens) {
      const Visit visit = visit_segment(p_, piece, head, false, offset, shape_.tokens);
      stage(role, s, visit, columns);
      const Acc* decay = p_.log_decay.data ? s.decay : nullptr;
      if (decay && total_decay) {
        for (int64_t row = 0; row < visit.rows(); ++row) *total_decay *= decay[row];
      }
      if (p_.normalize) {
        scan_normalizer(role, visit, s.q, s.k, s.k_stride, decay, p_.K, s.z, s.den);
      }
      const Upcoming<Scalar> upcoming = upcoming_rows(role, visit, columns);
      scan<Acc>(role,
                {visit.padded_rows(), p_.K, s.q, s.k, s.k_stride, s.v, s.out, s.v_stride,
                 s.v_stride, decay, upcoming.get()},
                columns, s.state);
      if (reads(role)) store_outputs(s, visit, columns, first_part);
    }
  }

  Upcoming<Scalar> upcoming_rows(Role role, const Visit& visit, Columns columns) const {
    const int64_t begin = columns.begin * kLanes<Acc>;
    const int64_t end = min(columns.end * kLanes<Acc>, p_.V);
    Upcoming<Scalar> upcoming(visit);
    if (reads(role)) {
      upcoming.next_reads(p_.q, Rows::per_query, 0, p_.K);
      upcoming.writes(result_.y, Rows::per_query, begin, end);
    }
    if (writes(role)) {
      upcoming.next_reads(p_.k, Rows::per_token, 0, p_.K);
      upcoming.next_reads(p_.v, Rows::per_token, begin, end);
    }
    return upcoming;
  }

  void stage(Role role, Scratch& s, const Visit& visit, Columns columns) {
    if (reads(role)) {
      stage_rows<Scalar>(visit, p_.q, Rows::per_query, p_.feature_map, 0, p_.K, s.q, s.k_stride);
    }
    if (!writes(role)) return;
    stage_rows<Scalar>(visit, p_.k, Rows::per_token, p_.feature_map, 0, p_.K, s.k, s.k_stride);
    stage_rows<Scalar>(visit, p_.v, Rows::per_token, FeatureMap::identity,
                       columns.begin * kLanes<Acc>, min(columns.end * kLanes<Acc>, p_.V), s.v,
                       s.v_stride);
    if (p_.log_decay.data && !stage_decay(visit, s.decay)) {
      __atomic_store_n(&positive_log_decay_, true, __ATOMIC_RELAXED);
    }
  }

  void store_outputs(Scratch& s, const Visit& visit, Columns columns, bool first_part) const {
    const Acc eps = static_cast<Acc>(p_.eps);
    if (p_.normalize && first_part) {
      Acc* const den = static_cast<Acc*>(result_.den);
      for (int64_t i = 0; i < visit.count; ++i) {
        Acc* const to = den + (visit.batch * p_.T + visit.time(i)) * p_.Hq;
        for (int64_t g = 0; g < visit.group; ++g) {
          to[visit.head * visit.group + g] = s.den[i * visit.group + g] + eps;
        }
      }
    }
    const int64_t begin = columns.begin * kLanes<Acc>;
    const int64_t end = min(columns.end * kLanes<Acc>, p_.V);
    unstage_rows<Scalar>(visit, result_.y, Rows::per_query, begin, end,
                         [&](int64_t row, int64_t, int64_t, Scalar* to) {
                           const Acc scale = p_.normalize ? 1 / (s.den[row] + eps) : 1;
                           const Acc* from = s.out + row * s.v_stride;
                           for_each_vector<Acc>(
                               begin, end, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
                                 store_vector(to, result_.y.dim, c, count, load(from + c) * scale);
                               });
                         });
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
