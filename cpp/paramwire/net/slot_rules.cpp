#include "paramwire/net/slot_rules.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>
#include <utility>

namespace paramwire {

namespace {

// Extent tables kept by a reader. 64 tables of a 256 MiB block are 2 MiB.
constexpr std::size_t kTablesKept = 64;

// Bytes and block: content never differs.
std::uint64_t key_of(const ManifestEntry& entry) { return entry.crc64 * 0x9e3779b97f4a7c15U ^ entry.id.value; }

}  // namespace

Result<ExtentRows> parse_extent_table(std::span<const std::byte> table, std::uint64_t stored_size, std::uint32_t expected) {
  const std::uint64_t extents = extent_count(stored_size);
  if (table.size() != extents * sizeof(ExtentRow)) {
    return Error(Code::kCorrupt, cat("extent table of ", table.size(), " bytes for ", extents, " extents"));
  }
  if (crc32c(table) != expected) return Error(Code::kCorrupt, "extent table CRC");
  ExtentRows rows(static_cast<std::size_t>(extents));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i].stored_size = load_le<std::uint32_t>(table.data() + i * sizeof(ExtentRow));
    rows[i].crc32c = load_le<std::uint32_t>(table.data() + i * sizeof(ExtentRow) + 4);
    if (rows[i].stored_size != std::min(kExtentBytes, stored_size - i * kExtentBytes)) {
      return Error(Code::kCorrupt, cat("extent ", i, " of the table says ", rows[i].stored_size, " bytes"));
    }
  }
  return rows;
}

Status SlotRules::check_header(const SlotHeader& header, const ManifestEntry& entry, const Locator& locator) const {
  const auto changed = [&](std::string_view what) {
    return Error(Code::kStale, cat("block ", entry.to_string(), " at version ", entry.version, " changed while it was read (", what, ')'));
  };
  if (!omitted_.seq) {
    if (header.seq != locator.seq) return changed(header.seq % 2 != 0 ? "slot withdrawn" : "slot rewritten");
    if (!omitted_.crc) {
      if (const char* reason = verify(header)) return changed(reason);
    }
  }
  if (!omitted_.version && (header.block != entry.id.value || header.version_counter != entry.version.counter)) return changed("other block or version");
  if (!omitted_.epoch && header.epoch != entry.version.epoch) return changed("other epoch");
  return {};
}

Error SlotRules::corrupt(const ManifestEntry& entry, std::string_view what) {
  return Error(Code::kCorrupt, cat("block ", entry.to_string(), " at version ", entry.version, ": ", what));
}

std::shared_ptr<const ExtentRows> SlotRules::find_table(const ManifestEntry& entry) {
  const std::uint64_t key = key_of(entry);
  for (auto it = tables_.begin(); it != tables_.end(); ++it) {
    if (it->key != key) continue;
    tables_.splice(tables_.begin(), tables_, it);
    return tables_.front().rows;
  }
  return nullptr;
}

std::shared_ptr<const ExtentRows> SlotRules::keep_table(const ManifestEntry& entry, ExtentRows rows) {
  if (tables_.size() == kTablesKept) tables_.pop_back();
  tables_.push_front({key_of(entry), std::make_shared<const ExtentRows>(std::move(rows))});
  return tables_.front().rows;
}

}  // namespace paramwire
