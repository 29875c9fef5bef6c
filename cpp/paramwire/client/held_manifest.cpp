#include "paramwire/client/held_manifest.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>

namespace paramwire {

Locator LocatorTable::at(std::uint32_t tag) const noexcept {
  auto it = std::upper_bound(pieces_.begin(), pieces_.end(), tag, [](std::uint32_t t, const Piece& piece) { return t < piece.begin; });
  if (it == pieces_.begin()) return Locator{0xffff, 0xffff, 0, 0, 1};
  --it;
  const std::uint32_t index = tag - it->begin;
  return index < it->locators->size() ? (*it->locators)[index] : Locator{0xffff, 0xffff, 0, 0, 1};
}

LocatorTable LocatorTable::with(std::vector<Locator> added) const {
  LocatorTable out = *this;
  if (added.empty()) return out;
  if (out.pieces_.size() >= kPiecesMax) {
    std::vector<Locator> all;
    all.reserve(size_ + added.size());
    for (const Piece& piece : out.pieces_) all.insert(all.end(), piece.locators->begin(), piece.locators->end());
    out.pieces_ = {Piece{0, std::make_shared<const std::vector<Locator>>(std::move(all))}};
  }
  const auto count = static_cast<std::uint32_t>(added.size());
  out.pieces_.push_back(Piece{out.size_, std::make_shared<const std::vector<Locator>>(std::move(added))});
  out.size_ += count;
  return out;
}

std::string HeldManifest::nearest(std::string_view tensor) const {
  // Names that share the longest end, since what people get wrong is the prefix; a few, for an error text.
  std::size_t best = 0;
  std::vector<std::string> names;
  manifest_.for_each([&](const Manifest::Hit& hit) {
    const std::string_view name = hit.entry.tensor;
    std::size_t same = 0;
    while (same < name.size() && same < tensor.size() && name[name.size() - 1 - same] == tensor[tensor.size() - 1 - same]) ++same;
    if (same < best || same == 0) return true;
    if (same > best) names.clear();
    best = same;
    if (names.size() < 3 && std::find(names.begin(), names.end(), name) == names.end()) names.emplace_back(name);
    return true;
  });
  std::string out;
  for (const std::string& name : names) out += cat(out.empty() ? "; near: " : ", ", name);
  return out;
}

Result<std::vector<Manifest::Hit>> HeldManifest::blocks(std::string_view tensor) const {
  if (auto whole = manifest_.find(block_id(tensor, Shard::whole()))) {
    if (whole->entry.kind == EntryKind::kBlock) return std::vector<Manifest::Hit>{*whole};
    tensor = whole->entry.target;
    if (auto target = manifest_.find(block_id(tensor, Shard::whole())); target && target->entry.kind == EntryKind::kBlock) {
      return std::vector<Manifest::Hit>{*target};
    }
  }
  std::call_once(cut_once_, [this] {
    manifest_.for_each([this](const Manifest::Hit& hit) {
      if (hit.entry.kind == EntryKind::kBlock && hit.entry.shard.kind != ShardKind::kWhole) cut_[hit.entry.tensor].push_back(hit);
      return true;
    });
    for (auto& [name, hits] : cut_) {
      std::sort(hits.begin(), hits.end(), [](const Manifest::Hit& a, const Manifest::Hit& b) {
        return shard_rows(a.entry.shape, a.entry.shard)->first < shard_rows(b.entry.shape, b.entry.shard)->first;
      });
    }
  });
  if (const auto it = cut_.find(tensor); it != cut_.end()) return it->second;
  return Error(Code::kNotFound, cat("tensor \"", tensor, "\" is not in version ", to_text(manifest_.version()), " (", manifest_.entry_count(),
                                    " blocks)", nearest(tensor)));
}

Result<BlockRead> HeldManifest::locate(BlockId block) const {
  const auto hit = manifest_.find(block);
  if (!hit || hit->entry.kind != EntryKind::kBlock) {
    return Error(Code::kNotFound, cat("block ", block, " is not in version ", to_text(manifest_.version())));
  }
  return BlockRead{hit->entry, locators_.at(hit->tag), {0, hit->entry.raw_size}, {}, {}};
}

Status HeldManifest::plan(BlockId block, std::span<std::byte> target, std::vector<BlockRead>& out) const {
  PARAMWIRE_TRY(read, locate(block));
  if (target.size() != read.entry.raw_size) {
    return Error(Code::kInvalid, cat("block ", read.entry.to_string(), " has ", read.entry.raw_size, " bytes, the target ", target.size()));
  }
  read.target = target;
  out.push_back(read);
  return {};
}

// The reads of `part`, in row order; `range.size` bytes each, targets not set.
Status HeldManifest::cut(std::string_view tensor, const Shard& part, std::vector<BlockRead>& out) const {
  PARAMWIRE_TRY(hits, blocks(tensor));
  const ManifestEntry& first = hits.front().entry;
  auto bytes = block_bytes(first.dtype, first.shape, part);
  if (!bytes.ok()) return Error(Code::kInvalid, cat("tensor \"", tensor, "\": ", bytes.error().message()));
  if (hits.size() == 1 && first.shard == part) {
    out.push_back(BlockRead{first, locators_.at(hits.front().tag), {0, first.raw_size}, {}, {}});
    return {};
  }
  const auto wanted = *shard_rows(first.shape, part);
  const std::uint64_t rows_all = first.shape.rank() == 0 ? 1 : first.shape[0];
  const std::uint64_t row_bits = rows_all == 0 ? 0 : first.shape.elements() / rows_all * dtype_bits(first.dtype);
  std::uint64_t at = wanted.first;
  for (const Manifest::Hit& hit : hits) {
    const auto rows = *shard_rows(hit.entry.shape, hit.entry.shard);
    if (rows.second <= at) continue;
    if (rows.first > at || at >= wanted.second) break;
    const std::uint64_t end = std::min(rows.second, wanted.second);
    out.push_back(BlockRead{hit.entry, locators_.at(hit.tag), {(at - rows.first) * row_bits / 8, ((end - at) * row_bits + 7) / 8}, {}, {}});
    at = end;
  }
  if (at < wanted.second) {
    return Error(Code::kNotFound, cat("tensor \"", tensor, "\": rows ", at, " to ", wanted.second, " are on no block of this server"));
  }
  return {};
}

Result<BlockRead> HeldManifest::locate(std::string_view tensor, const Shard& part) const {
  std::vector<BlockRead> reads;
  PARAMWIRE_CHECK(cut(tensor, part, reads));
  if (reads.size() == 1) return reads.front();
  std::string cuts;
  for (const BlockRead& read : reads) cuts += cat(cuts.empty() ? "" : ", ", read.entry.shard);
  return Error(Code::kInvalid, cat("a view lies in one block; ", part, " of tensor \"", tensor, "\" spans ", reads.size(), ": ", cuts.substr(0, 200),
                                   ": view each, or fetch"));
}

Status HeldManifest::plan(std::string_view tensor, const Shard& part, std::span<std::byte> target, std::vector<BlockRead>& out) const {
  const std::size_t before = out.size();
  PARAMWIRE_CHECK(cut(tensor, part, out));
  std::uint64_t bytes = 0;
  for (std::size_t i = before; i < out.size(); ++i) bytes += out[i].range.size;
  if (target.size() != bytes) {
    return Error(Code::kInvalid, cat("tensor \"", tensor, "\" ", part, " (", dtype_name(out[before].entry.dtype), ' ', out[before].entry.shape, ") has ", bytes,
                                     " bytes, the target has ", target.size()));
  }
  std::size_t at = 0;
  for (std::size_t i = before; i < out.size(); ++i) {
    const auto size = static_cast<std::size_t>(out[i].range.size);
    out[i].target = target.subspan(at, size);
    at += size;
  }
  return {};
}

}  // namespace paramwire
