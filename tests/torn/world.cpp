#include "torn/world.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cstring>

namespace paramwire::torn {

namespace {

constexpr std::uint64_t kArena = std::uint64_t{4} << 20;
constexpr std::uint64_t kSmallMax = 1024, kLargeMax = 2 * kExtentBytes + 1000;
constexpr std::uint64_t kLine = 64;

OmittedReadChecks omitted(Checks checks) {
  OmittedReadChecks out;
  out.crc = checks == Checks::kSeq;
  out.seq = checks == Checks::kCrc;
  out.version = out.epoch = checks != Checks::kBoth;
  return out;
}

VerbsChoice choice_of(const std::string& device, const std::string& address) {
  VerbsChoice choice;
  choice.device = device;
  choice.gid_index = 1;
  choice.gid = testing::ipv4_gid(address);
  choice.mtu = 4096;
  choice.message_max = 8U << 20;
  choice.reads_max = 128;
  return choice;
}

}  // namespace

void Tally::add(const Tally& other) {
  reads += other.reads;
  accepted += other.accepted;
  refused += other.refused;
  torn_refused += other.torn_refused;
  corrupt += other.corrupt;
  torn_accepted += other.torn_accepted;
  work_requests += other.work_requests;
  lines += other.lines;
  rewrites += other.rewrites;
}

// ---------------------------------------------------------------- set-up

Result<std::unique_ptr<World>> World::make(std::uint64_t seed, const Plan& plan) {
  std::unique_ptr<World> world(new World(seed, plan));
  PARAMWIRE_CHECK(world->set_up());
  return world;
}

Status World::set_up() {
  large_ = random_.below(8) == 0;
  direct_ = random_.below(2) == 0;
  TierOptions options;
  options.limit_bytes = options.arena_bytes = kArena;
  PARAMWIRE_TRY(tier, open_tier("heap", options));
  tier_ = std::move(tier);
  slots_ = std::make_unique<SlotTable>(*tier_);
  writer_ = std::make_unique<Writer>(*slots_, random_, plan_.wrong);
  PARAMWIRE_CHECK(make_blocks());
  PARAMWIRE_TRY(targets, Buffer::allocate(kBatch * (kLargeMax / kLine + 1) * kLine));
  targets_ = std::move(targets);
  PARAMWIRE_TRY(staging, Buffer::allocate(256 * 1024));
  staging_ = std::move(staging);
  PARAMWIRE_CHECK(connect());

  OneSidedOptions machine;
  constexpr std::uint32_t kSlices[] = {128, 256, 1024, 64 * 1024};
  machine.omitted = omitted(plan_.checks);
  machine.slice = kSlices[random_.below(large_ ? 2 : 4) + (large_ ? 2 : 0)];
  machine.reads_max = static_cast<std::uint32_t>(1 + random_.below(64));
  machine.header_with_payload = plan_.wrong == Wrong::kHeaderWithPayload;
  // The wrong order is wrong only where a NIC has header and payload under way together.
  if (machine.header_with_payload) machine.reads_max = 64;
  reader_ = std::make_unique<OneSidedReader>(staging_.span(), machine);
  batch_.resize(kBatch);
  return {};
}

Status World::make_blocks() {
  if (large_) {
    PARAMWIRE_CHECK(writer_->add_block(kExtentBytes + 1 + random_.below(kLargeMax - kExtentBytes)));
    return writer_->add_block(1 + random_.below(kSmallMax));
  }
  const std::uint64_t count = 1 + random_.below(4);
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t lines = 1 + random_.below(kSmallMax / kLine);
    PARAMWIRE_CHECK(writer_->add_block(random_.below(2) == 0 ? lines * kLine : 1 + random_.below(lines * kLine)));
  }
  return {};
}

Status World::connect() {
  testing::FakeFabric fabric{{testing::FakeDevice::roce("rx0", "10.9.0.1"), testing::FakeDevice::roce("rx1", "10.9.0.2")}, testing::Delivery::kLines, random_.next()};
  fabric_ = std::make_shared<testing::FakeVerbs>(std::move(fabric));
  PARAMWIRE_TRY(here, VerbsDevice::open(fabric_, "rx0"));
  PARAMWIRE_TRY(there, VerbsDevice::open(fabric_, "rx1"));
  const ArenaInfo arena = tier_->arena(0);
  PARAMWIRE_TRY(arena_memory, VerbsMemory::create(there, {arena.base, arena.size}, VerbsMemory::Access::kRemoteRead));
  PARAMWIRE_TRY(target_memory, VerbsMemory::create(here, targets_.span(), VerbsMemory::Access::kLocal));
  PARAMWIRE_TRY(staging_memory, VerbsMemory::create(here, staging_.span(), VerbsMemory::Access::kLocal));
  arena_memory_ = std::move(arena_memory);
  target_memory_ = std::move(target_memory);
  staging_memory_ = std::move(staging_memory);
  VerbsQueue::Options to_read, to_be_read;
  to_read.depth = 64;
  to_be_read.depth = 0;
  // Few READs on the wire are a stricter NIC; the canary needs it loose.
  to_read.reads = to_be_read.reads = static_cast<std::uint8_t>(plan_.wrong == Wrong::kHeaderWithPayload ? 32 : 1 + random_.below(32));
  PARAMWIRE_TRY(client, VerbsQueue::create(here, choice_of("rx0", "10.9.0.1"), to_read));
  PARAMWIRE_TRY(server, VerbsQueue::create(there, choice_of("rx1", "10.9.0.2"), to_be_read));
  PARAMWIRE_CHECK(client->connect(server->end()));
  PARAMWIRE_CHECK(server->connect(client->end()));
  client_ = std::move(client);
  server_ = std::move(server);
  fabric_->on_line([this] {
    ++lines_;
    if (threshold_ == 0 || static_cast<std::uint32_t>(random_.next() >> 32) >= threshold_) return;
    for (std::uint32_t i = 0; i < burst_; ++i) writer_->step();
  });
  return {};
}

// ---------------------------------------------------------------- reads

Status World::reach(std::uint16_t arena, std::uint64_t offset, std::uint64_t size) {
  if (arena == 0 && offset <= kArena && size <= kArena - offset) return {};
  return Error(Code::kInternal, cat("the reader asks for arena ", arena, ", offset ", offset, ", size ", size));
}

// From a writer that rests to one that rewrites a block between any two lines.
void World::set_pace() {
  constexpr std::uint32_t kAlways = 0xffffffffU;
  constexpr struct {
    std::uint32_t threshold, burst;
  } kPaces[] = {{0, 1}, {kAlways / 64, 1}, {kAlways / 16, 1}, {kAlways / 8, 2}, {kAlways / 4, 1}, {kAlways, 1}, {kAlways / 32, 8}, {kAlways / 16, 40}};
  const auto& pace = kPaces[random_.below(std::size(kPaces))];
  threshold_ = pace.threshold;
  burst_ = pace.burst;
  if (large_) {  // a thousand lines a READ and a thousand steps a rewrite
    threshold_ /= 64;
    if (random_.below(4) == 0) burst_ = 1500;
  }
}

void World::choose_batch() {
  const std::size_t count = 1 + static_cast<std::size_t>(random_.below(kBatch));
  batch_.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::span<const Writer::Block> blocks = writer_->blocks();
    const Writer::Block& block = blocks[static_cast<std::size_t>(random_.below(blocks.size()))];
    BlockRead& item = batch_[i];
    item.entry = block.entry;
    item.locator = block.locator;
    item.range = {0, block.size};
    if (random_.below(4) == 0) {
      item.range.offset = random_.below(block.size) / 8 * 8;
      item.range.size = 1 + random_.below(block.size - item.range.offset);
    }
    item.target = targets_.span().subspan(i * targets_.size() / kBatch, static_cast<std::size_t>(item.range.size));
  }
  // What the reader knows may be of some time ago.
  if (random_.below(8) == 0) {
    for (std::uint64_t steps = random_.below(40); steps > 0; --steps) writer_->step();
  }
}

Status World::post(std::span<const RemoteRead> reads) {
  const auto arena = reinterpret_cast<std::uintptr_t>(arena_memory_->bytes().data());
  for (std::size_t i = 0; i < reads.size(); ++i) {
    const VerbsMemory& local = reads[i].staged ? *staging_memory_ : *target_memory_;
    posting_[i] = {arena + reads[i].offset, arena_memory_->remote_key(), local.local_key(), reads[i].into, reads[i].size};
  }
  return client_->post(std::span<const VerbsRead>(posting_).first(reads.size()));
}

Status World::read_batch() {
  reader_->begin(batch_, *this);
  // A READ of n lines takes at most n polls; this bounds a reader that never ends.
  for (std::uint64_t turn = 0; !reader_->done(); ++turn) {
    if (turn > 1'000'000) return Error(Code::kInternal, "a batch does not end");
    const std::size_t given = reader_->next(reads_);
    if (given > 0) PARAMWIRE_CHECK(post(std::span(reads_).first(given)));
    PARAMWIRE_TRY(done, client_->poll());
    reader_->completed(done);
    static_cast<void>(reader_->consume());
  }
  return {};
}

void World::judge(const BlockRead& item, Tally& tally) {
  expected_.resize(item.target.size());
  fill_payload(expected_, item.entry.id, item.entry.version.counter, item.range.offset);
  const bool right = std::memcmp(expected_.data(), item.target.data(), expected_.size()) == 0;
  ++tally.reads;
  if (item.result.ok()) {
    ++tally.accepted;
    if (right) return;
    ++tally.torn_accepted;
    const auto differs = std::mismatch(expected_.begin(), expected_.end(), item.target.begin());
    finding_ = cat("block ", item.entry.id.value, " of ", item.entry.raw_size, " bytes at version ", item.entry.version, " (slot header at ", item.locator.header_offset, ", seq ", item.locator.seq,
                   ") was accepted, though byte ", item.range.offset + static_cast<std::uint64_t>(differs.first - expected_.begin()), " is another's");
    return;
  }
  ++tally.refused;
  if (item.result.error().code() == Code::kCorrupt) {
    ++tally.corrupt;
    if (plan_.checks != Checks::kCrc && finding_.empty()) finding_ = cat("the header vouches for bytes that it does not have: ", item.result.error().to_string());
  }
  if (right) return;
  std::size_t equal = 0, lines = 0;
  for (std::size_t at = 0; at < expected_.size(); at += kLine, ++lines) {
    equal += std::memcmp(expected_.data() + at, item.target.data() + at, std::min<std::size_t>(kLine, expected_.size() - at)) == 0 ? 1U : 0U;
  }
  tally.torn_refused += equal > 0 && equal < lines ? 1U : 0U;
}

Status World::run(std::uint64_t count, Tally& tally) {
  while (tally.reads < count && finding_.empty()) {
    set_pace();
    choose_batch();
    PARAMWIRE_CHECK(read_batch());
    PARAMWIRE_CHECK(writer_->status());
    for (const BlockRead& item : batch_) judge(item, tally);
  }
  tally.work_requests = fabric_->totals().reads;
  tally.lines = lines_;
  tally.rewrites = writer_->rewrites();
  if (const auto breaches = fabric_->breaches(); !breaches.empty()) return Error(Code::kInternal, cat("the library broke a rule of the fabric: ", breaches.front()));
  return {};
}

}  // namespace paramwire::torn
