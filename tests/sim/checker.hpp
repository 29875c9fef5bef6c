// Judges from outside: knows what publishers sent and what was committed, and compares every byte and manifest that a
// reader accepts with it.
#pragma once

#include "paramwire/base/types.hpp"
#include "paramwire/wire/manifest.hpp"
#include "paramwire/wire/message.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>

namespace paramwire::sim {

// Bytes [offset, offset + target.size()) of the content named by `key`: different for every key at every word.
void content(std::uint64_t key, std::uint64_t offset, std::span<std::byte> target);
// True when `bytes` are exactly those.
bool is_content(std::uint64_t key, std::uint64_t offset, std::span<const std::byte> bytes);

class Checker {
 public:
  explicit Checker(std::function<void(std::string)> fail) : fail_(std::move(fail)) {}

  struct Block {
    Version version;
    std::uint64_t key = 0;       // of its content
    std::uint64_t size = 0;
    bool alias = false;
    std::string name;
    bool operator==(const Block&) const = default;
  };
  // What a publish will change if it commits; recorded by the publisher before it asks for the commit.
  struct Intent {
    std::map<BlockId, Block> put;
    std::map<BlockId, bool> removed;
  };
  Intent& intent(PublishId id) { return intents_[id]; }

  // A server is about to answer FINISH of `id`: the next commit belongs to it.
  void finishing(PublishId id) { finishing_ = id; }
  // The clock of `server` moved. P2: whole intents, in one line, on the version before.
  void committed(const Incarnation& server, const std::optional<Version>& base, Version next);
  // A publisher was told that `id` became `version`.
  void published(const Incarnation& server, PublishId id, Version version);
  // A reader accepted a manifest. P2, P9: it is one that this server committed, entry by entry.
  void manifest(const Incarnation& server, const Manifest& manifest);
  // A reader accepted bytes of a block as of snapshot `version`. P1.
  bool bytes(const Incarnation& server, Version snapshot, const ManifestEntry& entry, ByteRange range, std::span<const std::byte> bytes, std::string_view how);
  std::optional<std::uint64_t> key(const Incarnation& server, Version snapshot, BlockId block) const;
  void fail(std::string text) { fail_(std::move(text)); }

 private:
  using ServerVersion = std::pair<std::pair<std::uint64_t, std::uint64_t>, Version>;
  static ServerVersion at(const Incarnation& server, Version version) { return {{server.high, server.low}, version}; }

  std::function<void(std::string)> fail_;
  std::map<PublishId, Intent> intents_;
  std::map<ServerVersion, std::map<BlockId, Block>> committed_;
  std::map<ServerVersion, PublishId> by_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, Version> newest_;
  std::optional<PublishId> finishing_;
};

}  // namespace paramwire::sim
