// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Calls of the emulated kernels that, between them, run every kernel, and go through every barrier.
// Another op adds its own to all_cases().
#pragma once

#include <vector>

#include "attention_cases.h"
#include "delta_cases.h"

namespace checked {

inline std::vector<Case> all_cases(const std::vector<hfla::DType>& dtypes) {
  std::vector<Case> cases;
  for (const hfla::DType dtype : dtypes) {
    add_linear_attention(cases, dtype);
    add_fixed_size_walks(cases, dtype);
    add_steps(cases, dtype);
    add_delta_rule(cases, dtype);
    add_delta_steps(cases, dtype);
  }
  return cases;
}

// A case of one row, and of how many it shall be the last.
struct ManyRows {
  Case of;
  int log2_rows;
};

// Of the delta rule fewer have room, with 105 kB for each chunk; so of the arrays with a number for
// each token and head, 2^28 elements.
inline std::vector<ManyRows> cases_of_one_row() {
  constexpr auto kBf16 = hfla::DType::bf16;
  DeltaRule fixed{kBf16, 132, 32, 64, 16, 1, 1};
  fixed.mask = false;
  return {{make_case("in many rows", Attention{kBf16, 64 << 10, 34, 8, 8}, 1), 26},
          {make_case("in many rows, pieces", Attention{kBf16, 64 << 10, 34, 8, 8, 1, 2, 1, 1}, 1),
           26},
          {make_case("step in many rows", Step{kBf16, 8, 8, 2, 1}, 1), 26},
          {make_case("delta rule in many rows", DeltaRule{kBf16, 132, 32, 16, 16, 1, 1}, 1), 23},
          {make_case("delta rule of a fixed size in many rows", fixed, 1), 22},
          {make_case("step of the delta rule in many rows", DeltaStep{kBf16, 8, 8}, 1), 26}};
}

// Which reads what comes after its tensors.
inline Case a_token_too_many() {
  Attention c{hfla::DType::bf16, 64 << 10, 40, 16, 16};
  c.tokens_claimed = 1, c.mask = false;
  return make_case("a token too many", c, 1);
}

}  // namespace checked
