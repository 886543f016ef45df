// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What goes into the sums of a block at a token, and its gradients: of the elementwise scan, which
// is given it, and of the RG-LRU, which makes it of gates.
#pragma once

#include "cpu/elementwise_scan/blocks.h"
#include "cpu/sequences/long_sums.h"

namespace hfla::HFLA_ISA {
namespace {

// h is decayed, and x added. `lost` is 1 - decay; `kept` are rows that gradients are made of.
template <class Acc, int rows>
struct Input {
  Vec<Acc> log_decay, decay, lost, x;
  Vec<Acc> kept[rows ? rows : 1];
};

// h, in its place; rest: of long sequences, what its roundings have lost.
template <bool is_long, class Acc, int rows>
HFLA_INLINE Vec<Acc> add_to_sums(const Input<Acc, rows>& input, Acc* state, Acc* rest) {
  Vec<Acc> h = load(state);
  if constexpr (is_long) {
    Vec<Acc> lost_before = load(rest);
    decay_and_add(h, lost_before, input.decay, input.lost, input.x);
    store(rest, lost_before);
  } else {
    h = input.decay * h + input.x;
  }
  store(state, h);
  return h;
}

// The gradient of h, and what made h.
template <class Acc>
struct OfSum {
  Vec<Acc> G, decay, decayed;  // decayed: what the token left of the sum before it
};

// Of a block of channels.
template <class Acc>
struct OverTokens {
  Acc *sums, *rests;  // rests: what the sums' roundings have lost
};

template <class Scalar>
class GivenInputs {
  using Acc = AccOf<Scalar>;

 public:
  using Problem = ElementwiseScanProblem;
  using Gradients = ElementwiseScanGradients;
  static constexpr int kKept = 0, kSums = 0;
  static constexpr int64_t kWork = 1;  // for each number, in those that Threads counts

  static int64_t head_size(const Problem& p) { return p.C; }

  GivenInputs(const Problem& p, int64_t batch, int64_t time, Channels channels)
      : p_(p),
        x_(token_of<Scalar>(p.x, batch, time, channels)),
        log_decay_(token_of<Acc>(p.log_decay, batch, time, channels)) {}

  bool begins() const { return false; }

  HFLA_INLINE Input<Acc, kKept> operator()(int64_t c, int64_t count) const {
    const Vec<Acc> log_decay = load_vector(log_decay_, p_.log_decay.dim, c, count);
    return {log_decay,
            decay_of(log_decay),
            Decay<Vec<Acc>>(log_decay).lost,  // computed only where it is used
            load_vector(x_, p_.x.dim, c, count),
            {}};
  }

  class Writer {
   public:
    Writer(const Gradients& gradients, const Problem& p, int64_t batch, int64_t time,
           Channels channels)
        : dx_(token_of<Scalar>(gradients.dx, p, batch, time, channels)),
          dlog_decay_(token_of<Acc>(gradients.dlog_decay, p, batch, time, channels)),
          count_(channels.count) {}

    void clear_all() const {
      clear(dx_, count_);
      clear(dlog_decay_, count_);
    }

    HFLA_INLINE void write(const GivenInputs&, int64_t c, int64_t count, const OfSum<Acc>& h,
                           const Acc*, int64_t, OverTokens<Acc>) const {
      store_vector(dx_, 1, c, count, h.G);
      store_vector(dlog_decay_, 1, c, count, h.G * h.decayed);
    }

   private:
    Scalar* const dx_;
    Acc* const dlog_decay_;
    const int64_t count_;
  };

 private:
  const Problem& p_;
  const Scalar* const x_;
  const Acc* const log_decay_;
};

constexpr double kForgetsAll = -1e30;  // a log decay: finite, as it is multiplied with gradients

template <class V>
HFLA_INLINE V roots(V x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(ElementOf<V>) == sizeof(float)) {
    return (V)_mm512_maskz_sqrt_ps(-1, (__m512)x);
  } else {
    return (V)_mm512_maskz_sqrt_pd(-1, (__m512d)x);
  }
#else
  for (uint64_t i = 0; i < sizeof(V) / sizeof(x[0]); ++i) x[i] = square_root(x[i]);
  return x;
#endif
}

template <class Scalar>
class RgLruInputs {
  using Acc = AccOf<Scalar>;

 public:
  using Problem = RgLruProblem;
  using Gradients = RgLruGradients;
  static constexpr int kKept = 3, kSums = 1;  // both gates and the root; drate
  static constexpr int64_t kWork = 4;

  static int64_t head_size(const Problem& p) { return p.P; }

  RgLruInputs(const Problem& p, int64_t batch, int64_t time, Channels channels)
      : p_(p),
        begins_(p.begins && p.begins[batch * p.T + time]),
        x_(token_of<Scalar>(p.x, batch, time, channels)),
        input_gate_(gate(p.input_gate, p, batch, time, channels)),
        recurrent_gate_(gate(p.recurrent_gate, p, batch, time, channels)),
        rate_(static_cast<const Acc*>(p.rate) + channels.begin) {}

  bool begins() const { return begins_; }

  HFLA_INLINE Input<Acc, kKept> operator()(int64_t c, int64_t count) const {
    const Vec<Acc> i = gate_of(load_vector(input_gate_, p_.input_gate.dim, c, count));
    const Vec<Acc> r = gate_of(load_vector(recurrent_gate_, p_.recurrent_gate.dim, c, count));
    const Vec<Acc> log_decay = this->log_decay(c, count, r);
    const Decay<Vec<Acc>> a(log_decay);
    const Vec<Acc> root = begins_ ? broadcast(Acc(1)) : roots(a.lost * (a.left + Acc(1)));
    return {log_decay,
            begins_ ? Vec<Acc>{} : a.left,
            begins_ ? broadcast(Acc(1)) : a.lost,
            x(c, count) * i * root,
            {i, r, root}};
  }

  class Writer {
   public:
    Writer(const Gradients& gradients, const Problem& p, int64_t batch, int64_t time,
           Channels channels)
        : dx_(token_of<Scalar>(gradients.dx, p, batch, time, channels)),
          dinput_gate_(token_of<Scalar>(gradients.dinput_gate, p, batch, time, channels)),
          drecurrent_gate_(token_of<Scalar>(gradients.drecurrent_gate, p, batch, time, channels)),
          count_(channels.count) {}

    void clear_all() const {
      clear(dx_, count_);
      clear(dinput_gate_, count_);
      clear(drecurrent_gate_, count_);
    }

    HFLA_INLINE void write(const RgLruInputs& of, int64_t c, int64_t count, const OfSum<Acc>& h,
                           const Acc* kept, int64_t stride, OverTokens<Acc> drate) const {
      constexpr Acc kLeast = Acc(1 / kMaxRootGradient);
      const Vec<Acc> i = load(kept), r = load(kept + stride), root = load(kept + 2 * stride);
      const Vec<Acc> of_input = h.G * of.x(c, count);
      // of 1 - a^2, whose derivative by log a is -2 a^2
      const Vec<Acc> of_root = of_input * i / at_least(kLeast, root + root);
      const Vec<Acc> dlog_decay = h.G * h.decayed - of_root * h.decay * (h.decay + h.decay);
      store_vector(dx_, 1, c, count, h.G * i * root);
      store_vector(dinput_gate_, 1, c, count, of_input * root * i * (Acc(1) - i));
      store_vector(drecurrent_gate_, 1, c, count,
                   dlog_decay * of.log_decay(c, count, r) * (Acc(1) - r));
      Vec<Acc> sum = load(drate.sums + c), rest = load(drate.rests + c);
      add_exactly(sum, rest, dlog_decay * r);
      store(drate.sums + c, sum);
      store(drate.rests + c, rest);
    }

   private:
    Scalar *const dx_, *const dinput_gate_, *const drecurrent_gate_;
    const int64_t count_;
  };

 private:
  static const Scalar* gate(const View& view, const Problem& p, int64_t batch, int64_t time,
                            Channels channels) {
    const Channels in_head{channels.begin % p.P, channels.count};
    return token_of<Scalar>(view, batch, time, in_head) + channels.begin / p.P * view.head;
  }

  HFLA_INLINE Vec<Acc> x(int64_t c, int64_t count) const {
    return load_vector(x_, p_.x.dim, c, count);
  }
  // An infinite rate forgets all, whatever the gate: it may have been rounded to 0.
  HFLA_INLINE Vec<Acc> log_decay(int64_t c, int64_t count, Vec<Acc> r) const {
    const Vec<Acc> rate = load_vector(rate_, 1, c, count);
    return select(rate == Acc(-__builtin_inf()), broadcast(Acc(kForgetsAll)), rate * r);
  }

  const Problem& p_;
  const bool begins_;
  const Scalar *const x_, *const input_gate_, *const recurrent_gate_;
  const Acc* const rate_;
};

}  // namespace
}  // namespace hfla::HFLA_ISA
