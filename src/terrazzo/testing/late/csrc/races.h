// The race detector: which task last wrote each byte, and which have read it since.
//
// Tasks are compared when they are enqueued, by vector clocks, not when they run. So what is found does not depend on the
// schedule: two accesses that nothing orders are a race, even if they happened to run in the right order.
#pragma once

#include "clock.h"
#include "site.h"

#include <c10/core/ScalarType.h>

#include <map>
#include <set>

namespace at {
class Tensor;
}

namespace late {

struct Range {
  uintptr_t begin, end;
};

struct Operand {  // a tensor that an operation reads or writes
  c10::ScalarType dtype;
  std::vector<int64_t> sizes;
  bool written;
  std::vector<Range> ranges;
};

// What an operation reads and writes.
struct Accesses {
  std::vector<Operand> operands;
  void read(const at::Tensor& tensor) { add(tensor, false); }
  void write(const at::Tensor& tensor) { add(tensor, true); }
  void add(const at::Tensor&, bool written);
  void add_bytes(uintptr_t begin, size_t size, bool written);
};

struct Operation {
  std::string name;
  SitePtr site;
  std::vector<Operand> operands;
};

// One access of one operation, at a point of its stream.
struct Stamp {
  uint32_t stream = 0;
  uint64_t number = 0;  // of the task, in its stream
  std::shared_ptr<const Operation> operation;
  uint32_t operand = 0;
  bool is_set() const { return operation != nullptr; }
};

struct Race {
  Stamp first, second;
  size_t bytes;
};

class Detector {  // its users hold the scheduler's lock
 public:
  void access(const std::shared_ptr<const Operation>&, uint32_t stream, uint64_t number, const Clock&);
  // The allocator has seen that these streams have run these tasks: what they did to this memory is past.
  void past(Range, const std::map<uint32_t, uint64_t>& tasks);
  void forget(Range);
  std::vector<Race> take();

 private:
  struct Segment {
    uintptr_t end;
    Stamp write;
    std::vector<Stamp> reads;
  };
  std::map<uintptr_t, Segment> memory_;  // by its first byte
  std::vector<Race> found_;
  std::set<std::string> known_;  // each pair of places is reported once

  void split(uintptr_t at);
  void touch(Range, const Stamp&, bool writes, const Clock&);
  void report(const Stamp& first, const Stamp& second, size_t bytes);
};

}  // namespace late
