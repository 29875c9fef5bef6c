#include "paramwire/net/udp_link.hpp"

#include "paramwire/base/interrupt.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/block_read.hpp"
#include "paramwire/net/udp_key.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <poll.h>

namespace paramwire {

namespace {

// Receives between two looks at what to ask for next: each brings up to 64 KiB, so this is a quarter of a MiB.
constexpr int kReceivesAtOnce = 4;
// A wait sleeps in the receive itself at first, one system call less than with poll(2), and so does not see its control connection end: for
// this long, less than the shortest timeout that may be next (5 ms).
constexpr Micros kSleep = 4'000;
// Spins between two looks at the control connection, about a millisecond, and at the clock.
constexpr int kSpinsAtOnce = 2000;
constexpr int kSpinsALook = 16;
// How long a first answer may take before the path counts as blocked.
constexpr Micros kIntroductionMax = 3 * kMicrosPerSecond;
constexpr std::size_t kScratchBytes = 65'536;  // the largest that one receive can bring, GRO or not
// Segments of a large route are cut to whole cache lines, so that places in the target keep the alignment of its start.
constexpr std::uint32_t kAligned = 4096;

// 64 bits from the system's source, drawn 32 at a time: a call costs 300 ns, as much as all else that a small block costs here.
class SecretNumbers {
 public:
  std::uint64_t operator()() {
    if (at_ == pool_.size()) {
      if (!system_random_fill(pool_).ok()) pool_.fill(0);  // getrandom(2) of so few bytes does not fail once the system has booted
      at_ = 0;
    }
    return std::exchange(pool_[at_++], 0);
  }

 private:
  std::array<std::uint64_t, 32> pool_{};
  std::size_t at_ = pool_.size();
};

std::uint32_t segment_for(const DatagramSocket& socket, std::uint32_t asked, std::uint32_t server_max) {
  const std::uint32_t route = socket.route_payload() - static_cast<std::uint32_t>(kDataHeaderBytes);
  std::uint32_t size = std::min({route, server_max, kSegmentBytesMax});
  if (size > kAligned) size -= size % 64;
  if (asked != 0) size = std::clamp(asked, kSegmentBytesMin, size);
  return size;
}

}  // namespace

Result<std::unique_ptr<Link>> UdpLink::connect(const Endpoint& endpoint, const Caller& caller, const Incarnation& incarnation,
                                               const UdpOptions& options, std::shared_ptr<InboundCredit> credit, Micros deadline) {
  PARAMWIRE_TRY(greeted, connect_and_greet(endpoint, caller, deadline));
  if (greeted.facts.incarnation != incarnation && !options.omitted.epoch) {
    return Error(Code::kStale, cat(endpoint, " is incarnation ", greeted.facts.incarnation, " now, ", incarnation, " was expected (the server restarted): take a new snapshot"));
  }
  PARAMWIRE_TRY(answer, ControlLink::ask(greeted.socket, encode_empty(FrameType::kUdpOpen, 1), 1, FrameType::kUdpKey, deadline));
  PARAMWIRE_TRY(opened, UdpKeyMessage::decode(answer.meta));
  if (const auto exported = exported_udp_key(greeted.socket)) {
    if (opened.key != SipKey{}) return Error(Code::kCorrupt, cat(endpoint, " sent a UDP key over TLS, where both sides export one: not the protocol"));
    opened.key = *exported;
  }
  DatagramAddress peer = DatagramAddress::peer_of(greeted.socket.fd()).value_or(DatagramAddress::loopback(0));
  peer.set_port(opened.port);
  DatagramSocketOptions socket_options;
  socket_options.receive_buffer = kLinkReceiveBuffer;
  socket_options.gro = true;
  socket_options.sleep = kSleep;
  PARAMWIRE_TRY(socket, DatagramSocket::connect(peer, socket_options));
  credit->limit(socket.receive_buffer());

  ReliableOptions machine;
  machine.session = opened.session;
  machine.key = opened.key;
  machine.incarnation = incarnation;
  machine.peer = cat("udp://", peer);
  machine.segment_size = segment_for(socket, options.segment_size, opened.segment_max);
  machine.segment_floor = std::min(machine.segment_size, peer.v6() ? kSegmentFloorV6 : kSegmentFloorV4);
  machine.omitted = options.omitted;
  machine.random = [numbers = std::make_shared<SecretNumbers>()] { return (*numbers)(); };
  std::unique_ptr<UdpLink> link(new UdpLink(std::move(greeted), std::move(socket), std::move(credit), std::move(machine), options));
  PARAMWIRE_TRY(scratch, Buffer::allocate(kScratchBytes));
  link->scratch_ = std::move(scratch);
  PARAMWIRE_CHECK(link->introduce(deadline));
  return std::unique_ptr<Link>(std::move(link));
}

UdpLink::UdpLink(GreetedSocket greeted, DatagramSocket socket, std::shared_ptr<InboundCredit> credit, ReliableOptions machine, const UdpOptions& options)
    : control_(std::move(greeted.socket)), socket_(std::move(socket)), credit_(std::move(credit)), reader_(std::move(machine), *credit_), options_(options) {
  if (options_.fail_gso != 0) socket_.fail_gso(options_.fail_gso, 1);
}

Status UdpLink::introduce(Micros deadline) {
  const Micros start = now_ = steady_clock().now();
  const Micros until = std::min(start + kIntroductionMax, deadline == kNever ? kNever : start + (deadline - start) / 2);
  reader_.introduce(start);
  const Status status = run(0, until);
  if (status.ok()) return {};
  if (status.error().code() != Code::kTimeout) return status;
  return Error(Code::kTimeout, cat("udp to ", control_.peer(), ": nothing came back from its UDP port within ", (until - start) / 1000,
                                       " ms (", reader_.stats().gets, " datagrams sent): a firewall on the way? transport=\"tcp\" needs no datagrams"));
}

void UdpLink::read(std::span<BlockRead> batch, Micros deadline) {
  Status status = guard_.check(cat("udp link to ", control_.peer()));
  if (status.ok() && broken()) status = Error(Code::kUnreachable, cat(control_.peer(), ": this link was broken before: ", broken_by_, "; connect again"));
  if (!status.ok()) {
    for (BlockRead& item : batch) item.result = status;
    return;
  }
  stats_.reads += batch.size();
  now_ = steady_clock().now();
  reader_.begin(batch, now_);
  status = run(batch.size(), deadline);
  if (!status.ok()) {
    broken_by_ = status.error().to_string();
    broken_.store(true, std::memory_order_release);
    reader_.abandon(status);
    if (!guard_.in_child()) control_.shutdown();  // which is for all who share it
  }
  for (const BlockRead& item : batch) count_read(stats_, item, options_.omitted);
}

Status UdpLink::run(std::size_t count, Micros deadline) {
  bool flowing = false;
  for (;;) {
    out_.clear();
    reader_.poll(now_, out_);
    if (reader_.done()) return {};
    if (now_ >= deadline) {
      return Error(Code::kTimeout, cat(control_.peer(), ": the deadline passed with ", reader_.unfinished(), " of ", count, " blocks to come by udp (",
                                       reader_.stats().timeouts, " timeouts, ", reader_.stats().segments_lost, " datagrams lost, ", socket_.drops(), " dropped here)"));
    }
    if (!out_.sizes.empty()) send_questions();
    // Right after the first questions nothing can be there yet: the wait brings the first of the answers.
    if (!flowing) {
      PARAMWIRE_TRY(came, wait(std::min(deadline, reader_.next_timer())));
      flowing = came;
    }
    for (int i = 0; flowing && i < kReceivesAtOnce; ++i) {
      if (reader_.done()) return {};
      PARAMWIRE_TRY(came, receive_some(DatagramSocket::Wait::kNo));
      flowing = came;
    }
  }
}

// One receive. False: nothing came.
Result<bool> UdpLink::receive_some(DatagramSocket::Wait wait) {
  const iovec part{scratch_.data(), scratch_.size()};
  PARAMWIRE_TRY(got, socket_.receive({&part, 1}, wait));
  if (!got) return false;
  now_ = steady_clock().now();
  const auto bytes = std::span<const std::byte>(scratch_.span()).first(got->size);
  if (got->truncated || got->size == 0) {
    reader_.on_datagram(now_, {});
    return true;
  }
  for (std::size_t at = 0; at < bytes.size(); at += got->segment) {
    const auto datagram = bytes.subspan(at, std::min(got->segment, bytes.size() - at));
    if (options_.lose && options_.lose(datagram)) continue;
    reader_.on_datagram(now_, datagram);
  }
  return true;
}

Status UdpLink::check_control() {
  return check_quiet(control_, "a udp link");
}

Error UdpLink::interrupted() const { return Error(Code::kTimeout, cat(control_.peer(), ": the wait for its datagrams was interrupted")); }

// Until something came (true), a time-out is due, or the control connection ended.
Result<bool> UdpLink::wait(Micros until) {
  const Micros start = now_;
  if (options_.busy_poll) {
    bool came = false;
    for (int i = 0; i < kSpinsAtOnce && !came && now_ < until; ++i) {
      PARAMWIRE_TRY(one, receive_some(DatagramSocket::Wait::kNo));
      came = one;
      if (!came && i % kSpinsALook == 0) now_ = steady_clock().now();
    }
    busy_poll_us_ += static_cast<std::uint64_t>(now_ - start);
    if (came) return true;
    PARAMWIRE_CHECK(check_control());
    if (now_ < looked_ + kInterruptLook) return false;
    looked_ = now_;
    if (wait_interrupted()) return interrupted();
    return false;
  }
  Micros left = wait_slice(until == kNever ? kNever : std::max<Micros>(0, until - start));
  if (left > kSleep) {
    PARAMWIRE_TRY(came, receive_some(DatagramSocket::Wait::kYes));
    if (came) return true;
    now_ = steady_clock().now();
    if (left != kNever) left = std::max<Micros>(0, left - (now_ - start));
  }
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(left / kMicrosPerSecond);
  timeout.tv_nsec = static_cast<long>(left % kMicrosPerSecond * 1000);
  std::array<pollfd, 2> entries = {pollfd{socket_.fd(), POLLIN, 0}, pollfd{control_.fd(), POLLIN, 0}};
  const int n = ppoll(entries.data(), entries.size(), left == kNever ? nullptr : &timeout, nullptr);
  if (n < 0 && errno != EINTR) return errno_error(Code::kUnavailable, cat(control_.peer(), ": poll"), errno);
  now_ = steady_clock().now();
  if (n > 0 && entries[1].revents != 0) PARAMWIRE_CHECK(check_control());
  if (n <= 0 && wait_interrupted()) return interrupted();
  return n > 0 && entries[0].revents != 0;
}

// ---------------------------------------------------------------- out

// Neighbours of one size go together, cut apart by the kernel: 64 questions about tiny blocks are one call.
void UdpLink::send_questions() {
  parts_.clear();
  messages_.clear();
  firsts_.clear();
  parts_.reserve(out_.sizes.size());  // messages point into it
  std::size_t at = 0;
  for (std::size_t i = 0; i < out_.sizes.size();) {
    std::size_t run = 1;
    while (gso_ && run < kGsoSegments && i + run < out_.sizes.size() && out_.sizes[i + run] == out_.sizes[i]) ++run;
    parts_.push_back({out_.bytes.data() + at, run * out_.sizes[i]});
    messages_.push_back({std::span(&parts_.back(), 1), static_cast<std::uint16_t>(run > 1 ? out_.sizes[i] : 0)});
    firsts_.push_back(i);
    at += run * out_.sizes[i];
    i += run;
  }
  std::span<const DatagramSocket::Message> left(messages_);
  for (int tries = 0; !left.empty() && tries < 4; ++tries) {
    std::size_t done = 0;
    const auto sent = socket_.send(left, nullptr, done);
    left = left.subspan(done);
    if (sent == DatagramSocket::Sent::kAll) return;
    if (sent == DatagramSocket::Sent::kNoGso) {
      gso_ = false;
      return send_single(firsts_[messages_.size() - left.size()]);
    }
    if (sent == DatagramSocket::Sent::kBusy) {  // the device is full: a moment, then what is left counts as lost
      pollfd entry{socket_.fd(), POLLOUT, 0};
      static_cast<void>(poll(&entry, 1, 2));
      continue;
    }
    ++send_failures_;
    left = left.subspan(1);
  }
  send_failures_ += left.size();
}

void UdpLink::send_single(std::size_t from) {
  std::size_t at = 0;
  for (std::size_t i = 0; i < out_.sizes.size(); at += out_.sizes[i], ++i) {
    if (i < from) continue;
    const iovec part{out_.bytes.data() + at, out_.sizes[i]};
    const DatagramSocket::Message message{std::span(&part, 1), 0};
    std::size_t done = 0;
    if (socket_.send({&message, 1}, nullptr, done) != DatagramSocket::Sent::kAll) ++send_failures_;
  }
}

// ---------------------------------------------------------------- the rest

Result<BlockView> UdpLink::view(const ManifestEntry& entry, const Locator&, ByteRange) {
  return Error(Code::kUnavailable, cat("block ", entry.to_string(), ": udp has no views, the bytes are on ", control_.peer(), ": fetch into a buffer, or use shm on the server's host"));
}

LinkStats UdpLink::stats() const {
  LinkStats out = stats_;
  const ReliableStats machine = reader_.stats();
  out.wire_bytes = reader_.wire_bytes();
  DatagramStats& d = out.datagram;
  d.gets = machine.gets;
  d.received = machine.segments;
  d.bytes_needed = machine.segment_bytes;
  d.bytes_asked = machine.bytes_asked;
  d.lost = machine.segments_lost;
  d.duplicates = machine.duplicates;
  d.refused = machine.refused;
  d.forged = machine.forged;
  d.timeouts = machine.timeouts;
  d.socket_drops = socket_.drops();
  d.send_failures = send_failures_;
  d.gso_disabled = gso_ ? 0 : 1;
  d.busy_poll_us = busy_poll_us_;
  d.size_steps = machine.size_steps;
  d.receive_buffer_bytes = socket_.receive_buffer();
  d.receive_buffer_asked_bytes = socket_.receive_buffer_asked();
  d.segment_bytes = machine.segment_size;
  d.window_bytes = machine.window_bytes;
  d.round_trip_us = machine.round_trip_us;
  return out;
}

}  // namespace paramwire
