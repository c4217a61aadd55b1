#include "memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <unordered_map>

namespace late {
namespace {

constexpr size_t kDeviceMemory = size_t(16) << 30, kPinnedMemory = size_t(4) << 30;  // of addresses; pages come when used
constexpr size_t kPage = 4096;
constexpr int kPoison = 0xFF;  // NaN in every floating dtype, -1 in signed integers

using Lock = std::unique_lock<std::mutex>;

size_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// ---- addresses

struct Arena {
  uintptr_t seen = 0, tasks = 0;
  size_t size = 0;
  std::map<uintptr_t, size_t> holes;

  bool has(uintptr_t at) const { return at >= seen && at < seen + size; }

  // Memory that programs may use is one memory at two addresses. Memory that they may not use is only addresses for them.
  void map(size_t bytes, bool for_programs) {
    size = bytes;
    int file = for_programs ? memfd_create("late", MFD_CLOEXEC) : -1;
    TORCH_CHECK(!for_programs || (file >= 0 && ftruncate(file, size) == 0), "late: cannot make ", size, " bytes of memory: ", strerror(errno));
    int flags = MAP_NORESERVE | (for_programs ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS);
    void* both[] = {mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, file, 0),
                    mmap(nullptr, size, for_programs ? PROT_READ | PROT_WRITE : PROT_NONE, flags, file, 0)};
    for (void* at : both) TORCH_CHECK(at != MAP_FAILED, "late: cannot map ", size, " bytes of memory: ", strerror(errno));
    if (for_programs) close(file);
    tasks = (uintptr_t)both[0], seen = (uintptr_t)both[1];
    holes[seen] = size;
  }

  uintptr_t take(size_t bytes, const char* what) {
    for (auto it = holes.begin(); it != holes.end(); ++it) {
      auto [at, room] = *it;
      if (room < bytes) continue;
      holes.erase(it);
      if (room > bytes) holes[at + bytes] = room - bytes;
      return at;
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, "late: out of ", what, ": tried to allocate ", bytes, " bytes");
  }

  void give_back(uintptr_t at, size_t bytes) {
    auto it = holes.emplace(at, bytes).first;
    auto next = std::next(it);
    if (next != holes.end() && next->first == at + it->second) it->second += next->second, holes.erase(next);
    if (it == holes.begin()) return;
    auto before = std::prev(it);
    if (before->first + before->second == at) before->second += it->second, holes.erase(it);
  }
};
Arena device_memory, pinned_memory;

// ---- faults

constexpr size_t kMostFaults = 64;
struct RawFault {
  uintptr_t address;
  char stack[1500];
};
RawFault raw_faults[kMostFaults];  // written by the signal handler, which may not allocate
std::atomic<size_t> raw_fault_count{0};
struct sigaction handler_before;
using Dump = const char* (*)(int, PyThreadState*);
void (*dump_stack)(int, PyThreadState*) = nullptr;  // faulthandler's own, which is safe in a signal handler
int dump_file = -1;

void on_fault(int number, siginfo_t* info, void*) {
  auto at = (uintptr_t)info->si_addr;
  if (!device_memory.has(at) && !pinned_memory.has(at)) {
    sigaction(SIGSEGV, &handler_before, nullptr);  // the instruction runs again, and faults again
    return;
  }
  // The access is reported, and goes on, so that one run finds more than one.
  mprotect((void*)(at / kPage * kPage), kPage, PROT_READ | PROT_WRITE);
  size_t n = raw_fault_count++;
  if (n >= kMostFaults) return;
  raw_faults[n].address = at;
  raw_faults[n].stack[0] = 0;
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (!dump_stack || !thread || lseek(dump_file, 0, SEEK_SET) != 0 || ftruncate(dump_file, 0) != 0) return;
  dump_stack(dump_file, thread);
  ssize_t length = pread(dump_file, raw_faults[n].stack, sizeof raw_faults[n].stack - 1, 0);
  raw_faults[n].stack[std::max<ssize_t>(length, 0)] = 0;
}

void install_handler() {
  struct sigaction now;
  sigaction(SIGSEGV, nullptr, &now);
  if (now.sa_sigaction == on_fault) return;
  struct sigaction ours = {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;  // a stack that has overflown cannot be used
  sigaction(SIGSEGV, &ours, &handler_before);
}

// ---- the device's caching allocator

struct Block {
  uintptr_t at;
  size_t size;
  c10::DeviceIndex device;
  uint32_t stream;
  std::map<uint32_t, uint64_t> uses;  // of other streams, by record_stream: the number of their last task by then
};

// Guarded by the scheduler's lock, all that follows.
std::unordered_map<uintptr_t, Block> blocks;                      // in use, by address
std::vector<Block> in_other_streams;                              // freed, but other streams may still use them
std::map<uint32_t, std::vector<Block>> freed;                     // by stream: the next allocation poisons them
std::map<std::pair<uint32_t, size_t>, std::vector<Block>> cached; // by stream and size
std::map<c10::DeviceIndex, MemoryStats> stats;

// Poison is a task of the block's stream, which the race detector sees as a write: a reader on another stream for which
// this stream does not wait has lost its data.
void poison(const Block& block, const char* why) {
  Accesses accesses;
  accesses.add_bytes(block.at, block.size, true);
  launch(stream_of(block.stream), why, accesses, [at = for_tasks((void*)block.at), size = block.size] { memset(at, kPoison, size); });
}

void collect_from_other_streams() {  // needs the lock
  auto is_waiting = [](const Block& block) {
    for (auto& [stream, number] : block.uses)
      if (finished(stream) < number) return true;
    return false;
  };
  auto done = std::stable_partition(in_other_streams.begin(), in_other_streams.end(), is_waiting);
  for (auto it = done; it != in_other_streams.end(); ++it) {
    detector().past({it->at, it->at + it->size}, it->uses);
    it->uses.clear();
    freed[it->stream].push_back(std::move(*it));
  }
  in_other_streams.erase(done, in_other_streams.end());
}

void free_block(void* data) {
  if (is_stopping()) return;
  Lock lock(scheduler_lock());
  auto found = blocks.find((uintptr_t)data);
  if (found == blocks.end()) return;
  Block block = std::move(found->second);
  blocks.erase(found);
  stats[block.device].allocated -= block.size;
  for (auto& [stream, number] : block.uses) number = issued(stream);
  (block.uses.empty() ? freed[block.stream] : in_other_streams).push_back(std::move(block));
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t wanted) override {
    auto device = c10::impl::getDeviceGuardImpl(kLate)->getDevice();
    if (wanted == 0) return {nullptr, nullptr, &free_block, device};
    size_t size = rounded(wanted, wanted < (1 << 20) ? 512 : 1 << 16);
    uint32_t stream = stream_number(c10::impl::getDeviceGuardImpl(kLate)->getStream(device));
    // Poisoned now and not when it was freed: until now the program may have made the stream wait for other readers.
    std::vector<Block> old;
    {
      Lock lock(scheduler_lock());
      collect_from_other_streams();
      std::swap(old, freed[stream]);
    }
    for (auto& block : old) poison(block, "reuse of freed memory");
    Block block;
    bool is_new = false;
    {
      Lock lock(scheduler_lock());
      for (auto& each : old) cached[{stream, each.size}].push_back(std::move(each));
      auto& fitting = cached[{stream, size}];
      if (fitting.empty()) {
        is_new = true;
        block = {device_memory.take(size, "memory of the device"), size, device.index(), stream, {}};
        stats[device.index()].reserved += size;
      } else {
        block = std::move(fitting.back());  // freed last: the shortest time between a free and the next use
        fitting.pop_back();
      }
      blocks[block.at] = block;
      auto& counts = stats[device.index()];
      counts.allocated += size, counts.taken += size, counts.allocations++, counts.peak = std::max(counts.peak, counts.allocated);
    }
    if (is_new) {
      memset(for_tasks((void*)block.at), kPoison, size);  // for streams that do not wait for the task below
      poison(block, "allocation");
    }
    return {(void*)block.at, (void*)block.at, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "late: raw copies have no stream"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { late::empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_on_stream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto counts = memory_stats(device);
    c10::CachingDeviceAllocator::DeviceStats result;
    for (auto* each : {&result.allocated_bytes, &result.active_bytes, &result.requested_bytes})
      (*each)[0].current = counts.allocated, (*each)[0].peak = counts.peak;
    result.reserved_bytes[0].current = result.reserved_bytes[0].peak = counts.reserved;
    result.allocated_bytes[0].allocated = counts.taken;
    result.allocation[0].allocated = counts.allocations;
    return result;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock(scheduler_lock());
    stats[device].allocations = stats[device].taken = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {device_memory.size - memory_stats(device).reserved, device_memory.size};
  }
};
DeviceAllocator device_allocator;

// ---- pinned memory

struct PinnedUse {
  Range bytes;
  Stamp by;
  bool written;
};
struct PinnedBlock {
  size_t size, wanted;  // whole pages, of which the program has the first `wanted` bytes
  bool is_free = false;
  std::vector<PinnedUse> uses;  // of which the host does not know that they are done
};
std::map<uintptr_t, PinnedBlock> pinned_blocks;  // guarded by the scheduler's lock
std::set<uintptr_t> pinned_in_use;               // blocks with uses

// How many of these bytes some use covers.
size_t covered(Range bytes, const std::vector<PinnedUse>& uses, bool only_written) {
  std::vector<std::pair<uintptr_t, uintptr_t>> parts;
  for (auto& use : uses) {
    uintptr_t begin = std::max(use.bytes.begin, bytes.begin), end = std::min(use.bytes.end, bytes.end);
    if (begin < end && (use.written || !only_written)) parts.push_back({begin, end});
  }
  std::sort(parts.begin(), parts.end());
  size_t count = 0;
  uintptr_t at = bytes.begin;
  for (auto [begin, end] : parts) {
    begin = std::max(begin, at);
    if (begin < end) count += end - begin, at = end;
  }
  return count;
}

// Only whole pages can be protected. One that holds other data too stays open, since the program may use that data.
void protect_block(uintptr_t at, const PinnedBlock& block) {
  uintptr_t end = at + block.wanted, from = at;
  int before = PROT_READ | PROT_WRITE;
  auto apply = [&](uintptr_t to, int protection) {
    if (to > from) mprotect((void*)from, to - from, protection);
    from = to;
  };
  if (!block.uses.empty()) {
    for (uintptr_t page = at; page < end; page += kPage) {
      Range bytes{page, std::min(page + kPage, end)};
      size_t size = bytes.end - bytes.begin;
      int now = covered(bytes, block.uses, true) == size ? PROT_NONE
          : covered(bytes, block.uses, false) == size   ? PROT_READ
                                                        : PROT_READ | PROT_WRITE;
      if (now != before) apply(page, before), before = now;
    }
  }
  apply(at + block.size, before);
}

std::map<uintptr_t, PinnedBlock>::iterator pinned_block_of(uintptr_t at) {  // needs the lock
  auto it = pinned_blocks.upper_bound(at);
  if (it == pinned_blocks.begin()) return pinned_blocks.end();
  --it;
  return at < it->first + it->second.size ? it : pinned_blocks.end();
}

std::vector<Fault> faults;

// Find out which copies the faults were too early for. Needs the lock; called before uses are forgotten.
void explain_faults() {
  if (raw_fault_count == 0) return;
  size_t count = std::min(raw_fault_count.exchange(0), kMostFaults);
  for (size_t i = 0; i < count; i++) {
    Fault fault{raw_faults[i].address, {}, raw_faults[i].stack};
    if (pinned_memory.has(fault.address)) {
      auto found = pinned_block_of(fault.address);
      if (found != pinned_blocks.end())
        for (auto& use : found->second.uses)
          if (fault.address >= use.bytes.begin && fault.address < use.bytes.end) fault.copy = use.by;
    }
    faults.push_back(std::move(fault));
  }
}

void release_known_uses() {  // needs the lock
  explain_faults();
  for (auto it = pinned_in_use.begin(); it != pinned_in_use.end();) {
    auto& block = pinned_blocks.at(*it);
    auto is_known = [](const PinnedUse& use) { return host_knows(use.by.stream, use.by.number); };
    auto end = std::remove_if(block.uses.begin(), block.uses.end(), is_known);
    if (end != block.uses.end()) block.uses.erase(end, block.uses.end()), protect_block(*it, block);
    it = block.uses.empty() ? pinned_in_use.erase(it) : std::next(it);
  }
}

void free_pinned(void* data) {
  if (is_stopping()) return;
  Lock lock(scheduler_lock());
  auto found = pinned_blocks.find((uintptr_t)data);
  if (found != pinned_blocks.end()) found->second.is_free = true;
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t wanted) override {
    if (wanted == 0) return {nullptr, nullptr, &free_pinned, c10::Device(c10::kCPU)};
    size_t size = rounded(wanted, kPage);
    Lock lock(scheduler_lock());
    explain_faults();
    uintptr_t at = 0;
    for (auto& [address, block] : pinned_blocks) {
      if (!block.is_free || block.size != size) continue;
      bool is_done = true;  // the allocator itself has asked the events of its uses
      for (auto& use : block.uses) is_done &= finished(use.by.stream) >= use.by.number;
      if (!is_done) continue;
      block = {size, wanted, false, {}};
      pinned_in_use.erase(address);
      protect_block(address, block);
      detector().forget({address, address + size});
      at = address;
      break;
    }
    if (!at) {
      at = pinned_memory.take(size, "pinned memory");
      pinned_blocks[at] = {size, wanted, false, {}};
    }
    memset(for_tasks((void*)at), kPoison, size);
    return {(void*)at, (void*)at, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  bool record_event(void* data, void*, c10::Stream) override { return is_pinned(data); }  // copies note their uses themselves
  void empty_cache() override {
    Lock lock(scheduler_lock());
    for (auto it = pinned_blocks.begin(); it != pinned_blocks.end();) {
      auto& [at, block] = *it;
      if (!block.is_free || !block.uses.empty()) {
        ++it;
        continue;
      }
      detector().forget({at, at + block.size});
      pinned_memory.give_back(at, block.size);
      it = pinned_blocks.erase(it);
    }
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator pinned_allocator;

}  // namespace

void start_memory() {
  device_memory.map(kDeviceMemory, false);
  pinned_memory.map(kPinnedMemory, true);
  dump_stack = (void (*)(int, PyThreadState*))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
  dump_file = memfd_create("late-stacks", MFD_CLOEXEC);
  install_handler();
  when_host_learns(release_known_uses);
  c10::SetAllocator(kLate, &device_allocator, 1);
  at::setHostAllocator(kLate, &pinned_allocator);
}

void protect_again() {
  install_handler();
  Lock lock(scheduler_lock());
  mprotect((void*)device_memory.seen, device_memory.size, PROT_NONE);
  for (uintptr_t at : pinned_in_use) protect_block(at, pinned_blocks.at(at));
}

void* for_tasks(const void* data) {
  auto at = (uintptr_t)data;
  for (auto* arena : {&device_memory, &pinned_memory})
    if (arena->has(at)) return (void*)(at - arena->seen + arena->tasks);
  return (void*)at;
}

bool is_pinned(const void* data) { return pinned_memory.has((uintptr_t)data); }

void use_pinned(const void* data, size_t size, const Stamp& by, bool written) {
  Lock lock(scheduler_lock());
  auto begin = (uintptr_t)data;
  auto found = pinned_block_of(begin);
  if (found == pinned_blocks.end() || host_knows(by.stream, by.number)) return;
  found->second.uses.push_back({{begin, begin + size}, by, written});
  pinned_in_use.insert(found->first);
  protect_block(found->first, found->second);
}

void record_on_stream(const c10::DataPtr& data, c10::Stream stream) {
  Lock lock(scheduler_lock());
  auto found = blocks.find((uintptr_t)data.get());
  uint32_t number = stream_number(stream);
  if (found != blocks.end() && found->second.stream != number) found->second.uses[number] = issued(number);
}

void resize_storage(const c10::Storage& storage, size_t size) {
  c10::DeviceGuard guard(storage.device());
  auto data = device_allocator.allocate(size);
  if (size_t kept = std::min(size, storage.nbytes())) {
    auto from = (uintptr_t)storage.data(), to = (uintptr_t)data.get();
    Accesses accesses;
    accesses.add_bytes(from, kept, false), accesses.add_bytes(to, kept, true);
    auto stream = c10::impl::getDeviceGuardImpl(kLate)->getStream(storage.device());
    launch(stream, "resize_", accesses, [from, to, kept] { memcpy(for_tasks((void*)to), for_tasks((void*)from), kept); });
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

void empty_cache() {
  synchronize_device(-1);
  Lock lock(scheduler_lock());
  collect_from_other_streams();
  auto give_back = [](std::vector<Block>& all) {
    for (auto& block : all) {
      detector().forget({block.at, block.at + block.size});
      device_memory.give_back(block.at, block.size);
      stats[block.device].reserved -= block.size;
      madvise(for_tasks((void*)block.at), block.size, MADV_DONTNEED);
    }
    all.clear();
  };
  for (auto& [key, all] : cached) give_back(all);
  for (auto& [key, all] : freed) give_back(all);
}

MemoryStats memory_stats(c10::DeviceIndex device) {
  Lock lock(scheduler_lock());
  return stats[device];
}

void reset_peak(c10::DeviceIndex device) {
  Lock lock(scheduler_lock());
  stats[device].peak = stats[device].allocated;
}

std::vector<Fault> take_faults() {
  Lock lock(scheduler_lock());
  explain_faults();
  std::vector<Fault> taken;
  std::swap(taken, faults);
  return taken;
}

}  // namespace late
