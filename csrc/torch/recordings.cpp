// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a layer does with one token: a list of operations, called one after another, by threads that
// stay together. To go through torch's dispatcher and to call its threads takes longer than many of
// these operations do.

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

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
constexpr int64_t kMostGiven = 1 << 20;             // tensors of a run

// ---- what may be recorded: the ops of this library, and what layers do between them ----

enum class Kind { tensor, optional_tensor, tensors, number, integers };  // of an argument

struct Operation {
  std::string name;                  // torch's, with the overload's behind a dot
  std::string overload;              // by itself
  void (*run)(StableIValue* stack);  // null: torch's dispatcher finds it by its name
  std::vector<Kind> arguments;
  int64_t num_results;
  bool is_view = false;
  bool gives_first = false;    // its first argument back, or another look at it
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
    operation.gives_first = operation.is_view || operation.name == "aten::copy_";
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

// Integers, read one after another: whether a team is to run it, how many tensors each run is
// given, and how many results it has, and their places among all tensors; then the operations, each
// by its place among operations() and its arguments. Tensors are known by their places: first those
// that are given, then the constants, then what operations return, in their order; -1 is none. Of a
// list its length comes first. A float is its bits.
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
  const int64_t* next() const { return next_; }

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

 private:
  const int64_t *next_, *end_;
};

// One operation.
struct Step {
  const Operation* operation;
  std::vector<int64_t> arguments;   // as the code has them
  std::vector<int64_t> last_reads;  // places of tensors that nothing reads afterwards
  bool leaves = false;              // its results, or views of them, are given to the caller
};

// Calls body(place) for each tensor among a step's arguments.
template <class Body>
void for_each_tensor(const Step& step, Body body) {
  const int64_t* next = step.arguments.data();
  for (const Kind kind : step.operation->arguments) {
    const int64_t number = *next++;
    if (kind == Kind::tensors) std::for_each(next, next + number, body);
    if (kind == Kind::tensors || kind == Kind::integers) next += number;
    if (kind == Kind::tensor || (kind == Kind::optional_tensor && number >= 0)) body(number);
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

class Recording {
 public:
  Recording(Code code, std::vector<Tensor> constants) : constants_(std::move(constants)) {
    in_team_ = *code.take(1);
    num_given_ = code.take_below("a number of given tensors", 0, kMostGiven);
    const int64_t num_results = *code.take(1), *const results = code.take(num_results);
    results_.assign(results, results + num_results);
    for (const Tensor& constant : constants_) check_device(constant);
    num_tensors_ = num_given_ + constants_.size();
    while (!code.is_at_end()) add_step(code);
    for (const int64_t place : results_) {
      check(place >= 0 && place < num_tensors_, "code must have results below ", num_tensors_,
            ", got ", place);
    }
    find_ends();
  }

  std::vector<Tensor> run(const std::vector<Tensor>& given) const {
    check(given.size() == size_t(num_given_), "tensors must be ", num_given_, ", got ",
          given.size());
    for (const Tensor& tensor : given) check_device(tensor);
    const Threads threads = torch_threads();
    WeightPrefetch prefetch(threads.count);
    if (in_team_ && threads.count > 1) find_weights(given, prefetch);  // else nobody waits
    std::vector<Tensor> results;
    const auto run_all = [&] { results = run_steps(given, prefetch); };
    if (in_team_) {
      run_in_team(threads, prefetch, run_all);
    } else {
      run_all();
    }
    return results;
  }

 private:
  static void check_device(const Tensor& tensor) {
    check(tensor.device().type == aoti_torch_device_type_cpu(),
          "tensors must be on the CPU, got one on ", tensor.device());
  }

  void add_step(Code& code) {
    Step step;
    step.operation = &operations()[code.take_below("an operation", 0, operations().size())];
    const int64_t* const first = code.next();
    for (const Kind kind : step.operation->arguments) {
      if (kind == Kind::number) {
        code.take(1);
      } else if (kind == Kind::integers) {
        code.take(*code.take(1));
      } else if (kind == Kind::tensors) {
        const int64_t count = *code.take(1);
        check(count >= 0, "code must not end within an operation");
        for (int64_t i = 0; i < count; ++i) code.take_below("a tensor", 0, num_tensors_);
      } else {
        code.take_below("a tensor", kind == Kind::optional_tensor ? -1 : 0, num_tensors_);
      }
    }
    step.arguments.assign(first, code.next());
    steps_.push_back(std::move(step));
    num_tensors_ += steps_.back().operation->num_results;
  }

  // Where each tensor is read last, and which steps make what the caller is given.
  void find_ends() {
    std::vector<char> leaves(num_tensors_), is_read_later(num_tensors_);
    for (const int64_t place : results_) leaves[place] = is_read_later[place] = true;
    int64_t results_end = num_tensors_;
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
      const int64_t first = results_end - step->operation->num_results;
      for (int64_t place = first; place < results_end; ++place) {
        step->leaves |= leaves[place];
        if (!is_read_later[place]) step->last_reads.push_back(place);
      }
      results_end = first;
      for_each_tensor(*step, [&](int64_t place) {
        if (!std::exchange(is_read_later[place], true)) step->last_reads.push_back(place);
      });
      if (step->operation->gives_first && step->leaves) leaves[step->arguments[0]] = true;
    }
  }

  const Tensor* given_or_constant(const std::vector<Tensor>& given, int64_t place) const {
    if (place < num_given_) return &given[place];
    const size_t constant = place - num_given_;
    return constant < constants_.size() ? &constants_[constant] : nullptr;
  }

  // Those that steps are going to read.
  void find_weights(const std::vector<Tensor>& given, WeightPrefetch& prefetch) const {
    for (size_t i = 0; i < steps_.size(); ++i) {
      if (!steps_[i].operation->reads_weights) continue;
      for_each_tensor(steps_[i], [&](int64_t place) {
        const Tensor* const tensor = given_or_constant(given, place);
        if (!tensor || !tensor->is_contiguous()) return;
        int64_t bytes = aoti_torch_dtype_element_size(tensor->dtype());
        for (int64_t d = 0; d < tensor->dim(); ++d) bytes *= tensor->size(d);
        if (bytes >= kLargeWeight) prefetch.add(i, tensor->data(), bytes);
      });
    }
  }

  std::vector<Tensor> run_steps(const std::vector<Tensor>& given, WeightPrefetch& prefetch) const {
    LocalResults local_results;
    std::vector<Tensor> tensors;  // by their places
    tensors.reserve(num_tensors_);
    for (int64_t place = 0; place < num_given_ + int64_t(constants_.size()); ++place) {
      tensors.emplace_back(
          LocalTensor::of_torch(given_or_constant(given, place)->get(), /*owns=*/false));
    }
    for (size_t i = 0; i < steps_.size(); ++i) {
      prefetch.begin(i);
      local_results.are_made = !steps_[i].leaves;
      try {
        run_step(steps_[i], tensors);
      } catch (const std::exception& error) {
        fail(steps_[i].operation->name, ": ", error.what());
      }
      for (const int64_t place : steps_[i].last_reads) tensors[place] = Tensor();
    }
    std::vector<Tensor> results;
    for (const int64_t place : results_) results.push_back(tensors[place].as_torch());
    return results;
  }

  static void run_step(const Step& step, std::vector<Tensor>& tensors) {
    const Operation& operation = *step.operation;
    if (operation.is_view) {
      tensors.push_back(view_in(step, tensors));
      return;
    }
    StableIValue stack[kMostArguments];
    put_arguments(step, tensors, stack);
    operation.run ? operation.run(stack)
                  : call_dispatcher(operation.name.c_str(), operation.overload.c_str(), stack);
    for (int64_t i = 0; i < operation.num_results; ++i) {
      Tensor& result = tensors.emplace_back(reinterpret_cast<AtenTensorHandle>(stack[i]));
      if (!result.local() && result) {
        result = Tensor(LocalTensor::of_torch(result.release(), /*owns=*/true));
      }
    }
  }

  // As read_schema has the arguments of a view.
  static Tensor view_in(const Step& step, const std::vector<Tensor>& tensors) {
    const int64_t* const arguments = step.arguments.data();
    const int64_t dim = arguments[1], num_strides = arguments[2 + dim];
    check(num_strides == dim, "a view must have as many strides as sizes");
    const int64_t *const sizes = arguments + 2, *const strides = arguments + 3 + dim;
    return view(tensors[arguments[0]], dim, sizes, strides, strides[dim]);
  }

  // A call owns what is on its stack.
  static void put_arguments(const Step& step, const std::vector<Tensor>& tensors,
                            StableIValue* stack) {
    const bool for_torch = !step.operation->run;
    const auto value_of = [&](int64_t place) {
      const Tensor& tensor = tensors[place];
      if (for_torch) return reinterpret_cast<StableIValue>(tensor.as_torch().release());
      tensor.local()->add_reference();
      return reinterpret_cast<StableIValue>(Tensor(tensor.local()).release());
    };
    const int64_t* next = step.arguments.data();
    for (const Kind kind : step.operation->arguments) {
      const int64_t number = *next++;
      if (kind == Kind::number) {
        *stack++ = number;
      } else if (kind == Kind::integers) {
        *stack++ = list_of(reinterpret_cast<const StableIValue*>(next), number);
        next += number;
      } else if (kind == Kind::tensors) {
        std::vector<StableIValue> values;
        for (const int64_t* const end = next + number; next < end; ++next) {
          values.push_back(value_of(*next));
        }
        *stack++ = list_of(values.data(), values.size());
      } else if (kind == Kind::optional_tensor) {
        *stack++ =
            number < 0 ? 0 : reinterpret_cast<StableIValue>(new StableIValue(value_of(number)));
      } else {
        *stack++ = value_of(number);
      }
    }
  }

  bool in_team_;
  int64_t num_given_, num_tensors_;
  std::vector<int64_t> results_;  // places
  std::vector<Tensor> constants_;
  std::vector<Step> steps_;
};

// ---- those that there are ----

// By numbers, which Python has. Never destroyed: Python may outlive all that is.
struct Recordings {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<const Recording>> by_number;
  int64_t last_number = 0;
};

Recordings& recordings() {
  static Recordings& all = *new Recordings;
  return all;
}

void make_recording(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor code = arguments.tensor();
  std::vector<Tensor> constants = arguments.tensors();
  auto recording = std::make_shared<const Recording>(Code(code), std::move(constants));
  Tensor number = Tensor::empty(aoti_torch_dtype_int64(), {}, code.device());
  Recordings& all = recordings();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.by_number.emplace(++all.last_number, std::move(recording));
  *static_cast<int64_t*>(number.mutable_data()) = all.last_number;
  give_back(stack, number);
}

std::shared_ptr<const Recording> recording_of(const Tensor& number) {
  check_contiguous_tensor("recording", number, number.device(), aoti_torch_dtype_int64(), {});
  const int64_t key = *static_cast<const int64_t*>(number.data());
  Recordings& all = recordings();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_number.find(key);
  check(found != all.by_number.end(), "recording must be one that make_recording gave, got ", key);
  return found->second;
}

void run_recording(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor number = arguments.tensor();
  const std::vector<Tensor> given = arguments.tensors();
  std::vector<StableIValue> handles;
  for (Tensor& result : recording_of(number)->run(given)) {
    handles.push_back(reinterpret_cast<StableIValue>(result.release()));
  }
  *stack = list_of(handles.data(), handles.size());
}

constexpr char kMakeRecording[] = "make_recording", kRunRecording[] = "run_recording";

constexpr Op kOps[] = {
    op<make_recording, kMakeRecording>(
        "make_recording(Tensor code, Tensor[] constants) -> Tensor recording", false),
    op<run_recording, kRunRecording>(
        "run_recording(Tensor recording, Tensor(a!)[] tensors) -> Tensor[]", false),
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

// Gives back what a recording keeps, its constants among it; once nobody runs it.
HFLA_EXPORT void hfla_delete_recording(int64_t number) {
  hfla::Recordings& all = hfla::recordings();
  std::shared_ptr<const hfla::Recording> deleted;  // when the lock is free again
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_number.find(number);
  if (found == all.by_number.end()) return;
  deleted = std::move(found->second);
  all.by_number.erase(found);
}
