// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What the library shows to who loads it. Linux's linker also goes by exports.map.
#pragma once

#ifdef _WIN32
#define HFLA_EXPORT extern "C" __declspec(dllexport)
#else
#define HFLA_EXPORT extern "C" __attribute__((visibility("default")))
#endif
