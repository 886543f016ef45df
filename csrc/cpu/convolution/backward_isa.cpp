// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The gradients of the short convolution. With du_t = dy_t times the activation's derivative at
// u_t, which is computed again,
//
//     dx_t = Σ_m weight_{k-1-m} du_{t+m}   dweight_j = Σ_t du_t x_{t-k+1+j}   dbias = Σ_t du_t
//
// and dx_t of a row that the final state holds gets that gradient, too. The walk is forward's. It
// is k - 1 rows behind with dx, whose first rows are those of the initial state, and goes on for
// k - 1 tokens behind a run: they are the next run's, which computes their du again, or none, and
// then du is 0. Gradients of the weight are added up in a task, then over the groups of runs, both
// in an order that depends on the shapes and the padding only.

#include "cpu/convolution/kernels.h"
#include "cpu/convolution/tokens.h"

namespace hfla::HFLA_ISA {
namespace {

struct BackwardPlan {
  const ConvolutionProblem& p;
  int64_t workers;
};

template <class Scalar>
struct BackwardScratch {
  using Acc = AccOf<Scalar>;
  static constexpr int64_t W = kLanes<Acc>;
  Acc *weight, *bias;   // (k, kBlockChannels), (kBlockChannels,)
  Acc* dweights;        // (k + 1, kBlockChannels): dweight and dbias of the task
  Acc* last_du;         // (k - 1, kBlockChannels): of the tile before
  Acc* du;              // (k - 1 + kTileTokens, W): of a vector of channels
  Scalar *zeros, *bin;  // a row to read, and one that takes what nobody wants
  TileRows<Scalar> x, dy;

  BackwardScratch(Carver& carver, const BackwardPlan& plan)
      : weight(carver.take<Acc>(plan.p.kernel_size * kBlockChannels)),
        bias(carver.take<Acc>(kBlockChannels)),
        dweights(carver.take<Acc>((plan.p.kernel_size + 1) * kBlockChannels)),
        last_du(carver.take<Acc>((plan.p.kernel_size - 1) * kBlockChannels)),
        du(carver.take<Acc>((plan.p.kernel_size - 1 + kTileTokens) * W)),
        zeros(carver.take<Scalar>(kBlockChannels)),
        bin(carver.take<Scalar>(kBlockChannels)),
        x(carver, plan.p.kernel_size),
        dy(carver, 1) {}
};

// What a tile reads and writes.
template <class Scalar>
struct Tile {
  int64_t tokens;
  bool is_own;             // its du count for dweight
  const Scalar* const* x;  // rows of the windows; null: du is 0
  const Scalar* const* dy;
  Scalar* dx[kTileTokens];            // k - 1 tokens earlier
  const Scalar* dstate[kTileTokens];  // to be added there
  bool has_dstate;
};

template <class Scalar>
class Backward {
  using Acc = AccOf<Scalar>;
  using Scratch = BackwardScratch<Scalar>;
  static constexpr int64_t W = kLanes<Acc>;

 public:
  Backward(const ConvolutionProblem& p, const ConvolutionUpstream& upstream,
           const ConvolutionGradients& gradients, const Threads& threads)
      : p_(p),
        upstream_(upstream),
        gradients_(gradients),
        past_(p.kernel_size - 1),
        padded_channels_(round_up(p.C, W)),
        runs_(p),
        plan_{p, workers_for(threads, p.B * p.T * p.C)},
        workers_(threads, plan_),
        sums_(runs_.groups() * (p.kernel_size + 1) * padded_channels_ *
              static_cast<int64_t>(sizeof(Acc))) {}

  Status run() {
    if (runs_.out_of_memory() || workers_.out_of_memory() || !sums_.data()) {
      return Status::out_of_memory;
    }
    const int64_t blocks = channel_blocks(p_.C);
    workers_.run(runs_.groups() * blocks, [&](Scratch& s, int64_t i) {
      const Channels channels = channel_block(p_.C, i % blocks);
      stage_weights(p_.weight, p_.kernel_size, channels, s.weight);
      stage_weights(p_.bias, 1, channels, s.bias);
      __builtin_memset(s.zeros, 0, sizeof(Scalar) * kBlockChannels);
      __builtin_memset(s.dweights, 0, sizeof(Acc) * (p_.kernel_size + 1) * kBlockChannels);
      runs_.for_each(i / blocks, [&](const Run& run) { backward(s, run, channels); });
      for (int64_t j = 0; j <= p_.kernel_size; ++j) {
        __builtin_memcpy(sum_row(i / blocks, j, channels), s.dweights + j * kBlockChannels,
                         sizeof(Acc) * static_cast<size_t>(channels.count));
      }
    });
    workers_.run(blocks, [&](Scratch& s, int64_t i) { add_up(s, channel_block(p_.C, i)); });
    return Status::ok;
  }

 private:
  void backward(Scratch& s, const Run& run, Channels channels) const {
    __builtin_memset(s.last_du, 0, sizeof(Acc) * past_ * kBlockChannels);
    const int64_t end = run.last + past_;
    int64_t token = run.first;
    while (token < end) {
      const bool is_own = token < run.last, is_real = token < run.count;
      const int64_t stop = is_own ? run.last : is_real ? min(end, run.count) : end;
      const int64_t tokens = min(kTileTokens, stop - token);
      walk(s, make_tile(s, run, channels, token, tokens, is_own, is_real), channels);
      token += tokens;
    }
    clear_padding<Scalar>(gradients_.dx, p_, run, channels);
    if (run.first == 0 && gradients_.dinitial_state) pass_dstate(s, run, channels);
  }

  Tile<Scalar> make_tile(Scratch& s, const Run& run, Channels channels, int64_t token,
                         int64_t tokens, bool is_own, bool is_real) const {
    Tile<Scalar> tile{};
    tile.tokens = tokens, tile.is_own = is_own;
    if (is_real && upstream_.dy.data) {
      const auto before = [&](int64_t row) -> const Scalar* {
        return p_.initial_state ? state<const Scalar>(p_.initial_state, run, p_.S + row, channels)
                                : s.zeros;
      };
      tile.x = s.x.find(p_.x, run, channels, token - past_, past_ + tokens, before);
      tile.dy = s.dy.find(upstream_.dy, run, channels, token, tokens, before);
    }
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t row = token + i - past_;
      const bool of_state = row < 0 && run.first == 0 && gradients_.dinitial_state;
      tile.dx[i] = of_state ? state<Scalar>(gradients_.dinitial_state, run, p_.S + row, channels)
                   : row >= run.first
                       ? token_row<Scalar>(gradients_.dx, p_, run, run.time(row), channels)
                       : s.bin;
      const Scalar* const dstate = dstate_of(run, row, channels);
      tile.dstate[i] = dstate ? dstate : s.zeros;
      tile.has_dstate |= dstate != nullptr;
    }
    return tile;
  }

  // The final state's gradient at a row; null where the state does not hold it.
  const Scalar* dstate_of(const Run& run, int64_t row, Channels channels) const {
    const int64_t place = row - (run.count - p_.S);
    if (!upstream_.dstate || place < 0) return nullptr;
    return state<const Scalar>(upstream_.dstate, run, place, channels);
  }

  void walk(Scratch& s, const Tile<Scalar>& tile, Channels channels) const {
    const int64_t whole = whole_vectors<Acc>(channels);
    with_kernel_size(p_.kernel_size, [&](auto k) {
      for (int64_t c = 0; c < whole; c += W) walk_vector<k.kValue>(s, tile, c, W);
    });
    if (whole < channels.count) walk_vector<0>(s, tile, whole, channels.count - whole);
  }

  // A vector of channels, of which the first `count` are there.
  template <int K>
  HFLA_INLINE void walk_vector(Scratch& s, const Tile<Scalar>& tile, int64_t c,
                               int64_t count) const {
    for (int64_t m = 0; m < past_; ++m) {
      store(s.du + m * W, load(s.last_du + m * kBlockChannels + c));
    }
    if (tile.x) {
      differentiate<K>(s, tile, c, count);
    } else {
      for (int64_t i = 0; i < tile.tokens; ++i) store(s.du + (past_ + i) * W, Vec<Acc>{});
    }
    write_dx<K>(s, tile, c, count);
    for (int64_t m = 0; m < past_; ++m) {
      store(s.last_du + m * kBlockChannels + c, load(s.du + (tile.tokens + m) * W));
    }
  }

  // du of the tile's tokens, and what they add to dweight and dbias.
  template <int K>
  HFLA_INLINE void differentiate(Scratch& s, const Tile<Scalar>& tile, int64_t c,
                                 int64_t count) const {
    const bool silu = p_.silu;
    const int64_t kernel_size = K ? K : p_.kernel_size;
    Vec<Acc> dweight[K ? K : 1] = {}, dbias = {};
    Window<Scalar, K> window(tile.x, kernel_size, c, count);
    for (int64_t i = 0; i < tile.tokens; ++i) {
      window.move_to(i);
      const Vec<Acc> u = window.convolve(s.weight, s.bias);
      const Vec<Acc> du = activation_gradient(silu, u, load_vector(tile.dy[i], 1, c, count));
      store(s.du + (past_ + i) * W, du);
      dbias += du;
      HFLA_UNROLL
      for (int j = 0; j < K; ++j) dweight[j] += du * window[j];
    }
    if (!tile.is_own) return;
    const auto add = [&](int64_t j, Vec<Acc> sum) {
      Acc* const to = s.dweights + j * kBlockChannels + c;
      store(to, load(to) + sum);
    };
    HFLA_UNROLL
    for (int j = 0; j < K; ++j) add(j, dweight[j]);
    for (int64_t j = 0; K == 0 && j < kernel_size; ++j) {
      Vec<Acc> sum = {};
      for (int64_t i = 0; i < tile.tokens; ++i) {
        sum += load(s.du + (past_ + i) * W) * load_vector(tile.x[i + j], 1, c, count);
      }
      add(j, sum);
    }
    add(kernel_size, dbias);
  }

  template <int K>
  HFLA_INLINE void write_dx(const Scratch& s, const Tile<Scalar>& tile, int64_t c,
                            int64_t count) const {
    const int64_t past = K ? K - 1 : past_;
    for (int64_t i = 0; i < tile.tokens; ++i) {
      Vec<Acc> dx = {};
      if (tile.has_dstate) dx = load_vector(tile.dstate[i], 1, c, count);
      HFLA_UNROLL
      for (int64_t m = 0; m <= past; ++m) {
        dx += load(s.weight + (past - m) * kBlockChannels + c) * load(s.du + (i + m) * W);
      }
      store_vector(tile.dx[i], 1, c, count, dx);
    }
  }

  // To rows of the initial state that no window sees.
  void pass_dstate(const Scratch& s, const Run& run, Channels channels) const {
    for (int64_t row = -p_.S; row < -past_; ++row) {
      const Scalar* const dstate = dstate_of(run, row, channels);
      __builtin_memcpy(state<Scalar>(gradients_.dinitial_state, run, p_.S + row, channels),
                       dstate ? dstate : s.zeros,
                       sizeof(Scalar) * static_cast<size_t>(channels.count));
    }
  }

  // dweight and dbias of these channels, over all groups.
  void add_up(Scratch& s, Channels channels) const {
    __builtin_memset(s.dweights, 0, sizeof(Acc) * (p_.kernel_size + 1) * kBlockChannels);
    for (int64_t group = 0; group < runs_.groups(); ++group) {
      for (int64_t j = 0; j <= p_.kernel_size; ++j) {
        const Acc* const from = sum_row(group, j, channels);
        Acc* const to = s.dweights + j * kBlockChannels;
        for (int64_t c = 0; c < channels.count; ++c) to[c] += from[c];
      }
    }
    write_weights(gradients_.dweight, p_.weight.dtype, p_.kernel_size, s.dweights, channels);
    if (gradients_.dbias) {
      write_weights(gradients_.dbias, p_.bias.dtype, 1,
                    s.dweights + p_.kernel_size * kBlockChannels, channels);
    }
  }

  Acc* sum_row(int64_t group, int64_t j, Channels channels) const {
    return reinterpret_cast<Acc*>(sums_.data()) +
           (group * (p_.kernel_size + 1) + j) * padded_channels_ + channels.begin;
  }

  template <class Element, class Void>
  Element* state(Void* rows, const Run& run, int64_t s, Channels channels) const {
    return state_row<Element>(const_cast<void*>(rows), p_, run, s, channels);
  }

  const ConvolutionProblem& p_;
  const ConvolutionUpstream& upstream_;
  const ConvolutionGradients& gradients_;
  const int64_t past_, padded_channels_;
  const Runs runs_;
  const BackwardPlan plan_;
  Workers<Scratch, BackwardPlan> workers_;
  const Buffer sums_;
};

}  // namespace

Status convolution_backward(const ConvolutionProblem& problem, const ConvolutionUpstream& upstream,
                            const ConvolutionGradients& gradients, const Threads& threads) {
  return with_dtype(problem.dtype, [&](auto scalar) {
    return Backward<decltype(scalar)>(problem, upstream, gradients, threads).run();
  });
}

}  // namespace hfla::HFLA_ISA
