// Autocast: the same lists of operators as on CUDA, one boxed kernel for each policy.
#include "operators.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace late {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

IValue cast(const IValue& value, at::ScalarType to) {
  auto one = [&](const Tensor& tensor) { return tensor.defined() ? at::autocast::cached_cast(to, tensor, kLate) : tensor; };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (Tensor tensor : value.toTensorVector()) out.push_back(one(tensor));
    return out;
  }
  return value;
}

void call_with(const c10::OperatorHandle& op, Stack* stack, at::ScalarType to) {
  c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastPrivateUse1);
  size_t count = op.schema().arguments().size();
  for (auto it = stack->end() - count; it != stack->end(); ++it) *it = cast(*it, to);
  op.callBoxed(stack);
}

void in_lower_precision(const c10::OperatorHandle& op, Stack* stack) { call_with(op, stack, at::autocast::get_autocast_dtype(kLate)); }

void in_float32(const c10::OperatorHandle& op, Stack* stack) { call_with(op, stack, at::kFloat); }

// Sums: the result is a float32, unless the caller says what it is to be.
void to_float32(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastPrivateUse1);
  auto& arguments = op.schema().arguments();
  auto begin = stack->end() - arguments.size();
  bool is_eligible = begin->isTensor() && at::autocast::is_eligible(begin->toTensor(), kLate);
  for (size_t i = 0; i < arguments.size(); i++)
    if (arguments[i].name() == "dtype" && begin[i].isNone() && is_eligible) begin[i] = (int64_t)at::kFloat;
  op.callBoxed(stack);
}

void in_widest(const c10::OperatorHandle& op, Stack* stack) {
  auto to = at::autocast::get_autocast_dtype(kLate);
  for (auto it = stack->end() - op.schema().arguments().size(); it != stack->end(); ++it) {
    if (it->isTensor()) to = at::autocast::prioritize(to, it->toTensor(), kLate);
    if (it->isTensorList()) to = at::autocast::prioritize(to, at::TensorList(it->toTensorVector()), kLate);
  }
  call_with(op, stack, to);
}

std::string full_name(const char* name, const std::string& overload = "") { return overload.empty() ? name : std::string(name) + "." + overload; }

}  // namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define LATE_NAME(...) full_name(LATE_TEXTS(__VA_ARGS__, , ))
#define LATE_TEXTS(name, overload, ...) #name, #overload

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LATE_LOWER(...) m.impl(LATE_NAME(__VA_ARGS__).c_str(), torch::CppFunction::makeFromBoxedFunction<&in_lower_precision>());
#define LATE_FLOAT(...) m.impl(LATE_NAME(__VA_ARGS__).c_str(), torch::CppFunction::makeFromBoxedFunction<&in_float32>());
#define LATE_TO_FLOAT(...) m.impl(LATE_NAME(__VA_ARGS__).c_str(), torch::CppFunction::makeFromBoxedFunction<&to_float32>());
#define LATE_WIDEST(...) m.impl(LATE_NAME(__VA_ARGS__).c_str(), torch::CppFunction::makeFromBoxedFunction<&in_widest>());
  AT_FORALL_LOWER_PRECISION_FP(LATE_LOWER)
  AT_FORALL_FP32(LATE_FLOAT)
  AT_FORALL_FP32_SET_OPT_DTYPE(LATE_TO_FLOAT)
  AT_FORALL_PROMOTE(LATE_WIDEST)
  // CUDA appends a dtype to these; in float32 they give the same.
  for (auto* name : {"norm.Scalar", "norm.ScalarOpt_dim"}) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_float32>());
  m.impl("cat", torch::CppFunction::makeFromBoxedFunction<&in_widest>());
  m.impl("stack", torch::CppFunction::makeFromBoxedFunction<&in_widest>());
}

}  // namespace late
