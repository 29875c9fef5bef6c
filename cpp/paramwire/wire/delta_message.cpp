#include "paramwire/wire/delta_message.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/wire/message_parts.hpp"

namespace paramwire {

namespace {

constexpr std::uint64_t kBodyMax = std::uint64_t{1} << 40;

void put(ByteWriter& out, const Version& version) {
  out.put<std::uint32_t>(version.epoch);
  out.put<std::uint64_t>(version.counter);
}
Version version_from(ByteReader& in) {
  Version version;
  version.epoch = in.get<std::uint32_t>();
  version.counter = in.get<std::uint64_t>();
  return version;
}

}  // namespace

Bytes DeltasMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  out.put<std::uint64_t>(incarnation.high);
  out.put<std::uint64_t>(incarnation.low);
  out.varint(asks.size());
  for (const Ask& ask : asks) {
    out.put<std::uint64_t>(ask.block.value);
    put(out, ask.version);
    put(out, ask.base);
  }
  return message_frame(FrameType::kDeltas, request, meta);
}
Result<DeltasMessage> DeltasMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  DeltasMessage m;
  m.incarnation.high = in.get<std::uint64_t>();
  m.incarnation.low = in.get<std::uint64_t>();
  const std::uint64_t count = in.varint();
  if (!in.ok() || count > kDeltasMax) return bad_message("DELTAS", "count");
  m.asks.resize(static_cast<std::size_t>(count));
  for (Ask& ask : m.asks) {
    ask.block.value = in.get<std::uint64_t>();
    ask.version = version_from(in);
    ask.base = version_from(in);
    if (!ask.version.valid() || !ask.base.valid()) return bad_message("DELTAS", "version");
  }
  if (!in.finished()) return bad_message("DELTAS", "length");
  return m;
}

std::uint64_t DeltaListMessage::body_size() const noexcept {
  std::uint64_t bytes = 0;
  for (const std::uint64_t size : sizes) bytes += size == kDeltaPending ? 0 : size;
  return bytes;
}
Bytes DeltaListMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  out.varint(sizes.size());
  for (const std::uint64_t size : sizes) out.put<std::uint64_t>(size);
  return message_frame(FrameType::kDeltaList, request, meta, body_size());
}
Result<DeltaListMessage> DeltaListMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  DeltaListMessage m;
  const std::uint64_t count = in.varint();
  if (!in.ok() || count > kDeltasMax) return bad_message("DELTA_LIST", "count");
  m.sizes.resize(static_cast<std::size_t>(count));
  for (std::uint64_t& size : m.sizes) {
    size = in.get<std::uint64_t>();
    if (size > kBodyMax && size != kDeltaPending) return bad_message("DELTA_LIST", "size");
  }
  if (!in.finished()) return bad_message("DELTA_LIST", "length");
  if (m.body_size() > kBodyMax) return bad_message("DELTA_LIST", "sizes together");
  return m;
}

}  // namespace paramwire
