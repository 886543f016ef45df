// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The products of all chosen experts of a mixture, for few rows of each.
//
// One product after another, reading would get up to speed anew for each, and threads would wait
// for each other in between: for one token an expert is read in a tenth of a millisecond. So they
// are shared out together, in parts of an expert's outputs, each a product of its own in one
// thread.

#include "kernels/linear.h"

namespace hfla {
namespace {

constexpr int64_t kPartBytes = 262144;  // of weights, in a part; fewer take longer to get to
constexpr int64_t kPartsOfThread = 4;   // so that none waits for long at the end
constexpr int64_t kMultiple = 64;       // of outputs, in a part: whole tiles of all kernels

int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

struct Parts {
  const LinearOnCpu linear;
  const ExpertLinearProblem& p;
  const int64_t number_bytes = bytes_of(p.dtype);
  const int64_t outputs, of_expert, count;
  int64_t next = 0;
  bool is_out_of_memory = false;

  Parts(LinearOnCpu linear, const ExpertLinearProblem& p, int64_t outputs)
      : linear(linear),
        p(p),
        outputs(outputs),
        of_expert(ceil_div(p.out, outputs)),
        count(of_expert * p.num_chosen) {}

  void compute(int64_t part) {
    const ExpertRows& rows = p.chosen[part / of_expert];
    const int64_t begin = part % of_expert * outputs;
    const int64_t output = rows.expert * p.out + begin;  // among all experts'
    LinearProblem one{};
    one.rows = rows.end - rows.begin;
    one.in = p.in;
    one.out = begin + outputs < p.out ? outputs : p.out - begin;
    one.dtype = p.dtype;
    one.x = at(p.x, rows.begin * p.in);
    one.weight = at(p.weight, output * p.in);
    one.bias = p.bias ? at(p.bias, output) : nullptr;
    one.y = const_cast<char*>(at(p.y, rows.begin * p.out + begin));
    one.y_stride = p.out;
    if (linear(one, Threads{1, nullptr}) == Status::out_of_memory) {
      __atomic_store_n(&is_out_of_memory, true, __ATOMIC_RELAXED);
    }
  }

 private:
  const char* at(const void* numbers, int64_t index) const {
    return static_cast<const char*>(numbers) + index * number_bytes;
  }
};

}  // namespace

Status expert_linear(LinearOnCpu linear, const ExpertLinearProblem& p, const Threads& threads) {
  if (p.num_chosen == 0 || p.out == 0) return Status::ok;
  const int64_t expert_bytes = p.in * p.out * bytes_of(p.dtype);
  int64_t parts = ceil_div(kPartsOfThread * threads.count, p.num_chosen);  // of an expert
  if (parts > expert_bytes / kPartBytes) parts = expert_bytes / kPartBytes;
  const int64_t outputs = ceil_div(p.out, parts < 1 ? 1 : parts);
  Parts all(linear, p, ceil_div(outputs, kMultiple) * kMultiple);
  const auto body = [](void* opaque, int64_t, int64_t) {
    Parts& parts = *static_cast<Parts*>(opaque);
    int64_t part;
    while ((part = __atomic_fetch_add(&parts.next, 1, __ATOMIC_RELAXED)) < parts.count) {
      parts.compute(part);
    }
  };
  const bool is_serial = p.num_chosen * p.in * p.out < threads.serial_work;
  const int64_t workers = threads.count < all.count ? threads.count : all.count;
  if (is_serial || workers <= 1) {
    body(&all, 0, 1);
  } else {
    threads.parallel_for(workers, body, &all);
  }
  return all.is_out_of_memory ? Status::out_of_memory : Status::ok;
}

}  // namespace hfla
