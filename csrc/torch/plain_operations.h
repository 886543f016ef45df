// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Operations of torch's between those of this library. Where a call is plain, as all of a token's
// are, it is done here, with the same result: torch takes longer to prepare it. Other calls go to
// torch. All but views take their arguments from the stack, and put the result there.
#pragma once

#include "torch/shim.h"

namespace hfla {

// Another look at a tensor's numbers; the offset is from its own first one, where torch's
// as_strided counts from that of the memory. Without a stack, for half of a token's operations are
// views.
Tensor view(const Tensor& x, int64_t dim, const int64_t* sizes, const int64_t* strides,
            int64_t offset);

// Any op, by its name.
void call_dispatcher(const char* name, const char* overload, StableIValue* stack);

// Without add's factor, which is no Scalar that a stack can have.
void add(StableIValue* stack);
void mul(StableIValue* stack);

// A copy in another dtype: the number that torch has for it.
void to_dtype(StableIValue* stack);

// A contiguous copy.
void clone(StableIValue* stack);

// Writes the second tensor to the first.
void copy_to(StableIValue* stack);

void cat(StableIValue* stack);

// A row of a table for each index.
void embedding(StableIValue* stack);

}  // namespace hfla
