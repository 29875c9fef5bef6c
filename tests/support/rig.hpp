// A real server in this process with a model in it, and what a client needs to read from it. For tests of links and servers.
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/control_link.hpp"
#include "paramwire/net/transport.hpp"
#include "paramwire/server/server.hpp"
#include "paramwire/wire/manifest.hpp"
#include "paramwire/wire/message.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

namespace paramwire::testing {

inline Micros in_seconds(Micros seconds) { return steady_clock().now() + seconds * kMicrosPerSecond; }

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "pw-test-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline Bytes random_bytes(std::size_t size, std::uint64_t seed) {
  Bytes out(size);
  Random random(seed);
  for (std::size_t i = 0; i < size; i += 8) {
    const std::uint64_t word = random.next();
    std::memcpy(out.data() + i, &word, std::min<std::size_t>(size - i, sizeof word));  // little-endian, as all hosts that this runs on
  }
  return out;
}

// A value, or a failed test that says why.
template <typename T>
T must(Result<T> result) {
  if (!result.ok()) {
    ADD_FAILURE() << result.error().to_string();
    std::abort();
  }
  return std::move(result).value();
}
inline void must(const Status& status) {
  if (!status.ok()) ADD_FAILURE() << status.error().to_string();
}

// One snapshot as a client holds it: each entry's tag is the index of its locator.
struct Snapshot {
  Manifest manifest;
  std::vector<Locator> locators;

  BlockRead read_of(BlockId id, ByteRange range, std::span<std::byte> target) const {
    const auto hit = manifest.find(id);
    if (!hit) {
      ADD_FAILURE() << "no block " << id.to_string();
      std::abort();
    }
    return BlockRead{hit->entry, locators[hit->tag], range, target, {}};
  }
  BlockRead read_of(std::string_view tensor, ByteRange range, std::span<std::byte> target) const {
    return read_of(block_id(tensor, Shard::whole()), range, target);
  }
  ManifestEntry entry(std::string_view tensor) const { return manifest.find(block_id(tensor, Shard::whole()))->entry; }
  Locator locator(std::string_view tensor) const { return locators[manifest.find(block_id(tensor, Shard::whole()))->tag]; }
};

class Rig {
 public:
  explicit Rig(ServerOptions options = {}) {
    if (options.listen.empty()) options.unix_directory = directory_.path();
    server = must(Server::open(options));
  }

  const Endpoint& unix_endpoint() const { return server->endpoints()[0]; }
  const Endpoint& tcp_endpoint() const { return server->endpoints()[1]; }

  // One u8 vector a pair, in one version.
  Version publish(const std::vector<std::pair<std::string, Bytes>>& tensors) {
    auto publish = must(server->publish());
    for (const auto& [name, bytes] : tensors) must(publish.put(BlockSpec{name, DType::kU8, Shape{bytes.size()}, {}}, bytes));
    return must(publish.finish());
  }

  // A turn of the server's loop: it has seen what came to it before.
  void round_trip() {
    const std::uint64_t request = control().next_request();
    must(control().call(encode_empty(FrameType::kStat, request), request, FrameType::kStats, in_seconds(30)));
  }

  Snapshot snapshot(std::optional<Version> want = std::nullopt) {
    SnapshotMessage ask;
    ask.want = want;
    ask.locators = true;
    const std::uint64_t request = control().next_request();
    const auto answer = must(control().call(ask.encode(request), request, FrameType::kManifest, in_seconds(30)));
    const auto message = must(ManifestMessage::decode(answer.meta));
    Snapshot out;
    const std::span<const std::byte> body(answer.body);
    out.manifest = must(Manifest::apply_delta(nullptr, body.first(message.stream_size), [](std::size_t i) { return static_cast<std::uint32_t>(i); }));
    for (std::uint64_t i = 0; i < message.locator_count; ++i) {
      out.locators.push_back(read_locator(body.subspan(message.stream_size + i * kLocatorBytes).first<kLocatorBytes>()));
    }
    return out;
  }

  // The server's own bytes: its arena is mapped writable in this very process, once.
  static std::byte* arena_memory() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find("paramwire-arena") == std::string::npos || line.find("rw-s") == std::string::npos) continue;
      return reinterpret_cast<std::byte*>(std::stoull(line.substr(0, line.find('-')), nullptr, 16));
    }
    return nullptr;
  }

  // A bit of the server's memory turns over, as broken memory would do it: no thread wrote it, so nothing orders it against the
  // server's own accesses, and ThreadSanitizer is told so.
  [[gnu::noinline, gnu::no_sanitize("thread")]] static void flip(std::byte* at) {
    auto* bits = reinterpret_cast<volatile unsigned char*>(at);
    *bits = static_cast<unsigned char>(*bits ^ 1U);
  }

  std::unique_ptr<Server> server;

 private:
  ControlLink& control() {
    if (!control_) control_ = must(ControlLink::connect(unix_endpoint(), ClientId{1, 2}, in_seconds(10)));
    return *control_;
  }

  TemporaryDirectory directory_;
  std::unique_ptr<ControlLink> control_;
};

}  // namespace paramwire::testing
