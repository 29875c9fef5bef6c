// The engine against a real server in this process: every source and budget computes what a plain session computes that is
// given whole tensors.
#include "support/rig.hpp"

#include "cpp/compute_oracle.hpp"
#include "paramwire/client/client.hpp"
#include "paramwire/client/encoded_reads.hpp"
#include "paramwire/compute/llama.hpp"
#include "paramwire/engine/engine.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {
namespace {

using Source = EngineOptions::Source;

constexpr std::uint64_t kNoCut = 1'000'000;  // rows of a view, more than any tensor has
constexpr std::uint64_t kSeed = 300;
const std::vector<Token> kTokens = {3, 41, 95, 3, 0, 17, 60, 22};

// Logits after each of `tokens`, given one at a time: so the plain session's sums are the same bits, however rows are cut
// (CpuBackend.CutsAndThreadsDoNotChangeDecoding).
std::vector<std::vector<float>> plain_logits(const Graph& graph, const oracle::Tensors& tensors, std::span<const Token> tokens) {
  const auto backend = testing::must(open_backend("cpu", {.threads = 1}));
  const auto binding = testing::must(graph.bind(oracle::infos(tensors)));
  const auto session = testing::must(backend->open_session(binding, {}));
  std::vector<std::vector<float>> out;
  for (const Token token : tokens) out.push_back(testing::must(oracle::step(*session, tensors, {&token, 1}, kNoCut)));
  return out;
}

std::vector<float> copy(std::span<const float> values) { return {values.begin(), values.end()}; }

struct Way {
  const char* name;
  const char* transport;
  Source source;
  const char* told;  // what stats() says
};

class EngineTest : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    graph_ = testing::must(llama_graph(oracle::small_llama(), Naming::kGguf));
    tensors_ = oracle::random_tensors(graph_, DType::kF32, kSeed);
    publish(tensors_);
    ClientOptions options;
    options.transport = GetParam().transport;
    client_ = testing::must(Client::connect(rig_.tcp_endpoint().to_string(), options));
  }

  // Matrices in two blocks of rows, so that pieces meet a cut.
  void publish(const oracle::Tensors& tensors) {
    auto publish = testing::must(rig_.server->publish());
    for (const auto& [name, tensor] : tensors) {
      const std::span<const std::byte> bytes(tensor.bytes);
      const std::uint64_t rows = tensor.shape[0];
      if (tensor.shape.rank() < 2) {
        testing::must(publish.put({name, tensor.dtype, tensor.shape, {}}, bytes));
        continue;
      }
      const std::uint64_t cut = rows / 3;
      const auto head = static_cast<std::size_t>(bytes.size() / rows * cut);
      testing::must(publish.put({name, tensor.dtype, tensor.shape, Shard::rows(0, cut)}, bytes.first(head)));
      testing::must(publish.put({name, tensor.dtype, tensor.shape, Shard::rows(cut, rows)}, bytes.subspan(head)));
    }
    static_cast<void>(testing::must(publish.finish()));
  }

  EngineOptions options(std::uint64_t budget) const {
    EngineOptions out;
    out.budget_bytes = budget;
    out.backend_options.threads = 1;
    out.source = GetParam().source;
    out.session.context_tokens = 16;
    return out;
  }
  Result<std::unique_ptr<Engine>> open(std::uint64_t budget) {
    return Engine::open(testing::must(client_->snapshot({})), graph_, options(budget));
  }
  // The budget that the refusal of one byte says would do.
  std::uint64_t smallest_budget() {
    const auto refused = open(1);
    EXPECT_FALSE(refused.ok());
    if (refused.ok()) return 0;
    EXPECT_EQ(refused.error().code(), Code::kInvalid);
    const std::string text(refused.error().message());
    const std::size_t at = text.find("at least ");
    EXPECT_NE(at, std::string::npos) << text;
    return at == std::string::npos ? 0 : std::stoull(text.substr(at + 9));
  }

  testing::Rig rig_;
  Graph graph_;
  oracle::Tensors tensors_;
  std::shared_ptr<Client> client_;
};

TEST_P(EngineTest, EveryBudgetComputesWhatAPlainSessionComputes) {
  const auto expected = plain_logits(graph_, tensors_, kTokens);
  const std::uint64_t least = smallest_budget();
  ASSERT_GT(least, 0U);
  std::uint64_t whole = 0;
  for (const auto& [name, tensor] : tensors_) whole += tensor.bytes.size();
  for (const std::uint64_t budget : {least, least + 1, std::uint64_t{3'000}, whole / 4, whole, 2 * whole, std::uint64_t{0}}) {
    SCOPED_TRACE(cat("budget ", budget, " of ", whole, ", the least is ", least));
    const auto engine = testing::must(open(budget));
    for (std::size_t i = 0; i < kTokens.size(); ++i) {
      const auto logits = engine->step(std::span(kTokens).subspan(i, 1));
      ASSERT_TRUE(logits.ok()) << logits.error().to_string();
      EXPECT_EQ(copy(*logits), expected[i]) << "token " << i;
    }
    const EngineStats stats = engine->stats();
    EXPECT_EQ(stats.steps, kTokens.size());
    EXPECT_EQ(stats.source, GetParam().told);
    EXPECT_GT(stats.held_bytes_max, 0U);
    EXPECT_LE(stats.held_bytes_max, budget == 0 ? 2 * whole : budget);
    EXPECT_LE(stats.resident_bytes, stats.walk_bytes);
    // What does not stay is fetched at every step.
    EXPECT_GE(stats.bytes_fetched, stats.resident_bytes + kTokens.size() * (stats.walk_bytes - stats.resident_bytes));
    if (budget == 0 || budget == 2 * whole) {
      EXPECT_EQ(stats.resident_bytes, stats.walk_bytes);
    }
  }
}

// A step of several tokens may sum in another order: both are within the bound that CpuBackend's test of a whole model derives
// (15 products in a row of at most 48 columns), so within twice of it from each other.
TEST_P(EngineTest, APromptInOneStepAgreesWithItsTokensOneByOne) {
  const auto expected = plain_logits(graph_, tensors_, kTokens).back();
  const auto engine = testing::must(open(8'000));
  const auto logits = engine->step(kTokens);
  ASSERT_TRUE(logits.ok()) << logits.error().to_string();
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double difference = static_cast<double>((*logits)[i]) - static_cast<double>(expected[i]);
    error += difference * difference;
    norm += static_cast<double>(expected[i]) * static_cast<double>(expected[i]);
  }
  EXPECT_LE(std::sqrt(error / norm), 2 * 15 * 49 * std::sqrt(48.0) * oracle::kUnit);
}

TEST_P(EngineTest, ABudgetBelowTheOneNamedIsRefusedAndTheOneNamedWorks) {
  const std::uint64_t least = smallest_budget();
  ASSERT_GT(least, 1U);
  const auto refused = open(least - 1);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kInvalid);
  EXPECT_NE(refused.error().message().find(std::to_string(least)), std::string::npos) << refused.error().message();
  EXPECT_TRUE(open(least).ok());
}

TEST_P(EngineTest, RewindComputesTheSameAgainAndRefusedStepsLeaveItAsItWas) {
  const auto expected = plain_logits(graph_, tensors_, kTokens);
  const auto engine = testing::must(open(5'000));
  const auto step = [&](std::size_t i) { return copy(testing::must(engine->step(std::span(kTokens).subspan(i, 1)))); };
  for (std::size_t i = 0; i < kTokens.size(); ++i) EXPECT_EQ(step(i), expected[i]);
  EXPECT_EQ(engine->rewind(kTokens.size() + 1).error().code(), Code::kInvalid);
  testing::must(engine->rewind(2));
  EXPECT_EQ(engine->position(), 2U);
  const Token outside = 96;
  EXPECT_EQ(engine->step({&outside, 1}).error().code(), Code::kInvalid);
  EXPECT_EQ(engine->step({}).error().code(), Code::kInvalid);
  EXPECT_EQ(engine->step(std::vector<Token>(15, 1)).error().code(), Code::kBackpressure);  // 2 and 15 are over 16
  for (std::size_t i = 2; i < 5; ++i) EXPECT_EQ(step(i), expected[i]) << "token " << i;
  testing::must(engine->rewind(0));
  EXPECT_EQ(step(0), expected[0]);
}

TEST_P(EngineTest, ItStaysOnItsSnapshotWhileNewerVersionsArePublished) {
  const auto expected = plain_logits(graph_, tensors_, kTokens);
  const oracle::Tensors other = oracle::random_tensors(graph_, DType::kF32, kSeed + 1000);
  const auto engine = testing::must(open(3'000));
  for (std::size_t i = 0; i < kTokens.size(); ++i) {
    EXPECT_EQ(copy(testing::must(engine->step(std::span(kTokens).subspan(i, 1)))), expected[i]) << "token " << i;
    publish(i + 1 == kTokens.size() ? other : oracle::random_tensors(graph_, DType::kF32, kSeed + 2000 + 100 * i));
  }
  const auto next = testing::must(open(3'000));
  EXPECT_GT(next->snapshot().version(), engine->snapshot().version());
  EXPECT_EQ(copy(testing::must(next->step(std::span(kTokens).first(1)))), plain_logits(graph_, other, std::span(kTokens).first(1))[0]);
}

// Shared memory outlives its server, so there every step is right or a typed error; over tcp an error must come, since no
// piece stays and a step fetches every one.
TEST_P(EngineTest, AServerThatEndsInTheMiddleGivesATypedErrorAndTheEngineStaysOver) {
  const std::vector<Token> tokens(12, 7);
  const auto expected = plain_logits(graph_, tensors_, tokens);
  EngineOptions wanted = options(3'000);
  wanted.fetch_timeout = 3 * kMicrosPerSecond;
  const auto engine = testing::must(Engine::open(testing::must(client_->snapshot({})), graph_, wanted));
  std::optional<Error> over;
  for (std::size_t i = 0; i < tokens.size() && !over; ++i) {
    if (i == 2) rig_.server->close(0);
    const auto logits = engine->step(std::span(tokens).subspan(i, 1));
    if (logits.ok()) {
      EXPECT_EQ(copy(*logits), expected[i]) << "token " << i;
    } else {
      EXPECT_GE(i, 2U);
      over = logits.error();
    }
  }
  if (!over) {
    EXPECT_EQ(std::string_view(GetParam().transport), "shm");
    return;
  }
  EXPECT_TRUE(over->code() == Code::kUnreachable || over->code() == Code::kTimeout) << over->to_string();
  for (int again = 0; again < 2; ++again) {
    const auto refused = engine->step(std::span(tokens).first(1));
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().to_string(), over->to_string());
  }
}

TEST_P(EngineTest, EverythingThatDoesNotFitStandsInOneError) {
  auto publish = testing::must(rig_.server->publish());
  testing::must(publish.remove("output_norm.weight"));
  testing::must(publish.remove("blk.0.attn_q.weight"));
  testing::must(publish.remove("blk.1.ffn_down.weight"));
  const std::vector<std::byte> bytes(32 * 48);
  testing::must(publish.put({"blk.0.attn_q.weight", DType::kF32, Shape{2, 2}, {}}, std::span(bytes).first(16)));
  testing::must(publish.put({"blk.1.ffn_down.weight", DType::kU8, Shape{32, 48}, {}}, bytes));
  static_cast<void>(testing::must(publish.finish()));
  const auto refused = open(0);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kInvalid);
  for (const char* part : {"output_norm.weight", "blk.0.attn_q.weight", "(2, 2)", "(32, 32)", "blk.1.ffn_down.weight", "u8"}) {
    EXPECT_NE(refused.error().message().find(part), std::string::npos) << part << " not in: " << refused.error().message();
  }
}

TEST_P(EngineTest, AnEngineThatIsNeverSteppedEndsWhileItsPrefetchRuns) {
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(open(3'000).ok());
}

constexpr Way kWays[] = {
    {"ShmViews", "shm", Source::kAuto, "view"},
    {"ShmCopies", "shm", Source::kCopy, "copy"},
    {"Tcp", "tcp", Source::kAuto, "copy"},
};
INSTANTIATE_TEST_SUITE_P(Ways, EngineTest, ::testing::ValuesIn(kWays), [](const auto& way) { return std::string(way.param.name); });

TEST(Engine, ViewsAskedForWhereThereAreNoneAreUnavailable) {
  testing::Rig rig;
  const Graph graph = testing::must(llama_graph(oracle::small_llama(), Naming::kGguf));
  auto publish = testing::must(rig.server->publish());
  for (const auto& [name, tensor] : oracle::random_tensors(graph, DType::kF32, kSeed)) testing::must(publish.put({name, tensor.dtype, tensor.shape, {}}, tensor.bytes));
  static_cast<void>(testing::must(publish.finish()));
  ClientOptions client_options;
  client_options.transport = "tcp";
  const auto client = testing::must(Client::connect(rig.tcp_endpoint().to_string(), client_options));
  EngineOptions options;
  options.source = Source::kView;
  const auto refused = Engine::open(testing::must(client->snapshot({})), graph, options);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kUnavailable);
  options.backend = "abacus";
  const auto unknown = Engine::open(testing::must(client->snapshot({})), graph, options);
  ASSERT_FALSE(unknown.ok());
  EXPECT_NE(unknown.error().message().find("abacus"), std::string::npos);
}

// ---------------------------------------------------------------- experts

// A router and two matrices of experts whose rows are longer than a batch of embedding rows; `codec` of the experts.
class ExpertsTest : public ::testing::TestWithParam<CodecId> {
 protected:
  static constexpr std::uint64_t kExperts = 6, kWidth = 288, kVocabulary = 40;
  static constexpr std::uint64_t kExpertBytes = kWidth * kWidth * 4;  // 324 KiB

  void SetUp() override {
    const Shape experts{kExperts, kWidth, kWidth};
    testing::must(graph_.embedding("in", "table", Shape{kVocabulary, kWidth}));
    testing::must(graph_.matmul("scores", "in", "router", Shape{kExperts, kWidth}));
    testing::must(graph_.top_k("route", "scores", 2));
    testing::must(graph_.expert_matmul("up", "in", "route", "up", experts));
    testing::must(graph_.gelu("bent", "up"));
    testing::must(graph_.expert_combine("down", "bent", "route", "down", experts));
    testing::must(graph_.add("sum", "in", "down"));
    testing::must(graph_.head("out", "sum", "head", Shape{kVocabulary, kWidth}));
    tensors_ = oracle::random_tensors(graph_, DType::kF32, kSeed);
    ClientOptions options;
    options.transport = "tcp";
    client_ = testing::must(Client::connect(rig_.tcp_endpoint().to_string(), options));
    const auto publish = testing::must(client_->publish({}));
    for (const auto& [name, tensor] : tensors_) {
      const CodecId codec = tensor.shape.rank() == 3 ? GetParam() : CodecId::kRaw;
      testing::must(publish->put(name, tensor.dtype, tensor.shape, Shard::whole(), tensor.bytes, CodecSpec{.codec = codec}));
    }
    EXPECT_EQ(publish->totals().stored_bytes < publish->totals().given_bytes, GetParam() != CodecId::kRaw);
    static_cast<void>(testing::must(publish->finish()));
  }

  Result<std::unique_ptr<Engine>> open(std::uint64_t budget) {
    EngineOptions options;
    options.budget_bytes = budget;
    options.backend_options.threads = 1;
    return Engine::open(testing::must(client_->snapshot({})), graph_, options);
  }

  testing::Rig rig_;
  Graph graph_;
  oracle::Tensors tensors_;
  std::shared_ptr<Client> client_;
};

// Method: a plain session says which rows each token wants; the engine may fetch these, once each, and what it walks.
TEST_P(ExpertsTest, OnlyPickedExpertsAreFetchedUnderABudgetThatHoldsOne) {
  const auto backend = testing::must(open_backend("cpu", {.threads = 1}));
  const auto session = testing::must(backend->open_session(testing::must(graph_.bind(oracle::infos(tensors_))), {}));
  std::vector<std::vector<float>> expected;
  std::uint64_t row_bytes = 0, experts = 0;
  for (const Token token : kTokens) {
    const auto id = static_cast<Token>(token % kVocabulary);
    testing::must(session->begin({&id, 1}));
    while (const Pending* pending = session->pending()) {
      const Need& need = session->binding().needs()[pending->need];
      row_bytes += pending->rows.size() * need.row_bytes;
      if (need.row_bytes == kExpertBytes) experts += pending->rows.size();
      testing::must(session->supply({need.tensor, need.dtype, 0, need.rows, tensors_.at(need.tensor).bytes}));
    }
    expected.push_back(copy(testing::must(session->finish())));
  }
  ASSERT_EQ(experts, kTokens.size() * 2 * 2);

  const auto refused = open(1);
  ASSERT_FALSE(refused.ok());
  const std::string text(refused.error().message());
  const std::size_t at = text.find("at least ");
  ASSERT_NE(at, std::string::npos) << text;
  EXPECT_NE(text.find(cat("a row of ", kExpertBytes, " bytes of \"up\"")), std::string::npos) << text;
  const std::uint64_t least = std::stoull(text.substr(at + 9));
  EXPECT_FALSE(open(least - 1).ok());
  for (const std::uint64_t budget : {least, least + 3 * kExpertBytes, std::uint64_t{0}}) {
    SCOPED_TRACE(cat("budget ", budget, ", the least is ", least));
    const auto engine = testing::must(open(budget));
    for (std::size_t i = 0; i < kTokens.size(); ++i) {
      const auto id = static_cast<Token>(kTokens[i] % kVocabulary);
      EXPECT_EQ(copy(testing::must(engine->step({&id, 1}))), expected[i]) << "token " << i;
    }
    const EngineStats stats = engine->stats();
    const std::uint64_t streamed = stats.walk_bytes - stats.resident_bytes;
    EXPECT_GE(stats.bytes_fetched, row_bytes + stats.resident_bytes + kTokens.size() * streamed);
    EXPECT_LE(stats.bytes_fetched, row_bytes + stats.resident_bytes + (kTokens.size() + 1) * streamed);  // one walk ahead at most
    EXPECT_EQ(stats.walk_bytes, (kExperts + kVocabulary) * kWidth * 4);
    if (budget != 0) {
      EXPECT_LE(stats.held_bytes_max, budget);
    }
    EXPECT_GT(stats.compute_seconds, 0);
  }
  EXPECT_GE(least, kExpertBytes);
  EXPECT_LT(least, GetParam() == CodecId::kRaw ? 2 * kExpertBytes : 2 * kExpertBytes + kDecodeBytes);
}

INSTANTIATE_TEST_SUITE_P(Codecs, ExpertsTest, ::testing::Values(CodecId::kRaw, CodecId::kPlanes),
                         [](const auto& codec) { return std::string(codec.param == CodecId::kRaw ? "Raw" : "Encoded"); });

// An encoder's output is a mean, and each text is one step from position 0.
TEST(Engine, AnEncoderGivesOneRowATextAndAsksToRewind) {
  testing::Rig rig;
  Graph graph;
  testing::must(graph.embedding("word", "words", Shape{30, 16}));
  testing::must(graph.embedding("place", "places", Shape{12, 16}, RowsBy::kPosition));
  testing::must(graph.add("sum", "word", "place"));
  testing::must(graph.attention("mix", "sum", "sum", "sum", {4, 4, 4, false}));
  testing::must(graph.layer_norm("norm", "mix", "norm.weight", "norm.bias", 1e-12));
  testing::must(graph.mean("mean", "norm"));
  testing::must(graph.normalise("out", "mean"));
  const oracle::Tensors tensors = oracle::random_tensors(graph, DType::kF32, kSeed);
  auto publish = testing::must(rig.server->publish());
  for (const auto& [name, tensor] : tensors) testing::must(publish.put({name, tensor.dtype, tensor.shape, {}}, tensor.bytes));
  static_cast<void>(testing::must(publish.finish()));
  const auto client = testing::must(Client::connect(rig.tcp_endpoint().to_string(), {}));
  const auto engine = testing::must(Engine::open(testing::must(client->snapshot({})), graph, {}));
  for (const std::size_t count : {1U, 12U, 5U}) {
    std::vector<Token> ids;
    for (std::size_t i = 0; i < count; ++i) ids.push_back(kTokens[i % kTokens.size()] % 30);
    testing::must(engine->rewind(0));
    const std::vector<float> row = copy(testing::must(engine->step(ids)));
    const oracle::Answer answer = oracle::evaluate(graph, tensors, ids);
    ASSERT_EQ(row.size(), 16U);
    // A row of length one, behind sums of at most 16 terms each within 17 units, and norms that scale both alike.
    for (std::size_t i = 0; i < row.size(); ++i) EXPECT_NEAR(static_cast<double>(row[i]), answer.values[i], 64 * 17 * oracle::kUnit);
  }
  const Token token = 1;
  const auto refused = engine->step({&token, 1});
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message().find("rewind(0)"), std::string::npos);
}

}  // namespace
}  // namespace paramwire
