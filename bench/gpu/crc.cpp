// CRC-32C of extents and CRC-64 of payloads that lie in device memory, against what a copy on the device moves.
#include "bench.hpp"

#include "gpu/case_make.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/cuda/kernels/integrity_args.hpp"

namespace paramwire::gpu {

using namespace cuda;

namespace {

constexpr std::uint64_t kExtent = std::uint64_t{64} << 10;  // as servers cut blocks

std::vector<std::byte> random_words(std::uint64_t bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint64_t> words((bytes + 7) / 8);
  for (std::uint64_t& word : words) word = random();
  std::vector<std::byte> out = bytes_of(words);
  out.resize(static_cast<std::size_t>(bytes));
  return out;
}

// How many checks of the payload failed since the verdict was made ready.
Result<std::uint32_t> bad_of(const Bed& bed, const DeviceMemory& verdict) {
  PARAMWIRE_TRY(words, bed.download_as<Verdict>(verdict, 1));
  return bad_count(words[0]);
}

}  // namespace

Status bench_crc(Bench& bench) {
  const Bed& bed = bench.bed;
  const Current current(*bed.device);
  PARAMWIRE_CHECK(current.status());
  const std::uint64_t size = bench.size<std::uint64_t>(200'001, std::uint64_t{128} << 20, std::uint64_t{512} << 20);
  const std::vector<std::byte> data = random_words(size, 1);
  std::vector<std::uint32_t> expected;
  for (std::uint64_t at = 0; at < size; at += kExtent) expected.push_back(crc32c(std::span(data).subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(std::min(kExtent, size - at)))));
  PARAMWIRE_TRY(device_data, bed.upload(data));
  PARAMWIRE_TRY(device_expected, bed.upload(bytes_of(expected)));
  PARAMWIRE_TRY(verdict, bed.upload(std::vector<std::byte>(sizeof(Verdict), std::byte{0xff})));
  PARAMWIRE_TRY(remainders, bed.allocate(kCrc64StripsMax * 8));
  const std::uint64_t right = crc64(data);
  PARAMWIRE_TRY(device_right, bed.upload(bytes_of<std::uint64_t>({right})));
  PARAMWIRE_TRY(crc, bed.allocate(8));

  const Crc32cArgs extents{.data = device_data.at<const char>(), .size = size, .expected = device_expected.at<const std::uint32_t>(), .verdict = verdict.at<Verdict>(),
                           .extent_bytes = static_cast<std::uint32_t>(kExtent), .first = 0};
  const Crc64Args payload{.data = device_data.at<const char>(), .size = size, .expected = device_right.at<const std::uint64_t>(), .remainders = remainders.at<std::uint64_t>(),
                          .crc = crc.at<std::uint64_t>(), .verdict = verdict.at<Verdict>(), .index = 0};
  const auto sum_extents = [&] { return bed.module->launch(bed.stream, Kernel::k_crc32c_extents, crc32c_extents_launch(extents), extents); };
  const auto sum_payload = [&]() -> Status {
    PARAMWIRE_CHECK(bed.module->launch(bed.stream, Kernel::k_crc64_strips, crc64_strips_launch(payload), payload));
    return bed.module->launch(bed.stream, Kernel::k_crc64_join, crc64_join_launch(payload), payload);
  };
  PARAMWIRE_TRY(copy, bench.copy_bandwidth());
  PARAMWIRE_TRY(extents_seconds, bench.device_seconds(sum_extents));
  PARAMWIRE_TRY(extents_bad, bad_of(bed, verdict));
  PARAMWIRE_TRY(payload_seconds, bench.device_seconds(sum_payload));
  PARAMWIRE_TRY(payload_bad, bad_of(bed, verdict));
  PARAMWIRE_TRY(summed, bed.download_as<std::uint64_t>(crc, 1));

  // A bit that differs is seen by each.
  const std::byte damaged = data[static_cast<std::size_t>(size / 2)] ^ std::byte{4};
  PARAMWIRE_CHECK(bed.stream.to_device(device_data.address() + size / 2, {&damaged, 1}));
  PARAMWIRE_CHECK(sum_extents());
  PARAMWIRE_TRY(extents_seen, bad_of(bed, verdict));
  PARAMWIRE_CHECK(sum_payload());
  PARAMWIRE_TRY(payload_seen, bad_of(bed, verdict));

  const auto bytes = static_cast<double>(size);
  bench.add({.name = "crc32c", .value = gigabytes(bytes, extents_seconds), .unit = "GB/s", .baseline = Bench::kCopyBaseline, .baseline_value = copy, .target = 0.5,
             .correct = extents_bad == 0 && extents_seen == 1});
  bench.add({.name = "crc64", .value = gigabytes(bytes, payload_seconds), .unit = "GB/s", .baseline = Bench::kCopyBaseline, .baseline_value = copy, .target = 0.5,
             .correct = payload_bad == 0 && payload_seen == 2 && summed[0] == right});
  return {};
}

}  // namespace paramwire::gpu
