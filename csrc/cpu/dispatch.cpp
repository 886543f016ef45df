// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Which of the instruction sets that were built runs here. setup.py compiles the *_isa.cpp files
// once per instruction set and says with HFLA_WITH_... which ones the compiler knew.

#include <cstdlib>
#include <string>

#include "kernels/cpu.h"

namespace hfla {

namespace base {
extern const CpuKernels kernels;
}
namespace avx2 {
extern const CpuKernels kernels;
}
namespace avx512 {
extern const CpuKernels kernels;
}

namespace {

struct InstructionSet {
  const CpuKernels* kernels;
  bool (*runs_here)();
};

#ifdef HFLA_WITH_AVX2
// Every CPU with AVX2 has F16C too, which not every compiler can ask for.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

#ifdef HFLA_WITH_AVX512
bool has_avx512() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Best first.
const InstructionSet kInstructionSets[] = {
#ifdef HFLA_WITH_AVX512
    {&avx512::kernels, has_avx512},
#endif
#ifdef HFLA_WITH_AVX2
    {&avx2::kernels, has_avx2},
#endif
    {&base::kernels, [] { return true; }},
};

std::string built_names() {
  std::string names;
  for (const InstructionSet& set : kInstructionSets) {
    names += (names.empty() ? "" : ", ") + std::string(set.kernels->instruction_set);
  }
  return names;
}

struct Choice {
  const CpuKernels* kernels;
  std::string why_not;
};

Choice best() {
  const InstructionSet* set = kInstructionSets;
  while (!set->runs_here()) ++set;  // the last one always does
  return {set->kernels, ""};
}

Choice forced(const std::string& name) {
  const std::string setting = "HF_LINEAR_ATTENTION_CPU_ISA=" + name;
  for (const InstructionSet& set : kInstructionSets) {
    if (name != set.kernels->instruction_set) continue;
    if (set.runs_here()) return {set.kernels, ""};
    return {nullptr, setting + ", but this CPU can't run it"};
  }
  return {nullptr, setting + ", but this build has " + built_names()};
}

Choice choose() {
  const char* name = std::getenv("HF_LINEAR_ATTENTION_CPU_ISA");
  return name && *name ? forced(name) : best();
}

}  // namespace

const CpuKernels* cpu_kernels(const char** why_not) {
  static const Choice choice = choose();
  if (!choice.kernels) *why_not = choice.why_not.c_str();
  return choice.kernels;
}

}  // namespace hfla

// "avx512, avx2, base": what was built, for native/library.py, through ctypes.
extern "C" const char* hfla_cpu_instruction_sets_built() {
  static const std::string names = hfla::built_names();
  return names.c_str();
}
