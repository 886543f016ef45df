// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What queries that share a head find among its keys: a block of these at a time, the scores, and
// the values added up with weights that are relative to the largest score so far. What was found
// in several ranges of keys is put together at the end.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867.
#pragma once

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

// A task is a range of the keys of one head, or of several whose keys are read together.
struct Plan {
  int64_t K, V;
  int64_t rows;    // queries that read one head's keys
  int64_t padded;  // these up to a multiple of kRows
  int64_t heads;   // of all batch rows
  int64_t together;
  int64_t parts;  // ranges of the keys
  int64_t workers;

  // R queries of each head, S keys.
  Plan(const HeadSizes& p, int64_t R, int64_t S, int64_t together, const Threads& threads)
      : K(p.K),
        V(p.V),
        rows(p.Hq / p.Hkv * R),
        padded(round_up(rows, kRows)),
        heads(p.B * p.Hkv),
        together(together),
        workers(1) {
    if (p.B * p.Hq * R * S * (p.K + p.V) >= threads.serial_work) workers = max(1, threads.count);
    const int64_t wanted = workers == 1 ? 1 : ceil_div(kTasksPerThread * workers, groups());
    parts = max(1, min(wanted, S * together / kMinKeys));
  }

  int64_t groups() const { return heads / together; }
};

// Of a head's queries over a range of keys.
template <class Acc>
struct Found {
  Acc* sums;             // (padded, stride of V): values, weighted
  Acc *largest, *total;  // (padded,): of scores, and of weights

  Found(Carver& carver, const Plan& plan)
      : sums(carver.take<Acc>(plan.padded * round_up(plan.V, kLanes<Acc>))),
        largest(carver.take<Acc>(plan.padded)),
        total(carver.take<Acc>(plan.padded)) {}
};

template <class Acc>
struct Scratch {
  Acc* q;       // (together, padded, stride of K): scaled
  Acc* scores;  // (kRows, kBlockKeys): scores, then weights

  Scratch(Carver& carver, const Plan& plan)
      : q(carver.take<Acc>(plan.together * plan.padded * round_up(plan.K, kLanes<Acc>))),
        scores(carver.take<Acc>(kRows * kBlockKeys)) {}
};

// No score is less, but -inf.
template <class Acc>
constexpr Acc kLeast =
    sizeof(Acc) == sizeof(float) ? Acc(-3.4028234663852886e38) : Acc(-1.7976931348623157e308);

template <class Scalar>
class Heads {
  using Acc = AccOf<Scalar>;
  static constexpr int64_t W = kLanes<Acc>;

 public:
  Heads(const Plan& plan, const Threads& threads)
      : plan_(plan),
        threads_(threads),
        q_stride_(round_up(plan.K, W)),
        v_stride_(round_up(plan.V, W)),
        scratch_bytes_(bytes_needed<Scratch<Acc>>(plan)),
        found_bytes_(bytes_needed<Found<Acc>>(plan)),
        scratch_(plan.workers * scratch_bytes_),
        found_(plan.heads * plan.parts * found_bytes_) {}

  // Calls attend(scratch, first head, part) for all parts of all heads, and then finish(head,
  // found, row) for each query, with what all parts found.
  template <class Attend, class Finish>
  Status run(Attend attend, Finish finish) const {
    if (!scratch_.data() || !found_.data()) return Status::out_of_memory;
    const int64_t tasks = plan_.groups() * plan_.parts;
    run_tasks(threads_, plan_.workers, tasks, [&](int64_t worker, int64_t i) {
      Carver carver(scratch_.data() + worker * scratch_bytes_);
      const Scratch<Acc> s(carver, plan_);
      const int64_t first = i / plan_.parts * plan_.together, part = i % plan_.parts;
      __builtin_memset(s.q, 0, sizeof(Acc) * size_t(plan_.together * plan_.padded * q_stride_));
      for (int64_t head = first; head < first + plan_.together; ++head) {
        const Found<Acc> to = found(head, part);
        __builtin_memset(to.sums, 0, sizeof(Acc) * size_t(plan_.padded * v_stride_));
        for (int64_t row = 0; row < plan_.padded; ++row) {
          to.largest[row] = kLeast<Acc>;
          to.total[row] = 0;
        }
      }
      attend(s, first, part);
    });
    run_tasks(threads_, plan_.workers, plan_.heads, [&](int64_t, int64_t head) {
      for (int64_t row = 0; row < plan_.rows; ++row) finish(head, join_parts(head, row), row);
    });
    return Status::ok;
  }

  Found<Acc> found(int64_t head, int64_t part) const {
    Carver carver(found_.data() + (head * plan_.parts + part) * found_bytes_);
    return Found<Acc>(carver, plan_);
  }

  // Rows of queries count on from one head of a task to the next.
  void stage_query(const Scratch<Acc>& s, int64_t row, const Scalar* q, int64_t stride,
                   double scale) const {
    for_each_vector<Acc>(0, plan_.K, [&](int64_t c, int64_t count) {
      store(s.q + row * q_stride_ + c, static_cast<Acc>(scale) * load_vector(q, stride, c, count));
    });
  }

  // Of kRows queries from `row` on, with a block of keys that are `stride` apart; meanwhile calls
  // ask(key) for each of them.
  template <class Ask>
  void score(const Scratch<Acc>& s, int64_t row, const Scalar* k, int64_t stride, int64_t keys,
             Ask ask) const {
    const Acc* const q = s.q + row * q_stride_;
    int64_t key = 0;
    for (; key + kKeys <= keys; key += kKeys) {
      for (int64_t i = 0; i < kKeys; ++i) ask(key + i);
      score_tile<kKeys>(q, k + key * stride, stride, s.scores + key);
    }
    for (; key < keys; ++key) score_tile<1>(q, k + key * stride, stride, s.scores + key);
  }

  // From scores, which mask(scores, row) may change, to weights; sums so far are scaled where there
  // is a larger score.
  template <class Mask>
  void weigh(const Scratch<Acc>& s, const Found<Acc>& to, int64_t tile, int64_t keys,
             Mask mask) const {
    const int64_t count = min(kRows, plan_.rows - tile);
    for (int64_t row = tile; row < tile + count; ++row) {
      Acc* const scores = s.scores + (row - tile) * kBlockKeys;
      mask(scores, row);
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

  void add_values(const Scratch<Acc>& s, const Found<Acc>& to, int64_t row, const Scalar* v,
                  int64_t stride, int64_t keys) const {
    Acc* const sums = to.sums + row * v_stride_;
    int64_t c = 0;
    for (; c + kVectors * W <= plan_.V; c += kVectors * W)
      add_value_columns<kVectors, false>(s.scores, v, stride, keys, c, sums);
    for (; c + W <= plan_.V; c += W)
      add_value_columns<1, false>(s.scores, v, stride, keys, c, sums);
    if (c < plan_.V) add_value_columns<1, true>(s.scores, v, stride, keys, c, sums);
  }

  // y (V,) of a query whose weighted values were found.
  template <class Out>
  void store_y(const Found<Acc>& all, int64_t row, Out* y) const {
    const Acc total = all.total[row];
    const Acc factor = total > 0 ? 1 / total : total;  // 0, where nothing is seen; or NaN
    for_each_vector<Acc>(0, plan_.V, [&](int64_t c, int64_t count) {
      store_vector(y, 1, c, count, factor * load(all.sums + row * v_stride_ + c));
    });
  }

 private:
  // What all parts found for a query, where the first had its own, in an order that depends on the
  // shapes and the number of threads only.
  Found<Acc> join_parts(int64_t head, int64_t row) const {
    const Found<Acc> all = found(head, 0);
    Acc largest = kLeast<Acc>, total = 0;
    for (int64_t part = 0; part < plan_.parts; ++part)
      largest = most(largest, found(head, part).largest[row]);
    Acc* const sums = all.sums + row * v_stride_;
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
    all.largest[row] = largest;
    all.total[row] = total;
    return all;
  }

  template <int keys>
  HFLA_INLINE void score_tile(const Acc* q, const Scalar* k, int64_t stride, Acc* scores) const {
    Vec<Acc> dots[kRows][keys] = {};
    const auto add = [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      Vec<Acc> x[keys];
      HFLA_UNROLL
      for (int i = 0; i < keys; ++i) x[i] = load_vector(k + i * stride, 1, c, count);
      HFLA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const Vec<Acc> of_query = load(q + r * q_stride_ + c);
        HFLA_UNROLL
        for (int i = 0; i < keys; ++i) dots[r][i] += of_query * x[i];
      }
    };
    for_each_vector<Acc>(0, plan_.K, add);
    for_sums_of_lanes<Acc>(
        dots, [&](int r, int i, Acc sum) HFLA_INLINE_LAMBDA { scores[r * kBlockKeys + i] = sum; });
  }

  template <int vectors, bool partial>
  HFLA_INLINE void add_value_columns(const Acc* weights, const Scalar* v, int64_t stride,
                                     int64_t keys, int64_t c, Acc* sums) const {
    Vec<Acc> sum[kRows][vectors];
    HFLA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      HFLA_UNROLL
      for (int i = 0; i < vectors; ++i) sum[r][i] = load(sums + r * v_stride_ + c + i * W);
    }
    for (int64_t key = 0; key < keys; ++key) {
      const Scalar* const from = v + key * stride + c;
      Vec<Acc> x[vectors];
      HFLA_UNROLL
      for (int i = 0; i < vectors; ++i)
        x[i] = partial ? load_some(from, 1, plan_.V - c) : load(from + i * W);
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

  const Plan plan_;
  const Threads threads_;
  const int64_t q_stride_, v_stride_, scratch_bytes_, found_bytes_;
  const Buffer scratch_, found_;
};

}  // namespace
}  // namespace hfla::HFLA_ISA
