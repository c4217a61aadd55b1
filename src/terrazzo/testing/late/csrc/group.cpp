#include "group.h"
#include "device.h"
#include "memory.h"
#include "operators.h"

#include <ATen/ATen.h>

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <deque>
#include <thread>

namespace py = pybind11;

namespace late {
namespace {

using at::Tensor;
using c10d::Backend;
using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<Tensor>;
using Splits = std::vector<int64_t>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// ---- bytes and numbers as gloo takes them: dense memory in one dim

Tensor flat(const Tensor& tensor, at::ScalarType dtype, int64_t count) {
  void* data = tensor.numel() ? for_tasks(tensor.const_data_ptr()) : nullptr;
  c10::InferenceMode outside(false);  // gloo writes to it in threads of its own, which are in no such mode
  return at::from_blob(data, {count}, at::TensorOptions().dtype(dtype).device(at::kCPU));
}

Tensor bytes_of(const Tensor& tensor) { return flat(tensor, at::kByte, tensor.numel() * tensor.element_size()); }

Tensors bytes_of(const Tensors& tensors) {
  Tensors all;
  for (auto& tensor : tensors) all.push_back(bytes_of(tensor));
  return all;
}

Tensor numbers_of(const Tensor& tensor) {
  auto dtype = tensor.scalar_type();
  TORCH_CHECK(!c10::isFloat8Type(dtype), "late: cannot reduce ", dtype);
  if (dtype == at::kBool) return flat(tensor, at::kByte, tensor.numel());
  if (c10::isComplexType(dtype)) return flat(tensor, c10::toRealValueType(dtype), tensor.numel() * 2);
  return flat(tensor, dtype, tensor.numel());
}

Splits sizes_of(const Tensors& tensors) {
  Splits sizes;
  for (auto& tensor : tensors) sizes.push_back(tensor.numel());
  return sizes;
}

// Each rank sends a part to each other: what gloo has no form for is made of this.
struct Exchange {
  Tensor sent, received;
  Splits sent_sizes, received_sizes;
  std::vector<WorkPtr> start(Backend& gloo) const {
    Tensor to = received, from = sent;
    Splits to_sizes = received_sizes, from_sizes = sent_sizes;  // gloo takes them
    return {gloo.alltoall_base(to, from, to_sizes, from_sizes, {})};
  }
};

struct Reduction {
  ReduceOp op;
  double before = 1, after = 1;  // factors
  Tensor factor;                 // the same as a tensor, as PREMUL_SUM may take it

  Reduction(const ReduceOp& given, at::ScalarType dtype, int size) : op(given) {
    if (given.op_ == ReduceOp::AVG) {
      op = ReduceOp::SUM, after = 1.0 / size;
    } else if (given.op_ == ReduceOp::PREMUL_SUM) {
      auto* supplement = static_cast<c10d::PreMulSumSupplement*>(given.supplement_.get());
      op = ReduceOp::SUM;
      if (supplement->tensor_factor.defined()) factor = for_tasks_checked(supplement->tensor_factor);
      else before = supplement->double_factor;
    }
    if (dtype == at::kBool && op.op_ == ReduceOp::SUM) op = ReduceOp::MAX;
    if (dtype == at::kBool && op.op_ == ReduceOp::PRODUCT) op = ReduceOp::MIN;
  }
  static Tensor for_tasks_checked(const Tensor& factor) {
    TORCH_CHECK(is_late(factor), "late: the factor of PREMUL_SUM must be a number or a tensor of the device, not of ", factor.device());
    return late::for_tasks(factor);
  }
  void scale_before(Tensor& numbers) const {
    if (factor.defined()) numbers.mul_(factor);
    else if (before != 1) numbers.mul_(before);
  }
  void scale_after(Tensor& numbers) const {
    if (after == 1) return;
    if (at::isIntegralType(numbers.scalar_type(), true)) numbers.floor_divide_((int64_t)std::lround(1 / after));
    else numbers.mul_(after);
  }
  Tensor over_ranks(const Tensor& rows) const {  // in float32 for half types, as NCCL accumulates
    bool is_half = rows.scalar_type() == at::kBFloat16 || rows.scalar_type() == at::kHalf;
    Tensor x = is_half ? rows.to(at::kFloat) : rows;
    switch (op.op_) {
      case ReduceOp::SUM: x = x.sum(0, false, x.scalar_type()); break;
      case ReduceOp::PRODUCT: x = x.prod(0, false, x.scalar_type()); break;
      case ReduceOp::MAX: x = x.amax(0); break;
      case ReduceOp::MIN: x = x.amin(0); break;
      default: TORCH_CHECK(false, "late: cannot reduce with operation ", (int)op.op_);
    }
    scale_after(x);
    return x;
  }
};

// ---- where communication runs

// A thread that does one thing after another. Gloo's collectives block until the other ranks take part; tasks must not.
class Worker {
 public:
  Worker() : state_(std::make_shared<State>()) {}
  ~Worker() {
    std::lock_guard<std::mutex> lock(state_->lock);
    state_->is_closed = true;
    state_->changed.notify_all();  // the thread ends by itself: it may be in a collective that other ranks never enter
  }
  void post(std::function<void()> job) {
    std::lock_guard<std::mutex> lock(state_->lock);
    if (!state_->has_thread) state_->has_thread = true, std::thread(run, state_).detach();
    state_->jobs.push_back(std::move(job));
    state_->changed.notify_all();
  }

 private:
  struct State {
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> jobs;
    bool is_closed = false, has_thread = false;
  };
  std::shared_ptr<State> state_;
  static void run(std::shared_ptr<State> state) {
    std::unique_lock<std::mutex> lock(state->lock);
    while (true) {
      state->changed.wait(lock, [&] { return state->is_closed || !state->jobs.empty(); });
      if (state->jobs.empty()) return;
      auto job = std::move(state->jobs.front());
      state->jobs.pop_front();
      lock.unlock();
      job();
      job = nullptr;
      lock.lock();
    }
  }
};

// What runs one after another: the collectives of a group, or what two of its ranks send each other.
struct Lane {
  std::shared_ptr<Worker> worker = std::make_shared<Worker>();
  std::map<c10::DeviceIndex, c10::Stream> streams;
  std::map<c10::DeviceIndex, RecordingPtr> last;

  c10::Stream stream(c10::DeviceIndex device) {
    auto found = streams.find(device);
    if (found == streams.end()) found = streams.emplace(device, pooled_stream(device, true)).first;
    return found->second;
  }
};

struct Request {
  OpType type;
  const char* name;
  Tensors inputs, outputs;
  bool is_async;
  std::function<std::vector<WorkPtr>(Backend&)> start;
  std::function<void()> finish;
};

// Whether the group still works: one failure ends it, as an abort of NCCL's communicator does.
struct Health {
  std::mutex lock;
  std::string error;
  std::vector<std::weak_ptr<Transfer>> running;

  std::string what() {
    std::lock_guard<std::mutex> guard(lock);
    return error;
  }
  void start(const TransferPtr& transfer) {
    std::lock_guard<std::mutex> guard(lock);
    running.erase(std::remove_if(running.begin(), running.end(), [](auto& each) { return each.expired(); }), running.end());
    running.push_back(transfer);
  }
  void abort(const std::string& why) {
    std::vector<std::weak_ptr<Transfer>> all;
    {
      std::lock_guard<std::mutex> guard(lock);
      if (error.empty()) error = why;
      std::swap(all, running);
    }
    for (auto& each : all)
      if (auto transfer = each.lock()) end(transfer, why);
  }
};

// ---- works

struct LateWork final : c10d::Work {
  c10::Device device{kLate, 0};
  std::optional<c10::Stream> stream;
  RecordingPtr done;
  std::shared_ptr<Tensors> kept;  // as NCCL's works: inputs and outputs live until the caller waits
  Tensors outputs;
  std::shared_ptr<Health> health;
  int queries = 0;
  bool host_waits = false;

  LateWork(int rank, OpType type) : Work(rank, type) {}
  bool isCompleted() override { return query(done, queries); }
  bool isSuccess() const override { return !health || health->what().empty(); }
  std::exception_ptr exception() const override {
    return isSuccess() ? nullptr : std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, health->what()));
  }
  void synchronize() override {
    if (done) late::wait(current_stream(device.index()), done);
    if (kept) kept->clear();
  }
  // Blocks the current stream. It blocks the host only if a time limit is given, or for a barrier.
  bool wait(std::chrono::milliseconds limit = kNoTimeout) override {
    synchronize();
    if (limit != kNoTimeout && done && !synchronize_within(done, limit.count())) {
      health->abort("a wait of " + std::to_string(limit.count()) + " ms for it ended");
      TORCH_CHECK_WITH(DistBackendError, false, "late: the collective was not done within ", limit.count(), " ms");
    }
    if (host_waits) late::synchronize(done);
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  void abort() override { health->abort("the work was aborted"); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    auto before = exchange_stream(stream.value_or(current_stream(device.index())));  // waits for the future are for this stream
    future->markCompleted(c10::IValue(outputs));
    exchange_stream(before);
    return future;
  }
};

// ---- the backend

// Python can copy these, as it can NCCL's: torch gives a split a copy of its parent's.
struct LateOptions final : Backend::Options {
  using Backend::Options::Options;
  // Overrides a function of torch 2.14, which 2.13 does not have.
  c10::intrusive_ptr<Backend::Options> clone() const { return c10::make_intrusive<LateOptions>(*this); }
};

struct LateBackend final : Backend {
  c10::intrusive_ptr<Backend> gloo;
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<Options> options;
  std::string name;
  std::shared_ptr<Health> health = std::make_shared<Health>();
  Lane collectives;
  std::map<int, Lane> pairs;  // by the other rank
  bool coalesces = false;
  std::vector<Request> coalesced;
  uint64_t sequence = 0, splits = 0;

  // `name` is what programs see as the backend's name: "late", or "nccl" for programs that do more with NCCL.
  LateBackend(c10::intrusive_ptr<Backend> gloo, c10::intrusive_ptr<c10d::Store> store, std::string name, std::string group,
      std::vector<uint64_t> ranks, std::chrono::milliseconds timeout)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(gloo), store(std::move(store)),
        options(c10::make_intrusive<LateOptions>(name, timeout)), name(name) {
    options->group_name = std::move(group), options->global_ranks_in_group = std::move(ranks);
  }

  const std::string getBackendName() const override { return name; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence; }
  void setTimeout(std::chrono::milliseconds timeout) override { options->timeout = timeout, gloo->setTimeout(timeout); }
  void abort() override { health->abort("the group was aborted"); }
  c10d::ErrorType getError() override { return health->what().empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR; }

  // Wait until all ranks of the group are here: what creates a group by splitting this one has to be called by all.
  void meet_for_split() {
    std::string key = "split " + std::to_string(++splits);
    if (store->add(key, 1) == size_) store->set(key + " done", "");
    try {
      store->wait({key + " done"}, options->timeout);
    } catch (const std::exception&) {
      TORCH_CHECK_WITH(DistBackendError, false, "late: as the default group is bound to a device, a new group is a split of it, which all ",
          size_, " ranks of the default group have to make, members or not; only ", store->add(key, 0), " did within ",
          options->timeout.count(), " ms: call new_group on all ranks, and without use_local_synchronization");
    }
  }

  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& opts) override {
    meet_for_split();
    auto here = std::find(ranks.begin(), ranks.end(), rank_);
    if (here == ranks.end()) return nullptr;
    std::vector<uint64_t> global;
    for (int rank : ranks) global.push_back(options->global_ranks_in_group.at(rank));
    c10::intrusive_ptr<c10d::Store> part = c10::make_intrusive<c10d::PrefixStore>(opts->group_name + "/late", store->clone());
    py::gil_scoped_acquire gil;
    auto gloo = py::module_::import("torch.distributed").attr("ProcessGroupGloo")(part, int(here - ranks.begin()), int(ranks.size()), opts->timeout);
    return c10::make_intrusive<LateBackend>(gloo.cast<c10::intrusive_ptr<Backend>>(), part, name, opts->group_name, global, opts->timeout);
  }

  // ---- running

  void startCoalescing() override { coalesces = true; }

  WorkPtr endCoalescing() override {
    coalesces = false;
    std::vector<Request> batch;
    std::swap(batch, coalesced);
    return batch.empty() ? WorkPtr() : start(std::move(batch), collectives);
  }

  WorkPtr run(Request request) { return run(std::move(request), collectives); }

  WorkPtr run(Request request, Lane& lane) {
    std::vector<Request> batch;
    batch.push_back(std::move(request));
    return run(std::move(batch), lane);
  }

  // Between startCoalescing and endCoalescing requests are only noted. The work of endCoalescing is the one to wait for.
  WorkPtr run(std::vector<Request> batch, Lane& lane) {
    if (!coalesces) return start(std::move(batch), lane);
    auto type = batch.back().type;
    bool is_async = batch.back().is_async;
    for (auto& request : batch) coalesced.push_back(std::move(request));
    return is_async ? WorkPtr(c10::make_intrusive<LateWork>(rank_, type)) : WorkPtr();
  }

  static c10::Device check(const std::vector<Request>& batch) {
    std::optional<c10::Device> device;
    for (auto& request : batch)
      for (auto* tensors : {&request.inputs, &request.outputs})
        for (auto& tensor : *tensors) {
          TORCH_CHECK_VALUE(is_late(tensor) && !tensor.is_sparse(), "Tensors must be of the device late and dense, not of ", tensor.device(), " (", request.name, ")");
          TORCH_CHECK_VALUE(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous (", request.name, ")");
          if (!device) device = tensor.device();
          TORCH_CHECK_VALUE(tensor.device() == *device, "Tensors must be on one device, not on ", *device, " and ", tensor.device(), " (", request.name, ")");
        }
    return device.value_or(c10::Device(kLate, current_device()));
  }

  // Several requests at once are one: they are started together, so that none waits for another.
  WorkPtr start(std::vector<Request> batch, Lane& lane) {
    auto device = check(batch);
    bool is_async = batch.back().is_async;
    auto work = c10::make_intrusive<LateWork>(rank_, batch.back().type);
    auto now = current_stream(device.index()), on = is_async ? lane.stream(device.index()) : now;
    auto kept = is_async ? std::make_shared<Tensors>() : nullptr;
    Accesses accesses;
    std::string what = batch.size() == 1 ? batch[0].name : "coalesced " + std::string(batch[0].name);
    for (auto& request : batch) {
      for (auto& tensor : request.inputs) accesses.read(tensor);
      for (auto& tensor : request.outputs) accesses.write(tensor);
      for (auto* tensors : {&request.inputs, &request.outputs}) {
        if (kept) kept->insert(kept->end(), tensors->begin(), tensors->end());
      }
      work->outputs.insert(work->outputs.end(), request.outputs.begin(), request.outputs.end());
      request.inputs.clear(), request.outputs.clear();  // the memory's life is the stream's, not the request's
    }
    if (is_async) wait(on, record(now));
    auto& last = lane.last[device.index()];
    if (last) wait(on, last, false);  // NCCL serialises a communicator's collectives, but no program may count on that

    auto transfer = std::make_shared<Transfer>();
    std::string title = what + " (number " + std::to_string(++sequence) + " of group '" + options->group_name + "', rank " + std::to_string(rank_) + ")";
    transfer->begin = [gloo = gloo, health = health, worker = lane.worker, transfer, title, batch = std::make_shared<std::vector<Request>>(std::move(batch))] {
      health->start(transfer);
      worker->post([gloo, health, transfer, title, batch] {
        std::string error = health->what();
        if (error.empty()) {
          try {
            std::vector<WorkPtr> works;
            for (auto& request : *batch)
              for (auto& each : request.start(*gloo)) works.push_back(each);
            for (auto& each : works) each->wait();
            if (health->what().empty())
              for (auto& request : *batch)
                if (request.finish) request.finish();
          } catch (const c10::Error& e) {
            error = title + ": " + e.what_without_backtrace();
            health->abort(error);
          } catch (const std::exception& e) {
            error = title + ": " + std::string(e.what()).substr(0, 500);
            health->abort(error);
          }
        }
        end(transfer, error);
      });
    };
    communicate(on, what, accesses, transfer, kept);
    work->device = device, work->stream = on, work->kept = kept, work->health = health;
    last = work->done = record(on);
    return is_async ? WorkPtr(work) : WorkPtr();  // NCCL gives no work for what is on the current stream
  }

  // ---- collectives

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return run({OpType::BROADCAST, "broadcast", o.rootRank == rank_ ? tensors : Tensors{}, o.rootRank == rank_ ? Tensors{} : tensors, o.asyncOp,
        [all = bytes_of(tensors), o](Backend& gloo) mutable { return std::vector<WorkPtr>{gloo.broadcast(all, o)}; }, nullptr});
  }

  Request allreduce_request(Tensor& tensor, const ReduceOp& op, bool is_async) {
    Reduction reduction(op, tensor.scalar_type(), size_);
    Tensors numbers{numbers_of(tensor)};
    c10d::AllreduceOptions options;
    options.reduceOp = reduction.op;
    return {OpType::ALLREDUCE, "all_reduce", {tensor}, {tensor}, is_async,
        [numbers, reduction, options](Backend& gloo) mutable {
          reduction.scale_before(numbers[0]);
          return std::vector<WorkPtr>{gloo.allreduce(numbers, options)};
        },
        [numbers, reduction]() mutable { reduction.scale_after(numbers[0]); }};
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    TORCH_CHECK(tensors.size() == 1, "late: all_reduce takes one tensor");
    return run(allreduce_request(tensors[0], o.reduceOp, o.asyncOp));
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    std::vector<Request> batch;
    for (auto& tensor : tensors) batch.push_back(allreduce_request(tensor, o.reduceOp, o.asyncOp));
    return run(std::move(batch), collectives);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    // In a copy: gloo uses the memory of ranks that get no result.
    Reduction reduction(o.reduceOp, tensors[0].scalar_type(), size_);
    auto copy = std::make_shared<Tensors>();
    auto options = o;
    options.reduceOp = reduction.op;
    bool is_root = o.rootRank == rank_;
    return run({OpType::REDUCE, "reduce", tensors, is_root ? tensors : Tensors{}, o.asyncOp,
        [numbers = numbers_of(tensors[0]), copy, reduction, options](Backend& gloo) mutable {
          *copy = {numbers.clone()};
          reduction.scale_before((*copy)[0]);
          return std::vector<WorkPtr>{gloo.reduce(*copy, options)};
        },
        [numbers = numbers_of(tensors[0]), copy, reduction, is_root]() mutable {
          if (is_root) reduction.scale_after((*copy)[0]), numbers.copy_((*copy)[0]);
        }});
  }

  Request gathered_request(OpType type, const char* name, const Tensor& output, const Tensor& input, bool is_async) {
    TORCH_CHECK_VALUE(output.numel() == input.numel() * size_, "output tensor size must be equal to world_size times input tensor size");
    TORCH_CHECK_TYPE(output.dtype() == input.dtype(), "output tensor must have the same type as input tensor");
    return {type, name, {input}, {output}, is_async, [out = bytes_of(output), in = bytes_of(input)](Backend& gloo) mutable {
      Tensor copy = in.clone();  // the input may be a part of the output
      return std::vector<WorkPtr>{gloo._allgather_base(out, copy)};
    }, nullptr};
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& o) override {
    return run(gathered_request(OpType::_ALLGATHER_BASE, "all_gather_into_tensor", output, input, o.asyncOp));
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    std::vector<Request> batch;
    for (size_t i = 0; i < outputs.size(); i++)
      batch.push_back(gathered_request(OpType::COALESCED, "all_gather_into_tensor", outputs[i], inputs[i], o.asyncOp));
    return run(std::move(batch), collectives);
  }

  // The lists may have tensors of different sizes.
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    auto exchange = std::make_shared<Exchange>();
    Tensors outs = bytes_of(outputs[0]);
    return run({OpType::ALLGATHER, "all_gather", inputs, outputs[0], o.asyncOp,
        [exchange, outs, in = bytes_of(inputs[0]), n = size_](Backend& gloo) {
          *exchange = {in.repeat({n}), at::empty({at::cat(outs).numel()}, at::kByte), Splits(n, in.numel()), sizes_of(outs)};
          return exchange->start(gloo);
        },
        [exchange, outs]() mutable {
          auto parts = exchange->received.split_with_sizes(exchange->received_sizes);
          for (size_t i = 0; i < outs.size(); i++) outs[i].copy_(parts[i]);
        }});
  }

  Request scattered_request(OpType type, const char* name, const Tensor& output, const Tensors& inputs, const Tensors& parts, const ReduceOp& op, bool is_async) {
    auto exchange = std::make_shared<Exchange>();
    Reduction reduction(op, output.scalar_type(), size_);
    return {type, name, inputs, {output}, is_async,
        [exchange, parts, reduction, rank = rank_](Backend& gloo) mutable {
          Tensor sent = at::cat(parts);
          reduction.scale_before(sent);
          int64_t mine = parts[rank].numel(), n = parts.size();
          *exchange = {sent, at::empty({mine * n}, sent.options()), sizes_of(parts), Splits(n, mine)};
          return exchange->start(gloo);
        },
        [exchange, reduction, result = numbers_of(output), n = size_]() mutable { result.copy_(reduction.over_ranks(exchange->received.view({n, -1}))); }};
  }

  Request scattered_request(OpType type, const Tensor& output, const Tensor& input, const ReduceOp& op, bool is_async) {
    TORCH_CHECK_VALUE(input.numel() == output.numel() * size_, "input tensor must be the same size as output size times world size");
    TORCH_CHECK_TYPE(output.dtype() == input.dtype(), "input tensor must be the same type as the output tensor.");
    return scattered_request(type, "reduce_scatter_tensor", output, {input}, numbers_of(input).chunk(size_), op, is_async);
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& o) override {
    return run(scattered_request(OpType::_REDUCE_SCATTER_BASE, output, input, o.reduceOp, o.asyncOp));
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& o) override {
    std::vector<Request> batch;
    for (size_t i = 0; i < outputs.size(); i++) batch.push_back(scattered_request(OpType::COALESCED, outputs[i], inputs[i], o.reduceOp, o.asyncOp));
    return run(std::move(batch), collectives);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& o) override {
    Tensors parts;
    for (auto& each : inputs[0]) parts.push_back(numbers_of(each));
    return run(scattered_request(OpType::REDUCE_SCATTER, "reduce_scatter", outputs[0], inputs[0], parts, o.reduceOp, o.asyncOp));
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, Splits& output_sizes, Splits& input_sizes, const c10d::AllToAllOptions& o) override {
    auto in_bytes = [](const Tensor& tensor, Splits sizes) {
      int64_t row = tensor.dim() && tensor.size(0) ? tensor.numel() / tensor.size(0) * tensor.element_size() : 0;
      for (auto& size : sizes) size *= row;
      return sizes;
    };
    auto exchange = std::make_shared<Exchange>(Exchange{bytes_of(input), bytes_of(output), in_bytes(input, input_sizes), in_bytes(output, output_sizes)});
    return run({OpType::ALLTOALL_BASE, "all_to_all_single", {input}, {output}, o.asyncOp, [exchange](Backend& gloo) { return exchange->start(gloo); }, nullptr});
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& o) override {
    auto exchange = std::make_shared<Exchange>();
    Tensors outs = bytes_of(outputs);
    return run({OpType::ALLTOALL, "all_to_all", inputs, outputs, o.asyncOp,
        [exchange, outs, ins = bytes_of(inputs)](Backend& gloo) {
          *exchange = {at::cat(ins), at::empty({at::cat(outs).numel()}, at::kByte), sizes_of(ins), sizes_of(outs)};
          return exchange->start(gloo);
        },
        [exchange, outs]() mutable {
          auto parts = exchange->received.split_with_sizes(exchange->received_sizes);
          for (size_t i = 0; i < outs.size(); i++) outs[i].copy_(parts[i]);
        }});
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& o) override {
    Tensors all = outputs.empty() ? Tensors{} : outputs[0];
    std::vector<Tensors> outs;
    if (!outputs.empty()) outs.push_back(bytes_of(all));
    return run({OpType::GATHER, "gather", inputs, all, o.asyncOp,
        [outs, ins = bytes_of(inputs), o](Backend& gloo) mutable { return std::vector<WorkPtr>{gloo.gather(outs, ins, o)}; }, nullptr});
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& o) override {
    Tensors all = inputs.empty() ? Tensors{} : inputs[0];
    std::vector<Tensors> ins;
    if (!inputs.empty()) ins.push_back(bytes_of(all));
    return run({OpType::SCATTER, "scatter", all, outputs, o.asyncOp,
        [outs = bytes_of(outputs), ins, o](Backend& gloo) mutable { return std::vector<WorkPtr>{gloo.scatter(outs, ins, o)}; }, nullptr});
  }

  // ---- between two ranks

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return run({OpType::SEND, "send", tensors, {}, true,
        [all = bytes_of(tensors), to, tag](Backend& gloo) mutable { return std::vector<WorkPtr>{gloo.send(all, to, tag)}; }, nullptr}, pairs[to]);
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return run({OpType::RECV, "recv", {}, tensors, true,
        [all = bytes_of(tensors), from, tag](Backend& gloo) mutable { return std::vector<WorkPtr>{gloo.recv(all, from, tag)}; }, nullptr}, pairs[from]);
  }

  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    auto work = run({OpType::BARRIER, "barrier", {}, {}, true, [](Backend& gloo) { return std::vector<WorkPtr>{gloo.barrier()}; }, nullptr});
    static_cast<LateWork&>(*work).host_waits = true;
    return work;
  }
};

}  // namespace

void bind_group(py::module_& m) {
  py::module_::import("torch.distributed");
  py::class_<LateOptions, Backend::Options, c10::intrusive_ptr<LateOptions>>(m, "Options")
      .def("__deepcopy__", [](const LateOptions& options, const py::dict&) { return c10::make_intrusive<LateOptions>(options); });
  py::class_<LateBackend, Backend, c10::intrusive_ptr<LateBackend>>(m, "ProcessGroupLate")
      .def(py::init<c10::intrusive_ptr<Backend>, c10::intrusive_ptr<c10d::Store>, std::string, std::string, std::vector<uint64_t>, std::chrono::milliseconds>())
      .def_property_readonly("options", &LateBackend::getBackendOptions)
      // torch's name for it, as NCCL's backend has it. The argument is the device.
      .def("perform_nocolor_split", [](LateBackend& backend, const py::object&) {
        py::gil_scoped_release release;
        backend.meet_for_split();
      });
}

}  // namespace late
