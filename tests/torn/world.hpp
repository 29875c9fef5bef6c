// One server's slots, one writer that rewrites them without rest, and one reader over a NIC that reads cache lines in any order: all stepped from a seed.
//
// Real are the slot table, the one-sided reader, and the queue pairs that the library makes; fake is the fabric beneath them (support/fake_verbs.hpp,
// Delivery::kLines). Between any two lines that the NIC copies the writer may take a step: withdraw a slot, reuse it, write one line of a payload,
// seal. Every word of a payload says which block, version and place it belongs to, so a wrong byte is known without any CRC. Source of the
// protocol: wire/FORMAT.md, "One-sided protocol".
#pragma once

#include "support/fake_verbs.hpp"

#include "paramwire/base/buffer.hpp"
#include "paramwire/base/env.hpp"
#include "paramwire/net/one_sided_reader.hpp"
#include "paramwire/net/verbs_device.hpp"
#include "paramwire/store/slot_table.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace paramwire::torn {

// What the reader looks at. Each alone must do; the other columns of a header (version, block, epoch) count with kBoth only.
enum class Checks : std::uint8_t { kSeq, kCrc, kBoth };
// What is done wrong, to see that it is found out: kHeaderWithPayload by the reader, kEarlyWriter by the writer, who begins a payload before seq is odd.
enum class Wrong : std::uint8_t { kNothing, kHeaderWithPayload, kEarlyWriter };

struct Plan {
  Checks checks = Checks::kBoth;
  Wrong wrong = Wrong::kNothing;
};

struct Tally {
  std::uint64_t reads = 0;       // of blocks or parts of blocks
  std::uint64_t accepted = 0;
  std::uint64_t refused = 0;
  std::uint64_t torn_refused = 0;   // of those, some lines of the version wanted and some others
  std::uint64_t corrupt = 0;     // of those, "though nothing changed": right only where the CRC is all that is looked at
  std::uint64_t torn_accepted = 0;
  std::uint64_t work_requests = 0;  // RDMA READs
  std::uint64_t lines = 0;       // cache lines copied by the NIC
  std::uint64_t rewrites = 0;
  void add(const Tally& other);
};

class Writer {
 public:
  struct Block {
    BlockId id;
    std::uint64_t size = 0;
    SlotIndex slot = 0;
    ManifestEntry entry;  // of the version published last, with its place
    Locator locator;
  };

  Writer(SlotTable& slots, Random& random, Wrong wrong) : slots_(slots), random_(random), wrong_(wrong) {}
  Status add_block(std::uint64_t size);
  // One store that others see, or one line of them.
  void step();
  std::span<const Block> blocks() const noexcept { return blocks_; }
  std::uint64_t rewrites() const noexcept { return version_ - blocks_.size(); }
  const Status& status() const noexcept { return status_; }

 private:
  enum class Stage : std::uint8_t { kIdle, kTooEarly, kWithdrawn, kWriting };
  void choose();
  void reopen();
  void write_line();
  void seal();

  SlotTable& slots_;
  Random& random_;
  Wrong wrong_;
  std::vector<Block> blocks_;
  std::uint64_t version_ = 0;
  Status status_;
  // The rewrite under way
  Stage stage_ = Stage::kIdle;
  Block* block_ = nullptr;
  std::vector<std::byte> bytes_;
  std::uint64_t line_ = 0, lines_ = 0, rotation_ = 0;
};

// Bytes of that block at that version, from `offset` (a multiple of 8).
void fill_payload(std::span<std::byte> out, BlockId id, std::uint64_t version, std::uint64_t offset);

class World final : private OneSidedMemory {
 public:
  // errors: what could not be set up.
  static Result<std::unique_ptr<World>> make(std::uint64_t seed, const Plan& plan);
  // `count` reads or a few more; stops at a torn block that was accepted. errors: of the harness; the tally has the findings.
  Status run(std::uint64_t count, Tally& tally);
  // Large blocks cost a thousand times what small ones do.
  bool large() const noexcept { return large_; }
  const std::string& finding() const noexcept { return finding_; }  // what was accepted and where it differs

 private:
  World(std::uint64_t seed, const Plan& plan) : plan_(plan), random_(seed) {}
  Status set_up();
  Status connect();
  Status make_blocks();
  void set_pace();
  void choose_batch();
  Status read_batch();
  Status post(std::span<const RemoteRead> reads);
  void judge(const BlockRead& item, Tally& tally);
  Status reach(std::uint16_t arena, std::uint64_t offset, std::uint64_t size) override;
  bool registered(std::span<const std::byte>) override { return direct_; }

  static constexpr std::size_t kBatch = 4;

  Plan plan_;
  Random random_;
  bool large_ = false, direct_ = false;
  std::uint32_t threshold_ = 0;  // the writer steps after a line with this chance, of 2^32
  std::uint32_t burst_ = 1;      // so often at once
  std::shared_ptr<testing::FakeVerbs> fabric_;
  std::unique_ptr<Tier> tier_;
  std::unique_ptr<SlotTable> slots_;
  std::unique_ptr<Writer> writer_;
  Buffer targets_, staging_;
  std::unique_ptr<VerbsMemory> arena_memory_, target_memory_, staging_memory_;
  std::unique_ptr<VerbsQueue> server_, client_;
  std::unique_ptr<OneSidedReader> reader_;
  std::vector<BlockRead> batch_;
  std::vector<RemoteRead> reads_ = std::vector<RemoteRead>(64);
  std::vector<VerbsRead> posting_ = std::vector<VerbsRead>(64);
  std::vector<std::byte> expected_;
  std::uint64_t lines_ = 0;
  std::string finding_;
};

}  // namespace paramwire::torn
