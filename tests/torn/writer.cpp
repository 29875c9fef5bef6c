#include "torn/world.hpp"

#include "paramwire/base/crc.hpp"

#include <algorithm>
#include <cstring>

namespace paramwire::torn {

namespace {
constexpr std::uint64_t kLine = 64;
constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15U;  // 2^64 / golden ratio: distinct words for distinct places and versions
}  // namespace

void fill_payload(std::span<std::byte> out, BlockId id, std::uint64_t version, std::uint64_t offset) {
  const std::uint64_t base = (version * kOdd) ^ (id.value << 40);
  std::uint64_t place = offset / 8;
  std::size_t at = 0;
  for (; at + 8 <= out.size(); at += 8) {
    const std::uint64_t word = base + place++ * 0xd1342543de82ef95U;
    std::memcpy(out.data() + at, &word, 8);
  }
  const std::uint64_t word = base + place * 0xd1342543de82ef95U;
  std::memcpy(out.data() + at, &word, out.size() - at);
}

Status Writer::add_block(std::uint64_t size) {
  Block block;
  block.id = {blocks_.size() + 1};
  block.size = size;
  PARAMWIRE_TRY(slot, slots_.open(size));
  block.slot = slot;
  block.entry.id = block.id;
  block.entry.tensor = "block";
  block.entry.raw_size = block.entry.stored_size = size;
  blocks_.push_back(block);
  block_ = &blocks_.back();
  bytes_.resize(size);
  fill_payload(bytes_, block.id, ++version_, 0);
  std::memcpy(slots_.payload(slot).data(), bytes_.data(), size);
  seal();
  return {};
}

void Writer::step() {
  if (!status_.ok()) return;
  switch (stage_) {
    case Stage::kIdle:
      choose();
      if (wrong_ == Wrong::kEarlyWriter) {
        stage_ = Stage::kTooEarly;
        write_line();
        return;
      }
      slots_.withdraw(block_->slot);
      stage_ = Stage::kWithdrawn;
      return;
    case Stage::kTooEarly:
      if (line_ < (lines_ + 1) / 2) return write_line();
      slots_.withdraw(block_->slot);
      stage_ = Stage::kWithdrawn;
      return;
    case Stage::kWithdrawn: return reopen();
    case Stage::kWriting:
      if (line_ < lines_) return write_line();
      return seal();
  }
}

void Writer::choose() {
  block_ = &blocks_[static_cast<std::size_t>(random_.below(blocks_.size()))];
  bytes_.resize(block_->size);
  fill_payload(bytes_, block_->id, ++version_, 0);
  line_ = 0;
  lines_ = (block_->size + kLine - 1) / kLine;
  rotation_ = random_.below(lines_);  // between two fences stores have no order
}

// The slot of the former version goes back and one is taken for the next: mostly the same one, now and then another block's of before.
void Writer::reopen() {
  const SlotIndex before = block_->slot;
  const bool other = wrong_ != Wrong::kEarlyWriter && random_.below(4) == 0;
  if (!other) slots_.close(before);
  auto slot = slots_.open(block_->size);
  if (!slot.ok()) {
    status_ = slot.error();
    return;
  }
  if (other) slots_.close(before);
  block_->slot = *slot;
  line_ = 0;
  stage_ = Stage::kWriting;
}

void Writer::write_line() {
  const std::uint64_t at = (line_++ + rotation_) % lines_ * kLine;
  const std::size_t size = std::min(kLine, block_->size - at);
  std::memcpy(slots_.payload(block_->slot).data() + at, bytes_.data() + at, size);
}

void Writer::seal() {
  std::vector<std::uint32_t> extents;
  for (std::uint64_t at = 0; block_->size > kExtentBytes && at < block_->size; at += kExtentBytes) {
    extents.push_back(crc32c(std::span(bytes_).subspan(at, std::min<std::uint64_t>(kExtentBytes, block_->size - at))));
  }
  block_->entry.version = {1, version_};
  block_->entry.crc64 = crc64(bytes_);
  block_->entry.extent_table_crc = slots_.seal(block_->slot, {block_->id, block_->entry.version, DType::kU8, CodecId::kRaw, block_->entry.raw_size, block_->entry.crc64}, extents);
  block_->locator = slots_.locator(block_->slot);
  stage_ = Stage::kIdle;
}

}  // namespace paramwire::torn
