#include "paramwire/net/reliable.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/net/block_read.hpp"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

namespace paramwire {

namespace {

// What one GET asks for at most, in bytes: it bounds the burst that one datagram sets off (CASES UP-41), and 256 KiB are four of the largest
// segments, so that a GET costs little beside them. In segments: 64 of 1,448 B are 93 KiB, one GSO send of the server; three of those.
constexpr std::uint64_t kAskBytes = 256 * 1024;
// A segmented send of Linux: udp(7), UDP_SEGMENT; the bytes are a datagram's before it is cut (RFC 768 less IPv4's header).
constexpr std::uint64_t kTrainBytes = 65'507;
constexpr std::uint64_t kTrainSegments = 64;
// Blocks open at once, and GETs under way: 256 tiny blocks hide a round trip of 100 us at 2.5 million a second, and their GETs fit the
// server's smallest receive buffer.
constexpr std::size_t kOpenMax = 256;
constexpr std::size_t kAsksMax = 256;
// A path that reorders does so by less than a quarter of a round trip. Source: RFC 8985 (RACK), section 6.2.
constexpr Micros kReorderMin = 100;
constexpr Micros kReorderMax = 20'000;
// Silences in a row at a size before it is doubted: at one that never carried anything, and at one that did.
constexpr std::uint32_t kSilencesNew = 2;
constexpr std::uint32_t kSilencesProven = 4;
// Twice as many where an eighth of what was asked for lately did not come: a question lost with its answer, over and over, is then chance (at
// 20 % each way 4 silences in a row are 2 in 100, 8 are 3 in 10,000), and small segments would only make more of them.
constexpr std::uint32_t kLossySilences = 2;
constexpr std::uint64_t kLately = 4096;  // segments
// After a step down the route's own size is tried again with the first batch after this: a path heals, and a silence may have been a server's.
constexpr Micros kSizeAgain = kMicrosPerSecond;
constexpr std::uint32_t kBackoffMax = 7;  // doublings of the timeout
constexpr Micros kProbeFirst = 20'000;    // an introduction is repeated after this, then twice as long, ...
constexpr Micros kProbeMost = 500'000;

// Sizes that paths are known to carry, largest first, IP and UDP headers and ours taken off: 9,000 B jumbo frames over IPv6, 1,500 over IPv4
// and IPv6, IPv6's own minimum of 1,280 (RFC 8200), IPv4's 576 (RFC 791).
constexpr std::array<std::uint32_t, 5> kSizes = {8928, 1448, 1428, 1208, 524};

}  // namespace

struct ReliableReader::Stream {
  Item* item = nullptr;
  bool live = false;
  bool in_line = false;  // in wanting_
  Asked asked;
  std::optional<AskedCrc> crc;
  std::uint64_t request = 0;
  std::uint64_t part_size = 0;
  ByteRange need;        // of the part
  std::uint32_t segment_size = 0;
  std::uint32_t first = 0;   // segment number of index 0
  std::uint32_t count = 0;
  std::uint32_t missing = 0;
  std::uint32_t prefix = 0;  // indices below are here
  std::uint32_t cursor = 0;  // indices below are here or asked for
  std::vector<std::uint64_t> here, asked_for;  // a bit an index
  std::vector<std::uint32_t> asked_by;         // the Ask's order, where asked_for is set
  Micros not_before = 0;
  bool again = false;    // some of it was asked for twice: answers tell no round trip

  static bool bit(const std::vector<std::uint64_t>& bits, std::uint32_t i) { return (bits[i / 64] >> (i % 64) & 1U) != 0; }
  static void set(std::vector<std::uint64_t>& bits, std::uint32_t i) { bits[i / 64] |= std::uint64_t{1} << (i % 64); }
  static void clear(std::vector<std::uint64_t>& bits, std::uint32_t i) { bits[i / 64] &= ~(std::uint64_t{1} << (i % 64)); }

  std::uint64_t begin_of(std::uint32_t i) const { return std::uint64_t{first + i} * segment_size; }
  std::uint32_t size_of(std::uint32_t i) const { return static_cast<std::uint32_t>(std::min<std::uint64_t>(segment_size, part_size - begin_of(i))); }
  // Of each segment alike: the shorter last one is charged as the others.
  std::uint64_t cost() const { return datagram_cost(kDataHeaderBytes + std::min<std::uint64_t>(segment_size, part_size)); }
  // First byte of the part that is not here, of those needed.
  std::uint64_t front() const { return prefix == count ? need.offset + need.size : std::max(need.offset, begin_of(prefix)); }

  void cut(std::uint32_t size) {
    segment_size = size;
    first = static_cast<std::uint32_t>(need.offset / size);
    count = need.size == 0 ? 0 : static_cast<std::uint32_t>((need.offset + need.size - 1) / size) - first + 1;
    missing = count;
    prefix = cursor = 0;
    here.assign((count + 63) / 64, 0);
    asked_for.assign((count + 63) / 64, 0);
    asked_by.assign(count, 0);
  }
};

struct ReliableReader::Item {
  BlockRead* read = nullptr;
  std::optional<StreamRead> place;
  FrameParser::BodyTarget target;
  Stream stored, table;
  Bytes table_bytes;
  bool table_here = false;   // or not wanted
  std::uint64_t checked = 0; // bytes of the stored range, from its start, that went through the check
};

ReliableReader::ReliableReader(ReliableOptions options, InboundCredit& credit)
    : options_(std::move(options)), credit_(credit), window_(datagram_cost(options_.segment_size), options_.window_max), segment_size_(options_.segment_size) {
  credit_.join();
}

ReliableReader::~ReliableReader() {
  credit_.give_back(in_flight_ + owed_);
  credit_.leave();
}

ReliableStats ReliableReader::stats() const noexcept {
  ReliableStats out = stats_;
  out.segment_size = segment_size_;
  out.window_bytes = window_.bytes();
  out.round_trip_us = static_cast<std::uint64_t>(window_.rtt());
  return out;
}

void ReliableReader::set_segment_size(std::uint32_t bytes) {
  options_.segment_size = bytes;
  if (segment_size_ == bytes) return;
  segment_size_ = bytes;
  size_confirmed_ = false;
  window_.set_datagram(datagram_cost(kDataHeaderBytes + bytes));
}

// ---------------------------------------------------------------- introduction

void ReliableReader::introduce(Micros now) {
  probing_ = true;
  introduced_ = false;
  probe_first_ = now;
  probe_sent_ = 0;
  next_timer_ = now;
}

// ---------------------------------------------------------------- items and streams

void ReliableReader::begin(std::span<BlockRead> batch, Micros now) {
  assert(open_items_ == 0);
  batch_ = batch;
  next_ = 0;
  last_arrival_ = now;
  silences_ = 0;
  next_timer_ = now;
  for (BlockRead& item : batch) item.result = Error(Code::kInternal, "not reached");
  if (segment_size_ != options_.segment_size && now >= stepped_ + kSizeAgain) set_segment_size(options_.segment_size);
}

void ReliableReader::open_stream(Stream& stream, Item& item, BlockPart part, ByteRange need) {
  stream.item = &item;
  stream.live = true;
  stream.in_line = false;
  stream.asked = {options_.incarnation, item.read->entry.id, item.read->entry.version, part};
  stream.crc.emplace(stream.asked);
  stream.part_size = part == BlockPart::kStored ? item.read->entry.stored_size : extent_count(item.read->entry.stored_size) * sizeof(ExtentRow);
  stream.need = need;
  stream.not_before = 0;
  stream.again = false;
  stream.cut(segment_size_);
  do {
    stream.request = options_.random();
  } while (!streams_.emplace(stream.request, &stream).second);
  want(stream, false);
}

// Opens the next item of the batch. False: there is none, or no room for one.
bool ReliableReader::open_next(Micros) {
  if (next_ == batch_.size() || open_items_ >= kOpenMax) return false;
  BlockRead& read = batch_[next_++];
  read.result = check_read(read);
  if (!read.result.ok()) return true;
  if (spare_.empty()) {
    items_.push_back(std::make_unique<Item>());
    spare_.push_back(items_.back().get());
  }
  Item& item = *spare_.back();
  item.read = &read;
  item.place.emplace(read, options_.incarnation, options_.omitted);
  if (Status status = item.place->prepare(); !status.ok()) {
    read.result = status;
    return true;
  }
  spare_.pop_back();
  ++open_items_;
  item.target = item.place->place();
  item.checked = 0;
  item.table_here = !item.place->wants_table();
  if (!item.table_here) {
    item.table_bytes.resize(static_cast<std::size_t>(extent_count(read.entry.stored_size) * sizeof(ExtentRow)));
    open_stream(item.table, item, BlockPart::kExtentTable, {0, item.table_bytes.size()});
  }
  if (item.place->stored().size > 0) {
    open_stream(item.stored, item, BlockPart::kStored, item.place->stored());
  } else {
    finish_if_whole(item);
  }
  return true;
}

void ReliableReader::drop_stream(Stream& stream) {
  if (!stream.live) return;
  stream.live = false;
  streams_.erase(stream.request);
  if (latest_ == &stream) latest_ = nullptr;
  if (stream.in_line) std::replace(wanting_.begin(), wanting_.end(), &stream, static_cast<Stream*>(nullptr));
  stream.in_line = false;
  for (Ask& ask : asks_) {
    if (ask.stream != &stream) continue;
    in_flight_ -= std::uint64_t{ask.outstanding} * ask.cost;
    credit_.give_back(std::uint64_t{ask.outstanding} * ask.cost);
    ask.outstanding = 0;
    ask.stream = nullptr;
  }
}

void ReliableReader::close_item(Item& item, Status result) {
  item.read->result = std::move(result);
  drop_stream(item.stored);
  drop_stream(item.table);
  wire_bytes_ += item.place->wire_bytes();
  item.place.reset();
  item.read = nullptr;
  --open_items_;
  if (done()) credit_.give_back(std::exchange(owed_, 0));
  spare_.push_back(&item);
}

void ReliableReader::abandon(const Status& why) {
  for (const auto& item : items_) {
    if (item->read != nullptr) close_item(*item, why);
  }
  for (; next_ < batch_.size(); ++next_) batch_[next_].result = why;
  asks_.clear();
  wanting_.clear();
  probing_ = false;
  next_timer_ = kNever;
}

void ReliableReader::want(Stream& stream, bool front) {
  if (stream.in_line) return;
  stream.in_line = true;
  if (front) {
    wanting_.push_front(&stream);
  } else {
    wanting_.push_back(&stream);
  }
}

// ---------------------------------------------------------------- out

void ReliableReader::poll(Micros now, Outbox& out) {
  credit_.give_back(std::exchange(owed_, 0));
  if (probing_) {
    const Micros pause = std::min(kProbeMost, std::max(kProbeFirst, probe_sent_ - probe_first_));
    if (probe_sent_ == 0 || now >= probe_sent_ + pause) {
      DatagramGet get;
      if (probe_sent_ == 0) probe_request_ = options_.random();
      get.request = probe_request_;
      get.asked = {options_.incarnation, {}, {1, 1}, BlockPart::kStored};
      get.segment_size = kSegmentBytesMin;
      get.segment_count = 1;
      get.want(0);
      probe_sent_ = now;
      send(get, out);
    }
    next_timer_ = probe_sent_ + std::min(kProbeMost, std::max(kProbeFirst, probe_sent_ - probe_first_));
    if (probing_) return;
  }
  check_timers(now);
  fill(now, out);
  schedule(now);
}

void ReliableReader::send(DatagramGet& get, Outbox& out) {
  get.session = options_.session;
  get.sequence = ++sequence_;
  get.token = token_;
  get.encode(out.bytes, options_.key);
  out.sizes.push_back(static_cast<std::uint16_t>(get.size()));
  ++stats_.gets;
  stats_.get_bytes += get.size();
}

void ReliableReader::fill(Micros now, Outbox& out) {
  // After repeated silence one ask at a time looks whether anybody is there.
  const std::uint64_t window = silences_ >= 2 ? 1 : window_.bytes();
  // Streams that have to wait (the server said so) stand aside once.
  std::size_t waiting = 0;
  for (;;) {
    while (!wanting_.empty() && wanting_.front() == nullptr) wanting_.pop_front();
    if (wanting_.size() <= waiting) {
      if (!open_next(now)) return;
      continue;
    }
    if (asks_.size() >= kAsksMax) return;
    const std::uint64_t own = in_flight_;
    const std::uint64_t free = own >= window ? 0 : std::min(window - own, credit_.room(own));
    if (own > 0 && free == 0) return;
    Stream& stream = *wanting_.front();
    if (stream.not_before > now) {
      wanting_.pop_front();
      wanting_.push_back(&stream);
      ++waiting;
      continue;
    }
    if (!ask(stream, now, free, out)) return;
  }
}

// What one segmented send carries at most, in cost.
std::uint64_t ReliableReader::train_bytes(const Stream& stream) noexcept {
  return std::clamp<std::uint64_t>(kTrainBytes / (kDataHeaderBytes + stream.segment_size), 1, kTrainSegments) * stream.cost();
}

// One GET for what `stream` lacks, within `room` bytes. False: there is not room enough to be worth one.
bool ReliableReader::ask(Stream& stream, Micros now, std::uint64_t room, Outbox& out) {
  std::uint32_t i = stream.cursor;
  while (i < stream.count && (Stream::bit(stream.here, i) || Stream::bit(stream.asked_for, i))) ++i;
  stream.cursor = i;
  if (i == stream.count) {
    wanting_.pop_front();
    stream.in_line = false;
    return true;
  }
  // A quarter of the window a GET keeps four under way; less only for the last of a stream, or when nothing else is.
  std::uint64_t burst = std::clamp<std::uint64_t>(window_.bytes() / 4, stream.cost(), kAskBytes);
  // Whole trains where it holds one: what is left over costs sender, path and receiver as much as a full one.
  if (const std::uint64_t train = train_bytes(stream); burst > train) burst -= burst % train;
  const auto left_within = [&](std::uint64_t limit) {
    std::uint64_t left = 0;
    for (std::uint32_t k = i; k < stream.count && left <= limit; ++k) {
      if (!Stream::bit(stream.here, k) && !Stream::bit(stream.asked_for, k)) left += stream.cost();
    }
    return left <= limit ? left : 0;
  };
  // With nothing under way there is nothing to keep going: all of a small block is one question.
  if (in_flight_ == 0) burst = std::max(burst, left_within(std::min(room, kAskBytes)));
  if (in_flight_ > 0 && room < burst && left_within(room) == 0) return false;
  DatagramGet get;
  get.request = stream.request;
  get.asked = stream.asked;
  get.segment_size = static_cast<std::uint16_t>(stream.segment_size);
  get.first_segment = stream.first + i;
  Ask ask;
  ask.order = ++last_order_;
  ask.stream = &stream;
  ask.first = i;
  ask.sent = now;
  ask.timed = !stream.again;
  ask.token = token_;
  ask.cost = static_cast<std::uint32_t>(stream.cost());
  std::uint64_t used = 0;
  std::uint32_t k = i;
  for (; k < stream.count && k - i < kSegmentsMax; ++k) {
    if (Stream::bit(stream.here, k) || Stream::bit(stream.asked_for, k)) continue;
    if (used > 0 && used + ask.cost > std::min(room, burst)) break;
    used += ask.cost;
    get.want(k - i);
    Stream::set(stream.asked_for, k);
    stream.asked_by[k] = ask.order;
    ++ask.outstanding;
    ask.last_wanted = k;
    ++stats_.segments_asked;
    stats_.bytes_asked += stream.size_of(k);
  }
  stream.cursor = k;
  ask.count = ask.last_wanted - i + 1;
  get.segment_count = static_cast<std::uint16_t>(ask.count);
  if (asks_.empty()) last_arrival_ = std::max(last_arrival_, now);  // silence counts from when somebody was asked
  in_flight_ += used;
  credit_.take(used);
  ask.limited = in_flight_ + burst > window_.bytes();
  asks_.push_back(ask);
  send(get, out);
  return true;
}

// ---------------------------------------------------------------- loss

Micros ReliableReader::reordering() const noexcept { return std::clamp(window_.rtt() / 4, kReorderMin, kReorderMax); }

Micros ReliableReader::silence_at() const noexcept {
  return last_arrival_ + (window_.rto() << std::min(silences_, kBackoffMax));
}

void ReliableReader::pop_settled() {
  while (!asks_.empty() && asks_.front().outstanding == 0) asks_.pop_front();
}

// What `ask` still lacks may be asked for again.
void ReliableReader::lose(Ask& ask, Micros now) {
  Stream& stream = *ask.stream;
  for (std::uint32_t i = ask.first; i < ask.first + ask.count && ask.outstanding > 0; ++i) {
    if (!Stream::bit(stream.asked_for, i) || stream.asked_by[i] != ask.order) continue;
    Stream::clear(stream.asked_for, i);
    --ask.outstanding;
    ++stats_.segments_lost;
    count_lately(lately_lost_);
    in_flight_ -= ask.cost;
    credit_.give_back(ask.cost);
    window_.on_settled(now, ask.sent, ask.cost, true);
    stream.cursor = std::min(stream.cursor, i);
  }
  stream.again = true;
  ask.outstanding = 0;
  ask.stream = nullptr;
  want(stream, true);
}

void ReliableReader::lose_everything(Micros now) {
  for (auto ask = asks_.rbegin(); ask != asks_.rend(); ++ask) {  // backwards: the first asked for is the first in line again
    if (ask->outstanding > 0) lose(*ask, now);
  }
  asks_.clear();
}

void ReliableReader::count_lately(std::uint64_t& what) noexcept {
  ++what;
  if (lately_here_ + lately_lost_ < kLately) return;
  lately_here_ /= 2;
  lately_lost_ /= 2;
}

void ReliableReader::check_timers(Micros now) {
  pop_settled();
  if (asks_.empty()) return;
  const Micros allowance = reordering();
  for (std::size_t i = asks_.size(); i > 0; --i) {
    Ask& ask = asks_[i - 1];
    if (ask.outstanding > 0 && ask.overtaken != 0 && now >= ask.overtaken + allowance) lose(ask, now);
  }
  pop_settled();
  if (asks_.empty() || now < silence_at()) return;
  ++stats_.timeouts;
  std::uint32_t largest = 0;
  for (const Ask& ask : asks_) {
    if (ask.outstanding > 0) largest = std::max(largest, ask.cost);
  }
  window_.on_silence(silences_);
  if (silences_ == 0) {
    // A look first: what was asked for longest. If it was only us, or the server, that stood still, the rest comes by itself; if all is
    // lost, the answer overtakes it.
    lose(asks_.front(), now);
    pop_settled();
  } else {
    lose_everything(now);
  }
  ++silences_;
  last_arrival_ = now;
  if (silences_ < 2) return;  // a cut needs that nothing is under way
  const std::uint32_t patience = (size_confirmed_ ? kSilencesProven : kSilencesNew) * (lately_lost_ > lately_here_ / 8 ? kLossySilences : 1);
  if (silences_ % patience == 0 && largest > datagram_cost(kDataHeaderBytes + options_.segment_floor)) step_size(now);
}

// The path may carry less than it seemed. Past the smallest size: from the largest again, since then it was not the size.
void ReliableReader::step_size(Micros now) {
  std::uint32_t next = options_.segment_size;
  for (const std::uint32_t size : kSizes) {
    if (size < segment_size_ && size >= options_.segment_floor) {
      next = size;
      break;
    }
  }
  if (next == segment_size_) return;
  ++stats_.size_steps;
  stepped_ = now;
  segment_size_ = next;
  size_confirmed_ = false;
  window_.set_datagram(datagram_cost(kDataHeaderBytes + next));
  for (const auto& item : items_) {
    if (item->read == nullptr) continue;
    for (Stream* stream : {&item->stored, &item->table}) {
      if (stream->live && stream->segment_size != next) recut(*stream, next);
    }
  }
}

// Another cut of the same bytes, under another number: what still comes of the old one is of no stream. Nothing of it is under way.
void ReliableReader::recut(Stream& stream, std::uint32_t segment_size) {
  const Stream old = stream;
  streams_.erase(stream.request);
  stream.cut(segment_size);
  do {
    stream.request = options_.random();
  } while (!streams_.emplace(stream.request, &stream).second);
  for (std::uint32_t i = 0; i < stream.count; ++i) {
    const std::uint64_t begin = std::max(stream.begin_of(i), stream.need.offset);
    const std::uint64_t end = std::min(stream.begin_of(i) + stream.size_of(i), stream.need.offset + stream.need.size);
    bool whole = true;
    for (auto k = static_cast<std::uint32_t>(begin / old.segment_size) - old.first; whole && k < old.count && old.begin_of(k) < end; ++k) {
      whole = Stream::bit(old.here, k);
    }
    if (!whole) continue;
    Stream::set(stream.here, i);
    --stream.missing;
  }
  while (stream.prefix < stream.count && Stream::bit(stream.here, stream.prefix)) ++stream.prefix;
  want(stream, true);
}

void ReliableReader::schedule(Micros now) {
  next_timer_ = kNever;
  if (!asks_.empty()) next_timer_ = silence_at();
  const Micros allowance = reordering();
  for (const Ask& ask : asks_) {
    if (ask.outstanding > 0 && ask.overtaken != 0) next_timer_ = std::min(next_timer_, ask.overtaken + allowance);
  }
  for (const Stream* stream : wanting_) {
    if (stream != nullptr && stream->not_before > now) next_timer_ = std::min(next_timer_, stream->not_before);
  }
}

// ---------------------------------------------------------------- in

void ReliableReader::on_datagram(Micros now, std::span<const std::byte> datagram) {
  if (const auto data = read_data(datagram)) return on_data(now, datagram, *data);
  if (datagram_kind(datagram) == DatagramKind::kStatus) return on_status(now, datagram);
  ++stats_.refused;
}

void ReliableReader::on_data(Micros now, std::span<const std::byte> datagram, const DatagramData& data) {
  if (latest_ == nullptr || latest_->request != data.request) {
    const auto found = streams_.find(data.request);
    if (found == streams_.end()) {
      ++stats_.duplicates;  // of a stream that is whole, most likely; of a forger's guess at worst
      return;
    }
    latest_ = found->second;
  }
  Stream& stream = *latest_;
  const std::uint32_t index = data.segment - stream.first;  // wraps for a segment before the first
  if (!options_.omitted_datagram.header_crc && !data_header_intact(datagram, *stream.crc)) {
    ++stats_.refused;
    return;
  }
  if (index >= stream.count || data.payload_size != stream.size_of(index)) {
    ++stats_.refused;
    return;
  }
  last_arrival_ = now;
  silences_ = 0;
  if (Stream::bit(stream.here, index) && !options_.omitted_datagram.received) {
    ++stats_.duplicates;
    return;
  }
  if (stream.segment_size == segment_size_ && data.payload_size == segment_size_) size_confirmed_ = true;
  ++stats_.segments;
  count_lately(lately_here_);
  stats_.segment_bytes += data.payload_size;
  settle_ask(stream, index, now);
  take_payload(stream, index, datagram.subspan(kDataHeaderBytes));
}

// The GET that this segment answers: the round trip, and what was asked for before it and is not here.
void ReliableReader::settle_ask(Stream& stream, std::uint32_t index, Micros now) {
  if (!Stream::bit(stream.asked_for, index)) return;  // was taken for lost; came after all
  Stream::clear(stream.asked_for, index);
  const std::size_t at = stream.asked_by[index] - asks_.front().order;  // orders have no gaps
  assert(at < asks_.size() && asks_[at].stream == &stream && asks_[at].outstanding > 0);
  Ask& ask = at == 0 ? asks_.front() : asks_[at];
  if (ask.timed) window_.on_answer(now, ask.sent, ask.limited);
  ask.timed = false;
  --ask.outstanding;
  in_flight_ -= ask.cost;
  window_.on_settled(now, ask.sent, ask.cost, false);
  // Later, all at once: a locked operation waits until the payloads that were copied past the cache have reached memory.
  owed_ += ask.cost;
  for (std::size_t k = 0; k < at; ++k) {
    if (asks_[k].outstanding > 0 && asks_[k].overtaken == 0) asks_[k].overtaken = now;
  }
  if (ask.outstanding > 0 && index == ask.last_wanted && ask.overtaken == 0) ask.overtaken = now;
  pop_settled();
}

void ReliableReader::take_payload(Stream& stream, std::uint32_t index, std::span<const std::byte> payload) {
  Item& item = *stream.item;
  const std::uint64_t offset = stream.begin_of(index);
  const bool fresh = !Stream::bit(stream.here, index);
  if (fresh) {
    Stream::set(stream.here, index);
    --stream.missing;
  }
  const bool next = index == stream.prefix;
  if (stream.asked.part == BlockPart::kExtentTable) {
    std::memcpy(item.table_bytes.data() + offset, payload.data(), payload.size());
  } else {
    write(item, offset, payload);
  }
  if (next) {
    while (stream.prefix < stream.count && Stream::bit(stream.here, stream.prefix)) ++stream.prefix;
  }
  if (stream.asked.part == BlockPart::kExtentTable && stream.missing == 0) {
    Status table = item.place->take_table(item.table_bytes);
    if (!table.ok()) return close_item(item, std::move(table));
    item.table_here = true;
    drop_stream(stream);
  }
  advance(item);
  finish_if_whole(item);
}

// `bytes` of the part from `offset` on go to their places, but for those outside the range, and those that were checked: payloads carry no
// check of their own, so a late copy must not replace what the CRC has seen.
void ReliableReader::write(Item& item, std::uint64_t offset, std::span<const std::byte> bytes) {
  const ByteRange stored = item.place->stored();
  std::uint64_t begin = std::max(offset, stored.offset + item.checked);
  const std::uint64_t end = std::min(offset + bytes.size(), stored.offset + stored.size);
  std::uint64_t at = stored.offset;  // of the place's next part
  for (const auto& part : item.target.parts) {
    const std::uint64_t part_end = at + part.size();
    if (begin < end && begin < part_end) {
      const std::uint64_t until = std::min(end, part_end);
      const auto source = bytes.subspan(static_cast<std::size_t>(begin - offset), static_cast<std::size_t>(until - begin));
      std::byte* const into = part.data() + (begin - at);
      if (item.table_here && begin == stored.offset + item.checked) {  // the next in order: copied and checked in one pass
        item.place->copy_body(into, source);
        item.checked += source.size();
      } else {
        std::memcpy(into, source.data(), source.size());
      }
      begin = until;
    }
    at = part_end;
  }
}

// Checks what is whole from the front.
void ReliableReader::advance(Item& item) {
  if (!item.table_here || !item.stored.live) return;
  const ByteRange stored = item.place->stored();
  const std::uint64_t until = item.stored.front() - stored.offset;
  std::uint64_t at = 0;
  for (const auto& part : item.target.parts) {
    const std::uint64_t part_end = at + part.size();
    while (item.checked < std::min(until, part_end)) {
      // In steps that stay in the cache beside what was received.
      const std::uint64_t n = std::min({until, part_end, item.checked + FrameParser::kReceiveStep}) - item.checked;
      item.place->on_body(part.subspan(static_cast<std::size_t>(item.checked - at), static_cast<std::size_t>(n)));
      item.checked += n;
    }
    at = part_end;
  }
}

void ReliableReader::finish_if_whole(Item& item) {
  if (item.read == nullptr || !item.table_here || item.checked != item.place->stored().size) return;
  close_item(item, item.place->finish());
}

void ReliableReader::on_status(Micros now, std::span<const std::byte> datagram) {
  bool forged = false;
  auto status = read_status(datagram, options_.key, forged);
  if (!status && forged && options_.omitted_datagram.status_mac) {
    Bytes trusted(datagram.begin(), datagram.end());
    const SipTag mac = siphash128(options_.key, std::span(trusted).first(kStatusBytes - kMacBytes));
    std::memcpy(trusted.data() + 40, &mac, sizeof mac);
    status = read_status(trusted, options_.key, forged);
  }
  if (!status) {
    ++(forged ? stats_.forged : stats_.refused);
    return;
  }
  ++stats_.statuses;
  if (probing_ && status->request == probe_request_) {
    probing_ = false;
    introduced_ = true;
    token_ = status->token;
    window_.on_answer(now, probe_sent_, false);
    return;
  }
  const auto found = streams_.find(status->request);
  if (found == streams_.end()) return;
  Stream& stream = *found->second;
  Item& item = *stream.item;
  const ManifestEntry& entry = item.read->entry;
  switch (status->code) {
    case StatusCode::kToken: {
      // What was asked without this token got this answer, or will. The same token again says nothing new: the timeout decides.
      if (status->token == token_) return;
      token_ = status->token;
      last_arrival_ = now;
      lose_everything(now);
      return;
    }
    case StatusCode::kInvalid:
      return close_item(item, Error(Code::kInvalid, cat(options_.peer, ": the server refused the request for block ", entry.to_string(), " at version ", entry.version,
                                                        " in segments of ", stream.segment_size, " bytes: its block is another; take a new snapshot")));
    case StatusCode::kStale:
      return close_item(item, Error(Code::kStale, cat(options_.peer, ": block ", entry.to_string(), " at version ", entry.version,
                                                      " is gone there (a newer version, or another start of the server): take a new snapshot")));
    case StatusCode::kBackpressure:
      last_arrival_ = now;
      stream.not_before = now + std::min<Micros>(status->retry_us, kMicrosPerSecond);
      for (Ask& ask : asks_) {
        if (ask.stream == &stream && ask.outstanding > 0) lose(ask, now);
      }
      return;
  }
}

}  // namespace paramwire
