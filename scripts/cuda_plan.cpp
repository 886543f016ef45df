// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The launches of an op on a GPU, and what a block of each does, for cuda_model.py:
//
//     cuda_plan OP DTYPE PASS B H T D MULTIPROCESSORS SHARED_BYTES
//
// prints a line for each launch: the kernel's address in this program; blocks, threads of a block
// and bytes of shared memory, as the launcher chooses them for that GPU; and per block, on average,
// what What names. These are counted in the emulator, on one head and two lengths of few tokens,
// and continued to a block's tokens in a straight line.
//
// Compiled with -fsanitize=thread, for its calls at every access to memory, and linked without its
// library: they are defined here.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "cuda/common/device.h"
#include "kernels/cuda.h"

namespace {

namespace emulator = hfla::cuda::emulator;

// By thread, but for `rounds`, which is how often a block passes the barrier that it passes most
// often; `unique` bytes are counted once for all blocks of a launch. Copies are loads, too.
enum What {
  rounds,
  barriers,
  shuffles,
  products,
  operand_loads,
  copies,
  wide_copies,
  loads,
  loaded,
  stores,
  stored,
  shared_accesses,
  shared_bytes,
  unique,
  kNumWhat
};

struct Launch {
  void* kernel;
  int64_t blocks;
  int threads;
  int64_t shared;
  double counts[kNumWhat];
};

// ---- accesses to memory ----

constexpr int64_t kSector = 32;
char* tensors_begin;
char* tensors_end;
char* tensors_free;
std::vector<int32_t> touched;             // by which launch each sector was last
std::vector<Launch>* counting = nullptr;  // into the last

void* take(int64_t bytes) {
  char* const data = tensors_free;
  tensors_free += (bytes + 255) / 256 * 256;
  if (tensors_free > tensors_end) std::abort();
  return data;
}

// Its own accesses come here, too.
bool here = false;
#define NOT_COUNTED __attribute__((no_sanitize("thread")))

void count_access(const void* address, int64_t bytes, bool write) {
  if (!counting || counting->empty()) return;
  double* const counts = counting->back().counts;
  const char* const at = static_cast<const char*>(address);
  if (at >= tensors_begin && at < tensors_end) {
    ++counts[write ? stores : loads];
    counts[write ? stored : loaded] += double(bytes);
    for (int64_t s = (at - tensors_begin) / kSector;
         s <= (at + bytes - 1 - tensors_begin) / kSector; ++s) {
      if (touched[s] == int32_t(counting->size())) continue;
      touched[s] = int32_t(counting->size());
      counts[unique] += kSector;
    }
    return;
  }
  for (const std::vector<char>& shared : emulator::machine().shared) {
    if (at < shared.data() || at >= shared.data() + shared.size()) continue;
    ++counts[shared_accesses];
    counts[shared_bytes] += double(bytes);
  }
}

NOT_COUNTED void access(const void* address, int64_t bytes, bool write) {
  if (here) return;
  here = true;
  count_access(address, bytes, write);
  here = false;
}

}  // namespace

#define ACCESS(size)                                                                  \
  NOT_COUNTED void __tsan_read##size(void* at) { access(at, size, false); }           \
  NOT_COUNTED void __tsan_write##size(void* at) { access(at, size, true); }           \
  NOT_COUNTED void __tsan_unaligned_read##size(void* at) { access(at, size, false); } \
  NOT_COUNTED void __tsan_unaligned_write##size(void* at) { access(at, size, true); }

extern "C" {
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
NOT_COUNTED void __tsan_read_range(void* at, unsigned long bytes) {
  access(at, int64_t(bytes), false);
}
NOT_COUNTED void __tsan_write_range(void* at, unsigned long bytes) {
  access(at, int64_t(bytes), true);
}
NOT_COUNTED char __tsan_atomic8_load(const volatile char* at, int) { return *at; }
NOT_COUNTED void __tsan_vptr_update(void**, void*) {}
NOT_COUNTED void __tsan_init() {}
NOT_COUNTED void __tsan_func_entry(void*) {}
NOT_COUNTED void __tsan_func_exit() {}
NOT_COUNTED void* __tsan_create_fiber(unsigned) { return &counting; }
NOT_COUNTED void __tsan_destroy_fiber(void*) {}
NOT_COUNTED void* __tsan_get_current_fiber() { return &counting; }
NOT_COUNTED void __tsan_switch_to_fiber(void*, unsigned) {}
NOT_COUNTED void __tsan_acquire(void*) {}
NOT_COUNTED void __tsan_release(void*) {}
NOT_COUNTED void AnnotateIgnoreReadsBegin(const char*, int) {}
NOT_COUNTED void AnnotateIgnoreReadsEnd(const char*, int) {}
NOT_COUNTED void AnnotateIgnoreWritesBegin(const char*, int) {}
NOT_COUNTED void AnnotateIgnoreWritesEnd(const char*, int) {}
}

namespace {

// ---- calls ----

struct Sizes {
  bool delta_rule;  // else linear attention
  hfla::DType dtype;
  bool backward;
  int64_t B, T, H, D;
};

using Call = std::function<int(const hfla::CudaPlace&)>;

void* tensor(int64_t elements, int64_t size) {
  return counting ? take(elements * size) : reinterpret_cast<void*>(256);  // nobody looks there
}

hfla::View rows(const Sizes& s, int64_t D, int64_t size) {
  return {tensor(s.B * s.T * s.H * D, size), s.T * s.H * D, s.H * D, D, 1};
}

// elu+1 and a normaliser.
Call attention_call(const Sizes& s) {
  const int64_t size = s.dtype == hfla::DType::f32 ? 4 : 2, all = s.B * s.T * s.H;
  const auto view = [&] { return rows(s, s.D, size); };
  hfla::LinearAttentionProblem p{};
  p.B = p.num_sequences = s.B, p.Hq = p.Hkv = s.H, p.K = p.V = s.D, p.dtype = s.dtype, p.T = s.T;
  p.feature_map = hfla::FeatureMap::elu_plus_one;
  p.normalize = p.is_causal = true;
  p.q = view(), p.k = view(), p.v = view();
  hfla::LinearAttentionResult y{};
  y.y = view(), y.den = tensor(all, 4);
  y.kv = tensor(s.B * s.H * s.D * s.D, 4), y.z = tensor(s.B * s.H * s.D, 4);
  y.piece_room = counting ? s.T / 64 : hfla::room_for_pieces(p);
  y.piece_states = tensor(y.piece_room * hfla::piece_numbers(p), 4);
  hfla::LinearAttentionUpstream up{};
  up.dy = view(), up.forward = y;
  hfla::LinearAttentionGradients d{};
  d.dq = view(), d.dk = view(), d.dv = view();
  const auto& table = *hfla::cuda_kernels(s.dtype)->linear_attention;
  table.load();
  return [=](const hfla::CudaPlace& place) {
    return s.backward ? table.backward(p, up, d, place) : table.forward(p, y, place);
  };
}

// The gated delta rule: a decay for each head, normalised keys and queries.
Call delta_rule_call(const Sizes& s) {
  const int64_t size = s.dtype == hfla::DType::f32 ? 4 : 2;
  const auto view = [&] { return rows(s, s.D, size); };
  const auto one = [&] {
    hfla::View x = rows(s, 1, 4);
    x.dim = 0;
    return x;
  };
  hfla::DeltaRuleProblem p{};
  p.B = p.num_sequences = s.B, p.Hq = p.Hkv = s.H, p.K = p.V = s.D, p.dtype = s.dtype, p.T = s.T;
  p.scale = 1 / std::sqrt(double(s.D)), p.normalize_qk = p.delta = true;
  p.q_group = p.k_group = 1;
  p.q = view(), p.k = view(), p.v = view();
  p.beta = one(), p.log_decay = one();
  hfla::DeltaRuleResult y{};
  y.y = view(), y.state = tensor(s.B * s.H * s.D * s.D, 4);
  hfla::DeltaRuleUpstream up{};
  up.dy = view(), up.state = y.state, up.errors = rows(s, s.D, 4);
  hfla::DeltaRuleGradients d{};
  d.dq = view(), d.dk = view(), d.dv = view();
  d.dbeta = one(), d.dlog_decay = one();
  const auto& table = *hfla::cuda_kernels(s.dtype)->delta_rule;
  table.load();
  return [=](const hfla::CudaPlace& place) {
    return s.backward ? table.backward(p, up, d, place) : table.forward(p, y, place);
  };
}

std::vector<Launch> launches(const Sizes& s, const hfla::CudaDevice& device, bool run) {
  emulator::Machine& m = emulator::machine();
  std::vector<Launch> found;
  counting = run ? &found : nullptr;
  tensors_free = tensors_begin;
  if (run) touched.assign(touched.size(), 0);
  const Call call_at = s.delta_rule ? delta_rule_call(s) : attention_call(s);
  int64_t bytes = 0;
  const auto call = [&](void* workspace) { return call_at({device, workspace, &bytes, nullptr}); };
  call(nullptr);
  const auto finish_last = [&] {
    if (found.empty()) return;
    double* const counts = found.back().counts;
    for (const auto& [barrier, times] : m.passed) {
      counts[rounds] = std::max(counts[rounds], double(times));
    }
    counts[barriers] = double(m.counts.barriers), counts[shuffles] = double(m.counts.shuffles);
    counts[products] = double(m.counts.products);
    counts[operand_loads] = double(m.counts.operand_loads);
    counts[copies] = double(m.counts.copies), counts[wide_copies] = double(m.counts.wide_copies);
  };
  m.on_launch = [&](int64_t blocks, int threads, int64_t shared) {
    finish_last();
    found.push_back({m.kernel, blocks, threads, shared, {}});
    m.counts = {}, m.passed.clear();
    return run;
  };
  // The launcher itself clears it after use.
  std::vector<char> workspace(run ? 0 : size_t(bytes) + 1);
  if (call(run ? take(bytes) : workspace.data()) != 0) {
    std::fprintf(stderr, "%s\n", m.error.c_str());
    std::exit(1);
  }
  finish_last();
  m.on_launch = nullptr;
  counting = nullptr;
  return found;
}

// Launches that belong together: the three of a walk in pieces, or one.
std::vector<std::vector<Launch>> by_walk(const std::vector<Launch>& launches) {
  std::vector<std::vector<Launch>> found;
  for (size_t i = 0; i < launches.size();) {
    const bool in_pieces = i + 2 < launches.size() &&
                           launches[i].kernel == launches[i + 2].kernel &&
                           launches[i].kernel != launches[i + 1].kernel;
    const size_t end = i + (in_pieces ? 3 : 1);
    found.emplace_back(launches.begin() + i, launches.begin() + end);
    i = end;
  }
  return found;
}

// What a block of each launch does, on average. A walk is known by its place among all; by whether
// it is in pieces; and by its kernel, of which the device's size decides on some.
void count(const Sizes& s, std::vector<Launch>& planned, int64_t shared_bytes) {
  struct Way {
    int64_t multiprocessors;
    int64_t tokens[2], piece_length[2];  // whole chunks of any kernel
    std::vector<std::vector<Launch>> few[2];
    bool has(size_t walk, const std::vector<Launch>& group) const {
      const std::vector<Launch>& here = few[0].at(walk);
      return here.size() == group.size() && here[0].kernel == group[0].kernel;
    }
  };
  std::vector<Way> ways = {{0, {128, 256}, {0, 0}, {}}};
  if (s.delta_rule) {
    ways.push_back({INT32_MAX, {128, 256}, {0, 0}, {}});
  } else {
    ways.push_back({0, {256, 512}, {128, 256}, {}});
  }
  for (Way& way : ways) {
    Sizes few = s;
    few.B = few.H = 1;
    for (int n = 0; n < 2; ++n) {
      few.T = way.tokens[n];
      const hfla::CudaDevice device{way.multiprocessors, shared_bytes, way.piece_length[n]};
      way.few[n] = by_walk(launches(few, device, true));
    }
  }
  // A walk that was cut before it is one launch, as one that is not: its way is that of the others.
  const std::vector<std::vector<Launch>> groups = by_walk(planned);
  const auto all_known = [&](const Way& way) {
    for (size_t walk = 0; walk < groups.size(); ++walk) {
      if (!way.has(walk, groups[walk])) return false;
    }
    return true;
  };
  const auto of_all = std::find_if(ways.begin(), ways.end(), all_known);
  size_t i = 0, walk = 0;
  for (const std::vector<Launch>& group : groups) {
    const auto known = [&, walk = walk](const Way& way) { return way.has(walk, group); };
    const auto found =
        of_all != ways.end() ? of_all : std::find_if(ways.begin(), ways.end(), known);
    if (found == ways.end()) {
      std::fprintf(stderr, "a launch that no small problem has\n");
      std::exit(1);
    }
    const Way& way = *found;
    for (size_t part = 0; part < group.size(); ++part) {
      Launch& launch = planned[i++];
      const Launch* few[2];
      double at[2];
      for (int n = 0; n < 2; ++n) {
        few[n] = &way.few[n].at(walk).at(part);
        at[n] = double(way.tokens[n]) / double(few[n]->blocks);
      }
      const double tokens = double(s.B * s.T * s.H) / double(launch.blocks);
      for (int what = 0; what < kNumWhat; ++what) {
        double y[2];
        for (int n = 0; n < 2; ++n) y[n] = few[n]->counts[what] / double(few[n]->blocks);
        const double slope = at[1] == at[0] ? 0 : (y[1] - y[0]) / (at[1] - at[0]);
        launch.counts[what] = y[0] + slope * (tokens - at[0]);
      }
    }
    ++walk;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 10) {
    std::fprintf(stderr, "OP DTYPE PASS B H T D MULTIPROCESSORS SHARED_BYTES\n");
    return 1;
  }
  const std::string op = argv[1], dtype = argv[2], pass = argv[3];
  int64_t numbers[6];
  for (int i = 0; i < 6; ++i) numbers[i] = std::atoll(argv[4 + i]);
  const auto [B, H, T, D, multiprocessors, shared_bytes] = numbers;
  const Sizes s{op == "delta_rule",
                dtype == "float32"    ? hfla::DType::f32
                : dtype == "bfloat16" ? hfla::DType::bf16
                                      : hfla::DType::f16,
                pass == "backward",
                B,
                T,
                H,
                D};
  constexpr int64_t kTensors = int64_t(256) << 20;
  tensors_begin = static_cast<char*>(std::aligned_alloc(4096, kTensors));
  tensors_end = tensors_begin + kTensors;
  touched.resize(kTensors / kSector);

  std::vector<Launch> planned = launches(s, {multiprocessors, shared_bytes, 0}, false);
  count(s, planned, shared_bytes);
  for (const Launch& launch : planned) {
    std::printf("%lx %ld %d %ld", reinterpret_cast<unsigned long>(launch.kernel), launch.blocks,
                launch.threads, launch.shared);
    for (const double x : launch.counts) std::printf(" %.1f", x);
    std::printf("\n");
  }
  return 0;
}
