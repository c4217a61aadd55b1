// The device as torch sees it: its guard, hooks, streams, events and random generators.
#pragma once

#include "scheduler.h"

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <optional>

namespace late {

void start_device(int count);

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex);
c10::Stream current_stream(c10::DeviceIndex);
// Make a stream the current one of its device, and return the former one.
c10::Stream exchange_stream(c10::Stream);
// Where a generator is now, which it then leaves: a seed for one operation.
uint64_t draw_seed(const std::optional<at::Generator>&, c10::DeviceIndex);
at::Generator default_generator(c10::DeviceIndex);

}  // namespace late
