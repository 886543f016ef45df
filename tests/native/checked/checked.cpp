// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The emulated CUDA kernels under checks that need the compiler's and the system's help:
//
//     checked kernels [PART]   all kernels, or the cases with PART in their names
//     checked fragments        operands of tensor cores are as published
//     checked planted NAME     a fault is found: it fails, and says why
//
// Of the kernels as they are: no race, no misaligned access, nothing outside of tensors that lie
// between guards; the same numbers to the bit in any order of threads and blocks, and the same
// numbers in tensors of more than 2^31 elements. Then every barrier of every kernel is left out,
// and has to be found as a race.
//
// Compiled with -fsanitize=thread,alignment, and -DCHECK_ALL for float16 and larger cases. It ends
// with an error where something is found.

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "cases.h"
#include "fragments.h"
#include "planted.h"

// Both are called by the compiler's checks.
extern "C" __attribute__((no_sanitize("thread"))) void __tsan_on_report(void*) {
  hfla::cuda::emulator::machine().found = "a race";
}
extern "C" __attribute__((no_sanitize("thread"))) void __ubsan_on_report() {
  hfla::cuda::emulator::machine().found = "a misaligned access";
}

namespace {

using namespace checked;

// float16 has the code of float32 with one part of TF32 in place of two.
#ifdef CHECK_ALL
const std::vector<hfla::DType> kDTypes = {hfla::DType::f32, hfla::DType::bf16, hfla::DType::f16};
#else
const std::vector<hfla::DType> kDTypes = {hfla::DType::f32, hfla::DType::bf16};
#endif

struct Outcome {
  Results results;
  std::string error;
};

Outcome run_case(const Case& c, Lies lies, unsigned schedule, int64_t batch = 0) {
  emulator::Machine& m = emulator::machine();
  if (batch == 0) batch = c.rows;
  m.schedule = schedule, m.found = nullptr, m.error.clear();
  m.last_part = batch / c.rows;
  Memory memory(lies);
  Tensors tensors(memory, batch, c.rows);
  const bool good = c.run(tensors, batch);
  m.last_part = 1;
  return {tensors.results, good ? "" : m.found ? m.found : m.error};
}

using Barriers = std::map<emulator::Barrier, std::vector<const Case*>>;

// What is wrong with a case, or "". Adds it to the barriers that it passes, as it is run first: for
// tensors that lie otherwise in memory there may be other kernels.
std::string fault_of(const Case& c, Barriers* passed = nullptr) {
  const float within = c.dtype == hfla::DType::f32 ? 1e-4f : 2e-2f;
  emulator::machine().passed.clear();
  const Outcome wanted = run_case(c, Lies::before_a_guard, 0);
  if (passed) {
    for (const auto& [barrier, times] : emulator::machine().passed) (*passed)[barrier].push_back(&c);
  }
  if (!wanted.error.empty()) return wanted.error;
  struct Way {
    const char* name;
    Lies lies;
    unsigned schedule;
    float within;
  };
  std::vector<Way> ways = {{"after a guard", Lies::after_a_guard, 2, within}};
  if (c.small) {
    ways.push_back({"another order", Lies::before_a_guard, 3, 0});
    ways.push_back({"far apart", Lies::far_apart, 1, within});
  }
  for (const Way& way : ways) {
    const Outcome got = run_case(c, way.lies, way.schedule);
    if (!got.error.empty()) return std::string(way.name) + ": " + got.error;
    const std::string name = difference(got.results, wanted.results, way.within);
    if (!name.empty()) return std::string(way.name) + ": " + name + " differs";
  }
  return "";
}

// With so many rows that arrays have more than 2^31 elements; only the blocks of the last are run.
std::string fault_of_many_rows(const ManyRows& many) {
  const Outcome wanted = run_case(many.of, Lies::before_a_guard, 0),
                got = run_case(many.of, Lies::far_apart, 0, int64_t(1) << many.log2_rows);
  if (!got.error.empty()) return "many rows: " + got.error;
  const std::string name = difference(got.results, wanted.results, 1e-6f);
  return name.empty() ? "" : "many rows: " + name + " differs";
}

int report(const std::string& name, const std::string& fault) {
  std::printf("%s: %s\n", name.c_str(), fault.empty() ? "nothing found" : fault.c_str());
  std::fflush(stdout);
  return fault.empty() ? 0 : 1;
}

// Every barrier that a case passes, of each kernel, is left out in turn, in one case after another
// until it is found. What other kernels compute is not waited for: a race depends on no numbers.
int check_barriers(const Barriers& passed) {
  emulator::Machine& m = emulator::machine();
  m.on_launch = [&m](int64_t, int, int64_t) { return m.kernel == m.missing.kernel; };
  int failed = 0;
  for (const auto& [barrier, where] : passed) {
    m.missing = barrier;
    const Case* found = nullptr;
    for (const Case* c : where) {
      if (!found && run_case(*c, Lies::before_a_guard, 0).error == "a race") found = c;
    }
    std::string file = barrier.file;
    file = file.substr(file.rfind('/') + 1) + ":" + std::to_string(barrier.line);
    if (found) std::printf("%s left out of %s: a race\n", file.c_str(), found->name.c_str());
    if (!found) failed += report(file + " left out of " + where[0]->name, "not found");
    std::fflush(stdout);
  }
  m.missing = {}, m.on_launch = nullptr;
  return failed;
}

int check_kernels(const std::string& part) {
  emulator::Machine& m = emulator::machine();
  const std::vector<Case> cases = all_cases(kDTypes);
  Barriers passed;
  int failed = 0;
  const auto chosen = [&](const Case& c) { return c.name.find(part) != std::string::npos; };
  for (const Case& c : cases) {
    if (chosen(c)) failed += report(c.name, fault_of(c, &passed));
  }
  for (const ManyRows& many : cases_of_one_row()) {
    if (chosen(many.of)) failed += report(many.of.name, fault_of_many_rows(many));
  }
  for (void* const kernel : m.loaded) {
    if (part.empty() && !m.launched.count(kernel)) failed += report("a kernel", "never launched");
  }
  return failed + check_barriers(passed);
}

int check_fragments() {
  return report("bf16", wrong_fragment<Checked<Bf16Operands>>()) +
         report("tf32", wrong_fragment<Checked<Tf32Operands<1>>>()) +
         report("two parts of tf32", wrong_fragment<Checked<Tf32Operands<2>>>());
}

int check_planted(const std::string& name) {
  const std::map<std::string, std::function<std::string()>> faults = {
      {"nothing", [] { return fault_of(doubling(right_kernel, 32)); }},
      {"nothing_after_a_race",
       [] {
         const std::string before = fault_of(doubling(between_warps_kernel<false>, 64));
         if (before != "a race") return "not found: " + before;
         return fault_of(doubling(between_warps_kernel<true>, 64));
       }},
      {"one_further", [] { return fault_of(doubling(one_further_kernel, 32)); }},
      {"one_before", [] { return fault_of(doubling(one_before_kernel, 32)); }},
      {"misaligned", [] { return fault_of(doubling(misaligned_kernel, 32)); }},
      {"narrow_offset", [] { return fault_of(doubling(narrow_offset_kernel, 32)); }},
      {"no_barrier", [] { return fault_of(doubling(between_warps_kernel<false>, 64)); }},
      {"no_barrier_in_warp", [] { return fault_of(doubling(no_barrier_in_warp_kernel, 32)); }},
      {"race_of_blocks", [] { return fault_of(doubling(race_of_blocks_kernel, 32)); }},
      {"order_of_blocks", [] { return fault_of(doubling(order_of_blocks_kernel, 32)); }},
      {"one_token_more", [] { return fault_of(a_token_too_many()); }},
      {"swapped_a", [] { return wrong_fragment<SwappedA>(); }},
      {"swapped_b", [] { return wrong_fragment<SwappedB>(); }},
  };
  if (!faults.count(name)) {
    std::fprintf(stderr, "there is no planted fault %s\n", name.c_str());
    return 1;
  }
  planted_fault = name;
  return report(name, faults.at(name)());
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  notice_what_is_outside();
  for (const hfla::DType dtype : kDTypes) {
    kernels(dtype).load();
    delta_kernels(dtype).load();
  }
  int failed = 1;
  if (what == "kernels")
    failed = check_kernels(argc > 2 ? argv[2] : "");
  else if (what == "fragments")
    failed = check_fragments();
  else if (what == "planted" && argc == 3)
    failed = check_planted(argv[2]);
  else
    std::fprintf(stderr, "kernels [PART], fragments, or planted NAME\n");
  std::fflush(stdout);
  _exit(failed ? 1 : 0);  // what the emulator keeps is not cleaned up
}
