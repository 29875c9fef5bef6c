// What a store of very many tiny tensors costs beside their bytes: at most 128 B a tensor (DESIGN section 4, "Small blocks").
// A process of its own, so that nothing else is on the heap. Prints its figures; exits 1 past the bound.
//
//   store_memory_test [--tensors=130000]
#include "paramwire/base/crc.hpp"
#include "paramwire/base/env.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/store/block_store.hpp"
#include "paramwire/store/memory_tier.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <malloc.h>
#include <unistd.h>

namespace paramwire {
namespace {

constexpr std::uint64_t kPayload = 64;
constexpr double kBoundBytes = 128.0;

// glibc's count of bytes in use, allocator overhead included. Sanitizers replace malloc: 0 there.
std::uint64_t heap_bytes() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

std::uint64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

Status publish_all(BlockStore& store, std::uint64_t tensors, std::uint8_t fill) {
  const PublishId id{1, fill};
  PARAMWIRE_CHECK(store.publish_start(id, true, std::nullopt, 0));
  for (std::uint64_t i = 0; i < tensors; ++i) {
    const std::string name = cat("layers.", i, ".w");
    PARAMWIRE_TRY(slot, store.put_begin(id, BlockSpec{name, DType::kU8, Shape{kPayload}, Shard::whole()}, 0));
    std::ranges::fill(slot.payload, std::byte{fill});
    const std::uint32_t extent = crc32c(slot.payload);
    PARAMWIRE_CHECK(store.put_seal(id, slot, crc64(slot.payload), {&extent, 1}, 0));
  }
  PARAMWIRE_CHECK(store.finish(id, [](const std::optional<Version>&, Version, const Digest&) { return Status(); }, 0));
  return {};
}

int run(std::uint64_t tensors) {
  auto tier = MemoryTier::open(MemoryTier::Backing::kPrivate, {});
  if (!tier.ok()) return std::printf("%s\n", tier.error().to_string().c_str()), 1;
  BlockStoreOptions options;
  options.epoch = 180'000'000;  // as drawn from the clock: the five-byte varint
  BlockStore store(**tier, nullptr, options);
  const std::uint64_t heap_before = heap_bytes(), resident_before = resident_bytes();
  Micros since = steady_clock().now();
  for (std::uint8_t round = 1; round <= 5; ++round) {
    if (const Status status = publish_all(store, tensors, round); !status.ok()) {
      return std::printf("%s\n", status.error().to_string().c_str()), 1;
    }
    malloc_trim(0);
    const Micros took = steady_clock().now() - since;
    since = steady_clock().now();
    // Rounds change every block: n readable versions cost n times the whole. The slots of the one that was staged beside
    // the full number of readable ones are kept for the next publish.
    const double versions = static_cast<double>(std::min<std::uint64_t>(round, options.retained_versions + 1));
    const double readable = static_cast<double>(std::min<std::uint64_t>(round, options.retained_versions));
    const double count = static_cast<double>(tensors) * versions;
    const double payload = static_cast<double>(kPayload) * readable / versions;
    const double heap = static_cast<double>(heap_bytes() - heap_before), tier_bytes = static_cast<double>((*tier)->used_bytes());
    const double beside = (heap + tier_bytes) / count - payload;
    const double resident = static_cast<double>(resident_bytes() - resident_before) / count - payload;
    std::printf("publish %d: %llu tensors x %.0f versions, %.1f B each beside their bytes (heap %.1f, tier %.1f), resident %.1f, %.2f s\n", round,
                static_cast<unsigned long long>(tensors), versions, beside, heap / count, tier_bytes / count - payload, resident,
                static_cast<double>(took) / 1e6);
    if (beside > kBoundBytes) return std::printf("over the bound of %.0f B a tensor\n", kBoundBytes), 1;
  }
  return 0;
}

}  // namespace
}  // namespace paramwire

int main(int argc, char** argv) {
  std::uint64_t tensors = 130'000;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument(argv[i]);
    if (!argument.starts_with("--tensors=")) return std::printf("usage: store_memory_test [--tensors=N]\n"), 2;
    tensors = std::strtoull(argv[i] + 10, nullptr, 10);
  }
  return paramwire::run(tensors);
}
