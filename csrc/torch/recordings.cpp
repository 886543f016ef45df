// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a layer does with one token: a list of operations, called one after another, by threads that
// stay together. To go through torch's dispatcher and to call its threads takes longer than many of
// these operations do.

#include <algorithm>
#include <string>

#include "kernels/export.h"
#include "torch/devices.h"
#include "torch/ops.h"
#include "torch/plain_operations.h"
#include "torch/team.h"
#include "torch/weight_prefetch.h"

namespace hfla {
namespace {

constexpr char kSpace[] = "hf_linear_attention::";  // of the names of this library's ops
constexpr int64_t kLargeWeight = 65536;             // bytes; others, as scales, come soon
constexpr size_t kMostArguments = 20;               // of an operation, and results

// ---- what may be recorded: the ops of this library, and what layers do between them ----

enum class Kind { tensor, optional_tensor, tensors, number, integers };  // of an argument

struct Operation {
  std::string name;                  // torch's, with the overload's behind a dot
  std::string overload;              // by itself
  void (*run)(StableIValue* stack);  // null: torch's dispatcher finds it by its name
  std::vector<Kind> arguments;
  int64_t num_results;
  bool is_view = false;
  bool reads_weights = false;  // whole, those that it is given
};

// From an op's schema, "name(type name, type name=default) -> (type name, type name)".
void read_schema(const std::string& schema, Operation& operation) {
  const size_t arrow = schema.find(") -> ");
  const auto kind_of = [](const std::string& argument) {
    const std::string type = argument.substr(0, argument.find(' '));
    if (type == "Tensor[]") return Kind::tensors;
    if (type.rfind("Tensor", 0) == 0) {
      return type.back() == '?' ? Kind::optional_tensor : Kind::tensor;
    }
    return type == "int[]" ? Kind::integers : Kind::number;
  };
  for (size_t begin = schema.find('(') + 1, end; begin < arrow; begin = end + 2) {
    end = std::min(schema.find(", ", begin), arrow);
    operation.arguments.push_back(kind_of(schema.substr(begin, end - begin)));
  }
  operation.num_results = 1 + std::count(schema.begin() + arrow, schema.end(), ',');
  check(operation.arguments.size() <= kMostArguments, schema, " has too many arguments");
}

std::vector<Operation> make_operations() {
  struct Known {
    const char* schema;  // without what is always the default
    const char* overload;
    void (*run)(StableIValue*);
  };
  constexpr Known torchs[] = {
      {"as_strided(Tensor x, int[] size, int[] stride, int offset) -> Tensor", "", nullptr},
      {"add(Tensor a, Tensor b) -> Tensor", "Tensor", add},
      {"embedding(Tensor table, Tensor indices, int padding, bool by_count, bool sparse) -> Tensor",
       "", embedding},
      {"mul(Tensor a, Tensor b) -> Tensor", "Tensor", mul},
      {"_to_copy(Tensor x, int dtype, bool non_blocking) -> Tensor", "", to_dtype},
      {"clone(Tensor x) -> Tensor", "", clone},
      {"copy_(Tensor(a!) x, Tensor source, bool non_blocking) -> Tensor(a!)", "", copy_to},
      {"cat(Tensor[] parts, int dim) -> Tensor", "", cat},
      {"cos(Tensor x) -> Tensor", "", nullptr},
      {"sin(Tensor x) -> Tensor", "", nullptr},
      {"silu(Tensor x) -> Tensor", "", nullptr},
      {"sigmoid(Tensor x) -> Tensor", "", nullptr},
      {"tanh(Tensor x) -> Tensor", "", nullptr},
      {"layer_norm(Tensor x, int[] size, Tensor? weight, Tensor? bias, float eps, bool cudnn) -> "
       "Tensor",
       "", nullptr},
      {"native_layer_norm(Tensor x, int[] size, Tensor? weight, Tensor? bias, float eps) -> "
       "(Tensor y, Tensor mean, Tensor inverse)",
       "", nullptr},
      {"exp(Tensor x) -> Tensor", "", nullptr},
      {"neg(Tensor x) -> Tensor", "", nullptr},
      {"bmm(Tensor a, Tensor b) -> Tensor", "", nullptr},
      {"_softmax(Tensor x, int dim, bool half_to_float) -> Tensor", "", nullptr},
  };
  std::vector<Operation> operations;
  const auto add_operation = [&](const char* space, const std::string& schema, const char* overload,
                                 void (*run)(StableIValue*)) {
    Operation& operation = operations.emplace_back();
    operation.name = space + schema.substr(0, schema.find('('));
    operation.overload = overload;
    operation.run = run;
    operation.is_view = operation.name == "aten::as_strided";
    for (const char* product : {"linear", "int8_linear", "int4_linear"}) {
      operation.reads_weights |= operation.name == kSpace + std::string(product);
    }
    read_schema(schema, operation);
  };
  for (const Known& known : torchs)
    add_operation("aten::", known.schema, known.overload, known.run);
  for (const Ops* ops : kKernelOps) {
    for (const Op* op = ops->first; op != ops->first + ops->count; ++op) {
      add_operation(kSpace, op->schema, "", op->run);
    }
  }
  return operations;
}

const std::vector<Operation>& operations() {
  static const std::vector<Operation> all = make_operations();
  return all;
}

// ---- a recording ----

// Integers, read one after another: whether a team is to run it, how many results it has, and their
// places among all tensors; then the operations, each by its place among operations() and its
// arguments. Tensors are known by their places: first those that are given, then what operations
// return, in their order; -1 is none. Of a list its length comes first. A float is
// its bits.
class Code {
 public:
  explicit Code(const Tensor& code) {
    check(code.device().type == aoti_torch_device_type_cpu() && code.dim() == 1 &&
              code.dtype() == aoti_torch_dtype_int64() && code.is_contiguous(),
          "code must be contiguous int64 (integers,) on the CPU");
    next_ = static_cast<const int64_t*>(code.data());
    end_ = next_ + code.size(0);
  }

  bool is_at_end() const { return next_ == end_; }

  const int64_t* take(int64_t count) {
    check(count >= 0 && count <= end_ - next_, "code must not end within an operation");
    return std::exchange(next_, next_ + count);
  }

  int64_t take_below(const char* what, int64_t least, int64_t limit) {
    const int64_t number = *take(1);
    check(number >= least && number < limit, "code must have ", what, " from ", least, " to ",
          limit - 1, ", got ", number);
    return number;
  }

  const Operation& take_operation() {
    return operations()[take_below("an operation", 0, operations().size())];
  }

 private:
  const int64_t *next_, *end_;
};

AtenTensorHandle another_handle(const Tensor& tensor) {
  AtenTensorHandle handle = nullptr;
  HFLA_TORCH_CALL(aoti_torch_new_tensor_handle(tensor.get(), &handle));
  return handle;
}

// Before the first of them is put on a stack: if another then turned out to be wrong, nobody would
// free it.
void check_arguments(const Operation& operation, Code code, int64_t num_tensors) {
  for (const Kind kind : operation.arguments) {
    if (kind == Kind::number) {
      code.take(1);
    } else if (kind == Kind::integers) {
      code.take(*code.take(1));
    } else if (kind == Kind::tensors) {
      const int64_t count = *code.take(1);
      check(count >= 0, "code must not end within an operation");
      for (int64_t i = 0; i < count; ++i) code.take_below("a tensor", 0, num_tensors);
    } else {
      code.take_below("a tensor", kind == Kind::optional_tensor ? -1 : 0, num_tensors);
    }
  }
}

// What the stack of a call has for an argument, which the call owns.
StableIValue argument(Kind kind, Code& code, const std::vector<Tensor>& tensors) {
  const int64_t number = *code.take(1);
  if (kind == Kind::number) return number;
  if (kind == Kind::integers) {
    return list_of(reinterpret_cast<const StableIValue*>(code.take(number)), number);
  }
  if (kind == Kind::tensors) {
    std::vector<StableIValue> handles;
    for (const int64_t* place = code.take(number); handles.size() < size_t(number); ++place) {
      handles.push_back(reinterpret_cast<StableIValue>(another_handle(tensors[*place])));
    }
    return list_of(handles.data(), handles.size());
  }
  if (number < 0) return 0;
  const auto value = reinterpret_cast<StableIValue>(another_handle(tensors[number]));
  return kind == Kind::optional_tensor ? reinterpret_cast<StableIValue>(new StableIValue(value))
                                       : value;
}

// As read_schema has the arguments of a view.
Tensor view_in(Code& code, const std::vector<Tensor>& tensors) {
  const Tensor& x = tensors[*code.take(1)];
  const int64_t dim = *code.take(1), *const sizes = code.take(dim);
  const int64_t num_strides = *code.take(1), *const strides = code.take(num_strides);
  check(num_strides == dim, "a view must have as many strides as sizes");
  return view(x, dim, sizes, strides, *code.take(1));
}

void run_operation(const Operation& operation, Code& code, std::vector<Tensor>& tensors) {
  check_arguments(operation, code, tensors.size());
  if (operation.is_view) {
    try {
      tensors.push_back(view_in(code, tensors));
    } catch (const std::exception& error) {
      fail(operation.name, ": ", error.what());
    }
    return;
  }
  StableIValue stack[kMostArguments];
  for (size_t i = 0; i < operation.arguments.size(); ++i) {
    stack[i] = argument(operation.arguments[i], code, tensors);
  }
  try {
    operation.run ? operation.run(stack)
                  : call_dispatcher(operation.name.c_str(), operation.overload.c_str(), stack);
  } catch (const std::exception& error) {
    fail(operation.name, ": ", error.what());
  }
  for (int64_t i = 0; i < operation.num_results; ++i) {
    tensors.emplace_back(reinterpret_cast<AtenTensorHandle>(stack[i]));
  }
}

// Weights that operations are going to read, of the tensors that are given.
void find_weights(Code code, const std::vector<Tensor>& given, WeightPrefetch& prefetch) {
  for (int64_t i = 0; !code.is_at_end(); ++i) {
    const Operation& operation = code.take_operation();
    for (const Kind kind : operation.arguments) {
      const int64_t number = *code.take(1);
      if (kind == Kind::integers || kind == Kind::tensors) code.take(number);
      const bool is_tensor = kind == Kind::tensor || kind == Kind::optional_tensor;
      const bool is_given = is_tensor && number >= 0 && number < int64_t(given.size());
      if (!is_given || !operation.reads_weights) continue;
      const Tensor& tensor = given[number];
      int64_t bytes = aoti_torch_dtype_element_size(tensor.dtype());
      for (int64_t d = 0; d < tensor.dim(); ++d) bytes *= tensor.size(d);
      if (tensor.is_contiguous() && bytes >= kLargeWeight) prefetch.add(i, tensor.data(), bytes);
    }
  }
}

// Calls work() in a team of threads, and raises what it raises.
template <class Work>
void run_in_team(const Threads& threads, WeightPrefetch& prefetch, Work work) {
  struct Context {
    Work& work;
    std::string error;
  } context{work, ""};
  Team::run(
      threads, prefetch,
      [](void* opaque) {
        auto& context = *static_cast<Context*>(opaque);
        try {
          context.work();
        } catch (const std::exception& error) {
          context.error = error.what();
        }
      },
      &context);
  check(context.error.empty(), context.error);
}

void run_recording(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor code_tensor = arguments.tensor();
  std::vector<Tensor> tensors = arguments.tensors();

  Code code(code_tensor);
  const bool in_team = *code.take(1);
  const int64_t num_results = *code.take(1), *const places = code.take(num_results);
  const Threads threads = torch_threads();
  WeightPrefetch prefetch(threads.count);
  if (in_team && threads.count > 1) find_weights(code, tensors, prefetch);  // else nobody waits
  const auto run_all = [&] {
    for (int64_t i = 0; !code.is_at_end(); ++i) {
      prefetch.begin(i);
      run_operation(code.take_operation(), code, tensors);
    }
  };
  if (in_team) {
    run_in_team(threads, prefetch, run_all);
  } else {
    run_all();
  }
  for (int64_t i = 0; i < num_results; ++i) {  // all, before there is one to free
    check(places[i] >= 0 && places[i] < int64_t(tensors.size()), "code must have results below ",
          tensors.size(), ", got ", places[i]);
  }
  std::vector<StableIValue> results;
  for (int64_t i = 0; i < num_results; ++i) {
    results.push_back(reinterpret_cast<StableIValue>(another_handle(tensors[places[i]])));
  }
  *stack = list_of(results.data(), results.size());
}

constexpr char kRunRecording[] = "run_recording";

constexpr Op kOps[] = {
    op<run_recording, kRunRecording>("run_recording(Tensor code, Tensor(a!)[] tensors) -> Tensor[]",
                                     false),
};

std::string names_of_operations() {
  std::string names;
  for (const Operation& operation : operations()) {
    names += (names.empty() ? "" : ", ") + operation.name;
    if (!operation.overload.empty()) names += "." + operation.overload;
  }
  return names;
}

}  // namespace

const Ops recording_ops = ops_of(kOps);

}  // namespace hfla

// ---- for Python, through ctypes ----

// Of what may be recorded, in the order of the numbers that code has for them.
HFLA_EXPORT const char* hfla_recordable_operations() {
  static const std::string names = hfla::names_of_operations();
  return names.c_str();
}
