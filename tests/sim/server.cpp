#include "sim/server.hpp"

#include "sim/client.hpp"
#include "sim/datagrams.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cstring>

namespace paramwire::sim {

SimTier::SimTier(std::uint64_t limit) : limit_(limit), allocator_(limit), memory_(static_cast<std::byte*>(std::aligned_alloc(4096, limit))) {
  std::memset(memory_.get(), 0, limit);
}

Result<TierSpan> SimTier::allocate(std::uint64_t size) {
  const auto offset = allocator_.allocate(size, size <= kSlabSpanMax ? kSlabGranule : 64);
  if (!offset) return Error(Code::kBackpressure, cat("the simulated tier holds ", used_bytes(), " of ", limit_, " bytes and has no room for ", size));
  return TierSpan{0, *offset, size};
}

SimServer::SimServer(World& world, std::uint32_t epoch)
    : world_(world), incarnation_{world.random().next(), world.random().next()}, epoch_(epoch), tier_(world.memory_limit()) {
  BlockStoreOptions options = world.store_options();
  options.incarnation = incarnation_;
  options.epoch = epoch;
  store_ = std::make_unique<BlockStore>(tier_, static_cast<PinSource*>(this), options);
  HandlerOptions handler;
  handler.waits_max = 3;
  handler.random = [this] { return Result<std::uint64_t>(world_.random().next()); };
  auto responder = UdpResponder::create(incarnation_, [random = std::make_shared<Random>(incarnation_.low)] { return Result<std::uint64_t>(random->next()); }, world.profile().server_datagrams);
  responder_ = std::move(*responder);  // its random numbers never run out
  handler.datagrams = responder_.get();
  handlers_ = std::make_unique<Handlers>(*store_, tier_, static_cast<Coordinator&>(*this), nullptr, handler);
}

Status SimServer::commit(const std::optional<Version>& base, Version next, const std::array<std::byte, 32>& root) {
  if (!world_.profile().blind_clock && base != newest_) {
    return Error(Code::kStale, cat("commit of ", next, " on ", to_text(base), ", the newest is ", to_text(newest_)));
  }
  world_.trace("server commits ", next, " on ", to_text(base));
  world_.checker().committed(incarnation_, base, next);
  newest_ = next;
  root_ = root;
  return {};
}

void SimServer::accept(Connection& connection) { links_[connection.id] = {&connection, std::make_unique<Link>(connection.id)}; }

void SimServer::lost(Connection& connection) {
  const auto it = links_.find(connection.id);
  if (it == links_.end()) return;
  if (alive_) handlers_->on_closed(it->second.second->session, world_.now());
  links_.erase(it);
}

void SimServer::kill(bool handover) {
  alive_ = false;
  for (auto& [id, link] : links_) {
    if (!handover || link.first->lane[0] != Lane::kClient) world_.cut(*link.first);
  }
  links_.clear();
}

// The proxy greets in the client's place and keeps the WELCOME to itself: the client is not told that the server restarted.
void SimServer::adopt(Connection& connection) {
  connection.end[1] = this;
  accept(connection);
  ServerSession& session = links_.at(connection.id).second->session;
  FrameHeader header{};
  header.type = static_cast<std::uint8_t>(FrameType::kHello);
  const Bytes hello = HelloMessage{{1, 1}, 1}.encode(0);
  FrameParser::BodyTarget target;
  static_cast<void>(handlers_->on_head(session, header, std::span<const std::byte>(hello).subspan(sizeof(FrameHeader)), target, world_.now()));
  session.outgoing.clear();
}

void SimServer::freeze(Micros time) {
  if (world_.now() < frozen_until_) return;  // one freeze at a time: it ends when it was going to
  frozen_until_ = world_.now() + time;
  // When it wakes, what was queued is handled before its clock is looked at: pumps are retried at the same moment, and were
  // scheduled before the tick that follows.
  if (world_.profile().tick_first) world_.after(time, Lane::kPassive, [this] { handlers_->tick(world_.now()); });
  world_.after(time + 1, Lane::kPassive, [this] { tick(); });
}

Bytes SimServer::lie(const GetMessage& get) {
  GetMessage other = get;
  if (other.incarnation != incarnation_) {  // a proxy that dialled the restarted server and translated the question
    other.incarnation = incarnation_;
    other.version.epoch = epoch_;
    world_.coverage().faults["proxy: other incarnation"]++;
  } else {
    std::vector<Version> versions;
    for (const auto& newest = store_->newest(); newest;) {
      for (std::uint64_t back = 0; back < 4 && back < newest->counter; ++back) {
        const auto manifest = store_->manifest({newest->epoch, newest->counter - back});
        const auto hit = manifest ? manifest->find(get.block) : std::nullopt;
        if (hit && hit->entry.version != get.version) versions.push_back(hit->entry.version);
      }
      break;
    }
    if (versions.empty()) return {};
    other.version = versions[static_cast<std::size_t>(world_.random().below(versions.size()))];
    world_.coverage().faults["proxy: other version"]++;
  }
  world_.lied();
  const Bytes frame = other.encode(0);
  return Bytes(frame.begin() + sizeof(FrameHeader), frame.end());
}

Status SimServer::head(Link& link) {
  const FrameHeader& header = link.parser.header();
  const auto type = static_cast<FrameType>(header.type);
  world_.coverage().frames[std::string(frame_type_name(type))]++;
  world_.fingerprint(header.type);
  Bytes changed;
  if (type == FrameType::kGet && world_.profile().lying_proxy && world_.random().chance(4)) {
    if (const auto get = GetMessage::decode(link.parser.meta()); get.ok()) changed = lie(*get);
  }
  if (type == FrameType::kFinish) {
    if (const auto finish = PublishIdMessage::decode(link.parser.meta()); finish.ok()) world_.checker().finishing(finish->publish);
  }
  FrameParser::BodyTarget target;
  const auto meta = changed.empty() ? link.parser.meta() : std::span<const std::byte>(changed);
  PARAMWIRE_CHECK(handlers_->on_head(link.session, header, meta, target, world_.now()));
  if (header.body_size > 0) link.parser.set_body(target);
  return {};
}

bool SimServer::frames(Connection& connection, Link& link) {
  for (;;) {
    const auto event = link.parser.next();
    if (!event.ok()) return false;
    if (*event == FrameParser::Event::kNeedBytes) return true;
    if (*event == FrameParser::Event::kHead && !head(link).ok()) return false;
    if (*event == FrameParser::Event::kBody) {
      handlers_->on_body(link.session, link.parser.body_part());
      handlers_->on_progress(link.session, world_.now());
    }
    if (*event == FrameParser::Event::kEnd && !handlers_->on_end(link.session, link.parser.header(), world_.now()).ok()) return false;
    if (handlers_->take_published()) published();
    send(connection);
  }
}

void SimServer::deliver(Connection& connection, std::span<const std::byte> bytes) {
  const auto it = links_.find(connection.id);
  if (it == links_.end() || !alive_) return;
  Link& link = *it->second.second;
  while (!bytes.empty()) {
    const auto space = link.parser.receive_space();
    const std::size_t n = std::min(space.size(), bytes.size());
    std::memcpy(space.data(), bytes.data(), n);
    link.parser.received(n);
    bytes = bytes.subspan(n);
    if (!frames(connection, link)) {
      world_.trace("server closes connection ", connection.id);
      world_.coverage().store["connection refused by server"]++;
      world_.cut(connection);
      return;
    }
  }
  watch();
}

// ---------------------------------------------------------------- datagrams

struct SimServer::Answer {
  std::uint32_t to = 0;
  UdpResponder::Question question;
  BlockStore::Held held;
  std::optional<SegmentWalk> walk;
  std::uint32_t sent = 0;
};

void SimServer::datagram(std::uint32_t sender, const Bytes& bytes, bool forged) {
  if (!alive_) return;
  if (world_.now() < frozen_until_) {
    return world_.after(frozen_until_ - world_.now(), Lane::kPassive, [this, sender, bytes, forged] { datagram(sender, bytes, forged); });
  }
  world_.datagrams().arrived(sender, bytes.size());
  auto answered = std::make_shared<Answer>();
  UdpResponder::Question& question = answered->question;
  answered->to = sender;
  const auto verdict = responder_->check(bytes, address_bytes(sender), question);
  if (verdict == UdpResponder::Verdict::kSilence) return;
  if (forged) return world_.fail("a datagram that nobody with a key made was answered");
  if (!answered_.insert({question.get.session, question.get.sequence}).second) return world_.fail("a GET was answered twice");
  const auto status = [&](const std::array<std::byte, kStatusBytes>& out) { world_.datagrams().to_client(sender, Bytes(out.begin(), out.end())); };
  if (verdict == UdpResponder::Verdict::kStatus) return status(question.status);
  const auto held = store_->hold(question.get.asked.block, question.get.asked.version);
  if (!held.ok()) return status(responder_->refuse(question, StatusCode::kStale));
  answered->held = *held;
  const auto part = question.get.asked.part == BlockPart::kStored ? held->payload : held->extent_table;
  answered->walk.emplace(question.get, part, world_.profile().server_datagrams.bitmap);
  if (!answered->walk->fits()) {
    store_->unhold(held->slot, world_.now());
    return status(responder_->refuse(question, StatusCode::kInvalid));
  }
  answer(answered);
}

// A few segments at a time, read from the held slot only when they leave.
void SimServer::answer(const std::shared_ptr<Answer>& answered) {
  world_.after(static_cast<Micros>(1 + world_.random().below(20)), Lane::kPassive, [this, answered] {
    if (!alive_) return;
    if (world_.now() < frozen_until_) {
      return world_.after(frozen_until_ - world_.now(), Lane::kPassive, [this, answered] { answer(answered); });
    }
    for (std::uint64_t budget = 1 + world_.random().below(16); budget > 0; --budget) {
      std::array<std::byte, kDataHeaderBytes> header;
      const auto payload = answered->walk->next(header.data());
      if (!payload) {
        std::uint32_t wanted = 0;
        for (std::uint32_t i = 0; i < answered->question.get.segment_count; ++i) wanted += answered->question.get.wanted(i) ? 1U : 0U;
        if (answered->sent != wanted) world_.fail(cat("a GET for ", wanted, " segments was answered with ", answered->sent));
        return store_->unhold(answered->held.slot, world_.now());
      }
      Bytes data(header.begin(), header.end());
      data.insert(data.end(), payload->begin(), payload->end());
      ++answered->sent;
      world_.datagrams().to_client(answered->to, std::move(data));
    }
    answer(answered);
  });
}

// Moves some bytes of the answers into the network; a held slot is read only now, piece by piece.
void SimServer::send(Connection& connection) {
  const auto it = links_.find(connection.id);
  if (it == links_.end() || it->second.second->sending || it->second.second->session.outgoing.empty()) return;
  it->second.second->sending = true;
  const std::uint64_t id = connection.id;
  world_.after(static_cast<Micros>(5 + world_.random().below(60)), Lane::kPassive, [this, id] {
    const auto found = links_.find(id);
    if (found == links_.end() || !alive_) return;
    Connection& to = *found->second.first;
    Link& link = *found->second.second;
    link.sending = false;
    if (world_.now() < frozen_until_) {
      world_.after(frozen_until_ - world_.now() + 2, Lane::kPassive, [this, id] {
        if (const auto again = links_.find(id); again != links_.end()) send(*again->second.first);
      });
      return;
    }
    std::size_t budget = static_cast<std::size_t>(world_.random().chance(20) ? 1 + world_.random().below(300) : 50'000);
    while (budget > 0 && !link.session.outgoing.empty()) {
      const Outgoing& front = link.session.outgoing.front();
      const std::size_t total = front.head.size() + front.body.size();
      const auto part = link.sent < front.head.size() ? std::span<const std::byte>(front.head).subspan(link.sent) : front.body.subspan(link.sent - front.head.size());
      const std::size_t n = std::min(budget, part.size());
      world_.send(to, 0, part.first(n));
      link.sent += n;
      budget -= n;
      if (link.sent < total) continue;
      handlers_->sent(front, world_.now());
      link.session.outgoing.pop_front();
      link.sent = 0;
      if (total == 0) break;
    }
    send(to);
  });
}

void SimServer::published() {
  std::vector<ServerSession*> sessions;
  for (auto& [id, link] : links_) sessions.push_back(&link.second->session);
  handlers_->answer_waits(sessions, world_.now());
  for (auto& [id, link] : links_) send(*link.first);
  watch();
}

void SimServer::collect(std::vector<PinnedWord>& out) {
  for (const SimClient* client : world_.clients()) client->collect_pins(*this, out);
}

void SimServer::tick() {
  if (!alive_ || world_.now() <= frozen_until_) return;  // at the moment of waking, what was queued comes first
  const std::uint64_t leases = store_->stats().leases, open = store_->stats().publishes_open;
  handlers_->tick(world_.now());
  if (store_->stats().leases < leases) world_.coverage().store["lease expired"]++;
  if (store_->stats().publishes_open < open) world_.coverage().store["publish expired"]++;
  published();
}

void SimServer::watch() {
  const StoreStats s = store_->stats();
  auto& seen = world_.coverage().store;
  const auto count = [&seen](const char* name, std::uint64_t now, std::uint64_t before) {
    if (now > before) seen[name] += now - before;
  };
  count("published", s.publishes, seen_.publishes);
  count("publish refused", s.publishes_refused, seen_.publishes_refused);
  count("lease granted", s.leases, seen_.leases);
  count("lease revoked", s.leases_revoked, seen_.leases_revoked);
  count("slot reclaimed", s.slots_reclaimed, seen_.slots_reclaimed);
  count("slot superseded", s.superseded_slots, seen_.superseded_slots);
  count("slot quarantined", s.quarantined_slots, seen_.quarantined_slots);
  if (seen_.quarantined_slots > 0 && s.quarantined_slots < seen_.quarantined_slots) seen["slot left quarantine"]++;
  seen_ = s;
  world_.fingerprint(s.slots_in_use * 31 + s.publishes);
  if (s.versions_readable > store_->options().retained_versions) seen["version kept by lease"]++;
  if (s.versions_readable > store_->options().retained_versions + s.leases) {
    world_.fail(cat("P4: ", s.versions_readable, " versions are readable with ", s.leases, " leases"));
  }
  if (s.used_bytes > s.limit_bytes) world_.fail(cat("P4: ", s.used_bytes, " bytes in use, the limit is ", s.limit_bytes));
}

}  // namespace paramwire::sim
