#include "sim/client.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cstring>

namespace paramwire::sim {

Result<const std::byte*> SimMemory::place(std::uint16_t arena, std::uint64_t offset, std::uint64_t size) {
  SimServer& server = rebased_ && world_.server() != nullptr ? *world_.server() : mapped_;
  if (rebased_ && !server.alive()) return Error(Code::kUnreachable, "the server's memory is gone");
  const std::uint64_t limit = server.tier().limit_bytes();
  if (arena != 0 || offset > limit || size > limit - offset) return Error(Code::kStale, cat("no bytes at ", offset, " of arena ", arena));
  return static_cast<const std::byte*>(server.tier().at(arena, offset));
}

void SimMemory::between_lines(std::uint64_t line) {
  Random& random = world_.random();
  if (line == stall_at_) {
    world_.coverage().faults["reader stalls between two lines"]++;
    world_.step_passive(static_cast<Micros>(300 + random.below(12'000)), 600);
  } else if (line % 4 == 0 && random.below(16) == 0) {
    world_.step_passive(100, 1 + random.below(3));
  }
}

Status SimMemory::copy(std::uint16_t arena, std::uint64_t offset, std::span<std::byte> target) {
  const std::uint64_t lines = (target.size() + 63) / 64;
  stall_at_ = world_.random().chance(20) ? world_.random().below(lines + 1) : ~std::uint64_t{0};
  for (std::uint64_t line = 0; line < lines; ++line) {
    const std::size_t at = static_cast<std::size_t>(line * 64);
    const std::size_t n = std::min<std::size_t>(64, target.size() - at);
    PARAMWIRE_TRY(from, place(arena, offset + at, n));
    std::memcpy(target.data() + at, from, n);
    between_lines(line);
  }
  if (stall_at_ == lines) between_lines(lines);
  return {};
}

// The CRC runs over the bytes that were copied, as the contract says.
Result<std::uint64_t> SimMemory::copy_crc64(std::uint16_t arena, std::uint64_t offset, std::span<std::byte> target, std::uint64_t before) {
  PARAMWIRE_CHECK(copy(arena, offset, target));
  return crc64(target, before);
}

Result<std::uint32_t> SimMemory::copy_crc32c(std::uint16_t arena, std::uint64_t offset, std::span<std::byte> target) {
  PARAMWIRE_CHECK(copy(arena, offset, target));
  return crc32c(target);
}

Result<SlotHeader> SimMemory::header(std::uint16_t arena, std::uint64_t offset) {
  world_.step_passive(50, world_.random().below(2));
  PARAMWIRE_TRY(from, place(arena, offset, sizeof(SlotHeader)));
  SlotHeader header;
  std::memcpy(&header, from, sizeof header);
  return header;
}

}  // namespace paramwire::sim
