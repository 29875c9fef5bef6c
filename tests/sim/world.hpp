// One simulated cluster: virtual time, a byte-moving network, servers, clients and publishers, all in one thread from one
// seed. The code under test is the real one (handlers, store, readers, parsers, fetch machine); simulated are time, the
// network, the memory below the tier seam, the processes and their faults.
//
// Two lanes of events: the passive lane holds what never waits inside a call (network towards servers and publishers, servers'
// ticks, writers); the client lane holds readers. While a reader copies memory line by line, the passive lane goes on between
// two lines: that is how a writer overtakes a reader on one stack.
#pragma once

#include "sim/checker.hpp"
#include "sim/coverage.hpp"

#include "paramwire/base/env.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/reliable.hpp"
#include "paramwire/net/transport.hpp"
#include "paramwire/server/udp_responder.hpp"
#include "paramwire/store/block_store.hpp"
#include "paramwire/wire/frame.hpp"

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire::sim {

// Which checks are out and which faults are in. Every profile must pass with no check of its own taken out.
struct Profile {
  std::string name = "full";
  OmittedReadChecks readers;       // out on purpose: the profile shows that the others carry alone
  OmittedChecks store;
  bool corruption = true;          // bits flip in transit and in arenas
  bool lying_proxy = true;         // a GET is answered with another readable version, or by another incarnation, truthfully labelled
  bool rebased = true;             // one-sided reads may reach the memory of a restarted server at the same addresses
  bool equal_epochs = true;        // some restarts forget the state file: the same epoch again, another incarnation
  bool streams = true;
  bool one_sided = true;
  bool datagrams = true;
  OmittedDatagramChecks client_datagrams;
  OmittedResponderChecks server_datagrams;
  bool flipped_headers = false;    // bits of DATA headers flip, and of nothing else
  bool blind_greeting = false;     // clients go on with a restarted server as if it were the one before
  bool tick_first = false;         // a server that wakes expires leases before it handles what was queued: a fault of the edge
  bool blind_clock = false;        // the version clock takes any base: the store's own fence carries alone
};

enum class Lane : std::uint8_t { kPassive, kClient };

class Endpoint;
class SimServer;
class SimClient;
class SimPublisher;
class LocalPublisher;
class DatagramNet;

// Two byte streams. Side 0 dialled, side 1 is the server.
struct Connection {
  std::uint64_t id = 0;
  std::array<Endpoint*, 2> end{};
  std::array<Lane, 2> lane{};
  std::array<bool, 2> open{true, true};        // as that side knows
  std::array<Bytes, 2> flight;                 // on the way to that side
  std::array<std::size_t, 2> at{};
  std::array<bool, 2> pumping{};
  bool cut = false;                            // nothing moves any more
};

class Endpoint {
 public:
  virtual ~Endpoint() = default;
  virtual void deliver(Connection& connection, std::span<const std::byte> bytes) = 0;
  virtual void lost(Connection& connection) = 0;
  virtual Micros frozen_until() const = 0;
};

class World {
 public:
  World(std::uint64_t seed, const Profile& profile, Coverage& coverage, bool trace);
  ~World();

  // True when no promise was broken. `failure()` says which.
  bool run();
  const std::string& failure() const { return failure_; }
  const std::string& log() const { return log_; }
  // A number that depends on everything that happened: two runs of one seed must agree.
  std::uint64_t fingerprint() const { return fingerprint_; }

  // ---- for the actors
  const Profile& profile() const { return profile_; }
  Random& random() { return random_; }
  Checker& checker() { return checker_; }
  Coverage& coverage() { return coverage_; }
  Micros now() const { return now_; }
  bool stopping() const { return stopping_; }
  bool failed() const { return !failure_.empty(); }
  void after(Micros delay, Lane lane, std::function<void()> what);
  // Runs passive events that are due within `time`, at most `count`; time moves with them.
  void step_passive(Micros time, std::size_t count);
  void fail(std::string text);
  template <typename... Parts>
  void trace(const Parts&... parts) {
    if (trace_) note(cat(parts...));
  }
  void fingerprint(std::uint64_t value) { fingerprint_ = (fingerprint_ ^ value) * 0x100000001b3U; }

  Connection* connect(Endpoint& from, Lane lane);   // nullptr: nobody listens
  void send(Connection& connection, std::size_t side, std::span<const std::byte> bytes);
  void cut(Connection& connection);
  SimServer* server() { return servers_.empty() ? nullptr : servers_.back().get(); }
  bool corrupting() const { return corrupting_; }
  bool remapping() const { return remapping_; }
  std::uint64_t lies() const { return lies_; }       // told by the proxy so far: excuses for "changed"
  void lied() { ++lies_; }
  const std::vector<std::byte*>& flipped() const { return flipped_; }
  std::uint64_t next_key() { return ++keys_ * 0x2545f4914f6cdd1dU ^ seed_; }
  std::vector<SimClient*> clients();
  DatagramNet& datagrams() { return *datagrams_; }

  // ---- the model of this seed
  struct Tensor {
    std::string name;
    std::uint64_t size = 0;
    Shape shape;
    Shard shard;
  };
  const std::vector<Tensor>& tensors() const { return tensors_; }
  const BlockStoreOptions& store_options() const { return store_options_; }
  std::uint64_t memory_limit() const { return memory_limit_; }

 private:
  struct Event {
    Micros at = 0;
    std::uint64_t order = 0;
    std::function<void()> what;
    bool operator<(const Event& other) const { return at != other.at ? at > other.at : order > other.order; }  // the heap's top is the first
  };
  using Queue = std::vector<Event>;  // a heap
  void note(std::string text);
  void run_one(Queue& queue);
  void run_until(Micros time);
  void pump(Connection& connection, std::size_t side);
  void chaos();
  void flip_arena();
  void start_server();
  void make_model();
  void check_end();

  std::uint64_t seed_;
  Profile profile_;
  Coverage& coverage_;
  bool trace_;
  Random random_;
  Checker checker_;
  Micros now_ = 1;
  std::uint64_t order_ = 0;
  std::array<Queue, 2> queues_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<std::unique_ptr<SimServer>> servers_;
  std::vector<std::unique_ptr<SimClient>> clients_;
  std::vector<std::unique_ptr<SimPublisher>> publishers_;
  std::unique_ptr<LocalPublisher> local_;
  std::unique_ptr<DatagramNet> datagrams_;
  std::vector<Tensor> tensors_;
  BlockStoreOptions store_options_;
  std::uint64_t memory_limit_ = 0;
  bool corrupting_ = false, remapping_ = false, calm_ = false;
  std::uint32_t epoch_ = 0;  // the state file
  std::uint64_t lies_ = 0, keys_ = 0;
  std::vector<std::byte*> flipped_;
  bool stopping_ = false;
  std::string failure_, log_;
  std::uint64_t fingerprint_ = 0xcbf29ce484222325U;
};

}  // namespace paramwire::sim
