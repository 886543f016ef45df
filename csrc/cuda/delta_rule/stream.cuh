// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// A walk's units (chunk.cuh) on their way from device memory: a ring of places in shared memory, of
// which one is read while the others are filled.
#pragma once

#include "cuda/common/copy_groups.cuh"
#include "cuda/delta_rule/walk_rows.cuh"

namespace hfla::cuda {

constexpr int kUnitPlaces = 3;

// A unit in shared memory.
template <class Scalar>
struct UnitTiles {
  using Layout = UnitLayout<Scalar>;
  Tile<typename Layout::Element, Layout::C, kUnitChannels> first, second;
  float* decay;  // of the chunk, of up to 128 channels

  BOTH explicit UnitTiles(SharedCarver& carver) {
    carver.take_tile(first, Layout::C);
    carver.take_tile(second, Layout::C);
    decay = carver.take<float>(Layout::kTail);
  }
  static constexpr int64_t kBytes =
      decltype(first)::kBytes + decltype(second)::kBytes + Layout::kTail * int64_t(sizeof(float));
};

// Where a unit is in device memory.
struct FoundUnit {
  const char* data;  // null: there is none
  bool with_first;   // its first tile is needed
};

// The units walk.find_unit(0), walk.find_unit(1) and so on. It does not keep the walk, whose
// members would then have to be in memory.
template <class Scalar>
class UnitStream {
  using Layout = UnitLayout<Scalar>;
  using Element = typename Layout::Element;

 public:
  DEV explicit UnitStream(char* places) : places_(places) {}

  template <class Walk>
  DEV void start(const Walk& walk) {
    UNROLL
    for (int i = 0; i < kUnitPlaces - 1; ++i) copy(walk, i);
  }

  // The next unit, for which all threads wait for each other. The one before it is gone.
  template <class Walk>
  DEV UnitTiles<Scalar> next(const Walk& walk) {
    groups_.wait<kUnitPlaces - 2>();
    sync_block();
    copy(walk, index_ + kUnitPlaces - 1);
    return place(index_++);
  }

 private:
  DEV UnitTiles<Scalar> place(int64_t i) const {
    SharedCarver carver(places_ + i % kUnitPlaces * UnitTiles<Scalar>::kBytes);
    return UnitTiles<Scalar>(carver);
  }

  template <class Walk>
  DEV void copy(const Walk& walk, int64_t i) {
    const FoundUnit found = walk.find_unit(i);
    if (found.data) {
      const UnitTiles<Scalar> to = place(i);
      const Element* const from = reinterpret_cast<const Element*>(found.data);
      if (found.with_first) copy_tile(to.first, from);
      copy_tile(to.second, from + Layout::kTile);
      const float* const tail = reinterpret_cast<const float*>(from + 2 * Layout::kTile);
      for (int e = 4 * thread_index(); e < Layout::kTail; e += 4 * kDeltaWalkThreads) {
        groups_.copy(to.decay + e, tail + e);
      }
    }
    groups_.close();
  }

  template <class To>
  DEV void copy_tile(const To& to, const Element* from) {
    constexpr int kUnit = 16 / int(sizeof(Element)), kPerRow = kUnitChannels / kUnit;
    UNROLL
    for (int i = 0; i < Layout::C * kPerRow / kDeltaWalkThreads; ++i) {
      const int e = thread_index() + i * kDeltaWalkThreads, row = e / kPerRow,
                c = e % kPerRow * kUnit;
      groups_.copy(to.data + row * To::kStride + c, from + row * kUnitChannels + c);
    }
  }

  char* const places_;
  int64_t index_ = 0;
  CopyGroups groups_;
};

}  // namespace hfla::cuda
