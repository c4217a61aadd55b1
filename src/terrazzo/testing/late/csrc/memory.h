// Memory of the device and pinned memory of the host, each mapped twice: programs see it at addresses that can be
// protected, tasks use it at others. So an access of the host that came too early is a fault, and is reported.
#pragma once

#include "scheduler.h"

#include <c10/core/Storage.h>

#include <string>
#include <vector>

namespace late {

void start_memory();
// Install the fault handler again, if another one was installed since, and protect what was opened by faults.
void protect_again();

// Where tasks find the memory that programs see at this address.
void* for_tasks(const void*);
bool is_pinned(const void*);
// A task uses these bytes of pinned memory. Until the host knows that it has run, the host may not write there, nor read
// what the task writes.
void use_pinned(const void* data, size_t size, const Stamp&, bool written);
// The block was given to a stream other than its own: it is not used again before that stream has come here.
void record_on_stream(const c10::DataPtr&, c10::Stream);
void resize_storage(const c10::Storage&, size_t);
void empty_cache();

struct MemoryStats {
  size_t allocated = 0, peak = 0, reserved = 0, allocations = 0, taken = 0;  // taken: bytes, ever
};
MemoryStats memory_stats(c10::DeviceIndex);
void reset_peak(c10::DeviceIndex);

// An access of the host to memory that it may not use now.
struct Fault {
  uintptr_t address;
  Stamp copy;         // the copy of pinned memory that was not known to be done; not set if the memory is the device's
  std::string stack;  // of Python, as faulthandler writes it
};
std::vector<Fault> take_faults();

}  // namespace late
