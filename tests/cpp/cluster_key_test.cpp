// The key's file: what is taken, and what is refused with which words.
#include "support/rig.hpp"

#include "paramwire/net/cluster_key.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <sys/stat.h>
#include <unistd.h>

namespace paramwire {
namespace {

using namespace testing;

std::string read_file(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_file(const std::string& path, std::string_view text, mode_t mode = 0600) {
  std::ofstream(path) << text;
  ASSERT_EQ(::chmod(path.c_str(), mode), 0);
}

const std::string kText(64, '7');

TEST(ClusterKey, CreateWritesWhatLoadReads) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/k";
  const mode_t before = ::umask(0);
  const auto made = must(ClusterKey::create(path));
  ::umask(0777);
  const auto second = must(ClusterKey::create(directory.path() + "/k2"));
  ::umask(before);
  struct stat found{};
  for (const char* name : {"/k", "/k2"}) {
    ASSERT_EQ(::stat((directory.path() + name).c_str(), &found), 0);
    EXPECT_EQ(found.st_mode & 07777U, 0600U);
    EXPECT_EQ(found.st_size, 65);
  }
  const auto loaded = must(ClusterKey::load(path));
  EXPECT_TRUE(std::ranges::equal(loaded->bytes(), made->bytes()));
  EXPECT_EQ(loaded->id(), made->id());
  EXPECT_EQ(made->id().size(), 16U);
  EXPECT_NE(made->id(), second->id());
  EXPECT_FALSE(std::ranges::equal(second->bytes(), made->bytes()));
}

// The format of wire/FORMAT.md: hexadecimal digits of either case, most significant first, with or without the newline; and the id.
TEST(ClusterKey, ReadsTheFormatAndNamesIt) {
  const TemporaryDirectory directory;
  std::string text;
  for (unsigned i = 0; i < 32; ++i) text += cat("0123456789abcdef"[i / 16], "0123456789ABCDEF"[i % 16]);
  for (const std::string_view end : {"\n", ""}) {
    write_file(directory.path() + "/k", cat(text, end), 0400);
    const auto key = must(ClusterKey::load(directory.path() + "/k"));
    for (std::size_t i = 0; i < 32; ++i) EXPECT_EQ(std::to_integer<std::size_t>(key->bytes()[i]), i);
    EXPECT_EQ(key->id(), "0b3cfe1125daca2e");  // by Python's hashlib
  }
}

TEST(ClusterKey, LeavesAFileThatIsThere) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/k";
  write_file(path, "precious");
  const auto refused = ClusterKey::create(path);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kInvalid);
  EXPECT_NE(refused.error().message().find(path), std::string::npos);
  EXPECT_EQ(read_file(path), "precious");
  ASSERT_EQ(::symlink((directory.path() + "/target").c_str(), (directory.path() + "/link").c_str()), 0);
  EXPECT_EQ(ClusterKey::create(directory.path() + "/link").error().code(), Code::kInvalid);
  EXPECT_FALSE(std::filesystem::exists(directory.path() + "/target"));
  EXPECT_EQ(ClusterKey::create(directory.path() + "/no/such/k").error().code(), Code::kUnavailable);
}

TEST(ClusterKey, OpenPermissionsAreRefusedWithTheCommandThatMendsThem) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/k";
  for (const mode_t mode : {0640U, 0604U, 0660U, 0606U, 0644U, 0666U, 0601U, 0610U, 0777U}) {
    write_file(path, kText, mode);
    const auto refused = ClusterKey::load(path);
    ASSERT_FALSE(refused.ok()) << mode;
    EXPECT_EQ(refused.error().code(), Code::kDenied) << mode;
    const std::string& text = refused.error().message();
    EXPECT_NE(text.find("chmod 600 " + path), std::string::npos) << text;
    EXPECT_EQ(text.find(kText), std::string::npos) << text;
  }
  write_file(path, kText, 0644);
  EXPECT_NE(ClusterKey::load(path).error().message().find("mode 0644"), std::string::npos);
}

TEST(ClusterKey, AnotherUsersFileIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/k";
  write_file(path, kText);
  ASSERT_EQ(::chown(path.c_str(), 12345, 12345), 0);
  const auto refused = ClusterKey::load(path);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kDenied);
  EXPECT_NE(refused.error().message().find("12345"), std::string::npos);
}

TEST(ClusterKey, OtherContentsAreRefusedAndNeverQuoted) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/k";
  const std::string wrong[] = {"", "\n", kText.substr(1), kText.substr(1) + "\n", kText + "7", kText + "\r\n", kText + "\n\n", "0x" + kText.substr(2),
                               kText.substr(1) + "g", " " + kText.substr(1), kText.substr(0, 32) + "\n" + kText.substr(33), std::string(1 << 20, '7')};
  for (const std::string& text : wrong) {
    write_file(path, text);
    const auto refused = ClusterKey::load(path);
    ASSERT_FALSE(refused.ok()) << '"' << text.substr(0, 80) << '"';
    EXPECT_EQ(refused.error().code(), Code::kInvalid);
    EXPECT_NE(refused.error().message().find(path), std::string::npos);
    EXPECT_EQ(refused.error().message().find("7777"), std::string::npos) << refused.error().message();
  }
}

TEST(ClusterKey, WhatIsNoRegularFileIsRefusedWithoutWaiting) {
  const TemporaryDirectory directory;
  const std::string real = directory.path() + "/real";
  write_file(real, kText);
  ASSERT_EQ(::symlink(real.c_str(), (directory.path() + "/link").c_str()), 0);
  ASSERT_EQ(::mkfifo((directory.path() + "/fifo").c_str(), 0600), 0);
  EXPECT_EQ(ClusterKey::load(directory.path() + "/link").error().code(), Code::kInvalid);
  EXPECT_EQ(ClusterKey::load(directory.path() + "/fifo").error().code(), Code::kInvalid);
  EXPECT_EQ(ClusterKey::load(directory.path()).error().code(), Code::kInvalid);
  EXPECT_EQ(ClusterKey::load(directory.path() + "/none").error().code(), Code::kNotFound);
  EXPECT_EQ(ClusterKey::load(real + '\0' + "x").error().code(), Code::kInvalid);
}

}  // namespace
}  // namespace paramwire
