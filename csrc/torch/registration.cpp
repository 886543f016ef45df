// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Registers the ops with torch when the library is loaded, and answers what Python asks of the
// library itself.

#include "kernels/export.h"
#include "torch/devices.h"
#include "torch/ops.h"

namespace hfla {
namespace {

// The libraries live as long as the process: torch keeps pointers to the kernels.
TorchLibraryHandle implementations_for(const char* dispatch_key) {
  TorchLibraryHandle library;
  HFLA_TORCH_CALL(aoti_torch_library_init_impl("hf_linear_attention", dispatch_key, __FILE__,
                                               __LINE__, &library));
  return library;
}

void register_ops() {
  TorchLibraryHandle definitions;
  HFLA_TORCH_CALL(
      aoti_torch_library_init_def("hf_linear_attention", __FILE__, __LINE__, &definitions));
  const TorchLibraryHandle cpu = implementations_for("CPU");
  const TorchLibraryHandle cuda = *kCudaBuilt ? implementations_for("CUDA") : nullptr;
  const auto add = [&](const Ops& ops) {
    for (const Op* op = ops.first; op != ops.first + ops.count; ++op) {
      HFLA_TORCH_CALL(aoti_torch_library_def(definitions, op->schema));
      HFLA_TORCH_CALL(torch_library_impl(cpu, op->name, op->kernel, kTorchBuildVersion));
      if (!cuda || !op->on_cuda) continue;
      HFLA_TORCH_CALL(torch_library_impl(cuda, op->name, op->kernel, kTorchBuildVersion));
    }
  };
  for (const Ops* ops : kKernelOps) add(*ops);
  add(recording_ops);
}

// Runs when the library is loaded, where an exception would end the process.
std::string registration_error() {
  try {
    register_ops();
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

const std::string kRegistrationError = registration_error();

}  // namespace
}  // namespace hfla

// ---- for Python, through ctypes ----

// Null, or why the ops could not be registered.
HFLA_EXPORT const char* hfla_registration_error() {
  return hfla::kRegistrationError.empty() ? nullptr : hfla::kRegistrationError.c_str();
}

// The name of the active instruction set; or null, and then *why_not says why.
HFLA_EXPORT const char* hfla_cpu_instruction_set(const char** why_not) {
  const hfla::CpuKernels* kernels = hfla::cpu_kernels(hfla::DType::f32, why_not);
  return kernels ? kernels->instruction_set : nullptr;
}

// What the CUDA kernels were compiled for, such as "sm_90, compute_80"; empty without any.
HFLA_EXPORT const char* hfla_cuda_architectures() { return hfla::kCudaBuilt; }
