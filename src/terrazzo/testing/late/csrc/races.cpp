#include "races.h"

#include <ATen/core/Tensor.h>

namespace late {
namespace {

constexpr int64_t kMostRanges = 1024;   // a tensor of more pieces counts as one, with the gaps
constexpr size_t kMostReports = 200;

std::vector<Range> ranges_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  uintptr_t base = (uintptr_t)tensor.const_data_ptr();
  int64_t item = tensor.element_size();
  if (tensor.is_non_overlapping_and_dense()) return {{base, base + tensor.numel() * item}};
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size, the smallest stride first
  for (int64_t i = 0; i < tensor.dim(); i++)
    if (tensor.size(i) > 1 && tensor.stride(i) != 0) dims.push_back({tensor.stride(i), tensor.size(i)});
  std::sort(dims.begin(), dims.end());
  int64_t run = 1, pieces = 1, extent = 1;  // elements in a row without gaps; how many such rows
  size_t inner = 0;
  while (inner < dims.size() && dims[inner].first == run) run *= dims[inner++].second;
  extent = run;
  for (size_t i = inner; i < dims.size(); i++) pieces *= dims[i].second, extent += dims[i].first * (dims[i].second - 1);
  if (pieces > kMostRanges) return {{base, base + extent * item}};
  std::vector<int64_t> starts{0};
  for (size_t i = inner; i < dims.size(); i++) {
    std::vector<int64_t> more;
    for (int64_t k = 0; k < dims[i].second; k++)
      for (int64_t start : starts) more.push_back(start + k * dims[i].first);
    starts = std::move(more);
  }
  std::vector<Range> ranges;
  for (int64_t start : starts) ranges.push_back({base + start * item, base + (start + run) * item});
  return ranges;
}

}  // namespace

void Accesses::add(const at::Tensor& tensor, bool written) {
  operands.push_back({tensor.scalar_type(), tensor.sizes().vec(), written, ranges_of(tensor)});
}

void Accesses::add_bytes(uintptr_t begin, size_t size, bool written) {
  operands.push_back({c10::ScalarType::Byte, {(int64_t)size}, written, {{begin, begin + size}}});
}

void Detector::access(const std::shared_ptr<const Operation>& operation, uint32_t stream, uint64_t number, const Clock& clock) {
  // An operation may read and write one tensor: its own accesses are ordered, as they are of one stream.
  for (uint32_t i = 0; i < operation->operands.size(); i++)
    for (auto& range : operation->operands[i].ranges)
      touch(range, {stream, number, operation, i}, operation->operands[i].written, clock);
}

void Detector::split(uintptr_t at) {
  auto next = memory_.lower_bound(at);
  if (next == memory_.begin() || (next != memory_.end() && next->first == at)) return;
  auto before = std::prev(next);
  if (before->second.end <= at) return;
  Segment rest = before->second;
  before->second.end = at;
  memory_.emplace_hint(next, at, std::move(rest));
}

void Detector::touch(Range range, const Stamp& now, bool writes, const Clock& clock) {
  if (range.begin >= range.end) return;
  auto is_ordered = [&](const Stamp& before) {
    return !before.is_set() || before.stream == now.stream || time_of(clock, before.stream) >= before.number;
  };
  split(range.begin), split(range.end);
  uintptr_t at = range.begin;
  for (auto it = memory_.lower_bound(at); at < range.end; ++it) {
    if (it == memory_.end() || it->first > at) {
      uintptr_t end = it == memory_.end() ? range.end : std::min(it->first, range.end);
      it = memory_.emplace_hint(it, at, Segment{end, {}, {}});
    }
    Segment& segment = it->second;
    if (!is_ordered(segment.write)) report(segment.write, now, segment.end - at);
    if (writes) {
      for (auto& read : segment.reads)
        if (!is_ordered(read)) report(read, now, segment.end - at);
      segment.write = now;
      segment.reads.clear();
    } else {
      auto mine = std::find_if(segment.reads.begin(), segment.reads.end(), [&](auto& read) { return read.stream == now.stream; });
      if (mine == segment.reads.end()) segment.reads.push_back(now);
      else *mine = now;
    }
    at = segment.end;
  }
}

void Detector::past(Range range, const std::map<uint32_t, uint64_t>& tasks) {
  auto is_past = [&](const Stamp& stamp) {
    auto found = tasks.find(stamp.stream);
    return found != tasks.end() && stamp.number <= found->second;
  };
  split(range.begin), split(range.end);
  for (auto it = memory_.lower_bound(range.begin); it != memory_.end() && it->first < range.end; ++it) {
    auto& reads = it->second.reads;
    reads.erase(std::remove_if(reads.begin(), reads.end(), is_past), reads.end());
    if (is_past(it->second.write)) it->second.write = {};
  }
}

void Detector::forget(Range range) {
  split(range.begin), split(range.end);
  memory_.erase(memory_.lower_bound(range.begin), memory_.lower_bound(range.end));
}

void Detector::report(const Stamp& first, const Stamp& second, size_t bytes) {
  std::string key;
  for (auto* stamp : {&first, &second}) {
    auto& operation = *stamp->operation;
    key += operation.name + "|" + std::to_string(stamp->stream) + "|" + operation.site->node;
    for (auto& frame : operation.site->frames)
      key += "|" + std::to_string((uintptr_t)frame.code) + "+" + std::to_string(frame.instruction);
    key += "\n";
  }
  if (found_.size() < kMostReports && known_.insert(key).second) found_.push_back({first, second, bytes});
}

std::vector<Race> Detector::take() {
  std::vector<Race> taken;
  std::swap(taken, found_);
  known_.clear();
  return taken;
}

}  // namespace late
