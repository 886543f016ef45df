// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What the vector units can do at best: prints float32 GFLOP/s of fused multiply-adds that never
// leave the registers. `peak 2` uses two threads. harness.py compiles it for the machine it runs on.

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

double gflops(int num_threads) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) threads.emplace_back(multiply_and_add);
  for (std::thread& thread : threads) thread.join();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return 2e-9 * kSteps * kChains * kLanes * num_threads / seconds.count();
}

int main(int argc, char** argv) {
  const int num_threads = argc > 1 ? std::atoi(argv[1]) : 1;
  double best = 0;
  for (int repeat = 0; repeat < 7; ++repeat) best = std::max(best, gflops(num_threads));
  std::printf("%.1f\n", best);
}
