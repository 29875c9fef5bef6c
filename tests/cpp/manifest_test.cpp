// Manifests against a std::map, deltas against their targets, and what both cost.
#include "paramwire/base/bytes.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/wire/manifest.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>

namespace paramwire {
namespace {

using Random = std::mt19937_64;
using Bytes = std::vector<std::byte>;

const auto kNoTags = [](std::size_t) { return 0U; };

ManifestEntry block(std::string_view tensor, Version version, DType dtype = DType::kF32, Shape shape = {4},
                    Shard shard = Shard::whole(), std::uint64_t crc = 7) {
  ManifestEntry entry;
  entry.tensor = tensor;
  entry.shard = shard;
  entry.id = block_id(tensor, shard);
  entry.version = version;
  entry.dtype = dtype;
  entry.shape = shape;
  entry.raw_size = entry.stored_size = block_bytes(dtype, shape, shard).value();
  entry.crc64 = crc;
  if (entry.raw_size > kExtentBytes) entry.extent_table_crc = static_cast<std::uint32_t>(crc * 3);
  return entry;
}

ManifestEntry alias(std::string_view tensor, std::string_view target, Version version) {
  ManifestEntry entry;
  entry.kind = EntryKind::kAlias;
  entry.tensor = tensor;
  entry.target = target;
  entry.id = block_id(tensor, Shard::whole());
  entry.version = version;
  return entry;
}

Bytes encoded(const ManifestEntry& entry) {
  Bytes bytes;
  encode_entry(bytes, entry);
  return bytes;
}

Manifest built(const Manifest& base, Version version, std::vector<ManifestChange> changes) {
  auto result = Manifest::with_changes(base, version, std::move(changes));
  EXPECT_TRUE(result.ok()) << result.error().to_string();
  return result.ok() ? *result : Manifest{};
}

// ---------------------------------------------------------------- entries

// Names live as long as the process: entries hold views.
ManifestEntry random_entry(Random& random, std::string_view name, Version version) {
  static constexpr std::uint64_t kDims[] = {0, 1, 2, 8, 127, 128, 300, 70'000};
  const auto dim = [&] { return kDims[random() % std::size(kDims)]; };
  const std::uint64_t crc = random();
  if (random() % 8 == 0) return alias(name, "some.target", version);
  const auto dtype = static_cast<DType>(1 + random() % kDTypeMax);
  switch (random() % 3) {
    case 0: return block(name, version, dtype, random() % 2 == 0 ? Shape{} : Shape{dim(), dim(), 2}, Shard::whole(), crc);
    case 1: return block(name, version, dtype, Shape{300, 2 * dim()}, Shard::rows(random() % 10, 10 + random() % 290), crc);
    default: return block(name, version, dtype, Shape{576, 64}, Shard::head_range(9, random() % 3, 3 + random() % 7), crc);
  }
}

TEST(ManifestEntry, EveryDecoderGivesBackWhatWasEncoded) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(cat("seed ", seed));
  Random random(seed);
  for (int round = 0; round < 5000; ++round) {
    const ManifestEntry entry = random_entry(random, "blk.0.attn_q.weight", {1 + static_cast<std::uint32_t>(random() % 300), 1 + random()});
    ASSERT_TRUE(check_entry(entry).ok()) << check_entry(entry).error().to_string();
    const Bytes bytes = encoded(entry);
    ByteReader in(bytes);
    const auto decoded = decode_entry(in);
    ASSERT_TRUE(decoded.ok() && in.finished());
    const ManifestEntry checked = decode_checked_entry(bytes.data());
    for (const ManifestEntry& got : {*decoded, checked}) {
      EXPECT_EQ(encoded(got), bytes);
      EXPECT_EQ(got.raw_size, entry.raw_size);
      EXPECT_EQ(got.stored_size, entry.stored_size);
      EXPECT_EQ(got.extent_table_crc, entry.extent_table_crc);
      EXPECT_EQ(got.target, entry.target);
    }
    EXPECT_EQ(checked_entry_name(bytes.data()), entry.tensor);
  }
}

TEST(ManifestEntry, EveryTruncationIsRefusedAndEveryFlipThatIsTakenIsWrittenBack) {
  std::size_t taken = 0;
  for (const ManifestEntry& entry : {block("a.weight", {1, 2}, DType::kBF16, {300, 128}, Shard::rows(1, 290)),
                                     block("q", {1, 300}, DType::kF32, {576, 8}, Shard::head_range(9, 1, 4)), alias("b", "a", {3, 1})}) {
    const Bytes good = encoded(entry);
    for (std::size_t size = 0; size < good.size(); ++size) {
      ByteReader in{std::span(good).first(size)};
      const auto decoded = decode_entry(in);
      ASSERT_FALSE(decoded.ok()) << size;
      EXPECT_EQ(decoded.error().code(), Code::kCorrupt);
    }
    for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
      Bytes bytes = good;
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      ByteReader in(bytes);
      const auto decoded = decode_entry(in);
      if (!decoded.ok()) continue;
      ++taken;
      EXPECT_EQ(encoded(*decoded), Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(in.position())));
    }
  }
  EXPECT_GT(taken, 100U);  // flips of version, CRC and target
}

TEST(ManifestEntry, EntriesThatWouldNotComeBackAreRefusedNamingTheField) {
  const auto refusal = [](auto change) {
    ManifestEntry entry = block("a", {1, 1}, DType::kF32, {8}, Shard::rows(0, 4));
    change(entry);
    const Status status = check_entry(entry);
    return status.ok() ? std::string("accepted") : status.error().message();
  };
  const auto has = [](const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; };
  EXPECT_EQ(refusal([](ManifestEntry&) {}), "accepted");
  EXPECT_TRUE(has(refusal([](ManifestEntry& e) { e.tensor = ""; }), "name"));
  EXPECT_TRUE(has(refusal([](ManifestEntry& e) { e.tensor = std::string_view("a\0b", 3); }), "NUL"));
  EXPECT_TRUE(has(refusal([](ManifestEntry& e) { e.version.epoch = 0; }), "version"));
  EXPECT_TRUE(has(refusal([](ManifestEntry& e) { e.shard.heads = 3; }), "shard"));
  EXPECT_TRUE(has(refusal([](ManifestEntry& e) { ++e.id.value; }), "hash"));
  EXPECT_TRUE(has(refusal([](ManifestEntry& e) { e.kind = static_cast<EntryKind>(2); }), "kind"));
  EXPECT_TRUE(has(refusal([](ManifestEntry& e) { e.kind = EntryKind::kAlias; e.target = "b"; }), "whole tensor"));
  EXPECT_TRUE(has(refusal([](ManifestEntry& e) { e.dtype = static_cast<DType>(99); }), "dtype"));
  EXPECT_TRUE(has(refusal([](ManifestEntry& e) { e.codec = static_cast<CodecId>(9); }), "codec"));
  EXPECT_TRUE(has(refusal([](ManifestEntry& e) { e.raw_size = 17; }), "17"));
  EXPECT_TRUE(has(refusal([](ManifestEntry& e) { e.stored_size = 15; }), "15"));
  EXPECT_TRUE(has(refusal([](ManifestEntry& e) { e.extent_table_crc = 1; }), "extent table"));
}

TEST(ManifestEntry, APartOfATensorWithoutRowsIsRefused) {
  for (const Shard& part : {Shard::rows(0, 1), Shard::head_range(2, 0, 1)}) {
    EXPECT_EQ(block_bytes(DType::kF32, Shape{0, 4}, part).error().code(), Code::kInvalid) << part.to_string();
    // On the wire too, where nobody checked before: as a two-row entry whose first axis is then made 0.
    ManifestEntry entry = block("a", {1, 1}, DType::kF32, {2, 4}, part);
    Bytes bytes = encoded(entry);
    const std::array<std::byte, 2> axes{std::byte{2}, std::byte{4}};
    const auto at = std::find_end(bytes.begin(), bytes.end(), axes.begin(), axes.end());
    ASSERT_NE(at, bytes.end());
    *at = std::byte{0};
    ByteReader in(bytes);
    EXPECT_FALSE(decode_entry(in).ok()) << part.to_string();
  }
}

TEST(ManifestEntry, RowsOfNibblesMustFillBytes) {
  EXPECT_EQ(*block_bytes(DType::kI4, Shape{4, 4}, Shard::rows(1, 2)), 2U);
  EXPECT_EQ(*block_bytes(DType::kI4, Shape{4, 3}, Shard::rows(2, 4)), 3U);
  EXPECT_FALSE(block_bytes(DType::kI4, Shape{4, 3}, Shard::rows(1, 3)).ok());
  EXPECT_FALSE(block_bytes(DType::kI4, Shape{4, 3}, Shard::rows(0, 3)).ok());
  EXPECT_EQ(*block_bytes(DType::kF32, Shape{4, 0}, Shard::rows(1, 3)), 0U);
}

// ---------------------------------------------------------------- against a map

struct Held {
  Bytes bytes;
  std::uint32_t tag;
  bool operator==(const Held&) const = default;
};
using Model = std::map<std::uint64_t, Held>;

void expect_equals(const Manifest& manifest, const Model& model) {
  ASSERT_EQ(manifest.entry_count(), model.size());
  auto want = model.begin();
  std::uint64_t raw = 0;
  manifest.for_each([&](const Manifest::Hit& hit) {
    EXPECT_EQ(hit.entry.id.value, want->first);
    EXPECT_EQ((Held{encoded(hit.entry), hit.tag}), want->second);
    raw += hit.entry.raw_size;
    ++want;
    return true;
  });
  EXPECT_EQ(want, model.end());
  EXPECT_EQ(manifest.total_raw_bytes(), raw);
}

// Random publishes of very different sizes, so that pages split and join; the base of each is the one before. Every
// manifest is kept, and deltas are taken between many pairs of them, older to newer and newer to older.
TEST(Manifest, RandomChangesAndDeltasEqualAMap) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(cat("seed ", seed));
  Random random(seed);
  std::vector<std::string> names;
  for (int i = 0; i < 6000; ++i) names.push_back(cat("layer.", i, ".weight"));

  std::vector<Manifest> manifests = {Manifest{}};
  std::vector<Model> models = {{}};
  for (std::uint64_t step = 1; step <= 24; ++step) {
    const Version version{1, step};
    Model model = models.back();
    std::map<std::uint64_t, ManifestChange> changes;
    const std::uint64_t wanted = step % 4 == 1 ? 3000 : random() % 40;
    const bool shrinking = step % 8 == 5;
    for (std::uint64_t i = 0; i < wanted; ++i) {
      if ((shrinking || random() % 4 == 0) && !model.empty()) {
        auto at = model.lower_bound(random());
        if (at == model.end()) at = model.begin();
        ManifestChange change;
        change.remove = true;
        change.entry.id.value = at->first;
        if (!changes.emplace(at->first, change).second) continue;
        model.erase(at);
      } else {
        const auto tag = static_cast<std::uint32_t>(random());
        const ManifestEntry entry = random_entry(random, names[random() % names.size()], version);
        if (!changes.emplace(entry.id.value, ManifestChange{entry, false, tag}).second) continue;
        model[entry.id.value] = {encoded(entry), tag};
      }
    }
    std::vector<ManifestChange> list;
    for (const auto& [id, change] : changes) list.push_back(change);
    std::shuffle(list.begin(), list.end(), random);
    manifests.push_back(built(manifests.back(), version, list));
    models.push_back(model);
    expect_equals(manifests.back(), model);
    EXPECT_EQ(manifests.back().version(), version);
  }

  // Lookups of what is there and of what is not.
  for (std::size_t v = 0; v < manifests.size(); v += 5) {
    for (const auto& [id, held] : models.back()) {
      const auto hit = manifests[v].find(BlockId{id});
      const auto want = models[v].find(id);
      ASSERT_EQ(hit.has_value(), want != models[v].end());
      if (hit) {
        EXPECT_EQ((Held{encoded(hit->entry), hit->tag}), want->second);
      }
    }
    for (int i = 0; i < 1000; ++i) EXPECT_FALSE(manifests[v].find(BlockId{random()}).has_value());
    for (const std::uint64_t id : {std::uint64_t{0}, ~std::uint64_t{0}}) EXPECT_FALSE(manifests[v].find(BlockId{id}).has_value());
  }

  for (int round = 0; round < 120; ++round) {
    const auto from = static_cast<std::size_t>(random() % manifests.size());
    const auto to = 1 + static_cast<std::size_t>(random() % (manifests.size() - 1));
    std::vector<std::uint32_t> tags;
    const Bytes stream = manifests[to].encode_delta(&manifests[from], &tags);
    const auto got = Manifest::apply_delta(&manifests[from], stream, [&](std::size_t i) { return tags.at(i); });
    ASSERT_TRUE(got.ok()) << from << " to " << to << ": " << got.error().to_string();
    EXPECT_EQ(got->root(), manifests[to].root());
    EXPECT_EQ(got->entry_count(), manifests[to].entry_count());
    EXPECT_EQ(got->total_raw_bytes(), manifests[to].total_raw_bytes());
    if (from == to) {
      EXPECT_LT(stream.size(), 100U);
    }
  }
}

TEST(Manifest, TheRootDependsOnVersionAndEntriesAndNotOnHistoryOrTags) {
  const ManifestEntry a = block("a", {1, 1});
  const ManifestEntry b = block("b", {1, 1});
  const Manifest both = built({}, {1, 2}, {{a, false, 1}, {b, false, 2}});
  const Manifest late = built(built(built({}, {1, 1}, {{b, false, 9}, {block("c", {1, 1}), false, 0}}), {1, 2}, {{a, false, 8}}), {1, 2},
                              {{block("c", {1, 1}), true, 0}});
  EXPECT_EQ(both.root(), late.root());
  EXPECT_NE(both.root(), built({}, {1, 3}, {{a, false, 1}, {b, false, 2}}).root());
  EXPECT_NE(both.root(), built({}, {1, 2}, {{a, false, 1}}).root());
  EXPECT_NE(both.root(), built({}, {1, 2}, {{a, false, 1}, {block("b", {1, 1}, DType::kF32, {4}, Shard::whole(), 8), false, 2}}).root());
  EXPECT_NE(built({}, {1, 1}, {}).root(), Manifest{}.root());
}

TEST(Manifest, ChangesThatCannotBeMeantAreRefused) {
  const Manifest base = built({}, {1, 1}, {{block("a", {1, 1}), false, 0}});
  const auto code = [&](Version version, std::vector<ManifestChange> changes) {
    const auto result = Manifest::with_changes(base, version, std::move(changes));
    return result.ok() ? std::optional<Code>() : result.error().code();
  };
  EXPECT_EQ(code({1, 2}, {{block("b", {1, 2}), false, 0}, {block("b", {1, 2}), false, 0}}), Code::kInvalid);
  EXPECT_EQ(code({1, 2}, {{block("a", {1, 2}), false, 0}, {block("a", {1, 2}), true, 0}}), Code::kInvalid);
  EXPECT_EQ(code({1, 2}, {{block("b", {1, 2}), true, 0}}), Code::kNotFound);
  EXPECT_EQ(code({1, 2}, {{block("b", {1, 3}), false, 0}}), Code::kInvalid);
  EXPECT_EQ(code({0, 2}, {}), Code::kInternal);
  EXPECT_EQ(code({1, 2}, {{block("a", {1, 2}), true, 0}}), std::nullopt);
}

// Two names with one FNV-1a 64 hash, which block ids are made of; a known pair, checked by the first assertion.
TEST(Manifest, AHashCollisionIsRefusedNamingBoth) {
  const std::string first = "8yn0iYCKYHlIj4-BwPqk";
  const std::string second = "GReLUrM4wMqfg9yzV3KQ";
  ASSERT_EQ(block_id(first, Shard::whole()), block_id(second, Shard::whole()));
  const Manifest base = built({}, {1, 1}, {{block(first, {1, 1}), false, 0}});
  for (const auto& result : {Manifest::with_changes(base, {1, 2}, {{block(second, {1, 2}), false, 0}}),
                             Manifest::with_changes({}, {1, 2}, {{block(first, {1, 2}), false, 0}, {block(second, {1, 2}), false, 0}})}) {
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.error().code(), Code::kInvalid);
    EXPECT_NE(result.error().message().find(first), std::string::npos);
    EXPECT_NE(result.error().message().find(second), std::string::npos);
  }
  EXPECT_TRUE(base.tensor_blocks(second).empty()) << "the other name must not be answered with this one's block";
}

TEST(Manifest, TensorBlocksComeByFirstRowWholeOrThroughAnAlias) {
  const Shape shape{576, 64};
  const Manifest m = built({}, {1, 1},
                           {{block("w", {1, 1}), false, 1},
                            {block("s", {1, 1}, DType::kF32, shape, Shard::rows(128, 576)), false, 3},
                            {block("s", {1, 1}, DType::kF32, shape, Shard::head_range(9, 1, 2)), false, 2},
                            {block("s", {1, 1}, DType::kF32, shape, Shard::rows(0, 64)), false, 1},
                            {alias("w2", "w", {1, 1}), false, 0},
                            {alias("s2", "s", {1, 1}), false, 0},
                            {alias("s3", "s2", {1, 1}), false, 0},
                            {alias("dangling", "nothing", {1, 1}), false, 0}});
  const auto tags = [&](std::string_view name) {
    std::vector<std::uint32_t> found;
    for (const auto& hit : m.tensor_blocks(name)) found.push_back(hit.tag);
    return found;
  };
  EXPECT_EQ(tags("w"), std::vector<std::uint32_t>{1});
  EXPECT_EQ(tags("w2"), std::vector<std::uint32_t>{1});
  EXPECT_EQ(tags("s"), (std::vector<std::uint32_t>{1, 2, 3}));
  EXPECT_EQ(tags("s2"), (std::vector<std::uint32_t>{1, 2, 3}));
  EXPECT_TRUE(tags("s3").empty()) << "aliases are followed one step";
  EXPECT_TRUE(tags("dangling").empty());
  EXPECT_TRUE(tags("unknown").empty());
  EXPECT_TRUE(Manifest{}.tensor_blocks("w").empty());
}

// ---------------------------------------------------------------- deltas

TEST(ManifestDelta, AnotherBaseIsStaleAndNothingElse) {
  const Manifest v1 = built({}, {1, 1}, {{block("a", {1, 1}), false, 0}});
  const Manifest other = built({}, {1, 1}, {{block("b", {1, 1}), false, 0}});
  const Manifest v2 = built(v1, {1, 2}, {{block("a", {1, 2}), false, 0}});
  const Manifest none;
  const Bytes stream = v2.encode_delta(&v1, nullptr);
  EXPECT_TRUE(Manifest::apply_delta(&v1, stream, kNoTags).ok());
  for (const Manifest* base : {static_cast<const Manifest*>(nullptr), &none, &v2, &other}) {
    const auto result = Manifest::apply_delta(base, stream, kNoTags);
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.error().code(), Code::kStale);
  }
  // A whole manifest needs no base, and does not mind one.
  EXPECT_EQ(Manifest::apply_delta(&other, v2.encode_delta(nullptr, nullptr), kNoTags)->root(), v2.root());
  EXPECT_EQ(Manifest::apply_delta(nullptr, v2.encode_delta(&none, nullptr), kNoTags)->root(), v2.root());
}

void expect_damage_is_seen(const Manifest* base, const Bytes& stream) {
  for (std::size_t bit = 0; bit < 8 * stream.size(); ++bit) {
    Bytes bad = stream;
    bad[bit / 8] ^= std::byte{1} << (bit % 8);
    const auto result = Manifest::apply_delta(base, bad, kNoTags);
    ASSERT_FALSE(result.ok()) << "bit " << bit;
    EXPECT_TRUE(result.error().code() == Code::kCorrupt || result.error().code() == Code::kStale) << result.error().to_string();
  }
  for (std::size_t at = 0; at < stream.size(); ++at) {
    Bytes bad = stream;
    bad[at] = ~bad[at];
    EXPECT_FALSE(Manifest::apply_delta(base, bad, kNoTags).ok()) << "byte " << at;
    EXPECT_FALSE(Manifest::apply_delta(base, std::span(stream).first(at), kNoTags).ok()) << "cut at " << at;
  }
  Bytes longer = stream;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(Manifest::apply_delta(base, longer, kNoTags).ok());
}

TEST(ManifestDelta, EveryFlippedBitOrByteAndEveryTruncationIsRefused) {
  const Manifest v1 = built({}, {1, 1}, {{block("a", {1, 1}), false, 0}, {block("b", {1, 1}), false, 0}});
  const Manifest v2 = built(v1, {1, 2},
                            {{block("a", {1, 2}), false, 0},
                             {block("b", {1, 2}), true, 0},
                             {block("c", {1, 2}, DType::kBF16, {300, 128}, Shard::rows(3, 290)), false, 0},
                             {alias("d", "a", {1, 2}), false, 0}});
  expect_damage_is_seen(&v1, v2.encode_delta(&v1, nullptr));
  expect_damage_is_seen(nullptr, v2.encode_delta(nullptr, nullptr));
  expect_damage_is_seen(nullptr, Manifest{}.encode_delta(nullptr, nullptr));
  EXPECT_FALSE(Manifest::apply_delta(nullptr, Manifest{}.encode_delta(nullptr, nullptr), kNoTags)->version().has_value());
}

// The counts of a stream bound what is allocated by the bytes that are there, before anything is allocated.
TEST(ManifestDelta, DeclaredCountsBeyondTheDataAreRefused) {
  for (const std::uint64_t count : {std::uint64_t{1} << 62, std::uint64_t{2}}) {
    for (const bool removed : {true, false}) {
      Bytes stream;
      ByteWriter out(stream);
      out.put<std::uint8_t>(1);
      out.put<std::uint8_t>(0);
      out.varint(1);
      out.varint(1);
      out.varint(count);
      out.bytes(Digest{});
      out.varint(removed ? count : 0);
      if (!removed) out.varint(count);
      out.bytes(Bytes(15));
      const auto result = Manifest::apply_delta(nullptr, stream, kNoTags);
      ASSERT_FALSE(result.ok());
      EXPECT_EQ(result.error().code(), Code::kCorrupt);
      EXPECT_NE(result.error().message().find(removed ? "removed count" : "entry count"), std::string::npos);
    }
  }
}

TEST(ManifestDelta, EntriesOutOfOrderAreRefused) {
  const Manifest v1 = built({}, {1, 1}, {{block("a", {1, 1}), false, 0}, {block("b", {1, 1}), false, 0}});
  const Bytes stream = v1.encode_delta(nullptr, nullptr);
  const std::size_t size = encoded(block("a", {1, 1})).size();
  Bytes swapped = stream;
  std::rotate(swapped.end() - static_cast<std::ptrdiff_t>(2 * size), swapped.end() - static_cast<std::ptrdiff_t>(size), swapped.end());
  ASSERT_NE(swapped, stream);
  const auto result = Manifest::apply_delta(nullptr, swapped, kNoTags);
  ASSERT_FALSE(result.ok());
  EXPECT_NE(result.error().message().find("ascending"), std::string::npos);
}

TEST(ManifestDelta, RemovedIdsOutOfOrderAreRefused) {
  const Manifest v1 = built({}, {1, 1}, {{block("a", {1, 1}), false, 0}, {block("b", {1, 1}), false, 0}});
  const Manifest v2 = built(v1, {1, 2}, {{block("a", {1, 1}), true, 0}, {block("b", {1, 1}), true, 0}});
  Bytes stream = v2.encode_delta(&v1, nullptr);
  ASSERT_TRUE(Manifest::apply_delta(&v1, stream, kNoTags).ok());
  const auto count_of_entries = stream.end() - 1;  // the two ids stand before it
  std::rotate(count_of_entries - 16, count_of_entries - 8, count_of_entries);
  const auto result = Manifest::apply_delta(&v1, stream, kNoTags);
  ASSERT_FALSE(result.ok());
  EXPECT_NE(result.error().message().find("removed id"), std::string::npos);
}

TEST(ManifestDelta, RandomBytesNeverGiveAManifest) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(cat("seed ", seed));
  Random random(seed);
  const Manifest v1 = built({}, {1, 1}, {{block("a", {1, 1}), false, 0}, {block("b", {1, 1}), false, 0}});
  const Bytes good = v1.encode_delta(nullptr, nullptr);
  for (int round = 0; round < 20'000; ++round) {
    Bytes bytes = good;
    if (round % 2 == 0) bytes.resize(random() % 200);
    for (std::uint64_t i = 1 + random() % 10; i > 0 && !bytes.empty(); --i) bytes[random() % bytes.size()] = static_cast<std::byte>(random() & 0xff);
    if (bytes == good) continue;
    ASSERT_FALSE(Manifest::apply_delta(&v1, bytes, kNoTags).ok());
  }
}

// ---------------------------------------------------------------- costs

struct Names {
  explicit Names(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      std::string number = std::to_string(i);
      text.push_back(cat("tensor.", std::string(9 - number.size(), '0'), number));
    }
  }
  std::vector<std::string> text;  // 16 bytes each
};

Manifest of_names(const Names& names, Version version) {
  ManifestDraft draft;
  for (const std::string& name : names.text) EXPECT_TRUE(draft.put(block(name, version), 0).ok());
  auto result = Manifest::with_changes({}, version, std::move(draft));
  EXPECT_TRUE(result.ok());
  return *result;
}

TEST(ManifestCost, AnEntryOfA16ByteNameTakesUnder60BytesOfMemory) {
  const Names names(100'000);
  const Manifest m = of_names(names, {1, 1});
  EXPECT_EQ(m.entry_count(), names.text.size());
  // Under 60 with the 4 bytes of tag; an entry's own encoding is 41 of them.
  EXPECT_LT(m.memory_bytes(), 60 * m.entry_count());
}

TEST(ManifestCost, AOneBlockChangeSharesAllPagesButOneAndSendsOneEntry) {
  const Names names(100'000);
  const Manifest v1 = of_names(names, {1, 1});
  const Manifest v2 = built(v1, {1, 2}, {{block(names.text[77], {1, 2}), false, 5}});
  const std::uint64_t pages = 512;  // 100,000 entries, at most 256 each on average, a power of two
  EXPECT_LT(v2.memory_bytes_beside(v1), 16 * pages + 3 * v1.memory_bytes() / pages);
  const Bytes stream = v2.encode_delta(&v1, nullptr);
  EXPECT_LT(stream.size(), 200U);
  // And on the other side: the delta's result shares the pages of the base it was applied to.
  const auto got = Manifest::apply_delta(&v1, stream, [](std::size_t) { return 5U; });
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->root(), v2.root());
  EXPECT_LT(got->memory_bytes_beside(v1), 16 * pages + 3 * v1.memory_bytes() / pages);
  EXPECT_EQ(got->find(block_id(names.text[77], Shard::whole()))->tag, 5U);
}

}  // namespace
}  // namespace paramwire
