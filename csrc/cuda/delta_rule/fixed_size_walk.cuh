// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What goes from chunk to chunk, in the words of fixed_size_chunk.cuh. A block has a sequence, a
// head and 32 columns of its state: two warps go from state to state, 16 columns each, which need
// nothing of the others; two make the outputs of the chunk before, and load what comes. All meet
// once for each chunk.
//
// Everything is computed transposed, columns before tokens and channels, so that accumulators are
// operands of the next product as they are: a state stays in registers, and so does all that
// follows from it.
#pragma once

#include "cuda/delta_rule/fixed_size_outputs.cuh"
#include "cuda/delta_rule/fixed_size_states.cuh"

namespace hfla::cuda {

template <int K, bool keep_errors>
KERNEL LAUNCH_BOUNDS(kFixedSizeThreads, 2)
    delta_fixed_size_outputs_kernel(const GRID_CONSTANT FixedSizeDeltaRule p) {
  const FixedSizePlace place(p);
  const bool makes_outputs = thread_index() >= kFixedSizeThreads - kFixedSizeLoaders;
  FixedSizeLoader<K> loader(p, place);
  FixedSizeOutputs<K> outputs(p, place);
  FixedSizeStates<K, keep_errors> states(p, place);
  if (!makes_outputs) {
    states.load();
  } else if (place.chunks > 0) {
    loader.start_keys(0);
    loader.close();
  }
  for (int chunk = 0; chunk <= place.chunks; ++chunk) {
    if (makes_outputs) loader.wait();
    sync_block();
    if (!makes_outputs) {
      if (chunk < place.chunks) states.visit(chunk);
      continue;
    }
    if (chunk + 1 < place.chunks) loader.start_keys(chunk + 1);
    if (chunk < place.chunks) loader.start_queries(chunk);
    loader.close();
    if (chunk > 0) outputs.visit(chunk - 1);
  }
  if (!makes_outputs) states.store();
}

}  // namespace hfla::cuda
