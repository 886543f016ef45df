// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The gradients of the elementwise scan and of the RG-LRU. With a_t = exp(log_decay_t) and G_t the
// gradient of h_t,
//
//     G_t = dy_t + a_{t+1} G_{t+1}    dx_t = G_t    dlog_decay_t = G_t a_t h_{t-1}
//
// which is a scan, too, from the last token to the first. Within each tile of tokens sums, and what
// goes into them, are computed once more; what they were before it is in y, or, as that may be
// rounded, they are computed from tile to tile first.

#include "cpu/elementwise_scan/inputs.h"
#include "cpu/elementwise_scan/kernels.h"
#include "cpu/sequences/plan.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kTileTokens = 32;

struct BackwardPlan {
  Blocks blocks;
  int64_t workers;
  int64_t starts;  // that are kept: as many as tiles of the longest sequence, or none
};

// Rows of a block.
template <class Scalar, class Inputs>
struct BackwardScratch {
  using Acc = AccOf<Scalar>;
  int64_t stride;
  Acc* starts;                  // the sums before each tile
  Acc *state, *dstate;          // h and G of the present token
  Acc *rest, *drest;            // of long sequences: what their roundings have lost
  Acc *sums, *rests;            // over tokens: those gradients that Inputs has of no token
  Acc *decay, *lost, *decayed;  // (kTileTokens,): a_t, 1 - a_t and a_t h_{t-1}
  Acc* kept;                    // (kTileTokens, Inputs::kKept)

  BackwardScratch(Carver& carver, const BackwardPlan& plan)
      : stride(plan.blocks.size),
        starts(carver.take<Acc>(plan.starts * stride)),
        state(carver.take<Acc>(stride)),
        dstate(carver.take<Acc>(stride)),
        rest(carver.take<Acc>(stride)),
        drest(carver.take<Acc>(stride)),
        sums(carver.take<Acc>(Inputs::kSums * stride)),
        rests(carver.take<Acc>(Inputs::kSums * stride)),
        decay(carver.take<Acc>(kTileTokens * stride)),
        lost(carver.take<Acc>(kTileTokens * stride)),
        decayed(carver.take<Acc>(kTileTokens * stride)),
        kept(carver.take<Acc>(kTileTokens * Inputs::kKept * stride)) {}
};

template <class Scalar, class Inputs>
class Backward {
  using Acc = AccOf<Scalar>;
  using Scratch = BackwardScratch<Scalar, Inputs>;
  using Problem = typename Inputs::Problem;
  using Gradients = typename Inputs::Gradients;

 public:
  Backward(const Problem& p, const ElementwiseScanUpstream& upstream, const Gradients& gradients,
           const Threads& threads)
      : p_(p),
        upstream_(upstream),
        gradients_(gradients),
        plan_{Blocks(p.num_sequences, p.C, Inputs::head_size(p), threads.count),
              workers_for(threads, p.B * p.T * p.C * Inputs::kWork),
              upstream.y ? 0 : most_tiles(p, kTileTokens)},
        workers_(for_decays(threads, true), plan_) {}

  Status run() {
    if (workers_.out_of_memory()) return Status::out_of_memory;
    const Blocks& blocks = plan_.blocks;
    workers_.run(p_.num_sequences * blocks.count, [&](Scratch& s, int64_t i) {
      const Span span = span_of(p_, i / blocks.count);
      with_length(span, [&](auto is_long) {
        backward<decltype(is_long)::value>(s, span, blocks[i % blocks.count]);
      });
    });
    return Status::ok;
  }

 private:
  template <bool is_long>
  void backward(Scratch& s, const Span& span, Channels channels) const {
    const int64_t tiles = span.tiles(kTileTokens);
    if (!upstream_.y) keep_starts<is_long>(s, span, channels, tiles);
    stage_state(upstream_.dstate, p_, span, channels, s.dstate);
    clear(s.drest, s.stride);
    clear(s.sums, Inputs::kSums * s.stride);
    clear(s.rests, Inputs::kSums * s.stride);
    for (int64_t tile = tiles - 1; tile >= 0; --tile) {
      stage_start(s, span, channels, tile);
      clear(s.rest, s.stride);
      advance<is_long>(s, tile_of(span, tile), channels);
      go_back<is_long>(s, tile_of(span, tile), channels);
    }
    if (gradients_.dinitial_state) {
      write_state(s.dstate, p_, span, channels, gradients_.dinitial_state);
    }
    if constexpr (Inputs::kSums) write_state(s.sums, p_, span, channels, gradients_.drate);
  }

  static Span tile_of(const Span& span, int64_t tile) {
    const int64_t begin = span.begin + tile * kTileTokens;
    return {span.sequence, span.batch, begin, min(span.end, begin + kTileTokens)};
  }

  template <bool is_long>
  void keep_starts(Scratch& s, const Span& span, Channels channels, int64_t tiles) const {
    stage_state(p_.initial_state, p_, span, channels, s.state);
    clear(s.rest, s.stride);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      __builtin_memcpy(s.starts + tile * s.stride, s.state, sizeof(Acc) * s.stride);
      if (tile + 1 < tiles) advance<is_long>(s, tile_of(span, tile), channels);
    }
  }

  // The sums before a tile.
  void stage_start(Scratch& s, const Span& span, Channels channels, int64_t tile) const {
    if (!upstream_.y) {
      __builtin_memcpy(s.state, s.starts + tile * s.stride, sizeof(Acc) * s.stride);
    } else if (tile == 0) {
      stage_state(p_.initial_state, p_, span, channels, s.state);
    } else {
      const int64_t last = span.begin + tile * kTileTokens - 1;
      const Acc* const y =
          static_cast<const Acc*>(upstream_.y) + (span.batch * p_.T + last) * p_.C + channels.begin;
      clear(s.state, channels.padded<Acc>());
      __builtin_memcpy(s.state, y, sizeof(Acc) * static_cast<size_t>(channels.count));
    }
  }

  // From the sums before a tile to those behind it.
  template <bool is_long>
  void advance(Scratch& s, const Span& tile, Channels channels) const {
    for (int64_t time = tile.begin; time < tile.end; ++time) {
      if (is_padding(p_, tile.batch, time)) continue;
      const Inputs inputs(p_, tile.batch, time, channels);
      if (inputs.begins()) {
        clear(s.state, channels.padded<Acc>());
        clear(s.rest, channels.padded<Acc>());
      }
      const int64_t row = (time - tile.begin) * s.stride;
      for_each_vector<Acc>(0, channels.count, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
        const auto input = inputs(c, count);
        store(s.decay + row + c, input.decay);
        if constexpr (is_long) store(s.lost + row + c, input.lost);
        store(s.decayed + row + c, input.decay * load(s.state + c));
        add_to_sums<is_long>(input, s.state + c, s.rest + c);
        HFLA_UNROLL
        for (int k = 0; k < Inputs::kKept; ++k) {
          store(s.kept + Inputs::kKept * row + k * s.stride + c, input.kept[k]);
        }
      });
    }
  }

  template <bool is_long>
  void go_back(Scratch& s, const Span& tile, Channels channels) const {
    for (int64_t time = tile.end - 1; time >= tile.begin; --time) {
      const typename Inputs::Writer writer(gradients_, p_, tile.batch, time, channels);
      if (is_padding(p_, tile.batch, time)) {
        writer.clear_all();
        continue;
      }
      const Inputs inputs(p_, tile.batch, time, channels);
      const View& dy = upstream_.dy;
      const Scalar* const of_token =
          dy.data ? token_of<Scalar>(dy, tile.batch, time, channels) : nullptr;
      const int64_t row = (time - tile.begin) * s.stride;
      for_each_vector<Acc>(0, channels.count, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
        const Vec<Acc> of_y = of_token ? load_vector(of_token, dy.dim, c, count) : Vec<Acc>{};
        Vec<Acc> G = load(s.dstate + c);
        OfSum<Acc> h{G + of_y, load(s.decay + row + c), load(s.decayed + row + c)};
        if constexpr (is_long) {
          Vec<Acc> rest = load(s.drest + c);
          h.G = add_and_decay(G, rest, h.decay, load(s.lost + row + c), of_y);
          store(s.dstate + c, G);
          store(s.drest + c, rest);
        } else {
          store(s.dstate + c, h.G * h.decay);
        }
        const Acc* const kept = s.kept + Inputs::kKept * row + c;
        writer.write(inputs, c, count, h, kept, s.stride, {s.sums, s.rests});
      });
      if (inputs.begins()) {
        clear(s.dstate, channels.padded<Acc>());
        clear(s.drest, channels.padded<Acc>());
      }
    }
  }

  const Problem& p_;
  const ElementwiseScanUpstream& upstream_;
  const Gradients& gradients_;
  const BackwardPlan plan_;
  Workers<Scratch, BackwardPlan> workers_;
};

template <template <class> class Inputs, class Problem, class Gradients>
Status backward(const Problem& problem, const ElementwiseScanUpstream& upstream,
                const Gradients& gradients, const Threads& threads) {
  return with_dtype(problem.dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    return Backward<Scalar, Inputs<Scalar>>(problem, upstream, gradients, threads).run();
  });
}

}  // namespace

Status elementwise_scan_backward(const ElementwiseScanProblem& problem,
                                 const ElementwiseScanUpstream& upstream,
                                 const ElementwiseScanGradients& gradients,
                                 const Threads& threads) {
  return backward<GivenInputs>(problem, upstream, gradients, threads);
}

Status rg_lru_backward(const RgLruProblem& problem, const ElementwiseScanUpstream& upstream,
                       const RgLruGradients& gradients, const Threads& threads) {
  return backward<RgLruInputs>(problem, upstream, gradients, threads);
}

}  // namespace hfla::HFLA_ISA
