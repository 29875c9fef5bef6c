// A manifest as a client holds it: with the locators of its blocks, and the cuts of sharded tensors. Immutable once made;
// shared by all snapshots of that version. Any thread.
#pragma once

#include "paramwire/net/transport.hpp"
#include "paramwire/wire/block_header.hpp"
#include "paramwire/wire/manifest.hpp"

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace paramwire {

// Locators by tag, shared piece by piece between versions: each delta adds a piece. 28 bytes of wire are 32 here.
class LocatorTable {
 public:
  // errors: none; a tag outside gives a locator that no reader accepts.
  Locator at(std::uint32_t tag) const noexcept;
  std::uint32_t size() const noexcept { return size_; }
  // This table with `added` behind it.
  LocatorTable with(std::vector<Locator> added) const;

 private:
  struct Piece {
    std::uint32_t begin = 0;
    std::shared_ptr<const std::vector<Locator>> locators;
  };
  // Pieces before they are melted into one: bounds the search of at() to 6 steps.
  static constexpr std::size_t kPiecesMax = 64;
  std::vector<Piece> pieces_;
  std::uint32_t size_ = 0;
};

class HeldManifest {
 public:
  HeldManifest(Manifest manifest, LocatorTable locators, const Incarnation& incarnation)
      : manifest_(std::move(manifest)), locators_(std::move(locators)), incarnation_(incarnation) {}

  const Manifest& manifest() const noexcept { return manifest_; }
  const LocatorTable& locators() const noexcept { return locators_; }
  const Incarnation& incarnation() const noexcept { return incarnation_; }

  // Blocks of a tensor by first row, aliases followed. errors: kNotFound naming the tensor and the nearest names.
  Result<std::vector<Manifest::Hit>> blocks(std::string_view tensor) const;

  // The block reads that bring `part` of `tensor` into `target`, in row order; targets are parts of `target`.
  // errors: kNotFound; kInvalid for a part outside the tensor or a target of another size; kNotFound for rows that no block
  //         of this server holds.
  Status plan(std::string_view tensor, const Shard& part, std::span<std::byte> target, std::vector<BlockRead>& out) const;
  Status plan(BlockId block, std::span<std::byte> target, std::vector<BlockRead>& out) const;

  // The one block read that `part` of `tensor` is, without a target: for views.
  // errors: kInvalid when the part spans blocks, naming the cuts; as plan.
  Result<BlockRead> locate(std::string_view tensor, const Shard& part) const;
  Result<BlockRead> locate(BlockId block) const;

 private:
  Status cut(std::string_view tensor, const Shard& part, std::vector<BlockRead>& out) const;
  std::string nearest(std::string_view tensor) const;

  Manifest manifest_;
  LocatorTable locators_;
  Incarnation incarnation_;
  mutable std::once_flag cut_once_;
  mutable std::unordered_map<std::string_view, std::vector<Manifest::Hit>> cut_;  // tensors held in parts; views into manifest_
};

}  // namespace paramwire
