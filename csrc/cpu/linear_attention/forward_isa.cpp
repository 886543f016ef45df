// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Forward: y_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t + eps), and the state after the last token, as a value
// or in the slot that the state before the first one was in.
//
// A task is one piece of a sequence, some key-value heads and a range of value columns. It sweeps
// over the piece a segment at a time, of one head after the other: stage φ(q), φ(k) and the decays,
// advance the normaliser, scan each block of columns, divide. v is read, and y written, where they
// are if that is possible. Not causal: one sweep that only writes the state, then one that only
// reads it. Of long sequences the sums are those of long_scan.h.
//
// B batch, T time, Hq, Hkv heads, K key dim, V value dim.

#include "cpu/linear_attention/kernels.h"
#include "cpu/linear_attention/long_scan.h"
#include "cpu/linear_attention/rows.h"
#include "cpu/linear_attention/states.h"

namespace hfla::HFLA_ISA {
namespace {

template <class Acc>
struct ForwardScratch {
  int64_t k_stride, v_stride;
  Acc *q, *k;                      // (rows, k_stride)
  Acc *v, *out;                    // (rows, v_stride)
  Acc *decay, *log_decay, *scale;  // (rows,)
  Acc* den_terms;                  // (rows, lanes)
  Sums<Acc> state, z;              // (heads, K v_stride), (heads, k_stride)
  ChunkWeights<Acc> weights;
  Window* windows;  // (heads,)
  const char** prefetch;

  ForwardScratch(Carver& carver, const Plan& plan)
      : k_stride(row_stride<Acc>(plan.sequences.K)),
        v_stride(row_stride<Acc>(plan.sequences.V)),
        state(carver, plan.heads * plan.sequences.K * v_stride, is_long(plan)),
        z(carver, plan.heads * k_stride, is_long(plan)),
        weights(carver, plan.segment.rows, k_stride, is_long(plan)) {
    const int64_t rows = plan.segment.rows, K = plan.sequences.K, V = plan.sequences.V;
    q = carver.take<Acc>(rows * k_stride);
    k = carver.take<Acc>(rows * k_stride);
    v = carver.take<Acc>(rows * v_stride);
    out = carver.take<Acc>(rows * v_stride);
    decay = carver.take<Acc>(rows);
    log_decay = carver.take<Acc>(rows);
    scale = carver.take<Acc>(rows);
    den_terms = carver.take<Acc>(rows * kLanes<Acc>);
    windows = carver.take<Window>(plan.heads);
    prefetch = carver.take<const char*>(
        rows * 2 * (Upcoming::pairs_per_row<Acc>(K) + Upcoming::pairs_per_row<Acc>(V)));
  }
};

template <class Acc>
class Forward {
  using Scratch = ForwardScratch<Acc>;

 public:
  // slots: null, where states are values.
  Forward(const LinearAttentionProblem& p, const LinearAttentionResult& result,
          const LinearAttentionSlots* slots, const Threads& threads)
      : p_(p),
        result_(result),
        slots_(slots),
        threads_(for_decays(threads, p.log_decay.data)),
        value_vectors_(ceil_div(p.V, kLanes<Acc>)),
        plan_(make_plan(p, threads, value_vectors_, /*divides_time=*/true, kLevels)),
        z_before_(slots && p.normalize ? p.num_sequences * p.Hkv * p.K * sizeof(Acc) : 0) {}

  Status run() {
    Carver measured(nullptr);
    PieceStates<Acc>(measured, plan_);
    const Buffer piece_buffer(measured.used());
    Workers<Scratch> workers(threads_, plan_);
    if (!piece_buffer.data() || !z_before_.data() || workers.out_of_memory()) {
      return Status::out_of_memory;
    }
    if (slots_ && has_positive_log_decay<Acc>(p_, *slots_, p_.log_decay, 1, threads_)) {
      return Status::positive_log_decay;
    }
    if (slots_ && p_.normalize) copy_normalizers();
    Carver carver(piece_buffer.data());
    const PieceStates<Acc> pieces(carver, plan_);

    const int64_t tasks = plan_.num_tasks();
    if (plan_.pieces > 1) {
      workers.run(tasks, [&](Scratch& s, int64_t i) { sum_piece(s, pieces, plan_.task(i)); });
      workers.run(p_.num_sequences * p_.Hkv, [&](Scratch&, int64_t i) {
        const int64_t sequence = i / p_.Hkv, head = i % p_.Hkv;
        if (!is_computed(sequence)) return;
        pieces.combine({sequence * plan_.pieces, 1, plan_.pieces}, head,
                       initial_state(sequence, head), p_.is_causal);
      });
    }
    workers.run(tasks, [&](Scratch& s, int64_t i) { attend(s, pieces, plan_.task(i)); });
    return positive_log_decay_ ? Status::positive_log_decay : Status::ok;
  }

 private:
  bool is_computed(int64_t sequence) const { return !slots_ || slot_of(*slots_, sequence) >= 0; }

  State<const Acc> initial_state(int64_t sequence, int64_t head) const {
    if (!slots_) {
      return state_of<const Acc>(p_, p_.initial_kv, p_.normalize ? p_.initial_z : nullptr, sequence,
                                 head);
    }
    const int64_t slot = slot_before(*slots_, sequence);
    if (slot < 0) return {nullptr, nullptr};
    const Acc* const z = reinterpret_cast<const Acc*>(z_before_.data());
    return {in_slot(slot, head).kv, p_.normalize ? z + (sequence * p_.Hkv + head) * p_.K : nullptr};
  }

  State<Acc> final_state(int64_t sequence, int64_t head) const {
    if (slots_) return in_slot(slot_of(*slots_, sequence), head);
    return state_of<Acc>(p_, result_.kv, p_.normalize ? result_.z : nullptr, sequence, head);
  }

  State<Acc> in_slot(int64_t slot, int64_t head) const {
    return {static_cast<Acc*>(slots_->kv) + slot * slots_->kv_slot + head * p_.K * p_.V,
            p_.normalize ? static_cast<Acc*>(slots_->z) + slot * slots_->z_slot + head * p_.K
                         : nullptr};
  }

  // All parts of a head's columns read z before one of them writes it to the slot.
  void copy_normalizers() const {
    const int64_t size = p_.Hkv * p_.K;
    Acc* to = reinterpret_cast<Acc*>(z_before_.data());
    for (int64_t sequence = 0; sequence < p_.num_sequences; ++sequence, to += size) {
      const int64_t slot = slot_before(*slots_, sequence);
      if (slot >= 0) __builtin_memcpy(to, in_slot(slot, 0).z, sizeof(Acc) * size);
    }
  }

  // What a piece's own tokens add to the state, where time is divided.
  void sum_piece(Scratch& s, const PieceStates<Acc>& pieces, const Plan::Task& task) {
    if (!is_computed(plan_.piece(task.piece).sequence)) return;
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      load_state(s, task, head, {nullptr, nullptr});
      if (task.part == 0) pieces.decay(task.piece, head) = 0;
    }
    sweep(Role::write, s, task, task.part == 0 ? &pieces.decay(task.piece, 0) : nullptr);
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      store_state(s, task, head, pieces.at(task.piece, head));
    }
  }

  void attend(Scratch& s, const PieceStates<Acc>& pieces, const Plan::Task& task) {
    const Piece piece = plan_.piece(task.piece);
    if (!is_computed(piece.sequence)) return;
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      if (plan_.pieces > 1) {
        const State<Acc> incoming = pieces.at(task.piece, head);
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
      store_state(s, task, head, final_state(piece.sequence, head));
    }
  }

  Sums<Acc> kv_of(const Scratch& s, const Plan::Task& task, int64_t head) const {
    return s.state.from((head - task.heads.begin) * p_.K * s.v_stride);
  }
  Sums<Acc> z_of(const Scratch& s, const Plan::Task& task, int64_t head) const {
    return s.z.from((head - task.heads.begin) * s.k_stride);
  }
  Window& window_of(const Scratch& s, const Plan::Task& task, int64_t head) const {
    return s.windows[head - task.heads.begin];
  }

  Blocks<Acc> blocks_of(const Scratch& s, const Plan::Task& task, int64_t head) const {
    return {kv_of(s, task, head).now, p_.K, plan_.part(task.part, value_vectors_), kMaxBlock<Acc>};
  }

  void load_state(Scratch& s, const Plan::Task& task, int64_t head, State<const Acc> from) const {
    const Blocks<Acc> kv = blocks_of(s, task, head);
    const Sums<Acc> z = z_of(s, task, head);
    clear_state(kv);
    import_state<Acc>(kv, {from.kv, 0, p_.K, p_.V, p_.V, 1});
    __builtin_memset(z.now, 0, sizeof(Acc) * s.k_stride);
    if (from.z) __builtin_memcpy(z.now, from.z, sizeof(Acc) * p_.K);
    begin_sums(size_of(kv), kv_of(s, task, head));
    begin_sums(s.k_stride, z);
    window_of(s, task, head) = {0, 0};
  }

  // All parts have computed z; the first one stores it.
  void store_state(const Scratch& s, const Plan::Task& task, int64_t head, State<Acc> to) const {
    export_state<Acc>(blocks_of(s, task, head), 1, {to.kv, 0, p_.K, p_.V, p_.V, 1});
    if (to.z && task.part == 0) __builtin_memcpy(to.z, z_of(s, task, head).now, sizeof(Acc) * p_.K);
  }

  void end_window_of(const Scratch& s, const Plan::Task& task, int64_t head, bool now) const {
    end_window(window_of(s, task, head), now, [&](double decay) {
      settle_sums(size_of(blocks_of(s, task, head)), decay, kv_of(s, task, head));
      settle_sums(s.k_stride, decay, z_of(s, task, head));
    });
  }

  // Adds the log decays to total_decays[head] if there are any.
  void sweep(Role role, Scratch& s, const Plan::Task& task, double* total_decays = nullptr) {
    const Columns columns = plan_.part(task.part, value_vectors_);
    const Tensors at = tensors(columns);
    const bool in_levels = is_long(plan_) && writes(role);
    traverse(plan_, plan_.piece(task.piece), task.heads, false,
             [&](const Segment& segment, const Segment& next) {
               const RowArray<const Acc> v = stage(role, s, segment, at);
               const Acc* decay = p_.log_decay.data ? s.decay : nullptr;
               if (decay && total_decays)
                 total_decays[segment.head] += sum_of_log_decays(segment.rows(), s.log_decay);
               const bool y_in_place = reads(role) && in_place<Acc>(p_.dtype, segment, at.y);
               const RowArray<Acc> out = y_in_place ? rows_in_place<Acc>(segment, at.y)
                                                    : RowArray<Acc>{s.out, s.v_stride};
               const Scan<Acc> rows{segment.padded_rows(),
                                    p_.K,
                                    s.q,
                                    s.k,
                                    s.k_stride,
                                    v,
                                    out,
                                    p_.normalize ? s.scale : nullptr,
                                    decay,
                                    upcoming_rows(role, s, next, at)};
               const Sums<Acc> kv = kv_of(s, task, segment.head), z = z_of(s, task, segment.head);
               if (in_levels) {
                 const Acc* const log_decay = decay ? s.log_decay : nullptr;
                 weigh_chunks(role, rows, log_decay, s.weights);
                 window_of(s, task, segment.head).add(rows.count, log_decay);
               }
               if (p_.normalize) {
                 if (in_levels) {
                   scan_long_normalizer(role, rows, s.weights, z, s.scale);
                 } else {
                   scan_normalizer<Acc>(role, {rows.count, p_.K, s.q, s.k, s.k_stride, decay, z.now,
                                               s.den_terms, s.scale});
                 }
                 if (reads(role)) invert_denominators(s, segment, task.part == 0);
               }
               if (in_levels) {
                 scan_long(role, rows, s.weights, columns, kv);
                 end_window_of(s, task, segment.head, false);
               } else {
                 scan(role, rows, columns, kv.now);
               }
               if (reads(role) && !y_in_place) {
                 store_rows<Acc>(p_.dtype, segment, at.y, {s.out, s.v_stride});
               }
             });
    for (int64_t head = task.heads.begin; in_levels && head < task.heads.end; ++head)
      end_window_of(s, task, head, true);
  }

  // The rows that a task reads and writes.
  struct Tensors {
    TensorRows q, k, v, y;
  };

  Tensors tensors(Columns columns) const {
    const int64_t begin = columns.begin * kLanes<Acc>;
    const int64_t end = min(columns.end * kLanes<Acc>, p_.V);
    return {{p_.q, RowsPer::query_head, 0, p_.K},
            {p_.k, RowsPer::token, 0, p_.K},
            {p_.v, RowsPer::token, begin, end},
            {result_.y, RowsPer::query_head, begin, end}};
  }

  Prefetch upcoming_rows(Role role, Scratch& s, const Segment& next, const Tensors& at) const {
    Upcoming upcoming(next, s.prefetch);
    const int64_t bytes = bytes_of(p_.dtype);
    if (reads(role)) {
      upcoming.add(bytes, at.q);
      upcoming.add(bytes, at.y);
    }
    if (writes(role)) {
      upcoming.add(bytes, at.k);
      upcoming.add(bytes, at.v);
    }
    return upcoming.get();
  }

  // Returns where v is.
  RowArray<const Acc> stage(Role role, Scratch& s, const Segment& segment, const Tensors& at) {
    if (reads(role))
      stage_features<Acc>(p_.dtype, segment, at.q, p_.feature_map, {s.q, s.k_stride});
    if (!writes(role)) return {};
    stage_features<Acc>(p_.dtype, segment, at.k, p_.feature_map, {s.k, s.k_stride});
    if (p_.log_decay.data && !stage_decay(segment, p_.log_decay, s.decay, s.log_decay)) {
      __atomic_store_n(&positive_log_decay_, true, __ATOMIC_RELAXED);
    }
    return find_rows<Acc>(p_.dtype, segment, at.v, {s.v, s.v_stride});
  }

  // s.scale: from φ(q)ᵀ z to 1 / (φ(q)ᵀ z + eps). den is kept where it is wanted.
  void invert_denominators(Scratch& s, const Segment& segment, bool store_den) const {
    Acc* const den = static_cast<Acc*>(result_.den);
    for (int64_t row = 0; row < segment.padded_rows(); ++row)
      s.scale[row] += static_cast<Acc>(p_.eps);
    for (int64_t i = 0; den && store_den && i < segment.count; ++i) {
      Acc* const to =
          den + (segment.batch * p_.T + segment.time(i)) * p_.Hq + segment.head * segment.group;
      for (int64_t g = 0; g < segment.group; ++g) to[g] = s.scale[i * segment.group + g];
    }
    for (int64_t row = 0; row < segment.padded_rows(); ++row) s.scale[row] = 1 / s.scale[row];
  }

  const LinearAttentionProblem& p_;
  const LinearAttentionResult& result_;
  const LinearAttentionSlots* const slots_;
  const Threads threads_;
  const int64_t value_vectors_;
  const Plan plan_;
  const Buffer z_before_;  // (num_sequences, Hkv, K), of slots
  bool positive_log_decay_ = false;
};

}  // namespace

Status linear_attention_forward(const LinearAttentionProblem& problem,
                                const LinearAttentionResult& result, const Threads& threads) {
  return with_acc(problem.dtype, [&](auto acc) {
    return Forward<decltype(acc)>(problem, result, nullptr, threads).run();
  });
}

Status linear_attention_forward_in_slots(const LinearAttentionProblem& problem,
                                         const LinearAttentionSlots& slots, const View& y,
                                         const Threads& threads) {
  LinearAttentionResult result{};
  result.y = y;
  return with_acc(problem.dtype, [&](auto acc) {
    return Forward<decltype(acc)>(problem, result, &slots, threads).run();
  });
}

}  // namespace hfla::HFLA_ISA
