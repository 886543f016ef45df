// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Memory for tensors in which every byte too far is noticed, and tensors in it.
//
// B batch, T time, H heads, D features of a head.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cuda/common/scalar_types.h"
#include "kernels/common.h"

namespace checked {

constexpr int64_t kPage = 4096;

// Where a tensor lies: up to a page that nobody may touch, or from the end of one on; or its
// numbers far apart, in memory of which only those pages exist that somebody has touched.
enum class Lies { before_a_guard, after_a_guard, far_apart };

class Memory {
 public:
  explicit Memory(Lies lies) : lies(lies) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    for (const auto& [base, bytes] : mapped_) munmap(base, bytes);
  }

  // All bits are set, which is NaN; of what is far apart, none.
  void* take(int64_t bytes) {
    const int64_t inner = (bytes + kPage - 1) / kPage * kPage, all = inner + 2 * kPage;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char* const base = static_cast<char*>(mmap(nullptr, size_t(all), PROT_NONE, flags, -1, 0));
    if (base == MAP_FAILED || mprotect(base + kPage, size_t(inner), PROT_READ | PROT_WRITE)) {
      std::perror("no memory for a tensor");
      std::exit(1);
    }
    mapped_.push_back({base, size_t(all)});
    if (lies == Lies::far_apart) return base + kPage;
    std::memset(base + kPage, 0xff, size_t(inner));
    return base + kPage + (lies == Lies::before_a_guard ? inner - bytes : 0);
  }

  const Lies lies;

 private:
  std::vector<std::pair<void*, size_t>> mapped_;
};

// A guard that was touched ends the program, and so does any other memory that is not there. That
// may be what a check has found just before.
constexpr char kOutside[] = "a kernel touched memory outside of its tensors";
inline std::string planted_fault;  // the name of the one that runs
inline void notice_what_is_outside() {
  struct sigaction action{};
  action.sa_handler = [](int) {
    const char* const found = hfla::cuda::emulator::machine().found;
    bool is_written = true;
    for (const char* text : {planted_fault.c_str(), ": ", found ? found : kOutside}) {
      is_written &= write(2, text, std::strlen(text)) >= 0;
    }
    _exit(is_written ? 3 : 4);
  };
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

// ---- numbers of any dtype ----

inline int64_t size_of(hfla::DType dtype) { return dtype == hfla::DType::f32 ? 4 : 2; }

inline void put(void* data, int64_t at, hfla::DType dtype, float x) {
  using namespace hfla::cuda;
  if (dtype == hfla::DType::f32) static_cast<float*>(data)[at] = x;
  if (dtype == hfla::DType::bf16) static_cast<BFloat16*>(data)[at] = from_float<BFloat16>(x);
  if (dtype == hfla::DType::f16) static_cast<Float16*>(data)[at] = from_float<Float16>(x);
}
inline float get(const void* data, int64_t at, hfla::DType dtype) {
  using namespace hfla::cuda;
  if (dtype == hfla::DType::f32) return static_cast<const float*>(data)[at];
  if (dtype == hfla::DType::bf16) return to_float(static_cast<const BFloat16*>(data)[at]);
  return to_float(static_cast<const Float16*>(data)[at]);
}

// Between -1 and 1, the same number for the same tensor and place in it wherever it lies.
inline float random_number(uint64_t tensor, uint64_t at) {
  uint64_t x = (tensor << 40) + at + 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return float(int64_t((x ^ x >> 31) >> 40)) / float(1 << 23) - 1;
}

// ---- tensors ----

struct Results {
  std::vector<std::string> names;
  std::vector<std::vector<float>> values;
};

// The tensors of one call, of which only the last `rows` in the batch are filled and read.
class Tensors {
 public:
  Tensors(Memory& memory, int64_t batch, int64_t rows) : memory_(memory), B(batch), rows_(rows) {}

  // (B, T, H, D). Far apart, every number of tokens, heads or rows that there are here comes to
  // more than 2^31 elements, unless the batch alone does.
  hfla::View tensor(int64_t T, int64_t H, int64_t D, hfla::DType dtype) {
    hfla::View view{nullptr, T * H * D, H * D, D, 1};
    if (memory_.lies == Lies::far_apart && B == rows_) {
      constexpr int64_t kFar = int64_t(1) << 31;
      view.time = int64_t(1) << 27, view.head = kFar + (1 << 20), view.batch = kFar + (1 << 24);
    }
    const int64_t last = (B - 1) * view.batch + (T - 1) * view.time + (H - 1) * view.head + D - 1;
    view.data = memory_.take((last + 1) * size_of(dtype));
    return view;
  }
  hfla::View random(int64_t T, int64_t H, int64_t D, hfla::DType dtype) {
    const hfla::View view = tensor(T, H, D, dtype);
    ++seed_;
    each(view, T, H, D, [&](int64_t i, int64_t at) {
      put(view.data, at, dtype, random_number(seed_, uint64_t(i)));
    });
    return view;
  }
  template <class Number>  // of a number's index
  void fill(const hfla::View& view, int64_t T, int64_t H, int64_t D, Number number) {
    each(view, T, H, D,
         [&](int64_t i, int64_t at) { put(view.data, at, hfla::DType::f32, number(i)); });
  }
  // Contiguous, (B, n).
  float* array(int64_t n) { return static_cast<float*>(memory_.take(B * n * 4)); }
  float* random_array(int64_t n, float low = -1, float high = 1) {
    float* const data = array(n);
    ++seed_;
    for (int64_t i = 0; i < rows_ * n; ++i) {
      const float x = random_number(seed_, uint64_t(i));
      data[(B - rows_) * n + i] = low + (high - low) * (x + 1) / 2;
    }
    return data;
  }
  bool* mask(int64_t T) {
    bool* const data = static_cast<bool*>(memory_.take(B * T));
    for (int64_t i = 0; i < rows_ * T; ++i) data[(B - rows_) * T + i] = i % 5 != 3;
    return data;
  }
  void* bytes(int64_t count) { return memory_.take(count); }

  void read(const char* name, const hfla::View& view, int64_t T, int64_t H, int64_t D,
            hfla::DType dtype) {
    std::vector<float>& values = add(name);
    each(view, T, H, D, [&](int64_t, int64_t at) { values.push_back(get(view.data, at, dtype)); });
  }
  void read(const char* name, const float* data, int64_t n) {
    if (data) add(name).assign(data + (B - rows_) * n, data + B * n);
  }

  Results results;

 private:
  template <class Visit>
  void each(const hfla::View& view, int64_t T, int64_t H, int64_t D, Visit visit) const {
    int64_t i = 0;
    for (int64_t b = B - rows_; b < B; ++b) {
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t h = 0; h < H; ++h) {
          for (int64_t d = 0; d < D; ++d) {
            visit(i++, b * view.batch + t * view.time + h * view.head + d * view.dim);
          }
        }
      }
    }
  }
  std::vector<float>& add(const char* name) {
    results.names.push_back(name);
    return results.values.emplace_back();
  }

  Memory& memory_;
  const int64_t B, rows_;
  uint64_t seed_ = 0;
};

// The name of a result that is not what it should be: not the same to the bit, or further off than
// `within` times the largest number; or "".
inline std::string difference(const Results& got, const Results& wanted, float within) {
  for (size_t i = 0; i < wanted.names.size(); ++i) {
    const std::vector<float>&a = got.values[i], &b = wanted.values[i];
    float largest = 0;
    for (const float x : b) largest = std::fmax(largest, std::fabs(x));
    for (size_t j = 0; j < b.size(); ++j) {
      const bool same = within == 0 ? std::memcmp(&a[j], &b[j], 4) == 0
                                    : std::fabs(a[j] - b[j]) <= within * largest;
      if (!same || std::isnan(b[j])) return wanted.names[i];
    }
  }
  return "";
}

}  // namespace checked
