// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Numbers below the smallest normal one as zeros, for a while.
#pragma once

#include "cpu/common/isa.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace hfla::HFLA_ISA {
namespace {

// What this thread reads and computes, if that is wanted, as long as this lives.
class SubnormalsAreZero {
 public:
  explicit SubnormalsAreZero(bool wanted) : wanted_(wanted), before_(wanted ? control() : 0) {
    if (wanted_) set_control(before_ | kZeroes);
  }
  ~SubnormalsAreZero() {
    if (wanted_) set_control(before_);
  }
  SubnormalsAreZero(const SubnormalsAreZero&) = delete;
  SubnormalsAreZero& operator=(const SubnormalsAreZero&) = delete;

 private:
#if defined(__SSE2__)
  static constexpr uint64_t kZeroes = 0x8040;  // results and operands
  static uint64_t control() { return _mm_getcsr(); }
  static void set_control(uint64_t bits) { _mm_setcsr(static_cast<unsigned>(bits)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kZeroes = 1 << 24;
  static uint64_t control() {
    uint64_t bits;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
  }
  static void set_control(uint64_t bits) { asm volatile("msr fpcr, %0" : : "r"(bits)); }
#else
  static constexpr uint64_t kZeroes = 0;
  static uint64_t control() { return 0; }
  static void set_control(uint64_t) {}
#endif

  const bool wanted_;
  const uint64_t before_;
};

}  // namespace
}  // namespace hfla::HFLA_ISA
