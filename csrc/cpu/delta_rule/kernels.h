// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The delta rule's kernels of one instruction set.
#pragma once

#include "cpu/common/isa.h"
#include "kernels/delta_rule.h"

namespace hfla::HFLA_ISA {

Status delta_rule_forward(const DeltaRuleProblem&, const DeltaRuleResult&, const Threads&);
Status delta_rule_backward(const DeltaRuleProblem&, const DeltaRuleUpstream&,
                           const DeltaRuleGradients&, const Threads&);
Status delta_rule_step(const DeltaRuleStep&, const Threads&);
Status delta_rule_forward_in_slots(const DeltaRuleProblem&, const DeltaRuleSlots&, const View& y,
                                   const Threads&);

}  // namespace hfla::HFLA_ISA
