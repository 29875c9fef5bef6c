#include "paramwire/net/verbs_link.hpp"

#include "paramwire/base/interrupt.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/block_read.hpp"
#include "paramwire/net/verbs_address.hpp"
#include "paramwire/wire/verbs_message.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <poll.h>
#include <utility>

namespace paramwire {

namespace {

// READs posted and not seen complete. Twice what any device has on the wire at once (16 to 128), so that the next ones wait in the device.
constexpr std::uint32_t kDepth = 64;
constexpr std::uint8_t kReadsOnWire = 16;
// Posted and not complete, together: enough for 25 GB/s over 300 us; an emulated device takes seconds for more, inside of the post.
constexpr std::uint64_t kBytesUnderWay = std::uint64_t{8} << 20;
// How long a wait spins before it sleeps: a small READ is back in 2 us on hardware and in 60 on an emulated device; a sleep costs about 10.
constexpr Micros kSpin = 100;
// Polls between two looks at the clock, which costs as much as a poll here, and 2 us in a guest without a good one.
constexpr int kPollsALook = 64;
// Checked before the next reads are posted: a few microseconds, in which the device has what was posted before. Blocks that were small leave their places
// together, so that the next ones go by one doorbell; a doorbell each costs a system call where the device is emulated.
constexpr std::uint64_t kCheckedAtOnce = std::uint64_t{32} << 10;
// Posted between two looks at the deadline: an emulated device works inside of the post, 25 ms a MiB.
constexpr std::uint64_t kBytesALook = std::uint64_t{1} << 20;
// Ways that are tried, on this side and at the server.
constexpr std::size_t kTriesHere = 4;
constexpr std::uint8_t kTriesThere = 2;
// A probe that fails takes two seconds (net/verbs_device.cpp, kTimeout): an answer that takes longer is none.
constexpr Micros kProbeMax = 4 * kMicrosPerSecond;
// How long a new link asks for regions that the server has yet to register; later ones are asked for by the reads that need them.
constexpr Micros kLearnMax = kMicrosPerSecond;
constexpr std::uint32_t kPage = 4096;
// Regions of one server: 16 TiB of memory, and 50 MiB here. More is no server of ours.
constexpr std::size_t kRegionsMax = std::size_t{1} << 20;

// Offsets are below 2^48.
constexpr std::uint64_t place_key(std::uint16_t arena, std::uint64_t offset) { return std::uint64_t{arena} << 48 | offset / kRegionBytes; }

Error region_gone(std::uint16_t arena, std::uint64_t offset, std::uint64_t size) {
  return Error(Code::kStale, cat("the locator names bytes ", offset, " to ", offset + size, " of arena ", arena, ", which the server does not have: take a new snapshot"));
}

// What the device says of a connection, with the name of its other end.
Error of_peer(const Socket& control, const Error& error) { return Error(error.code(), cat(control.peer(), ": ", error.message())); }

// What can't be had on one way may be had on the next, and is not the lack of any device: where RDMA was offered, going on without it is a fallback.
Error of_this_way(const Error& error) { return error.code() == Code::kUnavailable ? Error(Code::kUnreachable, error.message()) : error; }

}  // namespace

// Whole pages, registered.
struct VerbsLink::Staging {
  struct Free {
    void operator()(std::byte* pages) const noexcept { std::free(pages); }
  };
  std::unique_ptr<std::byte, Free> bytes;
  std::unique_ptr<VerbsMemory> memory;

  static Result<std::unique_ptr<Staging>> create(const std::shared_ptr<VerbsDevice>& device, std::size_t size) {
    auto out = std::make_unique<Staging>();
    out->bytes.reset(static_cast<std::byte*>(std::aligned_alloc(kPage, size)));
    if (out->bytes == nullptr) return Error(Code::kBackpressure, cat("no memory for a staging buffer of ", size, " bytes"));
    PARAMWIRE_TRY(memory, VerbsMemory::create(device, {out->bytes.get(), size}, VerbsMemory::Access::kLocal));
    out->memory = std::move(memory);
    return out;
  }
};

class VerbsLink::Memory final : public OneSidedMemory {
 public:
  explicit Memory(VerbsLink& link) : link_(link) {}

  Status reach(std::uint16_t arena, std::uint64_t offset, std::uint64_t size) override {
    if (size == 0) return {};
    if (arena > kArenaMax || offset + size < offset) return region_gone(arena, offset, size);
    for (std::uint64_t at = offset; at < offset + size;) {
      const std::uint64_t end = std::min(offset + size, (at / kRegionBytes + 1) * kRegionBytes);
      const auto known = [&] {
        const Place* place = link_.place(arena, at);
        return place != nullptr && end - at / kRegionBytes * kRegionBytes <= place->size;
      };
      while (!known()) {
        const std::uint32_t before = link_.regions_known_;
        VerbsRegionsMessage ask;
        ask.wanted = true;
        ask.arena = arena;
        ask.offset = end - 1;
        auto answer = link_.ask_regions(ask, link_.deadline_);
        if (!answer.ok()) {
          const Code code = answer.error().code();
          if (code == Code::kNotFound) return region_gone(arena, offset, size);
          // Not the server's answer: nobody knows what comes over the connection next.
          if (code == Code::kTimeout || code == Code::kUnreachable || code == Code::kCorrupt) link_.control_lost_ = answer.error();
          return std::move(answer).error();
        }
        if (!known() && link_.regions_known_ == before) {
          return Error(Code::kCorrupt, cat(link_.control_.peer(), ": its list of regions lacks arena ", arena, " offset ", ask.offset, ", which it was asked for"));
        }
      }
      at = end;
    }
    return {};
  }

  bool registered(std::span<const std::byte> target) override {
    auto memory = link_.node_->find(link_.device_, target);
    if (memory == nullptr) return false;
    auto& kept = link_.targets_;
    if (std::find(kept.begin(), kept.end(), memory) == kept.end()) kept.push_back(std::move(memory));
    return true;
  }

 private:
  VerbsLink& link_;
};

// ---------------------------------------------------------------- connecting

VerbsLink::VerbsLink(GreetedSocket greeted, std::shared_ptr<VerbsNode> node, const VerbsOptions& options)
    : control_(std::move(greeted.socket)), node_(std::move(node)), options_(options), reads_(kDepth), posting_(kDepth) {}

VerbsLink::~VerbsLink() = default;

Result<std::unique_ptr<Link>> VerbsLink::connect(const Endpoint& endpoint, const Caller& caller, const Incarnation& incarnation, const VerbsOptions& options,
                                                 std::shared_ptr<VerbsNode> node, Micros deadline) {
  PARAMWIRE_TRY(greeted, connect_and_greet(endpoint, caller, deadline));
  if (greeted.facts.incarnation != incarnation && !options.omitted.epoch) {
    return Error(Code::kStale, cat(endpoint, " is incarnation ", greeted.facts.incarnation, " now, ", incarnation, " was expected (the server restarted): take a new snapshot"));
  }
  std::unique_ptr<VerbsLink> link(new VerbsLink(std::move(greeted), std::move(node), options));
  PARAMWIRE_CHECK(link->open_path(deadline));
  if (const Status learned = link->learn(deadline); !learned.ok()) return of_this_way(learned.error());
  return std::unique_ptr<Link>(std::move(link));
}

Status VerbsLink::open_path(Micros deadline) {
  VerbsPeer peer;
  peer.address = gid_of(DatagramAddress::peer_of(control_.fd()));
  peer.source = gid_of(DatagramAddress::local_of(control_.fd()));
  PARAMWIRE_TRY(choices, node_->choices(peer));
  std::string tried;
  for (std::size_t i = 0; i < std::min(choices.size(), kTriesHere); ++i) {
    for (std::uint8_t there = 0; there < kTriesThere; ++there) {
      const Status status = try_path(choices[i], there, deadline);
      if (status.ok()) return {};
      const Code code = status.error().code();
      // Not of this way: the same with any other. Or the server said that it has no device.
      if (code == Code::kBackpressure || code == Code::kCorrupt || code == Code::kTimeout || code == Code::kUnavailable) return status;
      if (code == Code::kNotFound) break;  // the server has no other way to this end
      tried += cat(tried.empty() ? "" : "; ", choices[i].to_string(), ": ", status.error().message());
    }
  }
  return Error(Code::kUnreachable, cat("no RDMA way to ", control_.peer(), " works: ", tried));
}

Status VerbsLink::try_path(const VerbsChoice& choice, std::uint8_t at_server, Micros deadline) {
  queue_.reset();
  reader_.reset();
  staging_.reset();
  auto device = node_->device(choice.device);
  if (!device.ok()) return of_this_way(device.error());
  device_ = std::move(*device);
  const std::uint32_t slice = std::min({options_.slice, options_.staging / 2, choice.message_max == 0 ? options_.slice : choice.message_max}) / kPage * kPage;
  if (slice == 0) return Error(Code::kInvalid, cat("verbs: a slice of ", options_.slice, " bytes with a staging buffer of ", options_.staging, ": both are whole pages, and two slices fit the buffer"));
  const auto no_use = [&](const Error& error) {
    if (error.code() == Code::kUnavailable) node_->forget(device_);
    return of_this_way(error);
  };
  auto staging = Staging::create(device_, options_.staging / kPage * kPage);
  if (!staging.ok()) return no_use(staging.error());
  staging_ = std::move(*staging);
  VerbsQueue::Options wanted;
  wanted.depth = kDepth;
  wanted.reads = kReadsOnWire;
  auto queue = VerbsQueue::create(device_, choice, wanted);
  if (!queue.ok()) return no_use(queue.error());
  queue_ = std::move(*queue);

  VerbsOpenMessage open;
  open.end = queue_->end();
  open.choice = at_server;
  const std::uint64_t request = ++requests_;
  PARAMWIRE_TRY(answer, ControlLink::ask(control_, open.encode(request), request, FrameType::kVerbsReady, deadline));
  PARAMWIRE_TRY(ready, VerbsReadyMessage::decode(answer.meta));
  if (ready.end.mtu > open.end.mtu || ready.end.reads > open.end.reads) {
    return Error(Code::kCorrupt, cat(control_.peer(), ": agreed on MTU ", ready.end.mtu, " and ", unsigned{ready.end.reads}, " READs, more than the ", open.end.mtu, " and ", unsigned{open.end.reads}, " offered"));
  }
  if (const Status connected = queue_->connect(ready.end); !connected.ok()) return of_this_way(connected.error());
  PARAMWIRE_CHECK(probe(ready, deadline));

  OneSidedOptions machine;
  machine.omitted = options_.omitted;
  machine.slice = slice;
  machine.reads_max = kDepth;
  machine.bytes_max = kBytesUnderWay;
  reader_ = std::make_unique<OneSidedReader>(staging_->memory->bytes(), machine);
  places_.clear();  // of the device that the server chose
  regions_known_ = 0;
  stats_.verbs.mtu_bytes = ready.end.mtu;
  stats_.verbs.slice_bytes = slice;
  stats_.verbs.reads_on_wire = ready.end.reads;
  stats_.verbs.gid_index = choice.gid_index;
  stats_.verbs.staging_bytes = staging_->memory->bytes().size();
  stats_.path = cat(choice.to_string(), " to GID ", to_string(ready.end.gid), ", MTU ", ready.end.mtu);
  return {};
}

// One READ of several packets, at the agreed MTU: a path that carries small ones only would fail with the first large block. Of as much as the server
// offers, and as this end has room for and its device takes at once.
Status VerbsLink::probe(const VerbsReadyMessage& ready, Micros deadline) {
  const std::uint32_t message_max = queue_->choice().message_max;
  const auto room = static_cast<std::uint32_t>(staging_->memory->bytes().size());
  const std::uint32_t size = std::min({ready.probe_size, room, message_max == 0 ? room : message_max});
  const std::span<std::byte> into = staging_->memory->bytes().first(size);
  std::fill(into.begin(), into.end(), std::byte{0});
  const Micros start = steady_clock().now();
  const VerbsRead read{ready.probe_address, ready.probe_key, staging_->memory->local_key(), into.data(), size};
  PARAMWIRE_CHECK(queue_->post({&read, 1}));
  ++stats_.verbs.reads;
  ++stats_.verbs.doorbells;
  const Micros until = std::min(deadline, start + kProbeMax);
  while (queue_->outstanding() > 0) {
    PARAMWIRE_TRY(done, queue_->poll());
    if (done > 0) break;
    const Micros now = steady_clock().now();
    if (now >= until) {
      return Error(now >= deadline ? Code::kTimeout : Code::kUnreachable, cat(control_.peer(), ": a READ of ", size, " bytes at MTU ", ready.end.mtu, " from GID ", to_string(ready.end.gid),
                                                                              " was not answered in ", (now - start) / 1000, " ms"));
    }
    PARAMWIRE_CHECK(wait(until));
  }
  for (std::uint32_t i = 0; i < size; ++i) {
    if (into[i] != verbs_probe_byte(i)) return Error(Code::kUnreachable, cat("a READ from GID ", to_string(ready.end.gid), " brought other bytes than the server's probe: another machine has that address"));
  }
  return {};
}

// ---------------------------------------------------------------- regions

const VerbsLink::Place* VerbsLink::place(std::uint16_t arena, std::uint64_t offset) const noexcept {
  const auto known = places_.find(place_key(arena, offset));
  return known == places_.end() ? nullptr : &known->second;
}

Result<VerbsRegionListMessage> VerbsLink::ask_regions(const VerbsRegionsMessage& what, Micros deadline) {
  VerbsRegionsMessage ask = what;
  ask.known = regions_known_;
  const std::uint64_t request = ++requests_;
  PARAMWIRE_TRY(answer, ControlLink::ask(control_, ask.encode(request), request, FrameType::kVerbsRegionList, deadline));
  PARAMWIRE_TRY(list, VerbsRegionListMessage::decode(answer.meta));
  for (const VerbsRegion& region : list.regions) {
    if (region.offset >> 48 != 0 || region.arena > kArenaMax) return Error(Code::kCorrupt, cat(control_.peer(), ": a region at offset ", region.offset, " of arena ", region.arena));
    Place& place = places_[place_key(region.arena, region.offset)];
    if (region.size > place.size) place = {region.address, region.key, region.size};
    if (places_.size() > kRegionsMax) return Error(Code::kCorrupt, cat(control_.peer(), ": more than ", kRegionsMax, " regions"));
  }
  regions_known_ += static_cast<std::uint32_t>(list.regions.size());
  return list;
}

Status VerbsLink::learn(Micros deadline) {
  const Micros until = std::min(deadline, steady_clock().now() + kLearnMax);
  do {
    PARAMWIRE_TRY(list, ask_regions({}, deadline));
    if (list.complete) return {};
  } while (steady_clock().now() < until);
  return {};
}

// ---------------------------------------------------------------- reading

void VerbsLink::read(std::span<BlockRead> batch, Micros deadline) {
  Status status = guard_.check(cat("verbs link to ", control_.peer()));
  if (status.ok() && broken()) status = Error(Code::kUnreachable, cat(control_.peer(), ": this link was broken before: ", broken_by_, "; connect again"));
  if (!status.ok()) {
    for (BlockRead& item : batch) item.result = status;
    return;
  }
  stats_.reads += batch.size();
  deadline_ = deadline;
  Memory memory(*this);
  reader_->begin(batch, memory);
  status = run(batch.size(), deadline);
  if (!status.ok()) fail(status);
  targets_.clear();
  for (const BlockRead& item : batch) count_read(stats_, item, options_.omitted);
}

// The queue pair goes first: then nothing can write any more into what the caller gets back.
void VerbsLink::fail(const Status& status) {
  if (guard_.in_child()) return;
  if (queue_->failed_status() != 0) {
    ++stats_.verbs.failures;
    stats_.verbs.failed_status = static_cast<std::uint64_t>(queue_->failed_status());
  }
  queue_.reset();
  reader_->abandon(status);
  broken_by_ = status.error().to_string();
  broken_.store(true, std::memory_order_release);
  control_.shutdown();  // which is for all who share it
}

Status VerbsLink::run(std::size_t count, Micros deadline) {
  std::uint64_t unlooked = 0;
  for (now_ = steady_clock().now(); !reader_->done() && now_ < deadline;) {
    const std::size_t given = reader_->next(reads_);
    if (!control_lost_.ok()) return control_lost_;
    for (std::size_t i = 0; i < given; ++i) unlooked += reads_[i].size;
    if (given > 0) PARAMWIRE_CHECK(post(std::span(reads_).first(given)));
    PARAMWIRE_TRY(done, take());
    reader_->completed(done);
    std::uint64_t checked = 0;
    while (checked < kCheckedAtOnce) {
      const std::uint32_t bytes = reader_->consume();
      if (bytes == 0) break;
      checked += bytes;
    }
    if (given == 0 && done == 0 && checked == 0) {
      if (reader_->done()) break;  // the last ones could not be read at all
      PARAMWIRE_CHECK(wait(deadline));
    } else if (unlooked >= kBytesALook) {
      unlooked = 0;
      now_ = steady_clock().now();
    }
  }
  if (!reader_->done()) {
    return Error(Code::kTimeout, cat(control_.peer(), ": the deadline passed with ", reader_->unfinished(), " of ", count, " blocks to come by RDMA over ", queue_->choice().to_string(), " (",
                                     queue_->outstanding(), " READs under way)"));
  }
  return {};
}

Result<std::size_t> VerbsLink::take() {
  auto done = queue_->poll();
  return done.ok() ? std::move(done) : of_peer(control_, done.error());
}

Status VerbsLink::post(std::span<const RemoteRead> reads) {
  for (std::size_t i = 0; i < reads.size(); ++i) {
    const RemoteRead& read = reads[i];
    const Place& where = *place(read.arena, read.offset);
    VerbsRead& out = posting_[i];
    out.remote = where.address + read.offset % kRegionBytes;
    out.remote_key = where.key;
    out.into = read.into;
    out.size = read.size;
    if (read.staged) {
      out.local_key = staging_->memory->local_key();
      continue;
    }
    for (const auto& memory : targets_) {
      if (read.into >= memory->bytes().data() && read.into + read.size <= memory->bytes().data() + memory->bytes().size()) out.local_key = memory->local_key();
    }
  }
  stats_.verbs.reads += reads.size();
  ++stats_.verbs.doorbells;
  const Status posted = queue_->post(std::span<const VerbsRead>(posting_).first(reads.size()));
  return posted.ok() ? posted : of_peer(control_, posted.error());
}

Status VerbsLink::check_control() {
  return check_quiet(control_, "a verbs link");
}

// Until something may have completed. errors: kUnreachable when the control connection ended; kTimeout when somebody asked for the end.
Status VerbsLink::wait(Micros deadline) {
  const auto interrupted = [&] { return Error(Code::kTimeout, cat(control_.peer(), ": the wait for its memory was interrupted")); };
  for (Micros until = kNever, look = 0; now_ <= until; ++look) {
    for (int i = 0; i < kPollsALook; ++i) {
      PARAMWIRE_TRY(some, take());
      if (some == 0) continue;
      if (reader_) reader_->completed(some);
      return {};
    }
    now_ = steady_clock().now();
    if (look == 0) until = options_.busy_poll ? std::min(deadline, now_ + 1000) : now_ + kSpin;
  }
  if (options_.busy_poll) {
    PARAMWIRE_CHECK(check_control());
    if (now_ < looked_ + kInterruptLook) return {};
    looked_ = now_;
    if (wait_interrupted()) return interrupted();
    return {};
  }
  if (const Status armed = queue_->arm(); !armed.ok()) return of_peer(control_, armed.error());
  PARAMWIRE_TRY(late, take());  // what came before it was armed
  if (late > 0) {
    if (reader_) reader_->completed(late);
    return {};
  }
  ++stats_.verbs.sleeps;
  const Micros left = wait_slice(deadline == kNever ? kNever : std::max<Micros>(0, deadline - now_));
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(left / kMicrosPerSecond);
  timeout.tv_nsec = static_cast<long>(left % kMicrosPerSecond * 1000);
  std::array<pollfd, 2> entries = {pollfd{queue_->fd(), POLLIN, 0}, pollfd{control_.fd(), POLLIN, 0}};
  const int n = ppoll(entries.data(), entries.size(), left == kNever ? nullptr : &timeout, nullptr);
  if (n < 0 && errno != EINTR) return errno_error(Code::kUnavailable, cat(control_.peer(), ": poll"), errno);
  now_ = steady_clock().now();
  if (n > 0 && entries[1].revents != 0) PARAMWIRE_CHECK(check_control());
  if (n <= 0 && wait_interrupted()) return interrupted();
  return {};
}

// ---------------------------------------------------------------- the rest

Result<BlockView> VerbsLink::view(const ManifestEntry& entry, const Locator&, ByteRange) {
  return Error(Code::kUnavailable, cat("block ", entry.to_string(), ": verbs has no views, the bytes are on ", control_.peer(), ": fetch into a buffer, or use shm on the server's host"));
}

LinkStats VerbsLink::stats() const {
  LinkStats out = stats_;
  if (reader_) {
    out.wire_bytes = reader_->wire_bytes();
    out.verbs.headers = reader_->headers();
    out.verbs.direct_bytes = reader_->direct_bytes();
  }
  out.verbs.regions = regions_known_;
  out.verbs.control_calls = requests_;
  return out;
}

}  // namespace paramwire
