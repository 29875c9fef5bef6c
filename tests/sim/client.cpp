#include "sim/client.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cstring>

namespace paramwire::sim {

using Action = FetchMachine::Action;
using Event = FetchMachine::Event;
using Mode = FetchMachine::Mode;

// ---------------------------------------------------------------- process

void SimClient::later(Micros delay, std::function<void()> what) {
  world_.after(delay, Lane::kClient, [this, life = life_, what = std::move(what)] {
    if (life != life_) return;
    if (world_.now() < frozen_until_) return later(frozen_until_ - world_.now(), what);
    what();
  });
}

void SimClient::start() {
  later(static_cast<Micros>(world_.random().below(2000)), [this] { act(); });
}

void SimClient::freeze(Micros time) { frozen_until_ = world_.now() + time; }

void SimClient::kill() {
  ++life_;
  if (connection_ != nullptr) world_.cut(*connection_);
  drop_connection();
  fetch_.reset();
  lease_.reset();
  views_.clear();  // the pin table goes with the process
  held_ = leased_ = {};
  server_incarnation_.reset();
  dialled_ = nullptr;
  start();
}

void SimClient::quiesce() {
  for (const View& view : views_) check_view(view);
  views_.clear();
  lease_.reset();
  if (connection_ != nullptr) world_.cut(*connection_);
  drop_connection();
}

void SimClient::collect_pins(const SimServer& server, std::vector<PinnedWord>& out) const {
  for (const View& view : views_) {
    if (view.server == &server) out.push_back({view.word, number_});
  }
}

void SimClient::drop_connection() {
  if (reader_ && await_ == Await::kDatagrams) reader_->abandon(gone());
  reader_.reset();
  connection_ = nullptr;
  parser_.reset();
  await_ = Await::kNothing;
  renewals_.clear();
}

void SimClient::act() {
  if (world_.stopping()) return;
  Random& random = world_.random();
  later(static_cast<Micros>(300 + random.below(3000)), [this] { act(); });
  for (const View& view : views_) check_view(view);
  if (!views_.empty() && random.chance(35)) views_.erase(views_.begin());
  if (fetch_ || await_ != Await::kNothing) return;
  if (connection_ == nullptr && (held_.manifest == nullptr || random.chance(70))) return dial();
  const auto what = random.below(100);
  if (what < 35 || held_.manifest == nullptr) return begin_fetch(Mode::kNewest);
  if (what < 60) return begin_fetch(Mode::kSnapshot);
  if (what < 75 && world_.profile().one_sided) return take_view();
  if (what < 90 && connection_ != nullptr && !lease_) return ask_snapshot(static_cast<Micros>(3 + random.below(15)) * 1000, 0);
  if (what < 96 && lease_ && connection_ != nullptr) {
    LeaseMessage release;
    release.lease = lease_->id;
    world_.send(*connection_, 1, release.encode(FrameType::kRelease, ++request_));
    lease_.reset();
    return;
  }
  if (connection_ != nullptr) ask_snapshot(0, static_cast<std::uint32_t>(1 + random.below(5)));
}

// ---------------------------------------------------------------- connection

void SimClient::dial() {
  connection_ = world_.connect(*this, Lane::kClient);
  if (connection_ == nullptr) {
    if (fetch_) {
      const Error error = gone();
      later(200, [this, serial = fetch_->serial, error] {
        if (fetch_ && fetch_->serial == serial) step(Event::kLost, &error);
      });
    }
    return;
  }
  dialled_ = world_.server();
  parser_ = std::make_unique<FrameParser>();
  await_ = Await::kWelcome;
  awaited_ = ++request_;
  world_.send(*connection_, 1, HelloMessage{{number_, life_}, number_}.encode(awaited_));
  const std::uint64_t id = connection_->id;
  later(static_cast<Micros>(4000 + world_.random().below(8000)), [this, id] {  // the dial's own deadline
    if (connection_ != nullptr && connection_->id == id && await_ == Await::kWelcome) {
      Connection& connection = *connection_;
      world_.cut(connection);
      lost(connection);
    }
  });
}

void SimClient::lost(Connection& connection) {
  if (connection_ != &connection) return;
  const bool waited = await_ != Await::kNothing;
  drop_connection();
  if (!fetch_ || !waited) return;
  const Error error = gone();
  step(Event::kLost, &error);
}

void SimClient::deliver(Connection& connection, std::span<const std::byte> bytes) {
  while (!bytes.empty() && connection_ == &connection) {
    const auto space = parser_->receive_space();
    const std::size_t n = std::min(space.size(), bytes.size());
    std::memcpy(space.data(), bytes.data(), n);
    parser_->received(n);
    bytes = bytes.subspan(n);
    while (connection_ == &connection) {
      auto event = parser_->next();
      bool broken = !event.ok();
      if (!broken && *event == FrameParser::Event::kNeedBytes) break;
      if (!broken && *event == FrameParser::Event::kHead) {
        const auto target = head(parser_->header(), parser_->meta());
        broken = !target.ok();
        if (!broken && parser_->header().body_size > 0) parser_->set_body(*target);
      }
      if (!broken && *event == FrameParser::Event::kBody && fetch_ && fetch_->stream && await_ == Await::kData && parser_->header().request == awaited_) {
        fetch_->stream->on_body(parser_->body_part());
      }
      if (!broken && *event == FrameParser::Event::kEnd) end(parser_->header());
      if (broken) {  // a frame that does not check: nothing after it can be trusted
        world_.coverage().reads["frame refused by client"]++;
        world_.cut(connection);
        lost(connection);
      }
    }
  }
}

Result<FrameParser::BodyTarget> SimClient::head(const FrameHeader& header, std::span<const std::byte> meta) {
  FrameParser::BodyTarget discard;
  discard.discard = header.body_size;
  error_.reset();
  const auto type = static_cast<FrameType>(header.type);
  if (const auto renewal = renewals_.find(header.request); renewal != renewals_.end()) {
    const Micros sent = renewal->second;
    renewals_.erase(renewal);
    if (!lease_) return discard;
    if (type == FrameType::kOk) {
      lease_->valid_until = sent + lease_->ttl;
    } else if (type == FrameType::kError) {
      // Before its end by the client's own clock; or though the renewal reached the server in time, which was frozen: the
      // longest way over the simulated network takes less than kWay.
      constexpr Micros kWay = 6000;
      const bool in_time = world_.now() < lease_->valid_until || sent + kWay < lease_->valid_until;
      if (in_time && world_.now() < lease_->asked + world_.store_options().lease_age_max && world_.server() == leased_.server) {
        world_.fail(cat("P3: lease ", lease_->id, " ended before its time"));
      }
      lease_.reset();
    }
    return discard;
  }
  if (header.request != awaited_ || await_ == Await::kNothing) return discard;
  if (await_ == Await::kData && fetch_ && fetch_->stream) return fetch_->stream->on_head(header, meta);
  if (type == FrameType::kError) {
    PARAMWIRE_TRY(message, ErrorMessage::decode(meta));
    error_ = Error(message.code, std::string(message.text));
    return discard;
  }
  if (await_ == Await::kUdpKey && type == FrameType::kUdpKey) {
    PARAMWIRE_TRY(session, UdpKeyMessage::decode(meta));
    session_ = session;
    return discard;
  }
  if (await_ == Await::kWelcome && type == FrameType::kWelcome) {
    PARAMWIRE_CHECK(WelcomeMessage::decode(meta));
    return discard;
  }
  if (await_ == Await::kManifest && type == FrameType::kManifest) {
    PARAMWIRE_TRY(message, ManifestMessage::decode(meta));
    if (message.stream_size + message.locator_count * kLocatorBytes != header.body_size) return Error(Code::kCorrupt, "MANIFEST body size");
    manifest_message_ = message;
    body_.resize(static_cast<std::size_t>(header.body_size));
    FrameParser::BodyTarget target;
    target.parts[0] = body_;
    return target;
  }
  return Error(Code::kCorrupt, cat("answer ", frame_type_name(type), " to another question"));
}

void SimClient::end(const FrameHeader& header) {
  if (header.request != awaited_ || await_ == Await::kNothing) return;
  if (await_ == Await::kDatagrams) return;
  const Await await = std::exchange(await_, Await::kNothing);
  if (await == Await::kUdpKey) {
    if (session_ && fetch_) opened_session(*session_);
    return;
  }
  if (await == Await::kWelcome) return welcomed();
  if (await == Await::kManifest) {
    if (error_) return answered_snapshot_error(*error_);
    return opened();
  }
  if (fetch_ && fetch_->stream) {
    fetch_->items[fetch_->at].result = fetch_->stream->finish();
    fetch_->stream.reset();
    ++fetch_->at;
    next_stream();
  }
}

void SimClient::welcomed() {
  const auto welcome = WelcomeMessage::decode(parser_->meta());
  if (!welcome.ok()) return;
  const bool same = server_incarnation_ && *server_incarnation_ == welcome->incarnation;
  server_incarnation_ = welcome->incarnation;
  if (!same && !world_.profile().blind_greeting) held_ = {};  // its locators are of a former incarnation, and so is any delta base
  if (!same) lease_.reset();
  if (!fetch_) return;
  // P9: compared with the incarnation that made the snapshot being read, not with the last one seen.
  const bool restarted = fetch_->held.manifest ? fetch_->held.incarnation != welcome->incarnation : !same;
  step(restarted && !world_.profile().blind_greeting ? Event::kRestarted : Event::kReconnected);
}

// ---------------------------------------------------------------- snapshots and leases

void SimClient::ask_snapshot(Micros ttl, std::uint32_t wait_ms) {
  SnapshotMessage message;
  sent_held_ = held_;
  if (held_.manifest && held_.manifest->version()) {
    message.held = held_.manifest->version();
    message.held_root = held_.manifest->root();
    if (wait_ms > 0) message.want = Version{message.held->epoch, message.held->counter + 1};
  }
  message.lease_ttl_ms = static_cast<std::uint32_t>(ttl / 1000);
  message.wait_ms = wait_ms;
  message.locators = true;
  await_ = Await::kManifest;
  awaited_ = ++request_;
  asked_ = world_.now();
  asked_ttl_ = ttl;
  world_.send(*connection_, 1, message.encode(awaited_));
  if (fetch_) return;  // has a deadline of its own
  later(20'000, [this, request = awaited_] {
    if (await_ != Await::kManifest || awaited_ != request || connection_ == nullptr) return;
    Connection& connection = *connection_;
    world_.cut(connection);
    lost(connection);
  });
}

void SimClient::opened() {
  const ManifestMessage& message = *manifest_message_;
  const auto stream = std::span<const std::byte>(body_).first(static_cast<std::size_t>(message.stream_size));
  const auto tail = std::span<const std::byte>(body_).subspan(stream.size());
  std::vector<Locator> locators = sent_held_.locators;
  const std::size_t before = locators.size();
  for (std::uint64_t i = 0; i < message.locator_count; ++i) {
    locators.push_back(read_locator(tail.subspan(static_cast<std::size_t>(i * kLocatorBytes)).first<kLocatorBytes>()));
  }
  auto manifest = Manifest::apply_delta(sent_held_.manifest.get(), stream, [before](std::size_t i) { return static_cast<std::uint32_t>(before + i); });
  if (message.incarnation != server_incarnation_) {  // P9: greet again, whoever answers now
    world_.coverage().reads["manifest of another incarnation"]++;
    Connection& connection = *connection_;
    world_.cut(connection);
    drop_connection();
    const Error error = gone();
    if (fetch_) step(Event::kLost, &error);
    return;
  }
  if (!manifest.ok()) {
    world_.coverage().reads["manifest refused"]++;
    held_ = {};
    if (fetch_) step(Event::kCorrupt, &manifest.error());
    return;
  }
  world_.checker().manifest(message.incarnation, *manifest);
  world_.fingerprint(manifest->version() ? manifest->version()->counter : 0);
  held_ = Held{std::make_shared<const Manifest>(std::move(*manifest)), std::move(locators), dialled_, message.incarnation};
  std::optional<Lease> lease;
  if (message.lease != 0) {
    const Micros ttl = static_cast<Micros>(message.lease_ttl_ms) * 1000;
    lease = Lease{message.lease, asked_, asked_ + ttl, ttl};
  }
  if (fetch_) {
    fetch_->held = held_;
    fetch_->lease = lease;
    fetch_->own_lease = lease.has_value();
    return step(Event::kOpened);
  }
  if (!lease) return;
  lease_ = lease;
  leased_ = held_;
  renew();
}

void SimClient::answered_snapshot_error(const Error& error) {
  if (!fetch_) return;
  step(error.code() == Code::kStale ? Event::kChanged : Event::kError, &error);
}

void SimClient::renew() {
  if (!lease_) return;
  const LeaseId id = lease_->id;
  // Mostly in time; sometimes so late that the lease runs out.
  const Micros wait = world_.random().chance(85) ? lease_->ttl / 3 : lease_->ttl + 500;
  later(wait, [this, id] {
    if (!lease_ || lease_->id != id) return;
    if (world_.now() >= lease_->valid_until + 2 * lease_->ttl || world_.stopping()) {
      lease_.reset();
      return;
    }
    if (connection_ != nullptr && await_ != Await::kWelcome && dialled_ == leased_.server) {
      LeaseMessage message;
      message.lease = id;
      message.ttl_ms = static_cast<std::uint32_t>(lease_->ttl / 1000);
      renewals_[++request_] = world_.now();
      world_.send(*connection_, 1, message.encode(FrameType::kRenew, request_));
    }
    renew();
  });
}

// ---------------------------------------------------------------- views

void SimClient::take_view() {
  const bool leased = lease_ && world_.random().chance(50);
  const Held held = leased ? leased_ : held_;
  if (!held.manifest || held.server == nullptr || held.manifest->entry_count() == 0) return;
  std::vector<Manifest::Hit> hits;
  held.manifest->for_each([&hits](const Manifest::Hit& hit) {
    if (hit.entry.kind == EntryKind::kBlock && hit.entry.raw_size > 0) hits.push_back(hit);
    return true;
  });
  if (hits.empty()) return;
  const auto& hit = hits[static_cast<std::size_t>(world_.random().below(hits.size()))];
  const Locator locator = held.locators[hit.tag];
  SimMemory memory(world_, *held.server, false);
  SlotReader reader(memory, world_.profile().readers);
  // Pin first, then look: a withdrawal that comes between is seen by one of the two sides.
  views_.push_back({held.server, static_cast<std::uint64_t>(locator.header_arena + 1) << 48 | locator.header_offset / sizeof(SlotHeader), {}, 0, hit.entry.to_string(), false});
  world_.step_passive(200, world_.random().below(4));
  Status status;
  auto header = memory.header(locator.header_arena, locator.header_offset);
  status = header.ok() ? reader.rules().check_header(*header, hit.entry, locator) : Status(header.error());
  if (status.ok()) {
    Bytes copy(static_cast<std::size_t>(hit.entry.raw_size));
    const auto crc = memory.copy_crc64(locator.arena, locator.payload_offset, copy, 0);
    if (!crc.ok()) status = crc.error();
    if (crc.ok() && *crc != hit.entry.crc64 && !world_.profile().readers.crc) status = Error(Code::kCorrupt, "first view");
    if (status.ok() && !world_.checker().bytes(held.incarnation, *held.manifest->version(), hit.entry, {0, hit.entry.raw_size}, copy, "a view")) return;
  }
  world_.coverage().reads[status.ok() ? "view given" : cat("view refused: ", code_name(status.error().code()))]++;
  if (!status.ok()) {
    if (status.error().code() == Code::kCorrupt) held_ = {};
    views_.pop_back();
    return;
  }
  View& view = views_.back();
  view.bytes = {held.server->tier().at(locator.arena, locator.payload_offset), static_cast<std::size_t>(hit.entry.raw_size)};
  view.key = world_.checker().key(held.incarnation, *held.manifest->version(), hit.entry.id).value_or(0);
  view.accepted = true;
}

void SimClient::check_view(const View& view) {
  if (!view.accepted || is_content(view.key, 0, view.bytes)) return;
  // Bits that the simulation flipped itself are not the store's doing.
  for (const std::byte* flipped : world_.flipped()) {
    if (flipped >= view.bytes.data() && flipped < view.bytes.data() + view.bytes.size()) return;
  }
  world_.fail(cat("P3: the bytes under a view of ", view.what, " changed"));
}

}  // namespace paramwire::sim
