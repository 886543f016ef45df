// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What csrc/torch is linked to in place of a GPU: a device, and where to launch, beside the
// emulated kernels. All of it is compiled with HFLA_WITH_CUDA and with torch's CPU under the name
// of CUDA, so that ops called on CPU tensors take the way of CUDA tensors.

#include <cstdlib>

#include "cuda/common/device.h"
#include "kernels/cpu.h"
#include "kernels/cuda.h"
#include "torch/cuda/context.h"

namespace hfla {

// Set where every call shall fail, as with a driver that is too old.
const char* driver_error() { return std::getenv("EMULATED_DRIVER_ERROR"); }

// A device of an H100's size, or of so many multiprocessors.
int cuda_device(int32_t, CudaDevice* device) {
  const char* const few = std::getenv("EMULATED_MULTIPROCESSORS");
  *device = {few ? std::atoi(few) : 132, 227 << 10};
  return driver_error() ? 1 : 0;
}

const char* cuda_error_text(int) {
  return driver_error() ? driver_error() : cuda::emulator::machine().error.c_str();
}

// The order of threads is the emulator's, or that of a number (emulator.h); the wait for copies in a
// line may be left out; and so may all that is launched, where only shapes are looked at.
CudaContext::CudaContext(int32_t) : guard_(nullptr), stream_(nullptr) {
  const char* const schedule = std::getenv("EMULATED_SCHEDULE");
  if (schedule) cuda::emulator::machine().schedule = unsigned(std::atoi(schedule));
  const char* const missing_wait = std::getenv("EMULATED_MISSING_WAIT");
  if (missing_wait) cuda::emulator::machine().missing_wait = std::atoi(missing_wait);
  if (std::getenv("EMULATED_LAUNCHES")) {
    cuda::emulator::machine().on_launch = [](int64_t, int, int64_t) { return false; };
  }
}
CudaContext::~CudaContext() {}

const CpuKernels* cpu_kernels(DType, const char** why_not) {
  *why_not = "the emulated device should have been used";
  return nullptr;
}

}  // namespace hfla

// csrc/torch's exports come with it; these are those of csrc/cpu/dispatch.cpp.
extern "C" const char* hfla_cpu_instruction_sets_built() { return "none"; }
