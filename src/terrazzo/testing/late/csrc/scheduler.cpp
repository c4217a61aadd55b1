#include "scheduler.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <chrono>
#include <random>
#include <thread>

using namespace std::chrono_literals;

namespace late {
namespace {

constexpr int kPool = 32;              // streams per device and priority, then they are given out again, as CUDA's are
constexpr size_t kLongQueue = 3000;    // tasks; then some run, or tensors of thousands of operations would live
constexpr int kPatience = 20;          // rounds that a wait gives other ranks before it runs streams that it does not need

struct Task {
  enum Kind { kKernel, kRecord, kWait, kTransfer } kind;
  std::string name;
  uint64_t number = 0;
  std::function<void()> run;
  RecordingPtr recording;
  TransferPtr transfer;
  std::shared_ptr<void> keeps;
};

struct StreamState {
  uint32_t number;
  c10::DeviceIndex device;
  bool is_default;
  std::deque<Task> queue;
  uint64_t issued = 0, finished = 0;
  Clock clock;
  int queries = 0;
};

using Lock = std::unique_lock<std::mutex>;

// Guarded by `lock_`, all that follows. Only the thread that has set `executing` runs tasks, and without the lock.
std::mutex lock_;
std::condition_variable changed;
bool executing = false;
Config config;
std::mt19937_64 random_order(0);
std::vector<std::unique_ptr<StreamState>> streams;
std::map<std::pair<c10::DeviceIndex, bool>, std::vector<uint32_t>> pools;
std::map<std::pair<c10::DeviceIndex, bool>, size_t> given;
Clock host;  // what the host's threads know; they share it, as what they tell each other cannot be seen
Detector races;
std::string failure;  // of a task: raised when the host waits next, as CUDA does
size_t queued = 0;
uint64_t waits = 0;
std::function<void()> learned;

int devices = 0;
std::atomic<int64_t> last_activity{0};
std::atomic<bool> stopping{false};
std::thread watchdog;
at::ThreadLocalState* fresh_thread = nullptr;  // tasks run in this state, whatever the thread that runs them is in

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A wait of the host gives the GIL away: other threads may have to launch what is waited for.
struct WithoutGil {
  PyThreadState* state = nullptr;
  WithoutGil() { if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread(); }
  ~WithoutGil() { if (state) PyEval_RestoreThread(state); }
};

StreamState& state(c10::Stream stream) { return *streams[stream_number(stream)]; }

void host_learns(const Clock& clock) {
  join(host, clock);
  if (learned) learned();
}

// ---- running tasks

enum Step { kRan, kBlocked, kBusy, kEmpty };

// Runs the first task of a stream, if it can run. The caller has set `executing`; the lock is free while a task runs.
Step step(Lock& lock, StreamState& stream) {
  if (stream.queue.empty()) return kEmpty;
  Task& task = stream.queue.front();  // stays where it is while others are added
  switch (task.kind) {
    case Task::kRecord:
      task.recording->done = true;
      task.recording->time_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
      break;
    case Task::kWait:
      if (!task.recording->done) return kBlocked;
      break;
    case Task::kTransfer:
      if (!task.transfer->begun) {
        task.transfer->begun = true;
        auto begin = std::move(task.transfer->begin);  // it refers to the transfer
        begin();
      }
      if (!task.transfer->ended) return kBusy;
      if (!task.transfer->error.empty() && failure.empty()) failure = "late: " + task.name + " failed: " + task.transfer->error;
      break;
    case Task::kKernel: {
      lock.unlock();
      std::string error;
      try {
        at::ThreadLocalStateGuard state(*fresh_thread);
        at::AutoDispatchBelowADInplaceOrView below;
        task.run();
      } catch (const c10::Error& e) {
        error = e.what_without_backtrace();
      } catch (const std::exception& e) {
        error = e.what();
      }
      lock.lock();
      if (!error.empty() && failure.empty()) failure = "late: an error of an earlier operation, " + task.name + ": " + error;
    }
  }
  stream.finished = task.number;
  Task done = std::move(task);
  stream.queue.pop_front();
  queued--;
  lock.unlock();
  done = {};  // frees tensors, which needs the lock
  lock.lock();
  return kRan;
}

// One task of some stream, by the mode. `target` is the stream that the host waits for; in vain so far for `rounds`.
bool run_one(Lock& lock, StreamState* target, int rounds) {
  if (target && (config.mode == Mode::kNeeded || config.mode == Mode::kEager)) {
    StreamState* stream = target;
    for (size_t n = 0; n <= streams.size(); n++) {  // along the events that the streams wait for
      Step done = step(lock, *stream);
      if (done == kRan) return true;
      if (done != kBlocked) break;
      stream = streams[stream->queue.front().recording->stream].get();
    }
    if (rounds < kPatience) return false;
  }
  std::vector<StreamState*> order;
  for (auto& stream : streams)
    if (!stream->queue.empty()) order.push_back(stream.get());
  if (config.mode == Mode::kDefaultFirst || config.mode == Mode::kDefaultLast)
    std::stable_sort(order.begin(), order.end(), [](auto* a, auto* b) {
      if (a->is_default != b->is_default) return a->is_default == (config.mode == Mode::kDefaultFirst);
      return a->number > b->number;
    });
  else
    std::shuffle(order.begin(), order.end(), random_order);
  for (auto* stream : order)
    if (step(lock, *stream) == kRan) return true;
  return false;
}

struct Executing {
  Executing() { executing = true; }
  ~Executing() { executing = false, changed.notify_all(); }
};

template <class Reached>
void run_until(Lock& lock, Reached reached, StreamState* target) {
  int rounds = 0;
  int64_t since = now_ms();
  while (!reached()) {
    if (executing) {
      changed.wait_for(lock, 1ms);
      continue;
    }
    bool ran;
    {
      Executing now;
      ran = run_one(lock, target, rounds);
    }
    if (ran) {
      rounds = 0, since = now_ms();
      continue;
    }
    rounds++;
    if (now_ms() - since > config.hang_s * 1000) {
      std::string text = "late: nothing has run for " + std::to_string((int)config.hang_s) + " s; the streams are at:";
      for (auto& stream : streams)
        if (!stream->queue.empty()) text += " " + stream->queue.front().name + " (" + stream_name(stream->number) + ")";
      lock.unlock();
      TORCH_CHECK(false, text);
    }
    changed.wait_for(lock, 50us);
  }
}

void run_all_that_can(Lock& lock) {
  if (executing) return;
  Executing now;
  for (bool any = true; any;) {
    any = false;
    for (size_t i = 0; i < streams.size(); i++)
      while (step(lock, *streams[i]) == kRan) any = true;
  }
}

void raise_failure(Lock& lock) {
  if (failure.empty()) return;
  std::string text;
  std::swap(text, failure);
  lock.unlock();
  TORCH_CHECK(false, text);
}

void watch() {
  while (!stopping) {
    std::this_thread::sleep_for(10ms);
    if (now_ms() - last_activity < config.idle_ms) continue;
    Lock lock(lock_);
    if (queued == 0 || executing) continue;
    Executing now;
    int64_t seen = last_activity;
    while (last_activity == seen && !stopping && run_one(lock, nullptr, kPatience)) {}
  }
}

Stamp enqueue(c10::Stream on, Task task, const Accesses* accesses, bool counts = true) {
  std::shared_ptr<Operation> operation;
  if (accesses && !accesses->operands.empty()) operation = std::make_shared<Operation>(Operation{task.name, current_site(), accesses->operands});
  Lock lock(lock_);
  auto& stream = state(on);
  last_activity = now_ms();
  join(stream.clock, host);
  if (stream.clock.size() <= stream.number) stream.clock.resize(stream.number + 1);
  task.number = stream.clock[stream.number] = ++stream.issued;
  if (task.kind == Task::kWait && counts) join(stream.clock, task.recording->clock);
  if (task.kind == Task::kRecord) task.recording->stream = stream.number, task.recording->number = task.number, task.recording->clock = stream.clock;
  if (operation) races.access(operation, stream.number, task.number, stream.clock);
  Stamp stamp{stream.number, task.number, operation, 0};
  stream.queue.push_back(std::move(task));
  queued++;
  if (config.mode == Mode::kEager) {
    run_all_that_can(lock);
  } else if (queued > kLongQueue && !executing) {
    Executing now;
    for (int i = 0; i < 200 && run_one(lock, nullptr, kPatience); i++) {}
  }
  return stamp;
}

uint32_t add_stream(c10::DeviceIndex device, bool is_default) {
  uint32_t number = streams.size();
  streams.push_back(std::make_unique<StreamState>());
  streams.back()->number = number, streams.back()->device = device, streams.back()->is_default = is_default;
  return number;
}

}  // namespace

// ---- the device's life

void configure(const Config& given, uint64_t seed) {
  Lock lock(lock_);
  config = given;
  random_order.seed(seed);
}

void start_scheduler(int count) {
  devices = count;
  for (int i = 0; i < count; i++) add_stream(i, true);
  for (int i = 0; i < count; i++)
    for (bool high : {false, true})
      for (int n = 0; n < kPool; n++) pools[{i, high}].push_back(add_stream(i, false));
  std::thread([] { fresh_thread = new at::ThreadLocalState(); }).join();
  watchdog = std::thread(watch);
}

void stop_scheduler() {
  stopping = true;
  WithoutGil now;
  if (watchdog.joinable()) watchdog.join();
}

bool is_stopping() { return stopping; }

// ---- streams: the default streams come first, whose id is 0 in torch

int device_count() { return devices; }

uint32_t stream_number(c10::Stream stream) {
  size_t number = stream.id() == 0 ? stream.device_index() : stream.id();
  TORCH_CHECK(number < streams.size() && streams[number]->device == stream.device_index(), "late: there is no ", stream);
  return number;
}

c10::Stream stream_of(uint32_t number) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kLate, streams[number]->device), streams[number]->is_default ? 0 : number);
}

c10::Stream pooled_stream(c10::DeviceIndex device, bool high_priority) {
  Lock lock(lock_);
  auto key = std::make_pair(device, high_priority);
  return stream_of(pools.at(key)[given[key]++ % kPool]);
}

std::string stream_name(uint32_t number) {
  std::string device = "late:" + std::to_string(streams[number]->device);
  return streams[number]->is_default ? "the default stream of " + device : "stream " + std::to_string(number) + " of " + device;
}

// ---- launching

Stamp launch(c10::Stream stream, std::string name, const Accesses& accesses, std::function<void()> run, std::shared_ptr<void> keeps) {
  return enqueue(stream, {Task::kKernel, std::move(name), 0, std::move(run), nullptr, nullptr, std::move(keeps)}, &accesses);
}

void communicate(c10::Stream stream, std::string name, const Accesses& accesses, TransferPtr transfer, std::shared_ptr<void> keeps) {
  enqueue(stream, {Task::kTransfer, std::move(name), 0, nullptr, nullptr, std::move(transfer), std::move(keeps)}, &accesses);
}

void end(const TransferPtr& transfer, const std::string& error) {
  Lock lock(lock_);
  if (transfer->ended) return;
  transfer->ended = true, transfer->error = error;
  changed.notify_all();
}

RecordingPtr record(c10::Stream stream) {
  auto recording = std::make_shared<Recording>();
  enqueue(stream, {Task::kRecord, "an event", 0, nullptr, recording}, nullptr);
  return recording;
}

void wait(c10::Stream stream, const RecordingPtr& recording, bool counts) {
  if (recording) enqueue(stream, {Task::kWait, "a wait", 0, nullptr, recording}, nullptr, counts);
}

// ---- the host waits

static void reach(const RecordingPtr& recording) {
  WithoutGil now;
  Lock lock(lock_);
  last_activity = now_ms();
  run_until(lock, [&] { return recording->done; }, streams[recording->stream].get());
  host_learns(recording->clock);
  raise_failure(lock);
}

bool query(const RecordingPtr& recording, int& queries) {
  if (!recording) return true;
  {
    Lock lock(lock_);
    last_activity = now_ms();
    if (recording->done) {
      host_learns(recording->clock);
      return true;
    }
    if (++queries <= config.queries) return false;
    queries = 0;
  }
  reach(recording);  // not a wait of the program, which only asked
  return true;
}

bool query(c10::Stream stream) {
  {
    Lock lock(lock_);
    auto& asked = state(stream);
    if (asked.finished >= asked.issued) {
      host_learns(Clock(asked.clock));
      return true;
    }
    if (++asked.queries <= config.queries) return false;
    asked.queries = 0;
  }
  synchronize(stream);
  return true;
}

void synchronize(const RecordingPtr& recording) {
  if (!recording) return;
  {
    Lock lock(lock_);
    waits += !recording->done;
  }
  reach(recording);
}

bool synchronize_within(const RecordingPtr& recording, int64_t limit_ms) {
  WithoutGil now;
  Lock lock(lock_);
  int64_t end = now_ms() + limit_ms;
  last_activity = now_ms();
  waits++;
  run_until(lock, [&] { return recording->done || now_ms() > end; }, streams[recording->stream].get());
  if (!recording->done) return false;
  host_learns(recording->clock);
  raise_failure(lock);
  return true;
}

void synchronize(c10::Stream given) {
  WithoutGil now;
  Lock lock(lock_);
  last_activity = now_ms();
  waits++;
  auto& stream = state(given);
  uint64_t number = stream.issued;
  Clock clock = stream.clock;
  run_until(lock, [&] { return stream.finished >= number; }, &stream);
  host_learns(clock);
  raise_failure(lock);
}

void synchronize_device(c10::DeviceIndex device) {
  WithoutGil now;
  Lock lock(lock_);
  last_activity = now_ms();
  waits++;
  Clock clock;
  std::vector<std::pair<StreamState*, uint64_t>> goals;
  for (auto& stream : streams)
    if (device < 0 || stream->device == device) goals.push_back({stream.get(), stream->issued}), join(clock, stream->clock);
  for (auto [stream, number] : goals) run_until(lock, [&, stream = stream, number = number] { return stream->finished >= number; }, stream);
  host_learns(clock);
  raise_failure(lock);
}

void count_host_wait() {
  Lock lock(lock_);
  waits++;
}

uint64_t host_waits() {
  Lock lock(lock_);
  return waits;
}

// ---- for the allocators

std::mutex& scheduler_lock() { return lock_; }
Detector& detector() { return races; }
uint64_t issued(uint32_t stream) { return streams[stream]->issued; }
uint64_t finished(uint32_t stream) { return streams[stream]->finished; }
bool host_knows(uint32_t stream, uint64_t number) { return time_of(host, stream) >= number; }
void when_host_learns(std::function<void()> call) { learned = std::move(call); }

}  // namespace late
