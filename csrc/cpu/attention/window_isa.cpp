// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// One token of each row: first all are written, and what they push out is read; then keys are
// attended to, wherever in the ring they are, a block of tokens at a time with all their heads,
// which stand beside each other.

#include "cpu/attention/head.h"

namespace hfla::HFLA_ISA {
namespace {

template <class Scalar>
class WindowStep {
  using Acc = AccOf<Scalar>;

 public:
  WindowStep(const WindowProblem& p, const Threads& threads)
      : p_(p),
        plan_(p, 1, p.window + p.num_sinks, /*together=*/p.Hkv, threads),
        heads_(plan_, threads),
        group_(p.Hq / p.Hkv),
        kv_(p.K + p.V),
        features_(kv_ + p.F) {}

  Status run() const {
    for (int64_t b = 0; b < p_.B; ++b) exchange(b);
    return heads_.run(
        [&](const Scratch<Acc>& s, int64_t first, int64_t part) {
          if (p_.rows[first / p_.Hkv].slot >= 0) attend(s, first / p_.Hkv, part);
        },
        [&](int64_t head, const Found<Acc>& all, int64_t row) {
          const int64_t b = head / p_.Hkv, query = head % p_.Hkv * group_ + row;
          if (p_.rows[b].slot < 0) return;
          Acc* const out = out_of(b);
          heads_.store_y(all, row, out + query * p_.V);
          out[p_.Hq * p_.V + query] = all.largest[row];
          static_cast<Acc*>(p_.total)[b * p_.Hq + query] = all.total[row];
        });
  }

 private:
  // Tokens one behind the other, whose heads have `size` numbers, of keys and values first.
  struct Range {
    const Scalar* first;
    int64_t size, count;
  };

  Acc* out_of(int64_t b) const { return static_cast<Acc*>(p_.out) + b * out_size(p_); }

  Scalar* window_of(const WindowRow& row) const {
    return static_cast<Scalar*>(p_.tokens) + row.slot * p_.tokens_slot;
  }
  Scalar* sinks_of(const WindowRow& row) const {
    return static_cast<Scalar*>(p_.sinks) + row.slot * p_.sinks_slot;
  }

  void exchange(int64_t b) const {
    const WindowRow& row = p_.rows[b];
    Acc* v = out_of(b) + p_.Hq * (p_.V + 1);
    Acc* features = v + p_.Hkv * (p_.V + 1);
    if (row.slot < 0) {
      __builtin_memset(out_of(b), 0, sizeof(Acc) * static_cast<size_t>(out_size(p_)));
      for (int64_t h = 0; h < p_.Hq; ++h) static_cast<Acc*>(p_.total)[b * p_.Hq + h] = 1;
      return;
    }
    const bool leaves = row.count >= p_.window + p_.num_sinks;
    for (int64_t h = 0; h < p_.Hkv; ++h, v += p_.V + 1, features += p_.F) {
      Scalar* const at = window_of(row) + (row.oldest * p_.Hkv + h) * features_;
      copy(v, at + p_.K, p_.V);
      v[p_.V] = 1;
      if (leaves) {
        copy(features, at + kv_, p_.F);
      } else {
        __builtin_memset(features, 0, sizeof(Acc) * static_cast<size_t>(p_.F));
      }
      const Scalar* const token =
          static_cast<const Scalar*>(p_.kvf.data) + b * p_.kvf.batch + h * p_.kvf.head;
      __builtin_memcpy(at, token, sizeof(Scalar) * static_cast<size_t>(features_));
      if (row.count < p_.num_sinks) {
        __builtin_memcpy(sinks_of(row) + (row.count * p_.Hkv + h) * kv_, token,
                         sizeof(Scalar) * static_cast<size_t>(kv_));
      }
    }
  }

  static void copy(Acc* to, const Scalar* from, int64_t numbers) {
    for_each_vector<Acc>(0, numbers, [&](int64_t c, int64_t count) {
      store_vector(to, 1, c, count, load_vector(from, 1, c, count));
    });
  }

  void attend(const Scratch<Acc>& s, int64_t b, int64_t part) const {
    for (int64_t h = 0; h < p_.Hq; ++h) {
      const Scalar* const q =
          static_cast<const Scalar*>(p_.q.data) + b * p_.q.batch + h * p_.q.head;
      heads_.stage_query(s, h / group_ * plan_.padded + h % group_, q, p_.q.dim, p_.scale);
    }
    const WindowRow& row = p_.rows[b];
    const int64_t W = p_.window, seen = min(row.count + 1, W);
    const int64_t begin = seen == W ? 0 : row.oldest + 1 - seen;  // where these do, mod W
    const int64_t at_end = max(0, -begin);                        // of them, behind the others
    const int64_t sinks = max(0, min(p_.num_sinks, row.count + 1 - W));
    const Range ranges[] = {
        {sinks_of(row), kv_, sinks},
        {window_of(row) + max(0, begin) * p_.Hkv * features_, features_, seen - at_end},
        {window_of(row) + (W - at_end) * p_.Hkv * features_, features_, at_end},
    };
    int64_t first = (sinks + seen) * part / plan_.parts;
    int64_t end = (sinks + seen) * (part + 1) / plan_.parts;
    for (const Range& range : ranges) {
      for (int64_t i = max(0, first); i < min(end, range.count); i += kBlockKeys) {
        const int64_t keys = min(kBlockKeys, min(end, range.count) - i);
        attend_block(s, b, part, range.first + i * p_.Hkv * range.size, range.size, keys);
      }
      first -= range.count;
      end -= range.count;
    }
  }

  // Keys and values of tokens that have heads of so many numbers.
  void attend_block(const Scratch<Acc>& s, int64_t b, int64_t part, const Scalar* k, int64_t size,
                    int64_t keys) const {
    const int64_t stride = p_.Hkv * size;
    for (int64_t h = 0; h < p_.Hkv; ++h, k += size) {
      const Found<Acc> to = heads_.found(b * p_.Hkv + h, part);
      for (int64_t tile = 0; tile < plan_.padded; tile += kRows) {
        const auto ask = [&](int64_t key) HFLA_INLINE_LAMBDA {
          if (tile == 0) ask_for_key(k + (keys + key) * stride);
        };
        heads_.score(s, h * plan_.padded + tile, k, stride, keys, ask);
        heads_.weigh(s, to, tile, keys, [](Acc*, int64_t) {});
        heads_.add_values(s, to, tile, k + p_.K, stride, keys);
      }
    }
  }

  // A key and its value of the next block. (GCC leaves out calls that do nothing else.)
  HFLA_INLINE void ask_for_key(const Scalar* k) const {
    for (int64_t c = 0; c < kv_; c += kCacheLine / static_cast<int64_t>(sizeof(Scalar)))
      ask_for(k + c);
  }

  const WindowProblem& p_;
  const Plan plan_;
  const Heads<Scalar> heads_;
  const int64_t group_, kv_, features_;
};

}  // namespace

Status window_step(const WindowProblem& problem, const Threads& threads) {
  return with_dtype(problem.dtype, [&](auto scalar) {
    return WindowStep<decltype(scalar)>(problem, threads).run();
  });
}

}  // namespace hfla::HFLA_ISA
