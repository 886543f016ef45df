// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// An op as torch sees it. Each file of ops has a table of them, which registration.cpp registers.
#pragma once

#include <cstdio>

#include "torch/shim.h"

namespace hfla {

struct Op {
  const char* name;
  const char* schema;
  void (*kernel)(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);  // for torch
  void (*run)(StableIValue* stack);  // the same, but for what it throws: for this library
  bool on_cuda;                      // too, with the same kernel, which looks where the tensors are
};

struct Ops {
  const Op* first;
  int64_t count;
};

extern const Ops attention_ops, convolution_ops, cross_entropy_ops, decay_steps_ops, delta_rule_ops,
    elementwise_scan_ops, linear_attention_ops, linear_ops, quantized_linear_ops, recording_ops,
    rms_norm_ops, rwkv7_ops, selective_scan_ops, sinusoids_ops;

// Those that compute.
constexpr const Ops* kKernelOps[] = {&linear_attention_ops,
                                     &delta_rule_ops,
                                     &convolution_ops,
                                     &selective_scan_ops,
                                     &elementwise_scan_ops,
                                     &linear_ops,
                                     &quantized_linear_ops,
                                     &rms_norm_ops,
                                     &sinusoids_ops,
                                     &cross_entropy_ops,
                                     &attention_ops,
                                     &decay_steps_ops,
                                     &rwkv7_ops};

template <int64_t count>
constexpr Ops ops_of(const Op (&table)[count]) {
  return {table, count};
}

// Null, or what `run` raised, with its name in front; until the thread's next error.
__attribute__((noinline)) inline const char* error_of(void (*run)(StableIValue*), const char* name,
                                                      StableIValue* stack) {
  try {
    run(stack);
    return nullptr;
  } catch (const std::exception& error) {
    static thread_local char message[2048];
    std::snprintf(message, sizeof message, "hf_linear_attention::%s: %s", name, error.what());
    return message;
  }
}

// What torch calls. The exception that leaves it is torch's own, made in torch: this library may
// have another C++ runtime, whose exceptions torch can't catch. And it goes through no function of
// ours that has anything to destroy or to catch, since these would ask our runtime about it.
template <void (*run)(StableIValue*), const char* name>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  const char* const error = error_of(run, name, stack);
  if (error) aoti_torch_check(false, name, __FILE__, __LINE__, error);
}

// A line of a table of ops.
template <void (*run)(StableIValue*), const char* name>
constexpr Op op(const char* schema, bool on_cuda) {
  return {name, schema, boxed<run, name>, run, on_cuda};
}

}  // namespace hfla
