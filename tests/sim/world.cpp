#include "sim/world.hpp"

#include "sim/client.hpp"
#include "sim/datagrams.hpp"
#include "sim/publisher.hpp"
#include "sim/server.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cstring>
#include <set>

namespace paramwire::sim {

namespace {
constexpr Micros kRun = 60'000;     // virtual time with faults
constexpr Micros kSettle = 120'000; // and then until every deadline, lease and idle publish is over
}  // namespace

World::World(std::uint64_t seed, const Profile& profile, Coverage& coverage, bool trace)
    : seed_(seed), profile_(profile), coverage_(coverage), trace_(trace), random_(seed), checker_([this](std::string text) { fail(std::move(text)); }) {}
World::~World() = default;

void World::note(std::string text) { log_ += cat(now_, " us: ", text, '\n'); }

void World::fail(std::string text) {
  trace("VIOLATION ", text);
  if (failure_.empty()) failure_ = cat(now_, " us: ", text);
}

// ---------------------------------------------------------------- time

void World::after(Micros delay, Lane lane, std::function<void()> what) {
  Queue& queue = queues_[static_cast<std::size_t>(lane)];
  queue.push_back({now_ + delay, ++order_, std::move(what)});
  std::push_heap(queue.begin(), queue.end());
}

void World::run_one(Queue& queue) {
  std::pop_heap(queue.begin(), queue.end());
  Event event = std::move(queue.back());
  queue.pop_back();
  now_ = std::max(now_, event.at);
  ++coverage_.events;
  event.what();
}

void World::step_passive(Micros time, std::size_t count) {
  Queue& queue = queues_[static_cast<std::size_t>(Lane::kPassive)];
  const Micros until = now_ + time;
  for (; count > 0 && !queue.empty() && queue.front().at <= until && !failed(); --count) run_one(queue);
}

void World::run_until(Micros time) {
  while (!failed()) {
    Queue& passive = queues_[0];
    Queue& client = queues_[1];
    if (passive.empty() && client.empty()) break;
    const bool first = client.empty() || (!passive.empty() && !(passive.front() < client.front()));
    Queue& queue = first ? passive : client;
    if (queue.front().at > time) break;
    run_one(queue);
  }
  now_ = std::max(now_, time);
}

// ---------------------------------------------------------------- network

Connection* World::connect(Endpoint& from, Lane lane) {
  SimServer* target = server();
  if (target == nullptr || !target->alive()) return nullptr;
  auto connection = std::make_unique<Connection>();
  connection->id = connections_.size() + 1;
  connection->end = {&from, target};
  connection->lane = {lane, Lane::kPassive};
  target->accept(*connection);
  connections_.push_back(std::move(connection));
  return connections_.back().get();
}

void World::send(Connection& connection, std::size_t side, std::span<const std::byte> bytes) {
  if (connection.cut) return;
  Bytes& flight = connection.flight[side];
  flight.insert(flight.end(), bytes.begin(), bytes.end());
  if (connection.pumping[side]) return;
  connection.pumping[side] = true;
  const Micros delay = static_cast<Micros>(random_.below(100) < 3 ? random_.below(3000) : 15 + random_.below(150));
  after(delay, connection.lane[side], [this, &connection, side] { pump(connection, side); });
}

void World::pump(Connection& connection, std::size_t side) {
  connection.pumping[side] = false;
  if (connection.cut || !connection.open[side]) return;
  Bytes& flight = connection.flight[side];
  std::size_t& at = connection.at[side];
  const Micros frozen = connection.end[side]->frozen_until();
  if (now_ < frozen) {  // what arrives meanwhile is all there when it wakes
    connection.pumping[side] = true;
    after(frozen - now_, connection.lane[side], [this, &connection, side] {
      if (connection.cut) return;
      connection.pumping[side] = false;
      const Bytes all(connection.flight[side].begin() + static_cast<std::ptrdiff_t>(connection.at[side]), connection.flight[side].end());
      connection.flight[side].clear();
      connection.at[side] = 0;
      connection.end[side]->deliver(connection, all);
    });
    return;
  }
  std::size_t n = flight.size() - at;
  if (random_.chance(30)) n = std::min<std::size_t>(n, 1 + static_cast<std::size_t>(random_.below(n > 2000 ? n : 200)));
  Bytes piece(flight.begin() + static_cast<std::ptrdiff_t>(at), flight.begin() + static_cast<std::ptrdiff_t>(at + n));
  at += n;
  if (at == flight.size()) {
    flight.clear();
    at = 0;
  } else {
    connection.pumping[side] = true;
    after(static_cast<Micros>(2 + random_.below(80)), connection.lane[side], [this, &connection, side] { pump(connection, side); });
  }
  if (corrupting_ && !calm_ && !piece.empty() && random_.below(400) == 0) {
    piece[static_cast<std::size_t>(random_.below(piece.size()))] ^= std::byte{1} << static_cast<int>(random_.below(8));
    coverage_.faults["bit flipped in transit"]++;
    trace("bit flipped in transit on connection ", connection.id, " to side ", side);
  }
  connection.end[side]->deliver(connection, piece);
}

// Both sides learn of it, each in its own time.
void World::cut(Connection& connection) {
  if (connection.cut) return;
  connection.cut = true;
  connection.flight[0].clear();
  connection.flight[1].clear();
  for (std::size_t side = 0; side < 2; ++side) {
    after(static_cast<Micros>(random_.below(400)), connection.lane[side], [&connection, side] {
      connection.open[side] = false;
      connection.end[side]->lost(connection);
    });
  }
}

// ---------------------------------------------------------------- the cluster and its faults

std::vector<SimClient*> World::clients() {
  std::vector<SimClient*> out;
  for (const auto& client : clients_) out.push_back(client.get());
  return out;
}

void World::make_model() {
  const bool large = random_.below(12) == 0;
  const bool medium = random_.chance(40);
  const std::uint64_t whole = 3 + random_.below(3);
  for (std::uint64_t i = 0; i < whole; ++i) {
    std::uint64_t size = 1 + random_.below(700);
    if (medium) size = 4200 + random_.below(9000);  // no slabs: room is scarce
    if (large && i == 1) size = 2 * kExtentBytes + 1 + random_.below(kExtentBytes);
    tensors_.push_back({cat("layer.", i), size, Shape{size}, Shard::whole()});
  }
  const std::uint64_t row = 8 + random_.below(100);
  for (std::uint64_t i = 0; i < 2; ++i) tensors_.push_back({"cut", 3 * row, Shape{6, row}, Shard::rows(3 * i, 3 * i + 3)});
  tensors_.push_back({"layer.0.extra", 40, Shape{40}, Shard::whole()});

  store_options_.lease_ttl_max = 20'000;
  store_options_.lease_age_max = static_cast<Micros>(3000 + random_.below(20'000));
  store_options_.publish_idle_max = 8'000;
  store_options_.publishes_max = 4;
  store_options_.leases_max = 6;
  store_options_.quarantine_bytes_max = random_.chance(20) ? 500 : std::uint64_t{1} << 20;
  store_options_.omitted = profile_.store;
  // Slabs take 64 KiB a size: room for each, then little or much more.
  memory_limit_ = (std::uint64_t{64} << 10) * (tensors_.size() + 4 + random_.below(4)) + (large ? 1'200'000 : 0);
  if (medium && !large) {
    std::uint64_t sum = 0;
    for (const Tensor& tensor : tensors_) sum += tensor.size;
    memory_limit_ = (std::uint64_t{64} << 10) * 4 + sum * (26 + random_.below(30)) / 10;
  }
  memory_limit_ = memory_limit_ / 4096 * 4096;
}

void World::start_server() {
  const bool forget = profile_.equal_epochs && random_.chance(profile_.blind_greeting ? 100 : 15) && epoch_ > 0;
  if (forget) coverage_.faults["restart with the same epoch"]++;
  if (!forget) ++epoch_;
  servers_.push_back(std::make_unique<SimServer>(*this, epoch_));
  trace("server ", servers_.back()->incarnation(), " starts with epoch ", epoch_);
  if (servers_.size() == 1) return;
  const Endpoint* former = servers_[servers_.size() - 2].get();
  for (const auto& connection : connections_) {
    if (connection->cut || connection->end[1] != former) continue;
    connection->flight[1].clear();
    connection->at[1] = 0;
    servers_.back()->adopt(*connection);
  }
}

void World::flip_arena() {
  SimServer& target = *server();
  const auto newest = target.store().newest();
  const auto manifest = newest ? target.store().manifest(*newest) : nullptr;
  if (!manifest) return;
  std::vector<std::uint32_t> slots;
  manifest->for_each([&slots](const Manifest::Hit& hit) {
    if (hit.entry.kind == EntryKind::kBlock && hit.entry.raw_size > 0) slots.push_back(hit.tag);
    return true;
  });
  if (slots.empty()) return;
  const Locator locator = target.store().locator(slots[static_cast<std::size_t>(random_.below(slots.size()))]);
  std::byte* header = target.tier().at(locator.header_arena, locator.header_offset);
  SlotHeader copy;
  std::memcpy(&copy, header, sizeof copy);
  std::byte* place = nullptr;
  if (random_.chance(15)) {
    // Of the header, the fields that only readers use. The server's own truth about sizes and versions lies in the others.
    constexpr std::size_t kPlaces[] = {offsetof(SlotHeader, crc64), offsetof(SlotHeader, extent_table), offsetof(SlotHeader, header_crc)};
    place = header + kPlaces[random_.below(3)];
    target.header_flipped = true;
    coverage_.faults["bit flipped in a slot header"]++;
  } else {
    const std::uint64_t table = copy.extent_table == 0 ? 0 : extent_count(copy.stored_size) * sizeof(ExtentRow);
    const std::uint64_t at = table > 0 && random_.chance(30) ? copy.stored_size + random_.below(table) : random_.below(copy.stored_size);
    place = target.tier().at(locator.arena, locator.payload_offset + (at < copy.stored_size ? at : copy.extent_table * std::uint64_t{64} + at - copy.stored_size));
    coverage_.faults[at < copy.stored_size ? "bit flipped in a payload" : "bit flipped in an extent table"]++;
  }
  *place ^= std::byte{1} << static_cast<int>(random_.below(8));
  flipped_.push_back(place);
  trace("bit flipped in the arena");
}

void World::chaos() {
  if (stopping_) return;
  after(static_cast<Micros>(1500 + random_.below(9000)), Lane::kPassive, [this] { chaos(); });
  const auto what = random_.below(100);
  if (what < 25) {
    std::vector<Connection*> open;
    for (const auto& connection : connections_) {
      if (!connection->cut) open.push_back(connection.get());
    }
    if (open.empty()) return;
    coverage_.faults["connection lost"]++;
    cut(*open[static_cast<std::size_t>(random_.below(open.size()))]);
  } else if (what < 37) {
    if (!server()->alive()) return;
    coverage_.faults["server frozen"]++;
    trace("server frozen");
    server()->freeze(static_cast<Micros>(500 + random_.below(25'000)));
  } else if (what < 45) {
    if (!server()->alive()) return;
    coverage_.faults["server killed"]++;
    trace("server killed");
    const bool handover = profile_.lying_proxy && random_.chance(40);
    if (handover) coverage_.faults["proxy: connections handed to the restarted server"]++;
    server()->kill(handover);
    after(static_cast<Micros>(100 + random_.below(4000)), Lane::kPassive, [this] { start_server(); });
  } else if (what < 55) {
    coverage_.faults["publisher killed"]++;
    publishers_[static_cast<std::size_t>(random_.below(publishers_.size()))]->kill();
  } else if (what < 62) {
    coverage_.faults["publisher frozen"]++;
    publishers_[static_cast<std::size_t>(random_.below(publishers_.size()))]->freeze(static_cast<Micros>(random_.below(15'000)));
  } else if (what < 80) {
    SimClient* client = clients_[static_cast<std::size_t>(random_.below(clients_.size()))].get();
    const bool kill = random_.chance(40);
    const Micros time = static_cast<Micros>(random_.below(30'000));
    after(1, Lane::kClient, [this, client, kill, time] {  // not while a client is in the middle of a copy
      coverage_.faults[kill ? "client killed" : "client frozen"]++;
      if (kill) client->kill();
      if (!kill) client->freeze(time);
    });
  } else if (corrupting_ && server()->alive()) {
    flip_arena();
  }
}

bool World::run() {
  make_model();
  corrupting_ = profile_.corruption && random_.chance(40);
  remapping_ = profile_.rebased && random_.chance(30);
  datagrams_ = std::make_unique<DatagramNet>(*this);
  start_server();
  for (std::uint32_t i = 0; i < 1 + random_.below(3); ++i) clients_.push_back(std::make_unique<SimClient>(*this, i));
  for (std::uint32_t i = 0; i < 2; ++i) publishers_.push_back(std::make_unique<SimPublisher>(*this, i));
  for (const auto& client : clients_) client->start();
  for (const auto& publisher : publishers_) publisher->start();
  local_ = std::make_unique<LocalPublisher>(*this);
  if (random_.chance(60)) local_->start();
  if (profile_.datagrams) datagrams_->start();
  const std::function<void()> beat = [this, &beat] {
    for (const auto& server : servers_) server->tick();
    after(900, Lane::kPassive, beat);
  };
  after(900, Lane::kPassive, beat);
  after(3000, Lane::kPassive, [this] { chaos(); });
  run_until(kRun);
  stopping_ = true;
  run_until(kRun + kSettle / 2);
  for (const auto& client : clients_) {
    if (!failed() && !client->idle()) fail("P6: a fetch is still going on long after its deadline");
  }
  calm_ = true;
  for (const auto& client : clients_) client->quiesce();
  for (const auto& publisher : publishers_) publisher->kill();
  run_until(kRun + kSettle);
  if (!failed()) check_end();
  for (Queue& queue : queues_) queue.clear();
  return !failed();
}

// Nobody reads, nobody writes: what is left is what three versions need, and a new publish goes through.
void World::check_end() {
  SimServer* last = server();
  if (!last->alive()) return;
  last->tick();
  const StoreStats s = last->store().stats();
  if (s.leases != 0 || s.publishes_open != 0) return fail(cat("P4: ", s.leases, " leases and ", s.publishes_open, " publishes are left at the end"));
  if (s.quarantined_slots != 0) return fail(cat("P4: ", s.quarantined_slots, " slots are quarantined though no view is left"));
  if (s.versions_readable > store_options_.retained_versions) return fail(cat("P4: ", s.versions_readable, " versions are readable at the end"));
  std::set<std::uint32_t> slots;
  if (const auto newest = last->store().newest()) {
    for (std::uint64_t back = 0; back < store_options_.retained_versions && back < newest->counter; ++back) {
      const auto manifest = last->store().manifest({newest->epoch, newest->counter - back});
      if (!manifest) return fail(cat("one of the newest three versions before ", *newest, " is gone"));
      manifest->for_each([&slots](const Manifest::Hit& hit) {
        if (hit.entry.kind == EntryKind::kBlock) slots.insert(hit.tag);
        return true;
      });
    }
  }
  if (s.slots_in_use != slots.size()) return fail(cat("P4: ", s.slots_in_use, " slots are in use, the readable versions need ", slots.size()));
  const PublishId id{1, 1};
  if (const auto started = last->store().publish_start(id, true, std::nullopt, now_); !started.ok()) {
    return fail(cat("P3: a publish is refused with nobody in its way: ", started.error().to_string()));
  }
  last->store().abort(id);
}

}  // namespace paramwire::sim
