// The library against tests/golden/codec.txt; tests/python/test_codec_golden.py holds an independent decoder against the same file.
#include "support/golden_text.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/codec/codec.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>

namespace paramwire {
namespace {

using namespace testing;

TEST(CodecGolden, EveryFrameDecodesToItsRawBytesAndIsWhatTheEncoderWrites) {
  std::ifstream file(PARAMWIRE_GOLDEN_DIR "/codec.txt");
  std::size_t frames = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream in(line);
    std::string name;
    in >> name;
    std::map<std::string, std::string> fields;
    for (std::string pair; in >> pair;) fields[pair.substr(0, pair.find('='))] = pair.substr(pair.find('=') + 1);
    const auto id = codec_of(name);
    const auto dtype = dtype_from_name(fields.at("dtype"));
    ASSERT_TRUE(id.ok() && dtype.ok()) << line;
    const Codec& codec = **open_codec(*id);
    const std::uint64_t index = std::stoull(fields.at("index"));
    const auto raw = unhex(fields.at("raw")), stored = unhex(fields.at("hex"));
    std::vector<std::byte> back(raw.size());
    const Status status = codec.decoder(*dtype)->decode(index, stored, back);
    ASSERT_TRUE(status.ok()) << status.error().message() << " in " << line;
    EXPECT_EQ(back, raw) << line;
    std::vector<std::byte> made(codec.bound(*dtype, raw.size()));
    made.resize(*codec.encoder(*dtype)->encode(index, raw, made));
    EXPECT_EQ(hex(made), fields.at("hex")) << name << " of " << fields.at("of");
    ++frames;
  }
  EXPECT_GE(frames, 14U);
}

}  // namespace
}  // namespace paramwire
