// What the event loop and the publishes of this process share: the store and its handlers, under one mutex.
#pragma once

#include "paramwire/base/fork_guard.hpp"
#include "paramwire/base/metrics.hpp"
#include "paramwire/base/trace.hpp"
#include "paramwire/control/coordinator.hpp"
#include "paramwire/net/tls.hpp"
#include "paramwire/server/handlers.hpp"
#include "paramwire/server/pin_registry.hpp"
#include "paramwire/server/udp_responder.hpp"
#include "paramwire/server/verbs_endpoint.hpp"
#include "paramwire/store/block_store.hpp"
#include "paramwire/store/tier.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

namespace paramwire {

// Counted by the loop's thread, read by any.
struct LoopCounters {
  std::atomic<std::uint64_t> connections{0};         // open now
  std::atomic<std::uint64_t> accepted{0};
  std::atomic<std::uint64_t> refused{0};             // over the limit
  std::atomic<std::uint64_t> closed_for_protocol{0}; // after a frame that made no sense
  std::atomic<std::uint64_t> closed_for_key{0};      // the peer did not prove the cluster key: none, another, or no TLS at all
  std::atomic<std::uint64_t> closed_for_stall{0};    // the peer took or sent nothing for too long
  std::atomic<std::uint64_t> loop_turns{0};          // returns of epoll_wait: an idle server stands still
};

// In ns. Recorded by the loop's thread and by publishes of this process.
struct ServerDurations {
  Histogram request;  // a frame's handling, with the store locked
  Histogram turn;     // one turn of the loop: what a request that comes meanwhile waits
  Histogram finish;   // a publish becomes visible, with the store locked
};

struct ServerCore {
  ForkGuard guard;
  std::mutex mutex;  // everything down to `handlers`, and every call of them
  std::unique_ptr<Tier> tier;
  std::unique_ptr<Coordinator> coordinator;
  PinRegistry pins;
  std::unique_ptr<VerbsEndpoint> verbs;  // nullptr: none; before the tier whose memory it has registered is gone
  std::optional<BlockStore> store;
  std::unique_ptr<DeltaMaker> deltas;    // nullptr: none are made; its thread takes `mutex`
  std::optional<Handlers> handlers;
  bool closed = false;
  std::unique_ptr<UdpResponder> udp;  // has its own lock

  std::shared_ptr<const TlsContext> tls;  // set before the loop starts; nullptr: no key, TCP is plain
  Fd wake;  // eventfd: something happened that the loop must look at
  LoopCounters counters;
  ServerDurations durations;
  std::shared_ptr<Trace> trace;  // or nullptr
  void wake_loop() noexcept;
};

}  // namespace paramwire
