// Work on the pieces of a block, shared out to threads. Internal to codec/.
#pragma once

#include "paramwire/base/crc.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/thread.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace paramwire::pieces {

// Scratch of work that needs none.
struct Nothing {};

// Runs work(index, scratch) for every index below `count`, in `threads` threads with this one, until one fails. Each thread has a Scratch of its own, made once.
// returns: the error of the lowest index that failed among those that were tried
template <typename Scratch, typename Work>
Status for_each(std::uint64_t count, unsigned threads, const Work& work) {
  std::atomic<std::uint64_t> next{0};  // relaxed: only hands out numbers; the joins below order everything else
  std::atomic<bool> failed{false};     // relaxed: ends the others early, nothing depends on when they see it
  std::mutex mutex;
  std::uint64_t failed_index = UINT64_MAX;
  Status first;
  const auto run = [&] {
    const auto scratch = std::make_unique<Scratch>();
    while (!failed.load(std::memory_order_relaxed)) {
      const std::uint64_t index = next.fetch_add(1, std::memory_order_relaxed);
      if (index >= count) return;
      Status status = work(index, *scratch);
      if (status.ok()) continue;
      failed.store(true, std::memory_order_relaxed);
      const std::lock_guard lock(mutex);
      if (index < failed_index) {
        failed_index = index;
        first = std::move(status);
      }
    }
  };
  std::vector<std::thread> helpers;
  const std::uint64_t wanted = std::min<std::uint64_t>(std::max(threads, 1U), count);
  while (helpers.size() + 1 < wanted) {
    auto thread = start_thread("pw-delta", run);
    if (!thread.ok()) break;  // those that are there do it all
    helpers.push_back(std::move(thread).value());
  }
  run();
  for (std::thread& helper : helpers) helper.join();
  return first;
}

// CRC-64 of `size` bytes from those of its pieces of `piece_bytes`, the last of which may be shorter.
inline std::uint64_t join_crcs(std::span<const std::uint64_t> crcs, std::uint64_t piece_bytes, std::uint64_t size) noexcept {
  std::uint64_t crc = crcs.empty() ? 0 : crcs[0];
  for (std::size_t i = 1; i < crcs.size(); ++i) crc = crc64_join(crc, crcs[i], std::min(piece_bytes, size - i * piece_bytes));
  return crc;
}

}  // namespace paramwire::pieces
