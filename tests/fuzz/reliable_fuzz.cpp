// A client machine and a server's responder, with a wire between them that does what the input says: it drops, repeats, reorders and damages
// datagrams and slips in others. What is taken for a block is the block; what is not, has an error; and it ends.
#include "fuzz.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/net/reliable.hpp"
#include "paramwire/server/udp_responder.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <vector>

namespace paramwire::fuzz {
namespace {

constexpr Incarnation kIncarnation{11, 22};
constexpr Version kVersion{3, 17};
// Two extents, the second short, in segments that do not divide them.
constexpr std::size_t kSize = kExtentBytes + 3000;
constexpr std::uint32_t kSegment = 5000;
constexpr int kTurnsMax = 20'000;
constexpr Micros kPatience = 60 * kMicrosPerSecond;

struct Published {
  std::vector<std::byte> bytes, table;
  ManifestEntry entry;
};

const Published& published() {
  static const Published made = [] {
    Published out;
    out.bytes.resize(kSize);
    for (std::size_t i = 0; i < kSize; ++i) out.bytes[i] = static_cast<std::byte>(i * 11 >> 2);
    std::array<ExtentRow, 2> rows{};
    rows[0] = {kExtentBytes, crc32c(std::span(out.bytes).first(kExtentBytes))};
    rows[1] = {3000, crc32c(std::span(out.bytes).subspan(kExtentBytes))};
    const auto table = std::as_bytes(std::span(rows));
    out.table.assign(table.begin(), table.end());
    out.entry.tensor = "w";
    out.entry.id = block_id("w", Shard::whole());
    out.entry.version = kVersion;
    out.entry.dtype = DType::kU8;
    out.entry.shape = Shape{kSize};
    out.entry.raw_size = out.entry.stored_size = kSize;
    out.entry.crc64 = crc64(out.bytes);
    out.entry.extent_table_crc = crc32c(out.table);
    return out;
  }();
  return made;
}

std::vector<std::vector<std::byte>> serve(UdpResponder& responder, std::span<const std::byte> datagram) {
  const std::array<std::byte, 18> address{};
  std::vector<std::vector<std::byte>> answers;
  const auto status = [&](const std::array<std::byte, kStatusBytes>& bytes) { answers.emplace_back(bytes.begin(), bytes.end()); };
  UdpResponder::Question question;
  const auto verdict = responder.check(datagram, address, question);
  if (verdict == UdpResponder::Verdict::kStatus) status(question.status);
  if (verdict != UdpResponder::Verdict::kLookup) return answers;
  const Asked& asked = question.get.asked;
  if (asked.block != published().entry.id || asked.version != kVersion) {
    status(responder.refuse(question, StatusCode::kStale));
    return answers;
  }
  SegmentWalk walk(question.get, asked.part == BlockPart::kStored ? published().bytes : published().table);
  if (!walk.fits()) {
    status(responder.refuse(question, StatusCode::kInvalid));
    return answers;
  }
  std::array<std::byte, kDataHeaderBytes> header;
  while (const auto payload = walk.next(header.data())) {
    answers.emplace_back(header.begin(), header.end());
    answers.back().insert(answers.back().end(), payload->begin(), payload->end());
  }
  return answers;
}

}  // namespace

void run(std::span<const std::byte> input) {
  std::uint64_t drawn = 0;
  const auto random = [&drawn] { return ++drawn * 0x9e3779b97f4a7c15U; };
  const auto responder = *UdpResponder::create(kIncarnation, [&] { return Result<std::uint64_t>(random()); });
  const auto session = *responder->open(7411, std::nullopt);
  ReliableOptions options;
  options.session = session.session;
  options.key = session.key;
  options.incarnation = kIncarnation;
  options.peer = "udp://server";
  options.segment_size = kSegment;
  options.random = random;
  InboundCredit credit(std::uint64_t{1} << 20);
  ReliableReader reader(options, credit);

  std::vector<std::byte> whole(kSize), part(700);
  std::array<BlockRead, 2> batch{BlockRead{published().entry, {}, {0, kSize}, whole, {}}, BlockRead{published().entry, {}, {kExtentBytes - 300, 700}, part, {}}};
  // One byte of the input for each datagram, and a few more where it says so; after the last, the wire is good.
  const auto next = [&input] {
    if (input.empty()) return std::uint8_t{0};
    const auto byte = static_cast<std::uint8_t>(input[0]);
    input = input.subspan(1);
    return byte;
  };
  std::deque<std::vector<std::byte>> wire;
  // Into the wire, as the input likes.
  const auto carry = [&](std::vector<std::byte> datagram, auto&& deliver) {
    const std::uint8_t what = next();
    switch (what % 8) {
      case 1: return;                                     // lost
      case 2: deliver(datagram); break;                   // repeated
      case 3: datagram[next() * datagram.size() / 256] ^= static_cast<std::byte>(what | 8); break;  // damaged
      case 4: datagram.resize(next() * datagram.size() / 256); break;                                // cut
      case 5: deliver(std::vector<std::byte>(input.begin(), input.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(input.size(), what)))); break;
      default: break;
    }
    deliver(std::move(datagram));
  };
  Micros now = 1;
  const Micros end = now + kPatience;
  Outbox out;
  reader.begin(batch, now);
  for (int turn = 0; turn < kTurnsMax && !reader.done() && now < end; ++turn) {
    out.clear();
    reader.poll(now, out);
    std::size_t at = 0;
    for (const std::uint16_t size : out.sizes) {
      std::vector<std::byte> get(out.bytes.begin() + static_cast<std::ptrdiff_t>(at), out.bytes.begin() + static_cast<std::ptrdiff_t>(at + size));
      at += size;
      carry(std::move(get), [&](std::vector<std::byte> datagram) {
        for (auto& answer : serve(*responder, datagram)) {
          carry(std::move(answer), [&](std::vector<std::byte> bytes) { wire.push_back(std::move(bytes)); });
        }
      });
    }
    if (wire.empty()) {
      now = reader.next_timer() == kNever ? end : std::max(now + 1, reader.next_timer());
      continue;
    }
    if (next() % 4 == 1) std::swap(wire.front(), wire.back());
    reader.on_datagram(++now, wire.front());
    wire.pop_front();
  }
  require(reader.done() || now >= end, "it ends");
  reader.abandon(Error(Code::kTimeout, "the deadline passed"));
  if (batch[0].result.ok()) require(whole == published().bytes, "what is taken is the block");
  if (batch[1].result.ok()) {
    require(std::equal(part.begin(), part.end(), published().bytes.begin() + static_cast<std::ptrdiff_t>(kExtentBytes - 300)), "what is taken is the range");
  }
}

}  // namespace paramwire::fuzz
