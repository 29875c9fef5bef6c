#include "gpu/case.hpp"

#include "support/host_kernels.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/codec/cast.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace paramwire::gpu {

namespace {

// Before and behind each buffer, and what they hold.
constexpr std::size_t kGuard = 256;
constexpr std::byte kGuardByte{0x5a};

template <typename T>
T load(std::span<const std::byte> bytes, std::size_t index) {
  T out{};
  std::memcpy(&out, bytes.data() + index * sizeof(T), sizeof(T));
  return out;
}

std::size_t block_bytes(const CaseBuffer& buffer) { return 2 * kGuard + buffer.offset + buffer.bytes.size(); }

// The buffer with guards around it, as it lies in memory.
std::vector<std::byte> block_of(const CaseBuffer& buffer) {
  std::vector<std::byte> out(block_bytes(buffer), kGuardByte);
  std::copy(buffer.bytes.begin(), buffer.bytes.end(), out.begin() + static_cast<std::ptrdiff_t>(kGuard + buffer.offset));
  return out;
}

Result<std::vector<std::byte>> contents_of(const CaseBuffer& buffer, std::span<const std::byte> block, std::string_view where) {
  const std::size_t begin = kGuard + buffer.offset, end = begin + buffer.bytes.size();
  for (std::size_t i = 0; i < block.size(); ++i) {
    if ((i >= begin && i < end) || block[i] == kGuardByte) continue;
    return Error(Code::kInternal, cat(where, ": byte ", static_cast<std::int64_t>(i) - static_cast<std::int64_t>(begin), " of buffer '", buffer.name, "' of ", buffer.bytes.size(),
                                      " bytes was written"));
  }
  return std::vector<std::byte>(block.begin() + static_cast<std::ptrdiff_t>(begin), block.begin() + static_cast<std::ptrdiff_t>(end));
}

Places places_of(const Case& it, std::vector<std::uint64_t> bases) {
  for (std::size_t i = 0; i < bases.size(); ++i) bases[i] += kGuard + it.buffers[i].offset;
  return {it.buffers, std::move(bases)};
}

// The bytes that a run starts from: a patched buffer has its addresses.
std::vector<std::vector<std::byte>> blocks_of(const Case& it, const Places& places) {
  std::vector<std::vector<std::byte>> out;
  for (const CaseBuffer& buffer : it.buffers) {
    out.push_back(block_of(buffer));
    if (it.patch && buffer.name == it.patched) it.patch(places, std::span(out.back()).subspan(kGuard + buffer.offset, buffer.bytes.size()));
  }
  return out;
}

}  // namespace

std::size_t type_bytes(Type type) noexcept {
  switch (type) {
    case Type::kU8: return 1;
    case Type::kU16:
    case Type::kBF16:
    case Type::kF16: return 2;
    case Type::kU32:
    case Type::kF32: return 4;
    case Type::kU64:
    case Type::kF64: break;
  }
  return 8;
}

std::string_view type_name(Type type) noexcept {
  constexpr std::string_view kNames[] = {"u8", "u16", "u32", "u64", "f32", "f64", "bf16", "f16"};
  return kNames[static_cast<std::size_t>(type)];
}

double element(Type type, std::span<const std::byte> bytes, std::size_t index) {
  switch (type) {
    case Type::kU8: return static_cast<double>(load<std::uint8_t>(bytes, index));
    case Type::kU16: return static_cast<double>(load<std::uint16_t>(bytes, index));
    case Type::kU32: return static_cast<double>(load<std::uint32_t>(bytes, index));
    case Type::kU64: return static_cast<double>(load<std::uint64_t>(bytes, index));
    case Type::kF32: return static_cast<double>(load<float>(bytes, index));
    case Type::kF64: return load<double>(bytes, index);
    case Type::kBF16: return static_cast<double>(std::bit_cast<float>(f32_from_bf16(load<std::uint16_t>(bytes, index))));
    case Type::kF16: break;
  }
  return static_cast<double>(std::bit_cast<float>(f32_from_f16(load<std::uint16_t>(bytes, index))));
}

std::uint64_t Places::address(std::string_view name) const {
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i].name == name) return addresses_[i];
  }
  return 0;  // a kernel that follows it fails at once
}

const CaseBuffer& Case::buffer(std::string_view wanted) const {
  return *std::find_if(buffers.begin(), buffers.end(), [&](const CaseBuffer& each) { return each.name == wanted; });
}

Result<Outcome> run_on_device(const Bed& bed, const Case& it) {
  const cuda::Current current(*bed.device);
  PARAMWIRE_CHECK(current.status());
  std::vector<cuda::DeviceMemory> memories;
  std::vector<std::uint64_t> bases;
  for (const CaseBuffer& buffer : it.buffers) {
    PARAMWIRE_TRY(memory, bed.allocate(block_bytes(buffer)));
    bases.push_back(memory.address());
    memories.push_back(std::move(memory));
  }
  const Places places = places_of(it, std::move(bases));
  const auto blocks = blocks_of(it, places);
  for (std::size_t i = 0; i < blocks.size(); ++i) PARAMWIRE_CHECK(bed.stream.to_device(memories[i].address(), blocks[i]));
  for (const auto& step : it.steps) {
    const BoundLaunch launch = step(places);
    PARAMWIRE_CHECK(bed.module->launch(bed.stream.handle(), launch.kernel, launch.launch, launch.args.data(), launch.args.size()));
  }
  Outcome out;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    PARAMWIRE_TRY(block, bed.download(memories[i].address(), blocks[i].size()));
    PARAMWIRE_TRY(contents, contents_of(it.buffers[i], block, it.name));
    out.push_back(std::move(contents));
  }
  return out;
}

Result<Outcome> run_on_host(testing::LaneExecutor& executor, const Case& it, std::uint64_t seed) {
  std::vector<Buffer> memories;
  std::vector<std::uint64_t> bases;
  for (const CaseBuffer& buffer : it.buffers) {
    // Buffer aligns to 64; device memory to 256.
    PARAMWIRE_TRY(memory, Buffer::allocate(block_bytes(buffer) + 256));
    bases.push_back((reinterpret_cast<std::uintptr_t>(memory.data()) + 255) / 256 * 256);
    memories.push_back(std::move(memory));
  }
  const std::vector<std::uint64_t> begins = bases;
  const Places places = places_of(it, std::move(bases));
  const auto blocks = blocks_of(it, places);
  for (std::size_t i = 0; i < blocks.size(); ++i) std::memcpy(reinterpret_cast<void*>(begins[i]), blocks[i].data(), blocks[i].size());  // NOLINT: within `memories`
  for (const auto& step : it.steps) {
    const BoundLaunch launch = step(places);
    const std::string fault =
        testing::run_host_kernel(executor, cuda::kernel_name(launch.kernel), launch.launch, launch.args.data(), launch.args.size(), seed);
    if (!fault.empty()) return Error(Code::kInternal, cat(it.name, ": ", fault));
  }
  Outcome out;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const std::span block(reinterpret_cast<const std::byte*>(begins[i]), blocks[i].size());  // NOLINT: within `memories`
    PARAMWIRE_TRY(contents, contents_of(it.buffers[i], block, it.name));
    out.push_back(std::move(contents));
  }
  return out;
}

std::vector<cuda::Kernel> kernels_of(const Case& it) {
  const Places nowhere(it.buffers, std::vector<std::uint64_t>(it.buffers.size(), 4096));
  std::vector<cuda::Kernel> out;
  for (const auto& step : it.steps) out.push_back(step(nowhere).kernel);
  return out;
}

std::string difference(const CaseBuffer& buffer, std::span<const std::byte> actual, std::span<const std::byte> wanted) {
  if (actual.size() != wanted.size()) return cat(buffer.name, ": ", actual.size(), " bytes, expected ", wanted.size());
  const bool floating = buffer.type >= Type::kF32 && !buffer.bits;
  const std::size_t bytes = type_bytes(buffer.type);
  for (std::size_t i = 0; i < buffer.count(); ++i) {
    if (std::memcmp(actual.data() + i * bytes, wanted.data() + i * bytes, bytes) == 0) continue;
    const double a = element(buffer.type, actual, i), b = element(buffer.type, wanted, i);
    if (!floating) return cat(buffer.name, "[", i, "]: ", a, " instead of ", b, ", to the bit");
    if (std::isnan(a) && std::isnan(b)) continue;
    const double most = buffer.bounds.empty() ? buffer.absolute + buffer.relative * std::max(std::abs(a), std::abs(b)) : buffer.bounds[i];
    if (a == b || (std::isfinite(a) && std::isfinite(b) && std::abs(a - b) <= most)) continue;
    return cat(buffer.name, "[", i, "]: ", a, " instead of ", b, ", which is ", std::abs(a - b), " off and may be ", most);
  }
  return {};
}

}  // namespace paramwire::gpu
