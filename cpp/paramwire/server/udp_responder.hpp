// The server's half of the UDP path: a datagram in, what to send out. No socket, thread, clock or store inside.
//
//   verdict = responder.check(datagram, sender)
//     kSilence  nothing: not ours, not authentic, or seen before
//     kStatus   send question.status (56 bytes: fewer than any GET has)
//     kLookup   find the block (BlockStore::hold); gone: send responder.refuse(...); else SegmentWalk gives header and payload of each
//               segment asked for, once, in order
// Nothing is kept of a request. What is kept of a client is its session: a key and a window of sequence numbers, opened and closed with its
// control connection. So a million datagrams of anybody else grow nothing.
//
// Order of the checks (each cheaper or more private than the next): form, session, MAC, replay, incarnation, address token. A wrong MAC gets
// silence; a right one from an address not seen before gets one STATUS with the token of that address.
// Any thread.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/store/block_store.hpp"
#include "paramwire/wire/datagram.hpp"
#include "paramwire/wire/message.hpp"

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>

namespace paramwire {

// Checks left out one at a time by the simulation, which must notice.
struct OmittedResponderChecks {
  bool mac = false;
  bool replay = false;
  bool incarnation = false;
  bool token = false;
  bool bitmap = false;   // sends the whole span, wanted or not
};

struct ResponderStats {
  std::uint64_t received = 0;      // datagrams
  std::uint64_t malformed = 0;     // of no form of ours, or of no session
  std::uint64_t unauthentic = 0;   // wrong MAC
  std::uint64_t replayed = 0;
  std::uint64_t answered = 0;      // GETs that went to the store
  std::uint64_t tokens = 0;        // STATUS token sent
  std::uint64_t refused = 0;       // other STATUS sent
  std::uint64_t sessions = 0;      // open now
};

// Where UDP_OPEN is answered from.
class DatagramDoor {
 public:
  virtual ~DatagramDoor() = default;
  // A new session. `exported`: the key when both sides have it from their TLS connection; it is then not sent.
  // errors: kUnavailable when there is no randomness.
  virtual Result<UdpKeyMessage> open(std::uint16_t port, const std::optional<SipKey>& exported) = 0;
  virtual void close(std::uint64_t session) noexcept = 0;
};

class UdpResponder final : public DatagramDoor {
 public:
  // `random` is the system's but in tests. errors of create: its own.
  static Result<std::unique_ptr<UdpResponder>> create(const Incarnation& incarnation, std::function<Result<std::uint64_t>()> random,
                                                      const OmittedResponderChecks& omitted = {});

  Result<UdpKeyMessage> open(std::uint16_t port, const std::optional<SipKey>& exported) override;
  void close(std::uint64_t session) noexcept override;

  enum class Verdict : std::uint8_t { kSilence, kStatus, kLookup };
  struct Question {
    DatagramGet get;
    SipKey key;
    SipTag token;         // of this sender and session
    bool gso = true;      // segmented sends have not failed on this client's path
    std::array<std::byte, kStatusBytes> status{};
  };
  // `sender`: address and port in 18 bytes (DatagramAddress::bytes).
  Verdict check(std::span<const std::byte> datagram, std::span<const std::byte, 18> sender, Question& question);
  std::array<std::byte, kStatusBytes> refuse(const Question& question, StatusCode code, std::uint32_t retry_us = 0) noexcept;
  // Segmented sends to this client fail: not again while its session lasts. False: that is known, or the session is gone.
  bool disable_gso(std::uint64_t session) noexcept;
  ResponderStats stats() const noexcept;

 private:
  // Sequence numbers below the highest seen that are still told apart. A client's GETs overtake one another by its window at most (256).
  static constexpr std::uint64_t kReplayWindow = 1024;
  struct Session {
    SipKey key;
    std::uint64_t highest = 0;
    std::array<std::uint64_t, kReplayWindow / 64> seen{};
    bool gso = true;
  };
  UdpResponder(const Incarnation& incarnation, const SipKey& secret, std::function<Result<std::uint64_t>()> random, const OmittedResponderChecks& omitted)
      : incarnation_(incarnation), secret_(secret), random_(std::move(random)), omitted_(omitted) {}
  static bool fresh(Session& session, std::uint64_t sequence) noexcept;
  SipTag token(std::span<const std::byte, 18> sender, std::uint64_t session) const noexcept;

  Incarnation incarnation_;
  SipKey secret_;
  std::function<Result<std::uint64_t>()> random_;
  OmittedResponderChecks omitted_;
  mutable std::mutex mutex_;  // sessions_, for moments
  std::unordered_map<std::uint64_t, Session> sessions_;
  std::atomic<std::uint64_t> received_{0}, malformed_{0}, unauthentic_{0}, replayed_{0}, answered_{0}, tokens_{0}, refused_{0};
};

// The segments of a GET, in order: header bytes and payload of each.
class SegmentWalk {
 public:
  // `part` is all of the part asked for. The span is past its end: kInvalid (fits() is false).
  SegmentWalk(const DatagramGet& get, std::span<const std::byte> part, bool ignore_bitmap = false) noexcept;
  bool fits() const noexcept { return fits_; }
  // Writes the next header; its payload, or nullopt at the end.
  std::optional<std::span<const std::byte>> next(std::byte* header) noexcept;

 private:
  const DatagramGet& get_;
  std::span<const std::byte> part_;
  AskedCrc crc_;
  bool ignore_bitmap_;
  bool fits_;
  std::uint32_t at_ = 0;
};

}  // namespace paramwire
