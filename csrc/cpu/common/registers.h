// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
#pragma once

#include "cpu/common/isa.h"

namespace hfla::HFLA_ISA {
namespace {

// The compiler would rather load a number again for each use than keep it in a register.
template <class V>
HFLA_INLINE void keep_in_register(V& x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
}

}  // namespace
}  // namespace hfla::HFLA_ISA
