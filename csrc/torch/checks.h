// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What all ops check of tensors.
//
// The checks guard memory: whatever is passed to torch.ops.hf_linear_attention raises or gives an
// answer, and never reads out of bounds.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/common.h"
#include "torch/shim.h"

namespace hfla {

// ---- dtypes ----

struct DTypeName {
  int32_t (*code)();
  const char* name;
};

constexpr DTypeName kDTypeNames[] = {
    {aoti_torch_dtype_float32, "float32"}, {aoti_torch_dtype_float64, "float64"},
    {aoti_torch_dtype_float16, "float16"}, {aoti_torch_dtype_bfloat16, "bfloat16"},
    {aoti_torch_dtype_int32, "int32"},     {aoti_torch_dtype_int64, "int64"},
    {aoti_torch_dtype_bool, "bool"},       {aoti_torch_dtype_uint8, "uint8"},
    {aoti_torch_dtype_int8, "int8"},
};

// A dtype in a message; its name is looked up only when the message is written.
struct PrintedDType {
  int32_t code;
};

inline std::ostream& operator<<(std::ostream& out, PrintedDType printed) {
  for (const DTypeName& dtype : kDTypeNames) {
    if (dtype.code() == printed.code) return out << dtype.name;
  }
  return out << "another dtype";
}

inline DType dtype_of(const char* name, int32_t code) {
  if (code == aoti_torch_dtype_float32()) return DType::f32;
  if (code == aoti_torch_dtype_bfloat16()) return DType::bf16;
  if (code == aoti_torch_dtype_float16()) return DType::f16;
  if (code == aoti_torch_dtype_float64()) return DType::f64;
  fail(name, " must be float32, bfloat16, float16 or float64, got ", PrintedDType{code});
}

inline DType dtype_of(const char* name, const Tensor& tensor) {
  return dtype_of(name, tensor.dtype());
}

// States, den and log decays.
inline int32_t accumulation_dtype(DType dtype) {
  return dtype == DType::f64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
}

// ---- checks ----

// A shape, written as in Python.
struct Shape {
  const int64_t* sizes;
  int64_t dim;
};

inline Shape shape_of(const Tensor& tensor) { return {tensor.sizes(), tensor.dim()}; }

inline std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '(';
  for (int64_t d = 0; d < shape.dim; ++d) out << (d ? ", " : "") << shape.sizes[d];
  return out << (shape.dim == 1 ? ",)" : ")");
}

inline void check_tensor(const char* name, const Tensor& tensor, Device device, int32_t dtype,
                         const Shape& expected) {
  const Device its = tensor.device();
  check(its.type == device.type && its.index == device.index, name, " must be on ", device,
        " here, got ", its);
  check(tensor.dtype() == dtype, name, " must be ", PrintedDType{dtype}, " here, got ",
        PrintedDType{tensor.dtype()});
  const Shape got = shape_of(tensor);
  bool equal = got.dim == expected.dim;
  for (int64_t d = 0; equal && d < got.dim; ++d) equal = got.sizes[d] == expected.sizes[d];
  check(equal, name, " must have shape ", expected, ", got ", got);
}

inline void check_tensor(const char* name, const Tensor& tensor, Device device, int32_t dtype,
                         std::initializer_list<int64_t> sizes) {
  check_tensor(name, tensor, device, dtype,
               Shape{sizes.begin(), static_cast<int64_t>(sizes.size())});
}

inline void check_contiguous_tensor(const char* name, const Tensor& tensor, Device device,
                                    int32_t dtype, std::initializer_list<int64_t> sizes) {
  check_tensor(name, tensor, device, dtype, sizes);
  check(tensor.is_contiguous(), name, " must be contiguous");
}

// ---- data ----

// A result that does not exist.
inline Tensor none(int32_t dtype, Device device) { return Tensor::empty(dtype, {0}, device); }

// For the gradient of an input that may be absent, and then for none of a dtype.
inline Tensor empty_like(const Tensor& input, int32_t dtype, Device device) {
  return input ? Tensor::empty(input.dtype(), input.sizes(), input.dim(), device)
               : none(dtype, device);
}

template <class Element = void>
const Element* data_or_null(const Tensor& tensor) {
  return tensor ? static_cast<const Element*>(tensor.data()) : nullptr;
}

// The same of a tensor that, if it is there, has to be contiguous.
template <class Element = void>
const Element* check_optional(const char* name, const Tensor& tensor, Device device, int32_t dtype,
                              std::initializer_list<int64_t> sizes) {
  if (tensor) check_contiguous_tensor(name, tensor, device, dtype, sizes);
  return data_or_null<Element>(tensor);
}

inline const bool* check_mask(const char* name, const Tensor& mask, Device device,
                              std::initializer_list<int64_t> sizes) {
  return check_optional<bool>(name, mask, device, aoti_torch_dtype_bool(), sizes);
}

// Kernels' structs have one pointer type for what they read and what they write.
inline void* input_data(const Tensor& tensor) { return const_cast<void*>(tensor.data()); }

// ---- states by slot ----

// A state that a step changes: rows or slots, contiguous each, and apart. Returns the stride
// between them.
inline int64_t check_slots(const char* name, const Tensor& state, Device device, int32_t dtype,
                           std::initializer_list<int64_t> sizes) {
  check_tensor(name, state, device, dtype, sizes);
  const int64_t *size = state.sizes(), *stride = state.strides();
  if (size[0] == 0) return 0;
  int64_t numbers = 1;  // in what the dimensions so far hold
  for (int64_t d = state.dim() - 1; d > 0; --d) {
    check(size[d] == 1 || stride[d] == numbers, "each slot of ", name, " must be contiguous");
    numbers *= size[d];
  }
  check(size[0] == 1 || stride[0] >= numbers, "the slots of ", name, " must not overlap");
  return stride[0];
}

// The same for a state of any strides. Dimensions that interleave, as only as_strided makes them,
// count as overlapping.
inline void check_slots_of_any_strides(const char* name, const Tensor& state, Device device,
                                       int32_t dtype, std::initializer_list<int64_t> sizes) {
  check_tensor(name, state, device, dtype, sizes);
  const int64_t *size = state.sizes(), *stride = state.strides();
  std::pair<int64_t, int64_t> dims[Tensor::kMaxDim];  // stride and size
  const auto dim = static_cast<int64_t>(sizes.size());
  for (int64_t d = 0; d < dim; ++d) {
    if (size[d] == 0) return;
    dims[d] = {stride[d], size[d]};
  }
  std::sort(dims, dims + dim);
  int64_t reach = 0;  // from the first to the last number of the dimensions so far
  for (int64_t d = 0; d < dim; ++d) {
    const auto [its_stride, its_size] = dims[d];
    check(its_size == 1 || its_stride > reach, "the slots of ", name, " must not overlap");
    reach += (its_size - 1) * its_stride;
  }
}

// How many slots a state has: one for each of B rows, or any number with indices. What it must be
// besides, check_slots says.
inline int64_t num_slots(const Tensor& state, const Tensor& state_indices, int64_t B) {
  return state_indices && state.dim() > 0 ? state.size(0) : B;
}

// The CPU kernels write where these say, so the contents are checked as well. To look at those of a
// device would be to wait for it; its kernels check each before they use it.
inline Slots check_state_indices(const Tensor& state_indices, Device device, int64_t B,
                                 int64_t count) {
  if (!state_indices) return {count, nullptr};
  check_contiguous_tensor("state_indices", state_indices, device, aoti_torch_dtype_int32(), {B});
  const auto* const indices = data_or_null<int32_t>(state_indices);
  if (is_cuda(device)) return {count, indices};

  std::vector<bool> taken(static_cast<size_t>(count));
  for (int64_t b = 0; b < B; ++b) {
    const int32_t index = indices[b];
    check(index >= -1 && index < count, "state_indices must be from -1 to ", count - 1, ", got ",
          index);
    if (index < 0) continue;
    check(!taken[index], "state_indices must differ from each other, got ", index, " twice");
    taken[index] = true;
  }
  return {count, indices};
}

// The same for sequences, and which of them begin from zero.
inline SequenceSlots check_sequence_slots(const Tensor& state_indices, const Tensor& is_new,
                                          Device device, int64_t num_sequences, int64_t count) {
  const Slots slots = check_state_indices(state_indices, device, num_sequences, count);
  return {slots.state_indices, check_mask("is_new", is_new, device, {num_sequences})};
}

}  // namespace hfla
