// A client machine and a server's responder with a wire between them that tests can cut, reorder, repeat and damage: one thread, no socket,
// a clock moved by hand.
#pragma once

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/reliable.hpp"
#include "paramwire/server/udp_responder.hpp"
#include "support/rig.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace paramwire::testing {

inline constexpr Incarnation kIncarnation{11, 22};
inline constexpr Version kVersion{3, 17};

// One published block, as a manifest entry and as a server's bytes.
struct PublishedBlock {
  std::string name;
  Bytes bytes;
  Bytes table;
  ManifestEntry entry;

  PublishedBlock(std::string called, Bytes content) : name(std::move(called)), bytes(std::move(content)) {
    entry.id = block_id(name, Shard::whole());
    entry.tensor = name;
    entry.version = kVersion;
    entry.dtype = DType::kU8;
    entry.shape = Shape{bytes.size()};
    entry.raw_size = entry.stored_size = bytes.size();
    entry.crc64 = crc64(bytes);
    for (std::size_t at = 0; at < bytes.size(); at += kExtentBytes) {
      const auto extent = std::span(bytes).subspan(at, std::min<std::size_t>(kExtentBytes, bytes.size() - at));
      ByteWriter out(table);
      out.put(static_cast<std::uint32_t>(extent.size()));
      out.put(crc32c(extent));
    }
    if (bytes.size() > kExtentBytes) entry.extent_table_crc = crc32c(table);
  }
};

class DatagramRig {
 public:
  explicit DatagramRig(std::uint32_t segment_size = 1024, std::uint64_t credit_bytes = 1 << 20, const OmittedResponderChecks& omitted = {})
      : random(7), credit(std::make_shared<InboundCredit>(credit_bytes)) {
    responder = must(UdpResponder::create(kIncarnation, [this] { return Result<std::uint64_t>(random.next()); }, omitted));
    session = must(responder->open(7411, std::nullopt));
    options.session = session.session;
    options.key = session.key;
    options.incarnation = kIncarnation;
    options.peer = "udp://server";
    options.segment_size = segment_size;
    options.random = [this] { return random.next(); };
  }

  PublishedBlock& publish(std::string name, Bytes bytes) {
    auto block = std::make_unique<PublishedBlock>(std::move(name), std::move(bytes));
    PublishedBlock& made = *block;
    blocks[made.entry.id] = std::move(block);
    return made;
  }
  void start() {
    reader = std::make_unique<ReliableReader>(options, *credit);
    out.clear();
    wire.clear();
  }
  static BlockRead read_of(const PublishedBlock& block, ByteRange range, std::span<std::byte> target) { return BlockRead{block.entry, {}, range, target, {}}; }

  // What the server answers to one datagram.
  std::vector<Bytes> serve(std::span<const std::byte> datagram) {
    std::vector<Bytes> answers;
    UdpResponder::Question question;
    const auto status = [&](const std::array<std::byte, kStatusBytes>& bytes) { answers.emplace_back(bytes.begin(), bytes.end()); };
    switch (responder->check(datagram, address, question)) {
      case UdpResponder::Verdict::kSilence: return answers;
      case UdpResponder::Verdict::kStatus: status(question.status); return answers;
      case UdpResponder::Verdict::kLookup: break;
    }
    const auto found = blocks.find(question.get.asked.block);
    if (found == blocks.end() || question.get.asked.version != found->second->entry.version) {
      status(responder->refuse(question, StatusCode::kStale));
      return answers;
    }
    const PublishedBlock& block = *found->second;
    SegmentWalk walk(question.get, question.get.asked.part == BlockPart::kStored ? block.bytes : block.table);
    if (!walk.fits()) {
      status(responder->refuse(question, StatusCode::kInvalid));
      return answers;
    }
    std::array<std::byte, kDataHeaderBytes> header;
    while (const auto payload = walk.next(header.data())) {
      Bytes data(header.begin(), header.end());
      data.insert(data.end(), payload->begin(), payload->end());
      answers.push_back(std::move(data));
      data_bytes += payload->size();
    }
    return answers;
  }

  // One turn: what is to be sent is sent and answered, one datagram arrives; or time passes until something is due. False: nothing is due.
  bool turn() {
    out.clear();
    reader->poll(now, out);
    std::size_t at = 0;
    for (const std::uint16_t size : out.sizes) {
      Bytes get(out.bytes.begin() + static_cast<std::ptrdiff_t>(at), out.bytes.begin() + static_cast<std::ptrdiff_t>(at + size));
      at += size;
      note_asked(get);
      ++gets;
      if (to_server && !to_server(get)) continue;
      for (Bytes& answer : serve(get)) wire.push_back({now + delay, std::move(answer)});
    }
    if (shuffle > 0 && wire.size() > 1 && random.chance(shuffle)) std::swap(wire.front().bytes, wire[random.below(wire.size())].bytes);
    if (wire.empty()) {
      if (reader->done() || reader->next_timer() == kNever) return false;
      now = std::max(now + 1, reader->next_timer());
      return true;
    }
    now = std::max(now, std::min(wire.front().at, reader->next_timer()));
    if (now < wire.front().at) return true;
    Bytes datagram = std::move(wire.front().bytes);
    wire.pop_front();
    if (to_client && !to_client(datagram)) return true;
    const std::uint64_t before = reader->stats().segments;
    reader->on_datagram(now, datagram);
    if (reader->stats().segments > before) note_here(datagram);
    return true;
  }
  // Until the batch is done. The bound is far over what any test needs: an endless loop fails instead of hanging.
  void run(std::span<BlockRead> batch) {
    reader->begin(batch, now);
    for (int i = 0; i < 2'000'000 && !reader->done(); ++i) {
      if (!turn()) break;
    }
    EXPECT_TRUE(reader->done()) << "stuck with " << reader->unfinished() << " blocks open";
  }
  void introduce() {
    reader->introduce(now);
    while (!reader->introduced()) ASSERT_TRUE(turn());
  }
  Result<Bytes> read(const PublishedBlock& block, ByteRange range) {
    Bytes target(static_cast<std::size_t>(range.size), std::byte{0xee});
    BlockRead item = read_of(block, range, target);
    run({&item, 1});
    if (!item.result.ok()) return item.result.error();
    return target;
  }
  Result<Bytes> read(const PublishedBlock& block) { return read(block, {0, block.bytes.size()}); }

  struct Flying {
    Micros at;
    Bytes bytes;
  };
  Random random;
  std::shared_ptr<InboundCredit> credit;
  std::unique_ptr<UdpResponder> responder;
  UdpKeyMessage session;
  ReliableOptions options;
  std::unique_ptr<ReliableReader> reader;
  std::map<BlockId, std::unique_ptr<PublishedBlock>> blocks;
  std::array<std::byte, 18> address{};
  std::function<bool(Bytes&)> to_server, to_client;  // false: lost; may change the bytes
  std::uint32_t shuffle = 0;                         // per cent of turns in which two datagrams change places
  Micros now = 1000;
  Micros delay = 40;
  Outbox out;
  std::deque<Flying> wire;
  std::uint64_t gets = 0, data_bytes = 0;
  std::uint64_t asked_for_what_is_here = 0;

 private:
  void note_asked(const Bytes& bytes) {
    DatagramGet get;
    ASSERT_EQ(decode_get(bytes, get), nullptr);
    for (std::uint32_t i = 0; i < get.segment_count; ++i) {
      if (get.wanted(i) && here_.count({get.request, get.first_segment + i}) > 0) ++asked_for_what_is_here;
    }
  }
  void note_here(const Bytes& bytes) {
    if (const auto data = read_data(bytes)) here_.insert({data->request, data->segment});
  }
  std::set<std::pair<std::uint64_t, std::uint32_t>> here_;
};

}  // namespace paramwire::testing
