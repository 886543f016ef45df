// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Weights of 4 bits as numbers, for products of so many rows that floats are multiplied faster.
//
// A group has 16 numbers at most, which are looked up.

#include "cpu/common/memory.h"
#include "cpu/common/tasks.h"
#include "cpu/common/vec.h"
#include "cpu/dense/kernels.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int kValues = 16;

template <class Number>
float number_at(const void* data, int64_t offset) {
  return load_some(static_cast<const Number*>(data) + offset, 1, 1)[0];
}

float number_of(const GroupNumbers& numbers, int64_t output, int64_t group) {
  const int64_t offset = output * numbers.out_stride + group * numbers.group_stride;
  if (!numbers.data) return 0;
  if (numbers.type == NumberType::bf16) return number_at<BFloat16>(numbers.data, offset);
  if (numbers.type == NumberType::f16) return number_at<Float16>(numbers.data, offset);
  return static_cast<const float*>(numbers.data)[offset];
}

// The numbers of one output: `to` (in,).
template <class Scalar>
void dequantize_output(const QuantizedLinearProblem& p, int64_t output, Scalar* to) {
  const auto* from = static_cast<const uint8_t*>(p.weight) + output * p.in / 2;
  constexpr int64_t W = kLanes<float>;
  static_assert(kValues % W == 0);
  for (int64_t group = 0; group < p.in / p.group; ++group) {
    const float scale = number_of(p.scale, output, group), zero = number_of(p.zero, output, group);
    Scalar numbers[kValues];  // of the bits that stand for 0 to 7, then for -8 to -1
    for (int64_t i = 0; i < kValues; i += W) {
      float values[W];
      for (int64_t j = 0; j < W; ++j) values[j] = static_cast<float>((i + j + 8) % kValues - 8);
      store(numbers + i, load(values) * scale + zero);
    }
    for (int64_t i = 0; i < p.group / 2; ++i, ++from, to += 2) {
      to[0] = numbers[*from & 15];
      to[1] = numbers[*from >> 4];
    }
  }
}

}  // namespace

Status dequantize_int4(const QuantizedLinearProblem& p, const Threads& threads) {
  if constexpr (!kHasOthers) return Status::ok;  // nobody asks these kernels
  return with_dtype_but_double(p.dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const int64_t workers = workers_for(threads, p.out * p.in);
    run_tasks(threads, workers, p.out, [&](int64_t, int64_t output) {
      dequantize_output(p, output, static_cast<Scalar*>(p.y) + output * p.in);
    });
    return Status::ok;
  });
}

}  // namespace hfla::HFLA_ISA
