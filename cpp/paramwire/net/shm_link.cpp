#include "paramwire/net/shm_link.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/block_read.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <functional>
#include <system_error>
#include <thread>
#include <utility>

namespace paramwire {

namespace {

// Slots remembered as verified: 48 bytes each, so 6 MiB. When it is full all are forgotten, which costs each its CRC again.
constexpr std::size_t kVerifiedMax = std::size_t{1} << 17;
// How long a view, which has no deadline of its own, may wait for the server to hand out an arena or the pin table: once a link.
constexpr Micros kMapDeadline = 10 * kMicrosPerSecond;
// Under drop_pages a first view is checked in such steps, and the pages of each leave before the next: a large block never lies
// in the resident set as a whole.
constexpr std::size_t kDropStep = std::size_t{1} << 20;

// Bytes of one read call under drop_pages: half of a 2 MiB L2 holds a piece and the kernel's copy of it.
constexpr std::size_t kReadStep = std::size_t{256} << 10;

class ShmPin final : public BlockView::Pin {
 public:
  ShmPin(std::shared_ptr<const MappedArena> arena, std::shared_ptr<PinTable> table, std::uint32_t index, std::span<const std::byte> drop)
      : arena_(std::move(arena)), table_(std::move(table)), index_(index), drop_(drop) {}
  ~ShmPin() override {
    if (!drop_.empty()) arena_->drop_pages(drop_.data(), drop_.size());
    table_->release(index_);
  }
  std::span<const std::byte> take_pages() noexcept override {
    const auto taken = std::exchange(drop_, {});
    return taken.empty() ? taken : arena_->around(taken.data(), taken.size());
  }

 private:
  std::shared_ptr<const MappedArena> arena_;
  std::shared_ptr<PinTable> table_;
  std::uint32_t index_;
  std::span<const std::byte> drop_;  // empty: pages stay
};

// Both by two threads; where the system gives none, this one does both.
template <typename First, typename Second>
void by_two_threads(const First& first, const Second& second) {
  std::thread helper;
  try {
    helper = std::thread(std::cref(second));
  } catch (const std::system_error&) {
    second();
  }
  first();
  if (helper.joinable()) helper.join();
}

std::size_t half_of(std::size_t size) { return size / 2 / 4096 * 4096; }  // on a page

std::uint64_t copy_in_halves(std::span<std::byte> target, const std::byte* source, std::uint64_t before) {
  const std::size_t half = half_of(target.size());
  const std::size_t rest = target.size() - half;
  std::uint64_t first = 0, second = 0;
  by_two_threads([&] { first = copy_crc64(target.data(), source, half, before, Stores::kStreaming); },
                 [&] { second = copy_crc64(target.data() + half, source + half, rest, 0, Stores::kStreaming); });
  return crc64_join(first, second, rest);
}

void copy_in_halves(std::span<std::byte> target, const std::byte* source) {
  const std::size_t half = half_of(target.size());
  by_two_threads([&] { copy_bytes(target.data(), source, half, Stores::kStreaming); },
                 [&] { copy_bytes(target.data() + half, source + half, target.size() - half, Stores::kStreaming); });
}

// In steps, each checked while it is in cache.
Result<std::uint64_t> read_crc64(const MappedArena& arena, std::uint64_t offset, std::span<std::byte> target, std::uint64_t crc) {
  for (std::size_t at = 0; at < target.size(); at += kReadStep) {
    const auto part = target.subspan(at, std::min(kReadStep, target.size() - at));
    PARAMWIRE_CHECK(arena.read(offset + at, part));
    crc = crc64(part, crc);
  }
  return crc;
}

}  // namespace

// ---------------------------------------------------------------- memory

class ShmLink::Memory final : public RemoteMemory {
 public:
  explicit Memory(ControlLink& control) : control_(control) {}

  Micros deadline = 0;      // for arenas that must be asked for
  bool streaming = false;   // the read under way is long, although its extents are short
  bool two_threads = false;
  bool drop_pages = false;  // reads go through the descriptor: no page of an arena becomes resident here

  // errors: kStale when the server has no such arena; as ControlLink::call and MappedArena::map.
  Result<std::shared_ptr<const MappedArena>> arena(std::uint16_t index) {
    if (index < arenas_.size() && arenas_[index] != nullptr) return arenas_[index];
    if (index > kArenaMax) return Error(Code::kStale, cat("the locator names arena ", index, ", which no server has: take a new snapshot"));
    ArenaMessage ask;
    ask.arena = index;
    const std::uint64_t request = control_.next_request();
    auto answer = control_.call(ask.encode(FrameType::kArena, request), request, FrameType::kArenaFd, deadline);
    if (!answer.ok()) {
      if (answer.error().code() != Code::kNotFound) return std::move(answer).error();
      return Error(Code::kStale, cat("the locator names arena ", index, " that the server does not have: take a new snapshot"));
    }
    PARAMWIRE_TRY(message, ArenaMessage::decode(answer->meta));
    PARAMWIRE_TRY(mapped, MappedArena::map(answer->descriptor, message.size));
    if (arenas_.size() <= index) arenas_.resize(std::size_t{index} + 1);
    arenas_[index] = mapped;
    return mapped;
  }

  Result<const std::byte*> locate(std::uint16_t index, std::uint64_t offset, std::uint64_t size) {
    const MappedArena* mapped = index < arenas_.size() ? arenas_[index].get() : nullptr;
    if (mapped == nullptr) {
      PARAMWIRE_TRY(fresh, arena(index));
      mapped = fresh.get();  // kept by arenas_
    }
    const std::byte* at = mapped->at(offset, size);
    if (at == nullptr) return Error(Code::kStale, cat("the locator names bytes ", offset, " to ", offset + size, " outside of arena ", index, ": take a new snapshot"));
    return at;
  }

  Result<std::uint64_t> copy_crc64(std::uint16_t index, std::uint64_t offset, std::span<std::byte> target, std::uint64_t before) override {
    PARAMWIRE_TRY(source, locate(index, offset, target.size()));
    if (drop_pages) return read_crc64(*arenas_[index], offset, target, before);
    if (two_threads && target.size() >= kTwoThreadsFrom) return copy_in_halves(target, source, before);
    return paramwire::copy_crc64(target.data(), source, target.size(), before);
  }
  Result<std::uint32_t> copy_crc32c(std::uint16_t index, std::uint64_t offset, std::span<std::byte> target) override {
    PARAMWIRE_TRY(source, locate(index, offset, target.size()));
    if (drop_pages) {
      PARAMWIRE_CHECK(arenas_[index]->read(offset, target));
      return crc32c(target);
    }
    return paramwire::copy_crc32c(target.data(), source, target.size(), 0, streaming ? Stores::kStreaming : Stores::kBySize);
  }
  Status copy(std::uint16_t index, std::uint64_t offset, std::span<std::byte> target) override {
    PARAMWIRE_TRY(source, locate(index, offset, target.size()));
    if (drop_pages) return arenas_[index]->read(offset, target);
    if (two_threads && target.size() >= kTwoThreadsFrom) {
      copy_in_halves(target, source);
    } else {
      copy_bytes(target.data(), source, target.size());
    }
    return {};
  }
  // The payload was loaded before: the fence keeps the compiler from moving these loads up, and x86 completes loads from
  // ordinary memory in program order (Intel SDM vol. 3, 9.2.2); elsewhere the acquire fence is the instruction that does it.
  // Word by word and atomic, because the server may be writing: a header torn between words fails its CRC.
  Result<SlotHeader> header(std::uint16_t index, std::uint64_t offset) override {
    if (offset % sizeof(SlotHeader) != 0) return Error(Code::kStale, cat("the locator names a slot header at ", offset, ": take a new snapshot"));
    PARAMWIRE_TRY(source, locate(index, offset, sizeof(SlotHeader)));
    std::atomic_thread_fence(std::memory_order_acquire);
    std::array<std::uint64_t, sizeof(SlotHeader) / 8> words;
    // atomic_ref wants a mutable object until C++26; a load does not write.
    auto* from = reinterpret_cast<std::uint64_t*>(const_cast<std::byte*>(source));
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = std::atomic_ref(from[i]).load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    return std::bit_cast<SlotHeader>(words);
  }

 private:
  ControlLink& control_;
  std::vector<std::shared_ptr<const MappedArena>> arenas_;  // nullptr: not asked for yet
};

// ---------------------------------------------------------------- link

ShmLink::ShmLink(std::unique_ptr<ControlLink> control, const ShmOptions& options)
    : control_(std::move(control)), options_(options), memory_(std::make_unique<Memory>(*control_)), reader_(*memory_, options.omitted) {
  memory_->two_threads = options.two_threads;
  memory_->drop_pages = options.drop_pages;
}

ShmLink::~ShmLink() = default;

Result<std::unique_ptr<Link>> ShmLink::connect(const Endpoint& endpoint, const Caller& caller, const Incarnation& incarnation,
                                               const ShmOptions& options, Micros deadline) {
  if (endpoint.kind != Endpoint::Kind::kUnix) return Error(Code::kInvalid, cat("shm needs the server's unix socket, ", endpoint, " is none"));
  PARAMWIRE_TRY(control, ControlLink::connect(endpoint, caller, deadline));
  if (control->facts().incarnation != incarnation && !options.omitted.epoch) {
    return Error(Code::kStale, cat(endpoint, " is incarnation ", control->facts().incarnation, " now, ", incarnation, " was expected (the server restarted): take a new snapshot"));
  }
  std::unique_ptr<ShmLink> link(new ShmLink(std::move(control), options));
  // A server whose memory can't be mapped must be refused here, where another transport can still be chosen, and not at the
  // first read. No arena yet is fine.
  link->memory_->deadline = deadline;
  if (const auto first = link->memory_->arena(0); !first.ok() && first.error().code() != Code::kStale) return first.error();
  return std::unique_ptr<Link>(std::move(link));
}

Status ShmLink::read_one(BlockRead& item, Micros deadline) {
  PARAMWIRE_CHECK(check_read(item));
  if (steady_clock().now() >= deadline) return Error(Code::kTimeout, cat("the deadline passed before block ", item.entry.to_string(), " was read"));
  memory_->deadline = deadline;
  memory_->streaming = item.range.size >= kStreamFromBytes;
  reader_.read(item);
  return item.result;
}

void ShmLink::read(std::span<BlockRead> batch, Micros deadline) {
  const Status usable = guard_.check(cat("shm link to ", control_->peer()));
  for (BlockRead& item : batch) {
    ++stats_.reads;
    item.result = usable.ok() ? read_one(item, deadline) : usable;
    count_read(stats_, item, options_.omitted);
  }
}

// ---------------------------------------------------------------- views

Status ShmLink::need_pins(Micros deadline) {
  if (pins_ != nullptr) return {};
  const std::uint64_t request = control_->next_request();
  PARAMWIRE_TRY(answer, control_->call(encode_empty(FrameType::kPins, request), request, FrameType::kPinsFd, deadline));
  PARAMWIRE_TRY(message, PinsMessage::decode(answer.meta));
  PARAMWIRE_TRY(table, PinTable::map(answer.descriptor, message.capacity));
  pins_ = std::move(table);
  return {};
}

// True: the CRC was run now. The slot is pinned and its header was found right: the bytes stay what they are.
Result<bool> ShmLink::verify_view(const ManifestEntry& entry, const Locator& locator, std::span<const std::byte> payload, const MappedArena& arena) {
  if (options_.omitted.crc) return false;
  const std::uint64_t slot = pin_word(locator);
  const auto known = verified_.find(slot);
  if (known != verified_.end() && known->second.seq == locator.seq && known->second.version == entry.version && known->second.crc64 == entry.crc64) return false;
  std::uint64_t crc = 0;
  const std::size_t step = options_.drop_pages ? kDropStep : std::max<std::size_t>(payload.size(), 1);
  for (std::size_t at = 0; at < payload.size(); at += step) {
    const auto part = payload.subspan(at, std::min(step, payload.size() - at));
    crc = crc64(part, crc);
    if (options_.drop_pages) arena.drop_pages(part.data(), part.size());
  }
  if (crc != entry.crc64) {
    return Error(Code::kCorrupt, cat("block ", entry.to_string(), " at version ", entry.version, ": CRC-64 of the bytes in the arena does not match the manifest"));
  }
  if (verified_.size() >= kVerifiedMax) verified_.clear();
  verified_[slot] = {locator.seq, entry.version, entry.crc64};
  return true;
}

Result<BlockView> ShmLink::view(const ManifestEntry& entry, const Locator& locator, ByteRange range) {
  PARAMWIRE_CHECK(guard_.check("shm link"));
  PARAMWIRE_CHECK(check_range(entry, range, range.size));
  memory_->deadline = steady_clock().now() + kMapDeadline;
  PARAMWIRE_CHECK(need_pins(memory_->deadline));
  PARAMWIRE_TRY(arena, memory_->arena(locator.arena));
  PARAMWIRE_TRY(base, memory_->locate(locator.arena, locator.payload_offset, entry.stored_size));
  const std::span<const std::byte> payload(base, static_cast<std::size_t>(entry.stored_size));
  const auto bytes = payload.subspan(static_cast<std::size_t>(range.offset), static_cast<std::size_t>(range.size));

  // Pin, fence, and only then the header: if it is still whole, the server's scan finds the pin.
  PARAMWIRE_TRY(index, pins_->claim(pin_word(locator)));
  const std::span<const std::byte> drop = options_.drop_pages ? bytes : std::span<const std::byte>();
  auto pin = std::make_unique<ShmPin>(arena, pins_, index, drop);  // from here on, every way out releases
  PARAMWIRE_TRY(header, memory_->header(locator.header_arena, locator.header_offset));
  Status current = reader_.rules().check_header(header, entry, locator);
  auto verified = current.ok() ? verify_view(entry, locator, payload, *arena) : Result<bool>(std::move(current).error());
  if (!verified.ok()) {
    count_failure(stats_, verified.error());
    return std::move(verified).error();
  }
  if (options_.drop_pages) arena->populate(bytes.data(), bytes.size());
  ++stats_.views;
  if (*verified) ++stats_.views_verified;
  return BlockView(bytes, std::move(pin), *verified);
}

LinkStats ShmLink::stats() const {
  LinkStats out = stats_;
  out.wire_bytes = reader_.wire_bytes();
  return out;
}

}  // namespace paramwire
