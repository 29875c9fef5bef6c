// Speed of copy-and-check beside glibc's memcpy in the same run: one JSON object a line, to stdout.
//
//   crc_bench [--body NAME] [--huge] [--rounds N]
//
// --body    vpclmulqdq, isa-l or atomic-words; without it, what the library chooses on this machine
// --huge    ask for transparent huge pages under the buffers
// --rounds  rounds a case (default 15)
//
// case "cold": source and target move on through 1 GiB each, so neither is in any cache (guests report last-level
// caches of several hundred MiB; a slot comes round again only after 2 GiB of other traffic). case "hot": one pair of
// buffers. A round times memcpy and then the function over the same number of bytes; figures are medians over rounds.
// Every CRC is compared with ISA-L's of the same bytes, every last target with its source; a wrong answer ends the
// run with exit code 1 and without a figure. For the functions that only read, memcpy is still the yardstick.
#include "paramwire/base/crc.hpp"
#include "paramwire/base/crc_bodies.hpp"
#include "paramwire/base/env.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <sys/mman.h>
#include <vector>

namespace {

using namespace paramwire;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB;
constexpr std::size_t kSide = 1024 * kMiB;           // bytes that one side rotates over
constexpr std::size_t kColdRoundBytes = 256 * kMiB;  // bytes a cold round moves
constexpr std::size_t kHotRoundBytes = 16 * kMiB;    // bytes a hot round moves,
constexpr std::size_t kHotRoundCalls = 20000;        // in at most so many calls

constexpr std::size_t kHotSizes[] = {64, 100, 512, 4 * kKiB, 16 * kKiB, 64 * kKiB, 128 * kKiB, 256 * kKiB, kMiB};
constexpr std::size_t kColdSizes[] = {64 * kKiB, kMiB, 16 * kMiB, 256 * kMiB};

enum class What { kCopy64, kCopyExtents, kCopy32, kCrc64, kCrc32 };
struct Function {
  std::string_view name;
  What what;
};
constexpr Function kFunctions[] = {{"copy_crc64", What::kCopy64},
                                   {"copy_crc64_extents", What::kCopyExtents},
                                   {"copy_crc32c", What::kCopy32},
                                   {"crc64", What::kCrc64},
                                   {"crc32c", What::kCrc32}};

struct Sides {
  std::byte* source;
  std::byte* target;
};

std::uint64_t call(const crc::Body& body, What what, Sides at, std::size_t size, std::uint32_t* extents) {
  const bool stream = size >= kStreamFromBytes;
  switch (what) {
    case What::kCopy64: return body.copy_crc64(at.target, at.source, size, 0, stream);
    case What::kCopyExtents: return body.copy_crc64_extents(at.target, at.source, size, extents, stream);
    case What::kCopy32: return body.copy_crc32c(at.target, at.source, size, 0, stream);
    case What::kCrc64: return body.crc64(at.source, size, 0);
    case What::kCrc32: return body.crc32c(at.source, size, 0);
  }
  return 0;
}

std::uint64_t expected(What what, const std::byte* source, std::size_t size) {
  const bool is32 = what == What::kCopy32 || what == What::kCrc32;
  return is32 ? crc::kIsalBody.crc32c(source, size, 0) : crc::kIsalBody.crc64(source, size, 0);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// One line; false on a wrong answer.
bool run_case(const crc::Body& body, const Function& function, std::size_t size, bool cold, std::size_t rounds,
              Sides sides) {
  const std::size_t slots = cold ? kSide / size : 1;
  const std::size_t calls = cold ? std::max<std::size_t>(1, kColdRoundBytes / size)
                                 : std::clamp<std::size_t>(kHotRoundBytes / size, 1, kHotRoundCalls);
  const auto slot = [&](std::size_t index) { return Sides{sides.source + index * size, sides.target + index * size}; };
  std::vector<std::uint64_t> answers(slots);
  for (std::size_t i = 0; i < slots; ++i) answers[i] = expected(function.what, slot(i).source, size);
  std::vector<std::uint32_t> extents(extent_count(size));

  std::vector<double> copies, checks;
  std::size_t next = 0;
  std::uint64_t wrong = 0;
  for (std::size_t round = 0; round <= rounds; ++round) {  // the first is not counted
    Clock::time_point start = Clock::now();
    for (std::size_t i = 0; i < calls; ++i, next = (next + 1) % slots) {
      const Sides at = slot(next);
      std::memcpy(at.target, at.source, size);
      asm volatile("" : : "r"(at.target) : "memory");
    }
    if (round > 0) copies.push_back(seconds_since(start));
    Sides last{};
    start = Clock::now();
    for (std::size_t i = 0; i < calls; ++i, next = (next + 1) % slots) {
      last = slot(next);
      wrong |= call(body, function.what, last, size, extents.data()) ^ answers[next];
    }
    if (round > 0) checks.push_back(seconds_since(start));
    const bool copied = function.what != What::kCrc64 && function.what != What::kCrc32;
    if (copied && std::memcmp(last.target, last.source, size) != 0) wrong = 1;
    if (copied) std::memset(last.target, 0, size);
  }
  if (wrong != 0) {
    std::fprintf(stderr, "crc_bench: %s of %zu bytes by %s gave a wrong answer\n", function.name.data(), size,
                 body.name.data());
    return false;
  }
  const double bytes = static_cast<double>(calls * size);
  const double gb = bytes / median(checks) * 1e-9, memcpy_gb = bytes / median(copies) * 1e-9;
  std::printf("{\"bench\": \"crc\", \"function\": \"%s\", \"body\": \"%s\", \"case\": \"%s\", \"bytes\": %zu, "
              "\"ns_per_call\": %.1f, \"gb_per_s\": %.2f, \"memcpy_gb_per_s\": %.2f, \"ratio\": %.2f}\n",
              function.name.data(), body.name.data(), cold ? "cold" : "hot", size,
              median(checks) / static_cast<double>(calls) * 1e9, gb, memcpy_gb, gb / memcpy_gb);
  std::fflush(stdout);
  return true;
}

std::byte* map_side(bool huge) {
  void* side = mmap(nullptr, kSide, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (side == MAP_FAILED) return nullptr;
  if (huge) madvise(side, kSide, MADV_HUGEPAGE);
  return static_cast<std::byte*>(side);
}

const crc::Body* find_body(std::string_view name) {
  for (const crc::Body* body : {crc::vpclmulqdq_body(), &crc::kIsalBody, &crc::kAtomicBody}) {
    if (body != nullptr && body->name == name) return body;
  }
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  const crc::Body* body = &crc::chosen_body();
  bool huge = false;
  std::size_t rounds = 15;
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    if (option == "--huge") {
      huge = true;
    } else if (option == "--body" && i + 1 < argc) {
      body = find_body(argv[++i]);
    } else if (option == "--rounds" && i + 1 < argc) {
      rounds = std::clamp<std::size_t>(std::strtoul(argv[++i], nullptr, 10), 1, 1000);
    } else {
      body = nullptr;
    }
    if (body == nullptr) {
      std::fprintf(stderr,
                   "usage: crc_bench [--body vpclmulqdq|isa-l|atomic-words] [--huge] [--rounds N]\n"
                   "crc_bench: no such option, or no such body on this machine: %s\n",
                   argv[i]);
      return 2;
    }
  }
  const Sides sides{map_side(huge), map_side(huge)};
  if (sides.source == nullptr || sides.target == nullptr) {
    std::fprintf(stderr, "crc_bench: no memory for two sides of %zu bytes\n", kSide);
    return 1;
  }
  Random random(1);
  for (std::size_t at = 0; at < kSide; at += sizeof(std::uint64_t)) {
    const std::uint64_t word = random.next();
    std::memcpy(sides.source + at, &word, sizeof word);
  }
  std::memset(sides.target, 1, kSide);

  for (const Function& function : kFunctions) {
    for (const std::size_t size : kHotSizes) {
      if (!run_case(*body, function, size, false, rounds, sides)) return 1;
    }
    for (const std::size_t size : kColdSizes) {
      if (!run_case(*body, function, size, true, rounds, sides)) return 1;
    }
  }
  munmap(sides.source, kSide);
  munmap(sides.target, kSide);
  return 0;
}
