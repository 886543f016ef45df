// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.

#include "torch/memory.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <list>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "kernels/export.h"
#include "torch/shim.h"

namespace hfla {
namespace {

constexpr int64_t kMinBytes = 1 << 20;  // malloc keeps what is smaller
constexpr int64_t kDefaultMegabytes = 256;
constexpr int64_t kMaxMegabytes = 1 << 20;
constexpr int64_t kMaxIdleSeconds = 10;

struct Block {
  Tensor memory;
  int64_t bytes;
  int64_t idle_since = 0;  // seconds()
};

// Handing a block from one list to another neither copies nor allocates.
using Blocks = std::list<Block>;

int64_t seconds() {
  using std::chrono::steady_clock;
  return std::chrono::floor<std::chrono::seconds>(steady_clock::now().time_since_epoch()).count();
}

// Nobody waits for the lock: whoever finds it taken does without kept memory this once. So a child
// of fork() can't hang on a lock that a thread of its parent held.
class KeptMemory {
 public:
  explicit KeptMemory(int64_t max_bytes) : max_bytes_(max_bytes) {}

  int64_t max_bytes() const { return max_bytes_; }
  int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

  // One block of exactly so many bytes, the last one that came back: the caches may still have it.
  // Or none.
  Blocks take(int64_t bytes) {
    Blocks taken;
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock) return taken;
    for (auto block = blocks_.end(); block != blocks_.begin();) {
      if ((--block)->bytes != bytes) continue;
      move(taken, block);
      break;
    }
    return taken;
  }

  // Leaves a block with the caller if it can't be kept.
  void keep(Blocks& block) noexcept {
    Blocks freed;  // when the lock is free again
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock || block.front().bytes > max_bytes_) return;
    block.front().idle_since = seconds();
    while (bytes() + block.front().bytes > max_bytes_) move(freed, blocks_.begin());
    bytes_ += block.front().bytes;
    blocks_.splice(blocks_.end(), block);
  }

  void free_idle(int64_t max_idle_seconds) {
    if (bytes() == 0) return;
    Blocks freed;
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    const int64_t latest = seconds() - max_idle_seconds;
    while (lock && !blocks_.empty() && blocks_.front().idle_since <= latest) {
      move(freed, blocks_.begin());
    }
  }

 private:
  void move(Blocks& to, Blocks::iterator block) noexcept {
    bytes_ -= block->bytes;
    to.splice(to.end(), blocks_, block);
  }

  const int64_t max_bytes_;
  std::mutex mutex_;
  Blocks blocks_;  // longest idle first
  std::atomic<int64_t> bytes_{0};
};

int64_t max_bytes_from_environment() {
  const char* const setting = std::getenv("HF_LINEAR_ATTENTION_KEPT_MB");
  if (!setting || !*setting) return kDefaultMegabytes << 20;
  char* end;
  const long long megabytes = std::strtoll(setting, &end, 10);
  check(!*end && megabytes >= 0 && megabytes <= kMaxMegabytes,
        "HF_LINEAR_ATTENTION_KEPT_MB must be a number of megabytes from 0 to ", kMaxMegabytes,
        ", got ", setting);
  return megabytes << 20;
}

KeptMemory& kept_memory() {
  // Never destroyed: tensors may outlive all that is.
  static KeptMemory& memory = *new KeptMemory(max_bytes_from_environment());
  return memory;
}

Tensor new_tensor_by_torch(int32_t dtype, int64_t size) {
  const int64_t stride = 1;
  AtenTensorHandle handle;
  HFLA_TORCH_CALL(aoti_torch_empty_strided(1, &size, &stride, dtype, aoti_torch_device_type_cpu(),
                                           /*device_index=*/-1, &handle));
  return Tensor(handle);
}

// Whether torch fills what it calls empty (torch.utils.deterministic.fill_uninitialized_memory).
// Only its ops do that, not the function above: so the last number of what one of them makes is
// looked at (malloc's own pointers are in the first). It may be NaN by chance, too, and then one
// result is filled in vain: one, since the 0 stays in that memory.
bool torch_fills() {
  constexpr int64_t kNumbers = 16;
  StableIValue stack[6] = {reinterpret_cast<StableIValue>(
      new_tensor_by_torch(aoti_torch_dtype_float32(), kNumbers).release())};  // no options
  HFLA_TORCH_CALL(torch_call_dispatcher("aten::empty_like", "", stack, kTorchBuildVersion));
  Tensor probe(reinterpret_cast<AtenTensorHandle>(stack[0]));
  float& last = static_cast<float*>(probe.mutable_data())[kNumbers - 1];
  return std::isnan(std::exchange(last, 0.0f));
}

// Up to an eighth more, so that results of nearly the same size take turns on the same blocks.
int64_t round_up_size(int64_t bytes) {
  int64_t power = kMinBytes;
  while (power <= bytes / 2) power *= 2;
  const int64_t step = power / 8;
  return (bytes + step - 1) / step * step;
}

// Called by torch, on any thread, when the last tensor on a block is gone.
void take_back(void*, void* block) {
  Blocks* const returned = static_cast<Blocks*>(block);
  kept_memory().keep(*returned);
  delete returned;
}

}  // namespace

AtenTensorHandle new_tensor_on_kept_memory(int64_t dim, const int64_t* sizes,
                                           const int64_t* strides, int32_t dtype) {
  KeptMemory& kept = kept_memory();
  kept.free_idle(kMaxIdleSeconds);
  int64_t bytes = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  for (int64_t d = 0; d < dim; ++d) {
    if (__builtin_mul_overflow(bytes, sizes[d], &bytes)) return nullptr;  // torch says so
  }
  if (bytes < kMinBytes || bytes > kept.max_bytes() || !torch_from_blob) return nullptr;
  bytes = round_up_size(bytes);
  Blocks block = kept.take(bytes);
  if (block.empty()) block.push_back({new_tensor_by_torch(aoti_torch_dtype_uint8(), bytes), bytes});
  void* const data = block.front().memory.mutable_data();
  // All bits are 1: NaN in every dtype. An older result must not pass for one that was not written.
  if (torch_fills()) std::memset(data, 0xFF, static_cast<size_t>(bytes));
  AtenTensorHandle handle;
  // Should torch fail, it may have called take_back or not: a lost block is better than one that is
  // freed twice.
  HFLA_TORCH_CALL(torch_from_blob(
      data, dim, sizes, strides, /*storage_offset=*/0, dtype, aoti_torch_device_type_cpu(),
      /*device_index=*/-1, &handle, aoti_torch_layout_strided(), /*opaque_metadata=*/nullptr,
      /*opaque_metadata_size=*/0, take_back, new Blocks(std::move(block))));
  return handle;
}

}  // namespace hfla

// ---- for ops/compiled/library.py, through ctypes ----

namespace {

// Where the setting is wrong nothing is kept; the ops say so.
hfla::KeptMemory* kept_memory_or_null() {
  try {
    return &hfla::kept_memory();
  } catch (const std::runtime_error&) {
    return nullptr;
  }
}

}  // namespace

// Of blocks that no tensor is on.
HFLA_EXPORT int64_t hfla_kept_bytes() {
  const hfla::KeptMemory* const kept = kept_memory_or_null();
  return kept ? kept->bytes() : 0;
}

HFLA_EXPORT void hfla_free_kept_memory() {
  if (hfla::KeptMemory* const kept = kept_memory_or_null()) kept->free_idle(0);
}
