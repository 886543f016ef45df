// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Operations of torch's between those of this library, which its dispatcher can't call, or takes
// long to. Each takes its arguments from the stack, and puts its result there.
#pragma once

#include "torch/shim.h"

namespace hfla {

// Any op, by its name.
void call_dispatcher(const char* name, const char* overload, StableIValue* stack);

// Of two tensors, without a factor, which would be a Scalar: a stack can't have that.
void add(StableIValue* stack);

// Where the numbers lie in order, as all of a token's do, made here: the dispatcher takes longer.
void view(StableIValue* stack);

}  // namespace hfla
