// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Results below the smallest normal number as zeros, for a while.
#pragma once

#include "cpu/common/isa.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace hfla::HFLA_ISA {
namespace {

// What this thread computes, if that is wanted, as long as this lives. Operands stay what they are,
// for in base float16 becomes float by way of subnormal ones. Only on x86: others are as fast.
class SubnormalsBecomeZero {
 public:
  explicit SubnormalsBecomeZero(bool wanted) : before_(control()) {
    if (wanted) set_control(before_ | kFlushToZero);
  }
  ~SubnormalsBecomeZero() { set_control(before_); }
  SubnormalsBecomeZero(const SubnormalsBecomeZero&) = delete;
  SubnormalsBecomeZero& operator=(const SubnormalsBecomeZero&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x8000;
#if defined(__SSE2__)
  static unsigned control() { return _mm_getcsr(); }
  static void set_control(unsigned bits) { _mm_setcsr(bits); }
#else
  static unsigned control() { return 0; }
  static void set_control(unsigned) {}
#endif

  const unsigned before_;
};

}  // namespace
}  // namespace hfla::HFLA_ISA
