// Batches of one-sided reads of slots, pipelined: the slot protocol for memory that answers late. A pure machine: no device, no clock, no thread. It
// says what to read next; somebody moves the bytes and says when they are here.
//
//   reader.begin(batch, memory)
//   while (!reader.done()) {
//     n = reader.next(reads)     what to post together, in this order; 0: nothing can go now
//     reader.completed(k)        the k oldest of all that was given out have arrived
//     reader.consume()           checks and copies one that arrived
//   }
//
// Order, for each block: all of its payload has arrived, only then is its header asked for; the block counts if that header vouches for it and the
// payload's CRC is the manifest's. A header asked for together with the payload proves nothing, since a NIC reads memory in any order.
// Blocks of a batch are under way side by side, each in its own step. Source of the protocol: wire/FORMAT.md, "One-sided protocol".
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/net/slot_rules.hpp"
#include "paramwire/net/transport.hpp"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace paramwire {

struct RemoteRead {
  std::uint64_t offset = 0;      // bytes from the arena's start
  std::byte* into = nullptr;
  std::uint32_t size = 0;        // > 0, at most OneSidedOptions::slice
  std::uint16_t arena = 0;
  bool staged = false;           // `into` lies in the staging buffer; else in the caller's target
};

struct OneSidedOptions {
  OmittedReadChecks omitted;
  std::uint32_t slice = 1 << 20;                     // bytes of one read at most, a multiple of 64; next() ends with the read that reaches it
  std::uint32_t reads_max = 64;                      // given out and not completed
  std::uint64_t bytes_max = std::uint64_t{8} << 20;  // of those, together: the last may reach over it, by less than a slice
  bool header_with_payload = false;                  // the known wrong order, for the test that must catch it
};

class OneSidedMemory {
 public:
  virtual ~OneSidedMemory() = default;
  // Whether those bytes of the server can be read. errors: kStale when they are not there (the locator is of another time); the transport's own.
  virtual Status reach(std::uint16_t arena, std::uint64_t offset, std::uint64_t size) = 0;
  // Whether reads may go straight into `target`.
  virtual bool registered(std::span<const std::byte> target) = 0;
};

class OneSidedReader {
 public:
  // `staging` (at least two slices): where bytes land that can't go straight into their target.
  OneSidedReader(std::span<std::byte> staging, const OneSidedOptions& options) : staging_(staging), options_(options), rules_(options.omitted) {}

  // Batch, memory and every target must stay until done() or abandon(). An item that can't be read gets its result when its turn comes.
  void begin(std::span<BlockRead> batch, OneSidedMemory& memory);
  bool done() const noexcept { return unfinished_ == 0; }
  std::size_t unfinished() const noexcept { return unfinished_; }

  std::size_t next(std::span<RemoteRead> out);
  void completed(std::size_t count);
  // returns: its bytes; 0: nothing has arrived
  std::uint32_t consume();
  // What is unfinished gets `status`. No read that was given out may write any more.
  void abandon(const Status& status);

  std::uint64_t wire_bytes() const noexcept { return wire_bytes_; }      // of payload and tables asked for
  std::uint64_t direct_bytes() const noexcept { return direct_bytes_; }  // of those, straight into their target
  std::uint64_t headers() const noexcept { return headers_; }

 private:
  // Blocks under way. More would only hold more state: with 64 reads out, half of them headers, all of these have something under way.
  static constexpr std::size_t kOpenMax = 128;

  enum class Kind : std::uint8_t { kTable, kPayload, kHeader };
  struct Item {
    BlockRead* read = nullptr;
    Kind asking = Kind::kPayload;
    bool direct = false;               // the target is registered
    bool match = true;                 // all CRCs so far
    std::uint64_t end = 0;             // of what is asked for now: stored bytes, or bytes of the table
    std::uint64_t next = 0;            // to ask for
    std::uint64_t left = 0;            // bytes that have not arrived
    std::uint64_t crc = 0;             // CRC-64 of the payload so far; with rows, CRC-32C of the extent so far
    std::shared_ptr<const ExtentRows> rows;  // checked extent by extent; nullptr: the block's own CRC
    std::vector<std::byte> table;      // while it arrives
    std::string table_problem;
  };
  struct Piece {
    std::byte* into = nullptr;
    std::uint64_t at = 0;              // stored byte, or byte of the table, that it begins with
    std::uint64_t ring_end = 0;        // the staging ring's head after it
    std::uint32_t size = 0;
    std::uint16_t item = 0;
    Kind kind = Kind::kPayload;
    bool staged = false;
  };

  bool open_next();
  Status open(Item& item);
  void ask_payload(Item& item);
  void everything_asked(std::uint16_t index);
  bool give(std::uint16_t index, Kind kind, RemoteRead& out);
  std::byte* stage(std::uint32_t size) noexcept;
  void finish(std::uint16_t index, Status status);
  void take_payload(Item& item, const Piece& piece);
  void take_table(std::uint16_t index, const Piece& piece);
  void take_header(std::uint16_t index, const Piece& piece);

  std::span<std::byte> staging_;
  OneSidedOptions options_;
  SlotRules rules_;
  std::span<BlockRead> batch_;
  OneSidedMemory* memory_ = nullptr;
  std::size_t cursor_ = 0;             // the next of the batch to open
  std::size_t unfinished_ = 0;
  std::vector<Item> items_;            // open ones, and free places
  std::vector<std::uint16_t> free_;
  std::deque<std::uint16_t> asking_;   // lack requests for table or payload
  std::deque<std::uint16_t> headers_due_;
  std::deque<Piece> pieces_;           // given out, oldest first
  std::size_t arrived_ = 0;            // of pieces_, not consumed yet
  std::uint64_t bytes_out_ = 0;        // given out and not arrived
  std::uint64_t ring_head_ = 0, ring_tail_ = 0;  // of staging_, counted without wrapping
  std::uint64_t wire_bytes_ = 0, direct_bytes_ = 0, headers_ = 0;
};

}  // namespace paramwire
