// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Small kernels with one fault each, which the checks have to find.
#pragma once

#include "cases.h"
#include "fragments.h"

namespace checked {

// y = 2 x, for (blocks, 32) numbers, but for what a kernel does wrong.
struct Doubling {
  const float* x;
  float* y;
  int64_t stride;  // between the numbers of neighbouring blocks
};
constexpr int64_t kDoublingBlocks = 40;

DEV int64_t place(const Doubling& p) { return block_index() * p.stride + thread_index(); }

KERNEL LAUNCH_BOUNDS(32, 1) right_kernel(const GRID_CONSTANT Doubling p) {
  p.y[place(p)] = 2 * p.x[place(p)];
}
KERNEL LAUNCH_BOUNDS(32, 1) one_further_kernel(const GRID_CONSTANT Doubling p) {
  p.y[place(p)] = 2 * p.x[place(p)];
  if (p.x[place(p) + 1] == 2) p.y[place(p)] = 0;  // which it never is
}
KERNEL LAUNCH_BOUNDS(32, 1) one_before_kernel(const GRID_CONSTANT Doubling p) {
  p.y[place(p)] = 2 * p.x[place(p)];
  if (p.x[place(p) - 1] == 2) p.y[place(p)] = 0;
}
KERNEL LAUNCH_BOUNDS(32, 1) misaligned_kernel(const GRID_CONSTANT Doubling p) {
  if (thread_index() % 4 != 1 || thread_index() > 24) return;
  const auto run = *reinterpret_cast<const Run<float, 4>*>(p.x + place(p));
  for (int i = 0; i < 4; ++i) p.y[place(p) + i] = 2 * run.get(i);
}
KERNEL LAUNCH_BOUNDS(32, 1) narrow_offset_kernel(const GRID_CONSTANT Doubling p) {
  const int at = int(block_index()) * int(p.stride) + thread_index();
  p.y[at] = 2 * p.x[at];
}
// Numbers pass through shared memory from a warp to the other.
template <bool has_barrier>
KERNEL LAUNCH_BOUNDS(64, 1) between_warps_kernel(const GRID_CONSTANT Doubling p) {
  float* const shared = reinterpret_cast<float*>(shared_memory());
  const int i = thread_index() % 32;
  if (thread_index() < 32) shared[i] = p.x[block_index() * p.stride + i];
  if (has_barrier) sync_block();
  if (thread_index() >= 32) p.y[block_index() * p.stride + i] = 2 * shared[i];
  sync_block();  // here the first warp is when the second is found to race
}
// The same within a warp, whose lanes nothing orders, either.
KERNEL LAUNCH_BOUNDS(32, 1) no_barrier_in_warp_kernel(const GRID_CONSTANT Doubling p) {
  float* const shared = reinterpret_cast<float*>(shared_memory());
  shared[thread_index()] = p.x[place(p)];
  const float x = shuffle(shared[31 - thread_index()], 31 - thread_index());
  p.y[place(p)] = 2 * x;
}
KERNEL LAUNCH_BOUNDS(32, 1) race_of_blocks_kernel(const GRID_CONSTANT Doubling p) {
  p.y[place(p)] = 2 * p.x[place(p)];
  if (block_index() > 0) p.y[place(p) - p.stride] += 0;
}
// Without a race, but by who comes first.
KERNEL LAUNCH_BOUNDS(32, 1) order_of_blocks_kernel(const GRID_CONSTANT Doubling p) {
  static int64_t ticket = 0;
  if (thread_index() == 0 && __atomic_fetch_add(&ticket, 1, __ATOMIC_SEQ_CST) % 2 == 0) {
    p.y[place(p)] = 2 * p.x[place(p)];
  } else {
    p.y[place(p)] = 2 * p.x[place(p)] + 1e-6f * float(__atomic_load_n(&ticket, __ATOMIC_SEQ_CST));
  }
}

template <class Kernel>
Case doubling(Kernel kernel, int threads) {
  return {"doubling", 1, hfla::DType::f32,
          [kernel, threads](Tensors& tensors, int64_t) {
            constexpr auto kF32 = hfla::DType::f32;
            load(kernel);
            const hfla::View x = tensors.random(kDoublingBlocks, 1, 32, kF32);
            const hfla::View y = tensors.tensor(kDoublingBlocks, 1, 32, kF32);
            const Doubling p{static_cast<float*>(x.data), static_cast<float*>(y.data), x.time};
            if (launch(kernel, kDoublingBlocks, threads, 128, nullptr, p)) return false;
            tensors.read("y", y, kDoublingBlocks, 1, 32, kF32);
            return true;
          },
          true};
}

struct SwappedA : Checked<Bf16Operands> {
  template <class Tile>
  static A load_a(const Tile& tile, int row, int k) {
    A a = Bf16Operands::load_a(tile, row, k);
    std::swap(a.x[1], a.x[2]);
    return a;
  }
};
struct SwappedB : Checked<Tf32Operands<2>> {
  template <int count, class Tile>
  static void load_b_transposed(B (&b)[count], const Tile& tile, int k, int column) {
    Tf32Operands<2>::load_b_transposed(b, tile, k, column);
    std::swap(b[0].x[0][0], b[0].x[0][1]);
  }
};

}  // namespace checked
