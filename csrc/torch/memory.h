// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The memory of large results on the CPU.
//
// glibc gives freed tensors of several MB back to the system, and writing to fresh ones then takes
// a page fault every 4 kB: up to 40 % of forward and backward on a virtual machine. So such memory
// comes back here when the last tensor on it is gone, and is kept for the next result: up to so
// many megabytes (HF_LINEAR_ATTENTION_KEPT_MB), and what nobody has taken for some seconds is freed
// with the next call of an op. A block of it is a tensor of torch's own, so torch's allocator, its
// profiler and its huge pages see all of it; and no malloc setting of the process is touched.
#pragma once

#include <cstdint>

struct AtenTensorOpaque;

namespace hfla {

// A contiguous tensor on the CPU, not initialised, but for NaN in torch's deterministic mode; or
// null, where torch is to make it: it is small, or larger than any memory, nothing may be kept, or
// torch is 2.10, whose tensors on the memory of others don't say when they are gone.
//
// Throws std::runtime_error if HF_LINEAR_ATTENTION_KEPT_MB is no number of megabytes.
AtenTensorOpaque* new_tensor_on_kept_memory(int64_t dim, const int64_t* sizes,
                                            const int64_t* strides, int32_t dtype);

}  // namespace hfla
