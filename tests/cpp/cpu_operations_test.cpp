// The operations of encoders and of mixtures of experts on the CPU backend, each against the oracle.
#include "cpp/compute_fixture.hpp"
#include "paramwire/base/env.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/compute/bert.hpp"
#include "paramwire/compute/graph.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

namespace paramwire {
namespace {

using oracle::Tensors;

using Add = std::function<Status(Graph&)>;

// Tables "ta", "tb" of 17 tokens by `width`, read as "a" and "b".
Tensors tables(std::uint64_t width) {
  return {{"ta", oracle::random_tensor(DType::kF32, Shape{17, width}, 1)}, {"tb", oracle::random_tensor(DType::kF32, Shape{17, width}, 2)}};
}

// Embeddings "a" and "b", one operation "op" of `out` columns, and an identity head. `out` 0: the operation is the output.
Graph around(const Add& operation, std::uint64_t width, std::uint64_t out, Tensors& tensors) {
  Graph graph;
  EXPECT_TRUE(graph.embedding("a", "ta", Shape{17, width}).ok());
  EXPECT_TRUE(graph.embedding("b", "tb", Shape{17, width}).ok());
  const Status added = operation(graph);
  EXPECT_TRUE(added.ok()) << added.error().message();
  if (out == 0) return graph;
  tensors.insert_or_assign("eye", oracle::identity(out));
  EXPECT_TRUE(graph.head("out", "op", "eye", Shape{out, out}).ok());
  return graph;
}

// 1 to 17: the last token is each of the table's once.
std::vector<std::size_t> each_count() {
  std::vector<std::size_t> counts(17);
  std::iota(counts.begin(), counts.end(), std::size_t{1});
  return counts;
}

// The same, with the mean of all rows as the output: a head shows the last row alone.
Graph around_all(const Add& operation, std::uint64_t width, Tensors& tensors) {
  Graph graph = around(operation, width, 0, tensors);
  EXPECT_TRUE(graph.mean("all", "op").ok());
  return graph;
}

TEST(CpuOperations, EmbeddingsTakeRowsByTokenPositionAndTheFirst) {
  for (const DType dtype : kFormats) {
    for (const RowsBy by : {RowsBy::kToken, RowsBy::kPosition, RowsBy::kFirst}) {
      Tensors tensors = tables(19);
      tensors.emplace("rows", oracle::random_tensor(dtype, Shape{17, 19}, 3));
      const Graph graph = around([&](Graph& g) { return g.embedding("op", "rows", Shape{17, 19}, by); }, 19, 19, tensors);
      check_graph(graph, tensors, {1, 9, 17}, 1, 1);
      check_graph(graph, tensors, {17, 9, 1}, 100, 2);
    }
  }
}

TEST(CpuOperations, TheRowsAskedForAreThoseThatAreRead) {
  Tensors tensors = tables(4);
  const Graph graph = around([](Graph& g) -> Status {
    PARAMWIRE_CHECK(g.embedding("p", "positions", Shape{20, 4}, RowsBy::kPosition));
    PARAMWIRE_CHECK(g.embedding("t", "types", Shape{2, 4}, RowsBy::kFirst));
    return g.add("op", "p", "t");
  }, 4, 4, tensors);
  tensors.emplace("positions", oracle::random_tensor(DType::kF32, Shape{20, 4}, 4));
  tensors.emplace("types", oracle::random_tensor(DType::kF32, Shape{2, 4}, 5));
  const std::unique_ptr<Session> session = open_session(graph, tensors, 1);
  const auto rows_of_step = [&](std::span<const Token> tokens) {
    std::vector<std::vector<std::uint64_t>> rows;
    EXPECT_TRUE(session->begin(tokens).ok());
    while (const Pending* pending = session->pending()) {
      const Need& need = session->binding().needs()[pending->need];
      rows.emplace_back(pending->rows.begin(), pending->rows.end());
      EXPECT_EQ(pending->next_row, rows.back().empty() ? 0 : rows.back().front());
      EXPECT_TRUE(session->supply({need.tensor, need.dtype, 0, need.rows, tensors.at(need.tensor).bytes}).ok());
    }
    EXPECT_TRUE(session->finish().ok());
    return rows;
  };
  using Rows = std::vector<std::vector<std::uint64_t>>;
  EXPECT_EQ(rows_of_step(std::vector<Token>{9, 3, 9}), (Rows{{3, 9}, {3, 9}, {0, 1, 2}, {0}, {}}));
  EXPECT_EQ(rows_of_step(std::vector<Token>{1, 1}), (Rows{{1}, {1}, {3, 4}, {0}, {}}));
}

// Rows that are far from zero show a variance taken as a difference of squares.
TEST(CpuOperations, LayerNormIsRightForEveryCutWithAndWithoutBias) {
  for (const DType dtype : kFormats) {
    for (const std::uint64_t width : {1U, 5U, 67U}) {
      for (const std::string bias : {"", "shift"}) {
        Tensors tensors = tables(width);
        std::vector<double> far = tensors.at("ta").values;
        for (double& value : far) value += 1000;
        tensors.at("ta") = oracle::tensor_of(DType::kF32, Shape{17, width}, far);
        tensors.emplace("w", oracle::random_tensor(dtype, Shape{width}, 6));
        tensors.emplace("shift", oracle::random_tensor(dtype, Shape{width}, 7));
        const Add norm = [&](Graph& g) { return g.layer_norm("op", "a", "w", bias, 1e-5); };
        const Graph graph = around(norm, width, width, tensors), all = around_all(norm, width, tensors);
        for (const std::uint64_t rows : {1U, 3U, 100U}) {
          check_graph(graph, tensors, {4}, rows, 2);
          check_graph(all, tensors, {4}, rows, 2);
        }
      }
    }
  }
  // Large enough for the team.
  Tensors tensors = tables(1200);
  tensors.emplace("w", oracle::random_tensor(DType::kBF16, Shape{1200}, 6));
  const Graph graph = around_all([](Graph& g) { return g.layer_norm("op", "a", "w", "", 0); }, 1200, tensors);
  check_graph(graph, tensors, {60}, 500, 3);
}

TEST(CpuOperations, GeluIsRightInBothFormsFromTailToTail) {
  for (const Gelu form : {Gelu::kExact, Gelu::kTanh}) {
    Tensors tensors = tables(33);
    std::vector<double> wide = tensors.at("ta").values;
    for (double& value : wide) value *= 12;
    wide[0] = 0;
    tensors.at("ta") = oracle::tensor_of(DType::kF32, Shape{17, 33}, wide);
    const Graph graph = around([&](Graph& g) { return g.gelu("op", "a", form); }, 33, 33, tensors);
    check_graph(graph, tensors, each_count(), 100, 2);
  }
}

TEST(CpuOperations, MeanIsOfAllPositionsAndNormaliseMakesRowsOfLengthOne) {
  Tensors tensors = tables(37);
  check_graph(around([](Graph& g) { return g.mean("op", "a"); }, 37, 0, tensors), tensors, {1, 2, 40}, 100, 2);
  check_graph(around([](Graph& g) { return g.normalise("op", "a"); }, 37, 37, tensors), tensors, {1, 2, 40}, 100, 2);
  check_graph(around([](Graph& g) { return g.normalise("op", "a", 8.0); }, 37, 37, tensors), tensors, {1, 2, 40}, 100, 2);
  tensors.at("ta") = oracle::tensor_of(DType::kF32, Shape{17, 37}, std::vector<double>(17 * 37));
  check_graph(around([](Graph& g) { return g.normalise("op", "a"); }, 37, 37, tensors), tensors, {3}, 100, 1);  // zeros stay
}

struct Heads {
  std::uint32_t heads, kv_heads, head_size;
};

TEST(CpuOperations, BidirectionalAttentionSeesTheWholeStep) {
  for (const Heads& sizes : {Heads{1, 1, 1}, {4, 4, 9}, {6, 2, 10}, {12, 12, 32}}) {
    const std::uint64_t q = std::uint64_t{sizes.heads} * sizes.head_size, kv = std::uint64_t{sizes.kv_heads} * sizes.head_size;
    Tensors tensors = tables(q);
    tensors.emplace("tk", oracle::random_tensor(DType::kF32, Shape{17, kv}, 10));
    tensors.emplace("tv", oracle::random_tensor(DType::kF32, Shape{17, kv}, 11));
    const Add attention = [&](Graph& g) -> Status {
      PARAMWIRE_CHECK(g.embedding("k", "tk", Shape{17, kv}));
      PARAMWIRE_CHECK(g.embedding("v", "tv", Shape{17, kv}));
      return g.attention("op", "a", "k", "v", {sizes.heads, sizes.kv_heads, sizes.head_size, false});
    };
    const Graph graph = around(attention, q, q, tensors), all = around_all(attention, q, tensors);
    check_graph(all, tensors, {1, 2, 9, 64}, 100, 3);
    EXPECT_TRUE(graph.whole_text());
    EXPECT_EQ(graph.caches(), 0U);
    check_graph(graph, tensors, {1, 2, 9, 64}, 100, 3);
  }
}

// Goal: two layers share the place of keys and values, and nothing of one text reaches the next.
TEST(CpuOperations, EachTextOfABidirectionalSessionStandsAlone) {
  Tensors tensors = tables(12);
  const Graph graph = around([](Graph& g) -> Status {
    PARAMWIRE_CHECK(g.attention("first", "a", "b", "a", {3, 3, 4, false}));
    return g.attention("op", "b", "first", "first", {3, 3, 4, false});
  }, 12, 12, tensors);
  const std::unique_ptr<Session> session = open_session(graph, tensors, 2);
  const std::vector<Token> long_text = some_tokens(30, 17), short_text = some_tokens(4, 17);
  const auto compute = [&](std::span<const Token> tokens) {
    EXPECT_TRUE(session->rewind(0).ok());
    return *oracle::step(*session, tensors, tokens, 100);
  };
  const std::vector<float> alone = *oracle::step(*open_session(graph, tensors, 2), tensors, short_text, 100);
  const std::vector<float> before = compute(long_text);
  EXPECT_EQ(compute(short_text), alone);
  EXPECT_EQ(compute(long_text), before);
  expect_error(session->begin(short_text), Code::kInvalid, {"4 tokens at position 30", "bidirectional", "rewind(0)"});
  EXPECT_EQ(session->position(), 30U);
}

TEST(CpuOperations, ATextLongerThanThePositionTableIsRefused) {
  Tensors tensors = tables(4);
  tensors.emplace("positions", oracle::random_tensor(DType::kF32, Shape{6, 4}, 4));
  const Graph graph = around([](Graph& g) { return g.embedding("op", "positions", Shape{6, 4}, RowsBy::kPosition); }, 4, 4, tensors);
  EXPECT_EQ(graph.positions(), 6U);
  const std::unique_ptr<Session> session = open_session(graph, tensors, 1);
  expect_error(session->begin(std::vector<Token>(7, 1)), Code::kInvalid, {"7 tokens at position 0", "6 positions"});
  ASSERT_TRUE(oracle::step(*session, tensors, std::vector<Token>(5, 1), 100).ok());
  expect_error(session->begin(std::vector<Token>(2, 1)), Code::kInvalid, {"2 tokens at position 5", "6 positions"});
  ASSERT_TRUE(oracle::step(*session, tensors, std::vector<Token>(1, 1), 100).ok());
  expect_error(session->begin(std::vector<Token>(1, 1)), Code::kInvalid, {"1 tokens at position 6"});
}

// The bound: 13 products one after another, each of at most 72 columns, as in CpuBackend's test of a whole model; norms between
// them keep the scale.
TEST(CpuOperations, AWholeEncoderAgreesWithDoublePrecision) {
  BertConfig config;
  config.layers = 2;
  config.width = 48;
  config.ffn_width = 72;
  config.vocabulary = 97;
  config.heads = 6;
  config.positions = 64;
  config.normalise = true;
  const double bound = 13 * 73 * std::sqrt(72.0) * oracle::kUnit;
  for (const DType dtype : kFormats) {
    for (const Gelu gelu : {Gelu::kExact, Gelu::kTanh}) {
      config.gelu = gelu;
      const Graph graph = *bert_graph(config, Naming::kHuggingFace);
      Tensors tensors;
      std::uint64_t seed = 100;
      for (const Parameter& parameter : graph.parameters()) tensors.emplace(parameter.name, oracle::random_tensor(dtype, parameter.shape, seed++));
      const std::unique_ptr<Session> session = open_session(graph, tensors, 2);
      for (const std::size_t count : {1U, 2U, 7U, 64U}) {
        const std::vector<Token> tokens = some_tokens(count, 97);
        ASSERT_TRUE(session->rewind(0).ok());
        const Result<std::vector<float>> row = oracle::step(*session, tensors, tokens, 11);
        ASSERT_TRUE(row.ok()) << row.error().message();
        EXPECT_LE(relative_error(*row, oracle::evaluate(graph, tensors, tokens).values), bound) << count << " tokens";
      }
    }
  }
}

// ---------------------------------------------------------------- experts

TEST(CpuOperations, TopKTakesTheLargestScoresWithTheirWeights) {
  for (const std::uint64_t experts : {1U, 8U, 60U}) {
    for (const std::uint32_t k : {1U, 2U, 4U}) {
      if (k > experts) continue;
      for (const bool normalise : {true, false}) {
        Tensors tensors = tables(experts);
        const Graph graph = around([&](Graph& g) { return g.top_k("op", "a", k, normalise); }, experts, 2 * k, tensors);
        check_graph(graph, tensors, each_count(), 100, 2);
      }
    }
  }
}

TEST(CpuOperations, TiesGoToTheLowerExpertAndNoNumberGoesLast) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();
  const auto routing = [](const std::vector<double>& scores, std::uint32_t k) {
    Tensors tensors{{"table", oracle::tensor_of(DType::kF32, Shape{1, scores.size()}, scores)}};
    Graph graph;
    EXPECT_TRUE(graph.embedding("in", "table", Shape{1, scores.size()}).ok());
    EXPECT_TRUE(graph.mean("one", "in").ok());  // of one row: the row
    EXPECT_TRUE(graph.top_k("out", "one", k).ok());
    std::vector<float> value = *oracle::step(*open_session(graph, tensors, 1), tensors, std::vector<Token>{0}, 1);
    value.resize(k);
    return value;
  };
  EXPECT_EQ(routing({1, 3, 2, 3, 3}, 2), (std::vector<float>{1, 3}));
  EXPECT_EQ(routing({0, 0, 0, 0}, 4), (std::vector<float>{0, 1, 2, 3}));
  EXPECT_EQ(routing({0.0, -0.0, 0.0}, 2), (std::vector<float>{0, 1}));
  EXPECT_EQ(routing({kNan, -5, kNan, -kInfinity}, 3), (std::vector<float>{1, 3, 0}));
  EXPECT_EQ(routing({kNan, kNan, kNan}, 2), (std::vector<float>{0, 1}));
  EXPECT_EQ(routing({1, kInfinity, 2}, 2), (std::vector<float>{1, 2}));
}

// Experts, outputs, columns and experts of each token.
struct Experts {
  std::uint64_t count, out, in;
  std::uint32_t k;
};

constexpr Experts kExperts[] = {{1, 1, 1, 1}, {4, 7, 9, 2}, {8, 37, 33, 2}, {5, 66, 130, 3}, {16, 3, 20, 4}};

TEST(CpuOperations, ExpertProductsAreOfTheExpertsThatEachTokenPicked) {
  for (const DType dtype : kFormats) {
    for (const Experts& sizes : kExperts) {
      for (const bool combine : {false, true}) {
        const std::uint64_t width = combine ? sizes.in * sizes.k : sizes.in;
        Tensors tensors = tables(width);
        tensors.emplace("scores", oracle::random_tensor(DType::kF32, Shape{17, sizes.count}, 8));
        tensors.emplace("w", oracle::random_tensor(dtype, Shape{sizes.count, sizes.out, sizes.in}, 9));
        const std::uint64_t out = combine ? sizes.out : sizes.out * sizes.k;
        const Add products = [&](Graph& g) -> Status {
          PARAMWIRE_CHECK(g.embedding("s", "scores", Shape{17, sizes.count}));
          PARAMWIRE_CHECK(g.top_k("route", "s", sizes.k));
          const Shape shape{sizes.count, sizes.out, sizes.in};
          return combine ? g.expert_combine("op", "a", "route", "w", shape) : g.expert_matmul("op", "a", "route", "w", shape);
        };
        const Graph graph = around(products, width, out, tensors);
        check_graph(around_all(products, width, tensors), tensors, {2, 33}, 2, 2);
        check_graph(graph, tensors, {1, 2, 7, 33}, 1, 1);
        check_graph(graph, tensors, {33, 7, 2, 1}, 3, 3);
      }
    }
  }
}

TEST(CpuOperations, OnlyThePickedExpertsAreAskedForEachOnceInOrder) {
  // Token t scores expert (t * 3) % 8 highest and its neighbour next.
  std::vector<double> scores(17 * 8);
  for (std::size_t token = 0; token < 17; ++token) {
    scores[token * 8 + token * 3 % 8] = 2;
    scores[token * 8 + (token * 3 + 1) % 8] = 1;
  }
  Tensors tensors = tables(6);
  tensors.emplace("scores", oracle::tensor_of(DType::kF32, Shape{17, 8}, scores));
  tensors.emplace("w", oracle::random_tensor(DType::kF16, Shape{8, 5, 6}, 9));
  const Graph graph = around([](Graph& g) -> Status {
    PARAMWIRE_CHECK(g.embedding("s", "scores", Shape{17, 8}));
    PARAMWIRE_CHECK(g.top_k("route", "s", 2));
    return g.expert_matmul("op", "a", "route", "w", Shape{8, 5, 6});
  }, 6, 10, tensors);
  const std::unique_ptr<Session> session = open_session(graph, tensors, 1);
  const Need& need = session->binding().needs()[3];
  ASSERT_EQ(need.tensor, "w");
  EXPECT_EQ(need.access, Access::kRowsByData);
  EXPECT_EQ(need.rows, 8U);
  EXPECT_EQ(need.row_bytes, 5U * 6 * 2);
  EXPECT_EQ(session->binding().bytes_per_step(), 10U * 10 * 4);

  const std::vector<Token> tokens = {0, 1, 9, 1};  // experts 0 and 1; 3 and 4; 3 and 4 again
  ASSERT_TRUE(session->begin(tokens).ok());
  std::vector<std::uint64_t> asked;
  while (const Pending* pending = session->pending()) {
    const Need& now = session->binding().needs()[pending->need];
    const std::uint64_t begin = pending->next_row, end = now.access == Access::kWhole ? now.rows : begin + 1;
    if (now.tensor == "w") {
      asked.push_back(begin);
      EXPECT_EQ(pending->rows.size(), 5 - asked.size());
      const std::span<const std::byte> bytes(tensors.at("w").bytes);
      expect_error(session->supply({"w", now.dtype, begin + 1, begin + 2, bytes.first(60)}), Code::kInvalid, {"'w'", cat("from ", begin, " on")});
    }
    ASSERT_TRUE(session->supply({now.tensor, now.dtype, begin, end,
                                 std::span<const std::byte>(tensors.at(now.tensor).bytes).subspan(begin * now.row_bytes, (end - begin) * now.row_bytes)})
                    .ok());
  }
  EXPECT_EQ(asked, (std::vector<std::uint64_t>{0, 1, 3, 4}));
  const auto logits = session->finish();
  ASSERT_TRUE(logits.ok());
  expect_within({logits->begin(), logits->end()}, oracle::evaluate(graph, tensors, tokens), "picked experts");
}

}  // namespace
}  // namespace paramwire
