// Vector clocks: for each stream, how many of its tasks are known to have run before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace late {

using Clock = std::vector<uint64_t>;  // by the stream's number

inline uint64_t time_of(const Clock& clock, uint32_t stream) { return stream < clock.size() ? clock[stream] : 0; }

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}

}  // namespace late
