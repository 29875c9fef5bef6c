// CRCs on the device: the values of base/crc.hpp for any size and alignment, and verdicts that name what is wrong.
#include "cpp/cuda_kernels_rig.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/cuda/kernels/crc_bodies.hpp"

namespace paramwire::testing {
namespace {

using namespace cuda;

class CudaCrc : public CudaKernels {
 protected:
  static std::vector<std::uint8_t> random_bytes(std::size_t size, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::uint8_t> bytes(size);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    return bytes;
  }
  static std::span<const std::byte> span_of(const Array<std::uint8_t>& bytes, std::size_t from, std::size_t size) {
    return std::as_bytes(std::span(bytes.data() + from, size));
  }
};

TEST_F(CudaCrc, ExtentsOfAnySizeAndAlignmentHaveTheirCrc32c) {
  for (const std::uint32_t extent : {1U, 3U, 8U, 9U, 511U, 512U, 1000U, 4096U, 65536U}) {
    for (const std::size_t offset : {0U, 1U, 2U, 3U}) {
      for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{extent}, std::size_t{extent} + 1, std::size_t{2} * extent + 13}) {
        Array<std::uint8_t> data(size, offset);
        const auto bytes = random_bytes(size, size + offset);
        std::copy(bytes.begin(), bytes.end(), data.begin());
        const std::size_t extents = (size + extent - 1) / extent;
        Array<std::uint32_t> expected(extents);
        for (std::size_t i = 0; i < extents; ++i) expected[i] = crc32c(span_of(data, i * extent, std::min<std::size_t>(extent, size - i * extent)));
        Verdict verdict{0xffffffff, 0xffffffff};
        const Crc32cArgs args{.data = data.data(), .size = size, .expected = expected.data(), .verdict = &verdict, .extent_bytes = extent, .first = 100};
        const Launch launch = crc32c_extents_launch(args);
        EXPECT_EQ(launch.blocks[0], std::max<std::size_t>(extents, 1));
        run("crc32c_extents", launch, args, size);
        ASSERT_EQ(bad_count(verdict), 0U) << "extents of " << extent << ", " << size << " bytes at " << offset;
        ASSERT_EQ(verdict.lowest, 0xffffffffU);
        if (extents == 0) continue;
        // Any one bit, of data or of what is expected.
        for (std::size_t i = 0; i < extents; ++i) {
          const std::size_t at = std::min(size - 1, i * extent + size % 5);
          data[at] ^= static_cast<std::uint8_t>(1U << size % 8);
          verdict = {0xffffffff, 0xffffffff};
          run("crc32c_extents", launch, args, i);
          data[at] ^= static_cast<std::uint8_t>(1U << size % 8);
          ASSERT_EQ(bad_count(verdict), 1U);
          ASSERT_EQ(verdict.lowest, 100 + at / extent);
          if (i == 2) break;
        }
      }
    }
  }
}

TEST_F(CudaCrc, VerdictCountsBadExtentsAndNamesTheLowest) {
  const std::uint32_t extent = 64, extents = 2500;  // more than blocks: a block takes several
  Array<std::uint8_t> data(std::size_t{extent} * extents);
  const auto bytes = random_bytes(data.size(), 3);
  std::copy(bytes.begin(), bytes.end(), data.begin());
  Array<std::uint32_t> expected(extents);
  for (std::uint32_t i = 0; i < extents; ++i) expected[i] = crc32c(span_of(data, std::size_t{i} * extent, extent));
  for (const std::uint32_t bad : {2499U, 17U, 2300U, 16U}) expected[bad] ^= 1U << bad % 32;
  for (const std::uint64_t seed : kSeeds) {
    Verdict verdict{0xffffffff, 0xffffffff};
    const Crc32cArgs args{.data = data.data(), .size = data.size(), .expected = expected.data(), .verdict = &verdict, .extent_bytes = extent, .first = 7};
    const Launch launch = crc32c_extents_launch(args);
    EXPECT_EQ(launch.blocks[0], 2240U);
    run("crc32c_extents", launch, args, seed);
    EXPECT_EQ(bad_count(verdict), 4U);
    EXPECT_EQ(verdict.lowest, 7U + 16);
  }
}

TEST_F(CudaCrc, PayloadsOfAnySizeAndAlignmentHaveTheirCrc64) {
  Array<std::uint64_t> remainders(kCrc64StripsMax);
  const std::size_t sizes[] = {0, 1, 7, 8, 15, 16, 17, 23, 100, 2047, 2048, 2049, 4096, 32767, 32768, 32776, 65543, 200001, 1048576 + 5};
  for (const std::size_t size : sizes) {
    for (const std::size_t offset : {0U, 1U, 4U, 7U}) {
      Array<std::uint8_t> data(size, offset);
      const auto bytes = random_bytes(size, size * 8 + offset);
      std::copy(bytes.begin(), bytes.end(), data.begin());
      const std::uint64_t expected = crc64(span_of(data, 0, size));
      std::uint64_t crc = 1;
      Verdict verdict{0xffffffff, 0xffffffff};
      const Crc64Args args{.data = data.data(), .size = size, .expected = &expected, .remainders = remainders.data(), .crc = &crc, .verdict = &verdict, .index = 12};
      run("crc64_strips", crc64_strips_launch(args), args, size);
      run("crc64_join", crc64_join_launch(args), args, offset);
      ASSERT_EQ(crc, expected) << size << " bytes at " << offset;
      ASSERT_EQ(bad_count(verdict), 0U);
      if (size == 0) continue;
      data[size / 2] ^= 0x10;
      run("crc64_strips", crc64_strips_launch(args), args, size + 1);
      run("crc64_join", crc64_join_launch(args), args, offset + 1);
      ASSERT_EQ(crc, crc64(span_of(data, 0, size)));
      ASSERT_EQ(bad_count(verdict), 1U);
      ASSERT_EQ(verdict.lowest, 12U);
    }
  }
}

TEST_F(CudaCrc, StripsStayWithinTheirNumberForAnySize) {
  const auto args_of = [](std::uint64_t size) {
    return Crc64Args{.data = reinterpret_cast<const void*>(std::uintptr_t{4096}), .size = size, .expected = nullptr, .remainders = nullptr, .crc = nullptr, .verdict = nullptr, .index = 0};
  };
  for (unsigned bit = 0; bit < 45; ++bit) {
    for (const std::uint64_t size : {(std::uint64_t{1} << bit) - 1, std::uint64_t{1} << bit, (std::uint64_t{1} << bit) + 4097}) {
      const std::uint32_t blocks = crc64_strips_launch(args_of(size)).blocks[0];
      ASSERT_LE(blocks, kCrc64StripsMax) << size;
      const std::uint64_t strip = std::uint64_t{Crc64Xz::kThreads} << crc64_strip_shift(size / 8);
      ASSERT_GE(blocks * strip, size / 8) << size;
    }
  }
}

TEST_F(CudaCrc, ManyStripsAreJoinedByTheirPlaces) {
  // 2048 strips and their highest powers, over a payload that is zero but for its first and last bytes.
  Array<std::uint8_t> data(std::size_t{2048} * 32768 - 11, 3);
  data[0] = 0x80;
  data[data.size() - 1] = 1;
  Array<std::uint64_t> remainders(kCrc64StripsMax);
  std::uint64_t crc = 0;
  const Crc64Args args{.data = data.data(), .size = data.size(), .expected = nullptr, .remainders = remainders.data(), .crc = &crc, .verdict = nullptr, .index = 0};
  const Launch launch = crc64_strips_launch(args);
  EXPECT_EQ(launch.blocks[0], 2048U);
  run("crc64_strips", launch, args);
  run("crc64_join", crc64_join_launch(args), args);
  EXPECT_EQ(crc, crc64(span_of(data, 0, data.size())));
}

}  // namespace
}  // namespace paramwire::testing
