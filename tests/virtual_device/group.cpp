// Collectives of virtual devices: Gloo moves the data, and the end of each is a virtual time.
//
// A collective begins when the last rank's stream reaches it and the one before has ended, and ends
// after a cost that depends on its bytes. Streams wait for that end; hosts do not, in virtual time.
// In real time, the calling thread waits until all ranks have called, or for `patience_ms`: a
// collective without a lost rank never ends, in virtual time, and its caller continues.

#include "clock.h"
#include "group.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace virtual_device {
namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using Pending = c10::intrusive_ptr<c10d::Work>;

struct Collective final : c10d::Work {
  Collective(int rank, OpType type, c10::intrusive_ptr<c10::ivalue::Future> future, int64_t end_ns)
      : Work(rank, type), future_(std::move(future)), end_ns_(end_ns) {}

  bool isCompleted() override {
    return end_ns_ <= Clock::get().host();
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    future_->wait(); // makes the current stream wait
    return true;
  }
  void synchronize() override {
    future_->wait();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  Tensors result() override {
    return future_->value().toTensorVector();
  }

  c10::intrusive_ptr<c10::ivalue::Future> future_;
  int64_t end_ns_;
};

struct Group final : c10d::Backend {
  Group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "vccl";
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return sequence_;
  }

  Pending allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return run(OpType::ALLREDUCE, tensors, tensors, [&] {
      for (auto& tensor : tensors) {
        reduce_into(tensor, opts.reduceOp);
      }
    });
  }
  Pending allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return allreduce(tensors, opts);
  }
  Pending broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return run(OpType::BROADCAST, tensors, tensors, [&] {
      Tensors one{dense(tensors.at(0))};
      finish(gloo_->broadcast(one, opts));
    });
  }
  Pending allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return run(OpType::ALLGATHER, outputs.at(0), inputs, [&] {
      gather_into(outputs.at(0), inputs.at(0));
    });
  }
  Pending _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return run(OpType::_ALLGATHER_BASE, {output}, {input}, [&] {
      gather_into(on_cpu(output).chunk(getSize()), input);
    });
  }
  Pending reduce_scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& opts) override {
    return run(OpType::REDUCE_SCATTER, outputs, inputs.at(0), [&] {
      Tensors flat;
      for (const auto& input : inputs.at(0)) {
        flat.push_back(on_cpu(input).flatten());
      }
      scatter_into(outputs.at(0), at::cat(flat), opts.reduceOp);
    });
  }
  Pending _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return run(OpType::_REDUCE_SCATTER_BASE, {output}, {input}, [&] {
      scatter_into(output, on_cpu(input).flatten().clone(), opts.reduceOp);
    });
  }
  Pending barrier(const c10d::BarrierOptions&) override {
    auto work = run(OpType::BARRIER, {}, {}, [] {});
    Clock::get().host_waits(ended_ns_);
    return work;
  }

 private:
  static at::Tensor dense(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.is_contiguous(), "vccl takes contiguous tensors only");
    return on_cpu(tensor);
  }

  void reduce_into(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    const bool mean = op == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions opts;
    opts.reduceOp = mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    Tensors one{dense(tensor)};
    finish(gloo_->allreduce(one, opts));
    if (mean) {
      one[0].div_(getSize());
    }
  }

  void gather_into(const Tensors& outputs, const at::Tensor& input) {
    Tensors one{dense(input).flatten()};
    std::vector<Tensors> parts{Tensors(getSize())};
    for (auto& part : parts[0]) {
      part = at::empty_like(one[0]);
    }
    finish(gloo_->allgather(parts, one));
    for (int rank = 0; rank < getSize(); ++rank) {
      on_cpu(outputs[rank]).copy_(parts[0][rank].view(outputs[rank].sizes()));
    }
  }

  void scatter_into(const at::Tensor& output, const at::Tensor& flat, const c10d::ReduceOp& op) {
    reduce_into(flat, op);
    const auto mine = flat.narrow(0, getRank() * output.numel(), output.numel());
    on_cpu(output).copy_(mine.view(output.sizes()));
  }

  // Returns the latest of the times that the ranks give.
  int64_t latest(int64_t mine_ns) {
    Tensors one{at::full({1}, mine_ns, at::kLong)};
    c10d::AllreduceOptions opts;
    opts.reduceOp = c10d::ReduceOp::MAX;
    finish(gloo_->allreduce(one, opts));
    return one[0].item<int64_t>();
  }

  static void finish(const Pending& work) {
    work->wait(std::chrono::milliseconds(Clock::get().patience_ms));
  }

  template <typename Move>
  Pending run(OpType type, const Tensors& outputs, const Tensors& inputs, Move move) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto& clock = Clock::get();
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
    // A rank whose tensors are on the CPU computes there: its host waits, as with Gloo.
    const bool of_host = !outputs.empty() && outputs[0].is_cpu();
    const auto device = of_host || outputs.empty() ? guard.getDevice() : outputs[0].device();
    const auto stream = guard.getStream(device);
    if (!of_host) { // the part of the work that the host does: launching it
      clock.launch(device.index(), stream.id(), 0);
    }
    int64_t bytes = 0;
    for (const auto& input : inputs) {
      bytes += static_cast<int64_t>(input.nbytes());
    }
    const auto reached_ns = of_host ? clock.host() : clock.cursor(device.index(), stream.id());
    try {
      if (!lost_) {
        ended_ns_ = std::max(ended_ns_, latest(reached_ns)) + clock.link.cost_ns(bytes);
        move();
      }
    } catch (const std::exception&) {
      if (clock.patience_ms == 0) {
        throw;
      }
      lose(outputs, inputs);
    }
    ++sequence_;
    return c10::make_intrusive<Collective>(
        getRank(), type, future(device, outputs, of_host), ended_ns_);
  }

  // Lets this collective and all later ones of the group end never.
  void lose(const Tensors& outputs, const Tensors& inputs) {
    lost_ = true;
    ended_ns_ = kNever;
    // Gloo may still write into their memory.
    held_ = outputs;
    held_.insert(held_.end(), inputs.begin(), inputs.end());
    // Its destructor would wait for the lost rank, and so would the end of the process.
    gloo_.release();
  }

  // Returns a future that makes a stream or the host wait for the end of the latest collective.
  c10::intrusive_ptr<c10::ivalue::Future> future(
      const c10::Device& device, const Tensors& outputs, bool of_host) {
    auto& clock = Clock::get();
    const auto id = clock.new_stream(device.index(), of_host);
    clock.block(device.index(), id, ended_ns_);
    const c10::StreamGuard on(c10::Stream(c10::Stream::UNSAFE, device, id));
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    if (of_host && !anything_.defined()) {
      anything_ = at::empty({1}, at::TensorOptions().device(device));
    }
    // Futures record events only for the devices of their storages, and never for the CPU.
    auto storages = std::vector<c10::ivalue::Future::WeakStorage>{};
    for (const auto& tensor : of_host ? Tensors{anything_} : outputs) {
      storages.emplace_back(tensor.storage().getWeakStorageImpl());
    }
    future->markCompleted(c10::IValue(outputs), std::move(storages));
    return future;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  int64_t ended_ns_ = 0; // the end of the latest collective; alike on all ranks
  uint64_t sequence_ = 0;
  bool lost_ = false; // a rank did not take part in a collective
  Tensors held_;
  at::Tensor anything_; // of the device, on a rank whose tensors are on the CPU
};

} // namespace

void bind_group(pybind11::module_& m) {
  namespace py = pybind11;
  py::module_::import("torch.distributed"); // has the base class
  py::class_<Group, c10d::Backend, c10::intrusive_ptr<Group>>(m, "Group")
      .def(py::init([](const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size) {
        return c10::make_intrusive<Group>(gloo, rank, size);
      }));
  m.def("link", [](double latency_ns, double byte_ns) {
    Clock::get().link = {latency_ns, byte_ns};
  });
  m.def("hang_if_lost", [](int64_t after_ms) { Clock::get().patience_ms = after_ms; });
}

} // namespace virtual_device
