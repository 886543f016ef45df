// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The products of a chunk of a walk, on tensor cores.
#pragma once

#include "cuda/linear_attention/walker.cuh"

namespace hfla::cuda {

// Weights. Position i + 1 is after token i; backwards in time all of it is mirrored.
template <class Scalar, class S, class Fixed>
DEV float Walker<Scalar, S, Fixed>::read_weight(int i) const {
  return p_.reversed ? decay_.between(i + 1, C) : decay_.between(0, i + 1);
}
template <class Scalar, class S, class Fixed>
DEV float Walker<Scalar, S, Fixed>::write_weight(int j) const {
  return p_.reversed ? decay_.between(0, j + 1) : decay_.between(j + 1, C);
}
template <class Scalar, class S, class Fixed>
template <bool reversed>
DEV float Walker<Scalar, S, Fixed>::score_weight(int i, int j) const {
  if (reversed ? j < i : j > i) return 0;
  return reversed ? decay_.between(i + 1, j + 1) : decay_.between(j + 1, i + 1);
}

// Calls handle(r) for steps of kDepth rows of the state: with constants where the walk has a fixed
// size.
template <class Scalar, class S, class Fixed>
template <int at_once, bool with_extra, class Handle>
DEV void Walker<Scalar, S, Fixed>::for_each_row_step(Handle handle) const {
  if constexpr (Fixed::kIsFixed) {
    UNROLL
    for (int r = 0; r < kStateRows; r += kDepth) handle(r);
    if (with_extra && has_extra_rows()) handle(kStateRows);
  } else {
    UNROLL_BY(at_once)
    for (int r = 0; r < rows_here(); r += kDepth) handle(r);
  }
}

// out += a b, or = if it is the first, of whose columns load(b, c) gives some from c on. All are
// loaded before the first is used.
template <class Scalar, class S, class Fixed>
template <class Load>
DEV void Walker<Scalar, S, Fixed>::add_to_out(const typename Operands::A& a, bool first,
                                              Load load) {
  typename Operands::B b[kTilesC / kTogether][kTogether], last[1];
  UNROLL
  for (int i = 0; i < kTilesC / kTogether; ++i) load(b[i], column_of(i * kTogether));
  if (kTilesN > kTilesC) load(last, S::kColumns);
  UNROLL
  for (int n = 0; n < kTilesC; ++n) {
    Operands::multiply(out_[n], a, b[n / kTogether][n % kTogether], first);
  }
  if (kTilesN > kTilesC && has_normalizer()) {
    Operands::multiply(out_[kTilesN - 1], a, last[0], first);
  }
}

template <class Scalar, class S, class Fixed>
template <class Rows>
DEV void Walker<Scalar, S, Fixed>::keep_operands(ReadOperands& operands, const Rows& rows) const {
  if constexpr (Fixed::kIsFixed) {
    constexpr bool kHasExtra = std::is_same_v<Rows, typename Shared::RowsTile>;
    for_each_row_step<1, kHasExtra>(
        [&](int r) { operands.kept[r / kDepth] = Operands::load_a(rows, 16 * warp_, r); });
  }
}
template <class Scalar, class S, class Fixed>
DEV typename Walker<Scalar, S, Fixed>::Operands::A Walker<Scalar, S, Fixed>::operand(
    const ReadOperands& operands, int row) const {
  return Fixed::kIsFixed ? operands.kept[row / kDepth]
                         : Operands::load_a(read_tile(), 16 * warp_, row);
}

// out = read state, decayed. A warp has the rows 16 warp ... of the chunk. The second one's state
// is transposed.
template <class Scalar, class S, class Fixed>
template <bool second>
DEV void Walker<Scalar, S, Fixed>::read_state(const ReadOperands& operands) {
  const int first = 16 * warp_;
  for_each_row_step<1, !second>([&](int r) {
    add_to_out(operand(operands, r), Fixed::kIsFixed && r == 0, [&](auto& b, int c) {
      if constexpr (second) {
        Operands::load_b_transposed(b, shared_.state(), r, c);
      } else {
        Operands::load_b(b, shared_.state(), r, c);
      }
    });
  });
  if (!p_.causal || !decay_.sums) return;
  const float weights[2] = {read_weight(first + g_), read_weight(first + g_ + 8)};
  UNROLL
  for (int n = 0; n < kTilesN; ++n) {
    UNROLL
    for (int i = 0; i < 4; ++i) out_[n][i] *= weights[i / 2];
  }
}

// out += (read writtenᵀ, masked and decayed) values: of no tokens that come later than all these
// rows. Where the normaliser is in another walk than some of the rows that it cancels, products of
// either alone are large, and what is left of them is lost unless both are multiplied to the full.
template <class Scalar, class S, class Fixed>
template <bool second, class Written, class Values>
DEV void Walker<Scalar, S, Fixed>::read_chunk(const ReadOperands& operands, const Written& written,
                                              const Values& values) {
  const int first = 16 * warp_, end = p_.reversed ? C : first + 16;
  NO_UNROLL
  for (int token = p_.reversed ? first : 0; token < end; token += kDepth) {
    float scores[kTogether][4] = {};
    for_each_row_step<4, !second>([&](int r) {
      const auto a = operand(operands, r);
      typename Operands::B b[kTogether];
      Operands::load_b_transposed(b, written, r, token);
      sum_up(scores, a, b, Fixed::kIsFixed && r == 0);
    });
    const bool has_later_ones = token + kDepth > first && token < first + 16;
    if (decay_.sums || has_later_ones) {
      p_.reversed ? weigh<true>(scores, token) : weigh<false>(scores, token);
    }
    const bool cancels_later = !Fixed::kIsFixed && p_.partial && p_.read.extra != Extra::none;
    NO_UNROLL
    for (int parts = cancels_later ? Operands::kPartsOfSums : 1; parts > 0; --parts) {
      add_to_out(Operands::from_accumulators(scores), false,
                 [&](auto& b, int c) { Operands::load_b_for_accumulators(b, values, token, c); });
      if (parts > 1) subtract_held(scores);
    }
  }
}

template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::subtract_held(float (&scores)[kTogether][4]) {
  UNROLL
  for (int n = 0; n < kTogether; ++n) {
    UNROLL
    for (int i = 0; i < 4; ++i) scores[n][i] -= Operands::held(scores[n][i]);
  }
}

template <class Scalar, class S, class Fixed>
template <bool reversed>
DEV void Walker<Scalar, S, Fixed>::weigh(float (&scores)[kTogether][4], int token) const {
  UNROLL
  for (int n = 0; n < kTogether; ++n) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp_ + g_ + 8 * (i / 2), column = token + 8 * n + 2 * t_ + i % 2;
      const float weight = score_weight<reversed>(row, column);
      scores[n][i] = weight == 0 ? 0 : weight * scores[n][i];  // 0, even of inf
    }
  }
}

// state = decay state + writeᵀ values, decayed. Tensor cores truncate what they add to: a state
// that stayed in their accumulators would lose a bit of the same sign with every chunk. So theirs
// are sums over a few tokens, from zero, and it is the next addition that rounds.
template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::write_chunk(bool first_writer) {
  const float decay = first_writer ? decay_.between(0, C) : 1;
  NO_UNROLL
  for (int token = 0; token < C; token += kSumTokens) {
    const float keep = token == 0 ? decay : 1;
    typename Operands::A a[kSumSteps][kStrips];
    load_written(a, token);
    // Of the next columns, while these are multiplied.
    typename Operands::B b[2][kSumSteps][kTogether];
    load_values_of(b[0], token, column_of(0));
    UNROLL
    for (int i = 0; i < kTilesC / kTogether; ++i) {
      const int n = i * kTogether;
      if (n + kTogether < kTilesC) load_values_of(b[(i + 1) % 2], token, column_of(n + kTogether));
      add_to_state(a, b[i % 2], n, keep);
    }
    if (kTilesN > kTilesC && has_normalizer()) {
      typename Operands::B last[kSumSteps][1];
      load_values_of(last, token, S::kColumns);
      add_to_state(a, last, kTilesN - 1, keep);
    }
    if constexpr (kExtraTiles > 0) {
      if (has_extra_rows()) write_extra_rows(token);
    }
  }
}

// The normaliser's row, of some columns.
template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::write_extra_rows(int token) {
  float sums[kExtraTiles][4] = {};
  UNROLL
  for (int step = 0; step < kSumSteps; ++step, token += kDepth) {
    const auto a = Operands::load_a_transposed(write_tile(), kStateRows, token, false, {});
    typename Operands::B b[kExtraTiles];
    Operands::load_b(b, values_tile(), token, extra_column(0));
    sum_up(sums, a, b, step == 0);
  }
  UNROLL
  for (int i = 0; i < kExtraTiles; ++i) {
    UNROLL
    for (int e = 0; e < 4; ++e) extra_[i][e] += sums[i][e];
  }
}

// writeᵀ of tokens from `token` on, weighted, in registers: once, for all columns of values.
template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::load_written(typename Operands::A (&a)[kSumSteps][kStrips],
                                                int token) {
  UNROLL
  for (int step = 0; step < kSumSteps; ++step, token += kDepth) {
    float weights[Operands::kColumnsOfA] = {};
    if (decay_.sums) {
      UNROLL
      for (int i = 0; i < Operands::kColumnsOfA; ++i) {
        weights[i] = write_weight(token + Operands::column_of_a(i));
      }
    }
    UNROLL
    for (int s = 0; s < kStrips; ++s) {
      a[step][s] = {};  // a register without a value on some way here is kept for it everywhere
      if (!strip_exists(strip_of(s))) continue;
      a[step][s] =
          Operands::load_a_transposed(write_tile(), strip_of(s) * 16, token, decay_.sums, weights);
    }
  }
}

template <class Scalar, class S, class Fixed>
template <int count>
DEV void Walker<Scalar, S, Fixed>::load_values_of(typename Operands::B (&b)[kSumSteps][count],
                                                  int token, int column) {
  UNROLL
  for (int step = 0; step < kSumSteps; ++step) {
    Operands::load_b(b[step], values_tile(), token + step * kDepth, column);
  }
}

template <class Scalar, class S, class Fixed>
template <int count>
DEV void Walker<Scalar, S, Fixed>::add_to_state(const typename Operands::A (&a)[kSumSteps][kStrips],
                                                const typename Operands::B (&b)[kSumSteps][count],
                                                int n, float keep) {
  UNROLL
  for (int s = 0; s < kStrips; ++s) {
    if (!strip_exists(strip_of(s))) continue;
    float sums[count][4];
    UNROLL
    for (int step = 0; step < kSumSteps; ++step) sum_up(sums, a[step][s], b[step], step == 0);
    UNROLL
    for (int i = 0; i < count; ++i) {
      UNROLL
      for (int e = 0; e < 4; ++e) {
        float& x = state_[s][n + i][e];
        x = keep * x + sums[i][e];
      }
    }
  }
}

// sums += a b, or = if it is the first.
template <class Scalar, class S, class Fixed>
template <int count>
DEV void Walker<Scalar, S, Fixed>::sum_up(float (&sums)[count][4], const typename Operands::A& a,
                                          const typename Operands::B (&b)[count], bool first) {
  UNROLL
  for (int i = 0; i < count; ++i) Operands::multiply(sums[i], a, b[i], first);
}

}  // namespace hfla::cuda
