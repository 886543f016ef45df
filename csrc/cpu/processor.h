// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What kernels ask of the processor beyond its instruction set; dispatch.cpp knows.
#pragma once

namespace hfla {

bool is_amds();  // whether it is one of AMD's

}  // namespace hfla
