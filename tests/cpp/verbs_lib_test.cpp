// How libibverbs is found: none, one without a function, one that is too late for forks, and the machine's own where it has one.
#include "paramwire/net/verbs_lib.hpp"

#include <cerrno>
#include <gtest/gtest.h>
#include <string>

namespace paramwire {
namespace {

Error refused(const char* library) {
  auto opened = VerbsLibrary::open(library);
  EXPECT_FALSE(opened.ok()) << library;
  return opened.ok() ? Error(Code::kInternal, "") : std::move(opened).error();
}

TEST(VerbsLibrary, LibraryThatIsNotThereGivesTheLoadersWords) {
  const Error error = refused("libnot-there.so.1");
  EXPECT_EQ(error.code(), Code::kUnavailable);
  EXPECT_EQ(error.message(), "libnot-there.so.1: cannot open shared object file: No such file or directory");
}

TEST(VerbsLibrary, LibraryWithoutAFunctionIsRefusedNamingIt) {
  const Error error = refused(PARAMWIRE_STUB_WITHOUT_REG_MR);
  EXPECT_EQ(error.code(), Code::kUnavailable);
  EXPECT_EQ(error.message(), std::string(PARAMWIRE_STUB_WITHOUT_REG_MR) + " has no function ibv_reg_mr: rdma-core 32 or newer is needed");
}

TEST(VerbsLibrary, ForkSupportThatComesTooLateIsRefusedWithTheWayOut) {
  const Error error = refused(PARAMWIRE_STUB_FORK_TOO_LATE);
  EXPECT_EQ(error.code(), Code::kUnavailable);
  EXPECT_NE(error.message().find("RDMAV_FORK_SAFE=1"), std::string::npos) << error.message();
  EXPECT_NE(error.message().find("ibv_fork_init: Invalid argument (errno 22)"), std::string::npos) << error.message();
}

TEST(VerbsLibrary, DevicesAreListedAndAFailureToOpenOneKeepsItsErrno) {
  const auto api = VerbsLibrary::open(PARAMWIRE_STUB);
  ASSERT_TRUE(api.ok()) << api.error().message();
  const auto names = (*api)->device_names();
  ASSERT_TRUE(names.ok());
  EXPECT_EQ(*names, std::vector<std::string>{"stub0"});
  EXPECT_EQ((*api)->open_device("stub0"), nullptr);
  EXPECT_EQ(errno, EACCES);
  EXPECT_EQ((*api)->open_device("stub1"), nullptr);
  EXPECT_EQ(errno, ENODEV);
}

TEST(VerbsLibrary, MachinesOwnLibraryListsDevicesOrSaysWhyNot) {
  const auto api = VerbsLibrary::open();
  if (!api.ok()) {
    // What a machine without rdma-core gets.
    EXPECT_EQ(api.error().code(), Code::kUnavailable);
    EXPECT_NE(api.error().message().find("libibverbs.so.1"), std::string::npos) << api.error().message();
    GTEST_SKIP() << "no libibverbs here: " << api.error().message();
  }
  EXPECT_TRUE(VerbsLibrary::open().ok()) << "again";
  const auto names = (*api)->device_names();
  if (!names.ok()) {
    EXPECT_EQ(names.error().code(), Code::kUnavailable);
    EXPECT_NE(names.error().message().find("errno"), std::string::npos) << names.error().message();
    return;
  }
  EXPECT_EQ((*api)->open_device("no such device"), nullptr);
  EXPECT_EQ(errno, ENODEV);
  for (const std::string& name : *names) {
    ibv_context* device = (*api)->open_device(name);
    if (device == nullptr) continue;  // not ours to open
    ibv_device_attr attributes{};
    EXPECT_EQ((*api)->query_device(device, &attributes), 0);
    EXPECT_GE(attributes.phys_port_cnt, 1);
    ibv_port_attr port{};
    EXPECT_EQ((*api)->query_port(device, 1, &port), 0);
    EXPECT_EQ((*api)->close_device(device), 0);
  }
}

}  // namespace
}  // namespace paramwire
