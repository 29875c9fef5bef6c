// What every reader of slots compares, whatever brings it the bytes: net/slot_reader for memory that answers at once, net/one_sided_reader for
// memory that answers late. Source: wire/FORMAT.md, "One-sided protocol". One thread.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/net/transport.hpp"
#include "paramwire/wire/block_header.hpp"

#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace paramwire {

using ExtentRows = std::vector<ExtentRow>;

// Rows of a table of `table` bytes for a block of `stored_size` bytes, once its CRC was found to be `expected`.
// errors: kCorrupt for a wrong length, CRC, or row sizes that do not add up.
Result<ExtentRows> parse_extent_table(std::span<const std::byte> table, std::uint64_t stored_size, std::uint32_t expected);

// Where the table of a block's slot begins, bytes from its arena's start.
constexpr std::uint64_t extent_table_offset(const ManifestEntry& entry, const Locator& locator) noexcept {
  return locator.payload_offset + (entry.stored_size + 63) / 64 * 64;
}

class SlotRules {
 public:
  explicit SlotRules(const OmittedReadChecks& omitted) : omitted_(omitted) {}
  const OmittedReadChecks& omitted() const noexcept { return omitted_; }

  // The header must vouch for `entry` at `locator`. kStale with the reason when it does not.
  Status check_header(const SlotHeader& header, const ManifestEntry& entry, const Locator& locator) const;
  // kCorrupt: `what` is wrong, though nothing changed.
  static Error corrupt(const ManifestEntry& entry, std::string_view what);

  // Tables that were read, most recently used first, bounded: row after row of one large block costs one table. nullptr: not here.
  std::shared_ptr<const ExtentRows> find_table(const ManifestEntry& entry);
  std::shared_ptr<const ExtentRows> keep_table(const ManifestEntry& entry, ExtentRows rows);

 private:
  struct Table {
    std::uint64_t key = 0;  // CRC-64 of the block and its id, mixed
    std::shared_ptr<const ExtentRows> rows;
  };
  OmittedReadChecks omitted_;
  std::list<Table> tables_;
};

}  // namespace paramwire
