// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.

#include "torch/cuda/context.h"

#include <dlfcn.h>

namespace hfla {
namespace {

using GetStream = AOTITorchError (*)(int32_t device_index, void** stream);

// Of libtorch_cuda.so, which a torch for the CPU does not have: so this is looked up, not linked.
GetStream find_get_stream() {
  void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return library ? reinterpret_cast<GetStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"))
                 : nullptr;
}

}  // namespace

CudaContext::CudaContext(int32_t device_index) {
  static const GetStream get_stream = find_get_stream();
  check(get_stream, "this torch has no aoti_torch_get_current_cuda_stream in libtorch_cuda.so");
  HFLA_TORCH_CALL(get_stream(device_index, &stream_));
  HFLA_TORCH_CALL(aoti_torch_create_device_guard(device_index, &guard_));
}

CudaContext::~CudaContext() { aoti_torch_delete_device_guard(guard_); }

}  // namespace hfla
