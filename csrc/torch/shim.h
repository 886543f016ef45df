// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The part of libtorch's stable C ABI (torch >= 2.10) that the bindings use, declared by hand under
// libtorch's own names, so that building needs no torch; then the few classes that make it
// pleasant. tests/native/test_build.py compiles this file beside torch's headers, where a wrong
// prototype is an error.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "torch/local_tensor.h"
#include "torch/memory.h"

extern "C" {

// 0 is success.
using AOTITorchError = int32_t;

// An at::Tensor on libtorch's heap.
struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;

// Makes a device the current one until it is deleted.
struct DeviceGuardOpaque;
using DeviceGuardHandle = DeviceGuardOpaque*;

// One argument or result of an op: a number, or a tensor handle that the receiver owns, or, for an
// optional argument, null or a pointer to a StableIValue on the heap, which the receiver deletes.
using StableIValue = uint64_t;

// A list of StableIValues. Who receives one owns it, but not what is in it: each look at an element
// gives a new one.
struct StableListOpaque;
using StableListHandle = StableListOpaque*;

class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_device_type_cuda();
int32_t aoti_torch_dtype_bool();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
size_t aoti_torch_dtype_element_size(int32_t dtype);
int32_t aoti_torch_layout_strided();

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** borrowed_sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** borrowed_strides);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* device_type);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* device_index);
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle tensor, bool* is_contiguous);
AOTITorchError aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t device_type, int32_t device_index,
                                        AtenTensorHandle* new_tensor);
// Another look at a tensor's numbers; the offset is from the tensor's first.
AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle tensor, int64_t dim,
                                              const int64_t* sizes, const int64_t* strides,
                                              int64_t offset, AtenTensorHandle* new_tensor);
// Of the same tensor.
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* new_tensor);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data);
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** data);

AOTITorchError aoti_torch_cpu_add_Tensor(AtenTensorHandle a, AtenTensorHandle b, double alpha,
                                         AtenTensorHandle* new_tensor);
AOTITorchError aoti_torch_cpu_mul_Tensor(AtenTensorHandle a, AtenTensorHandle b,
                                         AtenTensorHandle* new_tensor);

AOTITorchError torch_new_list_reserve_size(size_t size, StableListHandle* new_list);
AOTITorchError torch_list_size(StableListHandle list, size_t* size);
AOTITorchError torch_list_get_item(StableListHandle list, size_t index, StableIValue* element);
AOTITorchError torch_list_push_back(StableListHandle list, StableIValue element);
AOTITorchError torch_delete_list(StableListHandle list);

// Throws an exception of torch's, with the message, unless `condition` is true.
void aoti_torch_check(bool condition, const char* function, const char* file, uint32_t line,
                      const char* message);

// Runs an op of torch on a stack of arguments, which it takes, and puts the results there.
AOTITorchError torch_call_dispatcher(const char* op, const char* overload, StableIValue* stack,
                                     uint64_t build_version);

AOTITorchError aoti_torch_create_device_guard(int32_t device_index, DeviceGuardHandle* new_guard);
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard);

AOTITorchError torch_get_num_threads(uint32_t* num_threads);
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size,
                                  void (*body)(int64_t begin, int64_t end, void* context),
                                  void* context);

AOTITorchError aoti_torch_library_init_def(const char* op_namespace, const char* file,
                                           uint32_t line, TorchLibraryHandle* new_library);
AOTITorchError aoti_torch_library_init_impl(const char* op_namespace, const char* dispatch_key,
                                            const char* file, uint32_t line,
                                            TorchLibraryHandle* new_library);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle library, const char* schema);
AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* op,
                                  void (*kernel)(StableIValue* stack, uint64_t num_arguments,
                                                 uint64_t num_results),
                                  uint64_t build_version);

}  // extern "C"

// Of torch >= 2.11; null where the library was loaded into an older one. deleter(data, context) is
// called when the storage is gone.
extern "C" __attribute__((weak)) AOTITorchError torch_from_blob(
    void* data, int64_t dim, const int64_t* sizes, const int64_t* strides, int64_t storage_offset,
    int32_t dtype, int32_t device_type, int32_t device_index, AtenTensorHandle* new_tensor,
    int32_t layout, const uint8_t* opaque_metadata, int64_t opaque_metadata_size,
    void (*deleter)(void* data, void* context), void* context);

namespace hfla {

// The torch whose conventions for StableIValues this file follows: 2.10.
constexpr uint64_t kTorchBuildVersion = (2ull << 56) | (10ull << 48);

// A StableIValue holds a bool or a double in its lowest bytes.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "only little-endian machines");

// Becomes a RuntimeError in Python.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

template <class... Parts>
void check(bool condition, const Parts&... parts) {
  if (__builtin_expect(!condition, 0)) fail(parts...);
}

// The ABI tells only whether a call worked.
#define HFLA_TORCH_CALL(call) ::hfla::check((call) == 0, #call " failed")

struct Device {
  int32_t type, index;
};

inline bool is_cuda(Device device) { return device.type == aoti_torch_device_type_cuda(); }

inline std::ostream& operator<<(std::ostream& out, Device device) {
  if (device.type == aoti_torch_device_type_cpu()) return out << "the CPU";
  return is_cuda(device) ? out << "cuda:" << device.index : out << "another kind of device";
}

// Of a tensor of torch's, by one of the functions above.
template <class Value>
Value read_of(AtenTensorHandle tensor, AOTITorchError (*getter)(AtenTensorHandle, Value*)) {
  Value value;
  check(getter(tensor, &value) == 0, "libtorch could not read a tensor");
  return value;
}

// Owns a tensor, or nothing: an optional argument that was None. It is a handle of torch's, or, in
// a recording, a local tensor: then the lowest bit of the handle is 1.
class Tensor {
 public:
  static constexpr int64_t kMaxDim = LocalTensor::kMaxDim;

  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  explicit Tensor(LocalTensor* local)
      : handle_(reinterpret_cast<AtenTensorHandle>(reinterpret_cast<uintptr_t>(local) | kLocal)) {}
  Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (LocalTensor* const local = this->local()) {
      local->remove_reference();
    } else if (handle_) {
      aoti_torch_delete_tensor_object(handle_);
    }
  }

  // A contiguous one, not initialised; a large one on the CPU may be on kept memory.
  static Tensor empty(int32_t dtype, std::initializer_list<int64_t> sizes, Device device) {
    return empty(dtype, sizes.begin(), static_cast<int64_t>(sizes.size()), device);
  }
  static Tensor empty(int32_t dtype, const int64_t* sizes, int64_t dim, Device device) {
    check(dim <= kMaxDim, "Tensor::empty makes tensors of up to ", kMaxDim, " dimensions");
    int64_t strides[kMaxDim];
    int64_t stride = 1;
    for (int64_t d = dim - 1; d >= 0; --d) {
      strides[d] = stride;
      stride *= sizes[d];
    }
    AtenTensorHandle handle = nullptr;
    if (device.type == aoti_torch_device_type_cpu()) {
      if (LocalTensor* const local = LocalTensor::empty(dim, sizes, strides, dtype)) {
        return Tensor(local);
      }
      handle = new_tensor_on_kept_memory(dim, sizes, strides, dtype);
    }
    if (!handle) {
      HFLA_TORCH_CALL(
          aoti_torch_empty_strided(dim, sizes, strides, dtype, device.type, device.index, &handle));
    }
    return Tensor(handle);
  }

  explicit operator bool() const { return handle_ != nullptr; }

  // Null where it is torch's, or nothing.
  LocalTensor* local() const {
    const auto bits = reinterpret_cast<uintptr_t>(handle_);
    return bits & kLocal ? reinterpret_cast<LocalTensor*>(bits ^ kLocal) : nullptr;
  }

  // For a stack of this library's ops, which take either kind.
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

  // The same tensor, which torch can be given.
  Tensor as_torch() const {
    AtenTensorHandle handle = nullptr;
    if (local()) {
      handle = local()->to_torch();
    } else if (handle_) {
      HFLA_TORCH_CALL(aoti_torch_new_tensor_handle(handle_, &handle));
    }
    return Tensor(handle);
  }
  AtenTensorHandle get() const { return handle_; }

  int64_t dim() const { return local() ? local()->dim : get<int64_t>(aoti_torch_get_dim); }
  const int64_t* sizes() const {
    return local() ? local()->sizes : get<int64_t*>(aoti_torch_get_sizes);
  }
  const int64_t* strides() const {
    return local() ? local()->strides : get<int64_t*>(aoti_torch_get_strides);
  }
  int64_t size(int64_t d) const { return sizes()[d]; }
  int32_t dtype() const { return local() ? local()->dtype : get<int32_t>(aoti_torch_get_dtype); }
  Device device() const {
    if (local()) return {aoti_torch_device_type_cpu(), -1};
    return {get<int32_t>(aoti_torch_get_device_type), get<int32_t>(aoti_torch_get_device_index)};
  }
  const void* data() const {
    return local() ? local()->data() : get<const void*>(torch_get_const_data_ptr);
  }
  void* mutable_data() {
    return local() ? local()->mutable_data() : get<void*>(torch_get_mutable_data_ptr);
  }
  bool is_contiguous() const {
    return local() ? local()->is_contiguous() : get<bool>(aoti_torch_is_contiguous);
  }

 private:
  static constexpr uintptr_t kLocal = 1;

  template <class Value>
  Value get(AOTITorchError (*getter)(AtenTensorHandle, Value*)) const {
    return read_of(handle_, getter);
  }

  AtenTensorHandle handle_ = nullptr;
};

// Takes the arguments of a call off the stack in the order of its schema. Every argument has to be
// taken before anything can throw: what is left on the stack is never freed.
class Arguments {
 public:
  explicit Arguments(const StableIValue* stack) : next_(stack) {}

  Tensor tensor() { return to_tensor(*next_++); }

  Tensor optional_tensor() {
    auto* boxed = reinterpret_cast<StableIValue*>(*next_++);
    if (!boxed) return Tensor();
    Tensor tensor = to_tensor(*boxed);
    delete boxed;
    return tensor;
  }

  std::vector<Tensor> tensors() {
    std::vector<Tensor> tensors;
    for_each_element([&](StableIValue element) { tensors.push_back(to_tensor(element)); });
    return tensors;
  }

  std::vector<int64_t> integers() {
    std::vector<int64_t> integers;
    for_each_element([&](StableIValue element) { integers.push_back(int64_t(element)); });
    return integers;
  }

  int64_t integer() { return static_cast<int64_t>(*next_++); }
  bool boolean() { return read<bool>(); }
  double number() { return read<double>(); }

 private:
  static Tensor to_tensor(StableIValue value) {
    return Tensor(reinterpret_cast<AtenTensorHandle>(value));
  }

  template <class Body>
  void for_each_element(Body body) {
    const auto list = reinterpret_cast<StableListHandle>(*next_++);
    size_t size = 0;
    HFLA_TORCH_CALL(torch_list_size(list, &size));
    for (size_t i = 0; i < size; ++i) {
      StableIValue element = 0;
      HFLA_TORCH_CALL(torch_list_get_item(list, i, &element));
      body(element);
    }
    HFLA_TORCH_CALL(torch_delete_list(list));
  }

  template <class Value>
  Value read() {
    Value value;
    std::memcpy(&value, next_++, sizeof(value));
    return value;
  }

  const StableIValue* next_;
};

// Puts the results of a call on the stack, which owns them from then on.
template <class... Tensors>
void give_back(StableIValue* stack, Tensors&&... tensors) {
  ((*stack++ = reinterpret_cast<StableIValue>(tensors.release())), ...);
}

// A list, for a call or as one of its results.
inline StableIValue list_of(const StableIValue* elements, size_t size) {
  StableListHandle list = nullptr;
  HFLA_TORCH_CALL(torch_new_list_reserve_size(size, &list));
  for (size_t i = 0; i < size; ++i) HFLA_TORCH_CALL(torch_list_push_back(list, elements[i]));
  return reinterpret_cast<StableIValue>(list);
}

}  // namespace hfla
