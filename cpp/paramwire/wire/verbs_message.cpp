#include "paramwire/wire/verbs_message.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/wire/message_parts.hpp"

#include <bit>

namespace paramwire {

namespace {

constexpr std::uint32_t k24Bits = (1U << 24) - 1;

void put_end(ByteWriter& out, const VerbsEnd& end) {
  out.bytes(std::as_bytes(std::span(end.gid)));
  out.put<std::uint32_t>(end.queue_pair);
  out.put<std::uint32_t>(end.packet);
  out.put<std::uint16_t>(end.mtu);
  out.put<std::uint16_t>(end.lid);
  out.put<std::uint8_t>(end.reads);
  out.put<std::uint8_t>(end.type);
}

Result<VerbsEnd> get_end(ByteReader& in, std::string_view message) {
  VerbsEnd end;
  const auto gid = in.bytes(end.gid.size());
  for (std::size_t i = 0; i < gid.size(); ++i) end.gid[i] = static_cast<std::uint8_t>(gid[i]);
  end.queue_pair = in.get<std::uint32_t>();
  end.packet = in.get<std::uint32_t>();
  end.mtu = in.get<std::uint16_t>();
  end.lid = in.get<std::uint16_t>();
  end.reads = in.get<std::uint8_t>();
  end.type = in.get<std::uint8_t>();
  if (end.queue_pair == 0 || end.queue_pair > k24Bits) return bad_message(message, "queue_pair");
  if (end.packet > k24Bits) return bad_message(message, "packet");
  if (end.mtu < 256 || end.mtu > 4096 || !std::has_single_bit(end.mtu)) return bad_message(message, "mtu");
  if (end.type > 2 || end.reads == 0) return bad_message(message, "type or reads");
  return end;
}

}  // namespace

Bytes VerbsOpenMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  put_end(out, end);
  out.put<std::uint8_t>(choice);
  return message_frame(FrameType::kVerbsOpen, request, meta);
}
Result<VerbsOpenMessage> VerbsOpenMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  VerbsOpenMessage m;
  PARAMWIRE_TRY(end, get_end(in, "VERBS_OPEN"));
  m.end = end;
  m.choice = in.get<std::uint8_t>();
  if (!in.finished()) return bad_message("VERBS_OPEN", "length");
  return m;
}

Bytes VerbsReadyMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  put_end(out, end);
  out.put<std::uint64_t>(probe_address);
  out.put<std::uint32_t>(probe_key);
  out.put<std::uint32_t>(probe_size);
  return message_frame(FrameType::kVerbsReady, request, meta);
}
Result<VerbsReadyMessage> VerbsReadyMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  VerbsReadyMessage m;
  PARAMWIRE_TRY(end, get_end(in, "VERBS_READY"));
  m.end = end;
  m.probe_address = in.get<std::uint64_t>();
  m.probe_key = in.get<std::uint32_t>();
  m.probe_size = in.get<std::uint32_t>();
  if (!in.finished() || m.probe_size == 0 || m.probe_size > kVerbsProbeBytes) return bad_message("VERBS_READY", "length or probe_size");
  return m;
}

Bytes VerbsRegionsMessage::encode(std::uint64_t request) const {
  Bytes meta;
  meta.reserve(15);  // GCC 12 at -O3 takes the growth of an empty vector for a write out of bounds
  ByteWriter out(meta);
  out.put<std::uint32_t>(known);
  out.put<std::uint8_t>(wanted ? 1 : 0);
  out.put<std::uint16_t>(arena);
  out.put<std::uint64_t>(offset);
  return message_frame(FrameType::kVerbsRegions, request, meta);
}
Result<VerbsRegionsMessage> VerbsRegionsMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  VerbsRegionsMessage m;
  m.known = in.get<std::uint32_t>();
  const auto wanted = in.get<std::uint8_t>();
  m.wanted = wanted == 1;
  m.arena = in.get<std::uint16_t>();
  m.offset = in.get<std::uint64_t>();
  if (!in.finished() || wanted > 1) return bad_message("VERBS_REGIONS", "length or wanted");
  if (!m.wanted && (m.arena != 0 || m.offset != 0)) return bad_message("VERBS_REGIONS", "arena or offset without wanted");
  return m;
}

Bytes VerbsRegionListMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  out.put<std::uint8_t>(complete ? 1 : 0);
  out.varint(regions.size());
  for (const VerbsRegion& region : regions) {
    out.put<std::uint16_t>(region.arena);
    out.put<std::uint64_t>(region.offset);
    out.put<std::uint32_t>(region.size);
    out.put<std::uint64_t>(region.address);
    out.put<std::uint32_t>(region.key);
  }
  return message_frame(FrameType::kVerbsRegionList, request, meta);
}
Result<VerbsRegionListMessage> VerbsRegionListMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  VerbsRegionListMessage m;
  const auto complete = in.get<std::uint8_t>();
  m.complete = complete == 1;
  const std::uint64_t count = in.varint();
  if (complete > 1 || count > kVerbsRegionsMax) return bad_message("VERBS_REGION_LIST", "complete or count");
  for (std::uint64_t i = 0; i < count && in.ok(); ++i) {
    VerbsRegion region;
    region.arena = in.get<std::uint16_t>();
    region.offset = in.get<std::uint64_t>();
    region.size = in.get<std::uint32_t>();
    region.address = in.get<std::uint64_t>();
    region.key = in.get<std::uint32_t>();
    if (in.ok() && (region.offset % kRegionBytes != 0 || region.size == 0 || region.size > kRegionBytes)) return bad_message("VERBS_REGION_LIST", "region");
    m.regions.push_back(region);
  }
  if (!in.finished()) return bad_message("VERBS_REGION_LIST", "length");
  return m;
}

}  // namespace paramwire
