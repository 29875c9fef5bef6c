#include "paramwire/base/buffer.hpp"

#include "paramwire/base/text.hpp"

namespace paramwire {

Result<Buffer> Buffer::allocate(std::size_t size) {
  constexpr std::size_t kAlignment = 64;
  const std::size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
  Buffer buffer;
  buffer.memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded == 0 ? kAlignment : rounded)));
  if (!buffer.memory_) {
    return Error(Code::kBackpressure, cat("no memory for a buffer of ", human_bytes(size), " (", size, " bytes)"));
  }
  buffer.size_ = size;
  return buffer;
}

}  // namespace paramwire
