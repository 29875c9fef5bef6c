// Bits that changed on disk: each is found, named and never handed out.
#include "support/checkpoint_model.hpp"
#include "support/memory_files.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/store/checkpoint.hpp"
#include "paramwire/store/checkpoint_format.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace paramwire {
namespace {

using testing::FileBytes;
using testing::MemoryFiles;
using testing::ModelSink;
using testing::ModelSource;
using Directory = std::map<std::string, FileBytes>;

constexpr std::uint64_t kSeed = 8123;

// Three versions, the later ones with deltas and references. `large` false: blocks of a few bytes, so that every bit can be tried.
Directory make(bool large, ModelSource& model, CodecId codec = CodecId::kPlanes) {
  Random random(kSeed);
  if (large) {
    model.fill(random);
  } else {
    model.put("w", DType::kF32, {5, 3}, Shard::whole(), random);
    model.put("v", DType::kU8, {9}, Shard::whole(), random);
    model.put("none", DType::kF32, {0}, Shard::whole(), random);
  }
  MemoryFiles files;
  CheckpointSaveOptions options;
  options.workers = 1;
  options.codec = codec;
  for (int i = 0; i < 3; ++i) {
    if (i > 0) model.step(random, 70);
    const auto saved = save_checkpoint("d", model, options, files);
    EXPECT_TRUE(saved.ok()) << saved.error().message();
  }
  return files.after_death();
}

bool is_ours(const std::string& name) { return parse_checkpoint_name(name).kind != CheckpointName::Kind::kOther; }

TEST(CheckpointDamage, EveryFlippedBitOfASmallDirectoryIsFound) {
  ModelSource model;
  const Directory whole = make(false, model);
  std::uint64_t bits = 0;
  for (const auto& [name, bytes] : whole) {
    if (!is_ours(name)) continue;
    for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      Directory damaged = whole;
      damaged[name][bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
      MemoryFiles files(damaged);
      const auto verified = verify_checkpoints("d", {.workers = 1}, files);
      ASSERT_TRUE(verified.ok()) << verified.error().message();
      ASSERT_FALSE(verified->problems.empty()) << name << " bit " << bit;
      EXPECT_TRUE(std::ranges::any_of(verified->problems, [&, file = name](const CheckpointProblem& problem) { return problem.file == file; })) << name << " bit " << bit;
      ++bits;
    }
  }
  EXPECT_GT(bits, 10'000U);
}

TEST(CheckpointDamage, RandomFlippedBitsOfLargeBlocksAreNamedByFileBlockAndExtent) {
  for (const CodecId codec : {CodecId::kRaw, CodecId::kPlanes}) {
    ModelSource model;
    const Directory whole = make(true, model, codec);
    Random random(kSeed);
    std::uint64_t named_extents = 0;
    for (int i = 0; i < 1000; ++i) {
      Directory damaged = whole;
      auto at = damaged.begin();
      std::advance(at, static_cast<std::ptrdiff_t>(random.below(damaged.size())));
      if (!is_ours(at->first)) continue;
      const std::uint64_t bit = random.below(at->second.size() * 8);
      at->second[static_cast<std::size_t>(bit / 8)] ^= static_cast<std::byte>(1U << (bit % 8));
      MemoryFiles files(damaged);
      const auto verified = verify_checkpoints("d", {.workers = 1}, files);
      ASSERT_TRUE(verified.ok());
      ASSERT_FALSE(verified->problems.empty()) << at->first << " bit " << bit;
      const CheckpointProblem& problem = verified->problems.front();
      EXPECT_EQ(problem.file, at->first);
      EXPECT_FALSE(problem.versions.empty()) << "every byte here is of a checkpoint";
      EXPECT_LE(problem.offset, bit / 8);
      if (problem.extent) {
        EXPECT_FALSE(problem.block.empty());
        ++named_extents;
      }
      // What restore hands out is right, or an error.
      for (const Version version : {Version{3, 1}, Version{3, 2}, Version{3, 3}}) {
        const auto checkpoint = Checkpoint::open("d", version, files);
        if (!checkpoint.ok()) continue;
        ModelSink sink((*checkpoint)->manifest());
        const Status restored = restore_checkpoint(**checkpoint, sink, {.workers = 1});
        const bool needs = std::ranges::find(problem.versions, version) != problem.versions.end();
        if (!restored.ok()) {
          EXPECT_EQ(restored.error().code(), Code::kCorrupt) << restored.error().message();
          EXPECT_TRUE(needs);
        } else if (version == model.version()) {
          for (const auto& [key, block] : model.blocks()) {
            const std::string name = block.shard.kind == ShardKind::kWhole ? block.tensor : cat(block.tensor, '[', block.shard, ']');
            EXPECT_EQ(sink.blocks.at(name), block.bytes);
          }
        }
      }
    }
    EXPECT_GT(named_extents, 100U);
  }
}

TEST(CheckpointDamage, ARecordHeaderMayNotAskForMoreRowsThanItsPayloadHasBytesFor) {
  const std::string tensor = "w";
  ManifestEntry entry;
  entry.tensor = tensor;
  entry.id = block_id(tensor, Shard::whole());
  entry.version = {3, 1};
  entry.dtype = DType::kU8;
  entry.shape = {100'000};
  entry.raw_size = entry.stored_size = 100'000;
  RecordHeader header;
  header.codec = CodecId::kPlanes;
  header.stored_size = 10;
  std::vector<std::byte> bytes;
  encode_record_head(bytes, header, entry, std::vector<RecordRow>{{5, 1}, {5, 2}});
  ASSERT_TRUE(decode_record_header(bytes).ok());
  ASSERT_TRUE(decode_record_head(bytes).ok());
  // 32 GiB of rows for ten bytes: refused before anything is read or taken from memory.
  constexpr std::size_t kRowCountAt = 12;
  for (const std::uint32_t rows : {3U, 0xffffffffU}) {
    store_le(bytes.data() + kRowCountAt, rows);
    const auto refused = decode_record_header(bytes);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), Code::kCorrupt);
    EXPECT_NE(refused.error().message().find("row_count"), std::string::npos) << refused.error().message();
  }
}

TEST(CheckpointDamage, CutGrownSwappedAndMissingFilesAreFound) {
  ModelSource model;
  const Directory whole = make(true, model);
  std::vector<std::string> data;
  for (const auto& [name, bytes] : whole) {
    if (parse_checkpoint_name(name).kind == CheckpointName::Kind::kData) data.push_back(name);
  }
  ASSERT_GE(data.size(), 2U);
  const auto problems = [&](const auto& change) {
    Directory damaged = whole;
    change(damaged);
    MemoryFiles files(damaged);
    const auto verified = verify_checkpoints("d", {.workers = 1}, files);
    const auto listed = list_checkpoints("d", files);
    EXPECT_TRUE(verified.ok() && listed.ok());
    EXPECT_TRUE(std::ranges::any_of(*listed, [](const CheckpointSummary& summary) { return !summary.whole && !summary.problem.empty(); }));
    return verified->problems.size();
  };
  EXPECT_GT(problems([&](Directory& d) { d[data[0]].pop_back(); }), 0U);
  EXPECT_GT(problems([&](Directory& d) { d[data[0]].resize(10); }), 0U);
  EXPECT_GT(problems([&](Directory& d) { d[data[0]].push_back(std::byte{0}); }), 0U);
  EXPECT_GT(problems([&](Directory& d) { d.erase(data[0]); }), 0U);
  EXPECT_GT(problems([&](Directory& d) { std::swap(d[data[0]], d[data[1]]); }), 0U);
  EXPECT_GT(problems([&](Directory& d) { d[checkpoint_manifest_name({3, 2})].pop_back(); }), 0U);
  EXPECT_GT(problems([&](Directory& d) { std::swap(d[checkpoint_manifest_name({3, 2})], d[checkpoint_manifest_name({3, 1})]); }), 0U);
}

TEST(CheckpointDamage, ADamagedNewestManifestLeavesTheOneBefore) {
  ModelSource model;
  Directory damaged = make(true, model);
  damaged[checkpoint_manifest_name({3, 3})][20] ^= std::byte{1};
  MemoryFiles files(damaged);
  const auto found = Checkpoint::open("d", std::nullopt, files);
  ASSERT_TRUE(found.ok());
  EXPECT_EQ((*found)->manifest().version(), (Version{3, 2}));
  ASSERT_EQ((*found)->notes().size(), 1U);
  EXPECT_NE((*found)->notes()[0].find("SHA-256"), std::string::npos);
  const auto named = Checkpoint::open("d", Version{3, 3}, files);
  ASSERT_FALSE(named.ok());
  EXPECT_EQ(named.error().code(), Code::kCorrupt);
}

TEST(CheckpointDamage, DataFilesStayWhileAManifestCannotBeRead) {
  ModelSource model;
  Directory damaged = make(true, model);
  damaged[checkpoint_manifest_name({3, 1})][20] ^= std::byte{1};
  MemoryFiles files(damaged);
  Random random(kSeed);
  model.step(random, 100);
  CheckpointSaveOptions options;
  options.full_every = 1;
  const auto saved = save_checkpoint("d", model, options, files);
  ASSERT_TRUE(saved.ok());
  ASSERT_FALSE(saved->notes.empty());
  const Directory after = files.after_death();
  for (const auto& [name, bytes] : damaged) {
    EXPECT_TRUE(!is_ours(name) || after.contains(name)) << name;
  }
}

TEST(CheckpointDamage, ASaveOnADamagedBaseWritesInFullAndSaysSo) {
  ModelSource model;
  const Directory whole = make(true, model);
  Random random(kSeed);
  model.step(random, 100);
  std::uint64_t noted = 0;
  for (int i = 0; i < 60; ++i) {
    Directory damaged = whole;
    for (auto& [name, bytes] : damaged) {
      if (parse_checkpoint_name(name).kind == CheckpointName::Kind::kData) bytes[static_cast<std::size_t>(64 + random.below(bytes.size() - 64))] ^= std::byte{1};
    }
    MemoryFiles files(damaged);
    CheckpointSaveOptions options;
    options.workers = 1;
    const auto saved = save_checkpoint("d", model, options, files);
    ASSERT_TRUE(saved.ok()) << saved.error().message();
    if (!saved->notes.empty()) ++noted;
    const auto checkpoint = Checkpoint::open("d", std::nullopt, files);
    ASSERT_TRUE(checkpoint.ok());
    CheckpointScratch scratch;
    (*checkpoint)->manifest().for_each([&](const Manifest::Hit& hit) {
      const auto& block = hit.entry.kind == EntryKind::kBlock ? model.blocks().at({std::string(hit.entry.tensor), hit.entry.shard.to_string()}) : model.blocks().begin()->second;
      if (hit.entry.kind != EntryKind::kBlock || block.version != model.version()) return true;
      std::vector<std::byte> bytes(static_cast<std::size_t>(hit.entry.raw_size));
      const Status read = (*checkpoint)->read(hit.entry, bytes, scratch);
      EXPECT_TRUE(read.ok()) << "what was written now does not depend on what is damaged: " << read.error().message();
      EXPECT_EQ(bytes, block.bytes);
      return true;
    });
  }
  EXPECT_GT(noted, 20U);
}

TEST(CheckpointDamage, AVersionThatIsNotThereAnyMoreIsSavedAgain) {
  ModelSource model;
  const Directory whole = make(true, model);
  for (const auto& [name, bytes] : whole) {
    const CheckpointName is = parse_checkpoint_name(name);
    if (is.kind == CheckpointName::Kind::kOther || is.version != model.version()) continue;
    Directory damaged = whole;
    if (is.kind == CheckpointName::Kind::kData) {
      damaged.erase(name);
    } else {
      damaged[name][30] ^= std::byte{1};
    }
    MemoryFiles files(damaged);
    const auto saved = save_checkpoint("d", model, {}, files);
    ASSERT_TRUE(saved.ok()) << saved.error().message();
    EXPECT_FALSE(saved->existed);
    EXPECT_FALSE(saved->notes.empty());
    const auto verified = verify_checkpoints("d", {.version = model.version(), .decode = true}, files);
    ASSERT_TRUE(verified.ok());
    EXPECT_TRUE(verified->problems.empty());
  }
}

}  // namespace
}  // namespace paramwire
