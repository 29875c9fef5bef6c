// Every body of base/crc against a bitwise reference that shares nothing with them, and the promises of crc.hpp: one
// load of each byte, nothing touched outside source and target, chaining.
#include "paramwire/base/crc.hpp"
#include "paramwire/base/crc_bodies.hpp"
#include "paramwire/base/crc_polynomial.hpp"
#include "paramwire/base/env.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace paramwire {
namespace {

constexpr std::uint64_t kSeed = 20090812;

// One bit at a time, straight from the catalogue's parameters (reveng.sourceforge.io/crc-catalogue: CRC-64/XZ,
// CRC-32/ISCSI; both reflected, initial value and final xor all ones). `poly` is reflected.
template <class T>
T reference(const std::byte* bytes, std::size_t size, T poly, T before) {
  T state = static_cast<T>(~before);
  for (std::size_t i = 0; i < size; ++i) {
    state ^= static_cast<T>(bytes[i]);
    for (int bit = 0; bit < 8; ++bit) state = static_cast<T>((state >> 1) ^ ((state & 1) != 0 ? poly : 0));
  }
  return static_cast<T>(~state);
}
std::uint64_t reference64(const std::byte* bytes, std::size_t size, std::uint64_t before = 0) {
  return reference<std::uint64_t>(bytes, size, 0xC96C5795D7870F42, before);
}
std::uint32_t reference32(const std::byte* bytes, std::size_t size, std::uint32_t before = 0) {
  return reference<std::uint32_t>(bytes, size, 0x82F63B78, before);
}

std::vector<std::byte> random_bytes(std::size_t size, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::byte> bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random.next());
  return bytes;
}

std::vector<const crc::Body*> bodies() {
  std::vector<const crc::Body*> all = {&crc::kIsalBody, &crc::kAtomicBody};
  if (crc::vpclmulqdq_body() != nullptr) all.push_back(crc::vpclmulqdq_body());
  return all;
}

class CrcBody : public testing::TestWithParam<const crc::Body*> {
 protected:
  const crc::Body& body() const { return *GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Each, CrcBody, testing::ValuesIn(bodies()), [](const auto& each) {
  std::string name(each.param->name);
  std::erase(name, '-');
  return name;
});

// ---------------------------------------------------------------- known answers

TEST_P(CrcBody, GivesTheCatalogueCheckValues) {
  const auto* text = reinterpret_cast<const std::byte*>("123456789");
  EXPECT_EQ(body().crc64(text, 9, 0), 0x995DC9BBDF1939FAU);
  EXPECT_EQ(body().crc32c(text, 9, 0), 0xE3069283U);
  std::byte copy[9];
  EXPECT_EQ(body().copy_crc64(copy, text, 9, 0, false), 0x995DC9BBDF1939FAU);
  EXPECT_EQ(body().copy_crc32c(copy, text, 9, 0, true), 0xE3069283U);
}

// RFC 3720, appendix B.4: 32 bytes of zeros, of ones, incrementing, decrementing (CRCs there are in wire order).
TEST_P(CrcBody, GivesTheVectorsOfRfc3720) {
  std::vector<std::byte> bytes(32);
  EXPECT_EQ(body().crc32c(bytes.data(), 32, 0), 0x8A9136AAU);
  std::fill(bytes.begin(), bytes.end(), std::byte{0xFF});
  EXPECT_EQ(body().crc32c(bytes.data(), 32, 0), 0x62A8AB43U);
  for (std::size_t i = 0; i < 32; ++i) bytes[i] = static_cast<std::byte>(i);
  EXPECT_EQ(body().crc32c(bytes.data(), 32, 0), 0x46DD794EU);
  for (std::size_t i = 0; i < 32; ++i) bytes[i] = static_cast<std::byte>(31 - i);
  EXPECT_EQ(body().crc32c(bytes.data(), 32, 0), 0x113FDB5CU);
}

TEST_P(CrcBody, NoBytesLeaveTheValueBeforeAndTouchNothing) {
  EXPECT_EQ(body().crc64(nullptr, 0, 0), 0U);
  EXPECT_EQ(body().crc64(nullptr, 0, 77), 77U);
  EXPECT_EQ(body().crc32c(nullptr, 0, 77), 77U);
  for (const bool stream : {false, true}) {
    EXPECT_EQ(body().copy_crc64(nullptr, nullptr, 0, 77, stream), 77U);
    EXPECT_EQ(body().copy_crc32c(nullptr, nullptr, 0, 77, stream), 77U);
    body().copy(nullptr, nullptr, 0, stream);
    EXPECT_EQ(body().copy_crc64_extents(nullptr, nullptr, 0, nullptr, stream), 0U);
  }
}

// ---------------------------------------------------------------- against the reference

// Runs every function of `body` on `size` bytes at the given distances from a 64-byte boundary; checks values, the
// copy, and that the bytes around the target stay.
void check_all(const crc::Body& body, const std::vector<std::byte>& data, std::size_t size, std::size_t source_at,
               std::size_t target_at, std::uint64_t before) {
  SCOPED_TRACE(testing::Message() << "size " << size << " source +" << source_at << " target +" << target_at
                                  << " seed " << kSeed);
  constexpr std::size_t kGuard = 128;
  const std::byte* source = data.data() + source_at;
  const auto before32 = static_cast<std::uint32_t>(before);
  const std::uint64_t want64 = reference64(source, size, before);
  const std::uint32_t want32 = reference32(source, size, before32);
  EXPECT_EQ(body.crc64(source, size, before), want64);
  EXPECT_EQ(body.crc32c(source, size, before32), want32);

  std::vector<std::byte> room(size + 2 * kGuard + 128);
  const std::size_t boundary = -reinterpret_cast<std::uintptr_t>(room.data()) % 64;
  std::byte* target = room.data() + boundary + kGuard + target_at % 64;
  const auto tried = [&](const char* what, auto&& copy) {
    SCOPED_TRACE(what);
    std::fill(room.begin(), room.end(), std::byte{0x5A});
    copy();
    EXPECT_TRUE(size == 0 || std::memcmp(target, source, size) == 0);
    const auto kept = [](std::byte byte) { return byte == std::byte{0x5A}; };
    EXPECT_TRUE(std::all_of(room.data(), target, kept)) << "wrote before the target";
    EXPECT_TRUE(std::all_of(target + size, room.data() + room.size(), kept)) << "wrote behind the target";
  };
  for (const bool stream : {false, true}) {
    SCOPED_TRACE(stream ? "streaming" : "cached");
    tried("copy_crc64", [&] { EXPECT_EQ(body.copy_crc64(target, source, size, before, stream), want64); });
    tried("copy_crc32c", [&] { EXPECT_EQ(body.copy_crc32c(target, source, size, before32, stream), want32); });
    tried("copy", [&] { body.copy(target, source, size, stream); });
    std::vector<std::uint32_t> extents(extent_count(size) + 1, 0xDEADBEEF);
    tried("copy_crc64_extents", [&] {
      EXPECT_EQ(body.copy_crc64_extents(target, source, size, extents.data(), stream), reference64(source, size));
    });
    for (std::size_t i = 0; i < extent_count(size); ++i) {
      const std::size_t at = i * kExtentBytes;
      EXPECT_EQ(extents[i], reference32(source + at, std::min<std::size_t>(kExtentBytes, size - at))) << "extent " << i;
    }
    EXPECT_EQ(extents.back(), 0xDEADBEEF) << "wrote behind the extents";
  }
}

TEST_P(CrcBody, EqualsTheReferenceForEverySizeTo1100AtRandomAlignments) {
  Random random(kSeed);
  const auto data = random_bytes(1100 + 64, kSeed);
  for (std::size_t size = 0; size <= 1100 && !HasFailure(); ++size) {
    check_all(body(), data, size, random.below(64), random.below(64), random.next());
  }
}

// Each source alignment against target alignments, at a size that has head, wide steps, blocks and tail; some of them
// at one with a whole group of pages too.
TEST_P(CrcBody, EqualsTheReferenceAtEveryPairOfAlignments) {
  const auto data = random_bytes(17'000 + 64, kSeed);
  for (std::size_t source_at = 0; source_at < 64 && !HasFailure(); ++source_at) {
    for (std::size_t target_at = 0; target_at < 64; target_at += 3) {
      check_all(body(), data, 389, source_at, target_at, source_at * 64 + target_at);
    }
  }
  for (std::size_t source_at = 0; source_at < 64 && !HasFailure(); source_at += 9) {
    for (std::size_t target_at = 0; target_at < 64; target_at += 7) {
      check_all(body(), data, 17'000, source_at, target_at, source_at * 64 + target_at);
    }
  }
}

// Around each size where a body changes its ways: 64 (register), 256 and 320 (wide steps), 4096 (steps of the
// portable body), 16 KiB and 64 bytes more (groups of pages), 64 KiB (extents), kStreamFromBytes.
TEST_P(CrcBody, EqualsTheReferenceAroundEveryThreshold) {
  Random random(kSeed + 1);
  const auto data = random_bytes(kStreamFromBytes + 256, kSeed);
  constexpr std::size_t kEdges[] = {64, 256, 320, 4096, 2 * 4096, 4 * 4096, 4 * 4096 + 64, kExtentBytes,
                                    2 * kExtentBytes, kStreamFromBytes};
  for (const std::size_t edge : kEdges) {
    for (const std::size_t size : {edge - 1, edge, edge + 1, edge + 63, edge + 65}) {
      check_all(body(), data, size, random.below(64), random.below(64), random.next());
      check_all(body(), data, size, 0, 0, 0);
      if (HasFailure()) return;
    }
  }
}

TEST_P(CrcBody, ChainsOverRandomSplits) {
  Random random(kSeed + 2);
  const auto data = random_bytes(20000, kSeed);
  const std::uint64_t want64 = reference64(data.data(), data.size());
  const std::uint32_t want32 = reference32(data.data(), data.size());
  std::vector<std::byte> target(data.size());
  for (int round = 0; round < 100; ++round) {
    const std::uint64_t longest = std::uint64_t{1} << (1 + random.below(14));
    const bool stream = random.below(2) != 0;
    std::uint64_t all64 = 0, copied64 = 0;
    std::uint32_t all32 = 0, copied32 = 0;
    for (std::size_t at = 0; at < data.size();) {
      const std::size_t count = std::min<std::size_t>(data.size() - at, random.below(longest + 1));
      all64 = body().crc64(data.data() + at, count, all64);
      all32 = body().crc32c(data.data() + at, count, all32);
      copied64 = body().copy_crc64(target.data() + at, data.data() + at, count, copied64, stream);
      copied32 = body().copy_crc32c(target.data() + at, data.data() + at, count, copied32, stream);
      at += count;
    }
    ASSERT_EQ(all64, want64) << "round " << round << " seed " << kSeed;
    ASSERT_EQ(copied64, want64) << "round " << round << " seed " << kSeed;
    ASSERT_EQ(all32, want32) << "round " << round << " seed " << kSeed;
    ASSERT_EQ(copied32, want32) << "round " << round << " seed " << kSeed;
  }
}

// ---------------------------------------------------------------- what is touched

// `bytes` usable bytes with an unreadable page on either side.
class FencedPages {
 public:
  explicit FencedPages(std::size_t bytes) : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))), size_(bytes) {
    void* all = mmap(nullptr, size_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) return;
    base_ = static_cast<std::byte*>(all);
    if (mprotect(begin(), size_, PROT_READ | PROT_WRITE) != 0) base_ = nullptr;
  }
  FencedPages(const FencedPages&) = delete;
  FencedPages& operator=(const FencedPages&) = delete;
  ~FencedPages() {
    if (base_ != nullptr) munmap(base_, size_ + 2 * page_);
  }
  bool ok() const { return base_ != nullptr; }
  std::byte* begin() const { return base_ + page_; }
  std::byte* end() const { return begin() + size_; }

 private:
  std::size_t page_;
  std::size_t size_;
  std::byte* base_ = nullptr;
};

TEST_P(CrcBody, NeverTouchesThePagesBesideSourceAndTarget) {
  FencedPages source(64 * 1024), target(64 * 1024);
  ASSERT_TRUE(source.ok() && target.ok());
  const auto data = random_bytes(64 * 1024, kSeed);
  std::memcpy(source.begin(), data.data(), data.size());
  for (std::size_t size = 1; size <= 800; ++size) {
    std::byte* const from[] = {source.begin(), source.end() - size};
    std::byte* const to[] = {target.begin(), target.end() - size};
    for (std::byte* s : from) {
      const std::uint64_t want = reference64(s, size);
      ASSERT_EQ(body().crc64(s, size, 0), want);
      ASSERT_EQ(body().crc32c(s, size, 0), reference32(s, size));
      for (std::byte* t : to) {
        for (const bool stream : {false, true}) {
          ASSERT_EQ(body().copy_crc64(t, s, size, 0, stream), want) << size;
          body().copy(t, s, size, stream);
        }
      }
    }
  }
}

// ---------------------------------------------------------------- the copy is what was checked

// Another thread rewrites the source all the while: the copy is a mixture, and the CRC must be the mixture's.
void check_under_rewrites(const crc::Body& body, std::size_t size, bool stream) {
  std::vector<std::uint64_t> words(size / 8 + 1);
  const auto* source = reinterpret_cast<const std::byte*>(words.data()) + 3;  // unaligned: bytes at both ends
  std::atomic<bool> started{false}, stop{false};
  std::thread writer([&] {
    for (std::uint64_t round = 1; !stop.load(std::memory_order_relaxed); ++round) {
      for (auto& word : words) __atomic_store_n(&word, round * 0x9E3779B97F4A7C15U, __ATOMIC_RELAXED);
      started.store(true, std::memory_order_relaxed);
    }
  });
  while (!started.load(std::memory_order_relaxed)) std::this_thread::yield();
  const std::size_t count = words.size() * 8 - 5;
  std::vector<std::byte> target(count);
  std::vector<std::uint32_t> extents(extent_count(count));
  const std::byte* copied = target.data();
  const auto want64 = [&] { return crc::kIsalBody.crc64(copied, count, 0); };
  const auto want32 = [&](std::size_t at, std::size_t bytes) { return crc::kIsalBody.crc32c(copied + at, bytes, 0); };
  int wrong = 0;
  for (int round = 0; round < 200; ++round) {
    // Two statements each: the copy must have happened before the target is read.
    const std::uint64_t got64 = body.copy_crc64(target.data(), source, count, 0, stream);
    wrong += got64 != want64();
    const std::uint32_t got32 = body.copy_crc32c(target.data(), source, count, 0, stream);
    wrong += got32 != want32(0, count);
    const std::uint64_t got_all = body.copy_crc64_extents(target.data(), source, count, extents.data(), stream);
    wrong += got_all != want64();
    for (std::size_t i = 0; i < extents.size(); ++i) {
      const std::size_t at = i * kExtentBytes;
      wrong += extents[i] != want32(at, std::min<std::size_t>(kExtentBytes, count - at));
    }
  }
  stop.store(true, std::memory_order_relaxed);
  writer.join();
  EXPECT_EQ(wrong, 0);
}

TEST_P(CrcBody, ChecksWhatItStoredWhileTheSourceIsRewritten) {
#ifdef __SANITIZE_THREAD__
  if (GetParam() != &crc::kAtomicBody) GTEST_SKIP() << "only the atomic body may race in ThreadSanitizer builds";
#endif
  for (const bool stream : {false, true}) {
    check_under_rewrites(body(), 500, stream);
    check_under_rewrites(body(), 100'000, stream);
  }
}

// ---------------------------------------------------------------- the public functions

TEST(Crc, PublicFunctionsAgreeForEveryStorePolicy) {
  constexpr std::size_t kSizes[] = {0, 1, 64, 100'001, kStreamFromBytes + 7};
  for (const std::size_t size : kSizes) {
    const auto data = random_bytes(size, kSeed);
    const std::uint64_t want64 = reference64(data.data(), size, 5);
    const std::uint32_t want32 = reference32(data.data(), size, 5);
    EXPECT_EQ(crc64(data, 5), want64);
    EXPECT_EQ(crc32c(data, 5), want32);
    for (const Stores stores : {Stores::kBySize, Stores::kCached, Stores::kStreaming, Stores::kStreamingOpen}) {
      std::vector<std::byte> target(size);
      EXPECT_EQ(copy_crc64(target.data(), data.data(), size, 5, stores), want64);
      EXPECT_EQ(target, data);
      target.assign(size, std::byte{0});
      EXPECT_EQ(copy_crc32c(target.data(), data.data(), size, 5, stores), want32);
      EXPECT_EQ(target, data);
      target.assign(size, std::byte{0});
      copy_bytes(target.data(), data.data(), size, stores);
      EXPECT_EQ(target, data);
      target.assign(size, std::byte{0});
      std::vector<std::uint32_t> extents(extent_count(size));
      EXPECT_EQ(copy_crc64_extents(target.data(), data.data(), size, extents, stores), reference64(data.data(), size));
      EXPECT_EQ(target, data);
    }
  }
}

TEST(Crc, ChoosesTheAtomicBodyUnderThreadSanitizerAndElseTheFastestThatRuns) {
#ifdef __SANITIZE_THREAD__
  EXPECT_EQ(crc_implementation(), "atomic-words");
#else
  EXPECT_EQ(crc_implementation(), crc::vpclmulqdq_body() != nullptr ? "vpclmulqdq" : "isa-l");
#endif
}

// Powers of x against the reference's remainders. The constants of Barrett's reduction have their test in every
// CRC-64 above.
TEST(CrcPolynomial, PowersAreTheRemaindersOfTheReference) {
  using P = crc::Crc64Polynomial;
  static_assert(P::kReflected == 0xC96C5795D7870F42);
  static_assert(crc::Crc32cPolynomial::kReflected == 0x82F63B78);
  static_assert(P::power_of_x(64) == P::kReflected);
  static_assert(crc::Crc32cPolynomial::power_of_x(32) == std::uint64_t{0x82F63B78} << 32);
  // CRCs are affine: the difference of two messages' CRCs is the plain remainder of the messages' difference.
  std::vector<std::byte> message(32);
  message[0] = std::byte{1};  // x^(8 * 31 + 7): bit 0 is a byte's highest power; times x^64 or x^32 by definition
  const std::uint64_t zeros = reference64(std::vector<std::byte>(32).data(), 32);
  EXPECT_EQ(reference64(message.data(), 32) ^ zeros, P::power_of_x(8 * 31 + 7 + 64));
  const std::uint32_t zeros32 = reference32(std::vector<std::byte>(32).data(), 32);
  EXPECT_EQ(std::uint64_t{reference32(message.data(), 32) ^ zeros32} << 32,
            crc::Crc32cPolynomial::power_of_x(8 * 31 + 7 + 32));
}

TEST(Crc64Join, JoinsThePartsOfEverySplitAndOfLongOnes) {
  std::vector<std::byte> bytes(5000);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 131 + 7);
  const std::span<const std::byte> all(bytes);
  for (std::size_t cut = 0; cut <= bytes.size(); cut += cut < 300 ? 1 : 97) {
    EXPECT_EQ(crc64_join(crc64(all.first(cut)), crc64(all.subspan(cut)), bytes.size() - cut), crc64(all)) << cut;
    EXPECT_EQ(crc32c_join(crc32c(all.first(cut)), crc32c(all.subspan(cut)), bytes.size() - cut), crc32c(all)) << cut;
    EXPECT_EQ(crc32c(all) ^ crc32c_join(crc32c(all.first(cut)), 0, bytes.size() - cut), crc32c(all.subspan(cut))) << cut;
  }
  const std::vector<std::byte> zeros(3 << 20);
  EXPECT_EQ(crc64_join(crc64(all), crc64(zeros), zeros.size()), crc64(zeros, crc64(all)));
}

}  // namespace
}  // namespace paramwire
