// Operators of the device: each is PyTorch's CPU kernel, run on the same bytes by a task of the current stream.
#pragma once

#include "scheduler.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace late {

inline bool is_late(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kLate; }

// A CPU tensor at the addresses that tasks use. It keeps nothing alive, as kernels keep nothing on a real device.
at::Tensor for_tasks(const at::Tensor&);
at::Tensor empty_like_meta(const at::Tensor& meta);  // on the current device
void set_sizes(const at::Tensor&, c10::IntArrayRef sizes, c10::IntArrayRef strides);
void fallback(const c10::OperatorHandle&, torch::jit::Stack*);

}  // namespace late
