// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// AMX: the eight tiles that a thread has, each of 16 rows of 64 bytes.
#pragma once

#include "cpu/common/isa.h"
#include "cpu/dense/outputs.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kRowBytes = 64;                     // of a tile
constexpr int64_t kSumsSize = kTileRows * kTileRows;  // of a tile of them

struct alignas(64) TileSizes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {kRowBytes, kRowBytes, kRowBytes, kRowBytes,
                            kRowBytes, kRowBytes, kRowBytes, kRowBytes};
  uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows,
                      kTileRows, kTileRows, kTileRows, kTileRows};
};

// Makes all of them full ones for as long as it lives.
class Tiles {
 public:
  Tiles() {
    const TileSizes sizes;
    asm volatile("ldtilecfg %0" ::"m"(sizes));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int tile>
HFLA_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
// Rows that are `stride` bytes apart.
template <int tile>
HFLA_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
// Of float or int32_t.
template <int tile, class Sum>
HFLA_INLINE void store_tile(Sum* to) {
  static_assert(sizeof(Sum) * kTileRows == kRowBytes);
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(kRowBytes), "i"(tile) : "memory");
}

// body(Constant<panel>) of each.
template <int panels, class Body>
HFLA_INLINE void for_panels(Body body) {
  if constexpr (panels > 0) {
    for_panels<panels - 1>(body);
    body(Constant<panels - 1>{});
  }
}

}  // namespace
}  // namespace hfla::HFLA_ISA
