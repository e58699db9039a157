// A device on torch's PrivateUse1 key whose kernels compute at once, and whose time is virtual.
//
// Memory of the device is host memory. A kernel runs on the CPU when it is launched, and adds its
// cost to the cursor of the current stream.

#include "clock.h"
#include "group.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <map>

namespace virtual_device {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<int64_t, kDevices> current_streams{};

// Set while a kernel runs on the CPU: its copies are no work of the device.
thread_local bool inside_kernel = false;

struct InsideKernel {
  InsideKernel() : before(std::exchange(inside_kernel, true)) {}
  ~InsideKernel() {
    inside_kernel = before;
  }
  const bool before;
};

int index_of(const c10::Device& device) {
  return device.has_index() ? device.index() : current_device;
}

void check_index(int index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "virtual device ", index, " does not exist");
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kType, current_device};
  }
  void setDevice(c10::Device device) const override {
    check_index(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Stream stream(int device, int64_t id) const {
    const c10::Device place(kType, static_cast<c10::DeviceIndex>(device));
    return c10::Stream(c10::Stream::UNSAFE, place, id);
  }
  c10::Stream getStream(c10::Device device) const override {
    const auto index = index_of(device);
    return stream(index, current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(index_of(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const auto index = index_of(device);
    return stream(index, Clock::get().new_stream(index));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto index = index_of(next.device());
    const auto before = current_streams[index];
    current_streams[index] = next.id();
    return stream(index, before);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(
      void** event,
      const c10::Stream& stream,
      const c10::DeviceIndex,
      const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    Clock::get().record(*static_cast<Event*>(*event), stream.device_index(), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) {
      return;
    }
    const auto& one = *static_cast<Event*>(event);
    if (one.of_host) {
      Clock::get().host_waits(one.time_ns);
    } else {
      Clock::get().block(stream.device_index(), stream.id(), one.time_ns);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->time_ns <= Clock::get().host();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      Clock::get().host_waits(static_cast<Event*>(event)->time_ns);
    }
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto ns = static_cast<Event*>(to)->time_ns - static_cast<Event*>(from)->time_ns;
    return static_cast<double>(ns) / 1e6;
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& clock = Clock::get();
    return clock.cursor(stream.device_index(), stream.id()) <= clock.host();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    auto& clock = Clock::get();
    clock.host_waits(clock.cursor(stream.device_index(), stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    auto& clock = Clock::get();
    clock.host_waits(clock.end(index));
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Memory without a cache, counted for each device, with a limit.
struct Memory final : c10::DeviceAllocator {
  struct Block {
    int device;
    int64_t bytes;
  };

  static Memory& get() {
    static auto* memory = new Memory();
    return *memory;
  }
  static auto& sum(c10::CachingAllocator::StatArray& stats) {
    return stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  }
  int64_t allocated(int device) {
    return sum(stats_[device].allocated_bytes).current;
  }

  c10::DataPtr allocate(size_t size) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int device = current_device;
    const auto bytes = static_cast<int64_t>(size);
    auto& stats = stats_[device];
    if (allocated(device) + bytes > limits[device]) {
      ++stats.num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "virtual device ", device, " is out of memory: tried to ",
          "allocate ", bytes, " bytes with ", allocated(device), " of ", limits[device], " in use");
    }
    for (auto* counted : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      sum(*counted).increase(bytes);
    }
    ++stats.num_device_alloc;
    void* data = bytes == 0 ? nullptr : c10::GetCPUAllocator()->raw_allocate(size);
    auto* block = new std::pair<Block, void*>({device, bytes}, data);
    const c10::Device place(kType, static_cast<c10::DeviceIndex>(device));
    return {data, block, &Memory::release, place};
  }
  static void release(void* context) {
    auto* block = static_cast<std::pair<Block, void*>*>(context);
    get().forget(block->first);
    if (block->second != nullptr) {
      c10::GetCPUAllocator()->raw_deallocate(block->second);
    }
    delete block;
  }
  void forget(const Block& block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = stats_[block.device];
    for (auto* counted : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      sum(*counted).decrease(block.bytes);
    }
    ++stats.num_device_free;
  }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    sum(stats_[device].allocated_bytes).reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = stats_[device];
    for (auto* counted : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      sum(*counted).reset_peak();
    }
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {  // a method of the base only from 2.10 on
    return {limits[device] - allocated(device), limits[device]};
  }

  std::array<int64_t, kDevices> limits;

 private:
  Memory() {
    limits.fill(int64_t{1} << 34);
  }
  std::mutex mutex_;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kDevices> stats_;
};

// Host memory that counts as pinned.
struct Pinned final : at::Allocator {
  static Pinned& get() {
    static auto* pinned = new Pinned();
    return *pinned;
  }
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(size);
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_[data] = size;
    return {data, data, &Pinned::release, c10::Device(c10::kCPU)};
  }
  static void release(void* data) {
    {
      const std::lock_guard<std::mutex> lock(get().mutex_);
      get().blocks_.erase(data);
    }
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &Pinned::release;
  }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
  bool has(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto next = blocks_.upper_bound(const_cast<void*>(data));
    if (next == blocks_.begin()) {
      return false;
    }
    --next;
    return data < static_cast<char*>(next->first) + next->second;
  }

 private:
  std::mutex mutex_;
  std::map<void*, size_t> blocks_;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    check_index(device);
    current_device = device;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device;
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator(); // kernels run on the CPU
  }
  at::Device getDeviceFromPtr(void*) const override {
    return {kType, current_device};
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &Pinned::get();
  }
  bool isPinnedPtr(const void* data) const override {
    return Pinned::get().has(data);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::DeviceGuard guard(storage.device());
    auto* impl = storage.unsafeGetStorageImpl();
    auto data = Memory::get().allocate(size);
    const auto kept = std::min(size, impl->nbytes());
    if (kept > 0) {
      std::memcpy(data.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
};

void launch_kernel(const c10::Device& device, int64_t elements) {
  const auto index = index_of(device);
  Clock::get().launch_kernel(index, current_streams[index], elements);
}

void wait_for_stream(const c10::Device& device) {
  const Guard guard;
  guard.synchronizeStream(guard.getStream(device));
}

at::Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType, current_device)));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &Memory::get(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType, current_device)));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &Memory::get(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at;
  if (offset.has_value()) {
    at = offset->expect_int();
  }
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize_(
    const at::Tensor& self,
    c10::SymIntArrayRef size,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(
    at::Tensor& self,
    c10::Storage source,
    c10::SymInt offset,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(
      self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below;
  on_cpu(dst).copy_(on_cpu(self));
  if (inside_kernel) {
    return dst;
  }
  const auto& device = self.device().type() == kType ? self.device() : dst.device();
  launch_kernel(device, self.numel());
  if (!non_blocking && (self.is_cpu() || dst.is_cpu())) {
    wait_for_stream(device);
  }
  return dst;
}

// Returns the result of a kernel that ran on the CPU.
at::Tensor to_device(const at::Tensor& tensor, const c10::Device& device) {
  const InsideKernel inside;
  return tensor.defined() ? tensor.to(device) : tensor;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) {
    dst.resize_(self.sizes());
  }
  return copy_from(self, dst, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  launch_kernel(self.device(), 1);
  wait_for_stream(self.device());
  return at::native::_local_scalar_dense_cpu(on_cpu(self));
}

void record_stream(at::Tensor&, c10::Stream) {}

// Torch has no fallback for convolutions of devices that it does not know.
at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  const auto bias_here = bias.has_value() ? std::make_optional(on_cpu(*bias)) : std::nullopt;
  const auto output = at::convolution_symint(
      on_cpu(input), on_cpu(weight), bias_here, stride, padding, dilation, transposed,
      output_padding, std::move(groups));
  launch_kernel(input.device(), input.numel() + weight.numel());
  return to_device(output, input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient,
    const at::Tensor& input,
    const at::Tensor& weight,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups,
    std::array<bool, 3> mask) {
  const std::vector<c10::SymInt> bias_size{gradient.sym_size(1)};
  const auto [for_input, for_weight, for_bias] = at::convolution_backward_symint(
      on_cpu(gradient), on_cpu(input), on_cpu(weight), c10::SymIntArrayRef(bias_size), stride,
      padding, dilation, transposed, output_padding, std::move(groups), mask);
  launch_kernel(input.device(), gradient.numel() + input.numel() + weight.numel());
  const auto device = input.device();
  return {to_device(for_input, device), to_device(for_weight, device), to_device(for_bias, device)};
}

// Runs any other kernel on the CPU, and counts it as one kernel of the current stream.
void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto arguments = op.schema().arguments().size();
  int64_t elements = 0;
  std::optional<c10::Device> device;
  const auto count = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.device().type() == kType) {
      elements += tensor.numel();
      device = tensor.device();
    }
  };
  for (const auto& value : torch::jit::last(*stack, arguments)) {
    if (value.isTensor()) {
      count(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        count(tensor);
      }
    }
  }
  {
    const c10::OptionalDeviceGuard guard(device);
    const InsideKernel inside;
    at::native::cpu_fallback(op, stack);
  }
  launch_kernel(device.value_or(c10::Device(kType, current_device)), elements);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

} // namespace

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.device().type() != kType) {
    return tensor;
  }
  return at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
      tensor.options().device(c10::kCPU).pinned_memory(false));
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(kType, &Memory::get());
  m.attr("DEVICES") = kDevices;
  m.def("reset", [] { Clock::get().reset(); });
  m.def("costs", [](int device, double op, double element, double launch, double speed, int64_t depth) {
    check_index(device);
    Clock::get().costs(device) = {op, element, launch, speed, depth};
  });
  m.def(
      "work",
      [](int device, double ns) { Clock::get().launch(device, current_streams[device], ns); },
      pybind11::call_guard<pybind11::gil_scoped_release>()); // a full queue makes the host wait
  m.def("launches", [](int device) { return Clock::get().launches(device); });
  m.def("cursor", [](int device) { return Clock::get().cursor(device, current_streams[device]); });
  m.def("host", [] { return Clock::get().host(); });
  m.def("host_works", [](int64_t ns) { Clock::get().host_works(ns); });
  m.def("limit", [](int device) { return Memory::get().limits[device]; });
  m.def("set_limit", [](int device, int64_t bytes) { Memory::get().limits[device] = bytes; });
  bind_group(m);
}

} // namespace virtual_device
