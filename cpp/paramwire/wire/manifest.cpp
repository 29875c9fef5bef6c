#include "paramwire/wire/manifest.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>
#include <openssl/evp.h>

namespace paramwire {

namespace {

constexpr std::uint8_t kDeltaFormat = 1;

// Entries a page at most, on average: a change copies and hashes one page (about 10 KiB at 40 bytes an entry), a lookup
// searches 8 steps in it; per-page memory (pointer, vectors, digest) stays under one byte an entry.
constexpr std::uint64_t kEntriesPerPage = 256;

unsigned bits_for(std::uint64_t count) {
  unsigned bits = 0;
  while ((count >> bits) > kEntriesPerPage) ++bits;
  return bits;
}

void encode_entry(ByteWriter& out, const ManifestEntry& entry) {
  out.put<std::uint64_t>(entry.id.value);
  out.put<std::uint8_t>(static_cast<std::uint8_t>(entry.kind));
  out.text(entry.tensor);
  out.varint(entry.version.epoch);
  out.varint(entry.version.counter);
  if (entry.kind == EntryKind::kAlias) {
    out.text(entry.target);
    return;
  }
  out.put<std::uint8_t>(static_cast<std::uint8_t>(entry.shard.kind));
  if (entry.shard.kind == ShardKind::kHeads) out.varint(entry.shard.heads);
  if (entry.shard.kind != ShardKind::kWhole) {
    out.varint(entry.shard.begin);
    out.varint(entry.shard.end);
  }
  out.varint(static_cast<std::uint64_t>(entry.dtype));
  out.put<std::uint8_t>(static_cast<std::uint8_t>(entry.shape.rank()));
  for (std::uint64_t dim : entry.shape.dims()) out.varint(dim);
  out.varint(static_cast<std::uint64_t>(entry.codec));
  if (entry.codec != CodecId::kRaw) out.varint(entry.stored_size);
  out.put<std::uint64_t>(entry.crc64);
  if (entry.raw_size > kExtentBytes) out.put<std::uint32_t>(entry.extent_table_crc);
}

Error malformed(const ByteReader& in, std::string_view field) {
  return Error(Code::kCorrupt, cat("manifest stream: bad ", field, " near byte ", in.position()));
}

Status decode_block_body(ByteReader& in, ManifestEntry& entry) {
  const std::uint8_t shard_kind = in.get<std::uint8_t>();
  if (shard_kind > static_cast<std::uint8_t>(ShardKind::kHeads)) return malformed(in, "shard kind");
  entry.shard.kind = static_cast<ShardKind>(shard_kind);
  if (entry.shard.kind == ShardKind::kHeads) {
    const std::uint64_t heads = in.varint();
    if (heads == 0 || heads > 0xffffffffU) return malformed(in, "shard heads");
    entry.shard.heads = static_cast<std::uint32_t>(heads);
  }
  if (entry.shard.kind != ShardKind::kWhole) {
    entry.shard.begin = in.varint();
    entry.shard.end = in.varint();
  }
  const auto dtype = dtype_from_code(in.varint());
  if (!in.ok() || !dtype.ok()) return malformed(in, "dtype");
  entry.dtype = *dtype;
  const std::uint8_t rank = in.get<std::uint8_t>();
  if (rank > Shape::kMaxAxes) return malformed(in, "rank");
  std::array<std::uint64_t, Shape::kMaxAxes> dims{};
  for (std::size_t i = 0; i < rank; ++i) dims[i] = in.varint();
  const auto shape = Shape::from({dims.data(), rank});
  if (!in.ok() || !shape.ok()) return malformed(in, "shape");
  entry.shape = *shape;
  const auto raw_size = block_bytes(entry.dtype, entry.shape, entry.shard);
  if (!raw_size.ok()) return malformed(in, "shard range");
  entry.raw_size = *raw_size;
  const std::uint64_t codec = in.varint();
  if (codec != static_cast<std::uint64_t>(CodecId::kRaw)) return malformed(in, "codec");
  entry.stored_size = entry.raw_size;
  entry.crc64 = in.get<std::uint64_t>();
  if (entry.raw_size > kExtentBytes) entry.extent_table_crc = in.get<std::uint32_t>();
  return {};
}

Result<ManifestEntry> decode_entry(ByteReader& in) {
  ManifestEntry entry;
  entry.id.value = in.get<std::uint64_t>();
  const std::uint8_t kind = in.get<std::uint8_t>();
  if (!in.ok() || kind > static_cast<std::uint8_t>(EntryKind::kAlias)) return malformed(in, "entry kind");
  entry.kind = static_cast<EntryKind>(kind);
  entry.tensor = in.text(kMaxNameBytes);
  const std::uint64_t epoch = in.varint();
  entry.version.counter = in.varint();
  if (!in.ok() || epoch > 0xffffffffU) return malformed(in, "entry version");
  entry.version.epoch = static_cast<std::uint32_t>(epoch);
  if (!entry.version.valid()) return malformed(in, "entry version");
  if (entry.kind == EntryKind::kAlias) {
    entry.target = in.text(kMaxNameBytes);
  } else {
    PARAMWIRE_CHECK(decode_block_body(in, entry));
  }
  if (!in.ok()) return malformed(in, "entry");
  if (block_id(entry.tensor, entry.shard) != entry.id) return malformed(in, "block id");
  return entry;
}

// For pages of our own making, whose bytes were checked when they came in.
ManifestEntry decode_trusted(std::span<const std::byte> bytes) {
  ByteReader in(bytes);
  auto entry = decode_entry(in);
  assert(entry.ok());
  return entry.ok() ? *entry : ManifestEntry{};
}

Status check_change(const ManifestChange& change) {
  const ManifestEntry& entry = change.entry;
  if (change.remove) return {};
  if (entry.tensor.size() > kMaxNameBytes || entry.target.size() > kMaxNameBytes) {
    return Error(Code::kInvalid, cat("a tensor name has at most ", kMaxNameBytes, " bytes; one of ",
                                     std::max(entry.tensor.size(), entry.target.size()), " was given"));
  }
  if (entry.id != block_id(entry.tensor, entry.shard)) {
    return Error(Code::kInternal, cat(entry.to_string(), ": id ", entry.id, " is not the hash of its key"));
  }
  if (entry.kind == EntryKind::kBlock) {
    PARAMWIRE_TRY(bytes, block_bytes(entry.dtype, entry.shape, entry.shard));
    if (bytes != entry.raw_size) {
      return Error(Code::kInvalid, cat(entry.to_string(), " holds ", bytes, " bytes, not ", entry.raw_size));
    }
  }
  return {};
}

}  // namespace

std::string ManifestEntry::to_string() const {
  if (shard.kind == ShardKind::kWhole) return std::string(tensor);
  return cat(tensor, '[', shard, ']');
}

Result<std::uint64_t> block_bytes(DType dtype, const Shape& shape, const Shard& shard) {
  if (shard.kind == ShardKind::kWhole) return tensor_bytes(dtype, shape);
  PARAMWIRE_TRY(rows, shard_rows(shape, shard));
  PARAMWIRE_TRY(part, shard_shape(shape, shard));
  const std::uint64_t row_bits = shape[0] == 0 ? 0 : shape.elements() / shape[0] * dtype_bits(dtype);
  if ((rows.first * row_bits) % 8 != 0 || (part.elements() * dtype_bits(dtype)) % 8 != 0) {
    return Error(Code::kInvalid, cat(shard.to_string(), ": rows of ", row_bits, " bits do not start and end on a byte"));
  }
  return tensor_bytes(dtype, part);
}

std::shared_ptr<const Manifest::Page> Manifest::seal(Page page) {
  page.bytes.shrink_to_fit();
  page.offsets.shrink_to_fit();
  page.tags.shrink_to_fit();
  page.digest = sha256(page.bytes);
  return std::make_shared<const Page>(std::move(page));
}

std::size_t Manifest::page_of(BlockId id) const noexcept {
  return page_bits_ == 0 ? 0 : static_cast<std::size_t>(id.value >> (64 - page_bits_));
}

// Merges `base` (nullptr: empty) with `changes`, both in id order.
Result<std::shared_ptr<const Manifest::Page>> Manifest::rebuild(const Page* base, std::span<const ManifestChange> changes) {
  Page page;
  ByteWriter out(page.bytes);
  const std::size_t base_count = base ? base->offsets.size() : 0;
  const auto base_bytes = [&](std::size_t i) {
    const std::size_t end = i + 1 < base_count ? base->offsets[i + 1] : base->bytes.size();
    return std::span(base->bytes).subspan(base->offsets[i], end - base->offsets[i]);
  };
  const auto append = [&](const ManifestEntry& entry, std::uint32_t tag) {
    page.offsets.push_back(static_cast<std::uint32_t>(page.bytes.size()));
    page.tags.push_back(tag);
    page.raw_bytes += entry.raw_size;
  };
  const auto keep = [&](std::size_t i) {
    append(decode_trusted(base_bytes(i)), base->tags[i]);
    out.bytes(base_bytes(i));
  };

  std::size_t at = 0;
  for (const ManifestChange& change : changes) {
    const std::uint64_t id = change.entry.id.value;
    while (at < base_count && load_le<std::uint64_t>(base_bytes(at).data()) < id) keep(at++);
    const bool present = at < base_count && load_le<std::uint64_t>(base_bytes(at).data()) == id;
    if (present) {
      const ManifestEntry old = decode_trusted(base_bytes(at));
      if (!change.remove && (old.tensor != change.entry.tensor || old.shard != change.entry.shard)) {
        return Error(Code::kInvalid, cat("block id ", change.entry.id, " of ", change.entry.to_string(),
                                         " is taken by ", old.to_string(), " (hash collision): rename one of them"));
      }
      ++at;
    } else if (change.remove) {
      return Error(Code::kNotFound, cat("block ", change.entry.id, " is not there to remove"));
    }
    if (!change.remove) {
      append(change.entry, change.tag);
      encode_entry(out, change.entry);
    }
  }
  while (at < base_count) keep(at++);
  return seal(std::move(page));
}

Manifest Manifest::repaged(unsigned bits) const {
  Manifest out = *this;
  out.page_bits_ = bits;
  std::vector<Page> pages(std::size_t{1} << bits);
  for (const auto& old : pages_) {
    for (std::size_t i = 0; i < old->offsets.size(); ++i) {
      const std::size_t end = i + 1 < old->offsets.size() ? old->offsets[i + 1] : old->bytes.size();
      const auto bytes = std::span(old->bytes).subspan(old->offsets[i], end - old->offsets[i]);
      Page& page = pages[out.page_of(BlockId{load_le<std::uint64_t>(bytes.data())})];
      page.offsets.push_back(static_cast<std::uint32_t>(page.bytes.size()));
      page.tags.push_back(old->tags[i]);
      page.raw_bytes += decode_trusted(bytes).raw_size;
      page.bytes.insert(page.bytes.end(), bytes.begin(), bytes.end());
    }
  }
  out.pages_.clear();
  for (Page& page : pages) out.pages_.push_back(seal(std::move(page)));
  return out;
}

Result<Manifest> Manifest::with_changes(const Manifest& base, Version version, std::vector<ManifestChange> changes) {
  if (!version.valid()) return Error(Code::kInternal, cat("version ", version, " has a zero part"));
  for (const ManifestChange& change : changes) PARAMWIRE_CHECK(check_change(change));
  std::sort(changes.begin(), changes.end(),
            [](const ManifestChange& a, const ManifestChange& b) { return a.entry.id < b.entry.id; });
  std::uint64_t count = base.count_;
  for (std::size_t i = 0; i < changes.size(); ++i) {
    if (i > 0 && changes[i].entry.id == changes[i - 1].entry.id) {
      return Error(Code::kInvalid, cat("two changes of block ", changes[i].entry.id, " (", changes[i].entry.to_string(),
                                       " and ", changes[i - 1].entry.to_string(), ") in one publish"));
    }
    const bool present = base.find(changes[i].entry.id).has_value();
    if (!present && !changes[i].remove) ++count;
    if (present && changes[i].remove) --count;
  }
  const unsigned bits = bits_for(count);
  Manifest out = bits == base.page_bits_ ? base : base.repaged(bits);
  out.version_ = version;
  out.pages_.resize(std::size_t{1} << bits);
  out.count_ = 0;
  out.raw_bytes_ = 0;
  std::span<const ManifestChange> rest = changes;
  for (std::size_t p = 0; p < out.pages_.size(); ++p) {
    std::size_t n = 0;
    while (n < rest.size() && out.page_of(rest[n].entry.id) == p) ++n;
    if (n > 0 || !out.pages_[p]) {
      PARAMWIRE_TRY(page, rebuild(out.pages_[p].get(), rest.first(n)));
      out.pages_[p] = std::move(page);
    }
    rest = rest.subspan(n);
    out.count_ += out.pages_[p]->offsets.size();
    out.raw_bytes_ += out.pages_[p]->raw_bytes;
  }
  return out;
}

Digest Manifest::root() const {
  std::vector<std::byte> text;
  ByteWriter out(text);
  out.text("paramwire manifest 1");
  out.varint(version_ ? version_->epoch : 0);
  out.varint(version_ ? version_->counter : 0);
  out.varint(count_);
  out.put<std::uint8_t>(static_cast<std::uint8_t>(page_bits_));
  for (const auto& page : pages_) out.bytes(page->digest);
  return sha256(text);
}

std::optional<Manifest::Hit> Manifest::find(BlockId id) const {
  if (pages_.empty()) return std::nullopt;
  const Page& page = *pages_[page_of(id)];
  const auto at = std::lower_bound(page.offsets.begin(), page.offsets.end(), id.value, [&](std::uint32_t offset, std::uint64_t want) {
    return load_le<std::uint64_t>(page.bytes.data() + offset) < want;
  });
  if (at == page.offsets.end() || load_le<std::uint64_t>(page.bytes.data() + *at) != id.value) return std::nullopt;
  return Hit{decode_trusted(std::span(page.bytes).subspan(*at)), page.tags[static_cast<std::size_t>(at - page.offsets.begin())]};
}

void Manifest::for_each(const std::function<bool(const Hit&)>& visit) const {
  for (const auto& page : pages_) {
    for (std::size_t i = 0; i < page->offsets.size(); ++i) {
      if (!visit(Hit{decode_trusted(std::span(page->bytes).subspan(page->offsets[i])), page->tags[i]})) return;
    }
  }
}

std::vector<Manifest::Hit> Manifest::tensor_blocks(std::string_view tensor) const {
  if (auto hit = find(block_id(tensor, Shard::whole()))) {
    if (hit->entry.kind == EntryKind::kBlock) return {*hit};
    tensor = hit->entry.target;
    if (auto target = find(block_id(tensor, Shard::whole())); target && target->entry.kind == EntryKind::kBlock) return {*target};
  }
  std::vector<Hit> hits;
  for_each([&](const Hit& hit) {
    if (hit.entry.kind == EntryKind::kBlock && hit.entry.tensor == tensor) hits.push_back(hit);
    return true;
  });
  std::sort(hits.begin(), hits.end(), [](const Hit& a, const Hit& b) { return a.entry.shard.begin < b.entry.shard.begin; });
  return hits;
}

std::vector<std::byte> Manifest::encode_delta(const Manifest* base, std::vector<std::uint32_t>* added) const {
  std::vector<std::byte> stream;
  ByteWriter out(stream);
  out.put<std::uint8_t>(kDeltaFormat);
  const bool has_base = base != nullptr && base->version_.has_value();
  out.put<std::uint8_t>(has_base ? 1 : 0);
  if (has_base) {
    out.varint(base->version_->epoch);
    out.varint(base->version_->counter);
    out.bytes(base->root());
  }
  out.varint(version_ ? version_->epoch : 0);
  out.varint(version_ ? version_->counter : 0);
  out.varint(count_);
  out.bytes(root());

  // Pages that both share are skipped whole; with other page bits every page differs and entries are compared one by one.
  std::vector<std::byte> entries;
  ByteWriter entry_out(entries);
  std::uint64_t entry_count = 0;
  std::vector<std::uint64_t> removed;
  const bool same_bits = has_base && base->page_bits_ == page_bits_;
  for (std::size_t p = 0; p < pages_.size(); ++p) {
    if (same_bits && base->pages_[p] == pages_[p]) continue;
    const Page& page = *pages_[p];
    for (std::size_t i = 0; i < page.offsets.size(); ++i) {
      const std::size_t end = i + 1 < page.offsets.size() ? page.offsets[i + 1] : page.bytes.size();
      const auto bytes = std::span(page.bytes).subspan(page.offsets[i], end - page.offsets[i]);
      if (has_base) {
        const auto old = base->find(BlockId{load_le<std::uint64_t>(bytes.data())});
        if (old && old->entry.version == decode_trusted(bytes).version) continue;
      }
      entry_out.bytes(bytes);
      if (added) added->push_back(page.tags[i]);
      ++entry_count;
    }
  }
  if (has_base) {
    for (std::size_t p = 0; p < base->pages_.size(); ++p) {
      if (same_bits && base->pages_[p] == pages_[p]) continue;
      for (std::uint32_t offset : base->pages_[p]->offsets) {
        const std::uint64_t id = load_le<std::uint64_t>(base->pages_[p]->bytes.data() + offset);
        if (!find(BlockId{id})) removed.push_back(id);
      }
    }
  }
  out.varint(removed.size());
  for (std::uint64_t id : removed) out.put<std::uint64_t>(id);
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
  static const Manifest kEmpty;
  const Manifest* from = &kEmpty;
  if (has_base) {
    const std::uint64_t epoch = in.varint();
    const std::uint64_t counter = in.varint();
    const auto root = in.bytes(sizeof(Digest));
    if (!in.ok()) return malformed(in, "base");
    if (base == nullptr || !base->version_ || base->version_->epoch != epoch || base->version_->counter != counter ||
        !std::ranges::equal(root, base->root())) {
      return Error(Code::kStale, cat("manifest delta is against version ", epoch, '.', counter, ", this side holds ",
                                     base ? to_text(base->version_) : "none", ": ask for the whole manifest"));
    }
    from = base;
  }
  Version version;
  const std::uint64_t epoch = in.varint();
  version.counter = in.varint();
  if (!in.ok() || epoch > 0xffffffffU) return malformed(in, "version");
  version.epoch = static_cast<std::uint32_t>(epoch);
  const std::uint64_t count = in.varint();
  const auto root = in.bytes(sizeof(Digest));
  if (!in.ok()) return malformed(in, "root");

  std::vector<ManifestChange> changes;
  const std::uint64_t removed = in.varint();
  if (removed > in.remaining() / 8) return malformed(in, "removed count");  // bounded by the bytes that are there
  for (std::uint64_t i = 0; i < removed; ++i) {
    ManifestChange change;
    change.remove = true;
    change.entry.id.value = in.get<std::uint64_t>();
    changes.push_back(change);
  }
  const std::uint64_t added = in.varint();
  constexpr std::uint64_t kSmallestEntry = 8 + 1 + 1 + 1 + 1;  // id, kind, empty name, version: no entry is smaller
  if (!in.ok() || added > in.remaining() / kSmallestEntry) return malformed(in, "entry count");
  for (std::uint64_t i = 0; i < added; ++i) {
    PARAMWIRE_TRY(entry, decode_entry(in));
    changes.push_back(ManifestChange{entry, false, tag_of(static_cast<std::size_t>(i))});
  }
  if (!in.finished()) return malformed(in, "end (bytes left over)");
  if (!version.valid()) {  // the empty manifest of a server that has published nothing
    if (count != 0 || !changes.empty() || version != Version{}) return malformed(in, "version");
    return Manifest{};
  }
  auto result = with_changes(*from, version, std::move(changes));
  if (!result.ok()) return Error(Code::kCorrupt, cat("manifest stream does not apply: ", result.error().message()));
  if (result->count_ != count || !std::ranges::equal(root, result->root())) {
    return Error(Code::kCorrupt, cat("manifest of version ", version, " does not match its SHA-256 root"));
  }
  return result;
}

std::uint64_t Manifest::memory_bytes() const noexcept {
  std::uint64_t bytes = pages_.size() * sizeof(pages_[0]);
  for (const auto& page : pages_) {
    bytes += sizeof(Page) + page->bytes.capacity() + 4 * (page->offsets.capacity() + page->tags.capacity());
  }
  return bytes;
}

Digest sha256(std::span<const std::byte> bytes) {
  Digest digest{};
  unsigned size = 0;
  const int ok = EVP_Digest(bytes.data(), bytes.size(), reinterpret_cast<unsigned char*>(digest.data()), &size, EVP_sha256(), nullptr);
  assert(ok == 1 && size == digest.size());
  static_cast<void>(ok);
  return digest;
}

}  // namespace paramwire
