// What every link does with a BlockRead: is it one, which of its extents may be left to the caller, what did it bring. Pure.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/net/transport.hpp"
#include "paramwire/wire/block_header.hpp"

#include <cstdint>
#include <span>

namespace paramwire {

// The stored bytes of all extents that lie whole in `range`, of a block of `stored_size` bytes. {0, 0}: none does, or the block is one extent at most and
// so has no table: only its CRC-64 says what it must be.
constexpr ByteRange whole_extents(std::uint64_t stored_size, const ByteRange& range) noexcept {
  if (extent_count(stored_size) <= 1) return {};
  const std::uint64_t end = range.offset + range.size;
  const std::uint64_t first = extent_count(range.offset) * kExtentBytes;
  const std::uint64_t last = end == stored_size ? end : end / kExtentBytes * kExtentBytes;
  return first < last ? ByteRange{first, last - first} : ByteRange{};
}

// Those of them that the link does not sum: all, or none. `read` must have passed check_read().
inline ByteRange deferred_bytes(const BlockRead& read) noexcept {
  return read.checks.empty() ? ByteRange{} : whole_extents(read.entry.stored_size, read.range);
}

constexpr bool holds(const ByteRange& range, std::uint64_t at) noexcept { return at >= range.offset && at - range.offset < range.size; }

// kInvalid when `range` leaves the entry's block, or `target_size` is not the range's.
Status check_range(const ManifestEntry& entry, const ByteRange& range, std::uint64_t target_size);
// The same, and when there are checks: for as many extents as lie whole in the range.
Status check_read(const BlockRead& read);

// Writes to `read.checks`, if there are any, what `rows` (the block's table, checked) say. Offsets count from the read's own target.
void fill_checks(BlockRead& read, std::span<const ExtentRow> rows) noexcept;

void count_failure(LinkStats& stats, const Error& error) noexcept;
// By the read's result.
void count_read(LinkStats& stats, const BlockRead& read, const OmittedReadChecks& omitted) noexcept;

}  // namespace paramwire
