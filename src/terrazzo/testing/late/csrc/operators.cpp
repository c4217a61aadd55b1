#include "operators.h"
#include "device.h"
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <unordered_map>

namespace late {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// ---- what a schema says of an operator

struct Signature {
  bool waits = false;     // the host needs the result: sizes that depend on data, or a number
  bool is_random = false;
  bool is_view = false;
  bool mixes = false;     // takes indices or conditions of the CPU
  bool has_meta = true;
  std::vector<bool> written, is_out;  // by argument
  int generator = -1;                 // the argument
  std::vector<int> returned;          // by return: the argument that it is, or -1 if it is new
};

bool holds_tensors(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::TensorType) return true;
  return type->kind() == c10::TypeKind::ListType && type->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType;
}

Signature read_signature(const c10::OperatorHandle& op) {
  static const std::set<std::string> mixing{"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
      "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::where"};
  static const std::set<std::string> waiting{"aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::is_nonzero", "aten::bincount", "aten::repeat_interleave",
      "aten::_embedding_bag", "aten::_embedding_bag_forward_only"};  // these two have other sizes than their meta kernels say
  auto& schema = op.schema();
  Signature s;
  s.is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  s.mixes = mixing.count(schema.name());
  s.waits = waiting.count(schema.name()) || op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    bool is_written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    s.written.push_back(is_written);
    s.is_out.push_back(is_written && arguments[i].kwarg_only());
    auto type = arguments[i].type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType) s.generator = i;
  }
  for (auto& each : schema.returns()) {
    int which = -1;
    if (each.alias_info() && each.alias_info()->isWrite()) {
      for (size_t i = 0; i < arguments.size() && which < 0; i++)
        if (arguments[i].alias_info() && *arguments[i].alias_info() == *each.alias_info()) which = i;
    } else if (each.alias_info()) {
      s.is_view = true;
    }
    s.returned.push_back(which);
    if (which < 0 && !holds_tensors(each.type())) s.waits = true;
  }
  return s;
}

std::mutex signatures_lock;

Signature& signature_of(const c10::OperatorHandle& op) {
  static std::unordered_map<std::string, std::unique_ptr<Signature>> all;
  std::lock_guard<std::mutex> lock(signatures_lock);
  auto& found = all[c10::toString(op.operator_name())];
  if (!found) found = std::make_unique<Signature>(read_signature(op));
  return *found;
}

// ---- tensors in arguments

template <class F>
IValue mapped(const IValue& value, F&& f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (Tensor t : value.toTensorVector()) out.push_back(t.defined() ? f(t) : t);
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (std::optional<Tensor> t : value.toOptionalTensorList())
      out.push_back(t.has_value() && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return out;
  }
  return value;
}

template <class F>
void each_tensor(const IValue& value, F&& f) {
  mapped(value, [&](const Tensor& tensor) {
    f(tensor);
    return tensor;
  });
}

void keep_wrapped_number(const Tensor& from, const Tensor& to) {  // numbers promote dtypes otherwise than tensors
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

Tensor meta_of(const Tensor& tensor) {
  if (!is_late(tensor)) return tensor;
  Tensor meta = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  keep_wrapped_number(tensor, meta);
  return meta;
}

// ---- sizes of outputs

// The outputs of an operator depend on this part of its arguments; empty if an argument is of another kind. Meta kernels
// that are written in Python take 300 us, so their results are kept.
std::string key_of(const c10::OperatorHandle& op, const Stack& arguments, const Signature& s) {
  std::string key = c10::toString(op.operator_name());
  auto put = [&](const auto& number) { key.append((const char*)&number, sizeof number); };
  auto put_all = [&](const auto& numbers) {
    put((int64_t)numbers.size());
    for (auto n : numbers) put(n);
  };
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = arguments[i];
    key += '|';
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      key += value.isTensor() ? 't' : 'T';
      if (value.isTensorList()) put((int64_t)value.toTensorVector().size());
      each_tensor(value, [&](const Tensor& tensor) {
        put(tensor.scalar_type()), put(tensor.unsafeGetTensorImpl()->is_wrapped_number()), put(is_late(tensor));
        put_all(tensor.sizes()), put_all(tensor.strides());
      });
    } else if (value.isNone()) key += 'n';
    else if (value.isInt()) key += 'i', put(value.toInt());
    else if (value.isDouble()) key += 'd', put(value.toDouble());
    else if (value.isBool()) key += 'b', put(value.toBool());
    else if (value.isIntList()) key += 'I', put_all(value.toIntVector());
    else if (value.isDoubleList()) key += 'D', put_all(value.toDoubleVector());
    else if (value.isBoolList()) {
      key += 'B';
      for (bool b : value.toBoolList()) put(b);
    } else if (value.isString()) key += 's' + value.toStringRef();
    else if (value.isDevice() || (int)i == s.generator) key += 'x';
    else return "";
  }
  return key;
}

std::mutex metas_lock;

std::unordered_map<std::string, Stack>& all_metas() {
  static std::unordered_map<std::string, Stack> known;
  return known;
}

// The CPU's kernel keeps the statistics of layer norm in another dtype than CUDA's, which the meta kernel describes.
void correct_layer_norm(const Stack& arguments, Stack& metas) {
  Tensor input = arguments[0].toTensor();
  bool is_mixed = arguments[2].isTensor() && arguments[2].toTensor().defined() && arguments[2].toTensor().dtype() != input.dtype();
  for (int k : {1, 2}) metas[k] = metas[k].toTensor().to(is_mixed ? at::kFloat : input.scalar_type());
}

// The returned values as meta tensors, and sizes of `out=` tensors corrected. Nothing if only the kernel can say.
std::optional<Stack> metas_of(const c10::OperatorHandle& op, const Stack& arguments, Signature& s, bool& failed) {
  if (!s.has_meta) return std::nullopt;
  bool has_out = false;
  for (bool each : s.is_out) has_out |= each;
  std::string key = has_out ? "" : key_of(op, arguments, s);
  if (!key.empty()) {
    std::lock_guard<std::mutex> lock(metas_lock);
    auto found = all_metas().find(key);
    if (found != all_metas().end()) return found->second;
  }
  Stack given;
  for (size_t i = 0; i < arguments.size(); i++) {
    if ((int)i == s.generator) given.push_back(IValue());
    else if (arguments[i].isDevice()) given.push_back(c10::Device(c10::kMeta));
    else given.push_back(mapped(arguments[i], meta_of));
  }
  Stack metas = given;
  try {
    op.callBoxed(metas);
  } catch (const c10::NotImplementedError&) {
    s.has_meta = false;
    return std::nullopt;
  } catch (const std::exception&) {
    failed = true;  // the kernel has the right message
    return std::nullopt;
  }
  if (op.schema().name() == "aten::native_layer_norm") correct_layer_norm(arguments, metas);
  for (size_t i = 0; i < arguments.size(); i++)
    if (s.is_out[i] && arguments[i].isTensor() && arguments[i].toTensor().defined()) {
      Tensor out = arguments[i].toTensor(), meta = given[i].toTensor();
      if (out.sizes() != meta.sizes()) set_sizes(out, meta.sizes(), meta.strides());
    }
  if (!key.empty()) {
    std::lock_guard<std::mutex> lock(metas_lock);
    if (all_metas().size() > 20000) all_metas().clear();
    all_metas()[key] = metas;
  }
  return metas;
}

// ---- random kernels without a generator argument draw from the CPU's default one, which the program uses as well

struct SeededDefault {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  Tensor state = generator.get_state();
  explicit SeededDefault(uint64_t seed) { generator.set_current_seed(seed); }
  ~SeededDefault() { generator.set_state(state); }
};

void run_kernel(const c10::OperatorHandle& op, const Signature& s, Stack& values, uint64_t seed) {
  std::optional<SeededDefault> seeded;
  if (s.is_random && s.generator >= 0) values[s.generator] = at::detail::createCPUGenerator(seed);
  else if (s.is_random) seeded.emplace(seed);
  op.callBoxed(values);
}

void put(const Tensor& result, Tensor& target) {
  // CPU kernels leave out statistics that nobody needs; on the device they have sizes, and no meaning.
  if (result.numel() == 0) return;
  TORCH_CHECK(target.sizes() == result.sizes(), "the result has sizes ", result.sizes(), ", but its meta kernel said ", target.sizes());
  target.copy_(result);
}

c10::Device device_of(const c10::OperatorHandle& op, const Stack& arguments, const Signature& s) {
  std::optional<c10::Device> device;
  auto refuse = [&](const Tensor& tensor) {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
        device.value_or(c10::Device(kLate)), " and ", tensor.device(), "! (", op.schema().name(), ")");
  };
  for (auto& value : arguments) {
    each_tensor(value, [&](const Tensor& tensor) {
      if (!is_late(tensor)) return;
      if (!device) device = tensor.device();
      if (tensor.device() != *device) refuse(tensor);
    });
    if (value.isDevice() && value.toDevice().type() == kLate && !device)
      device = value.toDevice().has_index() ? value.toDevice() : c10::Device(kLate, current_device());
  }
  for (auto& value : arguments)
    each_tensor(value, [&](const Tensor& tensor) {
      if (!is_late(tensor) && !tensor.is_meta() && tensor.dim() != 0 && !s.mixes) refuse(tensor);
    });
  return device.value_or(c10::Device(kLate, current_device()));
}

}  // namespace

Tensor for_tasks(const Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  TORCH_CHECK(tensor.numel() == 0 || (size_t)((last + 1) * tensor.element_size()) <= tensor.storage().nbytes(),
      "late: the memory of this tensor was freed");
  void* data = tensor.numel() ? for_tasks(tensor.const_data_ptr()) : nullptr;
  Tensor alias = at::from_blob(data, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  keep_wrapped_number(tensor, alias);
  return alias;
}

Tensor empty_like_meta(const Tensor& meta) {
  return at::detail::empty_strided_generic(meta.sizes(), meta.strides(), c10::GetAllocator(kLate),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), meta.scalar_type());
}

void set_sizes(const Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  size_t needed = at::detail::computeStorageNbytes(sizes, strides, tensor.element_size(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes()) resize_storage(tensor.storage(), needed);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  auto& s = signature_of(op);
  auto& schema = op.schema();
  size_t count = schema.arguments().size();
  Stack arguments(stack->end() - count, stack->end());
  TORCH_CHECK_NOT_IMPLEMENTED(!s.is_view, "late: the view ", schema.name(), " is not implemented");
  c10::Device device = device_of(op, arguments, s);
  c10::DeviceGuard guard(device);
  auto stream = current_stream(device.index());
  bool has_new = false;
  for (int which : s.returned) has_new |= which < 0;
  std::optional<Stack> metas;
  bool waits = s.waits;
  if (!waits) metas = metas_of(op, arguments, s, waits);
  waits |= !metas && has_new;

  Accesses accesses;
  Stack values;  // the arguments, for the kernel
  // Kernels may resize what is passed as `out=`, which an alias does not allow: they get a tensor of their own.
  std::vector<Tensor> outs, out_targets, out_results;
  for (size_t i = 0; i < count; i++) {
    if (arguments[i].isDevice()) values.push_back(c10::Device(c10::kCPU));
    else if ((int)i == s.generator) values.push_back(IValue());
    else if (s.is_out[i] && arguments[i].isTensor() && is_late(arguments[i].toTensor())) {
      outs.push_back(arguments[i].toTensor());
      if (!waits) accesses.write(outs.back()), out_targets.push_back(for_tasks(outs.back()));
      out_results.push_back(at::detail::empty_cpu({0}, outs.back().scalar_type()));
      values.push_back(out_results.back());
    } else values.push_back(mapped(arguments[i], [&](const Tensor& tensor) {
      // What the host has may change before the task runs: CUDA passes numbers by value.
      if (!is_late(tensor)) return waits || tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.detach().clone();
      if (!s.is_out[i]) accesses.read(tensor);
      if (s.written[i]) accesses.write(tensor);
      return for_tasks(tensor);
    }));
  }
  uint64_t seed = 0;
  if (s.is_random) {
    std::optional<at::Generator> generator;
    if (s.generator >= 0 && arguments[s.generator].isGenerator()) generator = arguments[s.generator].toGenerator();
    seed = draw_seed(generator, device.index());
  }

  std::string name = schema.name().substr(schema.name().find("::") + 2);
  Stack results;
  if (!waits) {
    std::vector<Tensor> targets;
    for (size_t k = 0; k < s.returned.size(); k++) {
      if (s.returned[k] >= 0) results.push_back(arguments[s.returned[k]]);
      else results.push_back(mapped((*metas)[k], [&](const Tensor& meta) {
        Tensor made = empty_like_meta(meta);
        accesses.write(made);
        targets.push_back(for_tasks(made));
        return made;
      }));
    }
    launch(stream, name, accesses, [op, &s, values, targets, out_targets, out_results, seed]() mutable {
      run_kernel(op, s, values, seed);
      for (size_t i = 0; i < out_targets.size(); i++) put(out_results[i], out_targets[i]);
      if (targets.empty()) return;
      size_t k = 0;
      for (auto& value : values)
        each_tensor(value, [&](const Tensor& result) {
          if (k < targets.size()) put(result, targets[k++]);
        });
    });
  } else {
    auto given = std::make_shared<Stack>();
    auto error = std::make_shared<std::exception_ptr>();
    launch(stream, name, accesses, [op, &s, values, seed, given, error]() mutable {
      try {
        run_kernel(op, s, values, seed);
        *given = std::move(values);
      } catch (...) {
        *error = std::current_exception();
      }
    });
    synchronize(stream);
    if (*error) std::rethrow_exception(*error);
    auto put_later = [&](const Tensor& result, const Tensor& target) {
      if (result.numel() == 0) return;
      Accesses written;
      written.write(target);
      launch(stream, name, written, [result, to = for_tasks(target)]() mutable { to.copy_(result); });
    };
    for (size_t i = 0; i < outs.size(); i++) {
      if (outs[i].sizes() != out_results[i].sizes()) set_sizes(outs[i], out_results[i].sizes(), out_results[i].strides());
      put_later(out_results[i], outs[i]);
    }
    for (size_t k = 0; k < s.returned.size(); k++) {
      if (s.returned[k] >= 0) results.push_back(arguments[s.returned[k]]);
      else results.push_back(mapped((*given)[k], [&](const Tensor& result) {
        Tensor made = empty_like_meta(result);
        put_later(result, made);
        return made;
      }));
    }
  }
  stack->erase(stack->end() - count, stack->end());
  for (auto& result : results) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// These have kernels for all devices, which would be called before the fallback: they are made of many operations, or are
// meant to be replaced.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (auto* name : {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_", "native_layer_norm", "native_layer_norm_backward",
           "convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace late
