#include "paramwire/net/block_read.hpp"

#include "paramwire/base/text.hpp"

#include <cassert>

namespace paramwire {

Status check_range(const ManifestEntry& entry, const ByteRange& range, std::uint64_t target_size) {
  if (entry.kind != EntryKind::kBlock) return Error(Code::kInvalid, cat("\"", entry.tensor, "\" is an alias and has no bytes: read its target \"", entry.target, '"'));
  if (range.offset > entry.stored_size || range.size > entry.stored_size - range.offset) {
    return Error(Code::kInvalid, cat("bytes ", range.offset, " and ", range.size, " more of block ", entry.to_string(), ", which has ", entry.stored_size));
  }
  if (target_size != range.size) return Error(Code::kInvalid, cat("a target of ", target_size, " bytes for ", range.size, " bytes of block ", entry.to_string()));
  return {};
}

Status check_read(const BlockRead& read) {
  PARAMWIRE_CHECK(check_range(read.entry, read.range, read.target.size()));
  const std::uint64_t extents = extent_count(whole_extents(read.entry.stored_size, read.range).size);
  if (read.checks.empty() || read.checks.size() == extents) return {};
  return Error(Code::kInvalid, cat("checks for ", read.checks.size(), " extents, and ", extents, " lie whole in bytes ", read.range.offset, " and ", read.range.size, " more of block ",
                                   read.entry.to_string()));
}

void fill_checks(BlockRead& read, std::span<const ExtentRow> rows) noexcept {
  const std::uint64_t begin = deferred_bytes(read).offset;
  for (std::size_t i = 0; i < read.checks.size(); ++i) {
    const std::uint64_t at = begin + i * kExtentBytes;
    assert(at / kExtentBytes < rows.size());
    const ExtentRow& row = rows[static_cast<std::size_t>(at / kExtentBytes)];
    read.checks[i] = {at - read.range.offset, row.stored_size, row.crc32c};
  }
}

void count_failure(LinkStats& stats, const Error& error) noexcept {
  if (error.code() == Code::kStale) ++stats.changed;
  if (error.code() == Code::kCorrupt) ++stats.corrupt;
}

void count_read(LinkStats& stats, const BlockRead& read, const OmittedReadChecks& omitted) noexcept {
  if (!read.result.ok()) return count_failure(stats, read.result.error());
  stats.bytes += read.range.size;
  stats.extents_deferred += read.checks.size();
  if (!omitted.crc && read.checks.empty()) ++stats.blocks_verified;
}

}  // namespace paramwire
