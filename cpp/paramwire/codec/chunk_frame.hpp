// The frame around every encoded chunk, which planes and lz4 share: wire/FORMAT.md, "Codecs". Internal to codec/.
#pragma once

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/base/types.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace paramwire::frame {

inline constexpr std::size_t kHeadBytes = 5;  // check u32, form u8
enum class Form : std::uint8_t { kRaw = 0, kCoded = 1 };

// Which chunk a frame holds. All of it is under the check: swapped, cut, repeated and mislabelled chunks don't pass.
struct Place {
  CodecId codec;
  DType dtype;
  std::uint64_t index;
};

inline std::uint32_t check_of_place(const Place& place, std::size_t raw_size) noexcept {
  std::array<std::byte, 16> head;
  store_le(head.data(), place.index);
  store_le(head.data() + 8, static_cast<std::uint32_t>(raw_size));
  store_le(head.data() + 12, static_cast<std::uint16_t>(place.codec));
  store_le(head.data() + 14, static_cast<std::uint16_t>(place.dtype));
  return crc32c(head);
}

inline std::uint32_t check(const Place& place, std::span<const std::byte> raw) noexcept { return crc32c(raw, check_of_place(place, raw.size())); }

// The CRC-32C of raw bytes that have this check, alone.
inline std::uint32_t crc_of_raw(const Place& place, std::size_t raw_size, std::uint32_t check) noexcept {
  return check ^ crc32c_join(check_of_place(place, raw_size), 0, raw_size);
}

inline void write_head(std::byte* target, std::uint32_t check, Form form) noexcept {
  store_le(target, check);
  target[4] = static_cast<std::byte>(form);
}

// What Error a frame that can't be the one of `place` is; `why` names the plane where there is one.
inline Error corrupt(const Place& place, std::string_view why) {
  return Error(Code::kCorrupt, cat("chunk ", place.index, " (", codec_name(place.codec), ", ", dtype_name(place.dtype), "): ", why,
                                   "; fetch it again, or from another replica"));
}

// Sizes that encode() and decode() of every codec refuse.
inline Status check_raw_size(const Place& place, std::size_t size) {
  const std::size_t element = dtype_bits(place.dtype) < 8 ? 1 : dtype_bits(place.dtype) / 8;
  if (size >= 1 && size <= kChunkBytes && size % element == 0) return {};
  return Error(Code::kInvalid, cat("chunk ", place.index, " has ", size, " raw bytes; expected 1 to ", kChunkBytes, ", in whole elements of ", dtype_name(place.dtype)));
}

inline std::size_t write_raw(const Place& place, std::span<const std::byte> raw, std::byte* target) noexcept {
  write_head(target, check(place, raw), Form::kRaw);
  std::memcpy(target + kHeadBytes, raw.data(), raw.size());
  return kHeadBytes + raw.size();
}

// The form and the body of a frame. errors: kCorrupt: no frame, or the wrong number of raw bytes.
struct Parts {
  std::uint32_t check;
  Form form;
  std::span<const std::byte> body;
};
inline Result<Parts> read(const Place& place, std::span<const std::byte> stored, std::size_t raw_size) {
  if (stored.size() < kHeadBytes) return corrupt(place, cat("a frame of ", stored.size(), " bytes; at least ", kHeadBytes));
  const auto form = static_cast<std::uint8_t>(stored[4]);
  if (form > 1) return corrupt(place, cat("a frame of the unknown form ", form));
  Parts parts{load_le<std::uint32_t>(stored.data()), static_cast<Form>(form), stored.subspan(kHeadBytes)};
  if (parts.form == Form::kRaw && parts.body.size() != raw_size) {
    return corrupt(place, cat("a raw frame holds ", parts.body.size(), " bytes, not the chunk's ", raw_size));
  }
  return parts;
}

// The last step of every decoder. errors: kCorrupt.
inline Status verify(const Place& place, std::span<const std::byte> raw, std::uint32_t expected) {
  const std::uint32_t found = check(place, raw);
  if (found == expected) return {};
  return corrupt(place, cat("the decoded bytes have check ", found, ", the frame says ", expected,
                            ": damaged, or another chunk, dtype or size than the one that was encoded"));
}

}  // namespace paramwire::frame
