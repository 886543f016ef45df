// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.

#include "torch/plain_operations.h"

#include <utility>
#include <vector>

namespace hfla {

void call_dispatcher(const char* name, const char* overload, StableIValue* stack) {
  HFLA_TORCH_CALL(torch_call_dispatcher(name, overload, stack, kTorchBuildVersion));
}

void add(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor a = arguments.tensor();
  const Tensor b = arguments.tensor();
  AtenTensorHandle result = nullptr;
  HFLA_TORCH_CALL(aoti_torch_cpu_add_Tensor(a.get(), b.get(), /*alpha=*/1, &result));
  give_back(stack, Tensor(result));
}

void view(StableIValue* stack) {
  Arguments arguments(stack);
  Tensor x = arguments.tensor();
  const std::vector<int64_t> sizes = arguments.integers();
  std::vector<int64_t> strides(sizes.size());
  uint64_t numbers = 1, given = 1;
  for (int64_t d = 0; d < x.dim(); ++d) numbers *= x.size(d);
  bool is_plain = x.is_contiguous();
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = given;
    given *= sizes[d];
    is_plain &= sizes[d] > 0;
  }
  if (!is_plain || given != numbers) {
    stack[1] = list_of(reinterpret_cast<const StableIValue*>(sizes.data()), sizes.size());
    give_back(stack, std::move(x));
    return call_dispatcher("aten::view", "", stack);
  }
  AtenTensorHandle result = nullptr;
  HFLA_TORCH_CALL(aoti_torch__reinterpret_tensor(x.get(), int64_t(sizes.size()), sizes.data(),
                                                 strides.data(), 0, &result));
  give_back(stack, Tensor(result));
}

}  // namespace hfla
