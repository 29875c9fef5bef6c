// Manifest files and record heads of checkpoints: what is taken encodes to the same bytes. Seals and CRCs are put right first: no fuzzer finds a SHA-256, and
// what is behind them must hold without their help.
#include "fuzz.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/store/checkpoint_format.hpp"

#include <algorithm>
#include <vector>

namespace paramwire::fuzz {

namespace {

void run_manifest(std::span<const std::byte> input) {
  std::vector<std::byte> bytes(input.begin(), input.end());
  const Digest seal = sha256(bytes);
  bytes.insert(bytes.end(), seal.begin(), seal.end());
  const auto decoded = decode_checkpoint_manifest(bytes);
  if (!decoded.ok()) return;
  require(std::ranges::equal(encode_checkpoint_manifest(*decoded), bytes), "a manifest file has one encoding");
  for (const auto& links : decoded->placements) {
    for (const CheckpointLink& link : links) {
      require(link.file < decoded->files.size() && link.offset + link.size <= decoded->files[link.file].size, "a record lies in its file");
    }
  }
}

void run_record(std::span<const std::byte> input) {
  std::vector<std::byte> bytes(input.begin(), input.end());
  const auto fixed = decode_record_header(bytes);
  if (!fixed.ok() || fixed->head_size() > bytes.size()) return;
  bytes.resize(static_cast<std::size_t>(fixed->head_size()));
  constexpr std::size_t kTableCrc = 52, kHeaderCrc = 56;
  const auto entry = std::span(bytes).subspan(kRecordHeaderBytes, fixed->entry_size);
  store_le(bytes.data() + kTableCrc, crc32c(std::span(bytes).subspan(kRecordHeaderBytes + fixed->entry_size)));
  store_le(bytes.data() + kHeaderCrc, crc32c(entry, crc32c(std::span(bytes).first(kHeaderCrc))));
  const auto head = decode_record_head(bytes);
  if (!head.ok()) return;
  std::vector<std::byte> again;
  RecordHeader header = head->header;
  encode_record_head(again, header, head->entry, head->rows);
  require(std::ranges::equal(again, bytes), "a record head has one encoding");
}

}  // namespace

void run(std::span<const std::byte> input) {
  if (input.empty()) return;
  if (input[0] == std::byte{0}) {
    run_manifest(input.subspan(1));
  } else {
    run_record(input.subspan(1));
  }
}

}  // namespace paramwire::fuzz
