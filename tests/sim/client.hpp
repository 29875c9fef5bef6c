// A simulated reader: fetches by the real FetchMachine, StreamRead and SlotReader, leases, zero-copy views with pins.
#pragma once

#include "sim/server.hpp"
#include "sim/world.hpp"

#include "paramwire/client/fetch_machine.hpp"
#include "paramwire/net/reliable.hpp"
#include "paramwire/net/slot_reader.hpp"
#include "paramwire/net/stream_read.hpp"

#include <memory>
#include <optional>
#include <vector>

namespace paramwire::sim {

// A server's arena as a reader sees it: moves 64-byte lines, and the passive lane goes on between two of them.
class SimMemory final : public RemoteMemory {
 public:
  SimMemory(World& world, SimServer& mapped, bool rebased) : world_(world), mapped_(mapped), rebased_(rebased) {}
  Result<std::uint64_t> copy_crc64(std::uint16_t arena, std::uint64_t offset, std::span<std::byte> target, std::uint64_t before) override;
  Result<std::uint32_t> copy_crc32c(std::uint16_t arena, std::uint64_t offset, std::span<std::byte> target) override;
  Status copy(std::uint16_t arena, std::uint64_t offset, std::span<std::byte> target) override;
  Result<SlotHeader> header(std::uint16_t arena, std::uint64_t offset) override;

 private:
  Result<const std::byte*> place(std::uint16_t arena, std::uint64_t offset, std::uint64_t size);
  void between_lines(std::uint64_t line);
  World& world_;
  SimServer& mapped_;
  bool rebased_;
  std::uint64_t stall_at_ = 0;
};

class SimClient final : public Endpoint {
 public:
  SimClient(World& world, std::uint32_t number) : world_(world), number_(number) {}

  void start();
  void freeze(Micros time);
  void kill();
  void quiesce();  // drops views, leases and the connection: the end of the run
  bool idle() const { return !fetch_; }
  void collect_pins(const SimServer& server, std::vector<PinnedWord>& out) const;

  void deliver(Connection& connection, std::span<const std::byte> bytes) override;
  void lost(Connection& connection) override;
  Micros frozen_until() const override { return frozen_until_; }
  void datagram(std::uint32_t address, const Bytes& bytes);

 private:
  struct Lease {
    LeaseId id = 0;
    Micros asked = 0;       // when the opening request was sent
    Micros valid_until = 0; // counted from the time of sending
    Micros ttl = 0;
  };
  struct Held {  // a snapshot
    std::shared_ptr<const Manifest> manifest;
    std::vector<Locator> locators;
    SimServer* server = nullptr;
    Incarnation incarnation;
  };
  struct Fetch {
    explicit Fetch(const FetchMachine::Options& options) : machine(options) {}
    FetchMachine machine;
    std::uint64_t serial = 0;
    Micros deadline = 0;
    Held held;
    std::optional<Lease> lease;      // of this fetch, or the one kept
    bool own_lease = false;
    bool one_sided = false;
    bool datagrams = false;
    std::vector<BlockRead> items;
    std::vector<Bytes> buffers;
    std::size_t at = 0;
    std::unique_ptr<StreamRead> stream;
    std::uint64_t lies = 0;
    std::uint32_t actions = 0;
  };
  struct View {
    SimServer* server = nullptr;
    std::uint64_t word = 0;
    std::span<const std::byte> bytes;
    std::uint64_t key = 0;
    std::string what;
    bool accepted = false;
  };
  enum class Await : std::uint8_t { kNothing, kWelcome, kManifest, kData, kUdpKey, kDatagrams };

  void later(Micros delay, std::function<void()> what);
  void act();
  void dial();
  void ask_snapshot(Micros ttl, std::uint32_t wait_ms);
  void begin_fetch(FetchMachine::Mode mode);
  void step(FetchMachine::Event event, const Error* error = nullptr);
  void perform(FetchMachine::Action action);
  void choose_items();
  void read_one_sided();
  void next_stream();
  void read_datagrams();
  void begin_datagrams();
  void pump_datagrams();
  void opened_session(const UdpKeyMessage& session);
  std::uint32_t address() const { return number_ | static_cast<std::uint32_t>(life_ & 0xffffffU) << 4; }
  void end_batch();
  void accept_items();
  void judge_failure(const Error& error);
  void end_fetch();
  void take_view();
  void check_view(const View& view);
  void renew();
  Result<FrameParser::BodyTarget> head(const FrameHeader& header, std::span<const std::byte> meta);
  void end(const FrameHeader& header);
  void welcomed();
  void opened();
  void answered_snapshot_error(const Error& error);
  void drop_connection();
  Error gone() const { return Error(Code::kUnreachable, "the simulated connection is gone"); }

  World& world_;
  std::uint32_t number_;
  std::uint64_t life_ = 0;           // events of a former life do nothing
  Micros frozen_until_ = 0;
  Connection* connection_ = nullptr;
  std::unique_ptr<FrameParser> parser_;
  Await await_ = Await::kNothing;
  std::uint64_t request_ = 0, awaited_ = 0;
  std::uint64_t serial_ = 0;
  std::optional<Incarnation> server_incarnation_;  // of the last WELCOME
  SimServer* dialled_ = nullptr;
  Bytes head_meta_, body_;
  std::optional<ManifestMessage> manifest_message_;
  std::optional<Error> error_;
  Micros asked_ = 0, asked_ttl_ = 0;
  Held held_;                        // the newest snapshot it has
  Held sent_held_;                   // what the delta will be against
  std::optional<Lease> lease_;       // kept over several fetches, of `leased_`
  Held leased_;
  std::optional<Fetch> fetch_;
  std::map<std::uint64_t, Micros> renewals_;  // request -> when sent
  std::vector<View> views_;
  InboundCredit credit_{200'000};
  std::unique_ptr<ReliableReader> reader_;    // of this connection
  Incarnation reader_incarnation_;
  std::optional<UdpKeyMessage> session_;      // just told
  bool introducing_ = false;
  Micros timer_at_ = kNever;
};

}  // namespace paramwire::sim
