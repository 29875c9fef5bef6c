// The transport seam is a verified block read, not raw memory: a link takes blocks that a manifest promised and hands out
// either exactly those bytes or an error. Implementations: shm (one-sided, same host), verbs (one-sided, RDMA), udp (pulled by datagrams), tcp
// (reference, anywhere).
//
// A link is the client side of one transport to one server. Links are synchronous: who wants to overlap uses a second
// thread (client/fetcher.hpp); a batch is pipelined inside.
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/extent_check.hpp"
#include "paramwire/wire/block_header.hpp"
#include "paramwire/wire/manifest.hpp"

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

// Reader's checks that can be left out: `crc` by users who measure a transport bare (verify=false), the others only by the
// simulation's mutation check. Everything is on by default.
struct OmittedReadChecks {
  bool crc = false;      // CRC-64 or extent CRCs of the payload, and of slot headers
  bool seq = false;      // the second look at the slot header
  bool version = false;  // block id and version counter
  bool epoch = false;    // epoch and incarnation
};

// One block, or a contiguous range of one, to be read into the caller's memory. Links move stored bytes and know nothing of codecs: who wants raw
// bytes of an encoded block decodes them (client/encoded_reads.hpp).
struct BlockRead {
  ManifestEntry entry;          // what the bytes must be; its string views are used in error texts only
  Locator locator;              // where a one-sided transport finds them; unused by others
  ByteRange range;              // of the stored bytes; {0, entry.stored_size} is the whole block
  std::span<std::byte> target;  // exactly range.size bytes; undefined after an error
  // Set by the link:
  //   kStale        the block changed or is gone: refresh the snapshot (what an optimistic reader retries)
  //   kCorrupt      the bytes are not what the manifest promised, though nothing changed: read elsewhere
  //   kTimeout, kUnreachable   as for the link; also for those of a batch that were not reached
  Status result;
  // Extents that the caller will check itself. Empty: every byte is checked here. Else exactly as many as whole_extents() (net/block_read.hpp) are in
  // the range, which are then read without being summed; the link fills in what each must be, in order, from the extent table, which it checks
  // whatever is omitted. The slot's header, versions and sequence are checked as always, and so are the extents at the range's edges. Undefined after
  // an error.
  std::span<ExtentCheck> checks{};
  // Of encoded blocks, whose ranges are of raw bytes (client/encoded_reads.hpp), as many as checks: how each lies; size 0: as raw bytes. No link looks at it.
  std::span<PlanesApart> planes{};
};

// What the UDP path did to get its bytes. The last five are gauges: sums over links take the largest.
struct DatagramStats {
  std::uint64_t gets = 0;              // GET datagrams sent
  std::uint64_t received = 0;          // segments taken, once each
  std::uint64_t bytes_needed = 0;      // of payload, taken once each
  std::uint64_t bytes_asked = 0;       // of payload, again counted again
  std::uint64_t lost = 0;              // segments taken for lost and asked for again
  std::uint64_t duplicates = 0;        // segments that came again or too late
  std::uint64_t refused = 0;           // datagrams that were none of ours, or damaged
  std::uint64_t forged = 0;            // STATUS with a wrong MAC
  std::uint64_t timeouts = 0;
  std::uint64_t socket_drops = 0;      // dropped by the kernel at a full receive buffer (SO_RXQ_OVFL)
  std::uint64_t send_failures = 0;     // GETs that did not leave, whatever the reason
  std::uint64_t gso_disabled = 0;      // links whose segmented sends failed
  std::uint64_t busy_poll_us = 0;      // spent spinning with nothing to do: the cost of busy-poll
  std::uint64_t size_steps = 0;        // times that a path carried less than its route said
  std::uint64_t receive_buffer_bytes = 0;  // SO_RCVBUF as read back
  std::uint64_t receive_buffer_asked_bytes = 0;  // in the same count: more than the former where net.core.rmem_max clamped it
  std::uint64_t segment_bytes = 0;     // payload of a full datagram
  std::uint64_t window_bytes = 0;
  std::uint64_t round_trip_us = 0;
};

// What the RDMA path did. The last six are gauges: sums over links take the largest.
struct VerbsStats {
  std::uint64_t reads = 0;             // READs posted
  std::uint64_t doorbells = 0;         // times that something was posted
  std::uint64_t headers = 0;           // READs of slot headers among them
  std::uint64_t direct_bytes = 0;      // read straight into registered targets; the rest went through staging buffers
  std::uint64_t regions = 0;           // of the server's memory, heard of
  std::uint64_t control_calls = 0;     // questions to the server, connecting included
  std::uint64_t sleeps = 0;            // waits that did not only spin
  std::uint64_t failures = 0;          // READs that failed; the connection went with each
  std::uint64_t failed_status = 0;     // of the last one: enum ibv_wc_status, 12 is "transport retry counter exceeded"
  std::uint64_t mtu_bytes = 0;
  std::uint64_t slice_bytes = 0;
  std::uint64_t reads_on_wire = 0;     // at once, what both devices can
  std::uint64_t gid_index = 0;
  std::uint64_t staging_bytes = 0;     // of each link
};

struct LinkStats {
  std::uint64_t reads = 0;             // blocks or ranges asked for
  std::uint64_t bytes = 0;             // stored bytes handed out, verified but for those of deferred extents
  std::uint64_t wire_bytes = 0;        // stored bytes moved, whole extents of ranged reads and tables included
  std::uint64_t blocks_verified = 0;   // reads that passed their CRC, all of them here
  std::uint64_t extents_deferred = 0;  // extents handed out for the caller to check (BlockRead::checks)
  std::uint64_t changed = 0;           // reads refused because the slot or version had changed
  std::uint64_t corrupt = 0;           // reads refused by CRC
  std::uint64_t views = 0;             // zero-copy views given
  std::uint64_t views_verified = 0;    // first views, whose CRC was run
  DatagramStats datagram;              // of udp
  VerbsStats verbs;                    // of verbs
  std::string path{};                  // of verbs: both ends, device, port and GID of each; sums over links take the last that has one
};

// A zero-copy view of a block, or of a range: the bytes stay put until release(), whatever is published meanwhile.
// Move-only; may outlive its link; released by the destructor. One thread.
class BlockView {
 public:
  class Pin {  // what keeps the bytes; one implementation per transport
   public:
    virtual ~Pin() = default;
    // Pages that the destructor would give back to the system; whoever takes them does it instead (release_views).
    virtual std::span<const std::byte> take_pages() noexcept { return {}; }
  };
  BlockView() = default;
  BlockView(std::span<const std::byte> bytes, std::unique_ptr<Pin> pin, bool verified_now)
      : bytes_(bytes), pin_(std::move(pin)), verified_now_(verified_now) {}
  std::span<const std::byte> bytes() const noexcept { return bytes_; }
  bool verified_now() const noexcept { return verified_now_; }  // this call ran the CRC; false: it had been run before
  void release() noexcept {
    pin_.reset();
    bytes_ = {};
  }
  std::span<const std::byte> take_pages() noexcept { return pin_ ? pin_->take_pages() : std::span<const std::byte>(); }

 private:
  std::span<const std::byte> bytes_;
  std::unique_ptr<Pin> pin_;
  bool verified_now_ = false;
};

// Releases all of them, and gives back their pages together: each single giving back flushes the address translations of every
// thread of this process, which costs a thread that computes about 60 us.
void release_views(std::span<BlockView> views) noexcept;

class Link {
 public:
  virtual ~Link() = default;
  virtual std::string_view transport() const noexcept = 0;  // "shm", "verbs", "udp", "tcp"
  virtual bool one_sided() const noexcept = 0;              // needs locators

  // Reads every item of `batch`; each gets its `result`. threads: one at a time. blocks: until all are done or `deadline`
  // (steady_clock) passed, when the rest get kTimeout. A link that broke (kUnreachable, kTimeout) must be re-opened.
  virtual void read(std::span<BlockRead> batch, Micros deadline) = 0;
  virtual bool broken() const noexcept = 0;

  // A view of `range` of the block; the whole block is verified once per (slot, seq, version) by this link.
  // errors: kUnavailable when the transport can't (verbs, udp, tcp); kBackpressure naming the pin limit; as BlockRead::result otherwise.
  virtual Result<BlockView> view(const ManifestEntry& entry, const Locator& locator, ByteRange range) = 0;

  virtual LinkStats stats() const = 0;
};

}  // namespace paramwire
