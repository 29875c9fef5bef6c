// A device of a world with what every program for a GPU uses: kernels loaded, one stream.
#pragma once

#include "gpu/world.hpp"

#include "paramwire/cuda/device.hpp"
#include "paramwire/cuda/module.hpp"

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace paramwire::gpu {

struct Bed {
  cuda::DevicePtr device;
  std::shared_ptr<const cuda::Module> module;
  cuda::Stream stream;

  static Result<Bed> open(const World& world) {
    Bed out;
    PARAMWIRE_TRY(device, cuda::Device::open(world.driver, 0));
    out.device = device;
    PARAMWIRE_TRY(module, cuda::Module::load(device));
    out.module = module;
    PARAMWIRE_TRY(stream, cuda::Stream::create(device));
    out.stream = std::move(stream);
    return out;
  }

  Result<cuda::DeviceMemory> allocate(std::uint64_t size) const { return cuda::DeviceMemory::allocate(device, size, "a program's buffer"); }
  // Copies `bytes` there, and waits.
  Result<cuda::DeviceMemory> upload(std::span<const std::byte> bytes) const {
    PARAMWIRE_TRY(memory, allocate(bytes.size()));
    const cuda::Current current(*device);
    PARAMWIRE_CHECK(current.status());
    PARAMWIRE_CHECK(stream.to_device(memory.address(), bytes));
    PARAMWIRE_CHECK(stream.synchronize());
    return memory;
  }
  Result<std::vector<std::byte>> download(CUdeviceptr from, std::uint64_t size) const {
    std::vector<std::byte> out(static_cast<std::size_t>(size));
    const cuda::Current current(*device);
    PARAMWIRE_CHECK(current.status());
    PARAMWIRE_CHECK(stream.to_host(out, from));
    PARAMWIRE_CHECK(stream.synchronize());
    return out;
  }
  template <typename T>
  Result<std::vector<T>> download_as(const cuda::DeviceMemory& memory, std::size_t count) const {
    std::vector<T> out(count);
    const cuda::Current current(*device);
    PARAMWIRE_CHECK(current.status());
    PARAMWIRE_CHECK(stream.to_host(std::as_writable_bytes(std::span<T>(out)), memory.address()));
    PARAMWIRE_CHECK(stream.synchronize());
    return out;
  }
};

}  // namespace paramwire::gpu
