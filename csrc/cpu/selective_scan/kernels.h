// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The selective scan's kernels of one instruction set.
#pragma once

#include "cpu/common/isa.h"
#include "kernels/selective_scan.h"

namespace hfla::HFLA_ISA {

Status selective_scan_forward(const SelectiveScanProblem&, const SelectiveScanResult&,
                              const Threads&);
Status selective_scan_backward(const SelectiveScanProblem&, const SelectiveScanUpstream&,
                               const SelectiveScanGradients&, const Threads&);
Status selective_scan_step(const SelectiveScanStep&, const Threads&);

}  // namespace hfla::HFLA_ISA
