// The stream of a manifest delta, both ways. Layout: wire/FORMAT.md, "Manifest delta".
#include "paramwire/base/bytes.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/wire/manifest.hpp"

#include <algorithm>

namespace paramwire {

namespace {

constexpr std::uint8_t kDeltaFormat = 1;

void put_version(ByteWriter& out, const std::optional<Version>& version) {
  out.varint(version ? version->epoch : 0);
  out.varint(version ? version->counter : 0);
}

// nullopt when malformed; the reader may still be ok() then.
std::optional<Version> get_version(ByteReader& in) {
  const std::uint64_t epoch = in.varint();
  const std::uint64_t counter = in.varint();
  if (!in.ok() || epoch > 0xffffffffU) return std::nullopt;
  return Version{static_cast<std::uint32_t>(epoch), counter};
}

}  // namespace

std::vector<std::byte> Manifest::encode_delta(const Manifest* base, std::vector<std::uint32_t>* added) const {
  std::vector<std::byte> stream;
  ByteWriter out(stream);
  out.put<std::uint8_t>(kDeltaFormat);
  const bool has_base = base != nullptr && base->version_ && version_;
  out.put<std::uint8_t>(has_base ? 1 : 0);
  if (has_base) {
    put_version(out, base->version_);
    out.bytes(base->root());
  }
  put_version(out, version_);
  out.varint(count_);
  out.bytes(root());

  // Pages that both hold are skipped whole; with other page bits every page differs and entries are compared one by one.
  const bool same_bits = has_base && base->page_bits_ == page_bits_ && base->pages_.size() == pages_.size();
  const auto same_page = [&](std::size_t p) {
    return same_bits && (base->pages_[p] == pages_[p] || base->pages_[p]->digest == pages_[p]->digest);
  };
  std::vector<std::uint64_t> removed;
  for (std::size_t p = 0; has_base && p < base->pages_.size(); ++p) {
    if (same_page(p)) continue;
    const Page& page = *base->pages_[p];
    for (std::size_t i = 0; i < page.rows.size(); ++i) {
      const std::uint64_t id = load_le<std::uint64_t>(entry_at(page, i).bytes);
      if (!locate(id)) removed.push_back(id);
    }
  }
  out.varint(removed.size());
  for (std::uint64_t id : removed) out.put<std::uint64_t>(id);

  std::vector<std::byte> entries;
  std::uint64_t entry_count = 0;
  for (std::size_t p = 0; p < pages_.size(); ++p) {
    if (same_page(p)) continue;
    const Page& page = *pages_[p];
    for (std::size_t i = 0; i < page.rows.size(); ++i) {
      const Found entry = entry_at(page, i);
      if (has_base) {
        const auto old = base->locate(load_le<std::uint64_t>(entry.bytes));
        if (old && std::equal(entry.bytes, entry.bytes + entry.size, old->bytes, old->bytes + old->size)) continue;
      }
      entries.insert(entries.end(), entry.bytes, entry.bytes + entry.size);
      if (added) added->push_back(entry.tag);
      ++entry_count;
    }
  }
  out.varint(entry_count);
  out.bytes(entries);
  return stream;
}

Result<Manifest> Manifest::apply_delta(const Manifest* base, std::span<const std::byte> stream,
                                       const std::function<std::uint32_t(std::size_t)>& tag_of) {
  ByteReader in(stream);
  if (in.get<std::uint8_t>() != kDeltaFormat) return malformed(in, "format");
  const std::uint8_t has_base = in.get<std::uint8_t>();
  if (!in.ok() || has_base > 1) return malformed(in, "base flag");
  const Manifest empty;
  const Manifest* from = &empty;
  if (has_base == 1) {
    const auto named = get_version(in);
    const auto root = in.bytes(sizeof(Digest));
    if (!in.ok() || !named || !named->valid()) return malformed(in, "base");
    if (base == nullptr || base->version_ != named || !std::ranges::equal(root, base->root())) {
      return Error(Code::kStale, cat("manifest delta is against version ", *named, ", this side holds ",
                                     base ? to_text(base->version_) : "none",
                                     base && base->version_ == named ? " with another root" : "", ": ask for the whole manifest"));
    }
    from = base;
  }
  const auto version = get_version(in);
  const std::uint64_t count = in.varint();
  const auto root = in.bytes(sizeof(Digest));
  if (!in.ok() || !version || (!version->valid() && *version != Version{})) return malformed(in, "version");

  // Both counts are bounded by the bytes that are there before anything is allocated for them.
  std::vector<Item> items;
  const std::uint64_t removed = in.varint();
  if (removed > in.remaining() / 8) return malformed(in, "removed count");
  for (std::uint64_t i = 0, last = 0; i < removed; ++i) {
    const auto id = in.get<std::uint64_t>();
    if (id <= last) return malformed(in, "removed id (not ascending)");
    items.push_back({id, 0, 0, 0});
    last = id;
  }
  constexpr std::uint64_t kSmallestEntry = 8 + 1 + 2 + 2 + 2;  // an alias: id, kind, two one-byte names, version
  const std::uint64_t added = in.varint();
  if (!in.ok() || added > in.remaining() / kSmallestEntry) return malformed(in, "entry count");
  items.reserve(items.size() + static_cast<std::size_t>(added));
  for (std::uint64_t i = 0, last = 0; i < added; ++i) {
    const std::size_t offset = in.position();
    PARAMWIRE_TRY(entry, decode_entry(in));
    if (entry.id.value <= last) return malformed(in, "entry id (not ascending)");
    if (entry.version > *version) return malformed(in, "entry version (newer than the manifest's)");
    items.push_back({entry.id.value, offset, static_cast<std::uint32_t>(in.position() - offset), 0});
    last = entry.id.value;
  }
  if (!in.finished()) return malformed(in, "end (bytes left over)");
  if (!version->valid()) {  // the empty manifest of a server that has published nothing
    if (count != 0 || !items.empty() || !std::ranges::equal(root, empty.root())) return malformed(in, "version");
    return Manifest{};
  }
  for (std::size_t i = 0; i < added; ++i) items[static_cast<std::size_t>(removed) + i].tag = tag_of(i);
  auto result = build(*from, *version, stream, std::move(items));
  if (!result.ok()) return Error(Code::kCorrupt, cat("manifest stream does not apply: ", result.error().message()));
  if (result->count_ != count || !std::ranges::equal(root, result->root())) {
    return Error(Code::kCorrupt, cat("manifest of version ", *version, " does not match its SHA-256 root"));
  }
  return result;
}

}  // namespace paramwire
