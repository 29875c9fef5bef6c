// The library against tests/golden/wire.txt; tests/python/test_wire_golden.py holds an independent codec against the same file.
#include "support/golden_text.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/base/siphash.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/wire/datagram.hpp"
#include "paramwire/wire/message.hpp"
#include "paramwire/wire/delta_message.hpp"
#include "paramwire/wire/verbs_message.hpp"

#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

namespace paramwire {
namespace {

using namespace testing;

// One line: its kind and its key=value pairs. Asking for a key that the line lacks fails the test.
class Line {
 public:
  explicit Line(const std::string& text) {
    std::istringstream in(text);
    in >> kind;
    for (std::string pair; in >> pair;) values_[pair.substr(0, pair.find('='))] = pair.substr(pair.find('=') + 1);
  }
  const std::string& text(const std::string& key) const {
    static const std::string kNone;
    const auto found = values_.find(key);
    EXPECT_NE(found, values_.end()) << kind << " has no " << key;
    return found == values_.end() ? kNone : found->second;
  }
  std::uint64_t u64(const std::string& key) const { return number(text(key)); }
  std::uint32_t u32(const std::string& key) const { return static_cast<std::uint32_t>(u64(key)); }
  std::uint64_t id(const std::string& key) const { return number(text(key), 16); }
  template <typename T>  // Incarnation, ClientId, PublishId
  T id128(const std::string& key) const {
    return T{number(text(key).substr(0, 16), 16), number(text(key).substr(16), 16)};
  }
  SipKey sip_key(const std::string& key) const {
    const Bytes bytes = unhex(text(key));
    return {load_le<std::uint64_t>(bytes.data()), load_le<std::uint64_t>(bytes.data() + 8)};
  }
  SipTag sip_tag(const std::string& key) const { return {sip_key(key).k0, sip_key(key).k1}; }
  Asked asked() const { return {id128<Incarnation>("incarnation"), {id("block")}, version("version"), static_cast<BlockPart>(u64("part"))}; }
  Version version(const std::string& key) const {
    const std::string& value = text(key);
    const auto dot = value.find('.');
    return Version{static_cast<std::uint32_t>(number(value.substr(0, dot))), number(value.substr(dot + 1))};
  }
  std::optional<Version> optional_version(const std::string& key) const {
    const Version value = version(key);
    return value == Version{} ? std::nullopt : std::optional(value);
  }
  Shape shape() const {
    std::vector<std::uint64_t> dims;
    std::istringstream in(text("shape"));
    for (std::string dim; std::getline(in, dim, ',');) dims.push_back(number(dim));
    return Shape::from(dims).value();
  }
  Shard shard() const {
    return {static_cast<ShardKind>(u64("shard_kind")), u32("heads"), u64("begin"), u64("end")};
  }
  Bytes golden() const { return unhex(text("hex")); }

  std::string kind;

 private:
  std::map<std::string, std::string> values_;
};

const std::vector<Line>& lines() {
  static const std::vector<Line> kLines = [] {
    std::vector<Line> read;
    std::ifstream in(std::string(PARAMWIRE_GOLDEN_DIR) + "/wire.txt");
    for (std::string line; std::getline(in, line);) {
      if (!line.empty() && line[0] != '#') read.emplace_back(line);
    }
    return read;
  }();
  return kLines;
}

template <std::unsigned_integral T>
Bytes little(T value) {
  Bytes bytes;
  ByteWriter(bytes).put(value);
  return bytes;
}

// Builds each datagram from its fields, and reads the golden bytes back.
Bytes datagram_bytes(const Line& l) {
  const Bytes golden = l.golden();
  Bytes bytes;
  if (l.kind == "udp_get") {
    DatagramGet get;
    get.session = l.id("session");
    get.sequence = l.u64("sequence");
    get.request = l.id("request");
    get.asked = l.asked();
    get.segment_size = static_cast<std::uint16_t>(l.u64("segment_size"));
    get.token = l.sip_tag("token");
    get.first_segment = l.u32("first_segment");
    std::istringstream in(l.text("wanted"));
    for (std::string i; std::getline(in, i, ',');) {
      get.want(static_cast<std::uint32_t>(number(i)));
      get.segment_count = static_cast<std::uint16_t>(number(i) + 1);
    }
    get.encode(bytes, l.sip_key("key"));
    DatagramGet read;
    const char* const refused = decode_get(golden, read);
    EXPECT_EQ(refused, nullptr) << refused;
    EXPECT_TRUE(get_authentic(golden, l.sip_key("key")));
    Bytes again;
    read.encode(again, l.sip_key("key"));
    EXPECT_EQ(hex(again), hex(golden));
  } else if (l.kind == "udp_data") {
    const Bytes payload = unhex(l.text("payload"));
    const AskedCrc asked(l.asked());
    bytes.resize(kDataHeaderBytes);
    encode_data_header(bytes.data(), {static_cast<std::uint16_t>(payload.size()), l.id("request"), l.u32("segment")}, asked);
    bytes.insert(bytes.end(), payload.begin(), payload.end());
    const auto read = read_data(golden);
    EXPECT_TRUE(read && read->request == l.id("request") && read->segment == l.u32("segment"));
    EXPECT_TRUE(data_header_intact(golden, asked));
  } else {
    const DatagramStatus status{static_cast<StatusCode>(l.u64("code")), l.id("request"), l.u32("retry_us"), l.sip_tag("token")};
    const auto encoded = status.encode(l.sip_key("key"));
    bytes.assign(encoded.begin(), encoded.end());
    bool forged = false;
    const auto read = read_status(golden, l.sip_key("key"), forged);
    EXPECT_TRUE(read && read->code == status.code && read->token == status.token && read->retry_us == status.retry_us && !forged);
  }
  return bytes;
}

Bytes struct_bytes(const Line& l) {
  if (l.kind.starts_with("udp_")) return datagram_bytes(l);
  if (l.kind == "siphash128") {
    const SipTag tag = siphash128(l.sip_key("key"), unhex(l.text("data")));
    Bytes bytes;
    ByteWriter out(bytes);
    out.put(tag.low);
    out.put(tag.high);
    return bytes;
  }
  if (l.kind == "crc32c") return little(crc32c(std::as_bytes(std::span(l.text("text")))));
  if (l.kind == "crc64") return little(crc64(std::as_bytes(std::span(l.text("text")))));
  if (l.kind == "block_id") return little(block_id(l.text("tensor"), l.shard()).value);
  if (l.kind == "pin_word") return little(pin_word(Locator{0, static_cast<std::uint16_t>(l.u32("header_arena")), l.u64("header_offset"), 0, 0}));
  if (l.kind == "extent_row") {
    const ExtentRow row{l.u32("stored_size"), static_cast<std::uint32_t>(l.id("crc32c"))};
    const auto bytes = std::as_bytes(std::span(&row, 1));
    return {bytes.begin(), bytes.end()};
  }
  if (l.kind == "locator") {
    const Locator locator{static_cast<std::uint16_t>(l.u32("arena")), static_cast<std::uint16_t>(l.u32("header_arena")), l.u64("header_offset"), l.u64("payload_offset"), l.u64("seq")};
    Bytes bytes;
    append_locator(bytes, locator);
    EXPECT_EQ(read_locator(std::span<const std::byte, kLocatorBytes>(bytes)), locator);
    return bytes;
  }
  if (l.kind == "slot_header") {
    SlotHeader header{l.u64("seq"), l.u64("version_counter"), l.u64("raw_size"), l.u64("stored_size"), l.id("crc64"), l.id("block"),
                      l.u32("epoch"), l.u32("extent_table"), static_cast<std::uint16_t>(l.u64("codec")),
                      static_cast<std::uint16_t>(l.u64("dtype")), 0};
    header.header_crc = slot_header_crc(header);
    EXPECT_EQ(header.header_crc, l.id("header_crc"));
    EXPECT_EQ(verify(header), nullptr);
    const auto bytes = std::as_bytes(std::span(&header, 1));
    return {bytes.begin(), bytes.end()};
  }
  ADD_FAILURE() << "unknown kind of line: " << l.kind;
  return {};
}

template <typename Message, typename Encode>
Bytes both_ways(const Message& message, const Bytes& golden, const Encode& encode) {
  const auto meta = std::span(golden).subspan(sizeof(FrameHeader));
  const auto decoded = Message::decode(meta);
  EXPECT_TRUE(decoded.ok()) << decoded.error().to_string();
  if (decoded.ok()) {
    EXPECT_EQ(hex(encode(*decoded)), hex(golden));
  }
  return encode(message);
}

std::vector<std::pair<std::string, std::uint64_t>> stats(const std::string& text) {
  std::vector<std::pair<std::string, std::uint64_t>> values;
  std::istringstream in(text);
  for (std::string pair; std::getline(in, pair, ',');) {
    values.emplace_back(pair.substr(0, pair.find(':')), number(pair.substr(pair.find(':') + 1)));
  }
  return values;
}

VerbsEnd verbs_end(const Line& l) {
  VerbsEnd end;
  const Bytes gid = unhex(l.text("gid"));
  EXPECT_EQ(gid.size(), end.gid.size());
  for (std::size_t i = 0; i < gid.size(); ++i) end.gid.at(i) = std::to_integer<std::uint8_t>(gid[i]);
  end.queue_pair = l.u32("queue_pair");
  end.packet = l.u32("packet");
  end.mtu = static_cast<std::uint16_t>(l.u64("mtu"));
  end.lid = static_cast<std::uint16_t>(l.u64("lid"));
  end.reads = static_cast<std::uint8_t>(l.u64("reads"));
  end.type = static_cast<std::uint8_t>(l.u64("type"));
  return end;
}

// "arena:offset:size:address:key,...", address and key in hex.
std::vector<VerbsRegion> regions(const std::string& text) {
  std::vector<VerbsRegion> out;
  std::istringstream in(text);
  for (std::string row; std::getline(in, row, ',');) {
    std::istringstream fields(row);
    std::array<std::string, 5> field;
    for (std::string& each : field) std::getline(fields, each, ':');
    out.push_back({static_cast<std::uint16_t>(number(field[0])), number(field[1]), static_cast<std::uint32_t>(number(field[2])), number(field[3], 16),
                   static_cast<std::uint32_t>(number(field[4], 16))});
  }
  return out;
}

// "block:version:base,...", the block in hex.
std::vector<DeltasMessage::Ask> asks(const std::string& text) {
  const auto version = [](const std::string& dotted) {
    const auto dot = dotted.find('.');
    return Version{static_cast<std::uint32_t>(number(dotted.substr(0, dot))), number(dotted.substr(dot + 1))};
  };
  std::vector<DeltasMessage::Ask> out;
  std::istringstream in(text);
  for (std::string row; std::getline(in, row, ',');) {
    std::istringstream fields(row);
    std::array<std::string, 3> field;
    for (std::string& each : field) std::getline(fields, each, ':');
    out.push_back({BlockId{number(field[0], 16)}, version(field[1]), version(field[2])});
  }
  return out;
}

std::vector<std::uint64_t> sizes(const std::string& text) {
  std::vector<std::uint64_t> out;
  std::istringstream in(text);
  for (std::string size; std::getline(in, size, ',');) out.push_back(number(size));
  return out;
}

// Builds each message from its fields; also decodes the golden bytes and encodes them again.
Bytes message_bytes(const Line& l) {
  const Bytes golden = l.golden();
  const std::uint64_t request = l.u64("request");
  const auto plain = [&](const auto& m) { return m.encode(request); };
  const auto typed = [&](FrameType type) { return [=](const auto& m) { return m.encode(type, request); }; };
  const auto type = static_cast<FrameType>(golden.at(5));
  EXPECT_EQ(frame_type_name(type), l.kind);
  switch (type) {
    case FrameType::kHello: return both_ways(HelloMessage{l.id128<ClientId>("client"), l.u32("pid")}, golden, plain);
    case FrameType::kWelcome:
      return both_ways(WelcomeMessage{l.id128<Incarnation>("incarnation"), l.u32("epoch"), l.optional_version("newest"),
                                      l.u32("lease_ttl_ms_max"), l.text("host_id"), l.text("unix_path")}, golden, plain);
    case FrameType::kError: return both_ways(ErrorMessage{static_cast<Code>(l.u64("code")), l.text("text")}, golden, plain);
    case FrameType::kOk:
    case FrameType::kPins:
    case FrameType::kStat:
    case FrameType::kUdpOpen: return encode_empty(type, request);
    case FrameType::kUdpKey:
      return both_ways(UdpKeyMessage{static_cast<std::uint16_t>(l.u64("port")), l.id("session"), l.sip_key("key"), static_cast<std::uint16_t>(l.u64("segment_max"))}, golden, plain);
    case FrameType::kVerbsOpen: return both_ways(VerbsOpenMessage{verbs_end(l), static_cast<std::uint8_t>(l.u64("choice"))}, golden, plain);
    case FrameType::kVerbsReady:
      return both_ways(VerbsReadyMessage{verbs_end(l), l.id("probe_address"), static_cast<std::uint32_t>(l.id("probe_key")), l.u32("probe_size")}, golden, plain);
    case FrameType::kVerbsRegions:
      return both_ways(VerbsRegionsMessage{l.u32("known"), l.u64("wanted") == 1, static_cast<std::uint16_t>(l.u64("arena")), l.u64("offset")}, golden, plain);
    case FrameType::kVerbsRegionList: return both_ways(VerbsRegionListMessage{l.u64("complete") == 1, regions(l.text("regions"))}, golden, plain);
    case FrameType::kSnapshot: {
      SnapshotMessage m{l.optional_version("want"), l.optional_version("held"), {}, l.u32("lease_ttl_ms"), l.u32("wait_ms"),
                        l.u64("locators") == 1};
      std::ranges::copy(unhex(l.text("held_root")), m.held_root.begin());
      return both_ways(m, golden, plain);
    }
    case FrameType::kManifest:
      return both_ways(ManifestMessage{l.id128<Incarnation>("incarnation"), l.u64("lease"), l.u32("lease_ttl_ms"),
                                       l.u64("stream_size"), l.u64("locator_count")}, golden, plain);
    case FrameType::kRenew:
    case FrameType::kRelease: return both_ways(LeaseMessage{l.u64("lease"), l.u32("ttl_ms")}, golden, typed(type));
    case FrameType::kGet:
      return both_ways(GetMessage{BlockId{l.id("block")}, l.version("version"), l.id128<Incarnation>("incarnation"),
                                  {l.u64("range_offset"), l.u64("range_size")}, l.u64("extent_table") == 1}, golden, plain);
    case FrameType::kData: {
      const Bytes table = unhex(l.text("extent_table"));
      return both_ways(DataMessage{BlockId{l.id("block")}, l.version("version"), l.id128<Incarnation>("incarnation"),
                                   l.u64("stored_size"), {l.u64("range_offset"), l.u64("range_size")}, table}, golden, plain);
    }
    case FrameType::kDeltas: return both_ways(DeltasMessage{l.id128<Incarnation>("incarnation"), asks(l.text("asks"))}, golden, plain);
    case FrameType::kDeltaList: return both_ways(DeltaListMessage{sizes(l.text("sizes"))}, golden, plain);
    case FrameType::kArena:
    case FrameType::kArenaFd: return both_ways(ArenaMessage{l.u32("arena"), l.u64("size")}, golden, typed(type));
    case FrameType::kPinsFd: return both_ways(PinsMessage{l.u32("capacity")}, golden, plain);
    case FrameType::kPublishStart:
      return both_ways(PublishStartMessage{l.u64("any_base") == 1, l.optional_version("base")}, golden, plain);
    case FrameType::kPublishId:
    case FrameType::kFinish:
    case FrameType::kAbort: return both_ways(PublishIdMessage{l.id128<PublishId>("publish"), l.version("version")}, golden, typed(type));
    case FrameType::kPut:
      return both_ways(PutMessage{l.id128<PublishId>("publish"), l.text("tensor"), static_cast<DType>(l.u64("dtype")), l.shape(),
                                  l.shard(), static_cast<CodecId>(l.u64("codec"))}, golden, [&](const PutMessage& m) { return m.encode(request, l.u64("body_size")); });
    case FrameType::kPutDone: return both_ways(PutDoneMessage{BlockId{l.id("block")}, l.id("crc64")}, golden, plain);
    case FrameType::kRemove:
    case FrameType::kAlias:
      return both_ways(NameMessage{l.id128<PublishId>("publish"), l.text("tensor"), l.text("target")}, golden, typed(type));
    case FrameType::kPublished: return both_ways(PublishedMessage{l.version("version")}, golden, plain);
    case FrameType::kStats: return both_ways(StatsMessage{stats(l.text("values"))}, golden, plain);
  }
  ADD_FAILURE() << l.kind << " has an unknown frame type";
  return {};
}

ManifestEntry entry_of(const Line& l) {
  ManifestEntry entry;
  entry.kind = static_cast<EntryKind>(l.u64("kind"));
  entry.tensor = l.text("tensor");
  entry.version = l.version("version");
  entry.target = l.text("target");
  entry.shard = l.shard();
  entry.id = block_id(entry.tensor, entry.shard);
  if (entry.kind == EntryKind::kAlias) return entry;
  entry.dtype = static_cast<DType>(l.u64("dtype"));
  entry.shape = l.shape();
  entry.raw_size = block_bytes(entry.dtype, entry.shape, entry.shard).value();
  entry.codec = static_cast<CodecId>(l.u64("codec"));
  entry.stored_size = l.u64("stored_size");
  entry.crc64 = l.id("crc64");
  entry.extent_table_crc = static_cast<std::uint32_t>(l.id("extent_table_crc"));
  return entry;
}

const Line& line_named(const std::string& kind, const std::string& name) {
  for (const Line& l : lines()) {
    if (l.kind == kind && l.text("name") == name) return l;
  }
  ADD_FAILURE() << "no " << kind << " named " << name;
  return lines().front();
}

Manifest manifest_named(const std::string& name) {
  const Line& l = line_named("manifest", name);
  ManifestDraft draft;
  std::istringstream in(l.text("entries"));
  for (std::string entry; std::getline(in, entry, ',');) EXPECT_TRUE(draft.put(entry_of(line_named("entry", entry)), 0).ok());
  return Manifest::with_changes(Manifest{}, l.version("version"), std::move(draft)).value();
}

Digest generated_root(std::uint64_t count, Version version) {
  ManifestDraft draft;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::string name = cat("t", i);
    ManifestEntry entry;
    entry.tensor = name;
    entry.id = block_id(name, Shard::whole());
    entry.version = {1, 1};
    entry.dtype = DType::kI8;
    entry.shape = Shape{i};
    entry.raw_size = entry.stored_size = entry.crc64 = i;
    EXPECT_TRUE(draft.put(entry, 0).ok());
  }
  return Manifest::with_changes(Manifest{}, version, std::move(draft)).value().root();
}

Bytes manifest_bytes(const Line& l) {
  if (l.kind == "entry") {
    Bytes bytes;
    const ManifestEntry entry = entry_of(l);
    EXPECT_TRUE(check_entry(entry).ok());
    encode_entry(bytes, entry);
    return bytes;
  }
  if (l.kind == "delta") {
    const bool from_nothing = l.text("base") == "none";
    const Manifest base = from_nothing ? Manifest{} : manifest_named(l.text("base"));
    const Manifest target = manifest_named(l.text("target"));
    const auto applied = Manifest::apply_delta(from_nothing ? nullptr : &base, l.golden(), [](std::size_t) { return 0U; });
    EXPECT_TRUE(applied.ok()) << applied.error().to_string();
    if (applied.ok()) {
      EXPECT_EQ(applied->root(), target.root());
    }
    return target.encode_delta(from_nothing ? nullptr : &base, nullptr);
  }
  const Digest root = l.kind == "manifest" ? manifest_named(l.text("name")).root() : generated_root(l.u64("count"), l.version("version"));
  return {root.begin(), root.end()};
}

TEST(Golden, EveryLineEncodesToItsBytesAndDecodesBack) {
  ASSERT_FALSE(lines().empty()) << PARAMWIRE_GOLDEN_DIR "/wire.txt is missing or empty";
  const std::set<std::string> manifests = {"entry", "manifest", "delta", "generated_root"};
  std::set<std::string> seen;
  for (const Line& l : lines()) {
    SCOPED_TRACE(cat(l.kind, " ... hex=", l.text("hex")));
    seen.insert(l.kind);
    const bool message = l.kind[0] >= 'A' && l.kind[0] <= 'Z';
    const Bytes made = message ? message_bytes(l) : manifests.count(l.kind) > 0 ? manifest_bytes(l) : struct_bytes(l);
    EXPECT_EQ(hex(made), l.text("hex"));
  }
  for (unsigned type = 0; type < 256; ++type) {
    const std::string name(frame_type_name(static_cast<FrameType>(type)));
    if (name != "unknown") {
      EXPECT_TRUE(seen.count(name) > 0) << name << " has no golden line";
    }
  }
  for (const char* kind : {"udp_get", "udp_data", "udp_status"}) EXPECT_TRUE(seen.count(kind) > 0) << kind << " has no golden line";
}

}  // namespace
}  // namespace paramwire
