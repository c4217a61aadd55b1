// What Python sees of the device.
#include "device.h"
#include "group.h"
#include "memory.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;
using namespace late;

namespace {


py::dict access_of(const Stamp& stamp) {
  auto& operand = stamp.operation->operands[stamp.operand];
  py::dict access;
  access["operation"] = stamp.operation->name;
  access["writes"] = operand.written;
  access["dtype"] = c10::toString(operand.dtype);
  access["sizes"] = operand.sizes;
  access["stream"] = stream_name(stamp.stream);
  access["lines"] = lines_of(*stamp.operation->site);
  return access;
}

py::list take_races() {
  std::vector<Race> races;
  {
    std::lock_guard<std::mutex> lock(scheduler_lock());
    races = detector().take();
  }
  py::list found;
  for (auto& race : races) found.append(py::make_tuple(access_of(race.first), access_of(race.second), race.bytes));
  return found;
}

py::list take_host_faults() {
  py::list found;
  for (auto& fault : take_faults())
    found.append(py::make_tuple(
        is_pinned((void*)fault.address), fault.copy.is_set() ? py::object(access_of(fault.copy)) : py::none(), fault.stack));
  return found;
}

Mode mode_of(const std::string& name) {
  static const std::map<std::string, Mode> modes{{"eager", Mode::kEager}, {"needed", Mode::kNeeded}, {"random", Mode::kRandom},
      {"default_first", Mode::kDefaultFirst}, {"default_last", Mode::kDefaultLast}};
  return modes.at(name);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", &start_device);
  m.def("stop", &stop_scheduler);
  m.def("configure", [](const std::string& mode, uint64_t seed, int idle_ms, int queries, double hang_s) {
    configure({mode_of(mode), idle_ms, queries, hang_s}, seed);
  });
  m.def("take_races", &take_races);
  m.def("take_host_faults", &take_host_faults);
  m.def("protect_again", &protect_again);
  m.def("host_waits", &host_waits);

  m.def("device_count", &device_count);
  m.def("current_device", [] { return (int)current_device(); });
  m.def("set_device", [](int device) { set_current_device(device); });
  m.def("synchronize", [](int device) { synchronize_device(device); });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("current_stream", [](int device) { return current_stream(device).id(); });
  m.def("set_stream", [](int64_t id, int device) {
    exchange_stream(c10::Stream(c10::Stream::UNSAFE, c10::Device(kLate, device), id));
  });

  m.def("memory_stats", [](int device) {
    auto counts = memory_stats(device);
    return py::dict(py::arg("allocated") = counts.allocated, py::arg("peak") = counts.peak, py::arg("reserved") = counts.reserved,
        py::arg("allocations") = counts.allocations);
  });
  m.def("reset_peak", [](int device) { reset_peak(device); });
  m.def("empty_cache", [] {
    py::gil_scoped_release release;
    empty_cache();
  });

  bind_group(m);
}
