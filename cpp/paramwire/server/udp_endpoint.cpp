#include "paramwire/server/udp_endpoint.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/base/thread.hpp"
#include "paramwire/server/server_core.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <poll.h>
#include <utility>

namespace paramwire {

namespace {

// GETs of one receive. Each may ask for 256 KiB: while they are answered others wait, about 3 ms of them at 5 GB/s.
constexpr std::size_t kBatch = 64;
constexpr std::size_t kSlotBytes = 256;  // a GET has at most 240; a longer datagram is none
static_assert(kGetBytesMax <= kSlotBytes);
// Segments handed to the kernel in one call: 64 of 64 KiB are 4 MiB; of 1,448 B 88 are two whole trains, so a GET's are one call.
constexpr std::size_t kSegmentsAtOnce = 88;
constexpr std::size_t kSegmentsAtOnceBytes = 4 << 20;
// Segments up to this size, with their header, are laid side by side before they are sent: the kernel takes each piece of a message by a
// copy of its own, which for a header and 1,448 B costs more than this one into the cache and a long one out of it.
constexpr std::size_t kStagedBytes = 2048;
// A full device gets this long to make room, then what is left counts as lost; the thread serves everybody.
constexpr int kRoomMs = 5;
// The server's own receive buffer: 256 GETs of each of 16 clients, at the 1.3 KiB that each costs.
constexpr int kReceiveBuffer = 4 << 20;
constexpr int kSendBuffer = 8 << 20;
constexpr int kSpins = 4000;  // between two looks at the clock and the stop flag

// Datagrams of a message: of one part, segments of which only the last may be shorter; else header and payload of each.
std::size_t pieces_of(const DatagramSocket::Message& message) {
  if (message.parts.size() != 1) return message.parts.size() / 2;
  return message.segment == 0 ? 1 : (message.parts[0].iov_len + message.segment - 1) / message.segment;
}

// Of a message of one part.
iovec piece_of(const DatagramSocket::Message& message, std::size_t i) {
  const iovec& whole = message.parts[0];
  const std::size_t at = i * message.segment;
  return {static_cast<std::byte*>(whole.iov_base) + at, message.segment == 0 ? whole.iov_len : std::min<std::size_t>(message.segment, whole.iov_len - at)};
}

}  // namespace

Result<std::unique_ptr<UdpEndpoint>> UdpEndpoint::open(std::shared_ptr<ServerCore> core, const std::vector<DatagramAddress>& addresses, const UdpEndpointOptions& options) {
  std::unique_ptr<UdpEndpoint> out(new UdpEndpoint(std::move(core), options));
  DatagramSocketOptions socket_options;
  socket_options.receive_buffer = kReceiveBuffer;
  socket_options.send_buffer = kSendBuffer;
  for (const DatagramAddress& address : addresses) {
    auto socket = DatagramSocket::bind(address, socket_options);
    if (!socket.ok() && address.port() != 0) {  // somebody has that number in UDP: any other does, clients are told
      DatagramAddress any = address;
      any.set_port(0);
      socket = DatagramSocket::bind(any, socket_options);
    }
    if (!socket.ok()) return std::move(socket).error();
    if (options.fail_gso != 0) socket->fail_gso(options.fail_gso, 2);
    out->doors_.push_back(std::make_unique<Door>(std::move(*socket)));
  }
  return out;
}

UdpEndpoint::Door::Door(DatagramSocket bound) : socket(std::move(bound)), batch(kBatch, kSlotBytes), jobs(kBatch), stage(kSegmentsAtOnce * kStagedBytes) {}

Status UdpEndpoint::start() {
  for (const auto& door : doors_) {
    PARAMWIRE_TRY(thread, start_thread("pw-udp", [this, &door = *door] { run(door); }));
    door->thread = std::move(thread);
  }
  return {};
}

void UdpEndpoint::stop() {
  stop_ = true;
  for (const auto& door : doors_) {
    if (!door->thread.joinable()) continue;
    door->socket.shutdown();
    door->thread.join();
  }
}

void UdpEndpoint::disown() noexcept {
  for (const auto& door : doors_) {
    if (door->thread.joinable()) static_cast<void>(new std::thread(std::move(door->thread)));
  }
}

void UdpEndpoint::run(Door& door) {
  while (!stop_) {
    if (!options_.busy_poll) {
      serve(door, DatagramSocket::Wait::kYes);
      continue;
    }
    const Micros start = steady_clock().now();
    std::size_t came = 0;
    for (int i = 0; i < kSpins && came == 0; ++i) came = serve(door, DatagramSocket::Wait::kNo);
    if (came == 0) counters_.busy_poll_us += static_cast<std::uint64_t>(steady_clock().now() - start);
  }
}

std::size_t UdpEndpoint::serve(Door& door, DatagramSocket::Wait wait) {
  DatagramSocket& socket = door.socket;
  const auto got = socket.receive_many(door.batch, wait);
  if (!got.ok() || *got == 0) return 0;
  counters_.socket_drops += socket.drops() - std::exchange(door.drops, socket.drops());
  std::size_t jobs = 0;
  for (std::size_t i = 0; i < *got; ++i) {
    Job& job = door.jobs[jobs];
    const DatagramAddress& from = door.batch.from(i);
    const auto verdict = core_->udp->check(door.batch.bytes(i), from.bytes(), job.question);
    if (verdict == UdpResponder::Verdict::kStatus) send_status(socket, from, job.question.status);
    if (verdict != UdpResponder::Verdict::kLookup) continue;
    job.to = from;
    ++jobs;
  }
  if (jobs == 0) return *got;
  const auto asked = std::span(door.jobs).first(jobs);
  look_up(asked);
  for (Job& job : asked) answer(door, job);
  let_go(asked);
  return *got;
}

void UdpEndpoint::look_up(std::span<Job> jobs) {
  const std::lock_guard lock(core_->mutex);
  for (Job& job : jobs) {
    const Asked& asked = job.question.get.asked;
    auto held = core_->closed ? Result<BlockStore::Held>(Error(Code::kStale, "closed")) : core_->store->hold(asked.block, asked.version);
    job.found = held.ok();
    if (held.ok()) job.held = *held;
  }
}

void UdpEndpoint::let_go(std::span<Job> jobs) {
  const Micros now = steady_clock().now();
  const std::lock_guard lock(core_->mutex);
  for (const Job& job : jobs) {
    if (job.found) core_->store->unhold(job.held.slot, now);
  }
}

void UdpEndpoint::answer(Door& door, Job& job) {
  DatagramSocket& socket = door.socket;
  if (!job.found) return send_status(socket, job.to, core_->udp->refuse(job.question, StatusCode::kStale));
  const DatagramGet& get = job.question.get;
  const auto part = get.asked.part == BlockPart::kStored ? job.held.payload : job.held.extent_table;
  SegmentWalk walk(get, part);
  if (!walk.fits()) return send_status(socket, job.to, core_->udp->refuse(job.question, StatusCode::kInvalid));
  while (send_segments(door, job, walk)) {
  }
}

void UdpEndpoint::send_status(DatagramSocket& socket, const DatagramAddress& to, const std::array<std::byte, kStatusBytes>& status) {
  const iovec part{const_cast<std::byte*>(status.data()), status.size()};
  const DatagramSocket::Message message{std::span(&part, 1), 0};
  std::size_t done = 0;
  if (socket.send({&message, 1}, &to, done) != DatagramSocket::Sent::kAll) ++counters_.failed;
}

// The next segments, as many as one call takes. False: there are no more, or no more of them will go now.
bool UdpEndpoint::send_segments(Door& door, const Job& job, SegmentWalk& walk) {
  std::array<std::array<std::byte, kDataHeaderBytes>, kSegmentsAtOnce> headers;  // of those that are not staged
  std::array<iovec, 2 * kSegmentsAtOnce> parts;
  std::array<DatagramSocket::Message, kSegmentsAtOnce> messages;
  const std::size_t whole = kDataHeaderBytes + job.question.get.segment_size;
  const std::size_t per_message = job.question.gso ? std::max<std::size_t>(1, std::min(kGsoSegments, kUdpPayloadMax / whole)) : 1;
  const bool staged = per_message > 1 && whole <= kStagedBytes;
  std::byte* stage = door.stage.data();
  std::size_t segments = 0, count = 0, in_message = 0, first_part = 0;
  std::uint64_t bytes = 0;
  bool short_one = false;  // a shorter segment ends its message: the kernel cuts all but the last alike
  const std::size_t most = std::min(kSegmentsAtOnce, std::max<std::size_t>(1, kSegmentsAtOnceBytes / whole));
  while (segments < most) {
    const auto payload = walk.next(staged ? stage : headers[segments].data());
    if (!payload) break;
    parts[2 * segments] = {staged ? stage : headers[segments].data(), kDataHeaderBytes};
    parts[2 * segments + 1] = {const_cast<std::byte*>(payload->data()), payload->size()};
    if (staged) {
      // The segment behind this one, most likely: processors stop reading ahead at the end of each page.
      for (std::size_t at = 0; at < payload->size(); at += 64) __builtin_prefetch(payload->data() + payload->size() + at);
      std::memcpy(stage + kDataHeaderBytes, payload->data(), payload->size());
      stage += kDataHeaderBytes + payload->size();
    }
    if (in_message == 0 || in_message == per_message || short_one) {
      ++count;
      in_message = 0;
      first_part = 2 * segments;
      messages[count - 1] = {std::span<const iovec>(&parts[2 * segments], 0), 0};
    }
    ++in_message;
    DatagramSocket::Message& message = messages[count - 1];
    message.parts = {message.parts.data(), staged ? 1 : 2 * in_message};
    if (staged) parts[first_part].iov_len += payload->size() + (in_message > 1 ? kDataHeaderBytes : 0);
    message.segment = static_cast<std::uint16_t>(in_message > 1 ? whole : 0);
    short_one = payload->size() < job.question.get.segment_size;
    ++segments;
    bytes += payload->size();
  }
  if (segments == 0) return false;
  counters_.bytes.fetch_add(bytes, std::memory_order_relaxed);
  counters_.segments.fetch_add(segments, std::memory_order_relaxed);
  return send_all(door.socket, job, std::span(messages).first(count)) && segments == most;
}

bool UdpEndpoint::send_all(DatagramSocket& socket, const Job& job, std::span<DatagramSocket::Message> messages) {
  bool waited = false;
  std::span<const DatagramSocket::Message> left(messages);
  while (!left.empty()) {
    std::size_t done = 0;
    const auto sent = socket.send(left, &job.to, done);
    left = left.subspan(done);
    switch (sent) {
      case DatagramSocket::Sent::kAll: return true;
      case DatagramSocket::Sent::kBusy: {
        pollfd entry{socket.fd(), POLLOUT, 0};
        if (!waited && poll(&entry, 1, kRoomMs) > 0) {
          waited = true;
          continue;
        }
        for (const auto& message : left) counters_.dropped += pieces_of(message);
        return false;
      }
      case DatagramSocket::Sent::kNoGso:
        if (!send_pieces(socket, job, left.front())) return false;
        left = left.subspan(1);
        continue;
      case DatagramSocket::Sent::kTooLong:
        ++counters_.too_long;
        left = left.subspan(1);
        continue;
      case DatagramSocket::Sent::kFailed:
        ++counters_.failed;
        return false;
    }
  }
  return true;
}

// A message whose segmented send failed, piece by piece. If pieces go, it was the segmenting: no more of it on this client's path.
bool UdpEndpoint::send_pieces(DatagramSocket& socket, const Job& job, const DatagramSocket::Message& message) {
  const std::size_t pieces = pieces_of(message);
  for (std::size_t i = 0; i < pieces; ++i) {
    const iovec cut = piece_of(message, i);
    const DatagramSocket::Message piece{message.parts.size() == 1 ? std::span(&cut, 1) : message.parts.subspan(2 * i, 2), 0};
    std::size_t done = 0;
    const auto sent = socket.send({&piece, 1}, &job.to, done);
    if (sent == DatagramSocket::Sent::kTooLong) {  // not the segmenting: the size
      counters_.too_long += pieces - i;
      return true;
    }
    if (sent != DatagramSocket::Sent::kAll) {
      counters_.dropped += pieces - i;
      return false;
    }
    if (i == 0 && core_->udp->disable_gso(job.question.get.session)) ++counters_.gso_disabled;
  }
  return true;
}

}  // namespace paramwire
