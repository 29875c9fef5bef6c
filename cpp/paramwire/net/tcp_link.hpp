// Blocks over a byte stream, TCP or unix: the reference transport ("tcp"). Its own connection, since a control link's answers
// must not queue behind gigabytes.
//
// A batch is pipelined: questions go out together within a window, answers come in order, bytes are received straight into the
// targets and checked while they are hot in cache.
#pragma once

#include "paramwire/base/endpoint.hpp"
#include "paramwire/base/fork_guard.hpp"
#include "paramwire/net/control_link.hpp"
#include "paramwire/net/stream_read.hpp"
#include "paramwire/net/transport.hpp"

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>

namespace paramwire {

class TcpLink final : public Link {
 public:
  // `incarnation`: of the server whose manifests the reads will name.
  // errors: as connect_and_greet; kStale when another incarnation answers (the server restarted).
  static Result<std::unique_ptr<Link>> connect(const Endpoint& endpoint, const Caller& caller, const Incarnation& incarnation,
                                               const OmittedReadChecks& omitted, Micros deadline);

  std::string_view transport() const noexcept override { return "tcp"; }
  bool one_sided() const noexcept override { return false; }
  void read(std::span<BlockRead> batch, Micros deadline) override;
  bool broken() const noexcept override { return broken_.load(std::memory_order_acquire); }
  Result<BlockView> view(const ManifestEntry& entry, const Locator& locator, ByteRange range) override;
  LinkStats stats() const override { return stats_; }

 private:
  struct Flight {
    BlockRead* item;
    StreamRead read;
    std::uint64_t request;
  };
  TcpLink(GreetedSocket greeted, const OmittedReadChecks& omitted)
      : socket_(std::move(greeted.socket)), incarnation_(greeted.facts.incarnation), omitted_(omitted) {}
  Status run(std::span<BlockRead> batch, Micros deadline);
  void fill_window(std::span<BlockRead> batch);
  Status send_questions();
  Result<bool> receive_answers();
  Status parse();
  Status on_event(FrameParser::Event event);
  void land(Flight& flight);

  ForkGuard guard_;
  Socket socket_;
  Incarnation incarnation_;
  OmittedReadChecks omitted_;
  FrameParser parser_;
  bool fresh_ = false;               // the parser got bytes that it has not used up
  std::deque<Flight> flights_;       // asked, not answered; answers come in this order
  std::uint64_t flight_bytes_ = 0;
  std::size_t next_ = 0;             // of the batch: not asked yet
  Bytes questions_;                  // encoded, not sent
  std::size_t questions_sent_ = 0;
  std::uint64_t last_request_ = 0;
  std::atomic<bool> broken_{false};
  std::string broken_by_;
  LinkStats stats_;
};

}  // namespace paramwire
