// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The selective scan over whole sequences. A task takes a block of channels of one sequence.

#include "cpu/selective_scan/kernels.h"
#include "cpu/selective_scan/tiles.h"

namespace hfla::HFLA_ISA {
namespace {

struct ForwardPlan {
  const SelectiveScanProblem& p;
  int64_t workers;
};

template <class Scalar>
struct ForwardScratch {
  using Acc = AccOf<Scalar>;
  ScanRows<Scalar> rows;
  Acc* y;  // (kTileTokens, kBlockChannels)

  ForwardScratch(Carver& carver, const ForwardPlan& plan)
      : rows(carver, plan.p), y(carver.take<Acc>(kTileTokens * kBlockChannels)) {}
};

template <class Scalar>
class Forward {
  using Acc = AccOf<Scalar>;
  using Scratch = ForwardScratch<Scalar>;

 public:
  Forward(const SelectiveScanProblem& p, const SelectiveScanResult& result, const Threads& threads)
      : p_(p),
        result_(result),
        plan_{p, workers_for(threads, p.B * p.T * p.C * p.N)},
        workers_(for_decays(threads, true), plan_) {}

  Status run() {
    if (workers_.out_of_memory()) return Status::out_of_memory;
    const int64_t blocks = channel_blocks(p_.C);
    workers_.run(p_.num_sequences * blocks, [&](Scratch& s, int64_t i) {
      const Span span = span_of(p_, i / blocks);
      with_length(span, [&](auto is_long) {
        forward<decltype(is_long)::value>(s, span, channel_block(p_.C, i % blocks));
      });
    });
    return Status::ok;
  }

 private:
  template <bool is_long>
  void forward(Scratch& s, const Span& span, Channels channels) const {
    s.rows.stage_block(p_, channels);
    s.rows.begin_state(p_, span, channels);
    for (int64_t tile = 0; tile < span.tiles(kTileTokens); ++tile) {
      const TileTokens tokens = tile_tokens(p_, span, tile);
      s.rows.stage_tile(p_, tokens, channels);
      scan<is_long>(s, tokens.count, channels);
      write_channels<Scalar>(s.y, p_, tokens, channels, result_.y);
    }
    write_transposed(s.rows.state, channels, p_.N, state_of<Acc>(result_.state, p_, span));
  }

  template <bool is_long>
  void scan(Scratch& s, int64_t tokens, Channels channels) const {
    const ScanRows<Scalar>& r = s.rows;
    Acc* const y = s.y;
    for (int64_t i = 0; i < tokens; ++i) {
      for (int64_t c = 0; c < channels.padded<Acc>(); c += kLanes<Acc>) {
        store(y + i * kBlockChannels + c, load(r.D + c) * load(r.x + i * kBlockChannels + c));
      }
    }
    for_each_sum<Acc>(p_.N, channels, [&](int64_t n, int64_t c) HFLA_INLINE_LAMBDA {
      const int64_t of_n = n * kBlockChannels + c;
      const Vec<Acc> A = load(r.A + of_n);
      TileSum<is_long, Acc> S{load(r.state + of_n)};
      for (int64_t i = 0; i < tokens; ++i) {
        const int64_t at = i * kBlockChannels + c;
        S.decay(decay_of(load(r.dt + at) * A));
        S.add(load(r.dx + at) * r.write[n * kTileTokens + i]);
        store(y + at, load(y + at) + S.now * r.read[n * kTileTokens + i]);
      }
      S.store_after(load(r.dts + c) * A, r.state + of_n, r.rest + of_n);
    });
  }

  const SelectiveScanProblem& p_;
  const SelectiveScanResult& result_;
  const ForwardPlan plan_;
  Workers<Scratch, ForwardPlan> workers_;
};

}  // namespace

Status selective_scan_forward(const SelectiveScanProblem& problem,
                              const SelectiveScanResult& result, const Threads& threads) {
  return with_dtype(problem.dtype, [&](auto scalar) {
    return Forward<decltype(scalar)>(problem, result, threads).run();
  });
}

}  // namespace hfla::HFLA_ISA
