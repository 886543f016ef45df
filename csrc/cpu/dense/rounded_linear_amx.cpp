// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x Wᵀ + bias for rows of x that fill tiles, rounded to 16 bits, and a W of 8 or 4 bits with
// scales for groups of inputs: products of bytes, with AMX.
//
// As in linear_amx.cpp, a tile of W is 16 outputs, here by 64 inputs, and x lies in panels of 16
// rows as a product of tiles reads them: in fours, four of all rows after the other. An integer of
// 16 bits is a signed high byte and an unsigned low one, in a tile each. Values of 8 bits are read
// as they lie, those of 4 become bytes in the first-level cache, a block at a time.

#include "cpu/common/memory.h"
#include "cpu/common/tasks.h"
#include "cpu/common/transpose.h"
#include "cpu/dense/kernels.h"
#include "cpu/dense/quantized_shorts.h"
#include "cpu/dense/rounded_lanes.h"
#include "cpu/dense/tiles.h"

namespace hfla::avx512_vnni {
Status rounded_linear(const QuantizedLinearProblem&, const Threads&);
}

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kTileInputs = 64;
constexpr int64_t kTileBytes = kTileRows * kTileInputs;
constexpr int64_t kBytesAhead = 256;  // of each stretch of W, what is asked for
constexpr int kPanels = 2;            // that are multiplied together

template <int sums, int weights, int inputs, bool inputs_are_signed>
HFLA_INLINE void multiply_add_bytes() {
  if constexpr (inputs_are_signed) {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(weights), "i"(inputs));
  } else {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(weights), "i"(inputs));
  }
}

// Tiles of sums: those of a panel's high bytes, and of its low ones.
constexpr int high_tile(int panel) { return 2 * panel; }
constexpr int low_tile(int panel) { return 2 * panel + 1; }
constexpr int kWeights = 2 * kPanels, kHigh = kWeights + 1, kLow = kWeights + 2;

class RoundedRowsInTiles {
  using Lanes = RoundedLanes<EightBitShorts>;

 public:
  RoundedRowsInTiles(const QuantizedLinearProblem& p, const Threads& threads)
      : p_(p),
        threads_(threads),
        row_bytes_(p.in * p.bits / 8),
        panels_(ceil_div(p.rows, kTileRows)),
        row_tiles_(p.in / max(1, p.group) * tiles_of_group()),
        task_outputs_(task_outputs(p, threads, row_bytes_, kTileRows, kTileRows)),
        lanes_(p, panels_ * kTileRows, task_outputs_) {}

  Status run() { return run_by_tasks(*this, p_, threads_, task_outputs_); }

  void carve_shared(Carver& carver) {
    lanes_.carve_shared(carver);
    x_ = carver.take<uint8_t>(panels_ * panel_bytes());
  }

  // A worker's own, for a task.
  struct Own {
    Lanes::Own lanes;
    int32_t* integers;  // the tiles of sums
    int8_t* copy;       // (kTileRows, kBlock): weights
  };

  Own carve_own(Carver& carver) const {
    const Lanes::Own lanes = lanes_.carve_own(carver);
    int32_t* const integers = carver.take<int32_t>(2 * kPanels * kSumsSize);
    return {lanes, integers, carver.take<int8_t>(kTileRows * kBlock)};
  }

  void stage_x() const {
    lanes_.clear();
    run_tasks(threads_, usable_threads(p_, threads_), panels_,
              [&](int64_t, int64_t panel) { stage_panel(panel); });
  }

  // The outputs [begin, end) of all rows.
  void compute(const Own& own, int64_t begin, int64_t end) const {
    lanes_.begin(own.lanes, begin, end);
    const Tiles tiles;
    const int64_t count = end - begin, stretch = count / kTileRows;
    for (int64_t i = 0; i < stretch; ++i) add_up(own, begin, {i, stretch, kTileRows});
    if (stretch == 0) {
      add_up(own, begin, {0, 1, count});
    } else if (count % kTileRows != 0) {  // some outputs once more
      add_up(own, begin, {count - kTileRows, 1, kTileRows});
    }
    lanes_.finish(own.lanes, begin, end);
  }

 private:
  int64_t tiles_of_group() const { return ceil_div(p_.group, kTileInputs); }
  int64_t panel_bytes() const { return row_tiles_ * 2 * kTileBytes; }

  // ---- x ----

  void stage_panel(int64_t panel) const {
    const int64_t first = panel * kTileRows, rows = min(kTileRows, p_.rows - first);
    lanes_.stage(first, rows);
    uint8_t* to = x_ + panel * panel_bytes();
    const int64_t groups = lanes_.groups(), stride = lanes_.inputs().padded() / max(1, groups);
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t c = 0; c < stride; c += kTileInputs, to += 2 * kTileBytes) {
        stage_tiles(first, rows, group * stride + c, min(kTileInputs, stride - c), to);
      }
    }
  }

  // Fours are moved as if they were floats.
  void stage_tiles(int64_t first, int64_t rows, int64_t c, int64_t count, uint8_t* to) const {
    alignas(64) uint8_t high[kTileRows][kTileInputs] = {}, low[kTileRows][kTileInputs] = {};
    for (int64_t r = 0; r < rows; ++r) {
      const int16_t* from = lanes_.inputs().row(first + r).inputs + c;
      for (int64_t i = 0; i < count; i += kUnit) {
        const __m512i integers = _mm512_loadu_si512(from + i);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(&high[r][i]),
                            _mm512_maskz_cvtepi16_epi8(-1, _mm512_srai_epi16(integers, 8)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(&low[r][i]),
                            _mm512_maskz_cvtepi16_epi8(-1, integers));
      }
    }
    store_tile_of(high, to);
    store_tile_of(low, to + kTileBytes);
  }
  static void store_tile_of(const uint8_t (&rows)[kTileRows][kTileInputs], uint8_t* to) {
    Vec<float> fours[kTileRows];
    __builtin_memcpy(fours, rows, sizeof fours);
    transpose(fours);
    __builtin_memcpy(to, fours, sizeof fours);
  }

  // ---- products ----

  // Outputs of a task that are computed together.
  struct Outputs {
    int64_t first, stretch, count;
  };
  // Of kTileRows outputs, as bytes.
  struct Weights {
    const int8_t* data;
    int64_t stride;
    bool asks;  // for what follows
  };

  void add_up(const Own& own, int64_t begin, Outputs of) const {
    const int64_t stride = of.stretch * row_bytes_;
    const int8_t* weight = static_cast<const int8_t*>(p_.weight) + (begin + of.first) * row_bytes_;
    const uint8_t* x = x_;
    Lanes::Place place = lanes_.first_place(own.lanes, of.first, of.stretch);
    for (place.group = 0; place.group < lanes_.groups(); ++place.group) {
      for (int64_t c = 0; c < p_.group; c += kBlock, ++place.block) {
        place.begins_group = c == 0;
        const int64_t count = min(kBlock, p_.group - c), bytes = count * p_.bits / 8;
        const int64_t tiles = ceil_div(count, kTileInputs);
        const bool is_tiles = p_.bits == 8 && of.count == kTileRows && count % kTileInputs == 0;
        Weights tile{weight, stride, true};
        if (!is_tiles) {
          copy(tile, of.count, bytes, own.copy);
          tile = {own.copy, kBlock, false};
        }
        for (int64_t panel = 0; panel < panels_; panel += kPanels) {
          with_count<kPanels>(panels_ - panel, [&](auto panels) {
            multiply<panels.value>(tile, tiles, x + panel * panel_bytes(), own.integers);
            add_scaled<panels.value>(own, place, of.count, panel * kTileRows);
          });
          tile.asks = false;
        }
        weight += bytes;
        x += tiles * 2 * kTileBytes;
      }
    }
  }

  // A block of some outputs as bytes, and zeros up to a whole tile.
  HFLA_NOINLINE void copy(Weights from, int64_t outputs, int64_t bytes, int8_t* to) const {
    for (int64_t o = 0; o < outputs; ++o, to += kBlock) {
      const int8_t* row = from.data + o * from.stride;
      ask_for_soon(row + kBytesAhead);
      const int64_t tile_bytes = kTileInputs * p_.bits / 8;
      int8_t* tile = to;
      for (int64_t b = 0; b < bytes; b += tile_bytes, tile += kTileInputs) {
        const __mmask64 mask = ~0ull >> (64 - min(tile_bytes, bytes - b));
        _mm512_storeu_si512(tile, p_.bits == 8
                                      ? _mm512_maskz_loadu_epi8(mask, row + b)
                                      : load_nibbles(static_cast<__mmask32>(mask), row + b));
      }
    }
  }

  // 64 values of 4 bits, of which the earlier of two is in the low bits, as signed bytes.
  static HFLA_INLINE __m512i load_nibbles(__mmask32 mask, const int8_t* from) {
    const __m512i words = _mm512_maskz_cvtepu8_epi16(-1, _mm256_maskz_loadu_epi8(mask, from));
    const __m512i nibbles = (words | _mm512_slli_epi16(words, 4)) & _mm512_set1_epi8(0x0f);
    const __m512i lift = _mm512_set1_epi8(8);
    return _mm512_sub_epi8(nibbles ^ lift, lift);
  }

  // A block's sums of integers, of high and of low bytes.
  template <int panels>
  HFLA_NOINLINE void multiply(Weights w, int64_t tiles, const uint8_t* x, int32_t* sums) const {
    for_panels<panels>([](auto panel) HFLA_INLINE_LAMBDA {
      clear_tile<high_tile(panel.value)>();
      clear_tile<low_tile(panel.value)>();
    });
    for (int64_t i = 0; i < tiles; ++i, w.data += kTileInputs, x += 2 * kTileBytes) {
      if (w.asks) {
        HFLA_UNROLL
        for (int64_t o = 0; o < kTileRows; ++o) ask_for_soon(w.data + o * w.stride + kBytesAhead);
      }
      load_tile<kWeights>(w.data, w.stride);
      for_panels<panels>([&](auto panel) HFLA_INLINE_LAMBDA {
        const uint8_t* const of_panel = x + panel.value * panel_bytes();
        load_tile<kHigh>(of_panel, kTileInputs);
        multiply_add_bytes<high_tile(panel.value), kWeights, kHigh, true>();
        load_tile<kLow>(of_panel + kTileBytes, kTileInputs);
        multiply_add_bytes<low_tile(panel.value), kWeights, kLow, false>();
      });
    }
    for_panels<panels>([&](auto panel) HFLA_INLINE_LAMBDA {
      store_tile<high_tile(panel.value)>(sums + high_tile(panel.value) * kSumsSize);
      store_tile<low_tile(panel.value)>(sums + low_tile(panel.value) * kSumsSize);
    });
  }

  template <int panels>
  HFLA_NOINLINE void add_scaled(const Own& own, const Lanes::Place& place, int64_t outputs,
                                int64_t row) const {
    const auto numbers = lanes_.row_numbers<panels>(place, row);
    for (int64_t o = 0; o < outputs; ++o) {
      Ints sum_of[panels];
      HFLA_UNROLL
      for (int panel = 0; panel < panels; ++panel) {
        const int32_t* const at = own.integers + high_tile(panel) * kSumsSize + o * kTileRows;
        sum_of[panel] = (load_lanes(at) << 8) + load_lanes(at + kSumsSize);
      }
      lanes_.add_scaled(place, numbers, row, o, sum_of);
    }
  }

  const QuantizedLinearProblem& p_;
  const Threads& threads_;
  const int64_t row_bytes_, panels_, row_tiles_;  // tiles of a row of x: so many high, and low ones
  const int64_t task_outputs_;
  Lanes lanes_;
  uint8_t* x_ = nullptr;  // (panels, row_tiles, high or low, fours of inputs, rows of a panel, 4)
};

// Whether these are faster than the other products of integers: where a tile is full of a group's
// inputs; and with values of 4 bits, which have to become bytes, if most of its rows are there.
bool rows_gain_in_tiles(const QuantizedLinearProblem& p) {
  return p.in > 0 && p.group >= kTileInputs && p.rows >= (p.bits == 8 ? 5 : 12);
}

}  // namespace

Status rounded_linear(const QuantizedLinearProblem& problem, const Threads& threads) {
  return by_parts_of_rows(problem, [&](const QuantizedLinearProblem& part) {
    return rows_gain_in_tiles(part) ? RoundedRowsInTiles(part, threads).run()
                                    : avx512_vnni::rounded_linear(part, threads);
  });
}

}  // namespace hfla::HFLA_ISA
