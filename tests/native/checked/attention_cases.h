// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Calls of linear attention.
#pragma once

#include <string>
#include <vector>

#include "case.h"

namespace checked {

struct Attention {
  hfla::DType dtype;
  int64_t shared_bytes;  // of the device, which decides on tiles
  int64_t T, K, V, B = 1, Hq = 2, Hkv = 1, piece_length = 0;
  bool causal = true, normalize = true, decay = true, mask = true, backward = true;
  int64_t tokens_claimed = 0;  // more than there are, for a fault
  hfla::FeatureMap map = hfla::FeatureMap::elu_plus_one;
  bool keeps = true;   // states of pieces, for backward
  bool stores = true;  // the final state
};

inline const hfla::LinearAttentionOnCuda& kernels(hfla::DType dtype) {
  return *hfla::cuda_kernels(dtype)->linear_attention;
}

inline bool run(const Attention& c, Tensors& tensors, int64_t B) {
  const int64_t T = c.T, Hq = c.Hq, Hkv = c.Hkv, K = c.K, V = c.V;
  hfla::LinearAttentionProblem p{};
  p.B = p.num_sequences = B, p.Hq = Hq, p.Hkv = Hkv, p.K = K, p.V = V, p.dtype = c.dtype, p.T = T;
  p.feature_map = c.map;
  p.eps = 1e-6, p.normalize = c.normalize, p.is_causal = c.causal;
  p.q = tensors.random(T, Hq, K, c.dtype);
  p.k = tensors.random(T, Hkv, K, c.dtype);
  p.v = tensors.random(T, Hkv, V, c.dtype);
  if (c.decay) {
    p.log_decay = tensors.tensor(T, Hkv, 1, hfla::DType::f32);
    tensors.fill(p.log_decay, T, Hkv, 1, [](int64_t i) { return i % 7 == 3 ? -200 : -0.1f; });
  }
  if (c.mask) p.key_mask = tensors.mask(T);
  p.initial_kv = tensors.random_array(Hkv * K * V);
  p.initial_z = c.normalize ? tensors.random_array(Hkv * K, 0, 1) : nullptr;

  hfla::LinearAttentionResult y{};
  y.y = tensors.tensor(T, Hq, V, c.dtype);
  y.den = c.normalize ? tensors.array(T * Hq) : nullptr;
  y.kv = c.stores ? tensors.array(Hkv * K * V) : nullptr;
  y.z = c.stores && c.normalize ? tensors.array(Hkv * K) : nullptr;
  const int64_t length = c.piece_length > 32 ? c.piece_length : 32;
  const int64_t pieces = c.keeps && c.piece_length > 0 ? (T + length - 1) / length : 0;  // of a row
  y.piece_room = B * pieces;
  y.piece_states = tensors.array(pieces * hfla::piece_numbers(p));

  hfla::LinearAttentionUpstream up{};
  up.dy = tensors.random(T, Hq, V, c.dtype);
  up.dkv = tensors.random_array(Hkv * K * V);
  up.dz = c.normalize ? tensors.random_array(Hkv * K) : nullptr;
  up.forward = y;

  hfla::LinearAttentionGradients d{};
  d.dq = tensors.tensor(T, Hq, K, c.dtype);
  d.dk = tensors.tensor(T, Hkv, K, c.dtype);
  d.dv = tensors.tensor(T, Hkv, V, c.dtype);
  if (c.decay) d.dlog_decay = tensors.tensor(T, Hkv, 1, hfla::DType::f32);
  d.dinitial_kv = tensors.array(Hkv * K * V);
  d.dinitial_z = c.normalize ? tensors.array(Hkv * K) : nullptr;

  p.T += c.tokens_claimed;
  const hfla::CudaDevice device{132, c.shared_bytes, c.piece_length};
  const auto& table = kernels(c.dtype);
  if (!with_workspace(tensors, device, [&](auto place) { return table.forward(p, y, place); })) {
    return false;
  }
  tensors.read("y", y.y, T, Hq, V, c.dtype);
  tensors.read("den", static_cast<float*>(y.den), T * Hq);
  tensors.read("kv", static_cast<float*>(y.kv), Hkv * K * V);
  tensors.read("z", static_cast<float*>(y.z), Hkv * K);
  if (!c.backward) return true;
  if (!with_workspace(tensors, device,
                      [&](auto place) { return table.backward(p, up, d, place); })) {
    return false;
  }
  tensors.read("dq", d.dq, T, Hq, K, c.dtype);
  tensors.read("dk", d.dk, T, Hkv, K, c.dtype);
  tensors.read("dv", d.dv, T, Hkv, V, c.dtype);
  if (c.decay) tensors.read("dlog_decay", d.dlog_decay, T, Hkv, 1, hfla::DType::f32);
  tensors.read("dinitial_kv", static_cast<float*>(d.dinitial_kv), Hkv * K * V);
  tensors.read("dinitial_z", static_cast<float*>(d.dinitial_z), Hkv * K);
  return true;
}

struct Step {
  hfla::DType dtype;
  int64_t K, V, Hq, Hkv;
};

inline bool run(const Step& c, Tensors& tensors, int64_t B) {
  const int64_t Hq = c.Hq, Hkv = c.Hkv, K = c.K, V = c.V;
  hfla::LinearAttentionStep p{};
  p.B = B, p.Hq = Hq, p.Hkv = Hkv, p.K = K, p.V = V, p.dtype = c.dtype;
  p.feature_map = hfla::FeatureMap::elu_plus_one;
  p.eps = 1e-6, p.normalize = true;
  p.q = tensors.random(1, Hq, K, c.dtype);
  p.k = tensors.random(1, Hkv, K, c.dtype);
  p.v = tensors.random(1, Hkv, V, c.dtype);
  p.log_decay = tensors.tensor(1, Hkv, 1, hfla::DType::f32);
  tensors.fill(p.log_decay, 1, Hkv, 1, [](int64_t) { return -0.1f; });
  p.kv = tensors.random_array(Hkv * K * V);
  p.z = tensors.random_array(Hkv * K, 0, 1);
  p.slots.count = B, p.kv_slot = Hkv * K * V, p.z_slot = Hkv * K;
  p.y = tensors.tensor(1, Hq, V, c.dtype);
  if (kernels(c.dtype).step(p, nullptr) != 0) return false;
  tensors.read("y", p.y, 1, Hq, V, c.dtype);
  tensors.read("kv", static_cast<float*>(p.kv), Hkv * K * V);
  tensors.read("z", static_cast<float*>(p.z), Hkv * K);
  return true;
}

inline void add_linear_attention(std::vector<Case>& cases, hfla::DType dtype) {
  constexpr int64_t kLittle = 64 << 10;
  const auto add = [&](const char* name, bool small, const Attention& c) {
    cases.push_back(make_case(name, c, c.B));
    cases.back().small = small;
  };
  add("smallest tiles, pieces", true, {dtype, kLittle, 40, 24, 16, 1, 2, 1, 1});
  add("not causal", true, {dtype, kLittle, 40, 16, 16, 1, 1, 1, 1, false, false, false});
  add("long", false, {dtype, kLittle, 264, 4, 4, 1, 1});  // of which the decay's gradient has pieces
  add("odd sizes", true, {dtype, kLittle, 37, 13, 19, 2, 1, 1});
  // Each of the tiles (launch.cuh), with more rows than it has, so that several walks are added up:
  // in a little more shared memory than it takes.
  struct Tiles {
    const char* name;
    int64_t shared_kb, T, K;
  };
  const std::vector<Tiles> all =
      dtype == hfla::DType::bf16
          ? std::vector<Tiles>{{"smallest tiles", 32, 40, 56},
                               {"small tiles", 80, 80, 152},
                               {"middle tiles, one stage", 64, 80, 152},
                               {"middle tiles", 110, 80, 168},
                               {"largest tiles, one stage", 120, 136, 264},
                               {"largest tiles", 227, 136, 264}}
          : std::vector<Tiles>{{"smallest tiles", 64, 40, 56},
                               {"largest tiles", 120, 80, 152}};
  for (const Tiles& tiles : all) {
    Attention c{dtype, tiles.shared_kb << 10, tiles.T, tiles.K, 16, 1, 1};
    c.backward = kAll || &tiles == &all[0];
    add(tiles.name, false, c);
    if (&tiles == &all[0]) continue;
    // And where nothing is stored between the last chunk of a walk and the next walk's state.
    c.stores = false;
    add((std::string(tiles.name) + ", no final state").c_str(), false, c);
    if (!kAll) continue;
    // And with a group of queries, for which a chunk is visited several times.
    c.Hq = 2, c.stores = true;
    add((std::string(tiles.name) + ", groups").c_str(), false, c);
  }
}

// Kernels that know the walk: of other heads and dtypes there are none. With a normaliser one finds
// its gradient, too; where queries share keys, dk has a walk without dv.
inline void add_fixed_size_walks(std::vector<Case>& cases, hfla::DType dtype) {
  if (dtype != hfla::DType::bf16) return;
  const auto add = [&](const char* name, int64_t D, hfla::FeatureMap map, bool normalize,
                       int64_t groups = 1, int64_t piece_length = 0, bool keeps = true) {
    Attention c{dtype, 227 << 10, 70, D, D, 1, groups, 1, piece_length};
    c.decay = c.mask = false;
    if (piece_length > 0) c.T = 150;  // a piece has two chunks, which come to lie in both stages
    c.normalize = normalize;
    c.map = map;
    c.keeps = keeps;
    cases.push_back(make_case(name, c, c.B));
    cases.back().small = groups > 1;
  };
  constexpr auto kElu = hfla::FeatureMap::elu_plus_one, kIdentity = hfla::FeatureMap::identity;
  add("fixed-size walks, groups", 64, kElu, true, 2);
  add("fixed-size walks, pieces", 64, kElu, true, 1, 128);
  add("fixed-size walks, pieces, of which nothing is kept", 64, kElu, true, 1, 128, false);
  add("fixed-size walks without a map", 64, kIdentity, true);
  add("fixed-size walks without a map and normaliser", 64, kIdentity, false);
  add("fixed-size walks of 128 features", 128, kElu, true);
  add("fixed-size walks of 128 features without normaliser", 128, kElu, false);
  add("fixed-size walks of 128 features without a map", 128, kIdentity, true);
  add("fixed-size walks of 128 features without a map and normaliser", 128, kIdentity, false);
}

inline void add_steps(std::vector<Case>& cases, hfla::DType dtype) {
  const auto add = [&](const char* name, const Step& c) {
    cases.push_back(make_case(name, c, 2));
    cases.back().small = true;
  };
  // Columns are visited in turns where there are more than 512, or 128 of odd sizes.
  add("step", {dtype, 12, 520, 2, 2});
  add("step of odd sizes", {dtype, 7, 5, 2, 2});
  add("step of odd sizes, in turns", {dtype, 7, 131, 2, 2});
  add("step of groups", {dtype, 12, 520, 5, 1});
  add("step of groups of odd sizes", {dtype, 7, 37, 5, 1});
}

}  // namespace checked
