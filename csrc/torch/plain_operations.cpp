// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.

#include "torch/plain_operations.h"

#include <cstring>
#include <functional>
#include <utility>
#include <vector>

namespace hfla {
namespace {

constexpr int64_t kFewNumbers = 16384;  // for which one thread is enough

float to_float(float x) { return x; }
float to_float(uint16_t bfloat16) {
  const uint32_t bits = uint32_t{bfloat16} << 16;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

void store_float(float x, float* to) { *to = x; }
void store_float(float x, uint16_t* bfloat16) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  *bfloat16 = static_cast<uint16_t>(x == x ? nearest : 0x7fc0);
}

template <class Number, class Combine>
void combine(const Tensor& a, const Tensor& b, Tensor& result, int64_t count, Combine combine) {
  const auto *from_a = static_cast<const Number*>(a.data()),
             *from_b = static_cast<const Number*>(b.data());
  auto* const to = static_cast<Number*>(result.mutable_data());
  for (int64_t i = 0; i < count; ++i) {
    store_float(combine(to_float(from_a[i]), to_float(from_b[i])), to + i);
  }
}

// Gives back op(a, b), rounded as torch's is; or leaves it to torch.
template <class Combine>
bool combine_plain(StableIValue* stack, const Tensor& a, const Tensor& b, Combine op) {
  const bool is_half = a.dtype() == aoti_torch_dtype_bfloat16();
  bool is_plain = (is_half || a.dtype() == aoti_torch_dtype_float32()) && b.dtype() == a.dtype() &&
                  a.dim() == b.dim() && a.dim() <= Tensor::kMaxDim && a.is_contiguous() &&
                  b.is_contiguous();
  int64_t count = 1;
  for (int64_t d = 0; is_plain && d < a.dim(); ++d) {
    is_plain = a.size(d) == b.size(d);
    count *= a.size(d);
  }
  if (!is_plain || count > kFewNumbers) return false;
  Tensor result = Tensor::empty(a.dtype(), a.sizes(), a.dim(), a.device());
  is_half ? combine<uint16_t>(a, b, result, count, op) : combine<float>(a, b, result, count, op);
  give_back(stack, result);
  return true;
}

// By op, or by torch's function for it.
template <class Combine, class Torchs>
void combine_two(StableIValue* stack, Combine op, Torchs torchs) {
  Arguments arguments(stack);
  const Tensor a = arguments.tensor();
  const Tensor b = arguments.tensor();
  if (combine_plain(stack, a, b, op)) return;
  AtenTensorHandle result = nullptr;
  HFLA_TORCH_CALL(torchs(a.get(), b.get(), &result));
  give_back(stack, Tensor(result));
}

}  // namespace

void call_dispatcher(const char* name, const char* overload, StableIValue* stack) {
  HFLA_TORCH_CALL(torch_call_dispatcher(name, overload, stack, kTorchBuildVersion));
}

void add(StableIValue* stack) {
  combine_two(stack, std::plus<float>(), [](auto a, auto b, auto* result) {
    return aoti_torch_cpu_add_Tensor(a, b, 1, result);
  });
}

void mul(StableIValue* stack) {
  combine_two(stack, std::multiplies<float>(), aoti_torch_cpu_mul_Tensor);
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
