// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The weights that a recording's operations are going to read, for threads that have nothing else
// to do: they ask for them. A token is mostly the reading of weights, and memory would have nothing
// to do while one thread adds, normalises and updates states.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace hfla {

class Upcoming {
 public:
  // In the order of operations, before any thread asks.
  void add(int64_t operation, const void* data, int64_t bytes) {
    stretches_.push_back({operation, static_cast<const char*>(data), total_, total_ + bytes});
    total_ += bytes;
  }

  // An operation begins, and asks for its weights itself from now on.
  void begin(int64_t operation) { begun_.store(operation, std::memory_order_relaxed); }

  // Asks for a little more; false where as much is on its way as caches keep, or another thread
  // asks.
  bool ask() {
    if (is_taken_.exchange(true, std::memory_order_acquire)) return false;
    const bool did_ask = ask_alone();
    is_taken_.store(false, std::memory_order_release);
    return did_ask;
  }

 private:
  static constexpr int64_t kMostBytes = 512 << 10;  // half of a core's second-level cache
  static constexpr int64_t kPiece = 1024;           // no loop that begins waits for more
  static constexpr int64_t kCacheLine = 64;

  // Places count the bytes of all stretches, one behind the other.
  struct Stretch {
    int64_t operation;
    const char* data;
    int64_t begin, end;
  };

  bool ask_alone() {
    const int64_t begun = begun_.load(std::memory_order_relaxed);
    while (first_ < stretches_.size() && stretches_[first_].operation <= begun) ++first_;
    if (first_ == stretches_.size()) return false;
    asked_ = std::max(asked_, stretches_[first_].begin);
    if (asked_ >= std::min(total_, stretches_[first_].begin + kMostBytes)) return false;
    while (stretches_[next_].end <= asked_) ++next_;
    const Stretch& stretch = stretches_[next_];
    const int64_t end = std::min(asked_ + kPiece, stretch.end);
    for (int64_t at = asked_; at < end; at += kCacheLine) {
      __builtin_prefetch(stretch.data + at - stretch.begin, 0, 2);
    }
    asked_ = end;
    return true;
  }

  std::vector<Stretch> stretches_;
  int64_t total_ = 0;  // bytes
  std::atomic<int64_t> begun_{-1};
  // Of who asks.
  std::atomic<bool> is_taken_{false};
  size_t first_ = 0, next_ = 0;  // stretches: that has not begun, and that `asked_` is in
  int64_t asked_ = 0;            // place
};

}  // namespace hfla
