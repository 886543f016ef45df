// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.

#include "torch/devices.h"

#include <atomic>

#include "torch/team.h"

namespace hfla {
namespace {

void parallel_for(int64_t n, void (*body)(void*, int64_t, int64_t), void* context) {
  struct Loop {
    void (*body)(void*, int64_t, int64_t);
    void* context;
  } loop{body, context};
  const auto run = [](int64_t begin, int64_t end, void* loop) {
    static_cast<Loop*>(loop)->body(static_cast<Loop*>(loop)->context, begin, end);
  };
  HFLA_TORCH_CALL(torch_parallel_for(0, n, /*grain_size=*/1, run, &loop));
}

}  // namespace

Threads torch_threads() {
  if (const Team* const team = Team::current()) return team->threads();
  uint32_t count = 1;
  HFLA_TORCH_CALL(torch_get_num_threads(&count));
  return {count, parallel_for};
}

const CpuKernels& cpu(DType dtype) {
  const char* why_not = nullptr;
  const CpuKernels* chosen = cpu_kernels(dtype, &why_not);
  if (!chosen) fail(why_not);
  return *chosen;
}

#ifdef HFLA_WITH_CUDA
void load_once(const CudaKernels& kernels, Device device, DType dtype) {
  static std::atomic<uint64_t> loaded[int(DType::f64)];  // a bit for each device
  const uint64_t bit = uint64_t(1) << (device.index & 63);
  std::atomic<uint64_t>& of_dtype = loaded[int(dtype)];
  if (of_dtype.load(std::memory_order_relaxed) & bit) return;
  check_cuda(kernels.linear_attention->load());
  check_cuda(kernels.delta_rule->load());
  of_dtype.fetch_or(bit);
}
#endif

void check_status(Status status) {
  switch (status) {
    case Status::ok:
      return;
    case Status::positive_log_decay:
      fail("log_decay must be <= 0, got a positive value");
    case Status::growing_state:
      fail("dt must be >= 0 and A <= 0, got what makes a state grow");
    case Status::out_of_memory:
      fail("out of memory for temporary results");
  }
}

}  // namespace hfla
