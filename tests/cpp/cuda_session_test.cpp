// A session on a simulated device, given its pieces by hand: which waits its two streams need, when views are free, and what it refuses.
#include "cpp/cuda_backend_rig.hpp"
#include "paramwire/base/crc.hpp"

#include <cstring>
#include <string>

namespace paramwire {
namespace {

using namespace testing;

constexpr std::uint64_t kSeed = 300;

const std::vector<Token> kTokens = {3, 41};

// The model's pieces in page-locked memory, each at its place, so that nothing but the device decides when they are read.
class Fixture {
 public:
  Fixture(SimCudaOptions options, std::uint64_t rows, std::size_t stay, std::uint64_t window_bytes)
      : graph_(must(llama_graph(oracle::small_llama(), Naming::kGguf))), tensors_(oracle::random_tensors(graph_, DType::kF32, kSeed)), gpu_(std::move(options)),
        binding_(must(graph_.bind(oracle::infos(tensors_)))) {
    SessionOptions session;
    session.context_tokens = 16;
    session.step_tokens = 4;
    session.window_bytes = window_bytes;
    std::size_t count = 0;
    std::uint64_t bytes = 0;
    for (std::size_t need = 0; need < binding_.needs().size(); ++need) {
      const Need& each = binding_.needs()[need];
      if (each.access != Access::kWhole) continue;
      const bool vector = graph_.parameters()[each.parameter].shape.rank() == 1;
      for (std::uint64_t row = 0; row < each.rows; row += rows) {
        const std::uint64_t end = std::min(each.rows, row + rows);
        session.pieces.push_back({need, row, end, vector || (stay > 0 && count++ % stay == 0)});
        offsets_.push_back(bytes);
        bytes += (end - row) * each.row_bytes;
        bytes = (bytes + 63) / 64 * 64;
      }
    }
    pieces_ = session.pieces;
    staging_ = must(gpu_.backend->allocate_staging(bytes));
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const auto from = bytes_of(i);
      std::copy(from.begin(), from.end(), staged(i).begin());
    }
    session_ = must(gpu_.backend->open_session(binding_, session));
  }

  std::span<const std::byte> bytes_of(std::size_t piece) const {
    const PieceLayout& layout = pieces_[piece];
    const Need& need = binding_.needs()[layout.need];
    return std::span<const std::byte>(tensors_.at(need.tensor).bytes)
        .subspan(static_cast<std::size_t>(layout.row_begin * need.row_bytes), static_cast<std::size_t>((layout.row_end - layout.row_begin) * need.row_bytes));
  }
  std::span<std::byte> staged(std::size_t piece) { return staging_->span().subspan(static_cast<std::size_t>(offsets_[piece]), bytes_of(piece).size()); }

  // What is pending, if it is rows by data.
  Status supply_rows() {
    while (const Pending* pending = session_->pending()) {
      const Need& need = binding_.needs()[pending->need];
      if (need.access != Access::kRowsByData) return {};
      WeightView view{.tensor = need.tensor, .dtype = need.dtype, .row_begin = pending->next_row, .row_end = pending->next_row + 1, .data = {}};
      view.data = std::span<const std::byte>(tensors_.at(need.tensor).bytes).subspan(static_cast<std::size_t>(view.row_begin * need.row_bytes), static_cast<std::size_t>(need.row_bytes));
      PARAMWIRE_CHECK(session_->supply(view));
    }
    return {};
  }
  std::size_t next_piece() const {
    const Pending& pending = *session_->pending();
    return static_cast<std::size_t>(std::find_if(pieces_.begin(), pieces_.end(), [&](const PieceLayout& each) { return each.need == pending.need && each.row_begin == pending.next_row; }) -
                                    pieces_.begin());
  }
  Status supply_next(std::span<const ExtentCheck> checks) {
    const std::size_t at = next_piece();
    const Need& need = binding_.needs()[pieces_[at].need];
    return session_->supply({.tensor = need.tensor, .dtype = need.dtype, .row_begin = pieces_[at].row_begin, .row_end = pieces_[at].row_end, .data = staged(at), .checks = checks});
  }

  // One step of one token. supplied: called after each piece, with its number.
  template <typename Supplied>
  Result<std::vector<float>> step(Token token, const Supplied& supplied) {
    PARAMWIRE_CHECK(session_->begin({&token, 1}));
    PARAMWIRE_CHECK(supply_rows());
    while (session_->pending() != nullptr) {
      const std::size_t at = next_piece();
      const ExtentCheck check{.offset = 0, .size = static_cast<std::uint32_t>(bytes_of(at).size()), .crc32c = crc32c(bytes_of(at))};
      PARAMWIRE_CHECK(supply_next(with_checks ? std::span(&check, 1) : std::span<const ExtentCheck>()));
      supplied(at);
    }
    PARAMWIRE_TRY(logits, session_->finish());
    return copy(logits);
  }
  Result<std::vector<float>> step(Token token) {
    return step(token, [](std::size_t) {});
  }

  std::vector<std::vector<float>> cpu_logits() const {
    const auto backend = must(open_backend("cpu", {.threads = 1}));
    const auto session = must(backend->open_session(binding_, {}));
    std::vector<std::vector<float>> out;
    for (const Token token : kTokens) out.push_back(must(oracle::step(*session, tensors_, {&token, 1}, 1'000'000)));
    return out;
  }

  bool with_checks = false;  // every piece is to be compared on the device with what it must be

  SimCuda& sim() { return gpu_.sim; }
  Session& session() { return *session_; }
  void close() {
    session_.reset();
    staging_.reset();
    gpu_.backend.reset();
  }
  std::size_t pieces() const { return pieces_.size(); }

 private:
  Graph graph_;
  oracle::Tensors tensors_;
  Gpu gpu_;
  Binding binding_;
  std::vector<PieceLayout> pieces_;
  std::vector<std::uint64_t> offsets_;
  std::unique_ptr<Staging> staging_;
  std::unique_ptr<Session> session_;
};

constexpr std::uint64_t kRows = 32, kWindow = 2 * 12'800;  // pieces of 32 rows, two or three in a window

// With one wait between copies and computation left out, something must be wrong in one order or another that the rules allow: computation that runs
// ahead finds no weights, copies that run ahead write over weights that are still computed with.
TEST(CudaSession, EveryWaitBetweenItsStreamsIsNeeded) {
  std::vector<std::vector<float>> wanted;
  std::uint64_t waits = 0;
  // returns: whether something was wrong
  const auto run = [&](std::uint32_t skipped, SimOrder order, std::uint64_t seed) {
    Fixture fixture(sim_options(order, seed), kRows, 5, kWindow);
    if (wanted.empty()) wanted = fixture.cpu_logits();
    const std::uint64_t before = fixture.sim().calls("cuStreamWaitEvent");
    if (skipped > 0) fixture.sim().skip_call("cuStreamWaitEvent", skipped);
    bool wrong = false;
    for (std::size_t i = 0; i < kTokens.size() && !wrong; ++i) {
      const auto logits = fixture.step(kTokens[i]);
      wrong = !logits.ok() || largest_difference(*logits, wanted[i]) > kTolerance;
    }
    waits = fixture.sim().calls("cuStreamWaitEvent") - before;
    fixture.close();
    return wrong || !fixture.sim().take_failures().empty();
  };
  ASSERT_FALSE(run(0, SimOrder::kLate, 0));
  const std::uint64_t all = waits;
  ASSERT_GE(all, 12U) << "several windows";
  for (std::uint64_t seed = 0; seed < 6; ++seed) ASSERT_FALSE(run(0, seed < 2 ? SimOrder::kGreedy : SimOrder::kRandom, seed)) << "seed " << seed;
  for (std::uint32_t skipped = 1; skipped <= all; ++skipped) {
    bool seen = false;
    for (const SimOrder order : {SimOrder::kGreedy, SimOrder::kLate}) {
      for (std::uint64_t seed = 0; seed < 2 && !seen; ++seed) seen = run(skipped, order, seed);
    }
    EXPECT_TRUE(seen) << "wait " << skipped << " of " << all << " is not needed, or its lack is not seen";
  }
}

TEST(CudaSession, AViewMayBeOverwrittenOnceItIsReleasedAndNotBefore) {
  for (const bool too_early : {false, true}) {
    Fixture fixture(sim_options(SimOrder::kLate), kRows, 5, kWindow);
    const auto wanted = fixture.cpu_logits();
    const auto logits = fixture.step(kTokens[0], [&](std::size_t piece) {
      if (!too_early) must(fixture.session().release(fixture.session().supplied()));
      std::memset(fixture.staged(piece).data(), 0x7f, fixture.staged(piece).size());
    });
    EXPECT_EQ(largest_difference(must(logits), wanted[0]) > kTolerance, too_early);
  }
}

TEST(CudaSession, ABitThatFlipsOnItsWayIsFoundOnTheDeviceBeforeAResultLeaves) {
  for (const std::size_t damaged : {0U, 7U, 30U}) {
    Fixture fixture(sim_options(SimOrder::kLate), kRows, 5, kWindow);
    fixture.with_checks = true;
    const auto wanted = fixture.cpu_logits();
    EXPECT_LE(largest_difference(must(fixture.step(kTokens[0])), wanted[0]), kTolerance);
    must(fixture.session().rewind(0));
    std::byte& byte = fixture.staged(damaged)[3];
    byte ^= std::byte{0x10};
    // The piece may be one that stays, and is there: then nothing is wrong.
    bool given = false;
    const auto refused = fixture.step(kTokens[0], [&](std::size_t piece) { given = given || piece == damaged; });
    ASSERT_EQ(refused.ok(), !given);
    byte ^= std::byte{0x10};
    if (given) {
      EXPECT_EQ(refused.error().code(), Code::kCorrupt);
      EXPECT_NE(refused.error().message().find("1 of "), std::string::npos) << refused.error().message();
      EXPECT_EQ(fixture.session().position(), 0U);
    } else {
      must(fixture.session().rewind(0));
    }
    EXPECT_LE(largest_difference(must(fixture.step(kTokens[0])), wanted[0]), kTolerance) << "and the next step is right";
    EXPECT_LE(largest_difference(must(fixture.step(kTokens[1])), wanted[1]), kTolerance);
  }
}

TEST(CudaSession, ChecksThatAreNoRunOfExtentsAreRefused) {
  Fixture fixture(sim_options(SimOrder::kLate), kRows, 5, kWindow);
  const Token token = 1;
  must(fixture.session().begin({&token, 1}));
  must(fixture.supply_rows());
  for (const ExtentCheck& check : {ExtentCheck{0, 0, 1}, ExtentCheck{1, 1U << 20, 1}, ExtentCheck{1U << 30, 4, 1}}) {
    const auto refused = fixture.supply_next({&check, 1});
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), Code::kInvalid);
  }
}

TEST(CudaSession, PiecesThatStayAreAskedForOnce) {
  Fixture fixture(sim_options(SimOrder::kLate), kRows, 1, 0);
  const auto wanted = fixture.cpu_logits();
  std::size_t supplied = 0;
  for (std::size_t i = 0; i < kTokens.size(); ++i) {
    EXPECT_LE(largest_difference(must(fixture.step(kTokens[i], [&](std::size_t) { ++supplied; })), wanted[i]), kTolerance);
  }
  EXPECT_EQ(supplied, fixture.pieces());
}

TEST(CudaSession, AnAbandonedStepLeavesPositionAndTheNextOneIsRight) {
  Fixture fixture(sim_options(SimOrder::kLate), kRows, 5, kWindow);
  const auto wanted = fixture.cpu_logits();
  EXPECT_LE(largest_difference(must(fixture.step(kTokens[0])), wanted[0]), kTolerance);
  std::size_t supplied = 0;
  const Token other = 77;
  must(fixture.session().begin({&other, 1}));
  fixture.session().abandon();
  EXPECT_EQ(fixture.session().position(), 1U);
  EXPECT_LE(largest_difference(must(fixture.step(kTokens[1], [&](std::size_t) { ++supplied; })), wanted[1]), kTolerance);
  must(fixture.session().rewind(0));
  EXPECT_LE(largest_difference(must(fixture.step(kTokens[0])), wanted[0]), kTolerance);
}

TEST(CudaSession, WhatItCannotComputeIsRefusedWhenItIsOpened) {
  Gpu gpu(sim_options(SimOrder::kLate));
  LlamaConfig config = oracle::small_llama();
  config.heads = 1;
  config.kv_heads = 1;
  config.head_size = 320;
  const Graph graph = must(llama_graph(config, Naming::kGguf));
  const auto tensors = oracle::random_tensors(graph, DType::kF32, kSeed);
  const auto binding = must(graph.bind(oracle::infos(tensors)));
  const auto refused = gpu.backend->open_session(binding, {});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kInvalid);
  EXPECT_NE(refused.error().message().find("heads of 320, expected at most 256"), std::string::npos) << refused.error().message();
}

}  // namespace
}  // namespace paramwire
