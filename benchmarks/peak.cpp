// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a machine can do at best: prints float32 GFLOP/s of fused multiply-adds that never leave the
// registers, and GB/s of reading from memory. `peak 2 256` uses two threads, and reads 256 MB.
// harness.py compiles it for the machine it runs on.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
typedef float Vector __attribute__((vector_size(kVectorBytes)));

constexpr int kLanes = kVectorBytes / sizeof(float);
constexpr int kChains = 12;  // enough to hide the latency of two units; they fit in 16 registers
constexpr long kSteps = 20'000'000;

volatile float one = 1, zero = 0;  // the compiler does not know
volatile float sink;

void multiply_and_add() {
  const Vector factor = Vector{} + one;
  const Vector term = Vector{} + zero;
  Vector chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = Vector{} + static_cast<float>(i);
  for (long step = 0; step < kSteps; ++step)
    for (int i = 0; i < kChains; ++i) chains[i] = chains[i] * factor + term;
  Vector total{};
  for (int i = 0; i < kChains; ++i) total += chains[i];
  sink = total[0];
}

constexpr int kStretches = 8;  // side by side: one walk through memory is slower
constexpr int kBlock = 8;      // vectors

void read(const float* memory, size_t size) {
  Vector totals[kBlock]{};
  const size_t stretch = size / kStretches / (kBlock * kLanes) * (kBlock * kLanes);
  for (size_t at = 0; at < stretch; at += kBlock * kLanes) {
    for (int walk = 0; walk < kStretches; ++walk) {
      const float* const from = memory + walk * stretch + at;
      for (int i = 0; i < kBlock; ++i) {
        Vector x;
        __builtin_memcpy(&x, from + i * kLanes, sizeof x);
        totals[i] += x;
      }
    }
  }
  for (int i = 1; i < kBlock; ++i) totals[0] += totals[i];
  sink = totals[0][0];
}

// Seconds that all threads take, each of which is given its number.
template <class Body>
double seconds(int num_threads, Body body) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
  return passed.count();
}

int main(int argc, char** argv) {
  const int num_threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const int megabytes = argc > 2 ? std::atoi(argv[2]) : 256;
  const size_t share = megabytes * (size_t{1} << 20) / sizeof(float) / num_threads;
  const std::vector<float> memory(share * num_threads, 1.0f);
  double multiplying = 1e9, reading = 1e9;
  for (int repeat = 0; repeat < 7; ++repeat) {
    multiplying = std::min(multiplying, seconds(num_threads, [](int) { multiply_and_add(); }));
    reading = std::min(reading, seconds(num_threads, [&](int thread) {
                         read(memory.data() + thread * share, share);
                       }));
  }
  std::printf("%.1f\n%.2f\n", 2e-9 * kSteps * kChains * kLanes * num_threads / multiplying,
              1e-9 * memory.size() * sizeof(float) / reading);
}
