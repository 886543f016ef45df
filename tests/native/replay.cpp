// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Calls the ops as torch would, without torch: what scripts/arm_check.py recorded of their tests on
// one processor is computed again on another, and compared.
//
//     replay _C.so FILE...
//
// This program is the libtorch that the library finds when it is loaded: the functions of
// csrc/torch/shim.h on tensors of its own, in one thread. A file holds one call after the other, little-endian:
//
//     "CALL", the op's name, the number of arguments, each argument, of results, each result;
//     then the tolerance, and per tensor that the op changed its argument's index and the values
//
// A string is its length (int32) and its bytes; every number is an int32 or, where that is said, an
// int64 or a double. An argument is a kind (int32) and its value: see Kind. A tensor is a dtype as
// torch numbers them, its dimensions, sizes and strides (int64), the bytes that it spans (int64),
// and these. Results and changed tensors are the same, contiguous; a result that is undefined has
// dtype -1 and nothing else.

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "torch/shim.h"

namespace {

using Kernel = void (*)(StableIValue*, uint64_t, uint64_t);

// What the bindings registered, by name without the namespace.
std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}

enum DTypeCode : int32_t {
  kUInt8 = 0, kInt8 = 1, kInt32 = 3, kInt64 = 4, kHalf = 5, kFloat = 6, kDouble = 7, kBool = 11,
  kBFloat16 = 15
};

size_t element_size(int32_t dtype) {
  switch (dtype) {
    case kUInt8: case kInt8: case kBool: return 1;
    case kHalf: case kBFloat16: return 2;
    case kInt32: case kFloat: return 4;
    case kInt64: case kDouble: return 8;
  }
  throw std::runtime_error("a dtype that the replay does not know");
}

}  // namespace

// A tensor; memory is shared with nobody, and ends where it is said to, for checks of addresses.
struct AtenTensorOpaque {
  int32_t dtype;
  std::vector<int64_t> sizes, strides;
  std::vector<char> own;
  void* data;
  void (*deleter)(void*, void*) = nullptr;
  void* context = nullptr;

};

namespace {

using TensorData = AtenTensorOpaque;

int64_t count_of(const TensorData& t) {
  int64_t count = 1;
  for (const int64_t size : t.sizes) count *= size;
  return count;
}

}  // namespace

// ---- libtorch ----

extern "C" {

int32_t aoti_torch_device_type_cpu() { return 0; }
int32_t aoti_torch_device_type_cuda() { return 1; }
int32_t aoti_torch_dtype_bool() { return kBool; }
int32_t aoti_torch_dtype_uint8() { return kUInt8; }
int32_t aoti_torch_dtype_int8() { return kInt8; }
int32_t aoti_torch_dtype_int32() { return kInt32; }
int32_t aoti_torch_dtype_int64() { return kInt64; }
int32_t aoti_torch_dtype_float16() { return kHalf; }
int32_t aoti_torch_dtype_bfloat16() { return kBFloat16; }
int32_t aoti_torch_dtype_float32() { return kFloat; }
int32_t aoti_torch_dtype_float64() { return kDouble; }
size_t aoti_torch_dtype_element_size(int32_t dtype) { return element_size(dtype); }
int32_t aoti_torch_layout_strided() { return 0; }

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle t) {
  if (t->deleter) t->deleter(t->data, t->context);
  delete t;
  return 0;
}
AOTITorchError aoti_torch_get_dim(AtenTensorHandle t, int64_t* dim) {
  return *dim = static_cast<int64_t>(t->sizes.size()), 0;
}
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle t, int64_t** sizes) {
  return *sizes = t->sizes.data(), 0;
}
AOTITorchError aoti_torch_get_strides(AtenTensorHandle t, int64_t** strides) {
  return *strides = t->strides.data(), 0;
}
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle t, int32_t* dtype) {
  return *dtype = t->dtype, 0;
}
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle, int32_t* type) { return *type = 0; }
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t* index) {
  return *index = -1, 0;
}
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle t, bool* is_contiguous) {
  int64_t stride = 1;
  *is_contiguous = true;
  if (count_of(*t) == 0) return 0;
  for (size_t d = t->sizes.size(); d-- > 0;) {
    if (t->sizes[d] != 1 && t->strides[d] != stride) *is_contiguous = false;
    stride *= t->sizes[d];
  }
  return 0;
}
AOTITorchError aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t, int32_t, AtenTensorHandle* made) {
  auto* t = new TensorData{dtype, {sizes, sizes + dim}, {strides, strides + dim}, {}, nullptr};
  // Bytes of NaN in every floating-point dtype: whatever is not written is noticed.
  t->own.assign(count_of(*t) * element_size(dtype), '\xff');
  t->data = t->own.data();
  return *made = t, 0;
}
AOTITorchError torch_from_blob(void* data, int64_t dim, const int64_t* sizes,
                               const int64_t* strides, int64_t, int32_t dtype, int32_t, int32_t,
                               AtenTensorHandle* made, int32_t, const uint8_t*, int64_t,
                               void (*deleter)(void*, void*), void* context) {
  *made = new TensorData{dtype, {sizes, sizes + dim}, {strides, strides + dim}, {}, data, deleter,
                         context};
  return 0;
}
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle t, const void** data) {
  return *data = t->data, 0;
}
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle t, void** data) {
  return *data = t->data, 0;
}

// aten::empty_like is all that the bindings ask for.
AOTITorchError torch_call_dispatcher(const char* op, const char*, StableIValue* stack, uint64_t) {
  if (std::strcmp(op, "aten::empty_like") != 0) return 1;
  auto* const like = reinterpret_cast<AtenTensorHandle>(stack[0]);
  AtenTensorHandle made;
  aoti_torch_empty_strided(static_cast<int64_t>(like->sizes.size()), like->sizes.data(),
                           like->strides.data(), like->dtype, 0, -1, &made);
  aoti_torch_delete_tensor_object(like);
  stack[0] = reinterpret_cast<StableIValue>(made);
  return 0;
}
// What no call that is replayed asks for: devices, and what calls several ops in a row.
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle*) { return 1; }
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return 1; }
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle, AtenTensorHandle*) { return 1; }
AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle, int64_t, const int64_t*,
                                              const int64_t*, int64_t, AtenTensorHandle*) {
  return 1;
}
AOTITorchError aoti_torch_cpu_add_Tensor(AtenTensorHandle, AtenTensorHandle, double,
                                         AtenTensorHandle*) {
  return 1;
}
AOTITorchError aoti_torch_cpu_mul_Tensor(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*) {
  return 1;
}
AOTITorchError torch_new_list_reserve_size(size_t, StableListHandle*) { return 1; }
AOTITorchError torch_list_size(StableListHandle, size_t*) { return 1; }
AOTITorchError torch_list_get_item(StableListHandle, size_t, StableIValue*) { return 1; }
AOTITorchError torch_list_push_back(StableListHandle, StableIValue) { return 1; }
AOTITorchError torch_delete_list(StableListHandle) { return 1; }

void aoti_torch_check(bool condition, const char*, const char*, uint32_t, const char* message) {
  if (!condition) throw std::runtime_error(message);
}

AOTITorchError torch_get_num_threads(uint32_t* count) { return *count = 1, 0; }
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t,
                                  void (*body)(int64_t, int64_t, void*), void* context) {
  body(begin, end, context);
  return 0;
}

AOTITorchError aoti_torch_library_init_def(const char*, const char*, uint32_t,
                                           TorchLibraryHandle* library) {
  return *library = nullptr, 0;
}
AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t,
                                            TorchLibraryHandle* library) {
  return *library = nullptr, 0;
}
AOTITorchError aoti_torch_library_def(TorchLibraryHandle, const char*) { return 0; }
AOTITorchError torch_library_impl(TorchLibraryHandle, const char* op, Kernel kernel, uint64_t) {
  return kernels()[op] = kernel, 0;
}

}  // extern "C"

namespace {

// ---- files ----

class File {
 public:
  explicit File(const char* path) : file_(std::fopen(path, "rb")) {
    if (!file_) throw std::runtime_error(std::string("can't read ") + path);
  }
  ~File() { std::fclose(file_); }

  bool at_end() {
    const int c = std::fgetc(file_);
    if (c != EOF) std::ungetc(c, file_);
    return c == EOF;
  }
  void bytes(void* to, size_t count) {
    if (count && std::fread(to, 1, count, file_) != count) {
      throw std::runtime_error("the file ends too early");
    }
  }
  template <class Value>
  Value read() {
    Value value;
    bytes(&value, sizeof value);
    return value;
  }
  std::string text() {
    std::string text(read<int32_t>(), ' ');
    bytes(&text[0], text.size());
    return text;
  }
  // Null for one that is undefined.
  AtenTensorHandle tensor() {
    const int32_t dtype = read<int32_t>();
    if (dtype < 0) return nullptr;
    auto* t = new TensorData{dtype, {}, {}, {}, nullptr};
    t->sizes.resize(read<int32_t>());
    t->strides.resize(t->sizes.size());
    for (int64_t& size : t->sizes) size = read<int64_t>();
    for (int64_t& stride : t->strides) stride = read<int64_t>();
    t->own.resize(read<int64_t>());
    bytes(t->own.data(), t->own.size());
    t->data = t->own.data();
    return t;
  }

 private:
  std::FILE* file_;
};

// ---- comparison ----

double number_at(const TensorData& t, int64_t offset) {
  const char* const at = static_cast<const char*>(t.data) + offset * element_size(t.dtype);
  const auto as = [&](auto value) { return std::memcpy(&value, at, sizeof value), value; };
  switch (t.dtype) {
    case kDouble: return as(double{});
    case kFloat: return as(float{});
    case kInt32: return as(int32_t{});
    case kInt64: return static_cast<double>(as(int64_t{}));
    case kBFloat16: {
      const uint32_t bits = static_cast<uint32_t>(as(uint16_t{})) << 16;
      float value;
      return std::memcpy(&value, &bits, sizeof value), value;
    }
    case kHalf: {
      const uint16_t bits = as(uint16_t{});
      const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
      const double size = exponent == 31  ? (mantissa ? NAN : INFINITY)
                          : exponent == 0 ? std::ldexp(mantissa, -24)
                                          : std::ldexp(1024 + mantissa, exponent - 25);
      return bits & 0x8000 ? -size : size;
    }
  }
  return as(uint8_t{});
}

// All values, in the order of a contiguous tensor.
std::vector<double> numbers_of(const TensorData& t) {
  std::vector<double> all;
  std::vector<int64_t> index(t.sizes.size());
  for (int64_t left = count_of(t); left > 0; --left) {
    int64_t offset = 0;
    for (size_t d = 0; d < index.size(); ++d) offset += index[d] * t.strides[d];
    all.push_back(number_at(t, offset));
    for (size_t d = index.size(); d-- > 0 && ++index[d] == t.sizes[d];) index[d] = 0;
  }
  return all;
}

double largest(const TensorData& t) {
  double most = 0;
  for (const double x : numbers_of(t)) {
    if (std::isfinite(x)) most = std::fmax(most, std::fabs(x));
  }
  return most;
}

// The largest difference; infinite where one is NaN or infinite and the other is not the same.
double difference(const TensorData& actual, const TensorData& expected) {
  if (actual.sizes != expected.sizes || actual.dtype != expected.dtype) return INFINITY;
  const std::vector<double> x = numbers_of(actual), y = numbers_of(expected);
  double most = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i]) && std::isnan(y[i])) continue;
    if (x[i] == y[i]) continue;
    if (!std::isfinite(x[i]) || !std::isfinite(y[i])) return INFINITY;
    most = std::fmax(most, std::fabs(x[i] - y[i]));
  }
  return most;
}

// ---- calls ----

enum Kind : int32_t { kTensor, kOptionalTensor, kInteger, kNumber, kBoolean };

struct Worst {
  int64_t calls = 0, failures = 0;
  double difference = 0;  // in tolerances
};

AtenTensorHandle read_argument(File& file, StableIValue& place) {
  const auto kind = file.read<int32_t>();
  if (kind == kTensor || kind == kOptionalTensor) {
    const AtenTensorHandle t = file.tensor();
    place = reinterpret_cast<StableIValue>(t);
    if (kind == kOptionalTensor && t) {
      place = reinterpret_cast<StableIValue>(new StableIValue(place));
    }
    return t;
  }
  place = kind == kNumber ? file.read<uint64_t>() : static_cast<StableIValue>(file.read<int64_t>());
  return nullptr;
}

// A function of its own, whose instructions scripts/instruction_counts.py counts.
__attribute__((noinline)) void call_kernel(Kernel kernel, std::vector<StableIValue>& stack,
                                           size_t arguments, size_t results) {
  kernel(stack.data(), arguments, results);
}

// The op frees its arguments, whose values a caller may want to see afterwards: their memory is
// moved here.
void replay(File& file, std::map<std::string, Worst>& worst) {
  if (file.read<int32_t>() != 0x4c4c4143) throw std::runtime_error("not a call");  // "CALL"
  const std::string op = file.text();
  std::vector<StableIValue> stack(file.read<int32_t>());
  std::vector<TensorData> arguments(stack.size());
  for (size_t i = 0; i < stack.size(); ++i) {
    if (const AtenTensorHandle t = read_argument(file, stack[i])) {
      arguments[i] = {t->dtype, t->sizes, t->strides, std::move(t->own), t->data};
    }
  }
  std::vector<AtenTensorHandle> expected(file.read<int32_t>());
  for (AtenTensorHandle& t : expected) t = file.tensor();
  const auto tolerance = file.read<double>();

  const auto kernel = kernels().find(op);
  if (kernel == kernels().end()) throw std::runtime_error("no op named " + op);
  const size_t given = stack.size();
  stack.resize(std::max(given, expected.size()));
  call_kernel(kernel->second, stack, given, expected.size());

  std::vector<std::pair<int32_t, AtenTensorHandle>> changed(file.read<int32_t>());
  for (auto& [i, wanted] : changed) i = file.read<int32_t>(), wanted = file.tensor();
  double size = 1e-6;
  for (const AtenTensorHandle t : expected) size = t ? std::fmax(size, largest(*t)) : size;
  for (const auto& [i, wanted] : changed) size = std::fmax(size, largest(*wanted));

  Worst& of_op = worst[op];
  ++of_op.calls;
  const auto compare = [&](const TensorData& actual, AtenTensorHandle wanted, const char* what,
                           int64_t i) {
    const double apart = difference(actual, *wanted) / size / tolerance;
    of_op.difference = std::fmax(of_op.difference, apart);
    if (apart <= 1) return;
    ++of_op.failures;
    std::printf("%s, call %lld, %s %lld: %.3g times the tolerance of %.1g\n", op.c_str(),
                static_cast<long long>(of_op.calls), what, static_cast<long long>(i), apart,
                tolerance);
  };
  for (size_t i = 0; i < expected.size(); ++i) {
    auto* const actual = reinterpret_cast<AtenTensorHandle>(stack[i]);
    if (expected[i]) {
      compare(*actual, expected[i], "result", static_cast<int64_t>(i));
      aoti_torch_delete_tensor_object(expected[i]);
    }
    if (actual) aoti_torch_delete_tensor_object(actual);
  }
  for (const auto& [i, wanted] : changed) {
    compare(arguments[i], wanted, "changed argument", i);
    aoti_torch_delete_tensor_object(wanted);
  }
}

}  // namespace

int main(int count, char** paths) {
  std::map<std::string, Worst> worst;
  if (count < 2 || !dlopen(paths[1], RTLD_NOW)) {
    std::printf("can't load the library: %s\n", count < 2 ? "none is named" : dlerror());
    return 2;
  }
  try {
    for (int i = 2; i < count; ++i) {
      File file(paths[i]);
      while (!file.at_end()) replay(file, worst);
    }
  } catch (const std::runtime_error& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
  int64_t failures = worst.empty() ? 1 : 0;
  for (const auto& [op, of_op] : worst) {
    failures += of_op.failures;
    std::printf("%-36s %6lld calls, %3lld wrong, at most %.2g of the tolerance\n", op.c_str(),
                static_cast<long long>(of_op.calls), static_cast<long long>(of_op.failures),
                of_op.difference);
  }
  return failures ? 1 : 0;
}
