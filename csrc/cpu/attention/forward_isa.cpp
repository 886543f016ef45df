// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Each key and value is read once, for all queries of the heads that share it. A task is a range of
// the keys of one head; a block of them at a time, it takes the scores, and adds up the values with
// weights that are relative to the largest score so far. Blocks that a mask hides are left out: of
// sequences that are packed, each reads its own keys alone. What the tasks of a head found is put
// together at the end, in an order that depends on the shapes and the number of threads only.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867.

#include "cpu/attention/kernels.h"
#include "cpu/common/exp.h"
#include "cpu/common/memory.h"
#include "cpu/common/sums_of_lanes.h"
#include "cpu/common/tasks.h"
#include "cpu/common/vec.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kBlockKeys = 64;
constexpr int64_t kMinKeys = 256;  // of a task
constexpr int64_t kTasksPerThread = 2;
constexpr int kRows = 4;                             // queries that are computed together
constexpr int kKeys = kHasManyRegisters ? 4 : 2;     // keys, for scores
constexpr int kVectors = kHasManyRegisters ? 4 : 2;  // of values
static_assert(kBlockKeys % kKeys == 0);

struct Plan {
  const AttentionProblem& p;
  int64_t rows;    // queries that read one head's keys
  int64_t padded;  // these up to a multiple of kRows
  int64_t parts;   // ranges of the keys
  int64_t workers;

  Plan(const AttentionProblem& p, const Threads& threads)
      : p(p), rows(p.Hq / p.Hkv * p.R), padded(round_up(rows, kRows)), workers(1) {
    if (p.B * p.Hq * p.R * p.S * (p.K + p.V) >= threads.serial_work)
      workers = max(1, threads.count);
    const int64_t wanted = workers == 1 ? 1 : ceil_div(kTasksPerThread * workers, p.B * p.Hkv);
    parts = max(1, min(wanted, p.S / kMinKeys));
  }
};

// Of a head's queries over a range of keys.
template <class Acc>
struct Found {
  Acc* sums;             // (padded, stride of V): values, weighted
  Acc *largest, *total;  // (padded,): of scores, and of weights

  Found(Carver& carver, const Plan& plan)
      : sums(carver.take<Acc>(plan.padded * stride(plan.p))),
        largest(carver.take<Acc>(plan.padded)),
        total(carver.take<Acc>(plan.padded)) {}

  static int64_t stride(const AttentionProblem& p) { return round_up(p.V, kLanes<Acc>); }
};

template <class Acc>
struct Scratch {
  Acc* q;       // (padded, stride of K): scaled
  Acc* scores;  // (kRows, kBlockKeys): scores, then weights

  Scratch(Carver& carver, const Plan& plan)
      : q(carver.take<Acc>(plan.padded * round_up(plan.p.K, kLanes<Acc>))),
        scores(carver.take<Acc>(kRows * kBlockKeys)) {}
};

// No score is less, but -inf.
template <class Acc>
constexpr Acc kLeast =
    sizeof(Acc) == sizeof(float) ? Acc(-3.4028234663852886e38) : Acc(-1.7976931348623157e308);

template <class Scalar>
class Attention {
  using Acc = AccOf<Scalar>;
  static constexpr int64_t W = kLanes<Acc>;

 public:
  Attention(const AttentionProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        plan_(p, threads),
        group_(p.Hq / p.Hkv),
        q_stride_(round_up(p.K, W)),
        v_stride_(Found<Acc>::stride(p)),
        scratch_bytes_(bytes_needed<Scratch<Acc>>(plan_)),
        found_bytes_(bytes_needed<Found<Acc>>(plan_)),
        scratch_(plan_.workers * scratch_bytes_),
        found_(p.B * p.Hkv * plan_.parts * found_bytes_) {}

  Status run() {
    if (!scratch_.data() || !found_.data()) return Status::out_of_memory;
    const int64_t heads = p_.B * p_.Hkv;
    run_tasks(threads_, plan_.workers, heads * plan_.parts, [&](int64_t worker, int64_t i) {
      Carver carver(scratch_.data() + worker * scratch_bytes_);
      const Scratch<Acc> s(carver, plan_);
      const int64_t head = i / plan_.parts, part = i % plan_.parts;
      attend(s, found(head, part), head, p_.S * part / plan_.parts,
             p_.S * (part + 1) / plan_.parts);
    });
    run_tasks(threads_, plan_.workers, heads, [&](int64_t, int64_t head) { finish(head); });
    return Status::ok;
  }

 private:
  Found<Acc> found(int64_t head, int64_t part) const {
    Carver carver(found_.data() + (head * plan_.parts + part) * found_bytes_);
    return Found<Acc>(carver, plan_);
  }

  // A query of a head of the keys: of which head, and which one. Those of one time, which a mask
  // mostly treats alike, stand together.
  struct Query {
    int64_t batch, head, time;
  };
  Query query(int64_t head, int64_t row) const {
    return {head / p_.Hkv, head % p_.Hkv * group_ + row % group_, row / group_};
  }

  template <class T>
  static const T* row_of(const View& view, int64_t batch, int64_t time, int64_t head) {
    return static_cast<const T*>(view.data) + batch * view.batch + time * view.time +
           head * view.head;
  }

  void attend(const Scratch<Acc>& s, const Found<Acc>& to, int64_t head, int64_t begin,
              int64_t end) const {
    stage_queries(s, head);
    __builtin_memset(to.sums, 0, sizeof(Acc) * static_cast<size_t>(plan_.padded * v_stride_));
    for (int64_t row = 0; row < plan_.padded; ++row) {
      to.largest[row] = kLeast<Acc>;
      to.total[row] = 0;
    }
    for (int64_t first = begin; first < end; first += kBlockKeys) {
      const int64_t keys = min(kBlockKeys, end - first);
      for (int64_t row = 0; row < plan_.padded; row += kRows) {
        if (!are_seen(head, row, first, keys)) continue;
        score(s, head, row, first, keys);
        weigh(s, to, head, row, first, keys);
        add_values(s, to, head, row, first, keys);
      }
    }
  }

  // Whether one of kRows queries from `row` on sees one of the keys, as far as a mask of bools
  // says.
  bool are_seen(int64_t head, int64_t row, int64_t first, int64_t keys) const {
    if (p_.mask_type != MaskType::kept) return true;
    bool seen = false;
    for (const int64_t end = min(row + kRows, plan_.rows); row < end && !seen; ++row) {
      const Query x = query(head, row);
      const bool* const kept = row_of<bool>(p_.mask, x.batch, x.time, x.head);
      for (int64_t i = first; i < first + keys; ++i) seen |= kept[i * p_.mask.dim];
    }
    return seen;
  }

  void stage_queries(const Scratch<Acc>& s, int64_t head) const {
    __builtin_memset(s.q, 0, sizeof(Acc) * static_cast<size_t>(plan_.padded * q_stride_));
    for (int64_t row = 0; row < plan_.rows; ++row) {
      const Query x = query(head, row);
      const Scalar* const from = row_of<Scalar>(p_.q, x.batch, x.time, x.head);
      for_each_vector<Acc>(0, p_.K, [&](int64_t c, int64_t count) {
        store(s.q + row * q_stride_ + c,
              static_cast<Acc>(p_.scale) * load_vector(from, p_.q.dim, c, count));
      });
    }
  }

  void score(const Scratch<Acc>& s, int64_t head, int64_t row, int64_t first, int64_t keys) const {
    const Scalar* const k = row_of<Scalar>(p_.k, head / p_.Hkv, first, head % p_.Hkv);
    const Acc* const q = s.q + row * q_stride_;
    int64_t key = 0;
    for (; key + kKeys <= keys; key += kKeys)
      score_tile<kKeys>(q, k + key * p_.k.time, s.scores + key);
    for (; key < keys; ++key) score_tile<1>(q, k + key * p_.k.time, s.scores + key);
  }

  template <int keys>
  HFLA_INLINE void score_tile(const Acc* q, const Scalar* k, Acc* scores) const {
    Vec<Acc> dots[kRows][keys] = {};
    const auto add = [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      Vec<Acc> x[keys];
      HFLA_UNROLL
      for (int i = 0; i < keys; ++i) x[i] = load_vector(k + i * p_.k.time, 1, c, count);
      HFLA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const Vec<Acc> of_query = load(q + r * q_stride_ + c);
        HFLA_UNROLL
        for (int i = 0; i < keys; ++i) dots[r][i] += of_query * x[i];
      }
    };
    for_each_vector<Acc>(0, p_.K, add);
    for_sums_of_lanes<Acc>(
        dots, [&](int r, int i, Acc sum) HFLA_INLINE_LAMBDA { scores[r * kBlockKeys + i] = sum; });
  }

  // From scores to weights; sums so far are scaled where there is a larger score.
  void weigh(const Scratch<Acc>& s, const Found<Acc>& to, int64_t head, int64_t tile, int64_t first,
             int64_t keys) const {
    const int64_t count = min(kRows, plan_.rows - tile);
    for (int64_t row = tile; row < tile + count; ++row) {
      Acc* const scores = s.scores + (row - tile) * kBlockKeys;
      if (p_.mask_type != MaskType::none) mask(scores, query(head, row), first, keys);
      for (int64_t i = keys; i < round_up(keys, W); ++i) scores[i] = -__builtin_inf();
      Vec<Acc> largest_of = broadcast(to.largest[row]);
      for (int64_t i = 0; i < keys; i += W) {
        const Vec<Acc> x = load(scores + i);
        largest_of = select(x > largest_of, x, largest_of);
      }
      Acc largest = largest_of[0];
      for (int64_t lane = 1; lane < W; ++lane) largest = most(largest, largest_of[lane]);
      if (largest > to.largest[row]) {
        const Acc less = exp(broadcast(to.largest[row] - largest))[0];
        Acc* const sums = to.sums + row * v_stride_;
        for (int64_t c = 0; c < v_stride_; c += W) store(sums + c, less * load(sums + c));
        to.total[row] *= less;
        to.largest[row] = largest;
      }
      Vec<Acc> total{};
      for (int64_t i = 0; i < keys; i += W) {
        const Vec<Acc> weight = exp(load(scores + i) - largest);
        total += weight;
        store(scores + i, weight);
      }
      to.total[row] += sum<Acc>(total);
    }
    for (int64_t row = count; row < kRows; ++row)  // of no query
      __builtin_memset(s.scores + row * kBlockKeys, 0, sizeof(Acc) * kBlockKeys);
  }

  void mask(Acc* scores, const Query& x, int64_t first, int64_t keys) const {
    if (p_.mask_type == MaskType::kept) {
      const bool* const seen = row_of<bool>(p_.mask, x.batch, x.time, x.head) + first * p_.mask.dim;
      for (int64_t i = 0; i < keys; ++i) {
        if (!seen[i * p_.mask.dim]) scores[i] = -__builtin_inf();
      }
    } else {
      const Scalar* const added =
          row_of<Scalar>(p_.mask, x.batch, x.time, x.head) + first * p_.mask.dim;
      for_each_vector<Acc>(0, keys, [&](int64_t c, int64_t count) {
        store(scores + c, load(scores + c) + load_vector(added, p_.mask.dim, c, count));
      });
    }
  }

  void add_values(const Scratch<Acc>& s, const Found<Acc>& to, int64_t head, int64_t row,
                  int64_t first, int64_t keys) const {
    const Scalar* const v = row_of<Scalar>(p_.v, head / p_.Hkv, first, head % p_.Hkv);
    Acc* const sums = to.sums + row * v_stride_;
    int64_t c = 0;
    for (; c + kVectors * W <= p_.V; c += kVectors * W)
      add_value_columns<kVectors, false>(s.scores, v, keys, c, sums);
    for (; c + W <= p_.V; c += W) add_value_columns<1, false>(s.scores, v, keys, c, sums);
    if (c < p_.V) add_value_columns<1, true>(s.scores, v, keys, c, sums);
  }

  template <int vectors, bool partial>
  HFLA_INLINE void add_value_columns(const Acc* weights, const Scalar* v, int64_t keys, int64_t c,
                                     Acc* sums) const {
    Vec<Acc> sum[kRows][vectors];
    HFLA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      HFLA_UNROLL
      for (int i = 0; i < vectors; ++i) sum[r][i] = load(sums + r * v_stride_ + c + i * W);
    }
    for (int64_t key = 0; key < keys; ++key) {
      const Scalar* const from = v + key * p_.v.time + c;
      Vec<Acc> x[vectors];
      HFLA_UNROLL
      for (int i = 0; i < vectors; ++i)
        x[i] = partial ? load_some(from, 1, p_.V - c) : load(from + i * W);
      HFLA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const Acc weight = weights[r * kBlockKeys + key];
        HFLA_UNROLL
        for (int i = 0; i < vectors; ++i) sum[r][i] += weight * x[i];
      }
    }
    HFLA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      HFLA_UNROLL
      for (int i = 0; i < vectors; ++i) store(sums + r * v_stride_ + c + i * W, sum[r][i]);
    }
  }

  static Acc most(Acc a, Acc b) { return a > b ? a : b; }

  // A head's y from what its tasks found.
  void finish(int64_t head) const {
    for (int64_t row = 0; row < plan_.rows; ++row) {
      const Query x = query(head, row);
      Acc largest = kLeast<Acc>, total = 0;
      for (int64_t part = 0; part < plan_.parts; ++part)
        largest = most(largest, found(head, part).largest[row]);
      Scalar* const y =
          static_cast<Scalar*>(p_.y) + ((x.batch * p_.R + x.time) * p_.Hq + x.head) * p_.V;
      const Found<Acc> to = found(head, 0);
      Acc* const sums = to.sums + row * v_stride_;
      for (int64_t part = 0; part < plan_.parts; ++part) {
        const Found<Acc> of_part = found(head, part);
        const Acc share = exp(broadcast(of_part.largest[row] - largest))[0];
        total += share * of_part.total[row];
        const Acc* const from = of_part.sums + row * v_stride_;
        for (int64_t c = 0; c < v_stride_; c += W) {
          const Vec<Acc> more = share * load(from + c);
          store(sums + c, part == 0 ? more : load(sums + c) + more);
        }
      }
      const Acc factor = total > 0 ? 1 / total : total;  // 0, where nothing is seen; or NaN
      for_each_vector<Acc>(0, p_.V, [&](int64_t c, int64_t count) {
        store_vector(y, 1, c, count, factor * load(sums + c));
      });
    }
  }

  const AttentionProblem& p_;
  const Threads threads_;
  const Plan plan_;
  const int64_t group_, q_stride_, v_stride_, scratch_bytes_, found_bytes_;
  const Buffer scratch_, found_;
};

}  // namespace

Status attention(const AttentionProblem& problem, const Threads& threads) {
  return with_dtype(problem.dtype, [&](auto scalar) {
    return Attention<decltype(scalar)>(problem, threads).run();
  });
}

}  // namespace hfla::HFLA_ISA
