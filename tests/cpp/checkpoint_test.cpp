// Checkpoints over a file system in memory: what is saved comes back, what is stopped leaves nothing half, what is damaged is found.
#include "support/checkpoint_model.hpp"
#include "support/memory_files.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/store/checkpoint.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace paramwire {
namespace {

using testing::FileBytes;
using testing::MemoryFiles;
using testing::ModelSink;
using testing::ModelSource;

constexpr std::uint64_t kSeed = 20261130;
using Directory = std::map<std::string, FileBytes>;

CheckpointSaveOptions one_worker() {
  CheckpointSaveOptions options;
  options.workers = 1;
  return options;
}

// Whether version `want` comes back bit for bit; the newest without one.
void expect_restored(FileSystem& files, const ModelSource& model, std::optional<Version> want = {}) {
  const auto checkpoint = Checkpoint::open("d", want, files);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.error().to_string();
  EXPECT_EQ((*checkpoint)->manifest().version(), model.version());
  EXPECT_EQ((*checkpoint)->manifest().root(), model.manifest().root());
  ModelSink sink((*checkpoint)->manifest());
  CheckpointRestoreOptions options;
  options.workers = 2;
  const Status restored = restore_checkpoint(**checkpoint, sink, options);
  ASSERT_TRUE(restored.ok()) << restored.error().to_string();
  std::size_t blocks = 0;
  for (const auto& [key, block] : const_cast<ModelSource&>(model).blocks()) {
    const std::string name = block.shard.kind == ShardKind::kWhole ? block.tensor : cat(block.tensor, '[', block.shard, ']');
    EXPECT_EQ(sink.blocks.at(name), block.bytes) << name;
    ++blocks;
  }
  EXPECT_EQ(sink.blocks.size(), blocks);
}

CheckpointSaved must_save(FileSystem& files, ModelSource& model, const CheckpointSaveOptions& options = one_worker()) {
  auto saved = save_checkpoint("d", model, options, files);
  EXPECT_TRUE(saved.ok()) << saved.error().to_string();
  return saved.ok() ? *std::move(saved) : CheckpointSaved{};
}

std::set<std::string> data_files(const Directory& directory) {
  std::set<std::string> names;
  for (const auto& [name, bytes] : directory) {
    if (parse_checkpoint_name(name).kind != CheckpointName::Kind::kOther) names.insert(name);
  }
  return names;
}

TEST(Checkpoint, WhatWasSavedIsRestoredBitForBit) {
  for (const bool lending : {false, true}) {
    for (const std::uint32_t workers : {1U, 4U}) {
      for (const CodecId codec : {CodecId::kRaw, CodecId::kPlanes, CodecId::kLz4}) {
        Random random(kSeed);
        MemoryFiles files;
        ModelSource model;
        model.lending = lending;
        model.fill(random);
        CheckpointSaveOptions options;
        options.workers = workers;
        options.codec = codec;
        options.verify = true;
        for (int version = 0; version < 5; ++version) {
          const CheckpointSaved saved = must_save(files, model, options);
          EXPECT_EQ(saved.version, model.version());
          EXPECT_EQ(saved.blocks, 8U);
          EXPECT_EQ(saved.blocks_full + saved.blocks_delta + saved.blocks_unchanged, 8U);
          expect_restored(files, model);
          model.step(random, 40);
        }
        EXPECT_EQ(files.open_count(), 0U) << "a descriptor was lost";
      }
    }
  }
}

TEST(Checkpoint, BlocksThatDidNotChangeAreNotWrittenAgain) {
  Random random(kSeed);
  MemoryFiles files;
  ModelSource model;
  model.fill(random);
  must_save(files, model);
  const std::uint64_t reads = model.reads;
  model.set_version({3, 2});
  model.put("scalar", DType::kF32, {}, Shard::whole(), random);
  const CheckpointSaved saved = must_save(files, model);
  EXPECT_FALSE(saved.full);
  EXPECT_EQ(saved.blocks_unchanged, 7U);
  EXPECT_EQ(model.reads, reads + 1) << "and not even read";
  EXPECT_LT(saved.written_bytes, 300U);
  expect_restored(files, model);
}

TEST(Checkpoint, DeltasAreSmallerThanBlocksAndTheirChainIsBounded) {
  Random random(kSeed);
  MemoryFiles files;
  ModelSource model;
  model.fill(random);
  CheckpointSaveOptions options = one_worker();
  options.full_every = 4;
  std::vector<bool> full;
  std::uint64_t deltas = 0;
  for (int i = 0; i < 9; ++i) {
    const CheckpointSaved saved = must_save(files, model, options);
    full.push_back(saved.full);
    deltas += saved.blocks_delta;
    if (saved.full) {
      EXPECT_EQ(saved.blocks_full, 8U);
    } else {
      EXPECT_LT(saved.written_bytes, saved.raw_bytes / 4);
    }
    const auto checkpoint = Checkpoint::open("d", std::nullopt, files);
    ASSERT_TRUE(checkpoint.ok());
    (*checkpoint)->manifest().for_each([&](const Manifest::Hit& hit) {
      EXPECT_LE((*checkpoint)->links(hit.entry).size(), 4U);
      return true;
    });
    expect_restored(files, model);
    model.step(random, 100);
  }
  EXPECT_EQ(full, (std::vector<bool>{true, false, false, false, true, false, false, false, true}));
  EXPECT_GT(deltas, 20U);
}

TEST(Checkpoint, KeepRemovesTheOldAndNothingThatAKeptOneNeeds) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Random random(kSeed + seed);
    MemoryFiles files;
    ModelSource model;
    model.fill(random);
    CheckpointSaveOptions options = one_worker();
    options.full_every = static_cast<std::uint32_t>(1 + random.below(4));
    options.keep = static_cast<std::uint32_t>(1 + random.below(3));
    for (int i = 0; i < 10; ++i) {
      must_save(files, model, options);
      const auto found = list_checkpoints("d", files);
      ASSERT_TRUE(found.ok());
      EXPECT_LE(found->size(), options.keep);
      for (const CheckpointSummary& summary : *found) EXPECT_TRUE(summary.whole) << summary.problem;
      const auto verified = verify_checkpoints("d", {.decode = true}, files);
      ASSERT_TRUE(verified.ok());
      EXPECT_TRUE(verified->problems.empty()) << verified->problems.front().text << " seed " << seed;
      EXPECT_EQ(verified->checkpoints, found->size());
      expect_restored(files, model);
      model.step(random, 50);
    }
    // Data files of at most full_every - 1 + keep saves: a full one for the oldest that stays, and what came since.
    std::set<Version> data;
    for (const std::string& name : data_files(files.after_death())) data.insert(parse_checkpoint_name(name).version);
    EXPECT_LE(data.size(), options.full_every - 1 + options.keep);
  }
}

TEST(Checkpoint, TheSameVersionAgainWritesNothing) {
  Random random(kSeed);
  MemoryFiles files;
  ModelSource model;
  model.fill(random);
  must_save(files, model);
  const Directory before = files.after_death();
  const CheckpointSaved again = must_save(files, model);
  EXPECT_TRUE(again.existed);
  EXPECT_EQ(files.after_death(), before);
}

TEST(Checkpoint, VersionsNeverGoBack) {
  Random random(kSeed);
  MemoryFiles files;
  ModelSource model({3, 7});
  model.fill(random);
  must_save(files, model);
  for (const Version older : {Version{3, 6}, Version{2, 900}}) {
    model.set_version(older);
    for (auto& [key, block] : model.blocks()) block.version = older;
    const auto refused = save_checkpoint("d", model, one_worker(), files);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), Code::kStale);
    EXPECT_NE(refused.error().message().find("3.7"), std::string::npos) << refused.error().message();
  }
  ModelSource other({3, 7});
  other.fill(random);
  const auto refused = save_checkpoint("d", other, one_worker(), files);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kStale);
}

TEST(Checkpoint, OptionsThatCannotBeMeantAreRefused) {
  Random random(kSeed);
  MemoryFiles files;
  ModelSource model;
  const auto refused = [&](auto change) {
    CheckpointSaveOptions options = one_worker();
    change(options);
    const auto saved = save_checkpoint("d", model, options, files);
    return saved.ok() ? std::string("saved") : saved.error().to_string();
  };
  model.fill(random);
  EXPECT_NE(refused([](auto& o) { o.workers = 0; }).find("invalid"), std::string::npos);
  EXPECT_NE(refused([](auto& o) { o.workers = 1000; }).find("invalid"), std::string::npos);
  EXPECT_NE(refused([](auto& o) { o.full_every = 0; }).find("invalid"), std::string::npos);
  const std::string small = refused([](auto& o) { o.memory_limit = 100'000; });
  EXPECT_NE(small.find("bytes of buffers, more than memory_limit, 100000"), std::string::npos) << small;
  EXPECT_TRUE(data_files(files.after_death()).empty()) << "nothing was written";
}

TEST(Checkpoint, ABlockThatChangesWhileItIsSavedIsRefused) {
  Random random(kSeed);
  MemoryFiles files;
  ModelSource model;
  model.fill(random);
  static_cast<void>(model.manifest());
  model.blocks().begin()->second.bytes[17] ^= std::byte{4};
  const auto refused = save_checkpoint("d", model, one_worker(), files);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kCorrupt);
  EXPECT_EQ(Checkpoint::open("d", std::nullopt, files).error().code(), Code::kNotFound);
}

// ---------------------------------------------------------------- stopped at any moment

// A directory with a version in it, stopped at every call of saving the next one. `left` makes what is left.
template <typename Left>
void stop_everywhere(std::uint32_t workers, std::uint32_t rounds, Left left) {
  for (std::uint32_t round = 0; round < rounds; ++round) {
    Random random(kSeed + round);
    ModelSource before;
    before.fill(random, true);
    CheckpointSaveOptions options;
    options.workers = workers;
    options.keep = 1 + round % 2;
    MemoryFiles first;
    must_save(first, before, options);
    Random steps(kSeed + 1000 + round);
    ModelSource next;
    Random again(kSeed + round);
    next.fill(again, true);
    next.step(steps, 60);
    const Directory start = first.after_death();
    std::uint64_t stopped = 0;
    for (std::uint64_t call = 1;; ++call) {
      MemoryFiles files(start);
      files.die_at = call;
      const auto saved = save_checkpoint("d", next, options, files);
      const bool finished = !files.dead();
      EXPECT_TRUE(!finished || saved.ok());
      MemoryFiles after(left(files, random));
      const auto found = Checkpoint::open("d", std::nullopt, after);
      ASSERT_TRUE(found.ok()) << "call " << call << ": " << found.error().message();
      const bool is_new = (*found)->manifest().version() == next.version();
      EXPECT_TRUE(is_new || (*found)->manifest().version() == before.version()) << call;
      EXPECT_TRUE(is_new || !saved.ok()) << "a save that succeeded is there, call " << call;
      expect_restored(after, is_new ? next : before);
      // The next save of the same version works, whatever was left, and takes all leftovers away.
      const auto second = save_checkpoint("d", next, options, after);
      ASSERT_TRUE(second.ok()) << "call " << call << ": " << second.error().message();
      expect_restored(after, next);
      const auto verified = verify_checkpoints("d", {.decode = true}, after);
      ASSERT_TRUE(verified.ok());
      EXPECT_TRUE(verified->problems.empty()) << "call " << call << ": " << verified->problems.front().file << ": " << verified->problems.front().text;
      // And one of another version finds no use for what a save of this one left.
      ModelSource third = ModelSource({3, 3});
      Random other(kSeed);
      third.fill(other, true);
      MemoryFiles beside(left(files, random));
      const auto over = save_checkpoint("d", third, options, beside);
      ASSERT_TRUE(over.ok()) << "call " << call << ": " << over.error().message();
      std::set<std::string> needed;
      for (const auto& [name, bytes] : beside.after_death()) {
        const CheckpointName is = parse_checkpoint_name(name);
        EXPECT_FALSE(is.temporary) << name;
        if (is.kind != CheckpointName::Kind::kManifest) continue;
        const auto manifest = decode_checkpoint_manifest(bytes);
        ASSERT_TRUE(manifest.ok());
        needed.insert(name);
        for (const CheckpointFile& file : manifest->files) needed.insert(file.name);
      }
      EXPECT_EQ(data_files(beside.after_death()), needed) << "call " << call;
      if (finished) break;
      ++stopped;
    }
    EXPECT_GT(stopped, 20U) << "the save has so many calls at least";
  }
}

TEST(Checkpoint, AProcessThatDiesAtAnyCallLeavesAWholeCheckpoint) {
  stop_everywhere(1, 2, [](const MemoryFiles& files, Random&) { return files.after_death(); });
  stop_everywhere(3, 1, [](const MemoryFiles& files, Random&) { return files.after_death(); });
}

TEST(Checkpoint, AMachineThatStopsAtAnyCallLeavesAWholeCheckpoint) {
  stop_everywhere(1, 6, [](const MemoryFiles& files, Random& random) { return files.after_power_loss(random); });
}

TEST(Checkpoint, ASaveThatWasEndedIsTakenUpAgain) {
  Random random(kSeed);
  ModelSource model;
  model.fill(random);
  MemoryFiles whole;
  const std::uint64_t all = must_save(whole, model).written_bytes;
  const std::uint64_t calls = whole.calls();
  std::uint64_t most = 0;
  for (std::uint64_t call = 1; call < calls; ++call) {
    MemoryFiles files;
    files.die_at = call;
    const bool done = save_checkpoint("d", model, one_worker(), files).ok();  // it died while it looked for old files
    MemoryFiles after(files.after_death());
    model.reads = 0;
    const CheckpointSaved saved = must_save(after, model);
    EXPECT_TRUE(!done || saved.existed);
    if (saved.existed) continue;
    EXPECT_EQ(saved.blocks_resumed + saved.blocks_full, 8U);
    EXPECT_EQ(model.reads, saved.blocks_full) << "blocks that are there are not read again";
    EXPECT_LE(saved.written_bytes, all);
    most = std::max(most, saved.blocks_resumed);
    expect_restored(after, model);
  }
  EXPECT_EQ(most, 8U) << "stopped before the manifest, everything is there";
}

TEST(Checkpoint, WhatIsDamagedInALeftoverIsNotTakenUp) {
  std::uint64_t some = 0;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Random random(kSeed + seed);
    ModelSource model;
    model.fill(random, true);
    MemoryFiles files;
    std::uint64_t syncs = 0;
    files.refuse = [&](const std::string& call, const std::string&) {
      if (call == "fsync" && ++syncs == 1) files.die_at = files.calls();
      return files.dead() ? EIO : 0;
    };
    ASSERT_FALSE(save_checkpoint("d", model, one_worker(), files).ok());
    Directory left = files.after_death();
    FileBytes& bytes = left.at(checkpoint_data_name(model.version(), 0) + ".tmp");
    ASSERT_GT(bytes.size(), 10'000U);
    const std::uint64_t at = random.below(bytes.size());
    if (random.chance(50)) {
      bytes[static_cast<std::size_t>(at)] ^= static_cast<std::byte>(1U << random.below(8));
    } else {
      std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), std::min<std::uint64_t>(512, bytes.size() - at), std::byte{0});
    }
    MemoryFiles after(left);
    const CheckpointSaved saved = must_save(after, model);
    EXPECT_LT(saved.blocks_resumed, 8U) << "seed " << seed;
    some += saved.blocks_resumed > 0 ? 1 : 0;
    const auto verified = verify_checkpoints("d", {.decode = true}, after);
    ASSERT_TRUE(verified.ok());
    EXPECT_TRUE(verified->problems.empty()) << "seed " << seed << ": " << verified->problems.front().text;
    expect_restored(after, model);
  }
  EXPECT_GT(some, 20U) << "what lies before the damage is taken up";
}

TEST(Checkpoint, ASaveThatIsToldToStopSaysSoAndIsTakenUpAgain) {
  Random random(kSeed);
  MemoryFiles files;
  ModelSource model;
  model.fill(random);
  CheckpointSaveOptions options = one_worker();
  options.progress = std::make_shared<CheckpointProgress>();
  std::uint64_t writes = 0;
  files.refuse = [&](const std::string& call, const std::string& path) {
    if (call == "write" && path.find(".blocks") != std::string::npos && ++writes == 1) options.progress->stop_at = 1;
    return 0;
  };
  // Records are gathered, so the first write may be the last: a block larger than what is gathered comes first.
  model.put("huge", DType::kU8, {3 << 20}, Shard::whole(), random);
  const auto stopped = save_checkpoint("d", model, options, files);
  ASSERT_FALSE(stopped.ok());
  EXPECT_EQ(stopped.error().code(), Code::kTimeout);
  EXPECT_NE(stopped.error().message().find("of 9 blocks written"), std::string::npos) << stopped.error().message();
  options.progress->stop_at = kNever;
  const CheckpointSaved saved = must_save(files, model, options);
  EXPECT_GE(saved.blocks_resumed, 1U);
  EXPECT_EQ(options.progress->blocks_done, 9U);
  EXPECT_EQ(options.progress->bytes_done, saved.raw_bytes);
  expect_restored(files, model);
}

// ---------------------------------------------------------------- a file system that says no

TEST(Checkpoint, AFullDiskIsToldAndGivenBack) {
  Random random(kSeed);
  ModelSource model;
  model.fill(random);
  MemoryFiles first;
  must_save(first, model);
  const Directory start = first.after_death();
  std::uint64_t used = 0;
  for (const auto& [name, bytes] : start) used += bytes.size();
  model.step(random, 100);
  std::uint64_t full = 0;
  for (std::uint64_t room = used;; room += 97) {
    MemoryFiles files(start);
    files.room = room;
    const auto saved = save_checkpoint("d", model, one_worker(), files);
    if (saved.ok()) break;
    ++full;
    ASSERT_EQ(saved.error().code(), Code::kBackpressure) << saved.error().message();
    EXPECT_NE(saved.error().message().find("12345 bytes"), std::string::npos) << saved.error().message();
    EXPECT_NE(saved.error().message().find("d/"), std::string::npos);
    Directory left = files.after_death();
    std::erase_if(left, [](const auto& item) { return item.second.empty(); });
    Directory had = start;
    std::erase_if(had, [](const auto& item) { return item.second.empty(); });
    EXPECT_EQ(left, had) << "room " << room;
  }
  EXPECT_GT(full, 10U);
}

TEST(Checkpoint, ShortCountsAndSignalsChangeNothing) {
  for (const std::size_t piece : {std::size_t{1}, std::size_t{4096}, std::size_t{70'000}}) {
    Random random(kSeed);
    MemoryFiles files;
    files.piece_max = piece;
    files.interrupts = true;
    ModelSource model;
    model.fill(random);
    if (piece == 1) model.remove("big");  // a call a byte
    must_save(files, model);
    expect_restored(files, model);
    model.step(random, 100);
    must_save(files, model);
    expect_restored(files, model);
    const auto verified = verify_checkpoints("d", {.decode = true}, files);
    ASSERT_TRUE(verified.ok());
    EXPECT_TRUE(verified->problems.empty());
  }
}

TEST(Checkpoint, EveryCallThatFailsIsATypedErrorThatNamesThePathAndLeavesTheOldOne) {
  struct Refusal {
    int error;
    Code code;
  };
  Random random(kSeed);
  ModelSource model;
  model.fill(random);
  MemoryFiles first;
  must_save(first, model);
  const Directory start = first.after_death();
  const ModelSource& old = model;
  ModelSource next({3, 2});
  Random again(kSeed + 5);
  next.fill(again);
  for (const Refusal refusal : {Refusal{ENOSPC, Code::kBackpressure}, {EDQUOT, Code::kBackpressure}, {EROFS, Code::kUnavailable}, {EACCES, Code::kUnavailable},
                                {EFBIG, Code::kUnavailable}, {EIO, Code::kCorrupt}, {EMFILE, Code::kBackpressure}}) {
    for (const std::string call : {"open", "write", "fsync", "rename", "list", "lock"}) {
      for (std::uint64_t nth = 1; nth < 40; ++nth) {
        MemoryFiles files(start);
        std::uint64_t seen = 0;
        bool refused = false;
        files.refuse = [&](const std::string& name, const std::string& path) {
          if (name != call || path.ends_with("readers") || ++seen != nth) return 0;
          refused = true;
          return refusal.error;
        };
        const auto saved = save_checkpoint("d", next, one_worker(), files);
        files.refuse = nullptr;
        if (!refused) break;
        if (!saved.ok()) {
          // The rename that is tried first says that no checkpoint can be made there, whatever the reason.
          const bool probe = call == "rename" && nth == 1;
          EXPECT_EQ(saved.error().code(), probe ? Code::kUnavailable : refusal.code) << saved.error().message();
          EXPECT_NE(saved.error().message().find(" d"), std::string::npos) << saved.error().message();
          EXPECT_NE(saved.error().message().find("errno"), std::string::npos) << saved.error().message();
        } else {
          EXPECT_FALSE(saved->notes.empty()) << "went on without a word: " << call << ' ' << nth;
        }
        // Only the sync of the directory after the last rename may fail with the new one in place.
        const auto found = Checkpoint::open("d", std::nullopt, files);
        ASSERT_TRUE(found.ok());
        expect_restored(files, (*found)->manifest().version() == next.version() ? next : old);
        EXPECT_EQ(files.open_count(), 1U) << "found's lock, no other descriptor";
      }
    }
  }
}

TEST(Checkpoint, ADirectoryThatIsNotThereIsMadeOrNamed) {
  MemoryFiles files;
  EXPECT_EQ(list_checkpoints("d", files).error().code(), Code::kNotFound);
  EXPECT_EQ(Checkpoint::open("d", std::nullopt, files).error().code(), Code::kNotFound);
  EXPECT_EQ(verify_checkpoints("d", {}, files).error().code(), Code::kNotFound);
  ModelSource empty;
  must_save(files, empty);
  expect_restored(files, empty);
  const auto missing = Checkpoint::open("d", Version{9, 9}, files);
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code(), Code::kNotFound);
  EXPECT_NE(missing.error().message().find("3.1"), std::string::npos) << "those that are there are named";
}

TEST(Checkpoint, OnlyOneSavesAtATime) {
  Random random(kSeed);
  MemoryFiles files;
  ModelSource model;
  model.fill(random);
  std::optional<Error> second;
  files.refuse = [&](const std::string& call, const std::string& path) {
    // Not from inside of a call: the file system has one lock. The one that is refused here is the first save's own.
    return call == "lock" && path == "d/lock" ? EWOULDBLOCK : 0;
  };
  const auto refused = save_checkpoint("d", model, one_worker(), files);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kBackpressure);
  EXPECT_NE(refused.error().message().find("another process saves into d"), std::string::npos);
}

TEST(Checkpoint, WhoReadsKeepsTheFiles) {
  Random random(kSeed);
  MemoryFiles files;
  ModelSource model;
  model.fill(random);
  ModelSource old({3, 1});
  Random same(kSeed);
  old.fill(same);
  CheckpointSaveOptions options = one_worker();
  options.keep = 1;
  options.full_every = 1;
  must_save(files, model, options);
  {
    const auto reader = Checkpoint::open("d", std::nullopt, files);
    ASSERT_TRUE(reader.ok());
    model.step(random, 100);
    const CheckpointSaved saved = must_save(files, model, options);
    EXPECT_TRUE(saved.removed.empty());
    ASSERT_FALSE(saved.notes.empty());
    EXPECT_NE(saved.notes.front().find("somebody reads"), std::string::npos);
    expect_restored(files, old, Version{3, 1});
  }
  model.step(random, 100);
  const CheckpointSaved saved = must_save(files, model, options);
  EXPECT_EQ(saved.removed.size(), 2U);
  EXPECT_EQ(list_checkpoints("d", files)->size(), 1U);
}

TEST(Checkpoint, NamesAreThoseOfTheFormat) {
  EXPECT_EQ(checkpoint_manifest_name({7, 12}), "checkpoint-0000000007-00000000000000000012.manifest");
  EXPECT_EQ(checkpoint_data_name({4294967295U, ~std::uint64_t{0}}, 3), "data-4294967295-18446744073709551615-000003.blocks");
  const CheckpointName data = parse_checkpoint_name("data-4294967295-18446744073709551615-000003.blocks.tmp");
  EXPECT_EQ(data.kind, CheckpointName::Kind::kData);
  EXPECT_TRUE(data.temporary);
  EXPECT_EQ(data.version, (Version{4294967295U, ~std::uint64_t{0}}));
  EXPECT_EQ(data.number, 3U);
  for (const std::string name :
       {"", "lock", "checkpoint-", "data-4294967296-00000000000000000001-000000.blocks", "data-0000000001-18446744073709551616-000000.blocks",
        "checkpoint-0000000000-00000000000000000001.manifest", "checkpoint-0000000001-00000000000000000001.manifest.tmp2", "checkpoint-1-1.manifest",
        "data-0000000001-00000000000000000001-00000a.blocks", "xcheckpoint-0000000001-00000000000000000001.manifest"}) {
    EXPECT_EQ(parse_checkpoint_name(name).kind, CheckpointName::Kind::kOther) << name;
  }
}

}  // namespace
}  // namespace paramwire
