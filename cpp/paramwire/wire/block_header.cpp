#include "paramwire/wire/block_header.hpp"

#include "paramwire/base/crc.hpp"

namespace paramwire {

std::uint32_t slot_header_crc(const SlotHeader& header) noexcept {
  return crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(SlotHeader, header_crc)));
}

const char* verify(const SlotHeader& header) noexcept {
  if (header.seq % 2 != 0) return "seq odd";
  if (header.seq == 0) return "seq zero";
  if (header.header_crc != slot_header_crc(header)) return "header CRC";
  if (header.block == 0) return "block zero";
  if (header.epoch == 0 || header.version_counter == 0) return "version zero";
  if (header.dtype == 0 || header.dtype > kDTypeMax) return "dtype";
  if (header.codec > kCodecMax) return "codec";
  if (!stored_size_valid(static_cast<CodecId>(header.codec), header.raw_size, header.stored_size)) return "stored size";
  return nullptr;
}

}  // namespace paramwire
