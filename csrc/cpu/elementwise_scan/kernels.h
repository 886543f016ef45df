// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The elementwise scan's kernels of one instruction set.
#pragma once

#include "cpu/common/isa.h"
#include "kernels/elementwise_scan.h"

namespace hfla::HFLA_ISA {

Status elementwise_scan_forward(const ElementwiseScanProblem&, const ElementwiseScanResult&,
                                const Threads&);
Status elementwise_scan_backward(const ElementwiseScanProblem&, const ElementwiseScanUpstream&,
                                 const ElementwiseScanGradients&, const Threads&);
Status rg_lru_forward(const RgLruProblem&, const ElementwiseScanResult&, const Threads&);
Status rg_lru_backward(const RgLruProblem&, const ElementwiseScanUpstream&, const RgLruGradients&,
                       const Threads&);
Status elementwise_scan_step(const ElementwiseScanStep&, const Threads&);

}  // namespace hfla::HFLA_ISA
