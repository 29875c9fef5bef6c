// The fetching half of SimClient: executes what the real FetchMachine asks for.
#include "sim/client.hpp"
#include "sim/datagrams.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>

namespace paramwire::sim {

using Action = FetchMachine::Action;
using Event = FetchMachine::Event;
using Mode = FetchMachine::Mode;

void SimClient::begin_fetch(Mode mode) {
  Random& random = world_.random();
  FetchMachine::Options options;
  options.mode = mode;
  options.deadline = world_.now() + static_cast<Micros>(2000 + random.below(30'000));
  fetch_.emplace(options);
  fetch_->serial = ++serial_;
  fetch_->deadline = options.deadline;
  fetch_->lies = world_.lies();
  fetch_->one_sided = world_.profile().one_sided && (!world_.profile().streams || random.chance(50));
  fetch_->datagrams = !fetch_->one_sided && world_.profile().datagrams && (!world_.profile().streams || random.chance(50));
  if (mode == Mode::kSnapshot) {
    const bool leased = lease_ && random.chance(60);
    fetch_->held = leased ? leased_ : held_;
    if (leased) fetch_->lease = lease_;
  }
  later(options.deadline - world_.now(), [this, serial = fetch_->serial] {
    if (!fetch_ || fetch_->serial != serial) return;
    // The edge gives up waiting; whatever the link still owes is dropped with the connection.
    if (connection_ != nullptr && await_ != Await::kNothing) {
      world_.cut(*connection_);
      drop_connection();
    }
    const Error error(Code::kTimeout, "nothing came");
    step(Event::kLost, &error);
    if (fetch_ && fetch_->serial == serial) world_.fail("P6: a fetch goes on past its deadline");
  });
  step(Event::kBegin);
}

void SimClient::step(Event event, const Error* error) {
  const auto before = fetch_->machine.state();
  world_.coverage().fetch[static_cast<std::size_t>(before)][static_cast<std::size_t>(event)]++;
  const std::uint64_t serial = fetch_->serial;
  const Action action = fetch_->machine.step(world_.now(), event, error);
  world_.trace("client ", number_, " fetch ", serial, ": ", FetchMachine::name(before), " x ", FetchMachine::name(event), " -> ",
               FetchMachine::name(fetch_->machine.state()), error ? cat(" (", error->to_string(), ")") : std::string());
  world_.fingerprint(static_cast<std::uint64_t>(before) * 16 + static_cast<std::uint64_t>(event));
  if (++fetch_->actions > 64) return world_.fail("P6: a fetch takes ever more actions");
  perform(action);
}

void SimClient::perform(Action action) {
  switch (action) {
    case Action::kOpen:
    case Action::kOpenLeased: {
      fetch_->lease.reset();
      if (connection_ == nullptr) {
        // Asynchronous, as a real link is: the machine is not re-entered from its own action.
        return later(1, [this, serial = fetch_->serial] {
          if (!fetch_ || fetch_->serial != serial) return;
          const Error error = gone();
          step(Event::kLost, &error);
        });
      }
      return ask_snapshot(action == Action::kOpenLeased ? 15'000 : 0, 0);
    }
    case Action::kRead:
      choose_items();
      if (fetch_->one_sided) return read_one_sided();
      if (fetch_->datagrams) return read_datagrams();
      return next_stream();
    case Action::kReconnect: {
      if (connection_ != nullptr) world_.cut(*connection_);
      drop_connection();
      return later(static_cast<Micros>(100 + world_.random().below(1500)), [this, serial = fetch_->serial] {
        if (fetch_ && fetch_->serial == serial && connection_ == nullptr) dial();
      });
    }
    case Action::kDone: accept_items(); return end_fetch();
    case Action::kFail: judge_failure(fetch_->machine.failure()); return end_fetch();
  }
}

void SimClient::choose_items() {
  Random& random = world_.random();
  Fetch& fetch = *fetch_;
  fetch.items.clear();
  fetch.buffers.clear();
  fetch.at = 0;
  std::vector<Manifest::Hit> hits;
  fetch.held.manifest->for_each([&hits](const Manifest::Hit& hit) {
    if (hit.entry.kind == EntryKind::kBlock) hits.push_back(hit);
    return true;
  });
  for (const auto& hit : hits) {
    if (!random.chance(hit.entry.raw_size > kExtentBytes ? 30 : 55)) continue;
    BlockRead item;
    item.entry = hit.entry;
    item.locator = fetch.held.locators[hit.tag];
    item.range = {0, hit.entry.raw_size};
    if (random.chance(40) && hit.entry.raw_size > 0) {
      item.range.offset = random.below(hit.entry.raw_size);
      item.range.size = 1 + random.below(hit.entry.raw_size - item.range.offset);
    }
    fetch.items.push_back(item);
  }
  for (BlockRead& item : fetch.items) {
    fetch.buffers.emplace_back(static_cast<std::size_t>(item.range.size), std::byte{0xee});
    item.target = fetch.buffers.back();  // heap memory: it stays when the vector of buffers grows
  }
}

void SimClient::read_one_sided() {
  const std::uint64_t serial = fetch_->serial;
  SimMemory memory(world_, *fetch_->held.server, world_.remapping());
  SlotReader reader(memory, world_.profile().readers);
  for (BlockRead& item : fetch_->items) {
    reader.read(item);
    if (!item.result.ok()) break;
  }
  // The answer comes later, as it does from a link on another thread.
  later(1, [this, serial] {
    if (fetch_ && fetch_->serial == serial) end_batch();
  });
}

void SimClient::next_stream() {
  Fetch& fetch = *fetch_;
  const bool failed = fetch.at > 0 && !fetch.items[fetch.at - 1].result.ok();
  if (fetch.at == fetch.items.size() || failed) {
    return later(1, [this, serial = fetch.serial] {
      if (fetch_ && fetch_->serial == serial) end_batch();
    });
  }
  if (connection_ == nullptr || await_ != Await::kNothing) {
    return later(1, [this, serial = fetch.serial] {
      if (!fetch_ || fetch_->serial != serial) return;
      const Error error = gone();
      step(Event::kLost, &error);
    });
  }
  fetch.stream = std::make_unique<StreamRead>(fetch.items[fetch.at], fetch.held.incarnation, world_.profile().readers);
  awaited_ = ++request_;
  await_ = Await::kData;
  const auto get = fetch.stream->start(awaited_);
  if (!get.ok()) return world_.fail(get.error().to_string());
  world_.send(*connection_, 1, *get);
}

// ---------------------------------------------------------------- datagrams

void SimClient::read_datagrams() {
  if (connection_ == nullptr || await_ != Await::kNothing) {
    return later(1, [this, serial = fetch_->serial] {
      if (!fetch_ || fetch_->serial != serial) return;
      const Error error = gone();
      step(Event::kLost, &error);
    });
  }
  // A session lives as long as its connection; one of its own for each incarnation that is asked for.
  if (reader_ && reader_incarnation_ == fetch_->held.incarnation) return begin_datagrams();
  session_.reset();
  await_ = Await::kUdpKey;
  awaited_ = ++request_;
  world_.send(*connection_, 1, encode_empty(FrameType::kUdpOpen, awaited_));
}

void SimClient::opened_session(const UdpKeyMessage& session) {
  ReliableOptions options;
  options.session = session.session;
  options.key = session.key;
  options.incarnation = fetch_->held.incarnation;
  options.peer = "simulated server";
  constexpr std::uint32_t kSizes[] = {150, 1448, 8000};
  options.segment_size = kSizes[world_.random().below(3)];
  options.segment_floor = 100;
  options.omitted = world_.profile().readers;
  options.omitted_datagram = world_.profile().client_datagrams;
  options.random = [this] { return world_.random().next(); };
  reader_ = std::make_unique<ReliableReader>(std::move(options), credit_);
  reader_incarnation_ = fetch_->held.incarnation;
  timer_at_ = kNever;
  introducing_ = true;
  await_ = Await::kDatagrams;
  reader_->introduce(world_.now());
  pump_datagrams();
}

void SimClient::begin_datagrams() {
  await_ = Await::kDatagrams;
  reader_->begin(fetch_->items, world_.now());
  pump_datagrams();
}

void SimClient::pump_datagrams() {
  Outbox out;
  reader_->poll(world_.now(), out);
  std::size_t at = 0;
  for (const std::uint16_t size : out.sizes) {
    const auto begin = out.bytes.begin() + static_cast<std::ptrdiff_t>(at);
    world_.datagrams().to_server(address(), Bytes(begin, begin + size));
    at += size;
  }
  if (introducing_ && reader_->introduced()) {
    introducing_ = false;
    return begin_datagrams();
  }
  if (reader_->done()) {
    await_ = Await::kNothing;
    return later(1, [this, serial = fetch_->serial] {
      if (fetch_ && fetch_->serial == serial) end_batch();
    });
  }
  const Micros next = reader_->next_timer();
  if (next == kNever || (timer_at_ > world_.now() && timer_at_ <= next)) return;
  timer_at_ = next;
  later(std::max<Micros>(1, next - world_.now()), [this, next] {
    if (!reader_ || await_ != Await::kDatagrams || timer_at_ != next) return;
    timer_at_ = kNever;
    pump_datagrams();
  });
}

void SimClient::datagram(std::uint32_t to, const Bytes& bytes) {
  if (to != address() || !reader_) return;
  if (world_.now() < frozen_until_) {
    return later(frozen_until_ - world_.now(), [this, to, bytes] { datagram(to, bytes); });
  }
  reader_->on_datagram(world_.now(), bytes);
  if (await_ == Await::kDatagrams) pump_datagrams();
}

void SimClient::end_batch() {
  for (const BlockRead& item : fetch_->items) {
    if (item.result.ok()) continue;
    const Error error = item.result.error();
    const bool leased = fetch_->lease.has_value();
    const char* path = fetch_->one_sided ? "one-sided" : fetch_->datagrams ? "datagrams" : "stream";
    world_.coverage().reads[cat(path, item.range.size == item.entry.raw_size ? " whole" : " range", ": ", code_name(error.code()))]++;
    // The manifest promised the block, so "not found" is a snapshot that is gone.
    if (error.code() == Code::kStale || error.code() == Code::kNotFound) {
      const Lease* lease = leased ? &*fetch_->lease : nullptr;
      const Micros now = world_.now();
      const bool excused = world_.corrupting() || world_.lies() != fetch_->lies || (world_.remapping() && fetch_->one_sided && world_.server() != fetch_->held.server) ||
                           (!fetch_->one_sided && world_.server() != fetch_->held.server);
      if (lease != nullptr && now < lease->valid_until && now < lease->asked + world_.store_options().lease_age_max && !excused) {
        world_.fail(cat("P3: a leased read saw a change: ", error.to_string()));
      }
      return step(Event::kChanged, &error);
    }
    if (error.code() == Code::kCorrupt) {
      held_ = {};  // its locators travelled without a check of their own: ask for the whole next time
      return step(Event::kCorrupt, &error);
    }
    return step(error.code() == Code::kUnreachable ? Event::kLost : Event::kError, &error);
  }
  step(Event::kRead);
}

void SimClient::accept_items() {
  const Held& held = fetch_->held;
  for (const BlockRead& item : fetch_->items) {
    const bool whole = item.range.size == item.entry.raw_size;
    const std::string how = cat(fetch_->one_sided ? "one-sided" : fetch_->datagrams ? "datagrams" : "stream", whole ? " whole: ok" : " range: ok");
    world_.coverage().reads[how]++;
    world_.coverage().checked_bytes += item.range.size;
    if (!world_.checker().bytes(held.incarnation, *held.manifest->version(), item.entry, item.range, item.target, how)) return;
    world_.fingerprint(item.entry.crc64);
  }
}

void SimClient::judge_failure(const Error& error) {
  world_.coverage().reads[cat("fetch failed: ", code_name(error.code()))]++;
  world_.trace("client ", number_, " fetch ", fetch_->serial, " failed: ", error.to_string());
  switch (error.code()) {
    case Code::kTimeout:
      if (world_.now() < fetch_->deadline) world_.fail("P6: a timeout before the deadline");
      return;
    case Code::kStale:
    case Code::kUnreachable:
    case Code::kBackpressure: return;
    case Code::kNotFound: return;  // nothing is published
    case Code::kCorrupt:
      if (!world_.corrupting() && !world_.remapping() && world_.flipped().empty()) world_.fail(cat("corrupt, though nothing was corrupted: ", error.to_string()));
      return;
    default: world_.fail(cat("a fetch failed with ", error.to_string()));
  }
}

void SimClient::end_fetch() {
  if (fetch_->own_lease && fetch_->lease && connection_ != nullptr && await_ == Await::kNothing) {
    LeaseMessage release;
    release.lease = fetch_->lease->id;
    world_.send(*connection_, 1, release.encode(FrameType::kRelease, ++request_));
  }
  fetch_.reset();
}

}  // namespace paramwire::sim
