// Blocks out of a server's memory on the same host ("shm"): arenas are mapped read-only, reads follow the slot protocol, views
// are kept by pins. The server does nothing for a read, and does not even have to be awake.
//
// Source of the protocols: net/slot_reader.hpp, net/pin_table.hpp.
#pragma once

#include "paramwire/base/endpoint.hpp"
#include "paramwire/base/fork_guard.hpp"
#include "paramwire/net/control_link.hpp"
#include "paramwire/net/shm_memory.hpp"
#include "paramwire/net/slot_reader.hpp"
#include "paramwire/net/transport.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace paramwire {

struct ShmOptions {
  OmittedReadChecks omitted;
  // For a reader under a memory budget: copies go through read calls and touch no page; pages of a view are brought in with one
  // call and leave this process's resident set when the view is released.
  bool drop_pages = false;
  // Whole blocks from kTwoThreadsFrom up are copied by two threads, the second one started for the copy.
  bool two_threads = true;
};

// One core moves 10 to 12 GB/s here, whatever the kernel's memory could do: two halves take little more than half the time.
// Starting and joining a thread costs about 0.1 ms, 4 % of what one thread needs for 32 MiB; what an engine streams is far
// smaller, so its other cores stay its own.
inline constexpr std::uint64_t kTwoThreadsFrom = std::uint64_t{32} << 20;

class ShmLink final : public Link {
 public:
  // `endpoint` must be a unix socket of the server; the link keeps that connection. Arenas are mapped as reads need them.
  // errors: kInvalid for another endpoint; as connect_and_greet; kStale when another incarnation answers.
  static Result<std::unique_ptr<Link>> connect(const Endpoint& endpoint, const Caller& caller, const Incarnation& incarnation,
                                               const ShmOptions& options, Micros deadline);
  ~ShmLink() override;

  std::string_view transport() const noexcept override { return "shm"; }
  bool one_sided() const noexcept override { return true; }
  void read(std::span<BlockRead> batch, Micros deadline) override;
  // Only the server's control part can break; what is mapped stays readable.
  bool broken() const noexcept override { return control_->broken(); }
  // Views keep arena and pin table by shared ownership, so they may outlive this link.
  Result<BlockView> view(const ManifestEntry& entry, const Locator& locator, ByteRange range) override;
  LinkStats stats() const override;

 private:
  class Memory;
  struct Verified {
    std::uint64_t seq = 0;
    Version version;
    std::uint64_t crc64 = 0;
  };
  ShmLink(std::unique_ptr<ControlLink> control, const ShmOptions& options);
  Status read_one(BlockRead& item, Micros deadline);
  Status need_pins(Micros deadline);
  Result<bool> verify_view(const ManifestEntry& entry, const Locator& locator, std::span<const std::byte> payload, const MappedArena& arena);

  ForkGuard guard_;
  std::unique_ptr<ControlLink> control_;
  ShmOptions options_;
  std::unique_ptr<Memory> memory_;
  SlotReader reader_;
  std::shared_ptr<PinTable> pins_;
  std::unordered_map<std::uint64_t, Verified> verified_;  // by pin word: what was found whole in that slot
  LinkStats stats_;
};

}  // namespace paramwire
