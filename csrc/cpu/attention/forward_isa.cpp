// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Each key and value is read once, for all queries of the heads that share it. Blocks that a mask
// hides are left out: of sequences that are packed, each reads its own keys alone.

#include "cpu/attention/head.h"

namespace hfla::HFLA_ISA {
namespace {

template <class Scalar>
class Attention {
  using Acc = AccOf<Scalar>;

 public:
  Attention(const AttentionProblem& p, const Threads& threads)
      : p_(p),
        plan_(p, p.R, p.S, /*together=*/1, threads),
        heads_(plan_, threads),
        group_(p.Hq / p.Hkv) {}

  Status run() const {
    return heads_.run(
        [&](const Scratch<Acc>& s, int64_t head, int64_t part) {
          attend(s, heads_.found(head, part), head, p_.S * part / plan_.parts,
                 p_.S * (part + 1) / plan_.parts);
        },
        [&](int64_t head, const Found<Acc>& all, int64_t row) {
          const Query x = query(head, row);
          heads_.store_y(
              all, row,
              static_cast<Scalar*>(p_.y) + ((x.batch * p_.R + x.time) * p_.Hq + x.head) * p_.V);
        });
  }

 private:
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
    for (int64_t row = 0; row < plan_.rows; ++row) {
      const Query x = query(head, row);
      heads_.stage_query(s, row, row_of<Scalar>(p_.q, x.batch, x.time, x.head), p_.q.dim, p_.scale);
    }
    for (int64_t first = begin; first < end; first += kBlockKeys) {
      const int64_t keys = min(kBlockKeys, end - first);
      const Scalar* const k = row_of<Scalar>(p_.k, head / p_.Hkv, first, head % p_.Hkv);
      const Scalar* const v = row_of<Scalar>(p_.v, head / p_.Hkv, first, head % p_.Hkv);
      for (int64_t tile = 0; tile < plan_.padded; tile += kRows) {
        if (!are_seen(head, tile, first, keys)) continue;
        heads_.score(s, tile, k, p_.k.time, keys, [](int64_t) HFLA_INLINE_LAMBDA {});
        heads_.weigh(s, to, tile, keys, [&](Acc* scores, int64_t row) {
          if (p_.mask_type != MaskType::none) mask(scores, query(head, row), first, keys);
        });
        heads_.add_values(s, to, tile, v, p_.v.time, keys);
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

  const AttentionProblem& p_;
  const Plan plan_;
  const Heads<Scalar> heads_;
  const int64_t group_;
};

}  // namespace

Status attention(const AttentionProblem& problem, const Threads& threads) {
  return with_dtype(problem.dtype, [&](auto scalar) {
    return Attention<decltype(scalar)>(problem, threads).run();
  });
}

}  // namespace hfla::HFLA_ISA
