// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The ops as torch sees them: schemas, argument checks, allocation of results, calls of the
// kernels.
//
// The checks here guard memory: whatever is passed to torch.ops.hf_linear_attention raises or gives
// an answer, and never reads out of bounds. q, k, v, dy and log_decay may have any strides; all
// else has to be contiguous, which _ops.py sees to.
//
// B batch, T time, Hq query heads, Hkv key-value heads, K key dim, V value dim, N packed sequences.

#include "kernels.h"
#include "torch/cuda_context.h"
#include "torch/shim.h"

namespace hfla {
namespace {

// setup.py defines it, as "sm_90a, compute_80", where it found nvcc.
#ifdef HFLA_WITH_CUDA
constexpr const char* kCudaBuilt = HFLA_WITH_CUDA;
#else
constexpr const char* kCudaBuilt = "";
#endif

// ---- dtypes ----

struct DTypeName {
  int32_t (*code)();
  const char* name;
};

constexpr DTypeName kDTypeNames[] = {
    {aoti_torch_dtype_float32, "float32"}, {aoti_torch_dtype_float64, "float64"},
    {aoti_torch_dtype_float16, "float16"}, {aoti_torch_dtype_bfloat16, "bfloat16"},
    {aoti_torch_dtype_int32, "int32"},     {aoti_torch_dtype_int64, "int64"},
    {aoti_torch_dtype_bool, "bool"},       {aoti_torch_dtype_uint8, "uint8"},
};

// A dtype in a message; its name is looked up only when the message is written.
struct PrintedDType {
  int32_t code;
};

std::ostream& operator<<(std::ostream& out, PrintedDType printed) {
  for (const DTypeName& dtype : kDTypeNames) {
    if (dtype.code() == printed.code) return out << dtype.name;
  }
  return out << "another dtype";
}

DType dtype_of(const char* name, const Tensor& tensor) {
  const int32_t code = tensor.dtype();
  if (code == aoti_torch_dtype_float32()) return DType::f32;
  if (code == aoti_torch_dtype_bfloat16()) return DType::bf16;
  if (code == aoti_torch_dtype_float16()) return DType::f16;
  if (code == aoti_torch_dtype_float64()) return DType::f64;
  fail(name, " must be float32, bfloat16, float16 or float64, got ", PrintedDType{code});
}

// States, den and log decays.
int32_t accumulation_dtype(DType dtype) {
  return dtype == DType::f64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
}

// ---- checks ----

// A shape, written as in Python.
struct Shape {
  const int64_t* sizes;
  int64_t dim;
};

Shape shape_of(const Tensor& tensor) { return {tensor.sizes(), tensor.dim()}; }

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '(';
  for (int64_t d = 0; d < shape.dim; ++d) out << (d ? ", " : "") << shape.sizes[d];
  return out << (shape.dim == 1 ? ",)" : ")");
}

void check_tensor(const char* name, const Tensor& tensor, Device device, int32_t dtype,
                  const Shape& expected) {
  const Device its = tensor.device();
  check(its.type == device.type && its.index == device.index, name, " must be on ", device,
        " here, got ", its);
  check(tensor.dtype() == dtype, name, " must be ", PrintedDType{dtype}, " here, got ",
        PrintedDType{tensor.dtype()});
  const Shape got = shape_of(tensor);
  bool equal = got.dim == expected.dim;
  for (int64_t d = 0; equal && d < got.dim; ++d) equal = got.sizes[d] == expected.sizes[d];
  check(equal, name, " must have shape ", expected, ", got ", got);
}

void check_tensor(const char* name, const Tensor& tensor, Device device, int32_t dtype,
                  std::initializer_list<int64_t> sizes) {
  check_tensor(name, tensor, device, dtype,
               Shape{sizes.begin(), static_cast<int64_t>(sizes.size())});
}

void check_contiguous_tensor(const char* name, const Tensor& tensor, Device device, int32_t dtype,
                             std::initializer_list<int64_t> sizes) {
  check_tensor(name, tensor, device, dtype, sizes);
  check(tensor.is_contiguous(), name, " must be contiguous");
}

// Of x as a matrix: all its dimensions but the last one together.
int64_t count_rows(const Tensor& x) {
  check(x.dim() >= 1 && x.dim() <= Tensor::kMaxDim, "x must have 1 to ", Tensor::kMaxDim,
        " dimensions, got ", shape_of(x));
  check(x.is_contiguous(), "x must be contiguous");
  int64_t rows = 1;
  for (int64_t d = 0; d < x.dim() - 1; ++d) rows *= x.size(d);
  return rows;
}

// What q, k and v say about everything else; `dim` is 4, or 3 where there is no time.
struct Dimensions {
  int64_t B, T, Hq, Hkv, K, V;
  DType dtype;
  Device device;
};

Dimensions check_qkv(const Tensor& q, const Tensor& k, const Tensor& v, int64_t dim) {
  const char* shape = dim == 4 ? "(batch, time, heads, dim)" : "(batch, heads, dim)";
  check(q.dim() == dim, "q must have shape ", shape, ", got ", shape_of(q));
  check(k.dim() == dim, "k must have shape ", shape, ", got ", shape_of(k));
  check(v.dim() == dim, "v must have shape ", shape, ", got ", shape_of(v));

  const int64_t B = q.size(0), T = dim == 4 ? q.size(1) : 1;
  const int64_t Hq = q.size(dim - 2), Hkv = k.size(dim - 2);
  const int64_t K = q.size(dim - 1), V = v.size(dim - 1);
  check(K >= 1, "q must have a last dimension of 1 or more, got ", shape_of(q));
  check(V >= 1, "v must have a last dimension of 1 or more, got ", shape_of(v));
  check(Hkv >= 1, "k must have 1 head or more, got ", shape_of(k));
  check(Hq >= 1 && Hq % Hkv == 0, "q must have a multiple of k's ", Hkv, " heads, got ", Hq);

  const DType dtype = dtype_of("q", q);
  const Device device = q.device();
  check(!is_cuda(device) || dtype != DType::f64,
        "q must be float32, bfloat16 or float16 on CUDA, got float64");
  if (dim == 4) {
    check_tensor("k", k, device, q.dtype(), {B, T, Hkv, K});
    check_tensor("v", v, device, q.dtype(), {B, T, Hkv, V});
  } else {
    check_tensor("k", k, device, q.dtype(), {B, Hkv, K});
    check_tensor("v", v, device, q.dtype(), {B, Hkv, V});
  }
  return {B, T, Hq, Hkv, K, V, dtype, device};
}

FeatureMap check_feature_map(int64_t index) {
  constexpr int64_t count = static_cast<int64_t>(FeatureMap::count);
  check(index >= 0 && index < count, "feature_map must be an index from 0 to ", count - 1, ", got ",
        index);
  return static_cast<FeatureMap>(index);
}

// The CPU kernels index with these, so the contents are checked as well. To look at those of a
// device would be to wait for it; its kernels stay within [0, T] whatever they are.
void check_cu_seqlens(const Tensor& cu_seqlens, Device device, int64_t B, int64_t T) {
  check(B == 1, "cu_seqlens packs sequences along time and needs a batch of 1, got ", B);
  check(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1,
        "cu_seqlens must have shape (number of sequences + 1,), got ", shape_of(cu_seqlens));
  const int64_t N = cu_seqlens.size(0) - 1;
  check_contiguous_tensor("cu_seqlens", cu_seqlens, device, aoti_torch_dtype_int32(), {N + 1});
  if (is_cuda(device)) return;

  const auto* starts = static_cast<const int32_t*>(cu_seqlens.data());
  check(starts[0] == 0, "cu_seqlens must start at 0, got ", starts[0]);
  for (int64_t n = 0; n < N; ++n) {
    check(starts[n] <= starts[n + 1], "cu_seqlens must never decrease, got ", starts[n], " before ",
          starts[n + 1]);
  }
  check(starts[N] == T, "cu_seqlens must end at q's length ", T, ", got ", starts[N]);
}

// ---- from tensors to what kernels read ----

View view(void* data, const Tensor& tensor) {
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
View token_view(void* data, const Tensor& tensor) {
  const int64_t* stride = tensor.strides();
  return {data, stride[0], 0, stride[1], tensor.dim() == 3 ? stride[2] : 0};
}

// View has one pointer type for what kernels read and what they write.
void* input_data(const Tensor& tensor) { return const_cast<void*>(tensor.data()); }

View input(const Tensor& tensor) { return tensor ? view(input_data(tensor), tensor) : View(); }

View token_input(const Tensor& tensor) {
  return tensor ? token_view(input_data(tensor), tensor) : View();
}

View output(Tensor& tensor) { return view(tensor.mutable_data(), tensor); }

template <class Element = void>
const Element* data_or_null(const Tensor& tensor) {
  return tensor ? static_cast<const Element*>(tensor.data()) : nullptr;
}

// ---- forward and backward ----

// Shared by forward and backward, in the order of both schemas.
struct Inputs {
  Tensor q, k, v, log_decay, key_mask, cu_seqlens, initial_kv, initial_z;
};

struct Options {
  int64_t feature_map;
  bool normalize;
  double eps;
  bool is_causal;
};

// Braces evaluate from left to right.
Inputs take_inputs(Arguments& arguments) {
  return {arguments.tensor(),          arguments.tensor(),          arguments.tensor(),
          arguments.optional_tensor(), arguments.optional_tensor(), arguments.optional_tensor(),
          arguments.optional_tensor(), arguments.optional_tensor()};
}

Options take_options(Arguments& arguments) {
  return {arguments.integer(), arguments.boolean(), arguments.number(), arguments.boolean()};
}

void check_initial_state(const Inputs& in, Device device, const Problem& p) {
  const int32_t acc = accumulation_dtype(p.dtype);
  const int64_t rows = p.num_sequences;
  if (in.initial_kv) {
    check_contiguous_tensor("initial_kv", in.initial_kv, device, acc, {rows, p.Hkv, p.K, p.V});
  }
  if (in.initial_z) {
    check_contiguous_tensor("initial_z", in.initial_z, device, acc, {rows, p.Hkv, p.K});
  }
  const bool expects_z = in.initial_kv && p.normalize;
  check(bool(in.initial_z) == expects_z, "initial_z must be ",
        expects_z ? "given with initial_kv" : "None without initial_kv or without normalize");
}

Problem make_problem(const Inputs& in, const Options& options) {
  const Dimensions d = check_qkv(in.q, in.k, in.v, 4);
  Problem p{};
  p.B = d.B, p.T = d.T, p.Hq = d.Hq, p.Hkv = d.Hkv, p.K = d.K, p.V = d.V;
  p.dtype = d.dtype;
  p.feature_map = check_feature_map(options.feature_map);
  p.normalize = options.normalize;
  p.is_causal = options.is_causal;
  p.eps = options.eps;

  if (in.log_decay) {
    check(p.is_causal, "log_decay must be None when is_causal is False");
    check_tensor("log_decay", in.log_decay, d.device, accumulation_dtype(p.dtype),
                 {p.B, p.T, p.Hkv});
  }
  if (in.key_mask) {
    check_contiguous_tensor("key_mask", in.key_mask, d.device, aoti_torch_dtype_bool(), {p.B, p.T});
  }
  if (in.cu_seqlens) check_cu_seqlens(in.cu_seqlens, d.device, p.B, p.T);
  p.num_sequences = in.cu_seqlens ? in.cu_seqlens.size(0) - 1 : p.B;
  check_initial_state(in, d.device, p);

  p.q = input(in.q), p.k = input(in.k), p.v = input(in.v);
  p.log_decay = input(in.log_decay);
  p.key_mask = data_or_null<bool>(in.key_mask);
  p.cu_seqlens = data_or_null<int32_t>(in.cu_seqlens);
  p.initial_kv = data_or_null(in.initial_kv);
  p.initial_z = data_or_null(in.initial_z);
  return p;
}

// ---- calling kernels ----

void parallel_for(int64_t n, void (*body)(void*, int64_t, int64_t), void* context) {
  struct Loop {
    void (*body)(void*, int64_t, int64_t);
    void* context;
  } loop{body, context};
  const auto run = [](int64_t begin, int64_t end, void* loop) {
    static_cast<Loop*>(loop)->body(static_cast<Loop*>(loop)->context, begin, end);
  };
  HFLA_TORCH_CALL(torch_parallel_for(0, n, /*grain_size=*/1, run, &loop));
}

Threads torch_threads() {
  uint32_t count = 1;
  HFLA_TORCH_CALL(torch_get_num_threads(&count));
  return {count, parallel_for};
}

const CpuKernels& cpu() {
  const char* why_not = nullptr;
  const CpuKernels* chosen = cpu_kernels(&why_not);
  if (!chosen) fail(why_not);
  return *chosen;
}

void check_status(Status status) {
  switch (status) {
    case Status::ok:
      return;
    case Status::positive_log_decay:
      fail("log_decay must be <= 0, got a positive value");
    case Status::out_of_memory:
      fail("out of memory for temporary results");
  }
}

#ifdef HFLA_WITH_CUDA

void check_cuda(int error) {
  if (error)
    fail("CUDA says: ", cuda_error_text(error), " (kernels of this build: ", kCudaBuilt, ")");
}

const CudaKernels& cuda(DType dtype) {
  if (dtype == DType::f32) return cuda_kernels_f32;
  return dtype == DType::bf16 ? cuda_kernels_bf16 : cuda_kernels_f16;
}

// Runs call(device, workspace, workspace_bytes, stream), first to ask how large a workspace has to
// be. torch keeps the memory for others on this stream as soon as the tensor is gone.
template <class Call>
void run_on_cuda(Device device, Call call) {
  const CudaContext context(device.index);
  CudaDevice properties;
  check_cuda(cuda_device(device.index, &properties));
  int64_t bytes = 0;
  check_cuda(call(properties, nullptr, &bytes, context.stream()));
  Tensor workspace = Tensor::empty(aoti_torch_dtype_uint8(), {bytes + 1}, device);
  check_cuda(call(properties, workspace.mutable_data(), &bytes, context.stream()));
}

#endif

void run_forward([[maybe_unused]] Device device, const Problem& p, const ForwardResult& result) {
#ifdef HFLA_WITH_CUDA
  if (is_cuda(device)) {
    return run_on_cuda(device, [&](const CudaDevice& properties, auto... workspace_and_stream) {
      return cuda(p.dtype).forward(p, result, properties, workspace_and_stream...);
    });
  }
#endif
  check_status(cpu().forward(p, result, torch_threads()));
}

void run_backward([[maybe_unused]] Device device, const Problem& p, const BackwardInput& input,
                  const BackwardResult& result) {
#ifdef HFLA_WITH_CUDA
  if (is_cuda(device)) {
    return run_on_cuda(device, [&](const CudaDevice& properties, auto... workspace_and_stream) {
      return cuda(p.dtype).backward(p, input, result, properties, workspace_and_stream...);
    });
  }
#endif
  check_status(cpu().backward(p, input, result, torch_threads()));
}

void run_step([[maybe_unused]] Device device, const StepProblem& p) {
#ifdef HFLA_WITH_CUDA
  if (is_cuda(device)) {
    const CudaContext context(device.index);
    return check_cuda(cuda(p.dtype).step(p, context.stream()));
  }
#endif
  check_status(cpu().step(p, torch_threads()));
}

// ---- the ops ----

// A result that does not exist.
Tensor none(int32_t dtype, Device device) { return Tensor::empty(dtype, {0}, device); }

void forward(StableIValue* stack) {
  Arguments arguments(stack);
  const Inputs in = take_inputs(arguments);
  const Options options = take_options(arguments);
  const Problem p = make_problem(in, options);

  const int32_t acc = accumulation_dtype(p.dtype);
  const Device device = in.q.device();
  const int64_t rows = p.num_sequences;
  const auto empty_if = [&](bool exists, std::initializer_list<int64_t> sizes) {
    return exists ? Tensor::empty(acc, sizes, device) : none(acc, device);
  };
  Tensor y = Tensor::empty(in.q.dtype(), {p.B, p.T, p.Hq, p.V}, device);
  Tensor den = empty_if(p.normalize, {p.B, p.T, p.Hq});
  Tensor kv = empty_if(true, {rows, p.Hkv, p.K, p.V});
  Tensor z = empty_if(p.normalize, {rows, p.Hkv, p.K});

  ForwardResult result{};
  result.y = output(y);
  result.kv = kv.mutable_data();
  if (p.normalize) {
    result.den = den.mutable_data();
    result.z = z.mutable_data();
  }
  run_forward(device, p, result);
  give_back(stack, y, den, kv, z);
}

// The results of forward, as backward reads them.
ForwardResult check_forward_result(const Problem& p, Device device, int32_t dtype, const Tensor& y,
                                   const Tensor& den, const Tensor& kv, const Tensor& z) {
  const int32_t acc = accumulation_dtype(p.dtype);
  check_contiguous_tensor("y", y, device, dtype, {p.B, p.T, p.Hq, p.V});
  check_contiguous_tensor("kv", kv, device, acc, {p.num_sequences, p.Hkv, p.K, p.V});
  ForwardResult result{};
  result.y = input(y);
  result.kv = input_data(kv);
  if (p.normalize) {
    check_contiguous_tensor("den", den, device, acc, {p.B, p.T, p.Hq});
    check_contiguous_tensor("z", z, device, acc, {p.num_sequences, p.Hkv, p.K});
    result.den = input_data(den);
    result.z = input_data(z);
  }
  return result;
}

void backward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor dy = arguments.optional_tensor();
  const Tensor dkv = arguments.optional_tensor();
  const Tensor dz = arguments.optional_tensor();
  const Inputs in = take_inputs(arguments);
  const Tensor y = arguments.tensor();
  const Tensor den = arguments.tensor();
  const Tensor kv = arguments.tensor();
  const Tensor z = arguments.tensor();
  const Options options = take_options(arguments);
  const Problem p = make_problem(in, options);

  const int32_t dtype = in.q.dtype();
  const int32_t acc = accumulation_dtype(p.dtype);
  const Device device = in.q.device();
  const int64_t rows = p.num_sequences;
  if (dy) check_tensor("dy", dy, device, dtype, {p.B, p.T, p.Hq, p.V});
  if (dkv) check_contiguous_tensor("dkv", dkv, device, acc, {rows, p.Hkv, p.K, p.V});
  if (dz) {
    check(p.normalize, "dz must be None without normalize");
    check_contiguous_tensor("dz", dz, device, acc, {rows, p.Hkv, p.K});
  }
  BackwardInput upstream{};
  upstream.dy = input(dy);
  upstream.dkv = data_or_null(dkv);
  upstream.dz = data_or_null(dz);
  upstream.forward = check_forward_result(p, device, dtype, y, den, kv, z);

  const auto empty_like = [&](const Tensor& input, int32_t its_dtype,
                              std::initializer_list<int64_t> sizes) {
    return input ? Tensor::empty(its_dtype, sizes, device) : none(its_dtype, device);
  };
  Tensor dq = empty_like(in.q, dtype, {p.B, p.T, p.Hq, p.K});
  Tensor dk = empty_like(in.k, dtype, {p.B, p.T, p.Hkv, p.K});
  Tensor dv = empty_like(in.v, dtype, {p.B, p.T, p.Hkv, p.V});
  Tensor dlog_decay = empty_like(in.log_decay, acc, {p.B, p.T, p.Hkv});
  Tensor dinitial_kv = empty_like(in.initial_kv, acc, {rows, p.Hkv, p.K, p.V});
  Tensor dinitial_z = empty_like(in.initial_z, acc, {rows, p.Hkv, p.K});

  BackwardResult result{};
  result.dq = output(dq), result.dk = output(dk), result.dv = output(dv);
  if (in.log_decay) result.dlog_decay = output(dlog_decay);
  if (in.initial_kv) result.dinitial_kv = dinitial_kv.mutable_data();
  if (in.initial_z) result.dinitial_z = dinitial_z.mutable_data();
  run_backward(device, p, upstream, result);
  give_back(stack, dq, dk, dv, dlog_decay, dinitial_kv, dinitial_z);
}

void step(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor();
  const Tensor k = arguments.tensor();
  const Tensor v = arguments.tensor();
  const Tensor log_decay = arguments.optional_tensor();
  const Tensor key_mask = arguments.optional_tensor();
  Tensor kv = arguments.tensor();
  Tensor z = arguments.optional_tensor();
  const int64_t feature_map = arguments.integer();
  const bool normalize = arguments.boolean();
  const double eps = arguments.number();

  const Dimensions d = check_qkv(q, k, v, 3);
  const int32_t acc = accumulation_dtype(d.dtype);
  if (log_decay) check_tensor("log_decay", log_decay, d.device, acc, {d.B, d.Hkv});
  if (key_mask) {
    check_contiguous_tensor("key_mask", key_mask, d.device, aoti_torch_dtype_bool(), {d.B});
  }
  check_contiguous_tensor("kv", kv, d.device, acc, {d.B, d.Hkv, d.K, d.V});
  check(bool(z) == normalize, "z must be ",
        normalize ? "given with normalize" : "None without normalize");
  if (z) check_contiguous_tensor("z", z, d.device, acc, {d.B, d.Hkv, d.K});
  Tensor y = Tensor::empty(q.dtype(), {d.B, d.Hq, d.V}, d.device);

  StepProblem p{};
  p.B = d.B, p.Hq = d.Hq, p.Hkv = d.Hkv, p.K = d.K, p.V = d.V;
  p.dtype = d.dtype;
  p.feature_map = check_feature_map(feature_map);
  p.normalize = normalize;
  p.eps = eps;
  p.q = token_input(q), p.k = token_input(k), p.v = token_input(v);
  p.log_decay = token_input(log_decay);
  p.key_mask = data_or_null<bool>(key_mask);
  p.kv = kv.mutable_data();
  p.z = z ? z.mutable_data() : nullptr;
  p.y = token_view(y.mutable_data(), y);
  run_step(d.device, p);
  give_back(stack, y);
}

void linear(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const Tensor bias = arguments.optional_tensor();

  const Device device = x.device();
  LinearProblem p{};
  p.dtype = dtype_of("x", x);
  p.rows = count_rows(x);
  const int64_t dim = x.dim();
  p.in = x.size(dim - 1);
  check(weight.dim() == 2, "weight must have shape (out, in), got ", shape_of(weight));
  p.out = weight.size(0);
  check_contiguous_tensor("weight", weight, device, x.dtype(), {p.out, p.in});
  if (bias) check_contiguous_tensor("bias", bias, device, x.dtype(), {p.out});

  int64_t sizes[Tensor::kMaxDim];
  for (int64_t d = 0; d < dim - 1; ++d) sizes[d] = x.size(d);
  sizes[dim - 1] = p.out;
  Tensor y = Tensor::empty(x.dtype(), sizes, dim, device);

  p.x = x.data();
  p.weight = weight.data();
  p.bias = data_or_null(bias);
  p.y = y.mutable_data();
  check_status(cpu().linear(p, torch_threads()));
  give_back(stack, y);
}

RmsNormProblem make_rms_norm_problem(const Tensor& x, const Tensor& weight, double eps) {
  RmsNormProblem p{};
  p.dtype = dtype_of("x", x);
  p.rows = count_rows(x);
  p.columns = x.size(x.dim() - 1);
  check_contiguous_tensor("weight", weight, x.device(), x.dtype(), {p.columns});
  p.eps = eps;
  p.x = x.data();
  p.weight = weight.data();
  return p;
}

Tensor empty_like(const Tensor& tensor) {
  return Tensor::empty(tensor.dtype(), tensor.sizes(), tensor.dim(), tensor.device());
}

void rms_norm(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const RmsNormProblem p = make_rms_norm_problem(x, weight, arguments.number());
  Tensor y = empty_like(x);
  check_status(cpu().rms_norm(p, {y.mutable_data(), nullptr}, torch_threads()));
  give_back(stack, y);
}

void rms_norm_forward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const RmsNormProblem p = make_rms_norm_problem(x, weight, arguments.number());
  Tensor y = empty_like(x);
  Tensor inverse_rms = Tensor::empty(accumulation_dtype(p.dtype), {p.rows}, x.device());
  const RmsNormResult result{y.mutable_data(), inverse_rms.mutable_data()};
  check_status(cpu().rms_norm(p, result, torch_threads()));
  give_back(stack, y, inverse_rms);
}

void rms_norm_backward(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor dy = arguments.tensor();
  const Tensor x = arguments.tensor();
  const Tensor weight = arguments.tensor();
  const Tensor inverse_rms = arguments.tensor();
  const RmsNormProblem p = make_rms_norm_problem(x, weight, /*eps=*/0);
  check_tensor("dy", dy, x.device(), x.dtype(), shape_of(x));
  check(dy.is_contiguous(), "dy must be contiguous");
  check_contiguous_tensor("inverse_rms", inverse_rms, x.device(), accumulation_dtype(p.dtype),
                          {p.rows});
  Tensor dx = empty_like(x);
  Tensor dweight = empty_like(weight);
  const RmsNormGradients gradients{dy.data(), inverse_rms.data(), dx.mutable_data(),
                                   dweight.mutable_data()};
  check_status(cpu().rms_norm_backward(p, gradients, torch_threads()));
  give_back(stack, dx, dweight);
}

// ---- registration ----

struct Op {
  const char* name;
  const char* schema;
  void (*kernel)(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
  bool on_cuda;  // too, with the same kernel, which looks where the tensors are
};

// What torch calls: `op`, with its name in front of what it raises.
template <void (*op)(StableIValue*), const char* name>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  try {
    op(stack);
  } catch (const std::runtime_error& error) {
    fail("hf_linear_attention::", name, ": ", error.what());
  }
}

constexpr char kForward[] = "forward", kBackward[] = "backward", kStep[] = "step_",
               kLinear[] = "linear", kRmsNorm[] = "rms_norm",
               kRmsNormForward[] = "rms_norm_forward", kRmsNormBackward[] = "rms_norm_backward";

constexpr Op kOps[] = {
    {kForward,
     "forward(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? key_mask, "
     "Tensor? cu_seqlens, Tensor? initial_kv, Tensor? initial_z, "
     "int feature_map, bool normalize, float eps, bool is_causal) "
     "-> (Tensor y, Tensor den, Tensor kv, Tensor z)",
     boxed<forward, kForward>, true},
    {kBackward,
     "backward(Tensor? dy, Tensor? dkv, Tensor? dz, "
     "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? key_mask, "
     "Tensor? cu_seqlens, Tensor? initial_kv, Tensor? initial_z, "
     "Tensor y, Tensor den, Tensor kv, Tensor z, "
     "int feature_map, bool normalize, float eps, bool is_causal) "
     "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dlog_decay, "
     "Tensor dinitial_kv, Tensor dinitial_z)",
     boxed<backward, kBackward>, true},
    {kStep,
     "step_(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? key_mask, "
     "Tensor(a!) kv, Tensor(b!)? z, int feature_map, bool normalize, float eps) -> Tensor y",
     boxed<step, kStep>, true},
    {kLinear, "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor y", boxed<linear, kLinear>,
     false},
    {kRmsNorm, "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor y",
     boxed<rms_norm, kRmsNorm>, false},
    {kRmsNormForward,
     "rms_norm_forward(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor inverse_rms)",
     boxed<rms_norm_forward, kRmsNormForward>, false},
    {kRmsNormBackward,
     "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor inverse_rms) "
     "-> (Tensor dx, Tensor dweight)",
     boxed<rms_norm_backward, kRmsNormBackward>, false},
};

// The libraries live as long as the process: torch keeps pointers to the kernels.
TorchLibraryHandle implementations_for(const char* dispatch_key) {
  TorchLibraryHandle library;
  HFLA_TORCH_CALL(aoti_torch_library_init_impl("hf_linear_attention", dispatch_key, __FILE__,
                                               __LINE__, &library));
  return library;
}

void register_ops() {
  TorchLibraryHandle definitions;
  HFLA_TORCH_CALL(
      aoti_torch_library_init_def("hf_linear_attention", __FILE__, __LINE__, &definitions));
  const TorchLibraryHandle cpu = implementations_for("CPU");
  const TorchLibraryHandle cuda = *kCudaBuilt ? implementations_for("CUDA") : nullptr;
  for (const Op& op : kOps) {
    HFLA_TORCH_CALL(aoti_torch_library_def(definitions, op.schema));
    HFLA_TORCH_CALL(torch_library_impl(cpu, op.name, op.kernel, kTorchBuildVersion));
    if (!cuda || !op.on_cuda) continue;
    HFLA_TORCH_CALL(torch_library_impl(cuda, op.name, op.kernel, kTorchBuildVersion));
  }
}

// Runs when the library is loaded, where an exception would end the process.
std::string registration_error() {
  try {
    register_ops();
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

const std::string kRegistrationError = registration_error();

}  // namespace
}  // namespace hfla

// ---- for _ops.py, through ctypes ----

// Null, or why the ops could not be registered.
extern "C" const char* hfla_registration_error() {
  return hfla::kRegistrationError.empty() ? nullptr : hfla::kRegistrationError.c_str();
}

// The name of the active instruction set; or null, and then *why_not says why.
extern "C" const char* hfla_cpu_instruction_set(const char** why_not) {
  const hfla::CpuKernels* kernels = hfla::cpu_kernels(why_not);
  return kernels ? kernels->instruction_set : nullptr;
}

// What the CUDA kernels were compiled for, such as "sm_90a, compute_80"; empty without any.
extern "C" const char* hfla_cuda_architectures() { return hfla::kCudaBuilt; }
