// One-sided reads of a slot by the slot protocol, out of memory that answers at once: a mapping of the server's.
//
// Order is the proof: payload first, complete; then the header; the bytes count only if the header is whole, its seq is the
// locator's, its block, version and epoch are the manifest's, and the payload's CRC is the manifest's. A header read in one
// go with the payload proves nothing, since neither PCIe nor a store buffer keeps the two in order. Source: wire/FORMAT.md,
// "One-sided protocol"; the fences of the writer are in store/slot_table.cpp.
#pragma once

#include "paramwire/base/buffer.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/net/slot_rules.hpp"
#include "paramwire/net/transport.hpp"
#include "paramwire/wire/block_header.hpp"

#include <cstdint>
#include <memory>
#include <span>

namespace paramwire {

// Memory of a server as a transport sees it. Every call is complete when it returns: what a later call reads is read later.
// errors: kStale for an arena or range that is not there (the locator is of another time), or the transport's own.
class RemoteMemory {
 public:
  virtual ~RemoteMemory() = default;
  // Copies target.size() bytes; returns the CRC of the bytes as they were copied, chained after `before`.
  virtual Result<std::uint64_t> copy_crc64(std::uint16_t arena, std::uint64_t offset, std::span<std::byte> target, std::uint64_t before) = 0;
  virtual Result<std::uint32_t> copy_crc32c(std::uint16_t arena, std::uint64_t offset, std::span<std::byte> target) = 0;
  virtual Status copy(std::uint16_t arena, std::uint64_t offset, std::span<std::byte> target) = 0;
  // The 64 bytes of a slot header, read after everything before it.
  virtual Result<SlotHeader> header(std::uint16_t arena, std::uint64_t offset) = 0;
};

class SlotReader {
 public:
  SlotReader(RemoteMemory& memory, const OmittedReadChecks& omitted) : memory_(memory), rules_(omitted) {}

  // Reads item.range of the block into item.target and sets item.result. One thread.
  void read(BlockRead& item);
  const SlotRules& rules() const noexcept { return rules_; }
  std::uint64_t wire_bytes() const noexcept { return wire_bytes_; }

 private:
  Status read_whole(BlockRead& item);
  Status read_range(BlockRead& item);
  Status read_extents(BlockRead& item, const ExtentRows& rows);
  Result<std::shared_ptr<const ExtentRows>> extent_table(const ManifestEntry& entry, const Locator& locator);
  Result<std::span<std::byte>> scratch();
  Status settle(const BlockRead& item, bool bytes_match);

  RemoteMemory& memory_;
  SlotRules rules_;
  Buffer scratch_;              // one extent, for the edges of ranged reads
  std::uint64_t wire_bytes_ = 0;
};

}  // namespace paramwire
