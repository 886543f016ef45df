// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for rows of x, rounded to 16 bits, and a W of 8 or 4 bits with scales for groups
// of inputs: sums of products of integers. (rounded_int4_isa.cpp has those of few rows with 4
// bits.)
//
// Eight bits of x would take about as many instructions: where no instruction adds up products of
// bytes, those of two bytes are words, too, and with more than two they overflow.

#include "cpu/dense/kernels.h"
#include "cpu/dense/quantized_rows.h"
#include "cpu/dense/quantized_shorts.h"
#if defined(__AVX512VNNI__)
#include "cpu/dense/rounded_interleaved_rows.h"
#endif

namespace hfla::HFLA_ISA {
namespace {

// The rows of a part.
Status rounded_rows(const QuantizedLinearProblem& p, const Threads& threads) {
#if defined(__AVX512VNNI__)
  if (interleaving_gains(p)) {
    return p.bits == 4 ? RoundedInterleavedRows<NibblesInOrder>(p, threads).run()
                       : RoundedInterleavedRows<BytesInOrder>(p, threads).run();
  }
#endif
  return p.bits == 4 ? rounded_int4(p, threads) : QuantizedRows<EightBitShorts>(p, threads).run();
}

}  // namespace

Status rounded_linear(const QuantizedLinearProblem& problem, const Threads& threads) {
  return by_parts_of_rows(
      problem, [&](const QuantizedLinearProblem& part) { return rounded_rows(part, threads); });
}

}  // namespace hfla::HFLA_ISA
