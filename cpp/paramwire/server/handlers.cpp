#include "paramwire/server/handlers.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/udp_key.hpp"
#include "paramwire/wire/delta_message.hpp"

#include <algorithm>
#include <cassert>

namespace paramwire {

namespace {
// Of deltas in one answer: they are copied for it, and a client that is slow to take them holds that copy.
constexpr std::size_t kDeltaAnswerBytes = std::size_t{16} << 20;
}  // namespace

Handlers::Handlers(BlockStore& store, Tier& tier, Coordinator& coordinator, DescriptorSource* descriptors, HandlerOptions options)
    : store_(store), tier_(tier), coordinator_(coordinator), descriptors_(descriptors), options_(std::move(options)) {}

void Handlers::reply(ServerSession& session, Bytes head) {
  Outgoing out;
  out.head = std::move(head);
  session.outgoing.push_back(std::move(out));
}

void Handlers::reply_error(ServerSession& session, std::uint64_t request, const Error& error) {
  ErrorMessage message;
  message.code = error.code();
  message.text = error.message();
  reply(session, message.encode(request));
}

// ---------------------------------------------------------------- frames

Status Handlers::on_head(ServerSession& session, const FrameHeader& header, std::span<const std::byte> meta, FrameParser::BodyTarget& target, Micros now) {
  ++frames_;
  target = {};
  target.discard = header.body_size;
  const auto type = static_cast<FrameType>(header.type);
  if (!session.greeted_ && type != FrameType::kHello) {
    Error error(Code::kInvalid, cat("the first frame was ", frame_type_name(type), ", not HELLO"));
    reply_error(session, header.request, error);
    return error;
  }
  if (type != FrameType::kPut) {
    if (header.body_size > 0) {
      Error error(Code::kInvalid, cat(frame_type_name(type), " (type ", header.type, ") has no body, ", header.body_size, " bytes were announced"));
      reply_error(session, header.request, error);
      return error;
    }
    Status status = dispatch(session, type, header.request, meta, now);
    if (status.ok()) return {};
    reply_error(session, header.request, status.error());
    // A frame that does not decode means that the two sides disagree about the protocol: nothing after it can be trusted.
    return status.error().code() == Code::kCorrupt ? status : Status();
  }

  session.put_.reset();
  session.put_error_.reset();
  session.put_request_ = header.request;
  auto put = PutMessage::decode(meta);
  if (!put.ok()) {
    reply_error(session, header.request, put.error());
    return std::move(put).error();
  }
  auto slot = begin_put(*put, header.body_size, now);
  if (!slot.ok()) {
    session.put_error_ = std::move(slot).error();  // said once the body has been dropped: answers keep the order of requests
    return {};
  }
  ServerSession::Put arriving;
  arriving.publish = put->publish;
  arriving.slot = *slot;
  arriving.request = header.request;
  arriving.extents.resize(static_cast<std::size_t>(extent_count(slot->payload.size())));
  session.put_ = std::move(arriving);
  target.discard = 0;
  target.parts[0] = slot->payload;
  return {};
}

Result<PutSlot> Handlers::begin_put(const PutMessage& put, std::uint64_t body_size, Micros now) {
  if (body_size > options_.put_bytes_max) {
    return Error(Code::kInvalid, cat("tensor \"", put.tensor, "\": a block has at most ", options_.put_bytes_max, " bytes here, ", body_size, " were announced"));
  }
  auto size = block_bytes(put.dtype, put.shape, put.shard);
  if (!size.ok()) return Error(Code::kInvalid, cat("tensor \"", put.tensor, "\": ", size.error().message()));
  if (put.codec == CodecId::kRaw && *size != body_size) {
    return Error(Code::kInvalid, cat("tensor \"", put.tensor, "\": ", dtype_name(put.dtype), ' ', put.shape, ' ', put.shard, " has ", *size,
                                     " bytes, ", body_size, " were announced"));
  }
  return store_.put_begin(put.publish, BlockSpec{put.tensor, put.dtype, put.shape, put.shard, put.codec, body_size}, now);
}

void Handlers::on_body(ServerSession& session, std::span<const std::byte> part) noexcept {
  if (!session.put_) return;
  ServerSession::Put& put = *session.put_;
  put.crc64 = crc64(part, put.crc64);
  while (!part.empty()) {
    const std::size_t extent = static_cast<std::size_t>(put.at / kExtentBytes);
    const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(part.size(), kExtentBytes - put.at % kExtentBytes));
    put.extents[extent] = crc32c(part.first(n), put.extents[extent]);
    put.at += n;
    part = part.subspan(n);
  }
}

void Handlers::on_progress(const ServerSession& session, Micros now) {
  if (session.put_) store_.put_progress(session.put_->publish, now);
}

Status Handlers::on_end(ServerSession& session, const FrameHeader& header, Micros now) {
  if (static_cast<FrameType>(header.type) != FrameType::kPut) return {};
  if (session.put_error_) {
    reply_error(session, session.put_request_, *session.put_error_);
    session.put_error_.reset();
    return {};
  }
  assert(session.put_ && session.put_->at == session.put_->slot.payload.size());
  const ServerSession::Put put = std::move(*session.put_);
  session.put_.reset();
  if (Status sealed = store_.put_seal(put.publish, put.slot, put.crc64, put.extents, now); !sealed.ok()) {
    reply_error(session, put.request, sealed.error());
    return {};
  }
  PutDoneMessage done;
  done.block = put.slot.block;
  done.crc64 = put.crc64;
  reply(session, done.encode(put.request));
  return {};
}

void Handlers::on_closed(ServerSession& session, Micros now) {
  if (session.put_) store_.put_cancel(session.put_->publish, session.put_->slot);
  session.put_.reset();
  if (session.udp_session_ != 0 && options_.datagrams != nullptr) options_.datagrams->close(session.udp_session_);
  session.udp_session_ = 0;
  if (session.verbs_) options_.verbs->close(session.connection_);
  session.verbs_ = false;
  for (const Outgoing& outgoing : session.outgoing) sent(outgoing, now);
  session.outgoing.clear();
  session.waits_.clear();
}

void Handlers::sent(const Outgoing& outgoing, Micros now) {
  if (outgoing.held) store_.unhold(*outgoing.held, now);
}

// ---------------------------------------------------------------- requests

Status Handlers::dispatch(ServerSession& session, FrameType type, std::uint64_t request, std::span<const std::byte> meta, Micros now) {
  switch (type) {
    case FrameType::kHello: return on_hello(session, request, meta);
    case FrameType::kSnapshot: return on_snapshot(session, request, meta, now);
    case FrameType::kGet: return on_get(session, request, meta, now);
    case FrameType::kDeltas: return on_deltas(session, request, meta, now);
    case FrameType::kArena: return on_arena(session, request, meta);
    case FrameType::kPins: return on_pins(session, request);
    case FrameType::kUdpOpen: return on_udp_open(session, request);
    case FrameType::kVerbsOpen:
    case FrameType::kVerbsRegions: return on_verbs(session, type, request, meta);
    case FrameType::kRenew: {
      PARAMWIRE_TRY(message, LeaseMessage::decode(meta));
      PARAMWIRE_CHECK(store_.renew(message.lease, static_cast<Micros>(message.ttl_ms) * 1000, now));
      reply(session, encode_empty(FrameType::kOk, request));
      return {};
    }
    case FrameType::kRelease: {
      PARAMWIRE_TRY(message, LeaseMessage::decode(meta));
      store_.release(message.lease, now);
      reply(session, encode_empty(FrameType::kOk, request));
      return {};
    }
    case FrameType::kPublishStart:
    case FrameType::kRemove:
    case FrameType::kAlias:
    case FrameType::kFinish:
    case FrameType::kAbort: return on_publish(session, type, request, meta, now);
    case FrameType::kStat: on_stat(session, request); return {};
    default:
      return Error(Code::kInvalid, cat("frame type ", static_cast<std::uint8_t>(type), " (", frame_type_name(type), ") is not a request"));
  }
}

Status Handlers::on_hello(ServerSession& session, std::uint64_t request, std::span<const std::byte> meta) {
  PARAMWIRE_TRY(hello, HelloMessage::decode(meta));
  session.greeted_ = true;
  session.peer_pid_ = hello.pid;
  WelcomeMessage welcome;
  welcome.incarnation = store_.incarnation();
  welcome.epoch = store_.epoch();
  welcome.newest = store_.newest();
  welcome.lease_ttl_ms_max = static_cast<std::uint32_t>(store_.options().lease_ttl_max / 1000);
  welcome.host_id = options_.host_id;
  welcome.unix_path = options_.unix_path;
  reply(session, welcome.encode(request));
  return {};
}

Status Handlers::on_snapshot(ServerSession& session, std::uint64_t request, std::span<const std::byte> meta, Micros now) {
  PARAMWIRE_TRY(message, SnapshotMessage::decode(meta));
  const auto newest = store_.newest();
  const bool later = message.want ? !newest || *newest < *message.want : !newest;
  if (!later || message.wait_ms == 0) return answer_snapshot(session, request, message, now);
  if (session.waits_.size() >= options_.waits_max) {
    return Error(Code::kBackpressure, cat("this connection waits for ", session.waits_.size(), " snapshots, the limit"));
  }
  const Micros wait = std::min(static_cast<Micros>(message.wait_ms) * 1000, options_.wait_max);
  session.waits_.push_back({request, message, now + wait});
  return {};
}

void Handlers::answer_waits(const std::vector<ServerSession*>& sessions, Micros now) {
  const auto newest = store_.newest();
  for (ServerSession* session : sessions) {
    std::erase_if(session->waits_, [&](const ServerSession::Wait& wait) {
      const bool met = newest && (!wait.snapshot.want || *wait.snapshot.want <= *newest);
      if (!met && now < wait.deadline) return false;
      if (Status status = answer_snapshot(*session, wait.request, wait.snapshot, now); !status.ok()) {
        reply_error(*session, wait.request, status.error());
      }
      return true;
    });
  }
}

Status Handlers::answer_snapshot(ServerSession& session, std::uint64_t request, const SnapshotMessage& message, Micros now) {
  PARAMWIRE_TRY(opened, store_.open(message.want, static_cast<Micros>(message.lease_ttl_ms) * 1000, now));
  // A delta only against a manifest that this incarnation made and still has, and whose root the client proves to hold.
  std::shared_ptr<const Manifest> held = message.held ? store_.manifest(*message.held) : nullptr;
  if (held && held->root() != message.held_root) held.reset();
  std::vector<std::uint32_t> added;
  auto body = std::make_shared<Bytes>(opened.manifest->encode_delta(held.get(), message.locators ? &added : nullptr));
  ManifestMessage answer;
  answer.incarnation = store_.incarnation();
  answer.lease = opened.lease;
  answer.lease_ttl_ms = static_cast<std::uint32_t>(opened.lease_ttl / 1000);
  answer.stream_size = body->size();
  answer.locator_count = added.size();
  body->reserve(body->size() + added.size() * kLocatorBytes);
  // Aliases have no slot: their tag is 0, and the locator sent for them is never used.
  for (const SlotIndex slot : added) append_locator(*body, store_.locator(slot));
  Outgoing out;
  out.head = answer.encode(request);
  out.body = *body;
  out.owned = std::move(body);
  session.outgoing.push_back(std::move(out));
  return {};
}

Status Handlers::on_get(ServerSession& session, std::uint64_t request, std::span<const std::byte> meta, Micros now) {
  PARAMWIRE_TRY(get, GetMessage::decode(meta));
  if (get.incarnation != store_.incarnation()) {
    return Error(Code::kStale, cat("block ", get.block, " was asked of incarnation ", get.incarnation, ", this server is ", store_.incarnation(),
                                   " (it restarted): take a new snapshot"));
  }
  PARAMWIRE_TRY(held, store_.hold(get.block, get.version));
  const auto refuse = [&](std::string_view why) {
    store_.unhold(held.slot, now);
    return Error(Code::kInvalid, cat("GET of bytes ", get.range.offset, " to ", get.range.offset + get.range.size, " of block ", get.block, ": ", why));
  };
  if (get.range.offset + get.range.size > held.payload.size()) return refuse(cat("the block has ", held.payload.size(), " stored bytes"));
  if (get.extent_table && held.extent_table.size() > kMaxMetaBytes / 2) return refuse(cat("its extent table has ", held.extent_table.size(), " bytes, over the limit"));
  DataMessage data;
  data.block = get.block;
  data.version = get.version;
  data.incarnation = store_.incarnation();
  data.stored_size = held.payload.size();
  data.range = get.range;
  if (get.extent_table) data.extent_table = held.extent_table;
  Outgoing out;
  out.head = data.encode(request);
  out.body = held.payload.subspan(static_cast<std::size_t>(get.range.offset), static_cast<std::size_t>(get.range.size));
  out.held = held.slot;
  session.outgoing.push_back(std::move(out));
  ++gets_;
  get_bytes_ += get.range.size;
  return {};
}

// As many as one answer has room for; at least the first.
Status Handlers::on_deltas(ServerSession& session, std::uint64_t request, std::span<const std::byte> meta, Micros now) {
  PARAMWIRE_TRY(message, DeltasMessage::decode(meta));
  if (message.incarnation != store_.incarnation()) {
    return Error(Code::kStale, cat("deltas were asked of incarnation ", message.incarnation, ", this server is ", store_.incarnation(), " (it restarted): take a new snapshot"));
  }
  DeltaListMessage list;
  auto body = std::make_shared<Bytes>();
  for (const DeltasMessage::Ask& ask : message.asks) {
    const auto found = options_.deltas == nullptr ? DeltaMaker::Found{} : options_.deltas->find(ask.block, ask.version, ask.base, now);
    const std::uint64_t size = found.bytes ? found.bytes->size() : 0;
    if (!list.sizes.empty() && body->size() + size > kDeltaAnswerBytes) break;
    list.sizes.push_back(found.pending ? kDeltaPending : size);
    if (!found.bytes) continue;
    body->insert(body->end(), found.bytes->begin(), found.bytes->end());
    options_.deltas->sent(size);
  }
  Outgoing out;
  out.head = list.encode(request);
  out.body = *body;
  out.owned = std::move(body);
  session.outgoing.push_back(std::move(out));
  return {};
}

Status Handlers::on_arena(ServerSession& session, std::uint64_t request, std::span<const std::byte> meta) {
  PARAMWIRE_TRY(message, ArenaMessage::decode(meta));
  if (!session.local_) return Error(Code::kUnavailable, "arenas are mapped over a unix socket, this is TCP: connect to the server's unix socket");
  // Before the count: a client chooses its transport when the first arena may not be there yet.
  if (!tier_.mappable()) return Error(Code::kUnavailable, cat("the ", tier_.name(), " tier of this server cannot be mapped: start it with tier=\"memory\""));
  if (message.arena >= tier_.arena_count()) return Error(Code::kNotFound, cat("arena ", message.arena, " of ", tier_.arena_count()));
  const ArenaInfo arena = tier_.arena(message.arena);
  Outgoing out;
  message.size = arena.size;
  out.head = message.encode(FrameType::kArenaFd, request);
  out.fd = arena.fd;
  session.outgoing.push_back(std::move(out));
  return {};
}

Status Handlers::on_pins(ServerSession& session, std::uint64_t request) {
  if (!session.local_ || descriptors_ == nullptr) return Error(Code::kUnavailable, "views need a unix socket to the server");
  PARAMWIRE_TRY(pins, descriptors_->pins(session.connection_));
  Outgoing out;
  PinsMessage message;
  message.capacity = pins.capacity;
  out.head = message.encode(request);
  out.fd = pins.fd;
  session.outgoing.push_back(std::move(out));
  return {};
}

Status Handlers::on_udp_open(ServerSession& session, std::uint64_t request) {
  if (options_.datagrams == nullptr) return Error(Code::kUnavailable, cat("this server takes no datagrams: ", options_.no_datagrams));
  if (session.udp_port_ == 0) {
    return Error(Code::kUnavailable, cat("this server has no UDP port ", session.local_ ? "on 127.0.0.1, where clients of its unix socket look for one" : "at this address",
                                         ": have it listen on tcp://127.0.0.1:0 too, or reach it at an address that has one"));
  }
  PARAMWIRE_TRY(opened, options_.datagrams->open(session.udp_port_, exported_udp_key(session)));
  if (session.udp_session_ != 0) options_.datagrams->close(session.udp_session_);
  session.udp_session_ = opened.session;
  reply(session, opened.encode(request));
  return {};
}

Status Handlers::on_verbs(ServerSession& session, FrameType type, std::uint64_t request, std::span<const std::byte> meta) {
  if (options_.verbs == nullptr) return Error(Code::kUnavailable, cat("this server can't be read by RDMA: ", options_.no_verbs));
  if (type == FrameType::kVerbsOpen) {
    PARAMWIRE_TRY(open, VerbsOpenMessage::decode(meta));
    session.verbs_ = true;
    PARAMWIRE_TRY(ready, options_.verbs->open(session.connection_, open, session.local_address_));
    reply(session, ready.encode(request));
    return {};
  }
  PARAMWIRE_TRY(ask, VerbsRegionsMessage::decode(meta));
  PARAMWIRE_TRY(list, options_.verbs->regions(session.connection_, ask, tier_));
  reply(session, list.encode(request));
  return {};
}

Result<Version> Handlers::finish(PublishId id, Micros now) {
  PARAMWIRE_TRY(version, store_.finish(id, [this](const std::optional<Version>& base, Version next, const Digest& root) {
    return coordinator_.commit(base, next, root);
  }, now));
  published_ = true;
  if (options_.deltas != nullptr) options_.deltas->published(now);
  return version;
}

Status Handlers::on_publish(ServerSession& session, FrameType type, std::uint64_t request, std::span<const std::byte> meta, Micros now) {
  if (type == FrameType::kPublishStart) {
    PARAMWIRE_TRY(start, PublishStartMessage::decode(meta));
    PARAMWIRE_TRY(high, options_.random());
    PARAMWIRE_TRY(low, options_.random());
    PublishIdMessage answer;
    answer.publish = {high, low};
    PARAMWIRE_TRY(version, store_.publish_start(answer.publish, start.any_base, start.base, now));
    answer.version = version;
    reply(session, answer.encode(FrameType::kPublishId, request));
    return {};
  }
  if (type == FrameType::kFinish) {
    PARAMWIRE_TRY(message, PublishIdMessage::decode(meta));
    PARAMWIRE_TRY(version, finish(message.publish, now));
    reply(session, PublishedMessage{version}.encode(request));
    return {};
  }
  if (type == FrameType::kAbort) {
    PARAMWIRE_TRY(message, PublishIdMessage::decode(meta));
    store_.abort(message.publish);
  } else {
    PARAMWIRE_TRY(message, NameMessage::decode(meta));
    PARAMWIRE_CHECK(type == FrameType::kRemove ? store_.remove(message.publish, message.tensor, now)
                                               : store_.alias(message.publish, message.tensor, message.target, now));
  }
  reply(session, encode_empty(FrameType::kOk, request));
  return {};
}

void Handlers::on_stat(ServerSession& session, std::uint64_t request) {
  const StoreStats s = store_.stats();
  StatsMessage message;
  message.values = {
      {"blocks", s.blocks}, {"raw_bytes", s.raw_bytes}, {"versions_readable", s.versions_readable}, {"leases", s.leases},
      {"publishes_open", s.publishes_open}, {"slots_in_use", s.slots_in_use}, {"used_bytes", s.used_bytes},
      {"committed_bytes", s.committed_bytes}, {"limit_bytes", s.limit_bytes}, {"superseded_slots", s.superseded_slots},
      {"quarantined_slots", s.quarantined_slots}, {"quarantined_bytes", s.quarantined_bytes}, {"publishes", s.publishes},
      {"publishes_refused", s.publishes_refused}, {"leases_revoked", s.leases_revoked}, {"slots_reclaimed", s.slots_reclaimed},
      {"frames", frames_}, {"gets", gets_}, {"get_bytes", get_bytes_}};
  const DeltaStats deltas = options_.deltas == nullptr ? DeltaStats{} : options_.deltas->stats();
  for (const auto& [name, value] : {std::pair("deltas_made", deltas.made), {"deltas_useless", deltas.useless}, {"deltas_kept", deltas.kept}, {"deltas_kept_bytes", deltas.kept_bytes},
                                    {"deltas_sent", deltas.sent}, {"deltas_sent_bytes", deltas.sent_bytes}, {"deltas_waiting", deltas.waiting}}) {
    message.values.emplace_back(name, value);
  }
  reply(session, message.encode(request));
}

}  // namespace paramwire
