// Checks of extents by whoever fetched them.
#include "paramwire/base/crc.hpp"
#include "paramwire/base/extent_check.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/base/types.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace paramwire {
namespace {

class VerifyExtents : public ::testing::Test {
 protected:
  VerifyExtents() : bytes_(10 + 3 * kExtentBytes + 5) {
    for (std::size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = static_cast<std::byte>(i * 131 + i / 251);
    for (std::size_t at = 10; at < bytes_.size(); at += kExtentBytes) {
      const auto extent = std::span(bytes_).subspan(at, std::min<std::size_t>(kExtentBytes, bytes_.size() - at));
      checks_.push_back({at, static_cast<std::uint32_t>(extent.size()), crc32c(extent)});
    }
  }
  std::vector<std::byte> bytes_;
  std::vector<ExtentCheck> checks_;
};

TEST_F(VerifyExtents, GoodBytesPassAndBytesOfNoExtentAreNotLookedAt) {
  EXPECT_TRUE(verify_extents(bytes_, checks_).ok());
  EXPECT_TRUE(verify_extents({}, {}).ok());
  bytes_[9] ^= std::byte{1};
  EXPECT_TRUE(verify_extents(bytes_, checks_).ok());
}

TEST_F(VerifyExtents, TheFirstWrongExtentIsNamedWithBothCrcsAndTheNumberOfAll) {
  bytes_[10 + kExtentBytes] ^= std::byte{1};
  bytes_.back() ^= std::byte{1};
  const Status status = verify_extents(bytes_, checks_);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), Code::kCorrupt);
  const std::string& text = status.error().message();
  EXPECT_NE(text.find(cat("at offset ", 10 + kExtentBytes, ':')), std::string::npos) << text;
  EXPECT_NE(text.find(cat("expected ", hex32(checks_[1].crc32c))), std::string::npos) << text;
  EXPECT_NE(text.find(cat("have ", hex32(crc32c(std::span(bytes_).subspan(10 + kExtentBytes, kExtentBytes))))), std::string::npos) << text;
  EXPECT_NE(text.find("2 of 4"), std::string::npos) << text;
}

TEST_F(VerifyExtents, AnExtentOutsideOfTheTargetIsTheCallersMistake) {
  for (const ExtentCheck& wrong : {ExtentCheck{bytes_.size(), 1, 0}, ExtentCheck{bytes_.size() + 1, 0, 0}, ExtentCheck{0, 0xffffffff, 0}, ExtentCheck{~std::uint64_t{0}, 2, 0}}) {
    EXPECT_EQ(verify_extents(bytes_, {&wrong, 1}).error().code(), Code::kInvalid) << wrong.offset << ' ' << wrong.size;
  }
}

}  // namespace
}  // namespace paramwire
