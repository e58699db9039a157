// The virtual time of one process: its host, its devices, their streams and events.
//
// All times are nanoseconds since the process started or since `reset`. Nothing here looks at a
// real clock, so every time is a pure function of what the program did.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

namespace virtual_device {

constexpr int kDevices = 2;

struct Costs {
  double op_ns = 0.0; // device: each kernel and each copy
  double element_ns = 0.0; // device: each element of the tensors that a kernel gets
  double launch_ns = 0.0; // host: each launch
  double speed = 1.0; // all work of the device takes 1 / speed as long
  int64_t queue_depth = 1024; // launches that the host may be ahead of the device
};

struct Link {
  double latency_ns = 0.0; // of each collective
  double byte_ns = 0.0; // for each byte that a rank puts in

  int64_t cost_ns(int64_t bytes) const {
    return static_cast<int64_t>(latency_ns + byte_ns * static_cast<double>(bytes));
  }
};

struct Event {
  int64_t time_ns = 0;
};

class Clock {
 public:
  static Clock& get() {
    static auto* clock = new Clock(); // never destroyed: threads of torch may outlive main()
    return *clock;
  }

  void reset() {
    const std::lock_guard<std::mutex> lock(mutex_);
    host_ns_ = 0;
    for (auto& device : devices_) {
      std::fill(device.cursors_ns.begin(), device.cursors_ns.end(), 0);
      device.pending.clear();
      device.launches = 0;
      device.costs = Costs();
    }
  }

  Costs& costs(int device) {
    return devices_[device].costs;
  }

  int64_t new_stream(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& cursors = devices_[device].cursors_ns;
    cursors.push_back(0);
    return static_cast<int64_t>(cursors.size()) - 1;
  }

  // A kernel that runs for `work_ns` on a device of speed 1.
  void launch(int device, int64_t stream, double work_ns) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& one = devices_[device];
    ++one.launches;
    host_ns_ += static_cast<int64_t>(one.costs.launch_ns);
    // A full queue makes the host wait until the device has taken its oldest entry.
    while (static_cast<int64_t>(one.pending.size()) >= one.costs.queue_depth) {
      host_ns_ = std::max(host_ns_, one.pending.front());
      one.pending.pop_front();
    }
    auto& cursor = one.cursors_ns[stream];
    cursor = std::max(cursor, host_ns_) + static_cast<int64_t>(work_ns / one.costs.speed);
    one.pending.push_back(cursor);
  }

  // A kernel that gets tensors of so many elements together.
  void launch_kernel(int device, int64_t stream, int64_t elements) {
    const auto& costs = devices_[device].costs;
    launch(device, stream, costs.op_ns + costs.element_ns * static_cast<double>(elements));
  }

  int64_t launches(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return devices_[device].launches;
  }

  // The time at which a stream has done all work queued so far.
  int64_t cursor(int device, int64_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::max(devices_[device].cursors_ns[stream], host_ns_);
  }

  // The time at which a device has done all work of all its streams.
  int64_t end(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto& cursors = devices_[device].cursors_ns;
    return *std::max_element(cursors.begin(), cursors.end());
  }

  void record(Event& event, int device, int64_t stream) {
    event.time_ns = cursor(device, stream);
  }

  // Makes a stream wait for a time; the host continues.
  void block(int device, int64_t stream, int64_t until_ns) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& cursor = devices_[device].cursors_ns[stream];
    cursor = std::max({cursor, host_ns_, until_ns});
  }

  int64_t host() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return host_ns_;
  }

  void host_works(int64_t ns) {
    const std::lock_guard<std::mutex> lock(mutex_);
    host_ns_ += ns;
  }

  void host_waits(int64_t until_ns) {
    const std::lock_guard<std::mutex> lock(mutex_);
    host_ns_ = std::max(host_ns_, until_ns);
  }

  Link link; // alike on all ranks

 private:
  struct Device {
    std::deque<int64_t> cursors_ns{0}; // by stream; 0 is the default stream
    std::deque<int64_t> pending; // ends of the launches in the queue
    int64_t launches = 0;
    Costs costs;
  };

  std::mutex mutex_;
  int64_t host_ns_ = 0;
  std::array<Device, kDevices> devices_;
};

} // namespace virtual_device
