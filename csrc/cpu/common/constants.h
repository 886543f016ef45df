// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// From numbers and flags to what code is compiled for: types with a constant `value`.
#pragma once

#include "cpu/common/isa.h"

namespace hfla::HFLA_ISA {
namespace {

template <int number>
struct Constant {
  static constexpr int value = number;
};

template <bool flag>
struct FlagConstant {
  static constexpr bool value = flag;
};

// Calls run(the flag as such a type).
template <class Run>
HFLA_INLINE void with_flag(bool flag, Run run) {
  flag ? run(FlagConstant<true>{}) : run(FlagConstant<false>{});
}

}  // namespace
}  // namespace hfla::HFLA_ISA
