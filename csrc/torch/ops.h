// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// An op as torch sees it. Each file of ops has a table of them, which registration.cpp registers.
#pragma once

#include "torch/shim.h"

namespace hfla {

struct Op {
  const char* name;
  const char* schema;
  void (*kernel)(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
  bool on_cuda;  // too, with the same kernel, which looks where the tensors are
};

struct Ops {
  const Op* first;
  int64_t count;
};

extern const Ops convolution_ops, delta_rule_ops, linear_attention_ops, linear_ops,
    quantized_linear_ops, rms_norm_ops, selective_scan_ops;

template <int64_t count>
constexpr Ops ops_of(const Op (&table)[count]) {
  return {table, count};
}

// What torch calls: `op`, with its name in front of what it raises.
template <void (*op)(StableIValue*), const char* name>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  try {
    op(stack);
  } catch (const std::runtime_error& error) {
    fail("hf_linear_attention::", name, ": ", error.what());
  }
}

}  // namespace hfla
