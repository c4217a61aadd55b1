// Streams of tasks, and which task runs when.
//
// What a program launches is queued. Tasks run on whichever thread waits for the device, in the order of each stream and
// after the events that a stream waits for; between streams the mode and a seed choose.
#pragma once

#include "races.h"

#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace late {

constexpr auto kLate = c10::DeviceType::PrivateUse1;

// One recording of an event. A wait is for a recording: recording the event again does not move the wait, as with CUDA.
struct Recording {
  uint32_t stream = 0;
  uint64_t number = 0;
  Clock clock;
  bool done = false;
  double time_ms = 0;
};
using RecordingPtr = std::shared_ptr<Recording>;

// A collective's communication, which goes on beside the tasks.
struct Transfer {
  std::function<void()> begin;
  bool begun = false;              // the fields from here on are guarded by the scheduler's lock
  bool ended = false;
  std::string error;
};
using TransferPtr = std::shared_ptr<Transfer>;

enum class Mode { kEager, kNeeded, kRandom, kDefaultFirst, kDefaultLast };

struct Config {
  Mode mode = Mode::kEager;
  int idle_ms = 100;    // when the host has done nothing for so long, what is queued runs: late, but it runs
  int queries = 3;      // how often an event says that it has not happened, before it happens
  double hang_s = 300;  // without any progress, a wait of the host raises
};

void configure(const Config&, uint64_t seed);
void start_scheduler(int devices);
void stop_scheduler();
bool is_stopping();

int device_count();
uint32_t stream_number(c10::Stream);
c10::Stream stream_of(uint32_t number);
c10::Stream pooled_stream(c10::DeviceIndex, bool high_priority);
std::string stream_name(uint32_t number);

// `keeps` is destroyed when the task has run. Returns which access the operation's first operand is.
Stamp launch(c10::Stream, std::string name, const Accesses&, std::function<void()> run, std::shared_ptr<void> keeps = nullptr);
void communicate(c10::Stream, std::string name, const Accesses&, TransferPtr, std::shared_ptr<void> keeps);
void end(const TransferPtr&, const std::string& error);
RecordingPtr record(c10::Stream);
// A wait that no program may rely on does not count: the race detector ignores it.
void wait(c10::Stream, const RecordingPtr&, bool counts = true);

// `queries` is how often the caller has asked before; see Config.
bool query(const RecordingPtr&, int& queries);
bool query(c10::Stream);
void synchronize(const RecordingPtr&);
bool synchronize_within(const RecordingPtr&, int64_t limit_ms);  // whether it happened
void synchronize(c10::Stream);
void synchronize_device(c10::DeviceIndex);  // -1: all
uint64_t host_waits();
void count_host_wait();  // where a driver may wait and need not

// ---- for the allocators

std::mutex& scheduler_lock();
// All of these need the lock.
Detector& detector();
uint64_t issued(uint32_t stream);
uint64_t finished(uint32_t stream);
bool host_knows(uint32_t stream, uint64_t number);
// Called, with the lock, whenever the host has learned that tasks are done.
void when_host_learns(std::function<void()>);

}  // namespace late
