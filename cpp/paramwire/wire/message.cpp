#include "paramwire/wire/message.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/wire/datagram.hpp"
#include "paramwire/wire/message_parts.hpp"

#include <algorithm>

namespace paramwire {

namespace {

// Longest text of an ERROR, and longest path or host id: bound what a peer can make us keep.
constexpr std::uint64_t kMaxErrorBytes = 16 * 1024;
constexpr std::uint64_t kMaxPathBytes = 4096;
// Facts of a STATS and bytes of a name: 4096 of 200 B names and values fit kMaxMetaBytes.
constexpr std::uint64_t kMaxStats = 4096;
constexpr std::uint64_t kMaxStatName = 200;
// Far over any manifest (2^32 blocks); small enough that their sum never wraps. The reader bounds its memory by the bytes
// that come, not by these.
constexpr std::uint64_t kMaxStreamBytes = std::uint64_t{1} << 40;
constexpr std::uint64_t kMaxLocators = std::uint64_t{1} << 32;

void put_version(ByteWriter& out, const Version& version) {
  out.put<std::uint32_t>(version.epoch);
  out.put<std::uint64_t>(version.counter);
}
Version get_version(ByteReader& in) {
  Version version;
  version.epoch = in.get<std::uint32_t>();
  version.counter = in.get<std::uint64_t>();
  return version;
}
void put_optional_version(ByteWriter& out, const std::optional<Version>& version) {
  put_version(out, version.value_or(Version{}));
}
// (0, 0) on the wire is "none"; one zero part is an error.
Result<std::optional<Version>> get_optional_version(ByteReader& in, std::string_view message) {
  const Version version = get_version(in);
  if (version == Version{}) return std::optional<Version>();
  if (!version.valid()) return bad_message(message, "version");
  return std::optional<Version>(version);
}
void put_incarnation(ByteWriter& out, const Incarnation& value) {
  out.put<std::uint64_t>(value.high);
  out.put<std::uint64_t>(value.low);
}
Incarnation get_incarnation(ByteReader& in) {
  Incarnation value;
  value.high = in.get<std::uint64_t>();
  value.low = in.get<std::uint64_t>();
  return value;
}
void put_publish(ByteWriter& out, const PublishId& value) {
  out.put<std::uint64_t>(value.high);
  out.put<std::uint64_t>(value.low);
}
PublishId get_publish(ByteReader& in) {
  PublishId value;
  value.high = in.get<std::uint64_t>();
  value.low = in.get<std::uint64_t>();
  return value;
}
void put_range(ByteWriter& out, const ByteRange& range) {
  out.put<std::uint64_t>(range.offset);
  out.put<std::uint64_t>(range.size);
}
ByteRange get_range(ByteReader& in) {
  ByteRange range;
  range.offset = in.get<std::uint64_t>();
  range.size = in.get<std::uint64_t>();
  return range;
}
bool overflows(const ByteRange& range) { return range.offset + range.size < range.offset; }
// At most `limit` bytes of `text`, not ending inside a UTF-8 sequence.
std::string_view clipped(std::string_view text, std::size_t limit) {
  if (text.size() <= limit) return text;
  while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xC0U) == 0x80U) --limit;
  return text.substr(0, limit);
}

}  // namespace

std::string PublishId::to_string() const { return hex64(high) + hex64(low); }

std::string_view frame_type_name(FrameType type) noexcept {
  switch (type) {
    case FrameType::kHello: return "HELLO";
    case FrameType::kWelcome: return "WELCOME";
    case FrameType::kError: return "ERROR";
    case FrameType::kOk: return "OK";
    case FrameType::kSnapshot: return "SNAPSHOT";
    case FrameType::kManifest: return "MANIFEST";
    case FrameType::kRenew: return "RENEW";
    case FrameType::kRelease: return "RELEASE";
    case FrameType::kGet: return "GET";
    case FrameType::kData: return "DATA";
    case FrameType::kDeltas: return "DELTAS";
    case FrameType::kDeltaList: return "DELTA_LIST";
    case FrameType::kArena: return "ARENA";
    case FrameType::kArenaFd: return "ARENA_FD";
    case FrameType::kPins: return "PINS";
    case FrameType::kPinsFd: return "PINS_FD";
    case FrameType::kPublishStart: return "PUBLISH_START";
    case FrameType::kPublishId: return "PUBLISH_ID";
    case FrameType::kPut: return "PUT";
    case FrameType::kPutDone: return "PUT_DONE";
    case FrameType::kRemove: return "REMOVE";
    case FrameType::kAlias: return "ALIAS";
    case FrameType::kFinish: return "FINISH";
    case FrameType::kPublished: return "PUBLISHED";
    case FrameType::kAbort: return "ABORT";
    case FrameType::kStat: return "STAT";
    case FrameType::kStats: return "STATS";
    case FrameType::kUdpOpen: return "UDP_OPEN";
    case FrameType::kUdpKey: return "UDP_KEY";
    case FrameType::kVerbsOpen: return "VERBS_OPEN";
    case FrameType::kVerbsReady: return "VERBS_READY";
    case FrameType::kVerbsRegions: return "VERBS_REGIONS";
    case FrameType::kVerbsRegionList: return "VERBS_REGION_LIST";
  }
  return "unknown";
}

Bytes encode_empty(FrameType type, std::uint64_t request) { return message_frame(type, request, {}); }

Bytes HelloMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  out.put<std::uint64_t>(client.high);
  out.put<std::uint64_t>(client.low);
  out.put<std::uint32_t>(pid);
  return message_frame(FrameType::kHello, request, meta);
}
Result<HelloMessage> HelloMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  HelloMessage m;
  m.client.high = in.get<std::uint64_t>();
  m.client.low = in.get<std::uint64_t>();
  m.pid = in.get<std::uint32_t>();
  if (!in.finished()) return bad_message("HELLO", "length");
  return m;
}

Bytes WelcomeMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  put_incarnation(out, incarnation);
  out.put<std::uint32_t>(epoch);
  put_optional_version(out, newest);
  out.put<std::uint32_t>(lease_ttl_ms_max);
  out.text(host_id);
  out.text(unix_path);
  return message_frame(FrameType::kWelcome, request, meta);
}
Result<WelcomeMessage> WelcomeMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  WelcomeMessage m;
  m.incarnation = get_incarnation(in);
  m.epoch = in.get<std::uint32_t>();
  PARAMWIRE_TRY(newest, get_optional_version(in, "WELCOME"));
  m.newest = newest;
  m.lease_ttl_ms_max = in.get<std::uint32_t>();
  m.host_id = in.text(kMaxPathBytes);
  m.unix_path = in.text(kMaxPathBytes);
  if (!in.finished()) return bad_message("WELCOME", "length");
  if (m.epoch == 0) return bad_message("WELCOME", "epoch");
  return m;
}

Bytes ErrorMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  out.put<std::uint8_t>(static_cast<std::uint8_t>(code));
  out.text(clipped(text, kMaxErrorBytes));
  return message_frame(FrameType::kError, request, meta);
}
Result<ErrorMessage> ErrorMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  ErrorMessage m;
  const std::uint8_t code = in.get<std::uint8_t>();
  m.text = in.text(kMaxErrorBytes);
  if (!in.finished()) return bad_message("ERROR", "length");
  if (code < static_cast<std::uint8_t>(Code::kInvalid) || code > static_cast<std::uint8_t>(Code::kDenied)) {
    return bad_message("ERROR", "code");
  }
  m.code = static_cast<Code>(code);
  return m;
}

Bytes SnapshotMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  put_optional_version(out, want);
  put_optional_version(out, held);
  out.bytes(held_root);
  out.put<std::uint32_t>(lease_ttl_ms);
  out.put<std::uint32_t>(wait_ms);
  out.put<std::uint8_t>(locators ? 1 : 0);
  return message_frame(FrameType::kSnapshot, request, meta);
}
Result<SnapshotMessage> SnapshotMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  SnapshotMessage m;
  PARAMWIRE_TRY(want, get_optional_version(in, "SNAPSHOT"));
  PARAMWIRE_TRY(held, get_optional_version(in, "SNAPSHOT"));
  m.want = want;
  m.held = held;
  const auto root = in.bytes(sizeof(Digest));
  std::copy(root.begin(), root.end(), m.held_root.begin());
  m.lease_ttl_ms = in.get<std::uint32_t>();
  m.wait_ms = in.get<std::uint32_t>();
  const std::uint8_t locators = in.get<std::uint8_t>();
  if (!in.finished() || locators > 1) return bad_message("SNAPSHOT", "length or flag");
  if (!m.held && m.held_root != Digest{}) return bad_message("SNAPSHOT", "root without a held version");
  m.locators = locators == 1;
  return m;
}

std::uint64_t ManifestMessage::body_size() const noexcept { return stream_size + locator_count * kLocatorBytes; }
Bytes ManifestMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  put_incarnation(out, incarnation);
  out.put<std::uint64_t>(lease);
  out.put<std::uint32_t>(lease_ttl_ms);
  out.put<std::uint64_t>(stream_size);
  out.put<std::uint64_t>(locator_count);
  return message_frame(FrameType::kManifest, request, meta, body_size());
}
Result<ManifestMessage> ManifestMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  ManifestMessage m;
  m.incarnation = get_incarnation(in);
  m.lease = in.get<std::uint64_t>();
  m.lease_ttl_ms = in.get<std::uint32_t>();
  m.stream_size = in.get<std::uint64_t>();
  m.locator_count = in.get<std::uint64_t>();
  if (!in.finished()) return bad_message("MANIFEST", "length");
  if (m.stream_size > kMaxStreamBytes || m.locator_count > kMaxLocators) return bad_message("MANIFEST", "size");
  return m;
}

void append_locator(Bytes& target, const Locator& locator) {
  ByteWriter out(target);
  out.put<std::uint16_t>(locator.arena);
  out.put<std::uint16_t>(locator.header_arena);
  out.put<std::uint64_t>(locator.header_offset);
  out.put<std::uint64_t>(locator.payload_offset);
  out.put<std::uint64_t>(locator.seq);
}
Locator read_locator(std::span<const std::byte, kLocatorBytes> bytes) noexcept {
  Locator locator;
  locator.arena = load_le<std::uint16_t>(bytes.data());
  locator.header_arena = load_le<std::uint16_t>(bytes.data() + 2);
  locator.header_offset = load_le<std::uint64_t>(bytes.data() + 4);
  locator.payload_offset = load_le<std::uint64_t>(bytes.data() + 12);
  locator.seq = load_le<std::uint64_t>(bytes.data() + 20);
  return locator;
}

Bytes LeaseMessage::encode(FrameType type, std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  out.put<std::uint64_t>(lease);
  out.put<std::uint32_t>(ttl_ms);
  return message_frame(type, request, meta);
}
Result<LeaseMessage> LeaseMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  LeaseMessage m;
  m.lease = in.get<std::uint64_t>();
  m.ttl_ms = in.get<std::uint32_t>();
  if (!in.finished()) return bad_message("RENEW or RELEASE", "length");
  return m;
}

Bytes GetMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  out.put<std::uint64_t>(block.value);
  put_version(out, version);
  put_incarnation(out, incarnation);
  put_range(out, range);
  out.put<std::uint8_t>(extent_table ? 1 : 0);
  return message_frame(FrameType::kGet, request, meta);
}
Result<GetMessage> GetMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  GetMessage m;
  m.block.value = in.get<std::uint64_t>();
  m.version = get_version(in);
  m.incarnation = get_incarnation(in);
  m.range = get_range(in);
  const std::uint8_t table = in.get<std::uint8_t>();
  if (!in.finished() || table > 1) return bad_message("GET", "length or flag");
  if (!m.version.valid()) return bad_message("GET", "version");
  if (overflows(m.range)) return bad_message("GET", "range");
  m.extent_table = table == 1;
  return m;
}

Bytes DataMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  out.put<std::uint64_t>(block.value);
  put_version(out, version);
  put_incarnation(out, incarnation);
  out.put<std::uint64_t>(stored_size);
  put_range(out, range);
  out.varint(extent_table.size());
  out.bytes(extent_table);
  return message_frame(FrameType::kData, request, meta, range.size);
}
Result<DataMessage> DataMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  DataMessage m;
  m.block.value = in.get<std::uint64_t>();
  m.version = get_version(in);
  m.incarnation = get_incarnation(in);
  m.stored_size = in.get<std::uint64_t>();
  m.range = get_range(in);
  const std::uint64_t table_size = in.varint();
  if (table_size > kMaxTableBytes) return bad_message("DATA", "extent table size");
  m.extent_table = in.bytes(table_size);
  if (!in.finished() || m.extent_table.size() % sizeof(ExtentRow) != 0) return bad_message("DATA", "length");
  if (!m.version.valid()) return bad_message("DATA", "version");
  if (overflows(m.range) || m.range.offset + m.range.size > m.stored_size) return bad_message("DATA", "range");
  return m;
}

Bytes ArenaMessage::encode(FrameType type, std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  out.put<std::uint32_t>(arena);
  out.put<std::uint64_t>(size);
  return message_frame(type, request, meta);
}
Result<ArenaMessage> ArenaMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  ArenaMessage m;
  m.arena = in.get<std::uint32_t>();
  m.size = in.get<std::uint64_t>();
  if (!in.finished()) return bad_message("ARENA", "length");
  if (m.arena > kArenaMax) return bad_message("ARENA", "arena");
  return m;
}

Bytes PinsMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter(meta).put<std::uint32_t>(capacity);
  return message_frame(FrameType::kPinsFd, request, meta);
}
Result<PinsMessage> PinsMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  PinsMessage m;
  m.capacity = in.get<std::uint32_t>();
  if (!in.finished() || m.capacity == 0) return bad_message("PINS_FD", "length or capacity");
  return m;
}

Bytes PublishStartMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  out.put<std::uint8_t>(any_base ? 1 : 0);
  put_optional_version(out, any_base ? std::nullopt : base);
  return message_frame(FrameType::kPublishStart, request, meta);
}
Result<PublishStartMessage> PublishStartMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  PublishStartMessage m;
  const std::uint8_t any = in.get<std::uint8_t>();
  PARAMWIRE_TRY(base, get_optional_version(in, "PUBLISH_START"));
  if (!in.finished() || any > 1) return bad_message("PUBLISH_START", "length or flag");
  if (any == 1 && base) return bad_message("PUBLISH_START", "base beside any");
  m.any_base = any == 1;
  m.base = base;
  return m;
}

Bytes PublishIdMessage::encode(FrameType type, std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  put_publish(out, publish);
  put_version(out, version);
  return message_frame(type, request, meta);
}
Result<PublishIdMessage> PublishIdMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  PublishIdMessage m;
  m.publish = get_publish(in);
  m.version = get_version(in);
  if (!in.finished()) return bad_message("PUBLISH_ID, FINISH or ABORT", "length");
  if (m.version != Version{} && !m.version.valid()) return bad_message("PUBLISH_ID, FINISH or ABORT", "version");
  return m;
}

Bytes PutMessage::encode(std::uint64_t request, std::uint64_t body_size) const {
  Bytes meta;
  ByteWriter out(meta);
  put_publish(out, publish);
  out.text(tensor);
  out.put<std::uint16_t>(static_cast<std::uint16_t>(dtype));
  out.put<std::uint8_t>(static_cast<std::uint8_t>(shape.rank()));
  for (std::uint64_t dim : shape.dims()) out.put<std::uint64_t>(dim);
  out.put<std::uint8_t>(static_cast<std::uint8_t>(shard.kind));
  out.put<std::uint32_t>(shard.heads);
  out.put<std::uint64_t>(shard.begin);
  out.put<std::uint64_t>(shard.end);
  out.put<std::uint16_t>(static_cast<std::uint16_t>(codec));
  return message_frame(FrameType::kPut, request, meta, body_size);
}
Result<PutMessage> PutMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  PutMessage m;
  m.publish = get_publish(in);
  m.tensor = in.text(kMaxNameBytes);
  const auto dtype = dtype_from_code(in.get<std::uint16_t>());
  if (!in.ok() || !dtype.ok()) return bad_message("PUT", "dtype");
  m.dtype = *dtype;
  const std::uint8_t rank = in.get<std::uint8_t>();
  if (rank > Shape::kMaxAxes) return bad_message("PUT", "rank");
  std::array<std::uint64_t, Shape::kMaxAxes> dims{};
  for (std::size_t i = 0; i < rank; ++i) dims[i] = in.get<std::uint64_t>();
  const auto shape = Shape::from({dims.data(), rank});
  if (!shape.ok()) return bad_message("PUT", "shape");
  m.shape = *shape;
  const std::uint8_t kind = in.get<std::uint8_t>();
  if (kind > static_cast<std::uint8_t>(ShardKind::kHeads)) return bad_message("PUT", "shard kind");
  m.shard.kind = static_cast<ShardKind>(kind);
  m.shard.heads = in.get<std::uint32_t>();
  m.shard.begin = in.get<std::uint64_t>();
  m.shard.end = in.get<std::uint64_t>();
  const std::uint16_t codec = in.get<std::uint16_t>();
  m.codec = static_cast<CodecId>(codec);
  if (!in.finished()) return bad_message("PUT", "length");
  if (codec > kCodecMax) return bad_message("PUT", "codec");
  if (!valid_name(m.tensor)) return bad_message("PUT", "tensor name");
  if (!canonical(m.shard)) return bad_message("PUT", "shard");
  return m;
}

Bytes PutDoneMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  out.put<std::uint64_t>(block.value);
  out.put<std::uint64_t>(crc64);
  return message_frame(FrameType::kPutDone, request, meta);
}
Result<PutDoneMessage> PutDoneMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  PutDoneMessage m;
  m.block.value = in.get<std::uint64_t>();
  m.crc64 = in.get<std::uint64_t>();
  if (!in.finished()) return bad_message("PUT_DONE", "length");
  return m;
}

Bytes NameMessage::encode(FrameType type, std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  put_publish(out, publish);
  out.text(tensor);
  out.text(target);
  return message_frame(type, request, meta);
}
Result<NameMessage> NameMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  NameMessage m;
  m.publish = get_publish(in);
  m.tensor = in.text(kMaxNameBytes);
  m.target = in.text(kMaxNameBytes);
  if (!in.finished()) return bad_message("REMOVE or ALIAS", "length");
  if (!valid_name(m.tensor) || (!m.target.empty() && !valid_name(m.target))) return bad_message("REMOVE or ALIAS", "tensor name");
  return m;
}

Bytes PublishedMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  put_version(out, version);
  return message_frame(FrameType::kPublished, request, meta);
}
Result<PublishedMessage> PublishedMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  PublishedMessage m;
  m.version = get_version(in);
  if (!in.finished() || !m.version.valid()) return bad_message("PUBLISHED", "version");
  return m;
}

Bytes StatsMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  out.varint(values.size());
  for (const auto& [name, value] : values) {
    out.text(name);
    out.put<std::uint64_t>(value);
  }
  return message_frame(FrameType::kStats, request, meta);
}
Result<StatsMessage> StatsMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  StatsMessage m;
  const std::uint64_t count = in.varint();
  if (count > kMaxStats) return bad_message("STATS", "count");
  for (std::uint64_t i = 0; i < count && in.ok(); ++i) {
    std::string name(in.text(kMaxStatName));
    m.values.emplace_back(std::move(name), in.get<std::uint64_t>());
  }
  if (!in.finished()) return bad_message("STATS", "length");
  return m;
}

Bytes UdpKeyMessage::encode(std::uint64_t request) const {
  Bytes meta;
  ByteWriter out(meta);
  out.put<std::uint16_t>(port);
  out.put<std::uint64_t>(session);
  out.put<std::uint64_t>(key.k0);
  out.put<std::uint64_t>(key.k1);
  out.put<std::uint16_t>(segment_max);
  return message_frame(FrameType::kUdpKey, request, meta);
}
Result<UdpKeyMessage> UdpKeyMessage::decode(std::span<const std::byte> meta) {
  ByteReader in(meta);
  UdpKeyMessage m;
  m.port = in.get<std::uint16_t>();
  m.session = in.get<std::uint64_t>();
  m.key.k0 = in.get<std::uint64_t>();
  m.key.k1 = in.get<std::uint64_t>();
  m.segment_max = in.get<std::uint16_t>();
  if (!in.finished() || m.port == 0 || m.session == 0) return bad_message("UDP_KEY", "length, port or session");
  if (m.segment_max < kSegmentBytesMin || m.segment_max > kSegmentBytesMax) return bad_message("UDP_KEY", "segment_max");
  return m;
}

}  // namespace paramwire
