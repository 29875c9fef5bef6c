// What a server counts. Numbers since its start, but what says "now".
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/store/block_store.hpp"

#include <cstdint>
#include <string>

namespace paramwire {

struct UdpServerStats {
  std::uint64_t sessions = 0;      // open now
  std::uint64_t received = 0;      // datagrams, whatever they were
  std::uint64_t malformed = 0;     // of no form of ours, or of no session; these three are met with silence
  std::uint64_t unauthentic = 0;   // wrong MAC
  std::uint64_t replayed = 0;
  std::uint64_t answered = 0;      // GETs that went to the store
  std::uint64_t tokens = 0;        // answered with a token, the sender's address being new
  std::uint64_t refused = 0;       // answered with another status
  std::uint64_t segments = 0, bytes = 0;  // DATA sent, payload
  std::uint64_t dropped = 0;       // segments that did not leave: buffer or device full
  std::uint64_t too_long = 0;      // longer than the path takes
  std::uint64_t failed = 0;        // other errors of sends
  std::uint64_t gso_disabled = 0;  // clients to whom segmented sends failed
  std::uint64_t socket_drops = 0;  // GETs dropped by the kernel at a full receive buffer
  std::uint64_t busy_poll_us = 0;  // spent spinning: the cost of udp_busy_poll
};

struct VerbsServerStats {
  std::uint64_t devices = 0;           // open
  std::uint64_t queue_pairs = 0;       // open now
  std::uint64_t opened = 0;            // since the start
  std::uint64_t refused = 0;           // VERBS_OPEN answered with an error
  std::uint64_t regions = 0;           // registered
  std::uint64_t region_bytes = 0;
};

struct DeltaOptions {
  std::uint64_t bytes_max = std::uint64_t{1} << 30;        // of deltas kept; past it none is made. 0: this server makes none
  // Raw bytes of a block: making a delta takes twice as much memory. Larger blocks are fetched.
  std::uint64_t block_bytes_max = std::uint64_t{1} << 30;
  Micros interest = 600 * kMicrosPerSecond;                // since somebody asked: publishes are prepared for
};

struct DeltaStats {
  std::uint64_t made = 0, useless = 0;  // useless: would not have been smaller than the block as it is stored
  std::uint64_t kept = 0, kept_bytes = 0, sent = 0, sent_bytes = 0, waiting = 0;
};

struct ServerStats {
  StoreStats store;
  std::uint64_t connections = 0, accepted = 0, refused = 0, closed_for_protocol = 0, closed_for_key = 0, closed_for_stall = 0, loop_turns = 0, pin_tables = 0;
  std::string tier_note;
  UdpServerStats udp;
  VerbsServerStats verbs;
  DeltaStats deltas;
  std::string no_verbs;                // why clients can't read by RDMA; empty: they can
};

}  // namespace paramwire
