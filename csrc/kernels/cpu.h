// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The kernels of all ops on the CPU, one table per instruction set, compiled from the same sources
// but for a few that only some products have a use for (cpu/dispatch.cpp).
#pragma once

#include "kernels/attention.h"
#include "kernels/convolution.h"
#include "kernels/cross_entropy.h"
#include "kernels/decay_steps.h"
#include "kernels/delta_rule.h"
#include "kernels/elementwise_scan.h"
#include "kernels/linear.h"
#include "kernels/linear_attention.h"
#include "kernels/quantized_linear.h"
#include "kernels/rms_norm.h"
#include "kernels/rwkv7.h"
#include "kernels/selective_scan.h"
#include "kernels/sinusoids.h"

namespace hfla {

struct CpuKernels {
  const char* instruction_set;
  LinearAttentionOnCpu linear_attention;
  DeltaRuleOnCpu delta_rule;
  ConvolutionOnCpu convolution;
  SelectiveScanOnCpu selective_scan;
  ElementwiseScanOnCpu elementwise_scan;
  RgLruOnCpu rg_lru;
  LinearOnCpu linear;
  ManyRowsLinearOnCpu many_rows_linear;
  QuantizedLinearOnCpu quantized_linear;
  QuantizedLinearOnCpu rounded_linear;  // x is rounded to 16 bits, so that products are of integers
  QuantizedLinearOnCpu dequantize_int4;  // y is the weight, (out, in)
  RmsNormOnCpu rms_norm;
  SinusoidsOnCpu add_sinusoids;
  DecayStepsOnCpu decay_steps;
  RWKV7OnCpu rwkv7;
  CrossEntropyOnCpu cross_entropy;
  AttentionOnCpu attention;
  WindowOnCpu window_step;
};

// For tensors of a dtype: those of the instruction set that is chosen once, by CPUID, or, for
// doubles, of the next best one that has them. HF_LINEAR_ATTENTION_CPU_ISA forces a set. Null, with
// a reason, when the forced one can't run here.
const CpuKernels* cpu_kernels(DType dtype, const char** why_not);

}  // namespace hfla
