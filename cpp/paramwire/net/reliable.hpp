// The client's half of the UDP path: a batch of block reads pulled from one server by datagrams that may be lost, repeated, reordered,
// damaged or forged. A machine: no socket, thread or clock inside.
//
//   reader.begin(batch, now);
//   while (!reader.done()) {
//     reader.poll(now, out);                         -> send what is in `out`
//     on a datagram:  reader.on_datagram(now, bytes)
//     else wait until reader.next_timer()
//   }
//   reader.abandon(why)                              gives up: what is not done gets `why`
//
// The server keeps nothing of a request, so this is the whole state of recovery: which segments are here, and which are asked for.
//   * A GET names the segments it wants; only those not here and not under way are asked for, never "from here on".
//   * Lost is what later GETs overtook by more than the reordering allowance, or what a timeout of silence passed over (net/pull_window).
//   * A segment counts once: what comes again, late, or for another stream changes nothing. Bytes that were checked are never written again.
//   * Every stream of segments has a random number of 64 bits that DATA must echo: who can't see the path can't guess it.
//   * Segments are cut for the path. Silence at a size steps down; the cut changes, what is here stays.
// One thread.
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/net/pull_window.hpp"
#include "paramwire/net/stream_read.hpp"
#include "paramwire/net/transport.hpp"
#include "paramwire/wire/datagram.hpp"

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace paramwire {

// Checks of datagrams that the simulation leaves out, one at a time, to see that it would notice.
struct OmittedDatagramChecks {
  bool status_mac = false;   // a STATUS of anybody is believed
  bool header_crc = false;   // DATA whose header does not fit what was asked is taken
  bool received = false;     // a segment that is here is written again
};

struct ReliableOptions {
  std::uint64_t session = 0;
  SipKey key;
  Incarnation incarnation;
  std::string peer;                       // for error texts
  std::uint32_t segment_size = 1208;      // of the route: bytes of payload
  std::uint32_t segment_floor = 524;      // that every path of this address family carries (net/udp_socket)
  std::uint64_t window_max = std::uint64_t{4} << 20;
  OmittedReadChecks omitted;
  OmittedDatagramChecks omitted_datagram;
  std::function<std::uint64_t()> random;  // secret: from the system's source but in tests
};

// Counted from the first batch on.
struct ReliableStats {
  std::uint64_t gets = 0;             // datagrams sent, and their bytes
  std::uint64_t get_bytes = 0;
  std::uint64_t segments_asked = 0;   // again counted again
  std::uint64_t bytes_asked = 0;      // of payload
  std::uint64_t segments = 0;         // taken, once each
  std::uint64_t segment_bytes = 0;
  std::uint64_t segments_lost = 0;    // taken for lost and asked for again
  std::uint64_t duplicates = 0;       // came again, or too late to be wanted
  std::uint64_t refused = 0;          // not ours: form, stream, size or header CRC
  std::uint64_t forged = 0;           // STATUS with a wrong MAC
  std::uint64_t statuses = 0;         // authentic ones
  std::uint64_t timeouts = 0;
  std::uint64_t segment_size = 0;     // now
  std::uint64_t window_bytes = 0;     // now, see net/pull_window.hpp
  std::uint64_t round_trip_us = 0;    // smoothed
  std::uint64_t size_steps = 0;       // times that the path seemed to carry less
};

// GET datagrams to be sent, one behind the other.
struct Outbox {
  std::vector<std::byte> bytes;
  std::vector<std::uint16_t> sizes;
  void clear() noexcept { bytes.clear(); sizes.clear(); }
};

class ReliableReader {
 public:
  // `credit` is the client's, shared with its other links; it must outlive the reader.
  ReliableReader(ReliableOptions options, InboundCredit& credit);
  ~ReliableReader();
  ReliableReader(const ReliableReader&) = delete;
  ReliableReader& operator=(const ReliableReader&) = delete;

  // A question that costs the server a STATUS and brings this address's token: the path works when introduced() says so.
  void introduce(Micros now);
  bool introduced() const noexcept { return introduced_; }

  // `batch` must stay until done() or abandon(); each item gets its `result`, also when others fail.
  void begin(std::span<BlockRead> batch, Micros now);
  bool done() const noexcept { return open_items_ == 0 && next_ == batch_.size() && !probing_; }
  // Everything that happened by `now` is acted on; GETs to send are appended.
  void poll(Micros now, Outbox& out);
  // Any bytes at all. Wrong ones are counted and change nothing.
  void on_datagram(Micros now, std::span<const std::byte> datagram);
  // When poll() must be called although nothing came; kNever: not at all.
  Micros next_timer() const noexcept { return next_timer_; }
  // What is not done gets `why`; no target is written from here on.
  void abandon(const Status& why);

  std::size_t unfinished() const noexcept { return open_items_ + (batch_.size() - next_); }
  // The route's size now, in payload bytes: the next streams are cut for it.
  void set_segment_size(std::uint32_t bytes);
  std::uint32_t segment_size() const noexcept { return segment_size_; }
  ReliableStats stats() const noexcept;
  std::uint64_t wire_bytes() const noexcept { return wire_bytes_; }

 private:
  struct Item;
  struct Stream;
  struct Ask {
    std::uint32_t order = 0;       // of sending, without gaps; wraps
    Stream* stream = nullptr;      // nullptr: over
    std::uint32_t first = 0;       // of the stream's own count
    std::uint32_t count = 0;
    std::uint32_t outstanding = 0;
    std::uint32_t last_wanted = 0;
    std::uint32_t cost = 0;        // a segment
    Micros sent = 0;
    Micros overtaken = 0;          // something asked for later came; 0: not yet
    bool timed = false;            // its first DATA tells the round trip
    bool limited = false;          // the window was full when it was sent
    SipTag token;
  };

  bool open_next(Micros now);
  void open_stream(Stream& stream, Item& item, BlockPart part, ByteRange need);
  void close_item(Item& item, Status result);
  void drop_stream(Stream& stream);
  void fill(Micros now, Outbox& out);
  static std::uint64_t train_bytes(const Stream& stream) noexcept;
  bool ask(Stream& stream, Micros now, std::uint64_t room, Outbox& out);
  void send(DatagramGet& get, Outbox& out);
  void want(Stream& stream, bool front);
  void check_timers(Micros now);
  void count_lately(std::uint64_t& what) noexcept;
  void lose(Ask& ask, Micros now);
  void lose_everything(Micros now);
  void step_size(Micros now);
  void recut(Stream& stream, std::uint32_t segment_size);
  void on_data(Micros now, std::span<const std::byte> datagram, const DatagramData& data);
  void on_status(Micros now, std::span<const std::byte> datagram);
  void settle_ask(Stream& stream, std::uint32_t index, Micros now);
  void take_payload(Stream& stream, std::uint32_t index, std::span<const std::byte> payload);
  void advance(Item& item);
  void write(Item& item, std::uint64_t offset, std::span<const std::byte> bytes);
  void finish_if_whole(Item& item);
  void schedule(Micros now);
  void pop_settled();
  Micros reordering() const noexcept;
  Micros silence_at() const noexcept;

  ReliableOptions options_;
  InboundCredit& credit_;
  PullWindow window_;
  std::uint32_t segment_size_;
  Micros stepped_ = 0;               // when the size was last lowered
  bool size_confirmed_ = false;      // a segment of this size came
  SipTag token_;
  std::uint64_t sequence_ = 0;

  std::span<BlockRead> batch_;
  std::size_t next_ = 0;             // first of the batch that is not open
  std::size_t open_items_ = 0;
  std::vector<std::unique_ptr<Item>> items_;  // open ones and spares
  std::vector<Item*> spare_;
  std::unordered_map<std::uint64_t, Stream*> streams_;
  Stream* latest_ = nullptr;         // of streams_: the last segment's, which the next one's is most often
  std::deque<Stream*> wanting_;      // have segments to ask for; nullptr: closed meanwhile
  std::deque<Ask> asks_;             // in order of sending; the front one is outstanding
  std::uint32_t last_order_ = 0;
  std::uint64_t in_flight_ = 0;      // cost of all outstanding segments
  std::uint64_t owed_ = 0;           // credit that is free again and not yet given back
  Micros last_arrival_ = 0;
  std::uint32_t silences_ = 0;       // timeouts since the last DATA
  std::uint64_t lately_here_ = 0, lately_lost_ = 0;  // segments, halved together
  Micros next_timer_ = kNever;

  bool probing_ = false;
  bool introduced_ = false;
  std::uint64_t probe_request_ = 0;
  Micros probe_sent_ = 0;
  Micros probe_first_ = 0;

  ReliableStats stats_;
  std::uint64_t wire_bytes_ = 0;
};

}  // namespace paramwire
