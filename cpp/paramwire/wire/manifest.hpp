// The manifest of a snapshot: every block of one version of the model, the same on every replica, under a SHA-256 root.
//
// Immutable once built; copies share their pages, so three retained versions of a million blocks that differ in one cost
// one manifest. Entries are kept in their encoded form (wire/FORMAT.md, "Manifest"), sorted by id, in pages chosen by the
// ids' top bits: a lookup is an index and a short search in one page, and the root is a hash over page hashes, so that one
// changed block costs one page. Any thread may read; building is one thread.
#pragma once

#include "paramwire/base/types.hpp"
#include "paramwire/wire/manifest_entry.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

using Digest = std::array<std::byte, 32>;

struct ManifestChange {
  ManifestEntry entry;        // only `entry.id` matters when `remove`
  bool remove = false;
  std::uint32_t tag = 0;      // see Manifest::Hit
};

// Changes on the way to a manifest, kept encoded: 24 B beside each entry's own bytes (40 to 60 for a short name), where a
// ManifestChange takes over 200. A publish of a million blocks gathers them here. One thread.
class ManifestDraft {
 public:
  // Views in `entry` need not outlive the call. errors: as check_entry(); the draft is as before.
  Status put(const ManifestEntry& entry, std::uint32_t tag);
  void remove(BlockId id);
  std::size_t size() const noexcept { return items_.size(); }

 private:
  friend class Manifest;
  struct Item {
    std::uint64_t id;
    std::uint64_t offset;  // of the encoded entry
    std::uint32_t size;    // of it; 0: remove
    std::uint32_t tag;
  };
  std::vector<std::byte> bytes_;
  std::vector<Item> items_;
  Version newest_;  // of the entries put
};

class Manifest {
 public:
  // Empty, of `version` unset: what a server holds before its first publish.
  Manifest() = default;

  // `base` with the draft's changes applied, as `version`. Changes may come in any order, one per id.
  // errors: kInvalid for two changes of one id, an id that stands for another key (hash collision), an entry that
  //         check_entry() refuses or that is newer than `version`; kNotFound when an id to remove is not there;
  //         kInternal for a version with a zero part.
  static Result<Manifest> with_changes(const Manifest& base, Version version, ManifestDraft draft);
  static Result<Manifest> with_changes(const Manifest& base, Version version, std::vector<ManifestChange> changes);

  const std::optional<Version>& version() const noexcept { return version_; }
  std::uint64_t entry_count() const noexcept { return count_; }
  std::uint64_t total_raw_bytes() const noexcept { return raw_bytes_; }
  // SHA-256, see FORMAT.md. Equal roots mean equal versions and entries. `tag`s are not part of it. Computed at building.
  Digest root() const;

  // An entry with its tag: 32 bits that the holder of this manifest attaches (the server its slot, the client its
  // locator); not sent, not hashed.
  struct Hit {
    ManifestEntry entry;
    std::uint32_t tag = 0;
  };
  std::optional<Hit> find(BlockId id) const;
  // Every entry, in id order. `visit` returns false to stop.
  void for_each(const std::function<bool(const Hit&)>& visit) const;
  // Blocks of `tensor`, whole or cut in shards, by first row; follows an alias (one step). Empty when unknown. A whole block
  // hides shards of the same tensor.
  // Cost: one lookup for a whole tensor; otherwise a scan of all entries, so keep the answer.
  std::vector<Hit> tensor_blocks(std::string_view tensor) const;

  // The stream that brings a holder of `base` to this manifest (nullptr: from nothing). `added` gets the tags of the
  // entries sent, in stream order. Any two manifests will do: `base` may even be the newer one.
  std::vector<std::byte> encode_delta(const Manifest* base, std::vector<std::uint32_t>* added) const;
  // The inverse. `base` must be the manifest that the stream names. The i-th entry of the stream gets the tag `tag_of(i)`,
  // asked in order and only once the whole stream has parsed; but before the root is compared, so `tag_of` must answer for
  // any i: a damaged stream may hold more entries than its sender meant.
  // errors: kCorrupt for a malformed stream (naming the field and the byte) or a result whose root is not the stream's;
  //         kStale when `base` is not the one named.
  static Result<Manifest> apply_delta(const Manifest* base, std::span<const std::byte> stream,
                                      const std::function<std::uint32_t(std::size_t)>& tag_of);

  // Bytes of memory of all pages, those shared with other manifests too: for stats and tests.
  std::uint64_t memory_bytes() const noexcept;
  // As memory_bytes(), of the pages that `other` does not share.
  std::uint64_t memory_bytes_beside(const Manifest& other) const noexcept;

 private:
  struct Row {
    std::uint32_t offset;  // of the entry in its page's bytes
    std::uint32_t tag;     // beside the offset: a cold lookup misses the cache once for both
  };
  struct Page {
    std::vector<std::byte> bytes;  // encoded entries, ascending ids
    std::vector<Row> rows;         // one an entry
    std::uint64_t raw_bytes = 0;
    Digest digest{};
  };
  using PagePtr = std::shared_ptr<const Page>;  // shared by the manifests of successive versions
  using Item = ManifestDraft::Item;
  struct Found {
    const std::byte* bytes;
    std::uint32_t size;
    std::uint32_t tag;
  };

  static PagePtr seal(Page page);
  static Result<Manifest> build(const Manifest& base, Version version, std::span<const std::byte> encoded, std::vector<Item> items);
  static Result<PagePtr> merge(const Page* base, std::span<const std::byte> encoded, std::span<const Item> items);
  static Found entry_at(const Page& page, std::size_t index) noexcept;
  static Digest root_of(const Manifest& manifest);
  std::size_t page_of(std::uint64_t id) const noexcept;
  std::optional<Found> locate(std::uint64_t id) const noexcept;
  Manifest repaged(unsigned bits) const;

  std::optional<Version> version_;
  std::uint64_t count_ = 0;
  std::uint64_t raw_bytes_ = 0;
  unsigned page_bits_ = 0;
  std::vector<PagePtr> pages_;  // 2^page_bits_; none while version_ is unset
  Digest root_{};               // valid while version_ is set
};

// SHA-256 of `bytes`. FIPS 180-4, by OpenSSL.
Digest sha256(std::span<const std::byte> bytes);

}  // namespace paramwire
