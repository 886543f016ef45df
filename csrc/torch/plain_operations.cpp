// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.

#include "torch/plain_operations.h"

#include <cstring>
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

void embedding(StableIValue* stack) {
  Arguments arguments(stack);
  Tensor table = arguments.tensor();
  Tensor indices = arguments.tensor();
  bool is_plain = table.dim() == 2 && table.is_contiguous() && indices.is_contiguous() &&
                  indices.dtype() == aoti_torch_dtype_int64() && indices.dim() < Tensor::kMaxDim;
  int64_t sizes[Tensor::kMaxDim], count = 1;
  for (int64_t d = 0; is_plain && d < indices.dim(); ++d) count *= sizes[d] = indices.size(d);
  const auto* const index = static_cast<const int64_t*>(indices.data());
  for (int64_t i = 0; is_plain && i < count; ++i) {
    is_plain = index[i] >= 0 && index[i] < table.size(0);
  }
  if (!is_plain) {
    give_back(stack, std::move(table), std::move(indices));
    return call_dispatcher("aten::embedding", "", stack);
  }
  sizes[indices.dim()] = table.size(1);
  Tensor rows = Tensor::empty(table.dtype(), sizes, indices.dim() + 1, table.device());
  const size_t bytes = table.size(1) * aoti_torch_dtype_element_size(table.dtype());
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(static_cast<char*>(rows.mutable_data()) + i * bytes,
                static_cast<const char*>(table.data()) + index[i] * bytes, bytes);
  }
  give_back(stack, rows);
}

}  // namespace hfla
