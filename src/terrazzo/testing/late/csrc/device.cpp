#include "device.h"
#include "memory.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace late {
namespace {

thread_local c10::DeviceIndex device_now = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> streams_now;

c10::DeviceIndex or_current(c10::DeviceIndex device) { return device < 0 ? device_now : device; }

// ---- random numbers: a seed and an offset, as on CUDA

struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kLate, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == at::kByte, "late: the state of a generator is 16 bytes");
    auto* numbers = (const uint64_t*)state.data();
    seed_ = numbers[0], offset_ = numbers[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto* numbers = (uint64_t*)state.mutable_data_ptr();
    numbers[0] = seed_, numbers[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
};

const std::vector<at::Generator>& default_generators() {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < device_count(); i++) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all;
}

// ---- what torch calls

struct Event {
  RecordingPtr last;
  int queries = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kLate; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    set_current_device(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {kLate, device_now}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_now = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override { return current_stream(or_current(device.index())); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kLate, or_current(device.index())));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high) const override {
    return pooled_stream(or_current(device.index()), is_high);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return pooled_stream(or_current(device.index()), priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override { return query(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize_device(device); }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device, c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "Event device index ", (int)device,
        " does not match recording stream's device index ", (int)stream.device_index(), ".");
    if (!*event) *event = new Event;
    *(Event*)*event = {late::record(stream)};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait(stream, ((Event*)event)->last);
  }
  bool queryEvent(void* event) const override { return !event || query(((Event*)event)->last, ((Event*)event)->queries); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(((Event*)event)->last);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    return ((Event*)second)->last->time_ms - ((Event*)first)->last->time_ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override { record_on_stream(data, stream); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = device_now;
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? device_now : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(kLate); }
  at::Device getDeviceFromPtr(void*) const override { return {kLate, device_now}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generators()[or_current(device)];
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return at::make_generator<Generator>(or_current(device)); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override { resize_storage(storage, size); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

void start_device(int count) {
  start_scheduler(count);
  start_memory();
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

c10::DeviceIndex current_device() { return device_now; }

void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "late: there is no device ", (int)device, ": there are ", device_count());
  device_now = device;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  auto found = streams_now.find(device);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kLate, device), found == streams_now.end() ? 0 : found->second);
}

c10::Stream exchange_stream(c10::Stream stream) {
  auto before = current_stream(stream.device_index());
  streams_now[stream.device_index()] = stream.id();
  return before;
}

uint64_t draw_seed(const std::optional<at::Generator>& given, c10::DeviceIndex device) {
  auto generator = given.has_value() && given->defined() ? *given : default_generators()[device];
  std::lock_guard<std::mutex> lock(generator.mutex());
  uint64_t offset = generator.get_offset(), x = generator.current_seed() * 0x9E3779B97F4A7C15ull + offset + 1;
  generator.set_offset(offset + 4);
  x ^= x >> 31, x *= 0xBF58476D1CE4E5B9ull, x ^= x >> 29;  // neighbouring seeds give unlike numbers
  return x & 0x7FFFFFFFFFFFFFFFull;
}

at::Generator default_generator(c10::DeviceIndex device) { return default_generators()[or_current(device)]; }

}  // namespace late
