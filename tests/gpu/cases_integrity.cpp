// Cases of what checks: CRCs of right payloads and of some that are not, and the generation of weights.
#include "gpu/case_make.hpp"
#include "gpu/cases.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"

namespace paramwire::gpu {

using namespace cuda;

namespace {

CaseBuffer verdict_of(std::uint32_t bad, std::uint32_t lowest) {
  CaseBuffer out = output_of("verdict", Type::kU32, {2});
  out.bytes.assign(8, std::byte{0xff});
  out.expected = bytes_of<std::uint32_t>({bad - 1, bad == 0 ? UINT32_MAX : lowest});
  return out;
}

// wrong: every how manieth extent has a bit that differs; 0: none
Case crc32c_case(std::uint64_t size, std::uint32_t extent, std::size_t offset, std::uint32_t wrong) {
  constexpr std::uint32_t kFirst = 100;
  Case out{.operation = "crc32c_extents", .name = cat("crc32c of ", size, " bytes in ", extent, " at ", offset, wrong != 0 ? ", some wrong" : "")};
  out.buffers.push_back(buffer_of("data", Type::kU8, {size}, random_octets(size, size + extent)));
  out.buffers[0].offset = offset;
  const std::span<const std::byte> data(out.buffers[0].bytes);
  std::vector<std::uint32_t> expected;
  std::uint32_t bad = 0, lowest = 0;
  for (std::uint64_t at = 0; at < size; at += extent) {
    const auto index = static_cast<std::uint32_t>(expected.size());
    expected.push_back(crc32c(data.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(std::min<std::uint64_t>(extent, size - at)))));
    if (wrong == 0 || index % wrong != wrong - 1) continue;
    expected.back() ^= 1U << index % 32;
    if (bad++ == 0) lowest = kFirst + index;
  }
  out.buffers.push_back(buffer_of("expected", Type::kU32, {expected.size()}, expected));
  out.buffers.push_back(verdict_of(bad, lowest));
  out.numbers = {{"extent_bytes", extent}, {"first", kFirst}};
  out.steps.push_back([=](const Places& at) {
    const Crc32cArgs args{.data = at.at<const char>("data"), .size = size, .expected = at.at<const std::uint32_t>("expected"), .verdict = at.at<Verdict>("verdict"),
                          .extent_bytes = extent, .first = kFirst};
    return bound(Kernel::k_crc32c_extents, crc32c_extents_launch(args), args);
  });
  return out;
}

Case crc64_case(std::uint64_t size, std::size_t offset, bool wrong) {
  constexpr std::uint32_t kIndex = 12;
  Case out{.operation = "crc64", .name = cat("crc64 of ", size, " bytes at ", offset, wrong ? ", wrong" : "")};
  out.buffers.push_back(buffer_of("data", Type::kU8, {size}, random_octets(size, size)));
  out.buffers[0].offset = offset;
  const std::uint64_t right = crc64(out.buffers[0].bytes);
  out.buffers.push_back(buffer_of<std::uint64_t>("expected", Type::kU64, {1}, {right ^ (wrong ? 1U : 0U)}));
  out.buffers.push_back(output_of("remainders", Type::kU64, {kCrc64StripsMax}));
  out.buffers.back().role = Role::kScratch;
  out.buffers.push_back(output_of("crc", Type::kU64, {1}));
  out.buffers.back().expected = bytes_of<std::uint64_t>({right});
  out.buffers.push_back(verdict_of(wrong ? 1 : 0, kIndex));
  out.numbers = {{"index", kIndex}};
  const auto args_of = [=](const Places& at) {
    return Crc64Args{.data = at.at<const char>("data"), .size = size, .expected = at.at<const std::uint64_t>("expected"), .remainders = at.at<std::uint64_t>("remainders"),
                     .crc = at.at<std::uint64_t>("crc"), .verdict = at.at<Verdict>("verdict"), .index = kIndex};
  };
  out.steps.push_back([=](const Places& at) { return bound(Kernel::k_crc64_strips, crc64_strips_launch(args_of(at)), args_of(at)); });
  out.steps.push_back([=](const Places& at) { return bound(Kernel::k_crc64_join, crc64_join_launch(args_of(at)), args_of(at)); });
  return out;
}

Case generation_case(std::uint32_t wanted, std::uint32_t there) {
  Case out{.operation = "generation", .name = cat("generation ", there, " where ", wanted, " is wanted")};
  out.buffers.push_back(buffer_of<std::uint32_t>("number", Type::kU32, {1}, {there}));
  out.buffers.push_back(state_of(7, 1, wanted));
  out.buffers.back().role = Role::kOutput;
  out.buffers.back().expected = bytes_of<std::uint32_t>({7, 1, wanted, there == wanted ? kNoGeneration : there});
  out.steps.push_back([=](const Places& at) {
    const GenerationArgs args{.number = at.at<const std::uint32_t>("number"), .state = at.at<StepState>("state")};
    return bound(Kernel::k_generation, generation_launch(args), args);
  });
  return out;
}

}  // namespace

std::vector<Case> integrity_cases(const Scale& scale) {
  std::vector<Case> out;
  for (const std::size_t offset : {0U, 1U, 2U, 3U}) {
    out.push_back(crc32c_case(0, 65'536, offset, 0));
    out.push_back(crc32c_case(3, 1, offset, 2));
    out.push_back(crc32c_case(65'536 + 65'537, 65'536, offset, 0));
    out.push_back(crc32c_case(scale.payload, 65'536, offset, offset == 2 ? 3 : 0));
    out.push_back(crc32c_case(2'500 * 64 + 1, 64, offset, 17));  // more extents than blocks
  }
  for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{8}, std::uint64_t{23}, std::uint64_t{4096}, std::uint64_t{65'543}, scale.payload}) {
    for (const std::size_t offset : {0U, 1U, 4U, 7U}) out.push_back(crc64_case(size, offset, offset == 4));
  }
  out.push_back(generation_case(3, 3));
  out.push_back(generation_case(3, 0));
  return out;
}

}  // namespace paramwire::gpu
