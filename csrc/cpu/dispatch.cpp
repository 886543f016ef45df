// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Which of the instruction sets that were built runs here. setup.py compiles the *_isa.cpp files
// once per instruction set and says with HFLA_WITH_... which ones the compiler knew. Of the last
// ones it compiles a few products only: they have all other kernels from the one before. Doubles
// are for comparisons: base computes them on every CPU, and the other sets have no kernels for
// them. With HFLA_DOUBLE_ALONE base has kernels for nothing else, and is not one to choose.

#include <cstdlib>
#include <string>

#include "cpu/processor.h"
#include "kernels/cpu.h"
#include "kernels/export.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif
#ifdef HFLA_WITH_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
namespace avx512_vnni {
Status rounded_linear(const QuantizedLinearProblem&, const Threads&);
}
namespace avx512_bf16 {
Status linear(const LinearProblem&, const Threads&);
}
namespace amx {
Status linear(const LinearProblem&, const Threads&);
Status rounded_linear(const QuantizedLinearProblem&, const Threads&);
}  // namespace amx

namespace {

struct InstructionSet {
  bool (*runs_here)();
  CpuKernels (*kernels)();
  // Where it runs, whether it is faster than those behind it.
  bool (*is_fast)() = [] { return true; };
};

#ifdef __x86_64__
struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// All zero where the CPU has no such leaf. Compilers have __builtin_cpu_supports for this, but
// Zig's finds nothing on any CPU.
Registers cpuid(unsigned leaf, unsigned part = 0) {
  Registers found;
  __get_cpuid_count(leaf, part, &found.eax, &found.ebx, &found.ecx, &found.edx);
  return found;
}

// Whether the system saves these registers, by their bits in XCR0, when it switches threads.
[[maybe_unused]] bool system_saves(unsigned registers) {
  constexpr unsigned kOsXSave = 1u << 27;
  if (!(cpuid(1).ecx & kOsXSave)) return false;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & registers) == registers;
}

// Every CPU with AVX2 has F16C too.
[[maybe_unused]] bool has_avx2() {
  constexpr unsigned kFma = 1u << 12, kAvx2 = 1u << 5, kXmmAndYmm = 0x6;
  return (cpuid(1).ecx & kFma) && (cpuid(7).ebx & kAvx2) && system_saves(kXmmAndYmm);
}
#endif

#ifdef HFLA_WITH_AVX512
bool has_avx512() {
  constexpr unsigned kFoundation = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;
  constexpr unsigned kAll = kFoundation | kDq | kBw | kVl, kMasksAndZmm = 0xe0;
  return has_avx2() && (cpuid(7).ebx & kAll) == kAll && system_saves(kMasksAndZmm);
}
#endif

#ifdef HFLA_WITH_AVX512_VNNI
bool has_avx512_vnni() {
  constexpr unsigned kVnni = 1u << 11;
  return has_avx512() && (cpuid(7).ecx & kVnni);
}

CpuKernels avx512_vnni_kernels() {
  CpuKernels kernels = avx512::kernels;
  kernels.instruction_set = "avx512_vnni";
  kernels.rounded_linear = avx512_vnni::rounded_linear;
  return kernels;
}
#endif

#ifdef HFLA_WITH_AVX512_BF16
bool has_avx512_bf16() {
  constexpr unsigned kBf16 = 1u << 5;
  return has_avx512_vnni() && (cpuid(7, 1).eax & kBf16);
}

// No CPU says how fast its instruction for products of bfloat16 is. AMD's does twice as many as it
// does of float32 in the same time (234 and 117 GFLOP/s on a core, Zen 4), Intel's half as many
// (118 and 236, Granite Rapids): there multiplying floats is the faster way.
bool is_bf16_fast() { return is_amds(); }

CpuKernels avx512_bf16_kernels() {
  CpuKernels kernels = avx512_vnni_kernels();
  kernels.instruction_set = "avx512_bf16";
  kernels.linear = avx512_bf16::linear;
  return kernels;
}
#endif

#ifdef HFLA_WITH_AMX
// Linux lets a process use the tiles when it has asked for them.
bool may_use_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

bool has_amx() {
  constexpr unsigned kBFloat16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  const unsigned found = cpuid(7).edx;
  return has_avx512_vnni() && (found & kBFloat16) && (found & kTile) && (found & kInt8) &&
         may_use_tiles();
}

CpuKernels amx_kernels() {
  CpuKernels kernels = avx512_vnni_kernels();
  kernels.instruction_set = "amx";
  kernels.linear = amx::linear;
  kernels.rounded_linear = amx::rounded_linear;
  return kernels;
}
#endif

// Best first.
const InstructionSet kInstructionSets[] = {
#ifdef HFLA_WITH_AMX
    {has_amx, amx_kernels},
#endif
#ifdef HFLA_WITH_AVX512_BF16
    {has_avx512_bf16, avx512_bf16_kernels, is_bf16_fast},
#endif
#ifdef HFLA_WITH_AVX512_VNNI
    {has_avx512_vnni, avx512_vnni_kernels},
#endif
#ifdef HFLA_WITH_AVX512
    {has_avx512, [] { return avx512::kernels; }},
#endif
#ifdef HFLA_WITH_AVX2
    {has_avx2, [] { return avx2::kernels; }},
#endif
#ifndef HFLA_DOUBLE_ALONE
    {[] { return true; }, [] { return base::kernels; }},
#endif
};

std::string built_names() {
  std::string names;
  for (const InstructionSet& set : kInstructionSets) {
    names += (names.empty() ? "" : ", ") + std::string(set.kernels().instruction_set);
  }
  return names;
}

struct Choice {
  CpuKernels kernels;
  std::string why_not;  // empty: they run here
};

Choice best() {
  for (const InstructionSet& set : kInstructionSets) {
    if (set.runs_here() && set.is_fast()) return {set.kernels(), ""};
  }
  return {{},
          "the kernels were built for another processor, with " + built_names() +
              "; install the package on this one, or build it with "
              "HF_LINEAR_ATTENTION_CPU_INSTRUCTION_SETS=all"};
}

Choice forced(const std::string& name) {
  const std::string setting = "HF_LINEAR_ATTENTION_CPU_ISA=" + name;
  for (const InstructionSet& set : kInstructionSets) {
    if (name != set.kernels().instruction_set) continue;
    if (set.runs_here()) return {set.kernels(), ""};
    return {{}, setting + ", but this CPU can't run it"};
  }
  return {{}, setting + ", but this build has " + built_names()};
}

Choice choose() {
  const char* name = std::getenv("HF_LINEAR_ATTENTION_CPU_ISA");
  return name && *name ? forced(name) : best();
}

}  // namespace

bool is_amds() {
#ifdef __x86_64__
  // "AuthenticAMD". In a virtual machine asking takes long.
  static const Registers vendor = cpuid(0);
  return vendor.ebx == 0x68747541 && vendor.edx == 0x69746e65 && vendor.ecx == 0x444d4163;
#else
  return false;
#endif
}

const CpuKernels* cpu_kernels(DType dtype, const char** why_not) {
  static const Choice choice = choose();
  if (choice.why_not.empty()) return dtype == DType::f64 ? &base::kernels : &choice.kernels;
  *why_not = choice.why_not.c_str();
  return nullptr;
}

}  // namespace hfla

// "amx, avx512_bf16, avx512_vnni, avx512, avx2, base": what was built, for ops/compiled/library.py,
// through ctypes.
HFLA_EXPORT const char* hfla_cpu_instruction_sets_built() {
  static const std::string names = hfla::built_names();
  return names.c_str();
}
