// A block of 64-byte aligned heap memory that says whether it could be had. Move-only; one owner.
#pragma once

#include "paramwire/base/error.hpp"

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>

namespace paramwire {

class Buffer {
 public:
  Buffer() = default;
  // Uninitialised. errors: kBackpressure naming the size when the allocator refuses.
  static Result<Buffer> allocate(std::size_t size);

  std::byte* data() noexcept { return memory_.get(); }
  const std::byte* data() const noexcept { return memory_.get(); }
  std::size_t size() const noexcept { return size_; }
  std::span<std::byte> span() noexcept { return {memory_.get(), size_}; }
  std::span<const std::byte> span() const noexcept { return {memory_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t size_ = 0;
};

}  // namespace paramwire
