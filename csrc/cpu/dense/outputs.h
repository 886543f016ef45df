// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// How products share their outputs among threads: in tasks, which are tiles of outputs.
#pragma once

#include "cpu/common/constants.h"
#include "cpu/common/memory.h"
#include "cpu/common/tasks.h"
#include "cpu/common/transpose.h"
#include "cpu/common/vec.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kStretchBytes = 32768;  // of W; in shorter ones reading does not get up to speed

// body(Constant<count>), of 1 to `most`.
template <int most, class Body>
HFLA_INLINE void with_count(int64_t count, Body body) {
  if constexpr (most > 1) {
    if (count < most) return with_count<most - 1>(count, body);
  }
  body(Constant<most>{});
}

template <class Problem>
int64_t usable_threads(const Problem& p, const Threads& threads) {
  return workers_for(threads, p.in * p.out);
}

// Of a task, a multiple of so many: long stretches, of which each output of a tile is in another,
// but enough tasks for all threads.
template <class Problem>
int64_t task_outputs(const Problem& p, const Threads& threads, int64_t row_bytes,
                     int64_t tile_outputs, int64_t multiple) {
  const int64_t outputs = tile_outputs * ceil_div(kStretchBytes, max(1, row_bytes));
  const int64_t share = p.out / (4 * usable_threads(p, threads));
  return round_up(max(1, min(outputs, share)), multiple);
}

// Computes a product's outputs, `task_outputs` of them in a task.
template <class Product, class Problem>
Status run_by_tasks(Product& product, const Problem& p, const Threads& threads,
                    int64_t task_outputs) {
  const int64_t tasks = ceil_div(p.out, task_outputs);
  const int64_t workers = min(tasks, usable_threads(p, threads));
  Carver sizes(nullptr);
  product.carve_shared(sizes);
  const int64_t shared_bytes = sizes.used();
  product.carve_own(sizes);
  const int64_t own_bytes = sizes.used() - shared_bytes;
  const Buffer buffer(shared_bytes + workers * own_bytes);
  if (!buffer.data()) return Status::out_of_memory;
  Carver carver(buffer.data());
  product.carve_shared(carver);
  product.stage_x();
  run_tasks(threads, workers, tasks, [&](int64_t worker, int64_t task) {
    Carver own_memory(buffer.data() + shared_bytes + worker * own_bytes);
    const int64_t begin = task * task_outputs;
    product.compute(product.carve_own(own_memory), begin, min(p.out, begin + task_outputs));
  });
  return Status::ok;
}

// ---- where rows of x are in lanes ----

// body(Constant<number>, first, stretch) for all of a task's outputs, as many of them together as a
// tile has, `stretch` from one to the next.
template <int tile_outputs, class Body>
HFLA_INLINE void for_each_tile(int64_t count, Body body) {
  const int64_t stretch = count / tile_outputs;
  for (int64_t i = 0; i < stretch; ++i) body(Constant<tile_outputs>{}, i, stretch);
  int64_t i = stretch * tile_outputs;
  if (i == count) return;
  if (stretch > 0) {  // Some outputs are computed again, for a tile is faster than a few.
    body(Constant<tile_outputs>{}, count - tile_outputs, int64_t{1});
  } else {
    for (; i < count; ++i) body(Constant<1>{}, i, int64_t{1});
  }
}

// y of `count` outputs of all rows. sums: (count up to whole vectors, stride), a row in each lane.
template <class Scalar, class Problem>
void finish_lanes(const Problem& p, int64_t y_stride, int64_t begin, int64_t count,
                  const float* sums, int64_t stride) {
  constexpr int64_t W = kLanes<float>;
  const Scalar* const bias = static_cast<const Scalar*>(p.bias);
  for (int64_t row = 0; row < p.rows; row += W) {
    const int64_t rows = min(W, p.rows - row);
    for_each_vector<float>(0, count, [&](int64_t c, int64_t n) HFLA_INLINE_LAMBDA {
      Vec<float> square[W];
      HFLA_UNROLL
      for (int64_t i = 0; i < W; ++i) square[i] = load(sums + (c + i) * stride + row);
      transpose(square);
      const Vec<float> added = bias ? load_vector(bias, 1, begin + c, n) : Vec<float>{};
      Scalar* const y = static_cast<Scalar*>(p.y) + row * y_stride;
      HFLA_UNROLL
      for (int64_t i = 0; i < W; ++i) {
        if (i < rows) store_vector(y + i * y_stride, 1, begin + c, n, square[i] + added);
      }
    });
  }
}

}  // namespace
}  // namespace hfla::HFLA_ISA
