// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.

#include "torch/plain_operations.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <type_traits>
#include <utility>
#include <vector>

namespace hfla {
namespace {

constexpr int64_t kFewNumbers = 16384;  // for which one thread is enough

float to_float(float x) { return x; }
float to_float(double number) { return static_cast<float>(number); }
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

bool is_half(const Tensor& x) { return x.dtype() == aoti_torch_dtype_bfloat16(); }

// Whether its numbers are computed with in float32.
bool is_plain(const Tensor& x) {
  return x.dim() <= Tensor::kMaxDim && (is_half(x) || x.dtype() == aoti_torch_dtype_float32());
}

// Calls body(type of a number) for a plain tensor.
template <class Body>
void with_number(const Tensor& x, Body body) {
  is_half(x) ? body(uint16_t()) : body(float());
}

int64_t count_of(const Tensor& x) {
  int64_t count = 1;
  for (int64_t d = 0; d < x.dim(); ++d) count *= x.size(d);
  return count;
}

// ---- two tensors, element by element ----

// Of a result that two tensors are broadcast to, and of each of them, in the dimensions of it.
struct Pair {
  int64_t dim, count = 1;
  int64_t sizes[Tensor::kMaxDim], strides_a[Tensor::kMaxDim], strides_b[Tensor::kMaxDim];
};

// False where they can't be broadcast, or have too many dimensions.
bool broadcast(const Tensor& a, const Tensor& b, Pair& pair) {
  if (a.dim() > Tensor::kMaxDim || b.dim() > Tensor::kMaxDim) return false;
  pair.dim = std::max(a.dim(), b.dim());
  for (int64_t d = pair.dim; d-- > 0;) {
    const int64_t in_a = d - (pair.dim - a.dim()), in_b = d - (pair.dim - b.dim());
    const int64_t size_a = in_a < 0 ? 1 : a.size(in_a), size_b = in_b < 0 ? 1 : b.size(in_b);
    if (size_a != size_b && size_a != 1 && size_b != 1) return false;
    const int64_t size = pair.sizes[d] = size_a == 1 ? size_b : size_a;
    pair.strides_a[d] = size_a == 1 ? 0 : a.strides()[in_a];
    pair.strides_b[d] = size_b == 1 ? 0 : b.strides()[in_b];
    pair.count *= size;
  }
  return true;
}

// The same elements in their order by as few dimensions as there can be.
Pair collapsed(const Pair& pair) {
  Pair result;
  result.dim = 0;
  for (int64_t d = 0; d < pair.dim; ++d) {
    const int64_t size = pair.sizes[d], stride_a = pair.strides_a[d], stride_b = pair.strides_b[d];
    if (size == 1) continue;
    const int64_t last = result.dim - 1;
    const bool goes_on = last >= 0 && result.strides_a[last] == size * stride_a &&
                         result.strides_b[last] == size * stride_b;
    const int64_t at = goes_on ? last : result.dim++;
    result.sizes[at] = goes_on ? result.sizes[at] * size : size;
    result.strides_a[at] = stride_a;
    result.strides_b[at] = stride_b;
  }
  return result;
}

// Of the elements that are as far from each other as the one before, in a and in b.
struct Row {
  int64_t a, b, count, stride_a, stride_b;
};

// Calls body(Row) for the rows of a result in their order.
template <class Body>
void for_each_row(const Pair& pair, const Body& body, int64_t d = 0, int64_t a = 0, int64_t b = 0) {
  if (pair.dim == 0) return body(Row{a, b, 1, 1, 1});
  const int64_t stride_a = pair.strides_a[d], stride_b = pair.strides_b[d];
  if (d == pair.dim - 1) return body(Row{a, b, pair.sizes[d], stride_a, stride_b});
  for (int64_t i = 0; i < pair.sizes[d]; ++i) {
    for_each_row(pair, body, d + 1, a + i * stride_a, b + i * stride_b);
  }
}

template <class A, class B, class Number, class Combine>
void combine(const Pair& pair, const A* a, const B* b, Number* to, Combine op) {
  using One = std::integral_constant<int64_t, 1>;
  using None = std::integral_constant<int64_t, 0>;
  for_each_row(collapsed(pair), [&](const Row& row) {
    const auto run = [&](auto stride_a, auto stride_b) {
      const A* const from_a = a + row.a;
      const B* const from_b = b + row.b;
      for (int64_t i = 0; i < row.count; ++i) {
        store_float(op(to_float(from_a[i * stride_a]), to_float(from_b[i * stride_b])), to + i);
      }
    };
    if (row.stride_a == 1 && row.stride_b == 1) {
      run(One(), One());
    } else if (row.stride_a == 1 && row.stride_b == 0) {
      run(One(), None());
    } else {
      run(row.stride_a, row.stride_b);
    }
    to += row.count;
  });
}

// A number where torch's operation takes a tensor; to halves each operation rounds it in its own
// way.
bool is_number(const Tensor& x) { return x.dim() == 0 && x.dtype() == aoti_torch_dtype_float64(); }

// Gives back op(a, b), rounded as torch's is; or leaves it to torch. To a tensor without dimensions
// torch gives the dtype of the other.
template <class Combine>
bool combine_plain(StableIValue* stack, const Tensor& a, const Tensor& b, Combine op) {
  Pair pair;
  const bool are_two =
      is_plain(a) && is_plain(b) && (a.dtype() == b.dtype() || (a.dim() > 0 && b.dim() > 0));
  const bool has_number = is_plain(a) && !is_half(a) && a.dim() > 0 && is_number(b);
  if (!(are_two || has_number) || !broadcast(a, b, pair) || pair.count > kFewNumbers) return false;
  const bool has_as_a = has_number || !is_half(a);
  Tensor result = Tensor::empty(has_as_a ? a.dtype() : b.dtype(), pair.sizes, pair.dim, a.device());
  const auto into_result = [&](const auto* from_a, const auto* from_b) {
    with_number(result, [&](auto number) {
      combine(pair, from_a, from_b, static_cast<decltype(number)*>(result.mutable_data()), op);
    });
  };
  with_number(a, [&](auto number) {
    const auto* const from_a = static_cast<const decltype(number)*>(a.data());
    if (has_number) return into_result(from_a, static_cast<const double*>(b.data()));
    with_number(
        b, [&](auto other) { into_result(from_a, static_cast<const decltype(other)*>(b.data())); });
  });
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
  HFLA_TORCH_CALL(torchs(a.as_torch().get(), b.as_torch().get(), &result));
  give_back(stack, Tensor(result));
}

// ---- copies ----

template <size_t bytes>
void copy_numbers(const Pair& pair, char* to, const char* from) {
  for_each_row(pair, [&](const Row& row) {
    char* const target = to + row.a * bytes;
    const char* const source = from + row.b * bytes;
    if (row.stride_a == 1 && row.stride_b == 1) {
      std::memcpy(target, source, row.count * bytes);
      return;
    }
    for (int64_t i = 0; i < row.count; ++i) {
      std::memcpy(target + i * row.stride_a * bytes, source + i * row.stride_b * bytes, bytes);
    }
  });
}

// Writes `from` to all of `to`, of the same dtype; false where it can't.
bool copy(Tensor& to, const Tensor& from) {
  Pair pair;
  if (to.dtype() != from.dtype() || !broadcast(to, from, pair) || pair.dim != to.dim() ||
      pair.count != count_of(to)) {
    return false;
  }
  if (pair.count == 0) return true;  // memcpy takes no null
  auto* const target = static_cast<char*>(to.mutable_data());
  const auto* const source = static_cast<const char*>(from.data());
  const size_t bytes = aoti_torch_dtype_element_size(to.dtype());
  const Pair rows = collapsed(pair);
  switch (bytes) {
    case 1:
      copy_numbers<1>(rows, target, source);
      return true;
    case 2:
      copy_numbers<2>(rows, target, source);
      return true;
    case 4:
      copy_numbers<4>(rows, target, source);
      return true;
    case 8:
      copy_numbers<8>(rows, target, source);
      return true;
    default:
      return false;
  }
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

Tensor view(const Tensor& x, int64_t dim, const int64_t* sizes, const int64_t* strides,
            int64_t offset) {
  int64_t last = offset, last_of_x = 0;
  bool is_within = offset >= 0, is_empty = false;
  for (int64_t d = 0; is_within && d < dim; ++d) {
    is_within = sizes[d] >= 0 && strides[d] >= 0;
    is_empty |= sizes[d] == 0;
    last += (sizes[d] - 1) * strides[d];
  }
  for (int64_t d = 0; d < x.dim(); ++d) last_of_x += (x.size(d) - 1) * x.strides()[d];
  check(is_within && (is_empty || last <= last_of_x), "a view must be within its tensor");
  if (x.local() && dim <= Tensor::kMaxDim) {
    return Tensor(LocalTensor::view(x.local(), dim, sizes, strides, offset));
  }
  AtenTensorHandle result = nullptr;
  HFLA_TORCH_CALL(
      aoti_torch__reinterpret_tensor(x.as_torch().get(), dim, sizes, strides, offset, &result));
  return Tensor(result);
}

void to_dtype(StableIValue* stack) {
  Arguments arguments(stack);
  Tensor x = arguments.tensor();
  const auto dtype = static_cast<int32_t>(arguments.integer());
  const bool is_to_half = dtype == aoti_torch_dtype_bfloat16();
  const int64_t count = count_of(x);
  if (!is_plain(x) || !(is_to_half || dtype == aoti_torch_dtype_float32()) || !x.is_contiguous() ||
      count > kFewNumbers) {
    const StableIValue rest[] = {0, 0, 0, 0,
                                 0};  // layout, device, pin_memory, non_blocking, format
    give_back(stack, x.as_torch());
    stack[1] = reinterpret_cast<StableIValue>(new StableIValue(dtype));
    std::copy(std::begin(rest), std::end(rest), stack + 2);
    return call_dispatcher("aten::_to_copy", "", stack);
  }
  Tensor result = Tensor::empty(dtype, x.sizes(), x.dim(), x.device());
  with_number(x, [&](auto number) {
    const auto* const from = static_cast<const decltype(number)*>(x.data());
    with_number(result, [&](auto other) {
      auto* const to = static_cast<decltype(other)*>(result.mutable_data());
      for (int64_t i = 0; i < count; ++i) store_float(to_float(from[i]), to + i);
    });
  });
  give_back(stack, result);
}

void clone(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  check(x.dim() <= Tensor::kMaxDim, "x must have at most ", Tensor::kMaxDim, " dimensions");
  Tensor result = Tensor::empty(x.dtype(), x.sizes(), x.dim(), x.device());
  check(copy(result, x), "x must be of a dtype of up to 8 bytes");
  give_back(stack, result);
}

void copy_to(StableIValue* stack) {
  Arguments arguments(stack);
  Tensor x = arguments.tensor();
  Tensor source = arguments.tensor();
  if (!copy(x, source)) {
    give_back(stack, x.as_torch(), source.as_torch());
    return call_dispatcher("aten::copy_", "", stack);
  }
  give_back(stack, x);
}

void cat(StableIValue* stack) {
  Arguments arguments(stack);
  std::vector<Tensor> parts = arguments.tensors();
  const int64_t given_dim = arguments.integer();
  const int64_t dim = parts.empty() ? 0 : parts[0].dim(), along = given_dim + (given_dim < 0) * dim;
  bool are_plain = !parts.empty() && along >= 0 && along < dim && dim <= Tensor::kMaxDim;
  int64_t sizes[Tensor::kMaxDim], before = 1;
  for (int64_t d = 0; are_plain && d < dim; ++d) {
    sizes[d] = d == along ? 0 : parts[0].size(d);
    before *= d < along ? sizes[d] : 1;
  }
  for (size_t i = 0; are_plain && i < parts.size(); ++i) {
    const Tensor& part = parts[i];
    are_plain = part.dim() == dim && part.dtype() == parts[0].dtype() && part.is_contiguous();
    for (int64_t d = 0; are_plain && d < dim; ++d) {
      if (d == along) sizes[d] += part.size(d);
      are_plain = d == along || part.size(d) == sizes[d];
    }
  }
  if (!are_plain) {
    std::vector<StableIValue> handles;
    for (const Tensor& part : parts) {
      handles.push_back(reinterpret_cast<StableIValue>(part.as_torch().release()));
    }
    stack[0] = list_of(handles.data(), handles.size());
    return call_dispatcher("aten::cat", "", stack);
  }
  Tensor result = Tensor::empty(parts[0].dtype(), sizes, dim, parts[0].device());
  auto* to = static_cast<char*>(result.mutable_data());
  const size_t bytes = aoti_torch_dtype_element_size(result.dtype());
  for (int64_t i = 0; i < before; ++i) {
    for (const Tensor& part : parts) {
      const size_t size = bytes * static_cast<size_t>(count_of(part) / before);
      if (size == 0) continue;  // memcpy takes no null
      std::memcpy(to, static_cast<const char*>(part.data()) + size * static_cast<size_t>(i), size);
      to += size;
    }
  }
  give_back(stack, result);
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
    give_back(stack, table.as_torch(), indices.as_torch());
    return call_dispatcher("aten::embedding", "", stack);
  }
  sizes[indices.dim()] = table.size(1);
  Tensor rows = Tensor::empty(table.dtype(), sizes, indices.dim() + 1, table.device());
  const size_t bytes = table.size(1) * aoti_torch_dtype_element_size(table.dtype());
  for (int64_t i = 0; bytes > 0 && i < count; ++i) {
    std::memcpy(static_cast<char*>(rows.mutable_data()) + i * bytes,
                static_cast<const char*>(table.data()) + index[i] * bytes, bytes);
  }
  give_back(stack, rows);
}

}  // namespace hfla
