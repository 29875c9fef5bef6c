#include "cpp/compute_fixture.hpp"
#include "paramwire/base/env.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/compute/backend.hpp"
#include "paramwire/compute/cpu_backend.hpp"
#include "paramwire/compute/kernels.hpp"
#include "paramwire/compute/llama.hpp"
#include "paramwire/compute/team.hpp"

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

namespace paramwire {
namespace {

using oracle::Tensors;

// Goal: products are right for every format, with tails of every vector width, on both paths (few and many tokens), cut
// anywhere, by any number of threads. The head is the identity, whose products are exact, so the bound is the matmul's own.
TEST(CpuBackend, MatmulIsWithinTheBoundOfFloatSums) {
  for (const DType dtype : kFormats) {
    for (const auto& [out, in] : {std::pair<std::uint64_t, std::uint64_t>{1, 1}, {3, 7}, {37, 67}, {130, 96}, {66, 331}}) {
      for (const bool bias : {false, true}) {
        Tensors tensors{{"table", oracle::random_tensor(dtype, Shape{17, in}, 1)},
                        {"w", oracle::random_tensor(dtype, Shape{out, in}, 2)},
                        {"b", oracle::random_tensor(dtype, Shape{out}, 3)},
                        {"eye", oracle::identity(out)}};
        Graph graph;
        ASSERT_TRUE(graph.embedding("in", "table", Shape{17, in}).ok());
        ASSERT_TRUE(graph.matmul("m", "in", "w", Shape{out, in}, bias ? "b" : "").ok());
        ASSERT_TRUE(graph.head("out", "m", "eye", Shape{out, out}).ok());
        check_graph(graph, tensors, {1, 2, 6, 7, 33}, 1000, 1);
        check_graph(graph, tensors, {1, 2, 6, 7, 33}, 5, 3);
      }
    }
  }
}

TEST(CpuBackend, HeadReadsTheLastPositionAlone) {
  for (const DType dtype : kFormats) {
    Tensors tensors{{"table", oracle::random_tensor(dtype, Shape{131, 45}, 1)}};
    Graph graph;
    ASSERT_TRUE(graph.embedding("in", "table", Shape{131, 45}).ok());
    ASSERT_TRUE(graph.head("out", "in", "table", Shape{131, 45}).ok());  // tied
    check_graph(graph, tensors, {1, 9}, 10, 2);
  }
}

TEST(CpuBackend, RmsNormIsRightForEveryCut) {
  for (const DType dtype : kFormats) {
    for (const std::uint64_t width : {1U, 5U, 67U}) {
      Tensors tensors{{"table", oracle::random_tensor(DType::kF32, Shape{17, width}, 4)},
                      {"w", oracle::random_tensor(dtype, Shape{width}, 5)},
                      {"eye", oracle::identity(width)}};
      Graph graph;
      ASSERT_TRUE(graph.embedding("in", "table", Shape{17, width}).ok());
      ASSERT_TRUE(graph.rms_norm("n", "in", "w", 1e-5).ok());
      ASSERT_TRUE(graph.head("out", "n", "eye", Shape{width, width}).ok());
      for (const std::uint64_t rows : {1U, 3U, 100U}) check_graph(graph, tensors, {4}, rows, 2);
    }
  }
}

TEST(CpuBackend, RotaryTurnsPairsOfBothLayouts) {
  for (const RotaryLayout layout : {RotaryLayout::kInterleaved, RotaryLayout::kHalfSplit}) {
    for (const std::uint32_t rotary_size : {2U, 6U, 10U}) {
      Tensors tensors{{"table", oracle::random_tensor(DType::kF32, Shape{17, 30}, 6)}, {"eye", oracle::identity(30)}};
      Graph graph;
      ASSERT_TRUE(graph.embedding("in", "table", Shape{17, 30}).ok());
      ASSERT_TRUE(graph.rotary("r", "in", {3, 10, rotary_size, 10000.0, layout}).ok());
      ASSERT_TRUE(graph.head("out", "r", "eye", Shape{30, 30}).ok());
      check_graph(graph, tensors, {1, 2, 50}, 100, 1);
    }
  }
}

TEST(CpuBackend, ElementwiseOperationsAreRight) {
  using Add = std::function<Status(Graph&)>;
  const std::vector<Add> operations = {
      [](Graph& graph) { return graph.add("op", "a", "b"); },
      [](Graph& graph) { return graph.swiglu("op", "a", "b"); },
      [](Graph& graph) { return graph.softmax("op", "a"); },
  };
  for (const Add& operation : operations) {
    Tensors tensors{{"ta", oracle::random_tensor(DType::kF32, Shape{17, 33}, 7)},
                    {"tb", oracle::random_tensor(DType::kF32, Shape{17, 33}, 8)},
                    {"eye", oracle::identity(33)}};
    Graph graph;
    ASSERT_TRUE(graph.embedding("a", "ta", Shape{17, 33}).ok());
    ASSERT_TRUE(graph.embedding("b", "tb", Shape{17, 33}).ok());
    ASSERT_TRUE(operation(graph).ok());
    ASSERT_TRUE(graph.head("out", "op", "eye", Shape{33, 33}).ok());
    check_graph(graph, tensors, {1, 13}, 100, 2);
  }
}

struct AttentionCase {
  std::uint32_t heads, kv_heads, head_size;
};

Graph attention_graph(const AttentionCase& sizes, Tensors& tensors) {
  const std::uint64_t q = std::uint64_t{sizes.heads} * sizes.head_size, kv = std::uint64_t{sizes.kv_heads} * sizes.head_size;
  tensors = {{"tq", oracle::random_tensor(DType::kF32, Shape{17, q}, 9)},
             {"tk", oracle::random_tensor(DType::kF32, Shape{17, kv}, 10)},
             {"tv", oracle::random_tensor(DType::kF32, Shape{17, kv}, 11)},
             {"eye", oracle::identity(q)}};
  Graph graph;
  EXPECT_TRUE(graph.embedding("q", "tq", Shape{17, q}).ok());
  EXPECT_TRUE(graph.embedding("k", "tk", Shape{17, kv}).ok());
  EXPECT_TRUE(graph.embedding("v", "tv", Shape{17, kv}).ok());
  EXPECT_TRUE(graph.attention("op", "q", "k", "v", {sizes.heads, sizes.kv_heads, sizes.head_size}).ok());
  EXPECT_TRUE(graph.head("out", "op", "eye", Shape{q, q}).ok());
  return graph;
}

TEST(CpuBackend, AttentionIsCausalAndGrouped) {
  for (const AttentionCase& sizes : {AttentionCase{1, 1, 1}, {4, 4, 9}, {6, 2, 10}, {9, 3, 64}, {5, 1, 33}}) {
    Tensors tensors;
    const Graph graph = attention_graph(sizes, tensors);
    check_graph(graph, tensors, {1, 2, 9, 64}, 100, 3);
  }
}

// Goal: positions given in several steps see the cache of those before; a dropped step and a rewind leave no trace.
TEST(CpuBackend, StepsContinueWhereTheLastOneEnded) {
  Tensors tensors;
  const Graph graph = attention_graph({6, 2, 10}, tensors);
  const std::vector<Token> tokens = some_tokens(40, 17);
  const oracle::Answer answer = oracle::evaluate(graph, tensors, tokens);
  const std::unique_ptr<Session> session = open_session(graph, tensors, 2, 20);
  const std::vector<Token> junk(11, 5);
  std::vector<float> logits;
  std::size_t at = 0;
  for (const std::size_t count : {1U, 13U, 20U, 1U, 5U}) {
    ASSERT_TRUE(session->begin(junk).ok());
    session->abandon();
    ASSERT_TRUE(oracle::step(*session, tensors, junk, 100).ok());
    ASSERT_TRUE(session->rewind(at).ok());
    const Result<std::vector<float>> part = oracle::step(*session, tensors, std::span(tokens).subspan(at, count), 3);
    ASSERT_TRUE(part.ok()) << part.error().message();
    at += count;
    EXPECT_EQ(session->position(), at);
    logits = *part;
  }
  ASSERT_EQ(at, tokens.size());
  expect_within(logits, answer, "five steps");
}

Graph tiny_llama(Tensors& tensors, DType dtype, Naming naming) {
  LlamaConfig config;
  config.layers = 2;
  config.width = 48;
  config.ffn_width = 72;
  config.vocabulary = 97;
  config.heads = 6;
  config.kv_heads = 2;
  config.tied_head = true;
  config.attention_bias = true;
  Graph graph = *llama_graph(config, naming);
  std::uint64_t seed = 100;
  for (const Parameter& parameter : graph.parameters()) {
    tensors.emplace(parameter.name, oracle::random_tensor(dtype, parameter.shape, seed++));
  }
  return graph;
}

// The bound: 15 products one after another, each of at most 72 columns and thus within 73 units of the sum of magnitudes,
// which for random signs is about sqrt(72) times the sum. The measured error is a hundredth of it.
TEST(CpuBackend, AWholeModelAgreesWithDoublePrecision) {
  const double bound = 15 * 73 * std::sqrt(72.0) * oracle::kUnit;
  for (const DType dtype : kFormats) {
    for (const Naming naming : {Naming::kGguf, Naming::kHuggingFace}) {
      Tensors tensors;
      const Graph graph = tiny_llama(tensors, dtype, naming);
      for (const std::size_t count : {1U, 5U, 40U}) {
        const std::vector<Token> tokens = some_tokens(count, 97);
        const std::unique_ptr<Session> session = open_session(graph, tensors, 2);
        const Result<std::vector<float>> logits = oracle::step(*session, tensors, tokens, 11);
        ASSERT_TRUE(logits.ok()) << logits.error().message();
        EXPECT_LE(relative_error(*logits, oracle::evaluate(graph, tensors, tokens).values), bound) << count << " tokens";
      }
    }
  }
}

// Goal: an engine may cut blocks as it likes and users may choose threads without changing a single bit of decoding.
TEST(CpuBackend, CutsAndThreadsDoNotChangeDecoding) {
  Tensors tensors;
  const Graph graph = tiny_llama(tensors, DType::kBF16, Naming::kGguf);
  std::vector<std::vector<float>> results;
  for (const std::uint32_t threads : {1U, 4U}) {
    for (const std::uint64_t rows : {1U, 2U, 7U, 1000U}) {
      const std::unique_ptr<Session> session = open_session(graph, tensors, threads);
      std::vector<float> logits;
      for (const Token token : some_tokens(12, 97)) logits = *oracle::step(*session, tensors, std::span(&token, 1), rows);
      results.push_back(std::move(logits));
    }
  }
  for (const std::vector<float>& result : results) EXPECT_EQ(result, results.front());
}

TEST(CpuBackend, SessionsOfOneBackendRunInSeveralThreads) {
  Tensors tensors;
  const Graph graph = tiny_llama(tensors, DType::kF32, Naming::kGguf);
  const Result<std::unique_ptr<Backend>> backend = open_backend("cpu", {.threads = 3});
  ASSERT_TRUE(backend.ok());
  const Binding binding = *graph.bind(oracle::infos(tensors));
  const std::vector<Token> tokens = some_tokens(20, 97);
  std::vector<std::vector<float>> results(4);
  std::vector<std::thread> users;
  for (std::vector<float>& result : results) {
    users.emplace_back([&] {
      const Result<std::unique_ptr<Session>> session = (*backend)->open_session(binding, {.context_tokens = 64, .step_tokens = 32});
      result = *oracle::step(**session, tensors, tokens, 9);
    });
  }
  for (std::thread& user : users) user.join();
  for (const std::vector<float>& result : results) EXPECT_EQ(result, results.front());
  EXPECT_LE(relative_error(results.front(), oracle::evaluate(graph, tensors, tokens).values), 1e-4);
}

// ---------------------------------------------------------------- what is refused

TEST(CpuBackend, BeginRefusesWhatItCannotRun) {
  Tensors tensors;
  const Graph graph = attention_graph({2, 1, 4}, tensors);
  const std::unique_ptr<Session> session = open_session(graph, tensors, 1, 40);
  const std::vector<Token> tokens(41, 1), bad = {1, 17}, some(40, 1);
  expect_error(session->begin({}), Code::kInvalid, {"0 tokens", "step_tokens 40"});
  expect_error(session->begin(tokens), Code::kInvalid, {"41 tokens", "step_tokens 40"});
  expect_error(session->begin(bad), Code::kInvalid, {"token 1 is 17", "vocabulary's 17"});
  ASSERT_TRUE(oracle::step(*session, tensors, some, 100).ok());
  expect_error(session->begin(some), Code::kBackpressure, {"40 tokens after position 40", "context_tokens 64"});
  expect_error(session->rewind(41), Code::kInvalid, {"41", "40"});
  ASSERT_TRUE(session->rewind(24).ok());
  ASSERT_TRUE(session->begin(some).ok());
  expect_error(session->begin(some), Code::kInvalid, {"a step is running"});
  expect_error(session->rewind(0), Code::kInvalid, {"a step is running"});
}

TEST(CpuBackend, SupplyRefusesTheWrongViewAndWaitsForTheRightOne) {
  Tensors tensors{{"table", oracle::random_tensor(DType::kBF16, Shape{17, 6}, 1)}};
  Graph graph;
  ASSERT_TRUE(graph.embedding("in", "table", Shape{17, 6}).ok());
  ASSERT_TRUE(graph.head("out", "in", "table", Shape{17, 6}).ok());
  const std::unique_ptr<Session> session = open_session(graph, tensors, 1);
  const std::span<const std::byte> bytes(tensors.at("table").bytes);
  const WeightView all{"table", DType::kBF16, 0, 17, bytes};
  expect_error(session->supply(all), Code::kInvalid, {"nothing is pending", "begin()"});
  expect_error(Status(session->finish().error()), Code::kInvalid, {"no step is running"});

  const std::vector<Token> tokens = {9, 3, 9};
  ASSERT_TRUE(session->begin(tokens).ok());
  ASSERT_NE(session->pending(), nullptr);
  EXPECT_EQ(std::vector<std::uint64_t>(session->pending()->rows.begin(), session->pending()->rows.end()), (std::vector<std::uint64_t>{3, 9}));
  expect_error(session->supply({"tabel", DType::kBF16, 0, 17, bytes}), Code::kInvalid, {"'table'", "'in'", "given tensor 'tabel'"});
  expect_error(session->supply({"table", DType::kF16, 0, 17, bytes}), Code::kInvalid, {"given dtype f16, expected bf16"});
  expect_error(session->supply({"table", DType::kBF16, 4, 10, bytes.subspan(48, 72)}), Code::kInvalid, {"[4, 10)", "from 3 on"});
  expect_error(session->supply({"table", DType::kBF16, 0, 18, bytes}), Code::kInvalid, {"[0, 18)", "17"});
  expect_error(session->supply({"table", DType::kBF16, 3, 3, {}}), Code::kInvalid, {"[3, 3)"});
  expect_error(session->supply({"table", DType::kBF16, 3, 4, bytes.subspan(36, 11)}), Code::kInvalid, {"11 bytes, expected 12"});
  expect_error(session->supply({"table", DType::kBF16, 3, 4, bytes.subspan(37, 12)}), Code::kInvalid, {"not aligned"});
  expect_error(Status(session->finish().error()), Code::kInvalid, {"'table' is still pending from row 3"});

  ASSERT_TRUE(session->supply({"table", DType::kBF16, 2, 5, bytes.subspan(24, 36)}).ok());
  EXPECT_EQ(session->pending()->next_row, 9U);
  ASSERT_TRUE(session->supply({"table", DType::kBF16, 9, 10, bytes.subspan(108, 12)}).ok());
  EXPECT_EQ(session->pending()->need, 1U);
  expect_error(session->supply({"table", DType::kBF16, 1, 17, bytes.subspan(12)}), Code::kInvalid, {"[1, 17)", "from 0 on"});
  ASSERT_TRUE(session->supply({"table", DType::kBF16, 0, 8, bytes.subspan(0, 96)}).ok());
  ASSERT_TRUE(session->supply({"table", DType::kBF16, 8, 17, bytes.subspan(96)}).ok());
  EXPECT_EQ(session->pending(), nullptr);
  expect_error(session->supply(all), Code::kInvalid, {"finish()"});
  const Result<std::span<const float>> logits = session->finish();
  ASSERT_TRUE(logits.ok());
  expect_within({logits->begin(), logits->end()}, oracle::evaluate(graph, tensors, tokens), "after refusals");
}

TEST(Backend, OpenNamesWhatItKnows) {
  expect_error(Status(open_backend("tpu", {}).error()), Code::kInvalid, {"'tpu'", "cpu"});
  expect_error(Status(open_backend("cpu", {.threads = 257}).error()), Code::kInvalid, {"257", "256"});
  const std::vector<Availability> lines = available_backends();
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[1].name, "cuda");
  EXPECT_FALSE(lines[1].usable);
  EXPECT_EQ(lines[0].name, "cpu");
  EXPECT_TRUE(lines[0].usable) << lines[0].reason;
  EXPECT_NE(lines[0].reason.find("BLIS"), std::string::npos);
  const Result<std::unique_ptr<Backend>> backend = open_backend("cpu", {.threads = 2});
  ASSERT_TRUE(backend.ok());
  EXPECT_NE((*backend)->description().find("2 threads"), std::string::npos);
}

// Goal: a library or kernel that multiplies wrongly on this processor is named, not used. Method: sets with one wrong loop.
TEST(CpuBackend, AWrongProductMakesItUnavailable) {
  const kernels::Set& right = *kernels::usable_sets().front();
  ASSERT_TRUE(check_cpu_products(right).ok());
  kernels::Set wrong = right;
  wrong.name = "broken";
  wrong.dot_rows[1] = [](const kernels::Rows& rows, const float*, std::size_t, std::size_t tokens, float* y, std::size_t y_stride, bool) {
    for (std::size_t token = 0; token < tokens; ++token) std::fill_n(y + token * y_stride, rows.count, 0.0F);
  };
  expect_error(check_cpu_products(wrong), Code::kUnavailable, {"broken dot kernel, bf16", "expected"});
  wrong = right;
  wrong.widen[2] = [](const std::byte*, float* target, std::size_t count) { std::fill_n(target, count, std::nanf("")); };
  expect_error(check_cpu_products(wrong), Code::kUnavailable, {"BLIS", "f16", "expected"});
}

// ---------------------------------------------------------------- the parts

// Goal: every set that this processor can run, not only the best one, agrees with double precision.
TEST(Kernels, EverySetMultipliesWidensAndMixes) {
  for (const kernels::Set* set : kernels::usable_sets()) {
    for (const DType dtype : kFormats) {
      const std::size_t format = kernels::format_index(dtype);
      for (const std::uint64_t columns : {1U, 7U, 8U, 15U, 16U, 17U, 31U, 64U, 100U}) {
        const oracle::Tensor weights = oracle::random_tensor(dtype, Shape{6, columns}, columns);
        const oracle::Tensor x = oracle::random_tensor(DType::kF32, Shape{3, columns}, columns + 1);
        std::vector<float> values(x.values.begin(), x.values.end()), y(3 * 8, 2.0F), wide(6 * columns);
        set->dot_rows[format]({weights.bytes.data(), 6, columns, columns * dtype_bits(dtype) / 8}, values.data(), columns, 3, y.data(), 8, true);
        set->widen[format](weights.bytes.data(), wide.data(), wide.size());
        for (std::size_t i = 0; i < wide.size(); ++i) ASSERT_EQ(static_cast<double>(wide[i]), weights.values[i]) << set->name;
        for (std::size_t token = 0; token < 3; ++token) {
          for (std::size_t row = 0; row < 8; ++row) {
            double sum = 2, magnitude = 2;
            for (std::size_t column = 0; row < 6 && column < columns; ++column) {
              const double product = x.values[token * columns + column] * weights.values[row * columns + column];
              sum += product;
              magnitude += std::fabs(product);
            }
            ASSERT_NEAR(static_cast<double>(y[token * 8 + row]), sum, static_cast<double>(columns + 1) * oracle::kUnit * magnitude)
                << set->name << " " << dtype_name(dtype) << " " << columns << " columns";
          }
        }
        std::vector<float> mixed(columns);
        std::vector<float> rows(wide.begin(), wide.end());
        set->mix_rows(values.data(), rows.data(), std::min<std::size_t>(6, columns), columns, mixed.data());
        for (std::size_t column = 0; column < columns; ++column) {
          double sum = 0, magnitude = 0;
          for (std::size_t row = 0; row < std::min<std::size_t>(6, columns); ++row) {
            sum += static_cast<double>(values[row]) * static_cast<double>(rows[row * columns + column]);
            magnitude += std::fabs(static_cast<double>(values[row]) * static_cast<double>(rows[row * columns + column]));
          }
          ASSERT_NEAR(static_cast<double>(mixed[column]), sum, 7 * oracle::kUnit * magnitude) << set->name;
        }
      }
    }
  }
}

TEST(Kernels, EveryHalfAndEveryBf16WidensExactly) {
  std::vector<std::byte> bytes(2 * 65536);
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    bytes[2 * bits] = static_cast<std::byte>(bits & 0xff);
    bytes[2 * bits + 1] = static_cast<std::byte>(bits >> 8);
  }
  std::vector<float> first(65536), other(65536);
  for (const std::size_t format : {1U, 2U}) {
    kernels::usable_sets().back()->widen[format](bytes.data(), first.data(), first.size());
    // IEEE 754 half 0x3c00 is 1 and 0x0001 is 2^-24; bf16 0x3f80 is 1 and 0x0001 is 2^-133.
    EXPECT_EQ(first[format == 2 ? 0x3c00 : 0x3f80], 1.0F);
    EXPECT_EQ(first[1], format == 2 ? 0x1p-24F : 0x1p-133F);
    for (const kernels::Set* set : kernels::usable_sets()) {
      set->widen[format](bytes.data(), other.data(), other.size());
      for (std::uint32_t bits = 0; bits < 65536; ++bits) {
        if (std::isnan(first[bits])) {
          ASSERT_TRUE(std::isnan(other[bits])) << set->name << " " << bits;
        } else {
          ASSERT_EQ(std::signbit(first[bits]), std::signbit(other[bits])) << set->name << " " << bits;
          ASSERT_EQ(first[bits], other[bits]) << set->name << " " << bits;
        }
      }
    }
  }
}

TEST(Team, EveryPartRunsOnceWithAWorkerOfItsOwn) {
  for (const std::uint32_t threads : {1U, 2U, 5U}) {
    const std::unique_ptr<Team> team = std::move(*Team::start(threads));
    EXPECT_EQ(team->threads(), threads);
    for (std::uint32_t round = 0; round < 300; ++round) {
      const std::uint32_t parts = round % 17;
      std::vector<std::uint32_t> runs(parts);               // plain: two runs of one part would be a race
      std::vector<std::atomic<int>> busy(threads);
      std::atomic<bool> clash{false};
      team->run(parts, [&](std::uint32_t part, std::uint32_t worker) {
        if (busy[worker].fetch_add(1) != 0) clash = true;
        ++runs[part];
        busy[worker].fetch_sub(1);
      });
      EXPECT_FALSE(clash);
      EXPECT_EQ(runs, std::vector<std::uint32_t>(parts, 1));
    }
  }
}

TEST(Team, AForkedChildCanDropIt) {
  std::unique_ptr<Team> team = std::move(*Team::start(3));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // a hang ends the child by a signal
    team.reset();
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(Team, CallersOfSeveralThreadsTakeTurns) {
  const std::unique_ptr<Team> team = std::move(*Team::start(3));
  std::vector<std::uint64_t> sums(4);
  std::vector<std::thread> callers;
  for (std::uint64_t& sum : sums) {
    callers.emplace_back([&] {
      std::vector<std::uint64_t> parts(64);
      for (int round = 0; round < 50; ++round) {
        team->run(64, [&](std::uint32_t part, std::uint32_t) { parts[part] += part; });
      }
      sum = std::accumulate(parts.begin(), parts.end(), std::uint64_t{0});
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const std::uint64_t sum : sums) EXPECT_EQ(sum, 50U * 63 * 64 / 2);
}

}  // namespace
}  // namespace paramwire
