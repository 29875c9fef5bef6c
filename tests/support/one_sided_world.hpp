// Slots in plain memory, and a pump that drives a OneSidedReader over it: reads complete in order, as late as a test likes. The pump watches every
// promise of the reader: what is asked for lies where it may, in the order that proves something, within the limits, and no landing place is given
// out twice.
#pragma once

#include "paramwire/base/crc.hpp"
#include "paramwire/base/env.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/one_sided_reader.hpp"
#include "paramwire/wire/message.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace paramwire::testing {

// One block and its slot.
struct PlainBlock {
  std::string name;
  ManifestEntry entry;
  Locator locator;
  std::span<std::byte> payload;  // in the world's memory
  SlotHeader* header = nullptr;

  BlockRead read(ByteRange range, std::span<std::byte> target) const { return {entry, locator, range, target, {}}; }
  BlockRead read(std::span<std::byte> target) const { return read({0, entry.raw_size}, target); }
  // As a writer that seals what it wrote.
  void seal() { header->header_crc = slot_header_crc(*header); }
};

// Arenas 0 and 2 hold payloads, arena 1 the headers.
class PlainWorld final : public OneSidedMemory {
 public:
  static constexpr std::uint16_t kHeaders = 1;

  explicit PlainWorld(std::size_t payload_bytes = std::size_t{40} << 20) : arenas_(3) {
    arenas_[0].resize(payload_bytes);
    arenas_[1].resize(1 << 20);
    arenas_[2].resize(4 << 20);
  }

  // `offset`: of the payload, a multiple of 64.
  PlainBlock& put(std::uint64_t size, std::uint64_t offset, std::uint16_t arena = 0) {
    PlainBlock& block = blocks_.emplace_back();
    const std::uint64_t number = blocks_.size();
    block.name = cat("b", number);
    ManifestEntry& entry = block.entry;
    entry.tensor = block.name;
    entry.id = block_id(entry.tensor, Shard::whole());
    entry.version = {3, number};
    entry.shape = Shape{size};
    entry.raw_size = entry.stored_size = size;
    block.locator = {arena, kHeaders, header_next_, offset, 2 * number};
    header_next_ += 64;
    Bytes& memory = arenas_[arena];
    EXPECT_LE(offset + size, memory.size());
    block.payload = std::span(memory).subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(size));
    Random random(number);
    for (std::byte& byte : block.payload) byte = static_cast<std::byte>(random.next() >> 56);
    entry.crc64 = crc64(block.payload);
    if (extent_count(size) > 1) {
      std::byte* table = memory.data() + extent_table_offset(entry, block.locator);
      const std::size_t rows = static_cast<std::size_t>(extent_count(size));
      for (std::size_t i = 0; i < rows; ++i) {
        const auto extent = block.payload.subspan(i * kExtentBytes, std::min<std::size_t>(kExtentBytes, block.payload.size() - i * kExtentBytes));
        const ExtentRow row{static_cast<std::uint32_t>(extent.size()), crc32c(extent)};
        std::memcpy(table + i * sizeof row, &row, sizeof row);
      }
      entry.extent_table_crc = crc32c({table, rows * sizeof(ExtentRow)});
    }
    block.header = reinterpret_cast<SlotHeader*>(arenas_[kHeaders].data() + block.locator.header_offset);
    *block.header = {block.locator.seq, entry.version.counter, size, size, entry.crc64, entry.id.value, entry.version.epoch, 0, 0, static_cast<std::uint16_t>(entry.dtype), 0};
    block.seal();
    return block;
  }
  std::byte* table_of(const PlainBlock& block) { return arenas_[block.locator.arena].data() + extent_table_offset(block.entry, block.locator); }

  void add_registered(std::span<const std::byte> target) { registered_.push_back(target); }
  void forget_registered() { registered_.clear(); }
  const std::byte* at(const RemoteRead& read) const { return arenas_[read.arena].data() + read.offset; }
  const std::list<PlainBlock>& blocks() const { return blocks_; }
  std::uint64_t reached = 0;  // questions asked

  Status reach(std::uint16_t arena, std::uint64_t offset, std::uint64_t size) override {
    ++reached;
    if (arena >= arenas_.size() || offset > arenas_[arena].size() || size > arenas_[arena].size() - offset) return Error(Code::kStale, cat("no bytes ", offset, " of arena ", arena));
    return {};
  }
  bool registered(std::span<const std::byte> target) override {
    return std::any_of(registered_.begin(), registered_.end(), [&](std::span<const std::byte> each) {
      return target.data() >= each.data() && target.data() + target.size() <= each.data() + each.size();
    });
  }

 private:
  std::vector<Bytes> arenas_;
  std::list<PlainBlock> blocks_;
  std::uint64_t header_next_ = 0;
  std::vector<std::span<const std::byte>> registered_;
};

class ReadPump {
 public:
  ReadPump(PlainWorld& world, const OneSidedOptions& options, std::size_t staging_bytes = std::size_t{2} << 20)
      : world_(world), options_(options), staging_(staging_bytes), reader_(staging_, options) {}

  OneSidedReader& reader() { return reader_; }
  const std::vector<RemoteRead>& given() const { return log_; }  // all of them, in order
  std::size_t outstanding() const { return under_way_.size(); }
  // Headers that were asked for before all of their payload was here: each proves nothing.
  std::uint64_t early_headers() const { return early_headers_; }
  bool tables_wrong = false;  // the test spoils extent tables
  bool headers_lost = false;  // reads of headers complete, and write nothing

  void begin(std::span<BlockRead> batch) {
    batch_ = batch;
    reader_.begin(batch, world_);
    log_.clear();
    asked_.assign(batch.size(), 0);
    here_.assign(batch.size(), 0);
    header_given_.assign(batch.size(), false);
  }

  // Asks for at most `room` reads.  returns: how many came
  std::size_t give(std::size_t room = 64) {
    std::vector<RemoteRead> out(room);
    const std::size_t count = reader_.next(out);
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_LT(bytes, options_.slice) << "a slice was given out together, and more";
      bytes += out[i].size;
      check(out[i]);
      under_way_.push_back(out[i]);
      log_.push_back(out[i]);
    }
    return count;
  }
  // The oldest `count` arrive.
  void arrive(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      const RemoteRead read = under_way_.front();
      under_way_.pop_front();
      bytes_out_ -= read.size;
      if (!headers_lost || read.arena != PlainWorld::kHeaders) std::memcpy(read.into, world_.at(read), read.size);
      arrived_.push_back(read);
      if (const auto item = item_of(read); item && read.arena != PlainWorld::kHeaders) here_[*item] += read.size;
    }
    reader_.completed(count);
  }
  bool consume() {
    if (!reader_.consume()) return false;
    arrived_.pop_front();
    return true;
  }

  // To the end: all at once, in order.
  void run(std::span<BlockRead> batch) {
    begin(batch);
    finish();
  }
  void finish() {
    while (!reader_.done()) {
      const std::size_t count = give();
      arrive(under_way_.size());
      bool any = count > 0;
      while (consume()) any = true;
      if (!any) {
        ADD_FAILURE() << "the reader stands still with " << reader_.unfinished() << " unfinished";
        return;
      }
    }
  }
  // A step of what `random` likes: give, arrive or consume, of any number.
  void step(Random& random) {
    switch (random.below(3)) {
      case 0: give(1 + static_cast<std::size_t>(random.below(70))); break;
      case 1:
        if (!under_way_.empty()) arrive(1 + static_cast<std::size_t>(random.below(under_way_.size())));
        break;
      default:
        for (std::uint64_t i = random.below(8); i > 0; --i) consume();
    }
  }
  void abandon(const Status& status) {
    reader_.abandon(status);
    under_way_.clear();
    arrived_.clear();
    bytes_out_ = 0;
  }

 private:
  // Payload bytes that the item needs: whole extents, or the whole of a block without a table (wire/FORMAT.md, "One-sided protocol").
  static std::uint64_t owed(const BlockRead& item) {
    const std::uint64_t size = item.entry.stored_size;
    if (item.range.size == 0) return 0;
    if (size <= kExtentBytes) return size;
    const std::uint64_t begin = item.range.offset / kExtentBytes * kExtentBytes, end = item.range.offset + item.range.size;
    return std::min(size, (end + kExtentBytes - 1) / kExtentBytes * kExtentBytes) - begin;
  }
  // Which item a read is of; nullopt: a table. Blocks of a batch are different ones.
  std::optional<std::size_t> item_of(const RemoteRead& read) const {
    for (std::size_t i = 0; i < batch_.size(); ++i) {
      const Locator& locator = batch_[i].locator;
      const bool header = read.arena == locator.header_arena && read.offset == locator.header_offset;
      const std::uint64_t end = locator.payload_offset + batch_[i].entry.stored_size;
      if (header || (read.arena == locator.arena && read.offset >= locator.payload_offset && read.offset < end)) return i;
    }
    return std::nullopt;
  }
  static bool overlap(const RemoteRead& one, const RemoteRead& other) { return one.into < other.into + other.size && other.into < one.into + one.size; }

  void check(const RemoteRead& read) {
    ASSERT_GT(read.size, 0U);
    ASSERT_LE(read.size, options_.slice);
    ASSERT_EQ(read.offset / kRegionBytes, (read.offset + read.size - 1) / kRegionBytes) << "a read crosses a region";
    ASSERT_LT(under_way_.size(), options_.reads_max);
    ASSERT_TRUE(bytes_out_ == 0 || bytes_out_ < options_.bytes_max);
    bytes_out_ += read.size;
    const bool in_staging = read.into >= staging_.data() && read.into + read.size <= staging_.data() + staging_.size();
    ASSERT_EQ(read.staged, in_staging);
    for (const auto* list : {&under_way_, &arrived_}) {
      for (const RemoteRead& other : *list) ASSERT_FALSE(overlap(read, other)) << "a landing place is given out twice";
    }
    const auto item = item_of(read);
    const bool header = read.arena == PlainWorld::kHeaders;
    if (header) {
      ASSERT_TRUE(item);
      ASSERT_FALSE(header_given_[*item]) << "a second header";
      header_given_[*item] = true;
      // Where a table was found wrong there is no payload to wait for.
      const bool after_table = asked_[*item] == 0 && tables_wrong;
      if (here_[*item] < owed(batch_[*item]) && !after_table) ++early_headers_;
    } else if (item) {  // else a table
      asked_[*item] += read.size;
      ASSERT_LE(asked_[*item], owed(batch_[*item]));
      if (!read.staged) {
        const auto target = batch_[*item].target;
        ASSERT_TRUE(read.into >= target.data() && read.into + read.size <= target.data() + target.size());
        ASSERT_EQ(read.offset - batch_[*item].locator.payload_offset - batch_[*item].range.offset, static_cast<std::uint64_t>(read.into - target.data()));
      }
    }
  }

  PlainWorld& world_;
  OneSidedOptions options_;
  Bytes staging_;
  OneSidedReader reader_;
  std::span<BlockRead> batch_;
  std::deque<RemoteRead> under_way_, arrived_;
  std::vector<RemoteRead> log_;
  std::vector<std::uint64_t> asked_, here_;  // payload bytes of each item
  std::vector<bool> header_given_;
  std::uint64_t bytes_out_ = 0;
  std::uint64_t early_headers_ = 0;
};

}  // namespace paramwire::testing
