// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The gradients of the elementwise scan. With a_t = exp(log_decay_t) and G_t the gradient of h_t,
//
//     G_t = dy_t + a_{t+1} G_{t+1}    dx_t = G_t    dlog_decay_t = G_t a_t h_{t-1}
//
// which is a scan, too, from the last token to the first. y may be rounded, so sums are computed
// once more: first from tile to tile of tokens, of which the first ones are kept, then within each
// tile.

#include "cpu/elementwise_scan/blocks.h"
#include "cpu/elementwise_scan/kernels.h"
#include "cpu/sequences/plan.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kTileTokens = 32;

struct BackwardPlan {
  Blocks blocks;
  int64_t workers, tiles;  // tiles: of the longest sequence
};

// Rows of a block.
template <class Scalar>
struct BackwardScratch {
  using Acc = AccOf<Scalar>;
  int64_t stride;
  Acc* starts;           // (tiles,): the sums before each tile
  Acc *state, *dstate;   // h and G of the present token
  Acc *decay, *decayed;  // (kTileTokens,): a_t and a_t h_{t-1}

  BackwardScratch(Carver& carver, const BackwardPlan& plan)
      : stride(plan.blocks.size),
        starts(carver.take<Acc>(plan.tiles * stride)),
        state(carver.take<Acc>(stride)),
        dstate(carver.take<Acc>(stride)),
        decay(carver.take<Acc>(kTileTokens * stride)),
        decayed(carver.take<Acc>(kTileTokens * stride)) {}
};

template <class Scalar>
class Backward {
  using Acc = AccOf<Scalar>;
  using Scratch = BackwardScratch<Scalar>;

 public:
  Backward(const ElementwiseScanProblem& p, const ElementwiseScanUpstream& upstream,
           const ElementwiseScanGradients& gradients, const Threads& threads)
      : p_(p),
        upstream_(upstream),
        gradients_(gradients),
        plan_{Blocks(p.num_sequences, p.C, threads.count), threads_for(p.B * p.T * p.C, threads),
              most_tiles(p, kTileTokens)},
        workers_(for_decays(threads, true), plan_) {}

  Status run() {
    if (workers_.out_of_memory()) return Status::out_of_memory;
    const Blocks& blocks = plan_.blocks;
    workers_.run(p_.num_sequences * blocks.count, [&](Scratch& s, int64_t i) {
      backward(s, span_of(p_, i / blocks.count), blocks[i % blocks.count]);
    });
    return Status::ok;
  }

 private:
  void backward(Scratch& s, const Span& span, Channels channels) const {
    stage_state(p_.initial_state, p_, span, channels, s.state);
    const int64_t tiles = span.tiles(kTileTokens);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      __builtin_memcpy(s.starts + tile * s.stride, s.state, sizeof(Acc) * s.stride);
      if (tile + 1 < tiles) advance(s, tile_of(span, tile), channels);
    }
    stage_state(upstream_.dstate, p_, span, channels, s.dstate);
    for (int64_t tile = tiles - 1; tile >= 0; --tile) {
      __builtin_memcpy(s.state, s.starts + tile * s.stride, sizeof(Acc) * s.stride);
      advance(s, tile_of(span, tile), channels);
      go_back(s, tile_of(span, tile), channels);
    }
    if (gradients_.dinitial_state) {
      write_state(s.dstate, p_, span, channels, gradients_.dinitial_state);
    }
  }

  static Span tile_of(const Span& span, int64_t tile) {
    const int64_t begin = span.begin + tile * kTileTokens;
    return {span.sequence, span.batch, begin, min(span.end, begin + kTileTokens)};
  }

  // From the sums before a tile to those behind it.
  void advance(Scratch& s, const Span& tile, Channels channels) const {
    for (int64_t time = tile.begin; time < tile.end; ++time) {
      if (is_padding(p_, tile.batch, time)) continue;
      const Scalar* const x = token_of<Scalar>(p_.x, tile.batch, time, channels);
      const Acc* const log_decay = token_of<Acc>(p_.log_decay, tile.batch, time, channels);
      const int64_t row = (time - tile.begin) * s.stride;
      for_each_vector<Acc>(0, channels.count, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
        const Vec<Acc> decay = decay_of(load_vector(log_decay, p_.log_decay.dim, c, count));
        const Vec<Acc> decayed = decay * load(s.state + c);
        store(s.decay + row + c, decay);
        store(s.decayed + row + c, decayed);
        store(s.state + c, decayed + load_vector(x, p_.x.dim, c, count));
      });
    }
  }

  void go_back(Scratch& s, const Span& tile, Channels channels) const {
    for (int64_t time = tile.end - 1; time >= tile.begin; --time) {
      Scalar* const dx = token_of<Scalar>(gradients_.dx, p_, tile.batch, time, channels);
      Acc* const dlog_decay = token_of<Acc>(gradients_.dlog_decay, p_, tile.batch, time, channels);
      if (is_padding(p_, tile.batch, time)) {
        clear(dx, channels.count);
        clear(dlog_decay, channels.count);
        continue;
      }
      const View& dy = upstream_.dy;
      const Scalar* const of_token =
          dy.data ? token_of<Scalar>(dy, tile.batch, time, channels) : nullptr;
      const int64_t row = (time - tile.begin) * s.stride;
      for_each_vector<Acc>(0, channels.count, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
        Vec<Acc> G = load(s.dstate + c);
        if (of_token) G += load_vector(of_token, dy.dim, c, count);
        store_vector(dx, 1, c, count, G);
        store_vector(dlog_decay, 1, c, count, G * load(s.decayed + row + c));
        store(s.dstate + c, G * load(s.decay + row + c));
      });
    }
  }

  const ElementwiseScanProblem& p_;
  const ElementwiseScanUpstream& upstream_;
  const ElementwiseScanGradients& gradients_;
  const BackwardPlan plan_;
  Workers<Scratch, BackwardPlan> workers_;
};

}  // namespace

Status elementwise_scan_backward(const ElementwiseScanProblem& problem,
                                 const ElementwiseScanUpstream& upstream,
                                 const ElementwiseScanGradients& gradients,
                                 const Threads& threads) {
  return with_dtype(problem.dtype, [&](auto scalar) {
    return Backward<decltype(scalar)>(problem, upstream, gradients, threads).run();
  });
}

}  // namespace hfla::HFLA_ISA
