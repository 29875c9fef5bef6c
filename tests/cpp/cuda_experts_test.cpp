// Mixtures of experts in a session on a simulated device, given their weights by hand: the same values and the same picks as on the CPU backend, batches
// under any memory, which waits are needed, and what is left behind when a step ends early.
#include "cpp/cuda_backend_rig.hpp"
#include "cpp/small_mixture.hpp"
#include "paramwire/compute/cuda_experts.hpp"

#include <map>
#include <string>

namespace paramwire {
namespace {

using namespace testing;

constexpr std::uint64_t kSeed = 500;

const std::vector<std::vector<Token>> kSteps = {{3, 41, 17, 3, 0, 22, 9}, {41}, {7}, {30, 31}};

// What a step asked for by data: need and rows, in order.
using Asked = std::vector<std::pair<std::size_t, std::vector<std::uint64_t>>>;

struct Layout {
  std::uint64_t rows = 16;          // of a piece
  std::size_t stay = 0;             // every so manyth matrix piece stays; 0: none
  std::uint64_t window_bytes = 0;
  std::uint64_t rows_bytes = 0;
  bool whole_views = false;         // experts come as views of all of them
  // The call of this function that fails once the backend is open; null: none.
  const char* fails = nullptr;
  std::uint32_t fails_nth = 1;
};

// A session whose weights all lie in page-locked memory, so that nothing but the device decides when they are read.
class Fixture {
 public:
  Fixture(Graph graph, oracle::Tensors tensors, SimCudaOptions options, const Layout& layout, bool with_blas = false)
      : graph_(std::move(graph)), tensors_(std::move(tensors)), layout_(layout), gpu_(std::move(options), with_blas), binding_(must(graph_.bind(oracle::infos(tensors_)))) {
    SessionOptions session;
    session.context_tokens = 32;
    session.step_tokens = 8;
    session.window_bytes = layout.window_bytes;
    session.rows_bytes = layout.rows_bytes;
    std::size_t count = 0;
    for (std::size_t need = 0; need < binding_.needs().size(); ++need) {
      const Need& each = binding_.needs()[need];
      if (each.access != Access::kWhole) continue;
      const bool vector = graph_.parameters()[each.parameter].shape.rank() == 1;
      for (std::uint64_t row = 0; row < each.rows; row += layout.rows) {
        session.pieces.push_back({need, row, std::min(each.rows, row + layout.rows), vector || layout.window_bytes == 0 || (layout.stay > 0 && count++ % layout.stay == 0)});
      }
    }
    pieces_ = session.pieces;
    std::uint64_t bytes = 0;
    for (const auto& [name, tensor] : tensors_) {
      offsets_[name] = bytes;
      bytes += (tensor.bytes.size() + 63) / 64 * 64;
    }
    if (gpu_.backend == nullptr) {
      error_ = gpu_.error;
      return;
    }
    if (layout.fails != nullptr) gpu_.sim.fail_call(layout.fails, layout.fails_nth, CUDA_ERROR_OUT_OF_MEMORY);
    auto staging = gpu_.backend->allocate_staging(bytes);
    if (staging.ok()) {
      staging_ = std::move(*staging);
      for (const auto& [name, tensor] : tensors_) std::copy(tensor.bytes.begin(), tensor.bytes.end(), staging_->span().subspan(static_cast<std::size_t>(offsets_[name])).begin());
    } else {
      error_ = staging.error();
      return;
    }
    auto opened = gpu_.backend->open_session(binding_, session);
    if (opened.ok()) session_ = std::move(*opened);
    else error_ = opened.error();
  }

  WeightView next_view() const {
    const Pending& pending = *session_->pending();
    const Need& need = binding_.needs()[pending.need];
    WeightView view{.tensor = need.tensor, .dtype = need.dtype, .row_begin = pending.next_row, .row_end = pending.next_row + 1, .data = {}};
    if (need.access == Access::kWhole) {
      const auto piece = std::find_if(pieces_.begin(), pieces_.end(), [&](const PieceLayout& each) { return each.need == pending.need && each.row_begin == pending.next_row; });
      view.row_end = piece->row_end;
    } else if (layout_.whole_views && need.row_bytes > 1024) {
      view.row_begin = 0;
      view.row_end = need.rows;
    }
    view.data = staging_->span().subspan(static_cast<std::size_t>(offsets_.at(need.tensor) + view.row_begin * need.row_bytes), static_cast<std::size_t>((view.row_end - view.row_begin) * need.row_bytes));
    return view;
  }

  // asked: what it wants by data.  views: at most so many are supplied, then it stops
  Result<std::vector<float>> step(std::span<const Token> tokens, Asked* asked = nullptr, std::size_t views = SIZE_MAX) {
    PARAMWIRE_CHECK(session_->begin(tokens));
    for (std::size_t last = SIZE_MAX; const Pending* pending = session_->pending(); --views) {
      if (views == 0) return std::vector<float>();
      if (asked != nullptr && !pending->rows.empty() && pending->need != last) asked->push_back({pending->need, {pending->rows.begin(), pending->rows.end()}});
      last = pending->need;
      PARAMWIRE_CHECK(session_->supply(next_view()));
    }
    PARAMWIRE_TRY(logits, session_->finish());
    return copy(logits);
  }

  SimCuda& sim() { return gpu_.sim; }
  Session& session() { return *session_; }
  const Binding& binding() const { return binding_; }
  const std::optional<Error>& error() const { return error_; }
  void close() {
    session_.reset();
    staging_.reset();
    gpu_.backend.reset();
  }

 private:
  Graph graph_;
  oracle::Tensors tensors_;
  Layout layout_;
  Gpu gpu_;
  Binding binding_;
  std::vector<PieceLayout> pieces_;
  std::map<std::string, std::uint64_t> offsets_;
  std::unique_ptr<Staging> staging_;
  std::unique_ptr<Session> session_;
  std::optional<Error> error_;
};

struct Expected {
  std::vector<std::vector<float>> outputs;
  std::vector<Asked> asked;
};

Expected on_cpu(const Graph& graph, const oracle::Tensors& tensors, const std::vector<std::vector<Token>>& steps) {
  const auto backend = must(open_backend("cpu", {.threads = 1}));
  const auto session = must(backend->open_session(must(graph.bind(oracle::infos(tensors))), {}));
  Expected out;
  for (const auto& tokens : steps) {
    must(session->begin(tokens));
    Asked asked;
    while (const Pending* pending = session->pending()) {
      if (!pending->rows.empty()) asked.push_back({pending->need, {pending->rows.begin(), pending->rows.end()}});
      const Need& need = session->binding().needs()[pending->need];
      must(session->supply({need.tensor, need.dtype, 0, need.rows, tensors.at(need.tensor).bytes}));
    }
    out.outputs.push_back(copy(must(session->finish())));
    out.asked.push_back(std::move(asked));
  }
  return out;
}

constexpr std::uint64_t kExpertFloats = 32 * 40;  // of one matrix of one expert
constexpr std::uint64_t kExpertBytes = 4 * kExpertFloats;
constexpr std::uint64_t kWindow = 2 * 5'000;  // two pieces of 16 rows in a slot

// ---------------------------------------------------------------- values

TEST(CudaExperts, EveryTypeMemoryAndOrderComputesWhatTheCpuBackendComputes) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const bool normalise : {true, false}) {
      const Graph graph = small_mixture({.k = normalise ? 2U : 3U, .normalise = normalise});
      const auto tensors = oracle::random_tensors(graph, dtype, kSeed);
      const Expected expected = on_cpu(graph, tensors, kSteps);
      const std::uint64_t expert = kExpertFloats * dtype_bits(dtype) / 8;
      std::uint64_t seed = 0;
      // One at a time; in halves of one, of two and a bit; more than a step picks.
      for (const std::uint64_t rows_bytes : {expert, 2 * expert, 5 * expert + 48, 100 * expert, std::uint64_t{0}}) {
        for (const std::uint64_t window : {std::uint64_t{0}, kWindow}) {
          const SimOrder order = seed % 3 == 0 ? SimOrder::kRandom : seed % 3 == 1 ? SimOrder::kLate : SimOrder::kEager;
          ++seed;
          Fixture fixture(graph, tensors, sim_options(order, seed), {.stay = 3, .window_bytes = window, .rows_bytes = rows_bytes, .whole_views = seed % 2 == 0});
          ASSERT_FALSE(fixture.error().has_value()) << fixture.error()->to_string();
          for (std::size_t i = 0; i < kSteps.size(); ++i) {
            ASSERT_LE(largest_difference(must(fixture.step(kSteps[i])), expected.outputs[i]), kTolerance)
                << dtype_name(dtype) << ", rows_bytes " << rows_bytes << ", window " << window << ", step " << i;
          }
        }
      }
    }
  }
}

TEST(CudaExperts, PromptsByMatrixProductsRouteAsWell) {
  const Graph graph = small_mixture({});
  const auto tensors = oracle::random_tensors(graph, DType::kF32, kSeed);
  const Expected expected = on_cpu(graph, tensors, kSteps);
  Fixture fixture(graph, tensors, sim_options(SimOrder::kLate), {.window_bytes = kWindow}, true);
  for (std::size_t i = 0; i < kSteps.size(); ++i) EXPECT_LE(largest_difference(must(fixture.step(kSteps[i])), expected.outputs[i]), kTolerance);
}

TEST(CudaExperts, AnEncodersOneRowIsRouted) {
  Graph graph;
  must(graph.embedding("x", "embed", Shape{48, 32}));
  must(graph.mean("mean", "x"));
  must(graph.matmul("scores", "mean", "router", Shape{6, 32}));
  must(graph.top_k("route", "scores", 2));
  must(graph.expert_matmul("two", "mean", "route", "up", Shape{6, 40, 32}));
  must(graph.expert_combine("out", "two", "route", "down", Shape{6, 32, 40}));
  const auto tensors = oracle::random_tensors(graph, DType::kF32, kSeed);
  const Expected expected = on_cpu(graph, tensors, kSteps);
  Fixture fixture(graph, tensors, sim_options(SimOrder::kLate), {.rows_bytes = kExpertBytes});
  for (std::size_t i = 0; i < kSteps.size(); ++i) EXPECT_LE(largest_difference(must(fixture.step(kSteps[i])), expected.outputs[i]), kTolerance);
}

// ---------------------------------------------------------------- picks

TEST(CudaExperts, ItAsksForTheExpertsThatTheCpuBackendAsksFor) {
  const Graph graph = small_mixture({});
  auto tensors = oracle::random_tensors(graph, DType::kF32, kSeed);
  // Token 7 makes scores that are no numbers; the router's rows 1 and 4 are the same: ties.
  auto values = tensors.at("embed").values;
  std::fill_n(values.begin() + 7 * 32, 32, std::nan(""));
  tensors.at("embed") = oracle::tensor_of(DType::kF32, Shape{48, 32}, values);
  for (const char* name : {"0.router", "1.router"}) {
    values = tensors.at(name).values;
    std::copy_n(values.begin() + 32, 32, values.begin() + 4 * 32);
    tensors.at(name) = oracle::tensor_of(DType::kF32, Shape{6, 32}, values);
  }
  const Expected expected = on_cpu(graph, tensors, kSteps);
  Fixture fixture(graph, tensors, sim_options(SimOrder::kLate), {.window_bytes = kWindow, .rows_bytes = 2 * kExpertBytes});
  for (std::size_t i = 0; i < kSteps.size(); ++i) {
    Asked asked;
    const auto logits = must(fixture.step(kSteps[i], &asked));
    EXPECT_EQ(asked, expected.asked[i]) << "step " << i;
    for (std::size_t at = 0; at < logits.size(); ++at) ASSERT_EQ(std::isnan(logits[at]), std::isnan(expected.outputs[i][at])) << "step " << i;
  }
  ASSERT_TRUE(std::isnan(expected.outputs[2][0]));
}

TEST(CudaExperts, PicksAreGroupedByExpertInTheirOrder) {
  const std::vector<float> routing = {4, 1, 0.5F, 0.5F, 1, 0, 0.9F, 0.1F, 1, 4, 0.7F, 0.3F};  // k 2: 4 1, 1 0, 1 4
  std::vector<std::uint64_t> distinct = {99};
  std::vector<std::uint32_t> begin(4), picks(6);
  must(group_picks(routing, 2, 5, distinct, begin, picks));
  EXPECT_EQ(distinct, (std::vector<std::uint64_t>{0, 1, 4}));
  EXPECT_EQ(begin, (std::vector<std::uint32_t>{0, 1, 4, 6}));
  EXPECT_EQ(picks, (std::vector<std::uint32_t>{3, 1, 2, 4, 0, 5}));
  for (const float wrong : {5.0F, -1.0F, std::nanf(""), INFINITY}) {
    auto bad = routing;
    bad[5] = wrong;
    const Status refused = group_picks(bad, 2, 5, distinct, begin, picks);
    ASSERT_FALSE(refused.ok()) << wrong;
    EXPECT_EQ(refused.error().code(), Code::kInternal);
    EXPECT_NE(refused.error().message().find("pick 1 of row 1"), std::string::npos) << refused.error().message();
  }
}

// ---------------------------------------------------------------- order

const std::vector<std::vector<Token>> kTwoSteps = {{3, 41, 17}, {5}};

// With one wait left out, between streams or on the host, something must be wrong in one order or another that the rules allow.
TEST(CudaExperts, EveryWaitIsNeeded) {
  const Graph graph = small_mixture({.layers = 1, .mean = true});
  const auto tensors = oracle::random_tensors(graph, DType::kF32, kSeed);
  const Expected expected = on_cpu(graph, tensors, kTwoSteps);
  std::map<std::string, std::uint64_t> waits;
  // returns: whether something was wrong
  const auto run = [&](const char* function, std::uint32_t skipped, std::uint64_t halves, SimOrder order, std::uint64_t seed) {
    Fixture fixture(graph, tensors, sim_options(order, seed), {.stay = 3, .window_bytes = kWindow, .rows_bytes = halves * kExpertBytes});
    const std::uint64_t before = fixture.sim().calls(function);
    if (skipped > 0) fixture.sim().skip_call(function, skipped);
    bool wrong = false;
    for (std::size_t i = 0; i < kTwoSteps.size() && !wrong; ++i) {
      const auto logits = fixture.step(kTwoSteps[i]);
      wrong = !logits.ok() || largest_difference(*logits, expected.outputs[i]) > kTolerance;
    }
    waits[function] = fixture.sim().calls(function) - before;
    fixture.close();
    return wrong || !fixture.sim().take_failures().empty();
  };
  // On the host: for the routing of a step, and for its end, which is every session's.
  for (const auto& [function, every] : {std::pair{"cuStreamWaitEvent", 1U}, {"cuEventSynchronize", 2U}}) {
    for (const std::uint64_t halves : {1U, 2U}) {
      ASSERT_FALSE(run(function, 0, halves, SimOrder::kLate, 0));
      const std::uint64_t all = waits[function];
      ASSERT_TRUE(every == 1 ? all >= 30 : all == 4) << all;
      for (std::uint64_t seed = 0; seed < 4; ++seed) ASSERT_FALSE(run(function, 0, halves, seed < 2 ? SimOrder::kGreedy : SimOrder::kRandom, seed)) << "seed " << seed;
      for (std::uint32_t skipped = 1; skipped <= all; skipped += every) {
        // Copies of a batch run ahead as far as they may where one stream is preferred to the other: by chance, computation does.
        bool seen = false;
        for (const SimOrder order : {SimOrder::kGreedy, SimOrder::kLate, SimOrder::kRandom}) {
          for (std::uint64_t seed = 0; seed < (order == SimOrder::kRandom ? 24 : 2) && !seen; ++seed) seen = run(function, skipped, halves, order, seed);
        }
        EXPECT_TRUE(seen) << function << " " << skipped << " of " << all << " is not needed, or its lack is not seen; " << halves << " experts";
      }
    }
  }
}

TEST(CudaExperts, AStepMayBeAbandonedAnywhereAndTheNextOneIsRight) {
  const Graph graph = small_mixture({});
  const auto tensors = oracle::random_tensors(graph, DType::kF32, kSeed);
  const Expected expected = on_cpu(graph, tensors, kTwoSteps);
  Fixture fixture(graph, tensors, sim_options(SimOrder::kLate), {.stay = 3, .window_bytes = kWindow, .rows_bytes = 2 * kExpertBytes});
  for (std::size_t views = 0;; ++views) {
    const std::vector<Token> other = {9, 30, 2};
    const bool whole = !must(fixture.step(other, nullptr, views)).empty();
    if (whole) {
      EXPECT_GE(views, 20U);
      break;
    }
    fixture.session().abandon();
    EXPECT_EQ(fixture.session().position(), 0U);
    for (std::size_t i = 0; i < kTwoSteps.size(); ++i) {
      ASSERT_LE(largest_difference(must(fixture.step(kTwoSteps[i])), expected.outputs[i]), kTolerance) << "after " << views << " views";
    }
    must(fixture.session().rewind(0));
  }
}

TEST(CudaExperts, AViewOfAnExpertMayBeOverwrittenOnceItIsReleased) {
  const Graph graph = small_mixture({});
  const auto tensors = oracle::random_tensors(graph, DType::kF32, kSeed);
  const Expected expected = on_cpu(graph, tensors, {kTwoSteps[0]});
  for (const bool too_early : {false, true}) {
    Fixture fixture(graph, tensors, sim_options(SimOrder::kLate), {.rows_bytes = 2 * kExpertBytes});
    must(fixture.session().begin(kTwoSteps[0]));
    while (const Pending* pending = fixture.session().pending()) {
      const bool expert = is_expert(graph.ops()[fixture.binding().needs()[pending->need].op].kind);
      const WeightView view = fixture.next_view();
      must(fixture.session().supply(view));
      if (!expert) continue;
      if (!too_early) must(fixture.session().release(fixture.session().supplied()));
      std::fill_n(const_cast<std::byte*>(view.data.data()), view.data.size(), std::byte{0x7f});  // NOLINT: the fixture's own staging
    }
    EXPECT_EQ(largest_difference(copy(must(fixture.session().finish())), expected.outputs[0]) > kTolerance, too_early);
  }
}

// ---------------------------------------------------------------- refusals, faults

TEST(CudaExperts, ItRefusesMemoryBelowAnExpert) {
  const Graph graph = small_mixture({});
  const auto tensors = oracle::random_tensors(graph, DType::kF32, kSeed);
  const Fixture small(graph, tensors, sim_options(SimOrder::kLate), {.rows_bytes = kExpertBytes - 1});
  ASSERT_TRUE(small.error().has_value());
  EXPECT_EQ(small.error()->code(), Code::kInvalid);
  EXPECT_NE(small.error()->message().find(cat("at least the ", kExpertBytes, " bytes of an expert of tensor '0.gate'")), std::string::npos) << small.error()->message();
}

TEST(CudaExperts, RowsByDataThatNobodyHasSummedAreRefused) {
  const Graph graph = small_mixture({});
  Fixture fixture(graph, oracle::random_tensors(graph, DType::kF32, kSeed), sim_options(SimOrder::kLate), {});
  must(fixture.session().begin(kTwoSteps[1]));
  const ExtentCheck check{.offset = 0, .size = 16, .crc32c = 0};
  WeightView view = fixture.next_view();
  view.checks = std::span(&check, 1);
  const Status refused = fixture.session().supply(view);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kInvalid);
  EXPECT_NE(refused.error().message().find("rows by data come summed and whole"), std::string::npos) << refused.error().message();
}

TEST(CudaExperts, NothingIsAllocatedCapturedOrCreatedAfterOpening) {
  const Graph graph = small_mixture({});
  Fixture fixture(graph, oracle::random_tensors(graph, DType::kF32, kSeed), sim_options(SimOrder::kLate), {.window_bytes = kWindow});
  const char* const functions[] = {"cuMemAlloc", "cuMemHostAlloc", "cuStreamCreate", "cuEventCreate", "cuStreamBeginCapture", "cuGraphInstantiate"};
  std::vector<std::uint64_t> before;
  for (const char* function : functions) before.push_back(fixture.sim().calls(function));
  const std::uint64_t launches = fixture.sim().calls("cuLaunchKernel");
  for (const Token token : {3U, 17U}) ASSERT_TRUE(fixture.step({&token, 1}).ok());
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_EQ(fixture.sim().calls(functions[i]), before[i]) << functions[i];
  // Halves of one expert: two picks of three matrices in two layers, and nothing else that is not a graph's.
  EXPECT_EQ(fixture.sim().calls("cuLaunchKernel"), launches + 2 * 2 * 3 * 2);
}

// Each call of opening and of a step, one after another.
TEST(CudaExperts, AnyCallThatFailsOnceIsATypedErrorAndLeavesNothingBehind) {
  const Graph graph = small_mixture({.layers = 1});
  const auto tensors = oracle::random_tensors(graph, DType::kF32, kSeed);
  const Expected expected = on_cpu(graph, tensors, {kTwoSteps[0]});
  for (const char* function : {"cuMemAlloc", "cuMemHostAlloc", "cuEventCreate", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuStreamWaitEvent", "cuEventRecord", "cuEventSynchronize", "cuLaunchKernel"}) {
    std::uint32_t nth = 0;
    for (bool reached = true; reached;) {
      Fixture fixture(graph, tensors, sim_options(SimOrder::kLate), {.stay = 3, .window_bytes = kWindow, .rows_bytes = 2 * kExpertBytes, .fails = function, .fails_nth = ++nth});
      const auto typed = [&](const Error& error) {
        EXPECT_TRUE(error.code() == Code::kBackpressure || error.code() == Code::kUnavailable) << function << ", call " << nth << ": " << error.to_string();
        EXPECT_NE(error.message().find("cuda"), std::string::npos) << error.to_string();
      };
      if (fixture.error().has_value()) {
        typed(*fixture.error());
        continue;
      }
      const auto logits = fixture.step(kTwoSteps[0]);
      if (!logits.ok()) {
        typed(logits.error());
        fixture.session().abandon();
        EXPECT_EQ(fixture.session().position(), 0U);
        continue;
      }
      // Either it came later than all calls, or memory that could not be page-locked is plain.
      EXPECT_LE(largest_difference(*logits, expected.outputs[0]), kTolerance);
      reached = std::string_view(function) == "cuMemHostAlloc" && nth < 12;
    }
    EXPECT_GT(nth, 2U) << function;
  }
}

}  // namespace
}  // namespace paramwire
