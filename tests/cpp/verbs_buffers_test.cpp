// Targets that the device writes itself: buffers registered by their owner (VerbsNode, Client::register_buffer).
#include "support/verbs_rig.hpp"

#include "paramwire/base/text.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <set>
#include <sys/mman.h>

namespace paramwire {
namespace {

using namespace testing;

class VerbsBuffersTest : public VerbsRig {
 protected:
  void SetUp() override {
    serve();
    rig_->publish({{"w", bytes_}, {"v", other_}});
    snapshot_ = rig_->snapshot();
  }
  std::uint64_t direct(const Link& link) const { return link.stats().verbs.direct_bytes; }
  // Where READs landed, but for headers: in the buffer, or elsewhere.
  std::uint64_t landed_elsewhere(Link& link, std::span<std::byte> target, std::string_view tensor, ByteRange range) {
    const std::uint64_t before = direct(link), wire = link.stats().wire_bytes;
    EXPECT_TRUE(read_into(link, snapshot_, tensor, range, target).ok());
    return link.stats().wire_bytes - wire - (direct(link) - before);
  }

  const Bytes bytes_ = random_bytes(3'000'000, 1), other_ = random_bytes(1'000'000, 2);
  Snapshot snapshot_;
};

TEST_F(VerbsBuffersTest, AWholeBlockIntoARegisteredBufferIsNotStaged) {
  const auto with = node();
  const auto link = connect({}, with);
  Bytes buffer(bytes_.size() + 100);
  const auto target = std::span(buffer).subspan(50, bytes_.size());
  const FakeLive before = fabric_->live("fake1");
  const std::uint64_t id = must(with->add(buffer));
  EXPECT_EQ(fabric_->live("fake1").regions, before.regions + 1);
  EXPECT_EQ(landed_elsewhere(*link, target, "w", {0, bytes_.size()}), 0U);
  EXPECT_TRUE(std::ranges::equal(target, bytes_));
  EXPECT_EQ(buffer[49], std::byte{0});
  EXPECT_EQ(buffer[50 + bytes_.size()], std::byte{0});
  EXPECT_EQ(direct(*link), bytes_.size());
  with->remove(id);
  EXPECT_EQ(fabric_->live("fake1").regions, before.regions) << "given back while the link lives";
  std::ranges::fill(buffer, std::byte{0});
  EXPECT_EQ(landed_elsewhere(*link, target, "w", {0, bytes_.size()}), bytes_.size()) << "and staged from then on";
  EXPECT_TRUE(std::ranges::equal(target, bytes_));
}

TEST_F(VerbsBuffersTest, OfARangeTheEdgesAreStagedAndTheMiddleIsNot) {
  const auto with = node();
  const auto link = connect({}, with);
  Bytes target(5 * kExtentBytes);
  const std::uint64_t id = must(with->add(target));
  const std::uint64_t table = extent_count(bytes_.size()) * sizeof(ExtentRow);
  EXPECT_EQ(landed_elsewhere(*link, target, "w", {kExtentBytes + 1000, target.size()}), kExtentBytes + table);
  EXPECT_TRUE(std::equal(target.begin(), target.end(), bytes_.begin() + static_cast<std::ptrdiff_t>(kExtentBytes) + 1000));
  EXPECT_EQ(direct(*link), target.size());
  with->remove(id);
}

TEST_F(VerbsBuffersTest, ABufferAddedBeforeAnyLinkIsRegisteredWhenALinkReadsIntoIt) {
  const auto with = node();
  Bytes target(bytes_.size());
  const std::uint64_t id = must(with->add(target));
  EXPECT_EQ(fabric_->live("fake1"), FakeLive{}) << "no device is open";
  const auto link = connect({}, with);
  const int regions = fabric_->live("fake1").regions;
  EXPECT_EQ(landed_elsewhere(*link, target, "w", {0, target.size()}), 0U);
  EXPECT_EQ(target, bytes_);
  EXPECT_EQ(fabric_->live("fake1").regions, regions + 1);
  const auto second = connect({}, with);
  EXPECT_EQ(landed_elsewhere(*second, target, "w", {0, target.size()}), 0U);
  EXPECT_EQ(fabric_->live("fake1").regions, regions + 2) << "the second link's staging buffer alone: links share the device and the registration";
  EXPECT_EQ(fabric_->live("fake1").contexts, 1);
  with->remove(id);
}

TEST_F(VerbsBuffersTest, OverlappingBuffersAreEachGoodForTheirOwn) {
  const auto with = node();
  const auto link = connect({}, with);
  Bytes memory(bytes_.size() + other_.size());
  const auto all = std::span(memory);
  const std::uint64_t first = must(with->add(all.first(bytes_.size())));
  const std::uint64_t second = must(with->add(all.subspan(other_.size())));
  const std::uint64_t same = must(with->add(all.first(bytes_.size())));
  // One batch into both; a target that lies in either, one across both that lies in none alone.
  std::vector<BlockRead> batch = {snapshot_.read_of("w", {0, bytes_.size()}, all.first(bytes_.size())), snapshot_.read_of("v", {0, other_.size()}, all.subspan(bytes_.size()))};
  link->read(batch, in_seconds(30));
  for (const BlockRead& item : batch) ASSERT_TRUE(item.result.ok()) << item.result.error().to_string();
  EXPECT_TRUE(std::ranges::equal(all.first(bytes_.size()), bytes_));
  EXPECT_TRUE(std::ranges::equal(all.subspan(bytes_.size()), other_));
  EXPECT_EQ(direct(*link), memory.size());
  with->remove(first);
  EXPECT_EQ(landed_elsewhere(*link, all.first(bytes_.size()), "w", {0, bytes_.size()}), 0U) << "the other registration of the same bytes";
  with->remove(same);
  EXPECT_EQ(landed_elsewhere(*link, all.first(bytes_.size()), "w", {0, bytes_.size()}), bytes_.size());
  EXPECT_EQ(landed_elsewhere(*link, all.subspan(bytes_.size()), "v", {0, other_.size()}), 0U);
  with->remove(second);
  with->remove(second);  // no harm
  with->remove(12345);
}

TEST_F(VerbsBuffersTest, NothingIsNoBuffer) {
  const auto with = node();
  EXPECT_EQ(with->add({}).error().code(), Code::kInvalid);
}

TEST_F(VerbsBuffersTest, MemoryThatCanNotBeRegisteredIsAnErrorToItsOwnerAndStagedForReads) {
  for (const int error : {ENOMEM, EFAULT}) {
    const auto with = node();
    const auto link = connect({}, with);
    Bytes target(bytes_.size());
    fabric_->fail(FakeCall::kRegMr, error, 1, 1, "fake1");
    const auto refused = with->add(target);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), error == ENOMEM ? Code::kBackpressure : Code::kUnavailable);
    expect_words(refused.error().message(), {"fake1", "ibv_reg_mr", "3000000"});
    EXPECT_EQ(landed_elsewhere(*link, target, "w", {0, target.size()}), target.size());
    EXPECT_EQ(target, bytes_);
    const std::uint64_t id = must(with->add(target));
    EXPECT_EQ(landed_elsewhere(*link, target, "w", {0, target.size()}), 0U) << "nothing half registered stands in the way";
    with->remove(id);
  }
}

TEST_F(VerbsBuffersTest, ABufferThatIsRefusedWhenALinkFirstReadsIntoItIsStagedAndNotTriedEachTime) {
  const auto with = node();
  Bytes target(bytes_.size());
  const std::uint64_t id = must(with->add(target));
  const auto link = connect({}, with);
  fabric_->fail(FakeCall::kRegMr, ENOMEM, 1, 1, "fake1");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(landed_elsewhere(*link, target, "w", {0, target.size()}), target.size());
  EXPECT_EQ(target, bytes_);
  with->remove(id);
}

// CASES UP-06.
TEST_F(VerbsBuffersTest, MemoryThatIsOnlyReadableOrNotThereIsRefused) {
  const auto with = node();
  const auto link = connect({}, with);
  void* const readable = mmap(nullptr, 1 << 20, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(readable, MAP_FAILED);
  EXPECT_EQ(with->add({static_cast<std::byte*>(readable), 1 << 20}).error().code(), Code::kUnavailable);
  ASSERT_EQ(munmap(readable, 1 << 20), 0);
  EXPECT_EQ(with->add({static_cast<std::byte*>(readable), 1 << 20}).error().code(), Code::kUnavailable);
}

TEST_F(VerbsBuffersTest, ARegistrationKeepsItsDeviceUntilItGoes) {
  const auto with = node();
  Bytes target(4096);
  std::uint64_t id = 0;
  {
    const auto link = connect({}, with);
    id = must(with->add(target));
  }
  EXPECT_EQ(fabric_->live("fake1").contexts, 1);
  EXPECT_EQ(fabric_->live("fake1").regions, 1);
  with->remove(id);
  EXPECT_EQ(fabric_->live("fake1"), FakeLive{});
}

// A device that was reset is another one, though its name is the same: what is kept of the first must not stand in the way.
TEST_F(VerbsBuffersTest, ADeviceThatWasResetIsOpenedAnewThoughABufferIsRegisteredAtTheOldOne) {
  const auto with = node();
  Bytes target(bytes_.size());
  std::uint64_t id = 0;
  {
    const auto link = connect({}, with);
    id = must(with->add(target));
  }
  int contexts = 1;
  for (const FakeCall call : {FakeCall::kCreateQp, FakeCall::kRegMr}) {
    fabric_->fail(call, EIO, 1, 1, "fake1");  // of the context that is gone
    EXPECT_EQ(try_connect({}, with).error().code(), Code::kUnreachable);
    const auto link = connect({}, with);
    EXPECT_EQ(fabric_->live("fake1").contexts, ++contexts);
    EXPECT_EQ(landed_elsewhere(*link, target, "w", {0, target.size()}), 0U) << "registered at the new one, too";
    EXPECT_EQ(target, bytes_);
  }
  with->remove(id);
  EXPECT_EQ(fabric_->live("fake1"), FakeLive{});
}

// ---------------------------------------------------------------- by the client

TEST_F(VerbsBuffersTest, AClientsBufferIsWrittenDirectlyWhileItsRegistrationLives) {
  const auto one = client();
  Bytes target(bytes_.size());
  FetchRequest request;
  request.tensor = "w";
  request.target = target;
  const auto direct_of = [&] { return one->stats().link.verbs.direct_bytes; };
  {
    const BufferRegistration registration = must(one->register_buffer(target));
    must(one->fetch({&request, 1}));
    EXPECT_EQ(direct_of(), target.size());
    EXPECT_EQ(target, bytes_);
  }
  EXPECT_EQ(fabric_->live("fake1").regions, 1) << "the link's staging buffer";
  std::ranges::fill(target, std::byte{0});
  must(one->fetch({&request, 1}));
  EXPECT_EQ(direct_of(), target.size()) << "staged";
  EXPECT_EQ(target, bytes_);
  EXPECT_EQ(one->register_buffer({}).error().code(), Code::kInvalid);
  fabric_->fail(FakeCall::kRegMr, ENOMEM, 1, 1, "fake1");
  EXPECT_EQ(one->register_buffer(target).error().code(), Code::kBackpressure);
}

TEST_F(VerbsBuffersTest, ARegistrationMayOutliveItsClient) {
  Bytes target(4096);
  BufferRegistration registration;
  {
    const auto one = client();
    registration = must(one->register_buffer(target));
  }
  EXPECT_EQ(fabric_->live("fake1").regions, 1);
  registration.release();
  registration.release();
  EXPECT_EQ(fabric_->live("fake1"), FakeLive{});
}

}  // namespace
}  // namespace paramwire
