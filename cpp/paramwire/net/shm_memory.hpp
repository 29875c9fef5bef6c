// A server's arenas and this process's pin table, mapped. Shared by a link and the views that outlive it.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/base/fork_guard.hpp"
#include "paramwire/base/socket.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace paramwire {

// One arena, read-only. Any thread.
class MappedArena {
 public:
  // errors: kCorrupt when the descriptor could shrink under us (then a read would be a SIGBUS) or is smaller than `size`;
  //         kUnavailable with errno.
  static Result<std::shared_ptr<const MappedArena>> map(const Fd& descriptor, std::uint64_t size);
  ~MappedArena();
  MappedArena(const MappedArena&) = delete;
  MappedArena& operator=(const MappedArena&) = delete;

  // nullptr when the range leaves the arena.
  const std::byte* at(std::uint64_t offset, std::uint64_t size) const noexcept {
    return offset <= size_ && size <= size_ - offset ? base_ + offset : nullptr;
  }
  // Copies out of the arena with read calls (pread(2)), so that no page of it enters this process's page table.
  // errors: kUnavailable with errno.
  Status read(std::uint64_t offset, std::span<std::byte> target) const;
  // Takes the pages of a span out of this process's page table, with those around it that a fault brings in (64 KiB). They stay
  // in the arena and come back at the next touch: a reader of a neighbour pays a fault, nothing else.
  void drop_pages(const std::byte* begin, std::size_t size) const noexcept;
  // The pages that drop_pages would take.
  std::span<const std::byte> around(const std::byte* begin, std::size_t size) const noexcept;
  // Brings them in with one call instead of a fault each. Kernels before 5.14 can't: then faults do it.
  void populate(const std::byte* begin, std::size_t size) const noexcept;

 private:
  MappedArena(Fd descriptor, const std::byte* base, std::uint64_t size) : descriptor_(std::move(descriptor)), base_(base), size_(size) {}

  Fd descriptor_;
  const std::byte* base_;
  std::uint64_t size_;
};

// The pin table of this process at one server (net/pin_table.hpp). Any thread.
class PinTable {
 public:
  // errors: as MappedArena::map.
  static Result<std::shared_ptr<PinTable>> map(const Fd& descriptor, std::uint32_t capacity);
  ~PinTable();
  PinTable(const PinTable&) = delete;
  PinTable& operator=(const PinTable&) = delete;

  // Claims a free word for `word` and fences: what is read afterwards is read after the server can see the pin.
  // errors: kBackpressure naming the limit.
  Result<std::uint32_t> claim(std::uint64_t word);
  // Reads of the bytes before are over. No effect in the child of a fork: the pins are the parent's, and the page is not there.
  void release(std::uint32_t index) noexcept;

 private:
  PinTable(std::uint64_t* words, std::uint32_t capacity) : words_(words), capacity_(capacity) {}
  bool take(std::uint32_t index, std::uint64_t word) noexcept;

  ForkGuard guard_;
  std::uint64_t* words_;
  std::uint32_t capacity_;
  std::mutex mutex_;
  std::vector<std::uint32_t> free_;  // released by us; another link of this process may have taken one since
  std::uint32_t next_ = 0;           // where a search for never used words goes on
};

}  // namespace paramwire
