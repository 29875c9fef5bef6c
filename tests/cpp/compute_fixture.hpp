// What the tests of a backend do with a graph: open a session, step it, compare with the oracle.
#pragma once

#include "cpp/compute_oracle.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/compute/backend.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace paramwire {

inline constexpr DType kFormats[] = {DType::kF32, DType::kBF16, DType::kF16};

inline std::unique_ptr<Session> open_session(const Graph& graph, const oracle::Tensors& tensors, std::uint32_t threads, std::uint64_t step_tokens = 64) {
  Result<std::unique_ptr<Backend>> backend = open_backend("cpu", {.threads = threads});
  EXPECT_TRUE(backend.ok()) << backend.error().message();
  const Result<Binding> binding = graph.bind(oracle::infos(tensors));
  EXPECT_TRUE(binding.ok()) << binding.error().message();
  Result<std::unique_ptr<Session>> session = (*backend)->open_session(*binding, {.context_tokens = 64, .step_tokens = step_tokens});
  EXPECT_TRUE(session.ok()) << session.error().message();
  return std::move(*session);  // outlives the backend, as promised
}

// Tokens 0, 1, 2, ... modulo the vocabulary, out of order.
inline std::vector<Token> some_tokens(std::size_t count, std::uint64_t vocabulary) {
  std::vector<Token> tokens(count);
  for (std::size_t i = 0; i < count; ++i) tokens[i] = static_cast<Token>((i * 7 + 3) % vocabulary);
  return tokens;
}

inline void expect_within(const std::vector<float>& actual, const oracle::Answer& answer, const std::string& what) {
  ASSERT_EQ(actual.size(), answer.values.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_LE(std::fabs(static_cast<double>(actual[i]) - answer.values[i]), answer.bounds[i] + 1e-30)
        << what << ", column " << i << ": " << actual[i] << " is not " << answer.values[i];
  }
}

// Length of the difference over length of the right row.
inline double relative_error(const std::vector<float>& actual, const std::vector<double>& right) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < right.size(); ++i) {
    error += (static_cast<double>(actual[i]) - right[i]) * (static_cast<double>(actual[i]) - right[i]);
    norm += right[i] * right[i];
  }
  return std::sqrt(error / norm);
}

// One step from position 0 over each of `counts` tokens, in one session; views of `rows` rows.
inline void check_graph(const Graph& graph, const oracle::Tensors& tensors, const std::vector<std::size_t>& counts, std::uint64_t rows,
                        std::uint32_t threads) {
  const std::unique_ptr<Session> session = open_session(graph, tensors, threads);
  for (const std::size_t count : counts) {
    const std::string what = cat(count, " tokens, views of ", rows, ", ", threads, " threads");
    const std::vector<Token> tokens = some_tokens(count, graph.vocabulary());
    ASSERT_TRUE(session->rewind(0).ok());
    const Result<std::vector<float>> logits = oracle::step(*session, tensors, tokens, rows);
    ASSERT_TRUE(logits.ok()) << what << ": " << logits.error().message();
    expect_within(*logits, oracle::evaluate(graph, tensors, tokens), what);
  }
}

inline void expect_error(const Status& status, Code code, const std::vector<std::string>& parts) {
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), code);
  for (const std::string& part : parts) {
    EXPECT_NE(status.error().message().find(part), std::string::npos) << "'" << part << "' not in: " << status.error().message();
  }
}

}  // namespace paramwire
