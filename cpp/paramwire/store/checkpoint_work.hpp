// Blocks over worker threads, within a bound of memory. The edge where checkpoints have threads.
#pragma once

#include "paramwire/base/buffer.hpp"
#include "paramwire/base/env.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/thread.hpp"
#include "paramwire/store/checkpoint.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace paramwire {

// Most threads of one save or restore; more would only wait for one disk.
inline constexpr std::uint32_t kCheckpointWorkersMax = 64;

// The memory of one save or restore: each worker has buffers of its own that it keeps, and what a block needs beyond them comes out of a count with
// a limit. A holder never waits for a second part, so nobody waits for ever.
class MemoryGate {
 public:
  MemoryGate(std::uint64_t limit, std::uint32_t workers) : kept_(std::min(kKeptMax, limit / 4 / workers)), limit_(limit - kept_ * workers), left_(limit_) {}
  // Whether a block that needs so many bytes can be done at all.
  bool fits(std::uint64_t bytes) const noexcept { return bytes <= std::max(kept_, limit_); }
  // Whether a worker keeps buffers of that size when it is done with a block; larger ones go back before release().
  bool keeps(std::uint64_t bytes) const noexcept { return bytes <= kept_; }
  void acquire(std::uint64_t bytes) {
    if (keeps(bytes)) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return left_ >= bytes; });
    left_ -= bytes;
  }
  void release(std::uint64_t bytes) {
    if (keeps(bytes)) return;
    {
      const std::lock_guard lock(mutex_);
      left_ += bytes;
    }
    changed_.notify_all();
  }

 private:
  // Blocks of served models have 4 MiB, so all that such a block needs; more would only be kept.
  static constexpr std::uint64_t kKeptMax = std::uint64_t{64} << 20;
  const std::uint64_t kept_;
  const std::uint64_t limit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t left_;
};

// `size` bytes of `buffer`, which grows when it is smaller; what was in it is lost then. errors: kBackpressure.
inline Result<std::span<std::byte>> room(Buffer& buffer, std::uint64_t size) {
  if (buffer.size() < size) {
    buffer = {};
    PARAMWIRE_TRY(grown, Buffer::allocate(static_cast<std::size_t>(size)));
    buffer = std::move(grown);
  }
  return buffer.span().first(static_cast<std::size_t>(size));
}

// Runs `work(worker)` in `count` threads, the caller's among them; fewer where the system gives no more. returns: the first error of any.
template <typename Work>
Status run_workers(std::uint32_t count, const char* name, Work&& work) {
  std::mutex mutex;
  Status first;
  const auto one = [&](std::uint32_t worker) {
    Status status;
    try {
      status = work(worker);
    } catch (const std::bad_alloc&) {
      status = Error(Code::kBackpressure, "no memory for a block's stored bytes: fewer workers, or a lower memory_limit");
    }
    const std::lock_guard lock(mutex);
    if (!status.ok() && first.ok()) first = std::move(status);
  };
  std::vector<std::thread> threads;
  for (std::uint32_t worker = 1; worker < count; ++worker) {
    auto thread = start_thread(name, [&one, worker] { one(worker); });
    if (!thread.ok()) break;
    threads.push_back(*std::move(thread));
  }
  one(0);
  for (std::thread& thread : threads) thread.join();
  return first;
}

// Items 0 to count - 1, each handed out once; none after somebody failed.
class WorkList {
 public:
  explicit WorkList(std::size_t count) : count_(count) {}
  std::optional<std::size_t> next() {
    if (failed_.load(std::memory_order_relaxed)) return std::nullopt;
    const std::size_t index = next_.fetch_add(1, std::memory_order_relaxed);
    return index < count_ ? std::optional(index) : std::nullopt;
  }
  void fail() { failed_.store(true, std::memory_order_relaxed); }

 private:
  const std::size_t count_;
  std::atomic<std::size_t> next_{0};
  std::atomic<bool> failed_{false};
};

// Whether the caller of the work wants it to stop now.
inline bool must_stop(const CheckpointProgress* progress) {
  if (progress == nullptr) return false;
  const Micros at = progress->stop_at.load(std::memory_order_relaxed);
  return at != kNever && steady_clock().now() >= at;
}

}  // namespace paramwire
