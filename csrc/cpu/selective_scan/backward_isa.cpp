// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The gradients of the selective scan. With a_t = exp(dt_t A) and G_t the gradient of S_t,
//
//     G_t = read_t dy_t + a_{t+1} G_{t+1}
//     dread_t = Σ_c S_t dy_t    dwrite_t = Σ_c G_t dt_t x_t    h_t = Σ_n G_t write_t
//     dx_t = dt_t h_t + D dy_t    ddt_t = x_t h_t + Σ_n A G_t a_t S_{t-1}
//     dA = Σ_t dt_t G_t a_t S_{t-1}    dD = Σ_t x_t dy_t
//
// States are computed once more: first from tile to tile, of which the first ones are kept, then
// within each tile, from the last to the first. A task takes a block of channels of some sequences.
// What is a sum over channels is added up over the blocks at the end, what is one over sequences
// over groups of these: in an order that depends on the shapes only.

#include "cpu/selective_scan/kernels.h"
#include "cpu/selective_scan/tiles.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kMaxGroups = 16;      // of sequences, each of which has a dA
constexpr int64_t kTokensPerTask = 64;  // of the final sum over channels

struct BackwardPlan {
  const SelectiveScanProblem& p;
  int64_t workers, tiles;  // tiles: of the longest sequence
};

template <class Scalar>
struct BackwardScratch {
  using Acc = AccOf<Scalar>;
  ScanRows<Scalar> rows;
  Acc* starts;               // (tiles, N, kBlockChannels): states before each tile
  Acc *dstate, *drest;       // (N, kBlockChannels); drest: as rest
  Acc *dA, *dD;              // (N, kBlockChannels), (kBlockChannels,)
  Acc *dA_rests, *dD_rests;  // what these have lost
  Acc *dy, *dx, *ddt;        // (kTileTokens, kBlockChannels); first dx holds h

  BackwardScratch(Carver& carver, const BackwardPlan& plan)
      : rows(carver, plan.p),
        starts(carver.take<Acc>(plan.tiles * plan.p.N * kBlockChannels)),
        dstate(carver.take<Acc>(plan.p.N * kBlockChannels)),
        drest(carver.take<Acc>(plan.p.N * kBlockChannels)),
        dA(carver.take<Acc>((plan.p.N + 1) * kBlockChannels)),
        dD(dA + plan.p.N * kBlockChannels),
        dA_rests(carver.take<Acc>((plan.p.N + 1) * kBlockChannels)),
        dD_rests(dA_rests + plan.p.N * kBlockChannels),
        dy(carver.take<Acc>(kTileTokens * kBlockChannels)),
        dx(carver.take<Acc>(kTileTokens * kBlockChannels)),
        ddt(carver.take<Acc>(kTileTokens * kBlockChannels)) {}
};

template <class Scalar>
class Backward {
  using Acc = AccOf<Scalar>;
  using Scratch = BackwardScratch<Scalar>;
  static constexpr int64_t W = kLanes<Acc>;

 public:
  Backward(const SelectiveScanProblem& p, const SelectiveScanUpstream& upstream,
           const SelectiveScanGradients& gradients, const Threads& threads)
      : p_(p),
        upstream_(upstream),
        gradients_(gradients),
        blocks_(channel_blocks(p.C)),
        groups_(min(p.num_sequences, kMaxGroups)),
        plan_{p, workers_for(threads, p.B * p.T * p.C * p.N), most_tiles(p, kTileTokens)},
        workers_(for_decays(threads, true), plan_),
        of_groups_(groups_ * blocks_ * (p.N + 1) * kBlockChannels * kBytes),
        of_blocks_(blocks_ * p.B * p.T * 2 * p.N * kBytes) {}

  Status run() {
    if (workers_.out_of_memory() || !of_groups_.data() || !of_blocks_.data()) {
      return Status::out_of_memory;
    }
    workers_.run(groups_ * blocks_, [&](Scratch& s, int64_t i) {
      const int64_t group = i / blocks_, block = i % blocks_;
      const Channels channels = channel_block(p_.C, block);
      s.rows.stage_block(p_, channels);
      __builtin_memset(s.dA, 0, block_bytes());
      __builtin_memset(s.dA_rests, 0, block_bytes());
      const int64_t end = p_.num_sequences * (group + 1) / groups_;
      for (int64_t n = p_.num_sequences * group / groups_; n < end; ++n) {
        const Span span = span_of(p_, n);
        with_length(span, [&](auto is_long) {
          backward<decltype(is_long)::value>(s, span, channels, block);
        });
      }
      __builtin_memcpy(group_sums(group, block), s.dA, block_bytes());
    });
    workers_.run(blocks_, [&](Scratch& s, int64_t block) { add_up_groups(s, block); });
    const int64_t tokens = p_.B * p_.T;
    workers_.run(ceil_div(tokens, kTokensPerTask), [&](Scratch& s, int64_t i) {
      const int64_t end = min(tokens, (i + 1) * kTokensPerTask);
      for (int64_t token = i * kTokensPerTask; token < end; ++token) add_up_blocks(s, token);
    });
    return Status::ok;
  }

 private:
  static constexpr int64_t kBytes = static_cast<int64_t>(sizeof(Acc));

  size_t block_bytes() const { return static_cast<size_t>((p_.N + 1) * kBlockChannels * kBytes); }

  template <bool is_long>
  void backward(Scratch& s, const Span& span, Channels channels, int64_t block) const {
    s.rows.begin_state(p_, span, channels);
    for (int64_t tile = 0; tile < span.tiles(kTileTokens); ++tile) {
      const TileTokens tokens = tile_tokens(p_, span, tile);
      s.rows.stage_tile(p_, tokens, channels);
      advance<is_long>(s, tile, tokens.count, channels);
    }
    stage_state(upstream_.dstate, p_, span, channels, s.dstate);
    __builtin_memset(s.drest, 0, sizeof(Acc) * static_cast<size_t>(p_.N * kBlockChannels));
    for (int64_t tile = span.tiles(kTileTokens) - 1; tile >= 0; --tile) {
      const TileTokens tokens = tile_tokens(p_, span, tile);
      s.rows.stage_tile(p_, tokens, channels);
      if (upstream_.dy.data) {
        stage_channels<Scalar>(upstream_.dy, tokens, channels, s.dy);
      } else {
        __builtin_memset(s.dy, 0, sizeof(Acc) * kTileTokens * kBlockChannels);
      }
      differentiate<is_long>(s, tile, tokens, channels, block);
      finish_channels(s, tokens.count, channels);
      write_channels<Scalar>(s.dx, p_, tokens, channels, gradients_.dx);
      write_channels<Acc>(s.ddt, p_, tokens, channels, gradients_.ddt);
    }
    if (gradients_.dinitial_state) {
      write_transposed(s.dstate, channels, p_.N,
                       state_of<Acc>(gradients_.dinitial_state, p_, span));
    }
  }

  // From the state before a tile, which is kept, to the one before the next.
  template <bool is_long>
  void advance(Scratch& s, int64_t tile, int64_t tokens, Channels channels) const {
    const ScanRows<Scalar>& r = s.rows;
    Acc* const start = s.starts + tile * p_.N * kBlockChannels;
    for_each_sum<Acc>(p_.N, channels, [&](int64_t n, int64_t c) HFLA_INLINE_LAMBDA {
      const int64_t of_n = n * kBlockChannels + c;
      const Vec<Acc> A = load(r.A + of_n);
      TileSum<is_long, Acc> S{load(r.state + of_n)};
      store(start + of_n, S.now);
      for (int64_t i = 0; i < tokens; ++i) {
        const int64_t at = i * kBlockChannels + c;
        S.decay(decay_of(load(r.dt + at) * A));
        S.add(load(r.dx + at) * r.write[n * kTileTokens + i]);
      }
      S.store_after(load(r.dts + c) * A, r.state + of_n, r.rest + of_n);
    });
  }

  // s.dx gets h, s.ddt the sum over n, and the token's row of this block dwrite and dread.
  template <bool is_long>
  void differentiate(Scratch& s, int64_t tile, const TileTokens& tokens, Channels channels,
                     int64_t block) const {
    __builtin_memset(s.dx, 0, sizeof(Acc) * kTileTokens * kBlockChannels);
    __builtin_memset(s.ddt, 0, sizeof(Acc) * kTileTokens * kBlockChannels);
    for (int64_t n = 0; n < p_.N; ++n) {
      Vec<Acc> dwrite[kTileTokens] = {}, dread[kTileTokens] = {};
      for (int64_t c = 0; c < channels.padded<Acc>(); c += W) {
        differentiate_sum<is_long>(s, tile, tokens.count, n, c, dwrite, dread);
      }
      for (int64_t i = 0; i < tokens.count; ++i) {
        Acc* const sums = block_sums(block, tokens.batch * p_.T + tokens.times[i]);
        sums[n] = sum<Acc>(dwrite[i]);
        sums[p_.N + n] = sum<Acc>(dread[i]);
      }
    }
  }

  // One sum of the states of a vector of channels.
  template <bool is_long>
  HFLA_INLINE void differentiate_sum(Scratch& s, int64_t tile, int64_t tokens, int64_t n, int64_t c,
                                     Vec<Acc>* dwrite, Vec<Acc>* dread) const {
    const ScanRows<Scalar>& r = s.rows;
    const int64_t of_n = n * kBlockChannels + c;
    const Acc* const write = r.write + n * kTileTokens;
    const Acc* const read = r.read + n * kTileTokens;
    const Vec<Acc> A = load(r.A + of_n);
    Vec<Acc> decay[kTileTokens], decayed[kTileTokens];  // a_t, a_t S_{t-1}
    Vec<Acc> S = load(s.starts + tile * p_.N * kBlockChannels + of_n);
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t at = i * kBlockChannels + c;
      decay[i] = decay_of(load(r.dt + at) * A);
      decayed[i] = decay[i] * S;
      S = decayed[i] + load(r.dx + at) * write[i];
    }
    TileSum<is_long, Acc> G{load(s.dstate + of_n)};
    Vec<Acc> dA{};
    for (int64_t i = tokens - 1; i >= 0; --i) {
      const int64_t at = i * kBlockChannels + c;
      const Vec<Acc> dy = load(s.dy + at), dx = load(r.dx + at);
      G.add(dy * read[i]);
      dread[i] += (decayed[i] + dx * write[i]) * dy;
      dwrite[i] += G.now * dx;
      store(s.dx + at, load(s.dx + at) + G.now * write[i]);
      const Vec<Acc> of_exponent = G.now * decayed[i];
      store(s.ddt + at, load(s.ddt + at) + of_exponent * A);
      dA += of_exponent * load(r.dt + at);
      G.decay(decay[i]);
    }
    G.store_after(load(r.dts + c) * A, s.dstate + of_n, s.drest + of_n);
    add_to_total(dA, s.dA + of_n, s.dA_rests + of_n);
  }

  // What a tile adds.
  static HFLA_INLINE void add_to_total(Vec<Acc> of_tile, Acc* total, Acc* rest) {
    Vec<Acc> sum = load(total), lost = load(rest);
    add_exactly(sum, lost, of_tile);
    store(total, sum);
    store(rest, lost);
  }

  void finish_channels(Scratch& s, int64_t tokens, Channels channels) const {
    const ScanRows<Scalar>& r = s.rows;
    for (int64_t c = 0; c < channels.padded<Acc>(); c += W) {
      const Vec<Acc> D = load(r.D + c);
      Vec<Acc> dD{};
      for (int64_t i = 0; i < tokens; ++i) {
        const int64_t at = i * kBlockChannels + c;
        const Vec<Acc> h = load(s.dx + at), x = load(r.x + at), dy = load(s.dy + at);
        store(s.dx + at, load(r.dt + at) * h + D * dy);
        store(s.ddt + at, load(s.ddt + at) + x * h);
        dD += x * dy;
      }
      add_to_total(dD, s.dD + c, s.dD_rests + c);
    }
  }

  void add_up_groups(Scratch& s, int64_t block) const {
    const Channels channels = channel_block(p_.C, block);
    __builtin_memset(s.dA, 0, block_bytes());
    for (int64_t group = 0; group < groups_; ++group) {
      const Acc* const sums = group_sums(group, block);
      for (int64_t i = 0; i < (p_.N + 1) * kBlockChannels; i += W) {
        store(s.dA + i, load(s.dA + i) + load(sums + i));
      }
    }
    write_transposed(s.dA, channels, p_.N, gradients_.dA);
    if (gradients_.dD) write_transposed(s.dD, channels, 1, gradients_.dD);
  }

  // dwrite and dread of a token (of all rows) over all blocks of channels.
  void add_up_blocks(Scratch& s, int64_t token) const {
    const bool is_real = !p_.key_mask || p_.key_mask[token];
    for (int64_t half = 0; half < 2; ++half) {
      Acc* const total = s.rows.row;
      for (int64_t n = 0; n < p_.N; ++n) total[n] = 0;
      for (int64_t block = 0; is_real && block < blocks_; ++block) {
        const Acc* const sums = block_sums(block, token) + half * p_.N;
        for (int64_t n = 0; n < p_.N; ++n) total[n] += sums[n];
      }
      Scalar* const to =
          static_cast<Scalar*>(half == 0 ? gradients_.dwrite : gradients_.dread) + token * p_.N;
      for_each_vector<Acc>(0, p_.N, [&](int64_t n, int64_t count) HFLA_INLINE_LAMBDA {
        store_vector(to, 1, n, count, load(total + n));
      });
    }
  }

  Acc* group_sums(int64_t group, int64_t block) const {
    return reinterpret_cast<Acc*>(of_groups_.data()) +
           (group * blocks_ + block) * (p_.N + 1) * kBlockChannels;
  }

  // dwrite (N,) and dread (N,) of a token.
  Acc* block_sums(int64_t block, int64_t token) const {
    return reinterpret_cast<Acc*>(of_blocks_.data()) + (block * p_.B * p_.T + token) * 2 * p_.N;
  }

  const SelectiveScanProblem& p_;
  const SelectiveScanUpstream& upstream_;
  const SelectiveScanGradients& gradients_;
  const int64_t blocks_, groups_;
  const BackwardPlan plan_;
  Workers<Scratch, BackwardPlan> workers_;
  const Buffer of_groups_, of_blocks_;
};

}  // namespace

Status selective_scan_backward(const SelectiveScanProblem& problem,
                               const SelectiveScanUpstream& upstream,
                               const SelectiveScanGradients& gradients, const Threads& threads) {
  return with_dtype(problem.dtype, [&](auto scalar) {
    return Backward<decltype(scalar)>(problem, upstream, gradients, threads).run();
  });
}

}  // namespace hfla::HFLA_ISA
