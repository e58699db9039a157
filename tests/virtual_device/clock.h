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

#include <unistd.h>

namespace virtual_device {

constexpr int kDevices = 2;

// The time of what never happens: a collective that waits for a lost rank ends then, and a host
// that waits until then hangs in real time. Later than any other time, and far from an overflow.
constexpr int64_t kNever = int64_t{1} << 61;

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
  bool of_host = false; // whoever waits for it makes the host wait, not a stream
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
      for (auto& stream : device.streams) {
        stream.cursor_ns = 0;
      }
      device.pending.clear();
      device.launches = 0;
      device.costs = Costs();
    }
  }

  Costs& costs(int device) {
    return devices_[device].costs;
  }

  // A stream `of_host` carries no work: its events stand for times that the host waits for.
  int64_t new_stream(int device, bool of_host = false) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& streams = devices_[device].streams;
    streams.push_back({0, of_host});
    return static_cast<int64_t>(streams.size()) - 1;
  }

  // A kernel that runs for `work_ns` on a device of speed 1.
  void launch(int device, int64_t stream, double work_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto& one = devices_[device];
    ++one.launches;
    host_ns_ += static_cast<int64_t>(one.costs.launch_ns);
    // A full queue makes the host wait until the device has taken its oldest entry.
    while (static_cast<int64_t>(one.pending.size()) >= one.costs.queue_depth) {
      reach(one.pending.front(), lock);
      one.pending.pop_front();
    }
    auto& cursor = one.streams[stream].cursor_ns;
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
    return std::max(devices_[device].streams[stream].cursor_ns, host_ns_);
  }

  // The time at which a device has done all work of all its streams.
  int64_t end(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t end_ns = 0;
    for (const auto& stream : devices_[device].streams) {
      end_ns = std::max(end_ns, stream.cursor_ns);
    }
    return end_ns;
  }

  void record(Event& event, int device, int64_t stream) {
    event.time_ns = cursor(device, stream);
    const std::lock_guard<std::mutex> lock(mutex_);
    event.of_host = devices_[device].streams[stream].of_host;
  }

  // Makes a stream wait for a time; the host continues.
  void block(int device, int64_t stream, int64_t until_ns) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& cursor = devices_[device].streams[stream].cursor_ns;
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

  // Does not return if that never comes. Whether other threads of Python go on is torch's doing, as
  // on any device: it releases the interpreter where it waits.
  void host_waits(int64_t until_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    reach(until_ns, lock);
  }

  Link link; // alike on all ranks
  // Real milliseconds for which a collective waits for a rank before it counts as never ending. 0
  // waits for ever, and a collective that fails then raises its error.
  int64_t patience_ms = 0;

 private:
  struct Stream {
    int64_t cursor_ns = 0;
    bool of_host = false;
  };

  struct Device {
    std::deque<Stream> streams{1}; // by number; 0 is the default stream
    std::deque<int64_t> pending; // ends of the launches in the queue
    int64_t launches = 0;
    Costs costs;
  };

  void reach(int64_t until_ns, std::unique_lock<std::mutex>& lock) {
    if (until_ns < kNever) {
      host_ns_ = std::max(host_ns_, until_ns);
      return;
    }
    host_ns_ = kNever - 1; // meanwhile the device passes all that it can
    lock.unlock();
    while (true) {
      ::pause();
    }
  }

  std::mutex mutex_;
  int64_t host_ns_ = 0;
  std::array<Device, kDevices> devices_;
};

} // namespace virtual_device
