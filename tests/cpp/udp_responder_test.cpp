// The server's answers to datagrams: who gets none, who gets a status, who gets data.
#include "support/datagram_rig.hpp"

namespace paramwire {
namespace {

using namespace testing;
using Verdict = UdpResponder::Verdict;

class UdpResponderTest : public ::testing::Test {
 protected:
  DatagramGet get(std::uint64_t sequence) {
    DatagramGet get;
    get.session = rig_.session.session;
    get.sequence = sequence;
    get.request = 77;
    get.asked = {kIncarnation, block_.entry.id, kVersion, BlockPart::kStored};
    get.segment_size = 1000;
    get.segment_count = 1;
    get.want(0);
    get.token = token_;
    return get;
  }
  Bytes bytes_of(const DatagramGet& get) const {
    Bytes out;
    get.encode(out, rig_.session.key);
    return out;
  }
  Verdict check(const DatagramGet& get) { return rig_.responder->check(bytes_of(get), rig_.address, question_); }
  void learn_token() {
    ASSERT_EQ(check(get(1)), Verdict::kStatus);
    token_ = question_.token;
  }

  DatagramRig rig_;
  PublishedBlock& block_ = rig_.publish("b", random_bytes(2500, 1));
  SipTag token_;
  UdpResponder::Question question_;
};

TEST_F(UdpResponderTest, ANewAddressGetsOneStatusSmallerThanItsQuestionAndThenData) {
  const Bytes first = bytes_of(get(1));
  auto answers = rig_.serve(first);
  ASSERT_EQ(answers.size(), 1U);
  EXPECT_LT(answers[0].size(), first.size());
  bool forged = false;
  const auto status = read_status(answers[0], rig_.session.key, forged);
  ASSERT_TRUE(status);
  EXPECT_EQ(status->code, StatusCode::kToken);
  EXPECT_EQ(status->request, 77U);
  token_ = status->token;
  answers = rig_.serve(bytes_of(get(2)));
  ASSERT_EQ(answers.size(), 1U);
  EXPECT_EQ(datagram_kind(answers[0]), DatagramKind::kData);
  rig_.address[17] = std::byte{1};  // another port
  answers = rig_.serve(bytes_of(get(3)));
  ASSERT_EQ(answers.size(), 1U);
  EXPECT_EQ(datagram_kind(answers[0]), DatagramKind::kStatus);
}

TEST_F(UdpResponderTest, EveryBitOfAQuestionIsUnderTheMac) {
  learn_token();
  const Bytes good = bytes_of(get(2));
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    Bytes bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
    EXPECT_EQ(rig_.responder->check(bad, rig_.address, question_), Verdict::kSilence) << bit;
  }
  EXPECT_EQ(rig_.responder->check(good, rig_.address, question_), Verdict::kLookup);  // none of them was marked as seen
}

TEST_F(UdpResponderTest, ARepeatedOrAncientSequenceIsMetWithSilence) {
  learn_token();
  EXPECT_EQ(check(get(1)), Verdict::kSilence);
  EXPECT_EQ(check(get(0)), Verdict::kSilence);
  EXPECT_EQ(check(get(5000)), Verdict::kLookup);
  EXPECT_EQ(check(get(5000)), Verdict::kSilence);
  EXPECT_EQ(check(get(5000 - 1024)), Verdict::kSilence);
  EXPECT_EQ(check(get(5000 - 1023)), Verdict::kLookup);
  EXPECT_EQ(check(get(5000 - 1023)), Verdict::kSilence);
  EXPECT_EQ(check(get(4999)), Verdict::kLookup);
  EXPECT_EQ(check(get(5100)), Verdict::kLookup);
  EXPECT_EQ(check(get(4999)), Verdict::kSilence);
  EXPECT_EQ(check(get(5050)), Verdict::kLookup);
  EXPECT_EQ(check(get(~std::uint64_t{0})), Verdict::kLookup);
  EXPECT_EQ(check(get(5101)), Verdict::kSilence);
}

TEST_F(UdpResponderTest, AnotherIncarnationOrVersionOrSpanGetsAStatus) {
  learn_token();
  bool forged = false;
  const auto code = [&](const DatagramGet& asked) {
    const auto answers = rig_.serve(bytes_of(asked));
    if (answers.size() != 1) return -1;
    const auto status = read_status(answers[0], rig_.session.key, forged);
    return status ? static_cast<int>(status->code) : -2;
  };
  DatagramGet asked = get(2);
  asked.asked.incarnation.high += 1;
  EXPECT_EQ(code(asked), 3);
  asked = get(3);
  asked.asked.version.counter += 1;
  EXPECT_EQ(code(asked), 3);
  asked = get(4);
  asked.asked.block.value += 1;
  EXPECT_EQ(code(asked), 3);
  asked = get(5);
  asked.first_segment = 3;
  EXPECT_EQ(code(asked), 1);
  asked = get(6);
  asked.segment_count = 4;
  asked.want(3);
  EXPECT_EQ(code(asked), 1);
}

TEST_F(UdpResponderTest, OnlyWhatIsWantedIsSentAndOnce) {
  learn_token();
  DatagramGet asked = get(2);
  asked.segment_count = 3;
  asked.want(2);
  const auto answers = rig_.serve(bytes_of(asked));
  ASSERT_EQ(answers.size(), 2U);
  EXPECT_EQ(read_data(answers[0])->segment, 0U);
  EXPECT_EQ(read_data(answers[1])->segment, 2U);
  EXPECT_EQ(read_data(answers[1])->payload_size, 500);
  EXPECT_TRUE(std::equal(answers[1].begin() + kDataHeaderBytes, answers[1].end(), block_.bytes.begin() + 2000));
}

TEST_F(UdpResponderTest, AClosedSessionIsUnknown) {
  learn_token();
  EXPECT_EQ(rig_.responder->stats().sessions, 1U);
  rig_.responder->close(rig_.session.session);
  EXPECT_EQ(check(get(2)), Verdict::kSilence);
  EXPECT_EQ(rig_.responder->stats().sessions, 0U);
}

TEST_F(UdpResponderTest, SegmentedSendsAreTurnedOffForOneSessionAndOnce) {
  learn_token();
  ASSERT_EQ(check(get(2)), Verdict::kLookup);
  EXPECT_TRUE(question_.gso);
  const UdpKeyMessage other = must(rig_.responder->open(7411, std::nullopt));
  EXPECT_TRUE(rig_.responder->disable_gso(rig_.session.session));
  EXPECT_FALSE(rig_.responder->disable_gso(rig_.session.session));
  ASSERT_EQ(check(get(3)), Verdict::kLookup);
  EXPECT_FALSE(question_.gso);
  DatagramGet theirs = get(1);
  theirs.session = other.session;
  Bytes bytes;
  theirs.encode(bytes, other.key);
  ASSERT_EQ(rig_.responder->check(bytes, rig_.address, question_), Verdict::kStatus);
  EXPECT_TRUE(question_.gso);
}

TEST_F(UdpResponderTest, AMillionSpoofedDatagramsGrowNothingAndGetNothing) {
  Random random(3);
  Bytes right_form = bytes_of(get(2));
  const std::uint64_t malformed = rig_.responder->stats().malformed;
  for (int i = 0; i < 1'000'000; ++i) {
    const std::uint64_t word = random.next();
    if (i % 2 == 0) {  // the session is known to an observer, the key is not
      std::memcpy(right_form.data() + 16, &word, 8);
      std::memcpy(right_form.data() + right_form.size() - 8, &word, 8);
    } else {
      std::memcpy(right_form.data() + 8, &word, 8);
    }
    std::memcpy(rig_.address.data() + 10, &word, 8);
    ASSERT_EQ(rig_.responder->check(right_form, rig_.address, question_), Verdict::kSilence);
    if (i % 2 == 1) std::memcpy(right_form.data() + 8, &rig_.session.session, 8);
  }
  const ResponderStats stats = rig_.responder->stats();
  EXPECT_EQ(stats.sessions, 1U);
  EXPECT_EQ(stats.malformed - malformed, 500'000U);
  EXPECT_EQ(stats.unauthentic, 500'000U);
  EXPECT_EQ(stats.tokens + stats.refused + stats.answered, 0U);
}

TEST(DatagramGet, OnlyTheCanonicalFormIsRead) {
  DatagramGet get;
  get.session = 1;
  get.sequence = 2;
  get.request = 3;
  get.asked = {kIncarnation, {9}, kVersion, BlockPart::kStored};
  get.segment_size = 1000;
  get.segment_count = 11;
  get.want(0);
  get.want(10);
  Bytes good;
  get.encode(good, SipKey{1, 2});
  DatagramGet out;
  ASSERT_EQ(decode_get(good, out), nullptr);
  const auto reason = [&](auto spoil) {
    Bytes bad = good;
    spoil(bad);
    const char* said = decode_get(bad, out);
    return std::string(said == nullptr ? "none" : said);
  };
  EXPECT_EQ(reason([](Bytes& b) { b.pop_back(); }), "size");
  EXPECT_EQ(reason([](Bytes& b) { b.push_back({}); }), "size");
  EXPECT_EQ(reason([](Bytes& b) { b.clear(); }), "size");
  EXPECT_EQ(reason([](Bytes& b) { b.resize(kGetBytesMax + 1); }), "size");
  EXPECT_EQ(reason([](Bytes& b) { b[0] ^= std::byte{1}; }), "size");
  EXPECT_EQ(reason([](Bytes& b) { b[4] = std::byte{2}; }), "size");
  EXPECT_EQ(reason([](Bytes& b) { b[61] = std::byte{1}; }), "reserved");
  EXPECT_EQ(reason([](Bytes& b) { b[94] = std::byte{1}; }), "reserved");
  EXPECT_EQ(reason([](Bytes& b) { b[60] = std::byte{2}; }), "part");
  EXPECT_EQ(reason([](Bytes& b) { b[62] = std::byte{63}; b[63] = {}; }), "segment size");
  EXPECT_EQ(reason([](Bytes& b) { b[62] = b[63] = std::byte{255}; }), "segment size");
  EXPECT_EQ(reason([](Bytes& b) { b[92] = {}; }), "segments");
  EXPECT_EQ(reason([](Bytes& b) { b[93] = std::byte{5}; }), "segments");
  EXPECT_EQ(reason([](Bytes& b) { b[88] = b[89] = b[90] = b[91] = std::byte{255}; }), "segments");
  EXPECT_EQ(reason([](Bytes& b) { b[56] = {}; }), "version");
  EXPECT_EQ(reason([](Bytes& b) { b[96] ^= std::byte{1}; }), "bitmap");    // first not wanted
  EXPECT_EQ(reason([](Bytes& b) { b[97] ^= std::byte{4}; }), "bitmap");    // last not wanted
  EXPECT_EQ(reason([](Bytes& b) { b[97] ^= std::byte{8}; }), "bitmap");    // past the count
}

}  // namespace
}  // namespace paramwire
