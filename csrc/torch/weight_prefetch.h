// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The weights that a recording's operations are going to read, for threads that have nothing else
// to do: they ask for them. A token is mostly the reading of weights, and memory would have nothing
// to do while one thread adds, normalises and updates states.
//
// Of each weight, a thread asks for the outputs that it will begin with: what another one has in
// its caches comes later than what is in none.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace hfla {

class WeightPrefetch {
 public:
  explicit WeightPrefetch(int64_t workers) : cursors_(static_cast<size_t>(workers)) {}

  // In the order of operations, before any thread asks.
  void add(int64_t operation, const void* data, int64_t bytes) {
    weights_.push_back({operation, static_cast<const char*>(data), bytes, total_});
    total_ += bytes;
  }

  // An operation begins, and asks for its weights itself from now on.
  void begin(int64_t operation) { begun_.store(operation, std::memory_order_relaxed); }

  // Asks for a little more of a worker's share; false where as much is on its way as caches keep.
  bool ask(int64_t worker) {
    Cursor& cursor = cursors_[static_cast<size_t>(worker)];
    const int64_t begun = begun_.load(std::memory_order_relaxed);
    while (cursor.first < weights_.size() && weights_[cursor.first].operation <= begun) {
      ++cursor.first;
    }
    if (cursor.next < cursor.first) cursor = {cursor.first, cursor.first, 0};
    if (cursor.next == weights_.size()) return false;
    const Weight& weight = weights_[cursor.next];
    if (weight.before - weights_[cursor.first].before > kMostBytes) return false;
    const int64_t share = weight.bytes / static_cast<int64_t>(cursors_.size());
    const int64_t end = std::min(cursor.asked + kPiece, share);
    for (int64_t at = cursor.asked; at < end; at += kCacheLine) {
      __builtin_prefetch(weight.data + worker * share + at, 0, 2);
    }
    cursor.asked = end;
    if (end == share) cursor = {cursor.first, cursor.next + 1, 0};
    return true;
  }

 private:
  static constexpr int64_t kMostBytes = 512 << 10;  // before the last weight that is asked for
  static constexpr int64_t kPiece = 1024;           // no loop that begins waits for more
  static constexpr int64_t kCacheLine = 64;

  struct Weight {
    int64_t operation;
    const char* data;
    int64_t bytes, before;  // of it, and of all before it
  };

  // A worker's.
  struct alignas(kCacheLine) Cursor {
    size_t first = 0, next = 0;  // weights: that no operation has begun to read, and to ask for
    int64_t asked = 0;           // bytes of the share of the latter
  };

  std::vector<Weight> weights_;
  std::vector<Cursor> cursors_;
  int64_t total_ = 0;
  std::atomic<int64_t> begun_{-1};
};

}  // namespace hfla
