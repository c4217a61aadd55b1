// Factories, copies between devices, views and changes of storages: what the fallback cannot do.
#include "device.h"
#include "memory.h"
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace late {
namespace {

using at::Tensor;

c10::Device with_index(std::optional<at::Device> device) {
  return device && device->has_index() ? *device : c10::Device(kLate, current_device());
}

Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), c10::GetAllocator(kLate),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
      c10::GetAllocator(kLate), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// ---- copies

// As CUDA: the copy runs on the source's current stream, between two waits for the target's.
void copy_on_device(const Tensor& from, const Tensor& to) {
  Accesses accesses;
  accesses.read(from), accesses.write(to);
  auto stream = current_stream(from.device().index()), other = current_stream(to.device().index());
  bool are_two = from.device() != to.device();
  if (are_two) wait(stream, record(other));
  launch(stream, "copy_", accesses, [from = for_tasks(from), to = for_tasks(to)]() mutable { to.copy_(from); });
  if (are_two) wait(other, record(stream));
}

// Whether one transfer of bytes does it: what CUDA does in the background if the host's memory is pinned.
bool is_plain(const Tensor& from, const Tensor& to) {
  return from.dtype() == to.dtype() && from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg() &&
      from.is_non_overlapping_and_dense() && (from.strides().equals(to.strides()) || (from.is_contiguous() && to.is_contiguous()));
}

void copy_with_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool to_device = is_late(to);
  const Tensor &there = to_device ? to : from, &here = to_device ? from : to;
  auto stream = current_stream(there.device().index());
  const char* name = to_device ? "copy from host to device" : "copy from device to host";
  Accesses accesses;
  accesses.add(there, to_device);
  if (non_blocking && is_pinned(here.const_data_ptr()) && is_plain(from, to)) {
    accesses.add(here, !to_device);
    auto by = launch(stream, name, accesses, [from = for_tasks(from), to = for_tasks(to)]() mutable { to.copy_(from); });
    by.operand = 1;
    use_pinned(here.const_data_ptr(), here.numel() * here.element_size(), by, !to_device);
  } else if (to_device) {
    // Pageable memory is staged before the call returns. CUDA may wait for the stream before that; nothing may rely on it.
    launch(stream, name, accesses, [from = from.detach().clone(), to = for_tasks(to)]() mutable { to.copy_(from); });
    if (non_blocking) count_host_wait();
    else synchronize(stream);
  } else {
    auto staged = std::make_shared<Tensor>();
    launch(stream, name, accesses, [from = for_tasks(from), staged] { *staged = from.clone(); });
    synchronize(stream);  // CUDA waits for copies to pageable memory, also where they are said to be non-blocking
    if (staged->defined()) to.copy_(*staged);
  }
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  c10::DeviceGuard guard(is_late(from) ? from.device() : to.device());
  if (is_late(from) && is_late(to)) copy_on_device(from, to);
  else copy_with_host(from, to, non_blocking);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  Tensor here = at::detail::empty_cpu({}, self.scalar_type());
  copy_from(self.reshape({}), here, false);
  return here.item();
}

// ---- views and storages

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes && !format) return self;
  set_sizes(self, sizes, c10::contiguous_strides(sizes));
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_storage_and_sizes(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto contiguous = c10::contiguous_strides(sizes);
  set_sizes(self, sizes, stride.empty() ? c10::IntArrayRef(contiguous) : C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage) {
  int64_t count = storage.nbytes() / self.element_size();
  return set_storage_and_sizes(self, std::move(storage), 0, {c10::SymInt(count)}, {c10::SymInt(1)});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_and_sizes(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  at::Storage none(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(kLate), true);
  return set_storage_and_sizes(self, none, 0, {c10::SymInt(0)}, {c10::SymInt(1)});
}

void record_stream(Tensor& self, c10::Stream stream) { record_on_stream(self.storage().data_ptr(), stream); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize_);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage_storage_offset", set_storage_and_sizes);
  m.impl("record_stream", record_stream);
}

// A copy resolves these bits itself. torch's fallbacks would resolve them by a copy, and so on for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace late
