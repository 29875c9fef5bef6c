#include "sim/checker.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cstring>

namespace paramwire::sim {

namespace {
std::uint64_t word(std::uint64_t key, std::uint64_t index) {
  std::uint64_t z = key + (index + 1) * 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  return z ^ (z >> 27);
}
}  // namespace

void content(std::uint64_t key, std::uint64_t offset, std::span<std::byte> target) {
  for (std::size_t i = 0; i < target.size();) {
    const std::uint64_t at = offset + i;
    const std::uint64_t value = word(key, at / 8);
    const std::size_t skip = static_cast<std::size_t>(at % 8);
    const std::size_t n = std::min<std::size_t>(8 - skip, target.size() - i);
    std::memcpy(target.data() + i, reinterpret_cast<const char*>(&value) + skip, n);
    i += n;
  }
}

bool is_content(std::uint64_t key, std::uint64_t offset, std::span<const std::byte> bytes) {
  for (std::size_t i = 0; i < bytes.size();) {
    const std::uint64_t at = offset + i;
    const std::uint64_t value = word(key, at / 8);
    const std::size_t skip = static_cast<std::size_t>(at % 8);
    const std::size_t n = std::min<std::size_t>(8 - skip, bytes.size() - i);
    if (std::memcmp(bytes.data() + i, reinterpret_cast<const char*>(&value) + skip, n) != 0) return false;
    i += n;
  }
  return true;
}

void Checker::committed(const Incarnation& server, const std::optional<Version>& base, Version next) {
  const auto who = std::pair(server.high, server.low);
  const auto newest = newest_.find(who);
  const std::optional<Version> before = newest == newest_.end() ? std::nullopt : std::optional(newest->second);
  if (!finishing_) return fail_(cat("version ", next, " was committed though nobody finished a publish"));
  if (base != before) return fail_(cat("P2: version ", next, " was committed on base ", to_text(base), " though the newest was ", to_text(before), ": an update is lost"));
  if (before && next <= *before) return fail_(cat("P9: version ", next, " was committed after ", *before));
  std::map<BlockId, Block> blocks;
  if (base) blocks = committed_.at(at(server, *base));
  const Intent& intent = intents_[*finishing_];
  for (const auto& [id, gone] : intent.removed) blocks.erase(id);
  for (const auto& [id, block] : intent.put) {
    blocks[id] = block;
    blocks[id].version = next;
  }
  committed_[at(server, next)] = std::move(blocks);
  by_[at(server, next)] = *finishing_;
  newest_[who] = next;
}

void Checker::published(const Incarnation& server, PublishId id, Version version) {
  const auto it = by_.find(at(server, version));
  if (it == by_.end() || it->second != id) fail_(cat("publish ", id, " was told that it is version ", version, ", which it is not"));
}

void Checker::manifest(const Incarnation& server, const Manifest& manifest) {
  if (!manifest.version()) return;
  const auto it = committed_.find(at(server, *manifest.version()));
  if (it == committed_.end()) return fail_(cat("P9: a manifest of version ", *manifest.version(), " that server ", server, " never committed"));
  std::size_t seen = 0;
  manifest.for_each([&](const Manifest::Hit& hit) {
    const auto block = it->second.find(hit.entry.id);
    if (block == it->second.end() || block->second.version != hit.entry.version || block->second.name != hit.entry.tensor ||
        block->second.alias != (hit.entry.kind == EntryKind::kAlias)) {
      fail_(cat("P2: snapshot ", *manifest.version(), " holds ", hit.entry.to_string(), " at version ", hit.entry.version, ", which was not committed with it"));
      return false;
    }
    ++seen;
    return true;
  });
  if (seen != it->second.size()) fail_(cat("P2: snapshot ", *manifest.version(), " has ", seen, " entries, ", it->second.size(), " were committed"));
}

std::optional<std::uint64_t> Checker::key(const Incarnation& server, Version snapshot, BlockId block) const {
  const auto it = committed_.find(at(server, snapshot));
  if (it == committed_.end()) return std::nullopt;
  const auto found = it->second.find(block);
  return found == it->second.end() ? std::nullopt : std::optional(found->second.key);
}

bool Checker::bytes(const Incarnation& server, Version snapshot, const ManifestEntry& entry, ByteRange range, std::span<const std::byte> bytes, std::string_view how) {
  const auto expected = key(server, snapshot, entry.id);
  if (expected && is_content(*expected, range.offset, bytes)) return true;
  fail_(cat("P1: ", how, " accepted bytes ", range.offset, " to ", range.offset + range.size, " of ", entry.to_string(), " at version ", entry.version, " in snapshot ",
            snapshot, ", which are not what was published"));
  return false;
}

}  // namespace paramwire::sim
