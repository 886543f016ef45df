// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What ops over sequences of queries, keys and values check and tell their kernels, whatever the
// recurrence.
//
// q, k, v, their gradients and decays may have any strides; all else has to be contiguous, which
// the Python side sees to.
//
// B batch, T time, Hq query heads, Hkv key-value heads, K key dim, V value dim, N packed sequences.
#pragma once

#include "torch/checks.h"

namespace hfla {

// What q, k and v say about everything else; `dim` is 4, or 3 where there is no time, and then T
// is 1.
struct Dimensions : HeadSizes {
  int64_t T;
  Device device;
};

// Which heads may serve several others.
enum class SharedHeads {
  of_k_and_v,  // k and v together, for heads of q; v's are Hkv
  of_q_and_k,  // q and k, each for heads of v, which are Hkv
};

inline void check_heads(int64_t Hq, int64_t Hk, int64_t Hv, SharedHeads shared) {
  check(Hk >= 1, "k must have 1 head or more, got ", Hk);
  if (shared == SharedHeads::of_k_and_v) {
    check(Hq >= 1 && Hq % Hk == 0, "q must have a multiple of k's ", Hk, " heads, got ", Hq);
  } else {
    check(Hv >= 1 && Hv % Hk == 0, "v must have a multiple of k's ", Hk, " heads, got ", Hv);
    check(Hq >= 1 && Hv % Hq == 0, "v must have a multiple of q's ", Hq, " heads, got ", Hv);
  }
}

inline Dimensions check_qkv(const Tensor& q, const Tensor& k, const Tensor& v, int64_t dim,
                            SharedHeads shared = SharedHeads::of_k_and_v) {
  const char* shape = dim == 4 ? "(batch, time, heads, dim)" : "(batch, heads, dim)";
  check(q.dim() == dim, "q must have shape ", shape, ", got ", shape_of(q));
  check(k.dim() == dim, "k must have shape ", shape, ", got ", shape_of(k));
  check(v.dim() == dim, "v must have shape ", shape, ", got ", shape_of(v));

  const int64_t B = q.size(0), T = dim == 4 ? q.size(1) : 1;
  const int64_t Hq = q.size(dim - 2), Hk = k.size(dim - 2);
  const int64_t Hv = shared == SharedHeads::of_k_and_v ? Hk : v.size(dim - 2);
  const int64_t K = q.size(dim - 1), V = v.size(dim - 1);
  check(K >= 1, "q must have a last dimension of 1 or more, got ", shape_of(q));
  check(V >= 1, "v must have a last dimension of 1 or more, got ", shape_of(v));
  check_heads(Hq, Hk, Hv, shared);

  const DType dtype = dtype_of("q", q);
  const Device device = q.device();
  check(!is_cuda(device) || dtype != DType::f64,
        "q must be float32, bfloat16 or float16 on CUDA, got float64");
  if (dim == 4) {
    check_tensor("k", k, device, q.dtype(), {B, T, Hk, K});
    check_tensor("v", v, device, q.dtype(), {B, T, Hv, V});
  } else {
    check_tensor("k", k, device, q.dtype(), {B, Hk, K});
    check_tensor("v", v, device, q.dtype(), {B, Hv, V});
  }
  return {{B, Hq, Hv, K, V, dtype}, T, device};
}

// The CPU kernels index with these, so the contents are checked as well. To look at those of a
// device would be to wait for it; its kernels stay within [0, T] whatever they are, but have to
// find a sequence for every token.
enum class LastBound { is_T, at_most_T };

inline void check_cu_seqlens(const Tensor& cu_seqlens, Device device, int64_t B, int64_t T,
                             LastBound last = LastBound::is_T) {
  check(B == 1, "cu_seqlens packs sequences along time and needs a batch of 1, got ", B);
  check(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1,
        "cu_seqlens must have shape (number of sequences + 1,), got ", shape_of(cu_seqlens));
  const int64_t N = cu_seqlens.size(0) - 1;
  check_contiguous_tensor("cu_seqlens", cu_seqlens, device, aoti_torch_dtype_int32(), {N + 1});
  if (is_cuda(device)) {
    check(N >= 1 || T == 0, "cu_seqlens must have a sequence or more for T = ", T,
          " tokens, got shape ", shape_of(cu_seqlens));
    return;
  }

  const auto* starts = static_cast<const int32_t*>(cu_seqlens.data());
  check(starts[0] == 0, "cu_seqlens must start at 0, got ", starts[0]);
  for (int64_t n = 0; n < N; ++n) {
    check(starts[n] <= starts[n + 1], "cu_seqlens must never decrease, got ", starts[n], " before ",
          starts[n + 1]);
  }
  check(starts[N] == T || (last == LastBound::at_most_T && starts[N] < T),
        "cu_seqlens must end at T = ", T, last == LastBound::is_T ? "" : " or before", ", got ",
        starts[N]);
}

// What a kernel is told of sequences; key_mask and cu_seqlens may be absent.
inline Sequences check_sequences(const Dimensions& d, const Tensor& key_mask,
                                 const Tensor& cu_seqlens, LastBound last = LastBound::is_T) {
  const bool* const mask = check_mask("key_mask", key_mask, d.device, {d.B, d.T});
  if (cu_seqlens) check_cu_seqlens(cu_seqlens, d.device, d.B, d.T, last);
  return {d, d.T, cu_seqlens ? cu_seqlens.size(0) - 1 : d.B, data_or_null<int32_t>(cu_seqlens),
          mask};
}

// The same for a problem whose sequences have channels and no heads.
template <class Problem>
void set_sequences(Problem& p, const Tensor& key_mask, const Tensor& cu_seqlens, Device device) {
  p.key_mask = check_mask("key_mask", key_mask, device, {p.B, p.T});
  if (cu_seqlens) check_cu_seqlens(cu_seqlens, device, p.B, p.T);
  p.num_sequences = cu_seqlens ? cu_seqlens.size(0) - 1 : p.B;
  p.cu_seqlens = data_or_null<int32_t>(cu_seqlens);
}

// x (B, T, C) for 3 dims, or (B, C) for 2.
inline void check_channels(const Tensor& x, int64_t dim) {
  check(x.dim() == dim, "x must have shape ",
        dim == 3 ? "(batch, time, channels)" : "(batch, channels)", ", got ", shape_of(x));
  check(x.size(dim - 1) >= 1, "x must have a channel or more, got ", shape_of(x));
}

// Makes y (B, T, ...) contiguous 0 where nothing is computed: for sequences without a slot, and
// behind the last one.
inline void clear_outputs(const Sequences& p, const SequenceSlots& slots, Tensor& y,
                          int64_t bytes_per_token) {
  char* const first = static_cast<char*>(y.mutable_data());
  if (!first) return;  // y is empty, and memset() must not be given null
  const auto clear = [&](int64_t begin, int64_t end) {
    std::memset(first + begin * bytes_per_token, 0,
                static_cast<size_t>((end - begin) * bytes_per_token));
  };
  for (int64_t n = 0; n < p.num_sequences; ++n) {
    const int64_t begin = p.cu_seqlens ? p.cu_seqlens[n] : n * p.T;
    if (slot_of(slots, n) < 0) clear(begin, p.cu_seqlens ? p.cu_seqlens[n + 1] : begin + p.T);
  }
  if (p.cu_seqlens) clear(p.cu_seqlens[p.num_sequences], p.T);
}

// ---- from tensors to what kernels read ----

inline View view(void* data, const Tensor& tensor) {
  const int64_t* stride = tensor.strides();
  switch (tensor.dim()) {
    case 4:  // (B, T, H, D)
      return {data, stride[0], stride[1], stride[2], stride[3]};
    case 3:  // (B, T, H)
      return {data, stride[0], stride[1], stride[2], 0};
    default:
      fail("view() takes tensors with a time dimension");
  }
}

// One token: (B, H, D) or (B, H).
inline View token_view(void* data, const Tensor& tensor) {
  const int64_t* stride = tensor.strides();
  return {data, stride[0], 0, stride[1], tensor.dim() == 3 ? stride[2] : 0};
}

inline View input(const Tensor& tensor) {
  return tensor ? view(input_data(tensor), tensor) : View();
}

inline View token_input(const Tensor& tensor) {
  return tensor ? token_view(input_data(tensor), tensor) : View();
}

// (B, T, C): its last stride is that of channels.
inline View rows_of(const Tensor& tensor) {
  if (!tensor) return {};
  const int64_t* stride = tensor.strides();
  return {input_data(tensor), stride[0], stride[1], 0, stride[2]};
}

// (B, C)
inline View token_of(const Tensor& tensor) {
  const int64_t* stride = tensor.strides();
  return {input_data(tensor), stride[0], 0, 0, stride[1]};
}

inline View output(Tensor& tensor) { return view(tensor.mutable_data(), tensor); }

}  // namespace hfla
