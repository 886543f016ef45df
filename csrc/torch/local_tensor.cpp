// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.

#include "torch/local_tensor.h"

#include <algorithm>
#include <new>
#include <utility>

#include "torch/shim.h"

namespace hfla {
namespace {

thread_local LocalResults* current_results = nullptr;

// Memory for local tensors, by powers of two of bytes. What comes back is given out again first,
// so that a token's numbers stay in the caches; when a recording ends, not much is kept.
class Pool {
 public:
  static constexpr size_t kLeastBytes = 512, kMostBytes = 1 << 20;

  ~Pool() { clear(); }

  static int32_t kind_of(size_t bytes) {
    int32_t kind = 0;
    while (kLeastBytes << kind < bytes) ++kind;
    return kind;
  }

  char* take(int32_t kind) {
    Free*& first = free_[kind];
    if (!first) return static_cast<char*>(::operator new(kLeastBytes << kind, kAlignment));
    kept_ -= kLeastBytes << kind;
    return reinterpret_cast<char*>(std::exchange(first, first->next));
  }

  void give(char* memory, int32_t kind) {
    kept_ += kLeastBytes << kind;
    free_[kind] = new (memory) Free{free_[kind]};
  }

  void clear_beyond(size_t bytes) {
    if (kept_ > bytes) clear();
  }

 private:
  struct Free {
    Free* next;
  };
  static constexpr std::align_val_t kAlignment{64};
  static constexpr int32_t kKinds = 12;
  static_assert(kLeastBytes << (kKinds - 1) == kMostBytes);

  void clear() {
    for (Free*& first : free_) {
      while (first) ::operator delete(std::exchange(first, first->next), kAlignment);
    }
    kept_ = 0;
  }

  Free* free_[kKinds] = {};
  size_t kept_ = 0;
};

constexpr size_t kMostKept = 8 << 20;

Pool& pool() {
  static thread_local Pool pool;
  return pool;
}

constexpr size_t kHeader = (sizeof(LocalTensor) + 63) / 64 * 64;

LocalTensor* new_tensor(size_t bytes) {
  const int32_t kind = Pool::kind_of(kHeader + bytes);
  char* const memory = pool().take(kind);
  auto* const tensor = new (memory) LocalTensor;
  tensor->references = 1;
  tensor->base = nullptr;
  tensor->torchs = nullptr;
  tensor->owns_torchs = false;
  tensor->memory = nullptr;
  tensor->offset = 0;
  tensor->memory_kind = kind;
  return tensor;
}

void set_layout(LocalTensor& tensor, int64_t dim, const int64_t* sizes, const int64_t* strides,
                int32_t dtype) {
  tensor.dim = dim;
  std::copy(sizes, sizes + dim, tensor.own_sizes);
  std::copy(strides, strides + dim, tensor.own_strides);
  tensor.sizes = tensor.own_sizes;
  tensor.strides = tensor.own_strides;
  tensor.dtype = dtype;
}

}  // namespace

const void* LocalTensor::data() const {
  const LocalTensor& owner = base ? *base : *this;
  const void* const first =
      owner.torchs ? read_of(owner.torchs, torch_get_const_data_ptr) : owner.memory;
  return first ? static_cast<const char*>(first) + offset : nullptr;
}

void* LocalTensor::mutable_data() {
  const LocalTensor& owner = base ? *base : *this;
  void* const first =
      owner.torchs ? read_of(owner.torchs, torch_get_mutable_data_ptr) : owner.memory;
  return first ? static_cast<char*>(first) + offset : nullptr;
}

bool LocalTensor::is_contiguous() const {
  int64_t expected = 1;
  bool is_contiguous = true;
  for (int64_t d = dim; d-- > 0;) {
    if (sizes[d] == 0) return true;
    is_contiguous &= sizes[d] == 1 || strides[d] == expected;
    expected *= sizes[d];
  }
  return is_contiguous;
}

AtenTensorOpaque* LocalTensor::to_torch() {
  AtenTensorHandle handle = nullptr;
  LocalTensor& owner = base ? *base : *this;
  if (torchs) {
    HFLA_TORCH_CALL(aoti_torch_new_tensor_handle(torchs, &handle));
  } else if (owner.torchs) {
    const auto numbers = offset / static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
    HFLA_TORCH_CALL(
        aoti_torch__reinterpret_tensor(owner.torchs, dim, sizes, strides, numbers, &handle));
  } else {
    owner.add_reference();
    HFLA_TORCH_CALL(torch_from_blob(
        mutable_data(), dim, sizes, strides, /*storage_offset=*/0, dtype,
        aoti_torch_device_type_cpu(), /*device_index=*/-1, &handle, aoti_torch_layout_strided(),
        /*opaque_metadata=*/nullptr, /*opaque_metadata_size=*/0,
        [](void*, void* context) { static_cast<LocalTensor*>(context)->remove_reference(); },
        &owner));
  }
  return handle;
}

LocalTensor* LocalTensor::empty(int64_t dim, const int64_t* sizes, const int64_t* strides,
                                int32_t dtype) {
  const bool is_asked_for = current_results && current_results->are_made;
  if (!is_asked_for || dim > kMaxDim || !torch_from_blob) return nullptr;
  size_t bytes = aoti_torch_dtype_element_size(dtype);
  for (int64_t d = 0; d < dim; ++d) {
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(sizes[d]), &bytes)) return nullptr;
  }
  if (bytes > Pool::kMostBytes - kHeader) return nullptr;
  LocalTensor* const tensor = new_tensor(bytes);
  set_layout(*tensor, dim, sizes, strides, dtype);
  tensor->memory = reinterpret_cast<char*>(tensor) + kHeader;
  return tensor;
}

LocalTensor* LocalTensor::of_torch(AtenTensorOpaque* torchs, bool owns) {
  LocalTensor* const tensor = new_tensor(0);
  tensor->torchs = torchs;
  tensor->owns_torchs = owns;
  tensor->dim = read_of(torchs, aoti_torch_get_dim);
  tensor->sizes = read_of(torchs, aoti_torch_get_sizes);
  tensor->strides = read_of(torchs, aoti_torch_get_strides);
  tensor->dtype = read_of(torchs, aoti_torch_get_dtype);
  return tensor;
}

LocalTensor* LocalTensor::view(LocalTensor* x, int64_t dim, const int64_t* sizes,
                               const int64_t* strides, int64_t offset) {
  LocalTensor* const tensor = new_tensor(0);
  set_layout(*tensor, dim, sizes, strides, x->dtype);
  const auto bytes = static_cast<int64_t>(aoti_torch_dtype_element_size(x->dtype));
  tensor->offset = x->offset + offset * bytes;
  tensor->base = x->base ? x->base : x;
  tensor->base->add_reference();
  return tensor;
}

void LocalTensor::destroy() {
  if (owns_torchs) aoti_torch_delete_tensor_object(torchs);
  if (base) base->remove_reference();
  pool().give(reinterpret_cast<char*>(this), memory_kind);
}

LocalResults::LocalResults() : outer_(std::exchange(current_results, this)) {}

LocalResults::~LocalResults() {
  current_results = outer_;
  if (!outer_) pool().clear_beyond(kMostKept);
}

}  // namespace hfla
