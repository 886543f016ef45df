// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The ops of kernels/cross_entropy.h.

#include <cmath>

#include "torch/devices.h"
#include "torch/ops.h"

namespace hfla {
namespace {

CrossEntropyProblem make_cross_entropy_problem(const Tensor& logits, const Tensor& labels,
                                               int64_t ignore_index) {
  CrossEntropyProblem p{};
  p.dtype = dtype_of("logits", logits);
  check(logits.dim() == 2, "logits must have shape (rows, words), got ", shape_of(logits));
  check(logits.is_contiguous(), "logits must be contiguous");
  p.rows = logits.size(0);
  p.words = logits.size(1);
  check_contiguous_tensor("labels", labels, logits.device(), aoti_torch_dtype_int64(), {p.rows});
  p.logits = logits.data();
  p.labels = static_cast<const int64_t*>(labels.data());
  p.ignore_index = ignore_index;
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t label = p.labels[row];
    check(label == ignore_index || (label >= 0 && label < p.words), "labels must be from 0 to ",
          p.words - 1, ", or ignore_index, ", ignore_index, ", got ", label, " in row ", row);
  }
  return p;
}

// From what the kernel found in each row.
template <class Acc>
void finish(const CrossEntropyProblem& p, const Acc* sums, void* losses, void* normalizers) {
  for (int64_t row = 0; row < p.rows; ++row) {
    const Acc log_sum = std::log(sums[row]);
    static_cast<Acc*>(normalizers)[row] += log_sum;
    if (p.labels[row] != p.ignore_index) static_cast<Acc*>(losses)[row] += log_sum;
  }
}

void cross_entropy(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor logits = arguments.tensor();
  const Tensor labels = arguments.tensor();
  const CrossEntropyProblem p = make_cross_entropy_problem(logits, labels, arguments.integer());
  const auto new_numbers = [&] {
    return Tensor::empty(accumulation_dtype(p.dtype), {p.rows}, logits.device());
  };
  Tensor losses = new_numbers(), normalizers = new_numbers(), sums = new_numbers();
  const CrossEntropyResult result{normalizers.mutable_data(), sums.mutable_data(),
                                  losses.mutable_data()};
  check_status(cpu(p.dtype).cross_entropy.forward(p, result, torch_threads()));
  if (p.dtype == DType::f64) {
    finish(p, static_cast<const double*>(sums.data()), result.gaps, result.largest);
  } else {
    finish(p, static_cast<const float*>(sums.data()), result.gaps, result.largest);
  }
  give_back(stack, losses, normalizers);
}

void cross_entropy_backward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor dlosses = arguments.tensor();
  const Tensor logits = arguments.tensor();
  const Tensor labels = arguments.tensor();
  const Tensor normalizers = arguments.tensor();
  const CrossEntropyProblem p = make_cross_entropy_problem(logits, labels, arguments.integer());
  const int32_t acc = accumulation_dtype(p.dtype);
  check_contiguous_tensor("dlosses", dlosses, logits.device(), acc, {p.rows});
  check_contiguous_tensor("normalizers", normalizers, logits.device(), acc, {p.rows});
  Tensor dlogits = Tensor::empty(logits.dtype(), {p.rows, p.words}, logits.device());
  const CrossEntropyGradients gradients{dlosses.data(), normalizers.data(), dlogits.mutable_data()};
  check_status(cpu(p.dtype).cross_entropy.backward(p, gradients, torch_threads()));
  give_back(stack, dlogits);
}

constexpr char kForward[] = "cross_entropy", kBackward[] = "cross_entropy_backward";

constexpr Op kOps[] = {
    op<cross_entropy, kForward>("cross_entropy(Tensor logits, Tensor labels, int ignore_index) "
                                "-> (Tensor losses, Tensor normalizers)",
                                false),
    op<cross_entropy_backward, kBackward>(
        "cross_entropy_backward(Tensor dlosses, Tensor logits, Tensor labels, Tensor normalizers, "
        "int ignore_index) -> Tensor dlogits",
        false),
};

}  // namespace

const Ops cross_entropy_ops = ops_of(kOps);

}  // namespace hfla
