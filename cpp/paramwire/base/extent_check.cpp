#include "paramwire/base/extent_check.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"

#include <optional>

namespace paramwire {

Status verify_extents(std::span<const std::byte> bytes, std::span<const ExtentCheck> checks) {
  for (const ExtentCheck& check : checks) {
    if (check.offset > bytes.size() || check.size > bytes.size() - check.offset) {
      return Error(Code::kInvalid, cat("an extent of ", check.size, " bytes at offset ", check.offset, " of a target of ", bytes.size(), ": these are the checks of another fetch"));
    }
  }
  std::optional<ExtentCheck> first;
  std::uint32_t found = 0;
  std::size_t wrong = 0;
  for (const ExtentCheck& check : checks) {
    const std::uint32_t crc = crc32c(bytes.subspan(static_cast<std::size_t>(check.offset), check.size));
    if (crc == check.crc32c) continue;
    if (++wrong > 1) continue;
    first = check;
    found = crc;
  }
  if (!first) return {};
  return Error(Code::kCorrupt, cat("CRC-32C of the extent of ", first->size, " bytes at offset ", first->offset, ": expected ", hex32(first->crc32c), ", the bytes have ", hex32(found), " (",
                                   wrong, " of ", checks.size(), " extents are wrong): fetch them again, or from another replica"));
}

}  // namespace paramwire
