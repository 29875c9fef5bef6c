// The manifest of a snapshot: every block of one version of the model, the same on every replica, under a SHA-256 root.
//
// Immutable once built; copies share their pages, so three retained versions of a million blocks that differ in one cost
// one manifest. Entries are kept in their encoded form (wire/FORMAT.md, "Manifest"), sorted by id, in pages chosen by the
// ids' top bits: lookup is two binary searches, and the root is a hash over page hashes, so that one changed block costs
// one page. Any thread may read; building is one thread.
#pragma once

#include "paramwire/base/types.hpp"

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

// Longest tensor name, in bytes of UTF-8. Bounds what one entry can make a reader allocate; the longest name seen in a
// published model is under 200 bytes. Longer names are refused, never cut.
inline constexpr std::uint64_t kMaxNameBytes = 4096;

using Digest = std::array<std::byte, 32>;

enum class EntryKind : std::uint8_t { kBlock = 0, kAlias = 1 };

// One entry, decoded. The string views point into the manifest (or delta) that it was read from.
struct ManifestEntry {
  EntryKind kind = EntryKind::kBlock;
  BlockId id;
  std::string_view tensor;     // UTF-8, any bytes but NUL are kept
  Version version;             // that wrote this entry, <= the manifest's version
  // kAlias: another name of `target` (tied weights); the rest is empty.
  std::string_view target;
  // kBlock:
  Shard shard;
  DType dtype = DType::kU8;
  Shape shape;                 // of the whole tensor; the block's is shard_shape(shape, shard)
  CodecId codec = CodecId::kRaw;
  std::uint64_t raw_size = 0;     // bytes of the block, decoded; follows from dtype, shape and shard
  std::uint64_t stored_size = 0;  // bytes that travel; equals raw_size for codec raw
  std::uint64_t crc64 = 0;        // CRC-64/XZ of the stored bytes
  std::uint32_t extent_table_crc = 0;  // CRC-32C of the extent table; 0 when the block is one extent or less

  // "blk.0.attn_q.weight[rows[0:64]]", or the name alone for a whole tensor.
  std::string to_string() const;
};

// raw_size of a block entry from its dtype, shape and shard. A row or head range of a sub-byte type must start and end on
// a byte. errors: kInvalid as shard_rows, or naming the bits that do not fill a byte.
Result<std::uint64_t> block_bytes(DType dtype, const Shape& shape, const Shard& shard);

struct ManifestChange {
  ManifestEntry entry;        // only `entry.id` matters when `remove`
  bool remove = false;
  std::uint32_t tag = 0;      // see Manifest::Hit
};

class Manifest {
 public:
  // Empty, of `version` unset: what a server holds before its first publish.
  Manifest() = default;

  // `base` with `changes` applied, as `version`. Changes may come in any order, one per id.
  // errors: kInvalid for two changes of one id, an id that stands for another key (hash collision), a malformed entry;
  //         kNotFound when an id to remove is not there.
  static Result<Manifest> with_changes(const Manifest& base, Version version, std::vector<ManifestChange> changes);

  const std::optional<Version>& version() const noexcept { return version_; }
  std::uint64_t entry_count() const noexcept { return count_; }
  std::uint64_t total_raw_bytes() const noexcept { return raw_bytes_; }
  // SHA-256, see FORMAT.md. Equal roots mean equal versions and entries. `tag`s are not part of it.
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
  // Entries of `tensor` cut in shards (or whole), by first row; follows aliases (one step). Empty when unknown.
  // Cost: one lookup for a whole tensor; otherwise a scan of all entries, so keep the answer.
  std::vector<Hit> tensor_blocks(std::string_view tensor) const;

  // The stream that brings a holder of `base` to this manifest (nullptr: from nothing). `added` gets the tags of the
  // entries sent, in stream order.
  std::vector<std::byte> encode_delta(const Manifest* base, std::vector<std::uint32_t>* added) const;
  // The inverse. `base` must be the manifest that the stream names. `tags` are given to the added entries, in stream order,
  // by calling `tag_of(i)`. The result's root is compared with the stream's: kCorrupt when it differs.
  // errors: kCorrupt for a malformed stream (naming the field and the byte), kStale when `base` is not the one named.
  static Result<Manifest> apply_delta(const Manifest* base, std::span<const std::byte> stream,
                                      const std::function<std::uint32_t(std::size_t)>& tag_of);

  // Bytes of memory that pages not shared with `other` hold: for stats and tests.
  std::uint64_t memory_bytes() const noexcept;

 private:
  struct Page {
    std::vector<std::byte> bytes;        // encoded entries, ascending ids
    std::vector<std::uint32_t> offsets;  // of each entry in `bytes`
    std::vector<std::uint32_t> tags;
    std::uint64_t raw_bytes = 0;
    Digest digest{};
  };
  using Pages = std::vector<std::shared_ptr<const Page>>;

  static std::shared_ptr<const Page> seal(Page page);
  static Result<std::shared_ptr<const Page>> rebuild(const Page* base, std::span<const ManifestChange> changes);
  Manifest repaged(unsigned bits) const;
  std::size_t page_of(BlockId id) const noexcept;

  std::optional<Version> version_;
  std::uint64_t count_ = 0;
  std::uint64_t raw_bytes_ = 0;
  unsigned page_bits_ = 0;
  Pages pages_;
};

// SHA-256 of `bytes`. FIPS 180-4, by OpenSSL.
Digest sha256(std::span<const std::byte> bytes);

}  // namespace paramwire
