// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// One token of the selective scan, with the state updated in place. The sums of a channel lie in
// the lanes of vectors, as the state has them in memory.

#include "cpu/selective_scan/kernels.h"
#include "cpu/selective_scan/tiles.h"
#include "cpu/sequences/step.h"

namespace hfla::HFLA_ISA {
namespace {

struct StepPlan {
  const SelectiveScanStep& p;
  int64_t workers;
};

template <class Scalar>
struct StepScratch {
  using Acc = AccOf<Scalar>;
  Acc *x, *dt, *y;    // (kBlockChannels,)
  Acc *write, *read;  // (N,), zeros up to a whole vector

  StepScratch(Carver& carver, const StepPlan& plan)
      : x(carver.take<Acc>(kBlockChannels)),
        dt(carver.take<Acc>(kBlockChannels)),
        y(carver.take<Acc>(kBlockChannels)),
        write(carver.take<Acc>(round_up(plan.p.N, kLanes<Acc>))),
        read(carver.take<Acc>(round_up(plan.p.N, kLanes<Acc>))) {}
};

template <class Scalar>
class Step {
  using Acc = AccOf<Scalar>;
  using Scratch = StepScratch<Scalar>;

 public:
  Step(const SelectiveScanStep& p, const Threads& threads)
      : p_(p),
        plan_{p, workers_for(threads, p.B * p.C * p.N)},
        workers_(for_decays(threads, true), plan_) {}

  Status run() {
    if (workers_.out_of_memory()) return Status::out_of_memory;
    if (grows()) return Status::growing_state;
    const int64_t blocks = channel_blocks(p_.C);
    workers_.run(p_.B * blocks, [&](Scratch& s, int64_t i) {
      step(s, i / blocks, channel_block(p_.C, i % blocks));
    });
    return Status::ok;
  }

 private:
  // Whether any state would, which decay_of() can't tell: found before one changes, so that whoever
  // catches the error still has the states of before.
  bool grows() const {
    const Acc* const A = static_cast<const Acc*>(p_.A);
    Vec<Acc> largest{};
    for_each_vector<Acc>(0, p_.C * p_.N, [&](int64_t i, int64_t count) HFLA_INLINE_LAMBDA {
      const Vec<Acc> a = load_vector(A, 1, i, count);
      largest = select(a > largest, a, largest);
    });
    for (int64_t b = 0; b < p_.B; ++b) {
      if (slot_of(p_, b) < 0) continue;
      const Acc* const dt = static_cast<const Acc*>(p_.dt.data) + b * p_.dt.batch;
      for_each_vector<Acc>(0, p_.C, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
        const Vec<Acc> negative = -load_vector(dt, p_.dt.dim, c, count);
        largest = select(negative > largest, negative, largest);
      });
    }
    return sum<Acc>(largest) > 0;
  }

  void step(Scratch& s, int64_t b, Channels channels) const {
    Scalar* const y = static_cast<Scalar*>(p_.y) + b * p_.C + channels.begin;
    const int64_t slot = slot_of(p_, b);
    if (slot < 0) {
      __builtin_memset(y, 0, sizeof(Scalar) * static_cast<size_t>(channels.count));
      return;
    }
    stage<Scalar>(p_.x, b, channels, s.x);
    stage<Acc>(p_.dt, b, channels, s.dt);
    stage<Scalar>(p_.write, b, {0, p_.N}, s.write);
    stage<Scalar>(p_.read, b, {0, p_.N}, s.read);
    const Acc* const A = static_cast<const Acc*>(p_.A) + channels.begin * p_.N;
    const Acc* const D = p_.D ? static_cast<const Acc*>(p_.D) + channels.begin : nullptr;
    Acc* const states =
        static_cast<Acc*>(p_.state.data) + slot * p_.state.batch + channels.begin * p_.state.head;
    for (int64_t c = 0; c < channels.count; ++c) {
      const Acc read =
          advance(s, A + c * p_.N, s.dt[c], s.dt[c] * s.x[c], states + c * p_.state.head);
      s.y[c] = D ? read + D[c] * s.x[c] : read;
    }
    for_each_vector<Acc>(0, channels.count, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      store_vector(y, 1, c, count, load(s.y + c));
    });
  }

  // One channel; returns what is read of its new state.
  HFLA_INLINE Acc advance(const Scratch& s, const Acc* A, Acc dt, Acc dx, Acc* state) const {
    const int64_t stride = p_.state.dim;
    Vec<Acc> y{};
    for_each_vector<Acc>(0, p_.N, [&](int64_t n, int64_t count) HFLA_INLINE_LAMBDA {
      const Vec<Acc> decay = decay_of(dt * load_vector(A, 1, n, count));
      const Vec<Acc> S = decay * load_vector(state, stride, n, count) + dx * load(s.write + n);
      store_vector(state, stride, n, count, S);
      y += S * load(s.read + n);
    });
    return sum<Acc>(y);
  }

  // A row's numbers, zeros up to a whole vector.
  template <class Element>
  void stage(const View& view, int64_t b, Channels columns, Acc* to) const {
    const Element* const from =
        static_cast<const Element*>(view.data) + b * view.batch + columns.begin * view.dim;
    load_row(from, view.dim, 0, columns.count, to);
  }

  const SelectiveScanStep& p_;
  const StepPlan plan_;
  Workers<Scratch, StepPlan> workers_;
};

}  // namespace

Status selective_scan_step(const SelectiveScanStep& problem, const Threads& threads) {
  return with_dtype(problem.dtype,
                    [&](auto scalar) { return Step<decltype(scalar)>(problem, threads).run(); });
}

}  // namespace hfla::HFLA_ISA
