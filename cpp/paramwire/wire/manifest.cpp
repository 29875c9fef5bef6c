#include "paramwire/wire/manifest.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>
#include <limits>
#include <openssl/evp.h>

namespace paramwire {

namespace {

// Entries a page on average at most: a change copies and hashes one page (about 10 KiB at 40 bytes an entry). Pages hold 128
// to 256 entries each, so the 200 bytes of a page (vectors, digest, allocator) are under 2 bytes an entry. The value decides
// page_bits and by it the root: part of the format.
constexpr std::uint64_t kEntriesPerPage = 256;

unsigned bits_for(std::uint64_t count) {
  unsigned bits = 0;
  while ((count >> bits) > kEntriesPerPage) ++bits;
  return bits;
}

std::uint64_t id_of(const std::byte* entry) noexcept { return load_le<std::uint64_t>(entry); }

}  // namespace

Status ManifestDraft::put(const ManifestEntry& entry, std::uint32_t tag) {
  PARAMWIRE_CHECK(check_entry(entry));
  const std::size_t offset = bytes_.size();
  encode_entry(bytes_, entry);
  items_.push_back({entry.id.value, offset, static_cast<std::uint32_t>(bytes_.size() - offset), tag});
  newest_ = std::max(newest_, entry.version);
  return {};
}

void ManifestDraft::remove(BlockId id) { items_.push_back({id.value, 0, 0, 0}); }

Manifest::PagePtr Manifest::seal(Page page) {
  page.bytes.shrink_to_fit();
  page.rows.shrink_to_fit();
  page.digest = sha256(page.bytes);
  return std::make_shared<const Page>(std::move(page));
}

std::size_t Manifest::page_of(std::uint64_t id) const noexcept {
  return page_bits_ == 0 ? 0 : static_cast<std::size_t>(id >> (64 - page_bits_));
}

Manifest::Found Manifest::entry_at(const Page& page, std::size_t index) noexcept {
  const std::size_t end = index + 1 < page.rows.size() ? page.rows[index + 1].offset : page.bytes.size();
  const Row row = page.rows[index];
  return {page.bytes.data() + row.offset, static_cast<std::uint32_t>(end - row.offset), row.tag};
}

std::optional<Manifest::Found> Manifest::locate(std::uint64_t id) const noexcept {
  if (pages_.empty()) return std::nullopt;
  const Page& page = *pages_[page_of(id)];
  const std::size_t count = page.rows.size();
  if (count == 0) return std::nullopt;
  const auto id_at = [&](std::size_t i) { return id_of(page.bytes.data() + page.rows[i].offset); };
  // Ids are hashes, so they lie evenly over the page's range: look where this one should be, and where the id found there says that it
  // should (interpolation search, Perl, Itai and Avni, CACM 21(7), 1978), then gallop, which stays logarithmic for ids that somebody chose.
  // Each look is two cache misses in a large manifest: with one alone the gallop takes a dozen.
  const auto place = [&](std::uint64_t of) { return static_cast<std::size_t>((((of << page_bits_) >> 32) * count) >> 32); };
  std::size_t guess = place(id);
  const std::size_t found = place(id_at(guess));
  guess = found <= guess ? std::min(count - 1, guess + (guess - found)) : guess - std::min(guess, found - guess);
  std::size_t low = 0;
  std::size_t high = count;
  std::size_t step = 1;
  if (id_at(guess) < id) {
    low = guess + 1;
    while (low + step < count && id_at(low + step) < id) {
      low += step + 1;
      step *= 2;
    }
    high = std::min(count, low + step);
  } else {
    high = guess;  // id_at(high) >= id
    while (high > step && id_at(high - step - 1) >= id) {
      high -= step + 1;
      step *= 2;
    }
    low = high > step ? high - step : 0;
  }
  while (low < high) {
    const std::size_t middle = low + (high - low) / 2;
    if (id_at(middle) < id) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == count || id_at(low) != id) return std::nullopt;
  return entry_at(page, low);
}

// Merges `base` (nullptr: empty) with `items`, both in id order.
Result<Manifest::PagePtr> Manifest::merge(const Page* base, std::span<const std::byte> encoded, std::span<const Item> items) {
  const std::size_t base_count = base ? base->rows.size() : 0;
  std::size_t bytes = base ? base->bytes.size() : 0;
  for (const Item& item : items) bytes += item.size;
  if (bytes > std::numeric_limits<std::uint32_t>::max()) {
    return Error(Code::kInvalid, cat("a manifest page would hold ", bytes, " bytes, over the 4 GiB that its offsets reach"));
  }
  Page page;
  page.bytes.reserve(bytes);
  page.rows.reserve(base_count + items.size());
  page.raw_bytes = base ? base->raw_bytes : 0;
  const auto append = [&](const std::byte* entry, std::size_t size, std::uint32_t tag) {
    page.rows.push_back({static_cast<std::uint32_t>(page.bytes.size()), tag});
    page.bytes.insert(page.bytes.end(), entry, entry + size);
  };

  std::size_t at = 0;
  const auto keep = [&] {
    const Found old = entry_at(*base, at++);
    append(old.bytes, old.size, old.tag);
  };
  for (const Item& item : items) {
    while (at < base_count && id_of(entry_at(*base, at).bytes) < item.id) keep();
    const std::byte* added = item.size > 0 ? encoded.data() + item.offset : nullptr;
    if (at < base_count && id_of(entry_at(*base, at).bytes) == item.id) {
      const ManifestEntry old = decode_checked_entry(entry_at(*base, at).bytes);
      if (added) {
        const ManifestEntry entry = decode_checked_entry(added);
        if (old.tensor != entry.tensor || old.shard != entry.shard) {
          return Error(Code::kInvalid, cat("block id ", entry.id, " of ", entry.to_string(), " is taken by ", old.to_string(),
                                           " (hash collision): rename one of them"));
        }
      }
      page.raw_bytes -= old.raw_size;
      ++at;
    } else if (!added) {
      return Error(Code::kNotFound, cat("block ", BlockId{item.id}, " is not there to remove"));
    }
    if (added) {
      append(added, item.size, item.tag);
      page.raw_bytes += decode_checked_entry(added).raw_size;
    }
  }
  while (at < base_count) keep();
  return seal(std::move(page));
}

Manifest Manifest::repaged(unsigned bits) const {
  Manifest out;
  out.page_bits_ = bits;
  std::vector<Page> pages(std::size_t{1} << bits);
  for (const auto& old : pages_) {
    for (std::size_t i = 0; i < old->rows.size(); ++i) {
      const Found entry = entry_at(*old, i);
      Page& page = pages[out.page_of(id_of(entry.bytes))];
      page.rows.push_back({static_cast<std::uint32_t>(page.bytes.size()), entry.tag});
      page.raw_bytes += decode_checked_entry(entry.bytes).raw_size;
      page.bytes.insert(page.bytes.end(), entry.bytes, entry.bytes + entry.size);
    }
  }
  out.pages_.reserve(pages.size());
  for (Page& page : pages) out.pages_.push_back(seal(std::move(page)));
  return out;
}

Result<Manifest> Manifest::build(const Manifest& base, Version version, std::span<const std::byte> encoded, std::vector<Item> items) {
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.id < b.id; });
  std::uint64_t count = base.count_;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (i > 0 && items[i].id == items[i - 1].id) {
      const auto name = [&](const Item& item) {
        return item.size == 0 ? std::string("a removal") : decode_checked_entry(encoded.data() + item.offset).to_string();
      };
      return Error(Code::kInvalid, cat("two changes of block ", BlockId{items[i].id}, " in one publish: ", name(items[i - 1]), " and ",
                                       name(items[i]), "; where the names differ it is a hash collision: rename one"));
    }
    const bool present = base.locate(items[i].id).has_value();
    if (!present && items[i].size > 0) ++count;
    if (present && items[i].size == 0) --count;
  }
  const unsigned bits = bits_for(count);
  Manifest out = bits == base.page_bits_ ? base : base.repaged(bits);
  out.version_ = version;
  out.pages_.resize(std::size_t{1} << bits);
  out.count_ = 0;
  out.raw_bytes_ = 0;
  std::span<const Item> rest = items;
  for (std::size_t p = 0; p < out.pages_.size(); ++p) {
    std::size_t n = 0;
    while (n < rest.size() && out.page_of(rest[n].id) == p) ++n;
    if (n > 0 || !out.pages_[p]) {
      PARAMWIRE_TRY(page, merge(out.pages_[p].get(), encoded, rest.first(n)));
      out.pages_[p] = std::move(page);
    }
    rest = rest.subspan(n);
    out.count_ += out.pages_[p]->rows.size();
    out.raw_bytes_ += out.pages_[p]->raw_bytes;
  }
  out.root_ = root_of(out);
  return out;
}

Result<Manifest> Manifest::with_changes(const Manifest& base, Version version, ManifestDraft draft) {
  if (!version.valid()) return Error(Code::kInternal, cat("version ", version, " has a zero part"));
  if (draft.newest_ > version) {
    return Error(Code::kInvalid, cat("an entry of version ", draft.newest_, " is newer than the manifest's version ", version));
  }
  return build(base, version, draft.bytes_, std::move(draft.items_));
}

Result<Manifest> Manifest::with_changes(const Manifest& base, Version version, std::vector<ManifestChange> changes) {
  ManifestDraft draft;
  for (const ManifestChange& change : changes) {
    if (change.remove) {
      draft.remove(change.entry.id);
    } else {
      PARAMWIRE_CHECK(draft.put(change.entry, change.tag));
    }
  }
  return with_changes(base, version, std::move(draft));
}

Digest Manifest::root_of(const Manifest& manifest) {
  std::vector<std::byte> text;
  ByteWriter out(text);
  out.text("paramwire manifest 1");
  out.varint(manifest.version_ ? manifest.version_->epoch : 0);
  out.varint(manifest.version_ ? manifest.version_->counter : 0);
  out.varint(manifest.count_);
  out.put<std::uint8_t>(static_cast<std::uint8_t>(manifest.page_bits_));
  for (const auto& page : manifest.pages_) out.bytes(page->digest);
  return sha256(text);
}

Digest Manifest::root() const { return version_ ? root_ : root_of(*this); }

std::optional<Manifest::Hit> Manifest::find(BlockId id) const {
  const auto found = locate(id.value);
  if (!found) return std::nullopt;
  return Hit{decode_checked_entry(found->bytes), found->tag};
}

void Manifest::for_each(const std::function<bool(const Hit&)>& visit) const {
  for (const auto& page : pages_) {
    for (const Row row : page->rows) {
      if (!visit(Hit{decode_checked_entry(page->bytes.data() + row.offset), row.tag})) return;
    }
  }
}

std::vector<Manifest::Hit> Manifest::tensor_blocks(std::string_view tensor) const {
  if (const auto hit = find(block_id(tensor, Shard::whole())); hit && hit->entry.tensor == tensor) {
    if (hit->entry.kind == EntryKind::kBlock) return {*hit};
    tensor = hit->entry.target;
    const auto target = find(block_id(tensor, Shard::whole()));
    if (target && target->entry.kind == EntryKind::kBlock && target->entry.tensor == tensor) return {*target};
  }
  std::vector<Hit> hits;
  for (const auto& page : pages_) {
    for (const Row row : page->rows) {
      const std::byte* bytes = page->bytes.data() + row.offset;
      if (checked_entry_name(bytes) != tensor) continue;
      Hit hit{decode_checked_entry(bytes), row.tag};
      if (hit.entry.kind == EntryKind::kBlock) hits.push_back(hit);
    }
  }
  const auto first_row = [](const Hit& hit) {
    const auto rows = shard_rows(hit.entry.shape, hit.entry.shard);
    return rows.ok() ? (*rows).first : 0;
  };
  std::sort(hits.begin(), hits.end(), [&](const Hit& a, const Hit& b) { return first_row(a) < first_row(b); });
  return hits;
}

std::uint64_t Manifest::memory_bytes() const noexcept { return memory_bytes_beside(Manifest{}); }

std::uint64_t Manifest::memory_bytes_beside(const Manifest& other) const noexcept {
  std::uint64_t bytes = pages_.capacity() * sizeof(pages_[0]);
  for (std::size_t p = 0; p < pages_.size(); ++p) {
    if (other.pages_.size() == pages_.size() && other.pages_[p] == pages_[p]) continue;
    const Page& page = *pages_[p];
    bytes += sizeof(Page) + page.bytes.capacity() + sizeof(Row) * page.rows.capacity();
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
