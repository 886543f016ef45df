// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What the emulator tells ThreadSanitizer, where it is compiled with -fsanitize=thread: every
// thread of a block is a thread of its own, barriers order what they do, and nothing else does. Any
// two threads that touch the same number without a barrier between them, of which one writes, are
// then a race, in whatever order they are run.
#pragma once

#if defined(__SANITIZE_THREAD__)
#define HFLA_FINDS_RACES 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HFLA_FINDS_RACES 1
#endif
#endif

#if HFLA_FINDS_RACES
#include <sanitizer/tsan_interface.h>

// Of a function that is the emulator's own: quicker than Unwatched, which it needs as well for what
// it calls.
#define OF_EMULATOR __attribute__((no_sanitize("thread"))) inline

extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#else
#define OF_EMULATOR inline
#endif

namespace hfla::cuda::emulator {

#if HFLA_FINDS_RACES

constexpr bool kFindsRaces = true;

// A thread as ThreadSanitizer sees it.
using Identity = void*;
inline Identity new_identity() { return __tsan_create_fiber(0); }
inline Identity identity() { return __tsan_get_current_fiber(); }
inline void become(Identity x) { __tsan_switch_to_fiber(x, __tsan_switch_to_fiber_no_sync); }

// What was done before give_order(at) is done before what comes after a later take_order(at).
inline void give_order(void* at) { __tsan_release(at); }
inline void take_order(void* at) { __tsan_acquire(at); }

// What a thread reads and writes in between is the emulator's own business.
inline void watch_no_longer() {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
inline void watch_again() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}

// A thread may not end while it is not watched, and it may be so several times over. What it did is
// done before what comes after a later take_order(at).
inline void end_identity(Identity x, int times_unwatched, void* at) {
  const Identity own = identity();
  become(x);
  while (times_unwatched-- > 0) watch_again();
  give_order(at);
  become(own);
  __tsan_destroy_fiber(x);
}

#else

constexpr bool kFindsRaces = false;

using Identity = void*;
inline Identity new_identity() { return nullptr; }
inline void end_identity(Identity, int, void*) {}
inline Identity identity() { return nullptr; }
inline void become(Identity) {}
inline void give_order(void*) {}
inline void take_order(void*) {}
inline void watch_no_longer() {}
inline void watch_again() {}

#endif

struct Unwatched {
  Unwatched() { watch_no_longer(); }
  ~Unwatched() { watch_again(); }
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
};
struct Watched {  // again, within
  Watched() { watch_again(); }
  ~Watched() { watch_no_longer(); }
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
};

}  // namespace hfla::cuda::emulator
