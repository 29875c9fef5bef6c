// The bytes of a whole directory against tests/golden/checkpoint.txt; tests/python/test_checkpoint_golden.py reads the same file by an implementation of
// its own. With CHECKPOINT_GOLDEN_OUT in the environment the file is written there anew.
#include "support/checkpoint_model.hpp"
#include "support/golden_text.hpp"
#include "support/memory_files.hpp"

#include "paramwire/store/checkpoint.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace paramwire {
namespace {

using testing::MemoryFiles;
using testing::ModelSource;
using testing::hex;

// Two versions, the second with what did not change named from the first. Codec raw: codecs and deltas have golden values of their own.
std::string make() {
  Random random(7);
  ModelSource model({7, 1});
  model.put("w", DType::kF32, {2, 3}, Shard::whole(), random);
  model.put("cut", DType::kU8, {5, 2}, Shard::rows(0, 3), random);
  model.put("cut", DType::kU8, {5, 2}, Shard::rows(3, 5), random);
  model.put("none", DType::kBF16, {0, 4}, Shard::whole(), random);
  model.put("one", DType::kF64, {}, Shard::whole(), random);
  model.alias("tied", "w");
  MemoryFiles files;
  CheckpointSaveOptions options;
  options.workers = 1;
  options.codec = CodecId::kRaw;
  options.delta = false;
  options.created_us = 1700000000000001;
  EXPECT_TRUE(save_checkpoint("d", model, options, files).ok());
  model.set_version({7, 2});
  model.put("one", DType::kF64, {}, Shard::whole(), random);
  EXPECT_TRUE(save_checkpoint("d", model, options, files).ok());
  std::string text;
  for (const auto& [name, bytes] : files.after_death()) {
    if (parse_checkpoint_name(name).kind != CheckpointName::Kind::kOther) text += name + " " + hex(bytes) + "\n";
  }
  return text;
}

TEST(CheckpointGolden, ADirectoryHasTheBytesOfTheFormatPage) {
  const std::string text = make();
  if (const char* out = std::getenv("CHECKPOINT_GOLDEN_OUT"); out != nullptr) std::ofstream(out) << text;
  std::ifstream file(PARAMWIRE_GOLDEN_DIR "/checkpoint.txt");
  std::ostringstream golden;
  golden << file.rdbuf();
  EXPECT_EQ(text, golden.str());
}

}  // namespace
}  // namespace paramwire
