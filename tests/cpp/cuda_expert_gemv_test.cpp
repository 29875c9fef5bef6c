// Routing, products of the experts that tokens picked, and their sum, against double-precision loops.
#include "cpp/cuda_kernels_rig.hpp"

#include "paramwire/cuda/kernels/expert_bodies.hpp"

#include <array>
#include <numeric>

namespace paramwire::testing {
namespace {

using namespace cuda;

class CudaExpertGemv : public CudaKernels {};

TEST_F(CudaExpertGemv, TopKTakesTheLargestTiesByNumberAndNaNLast) {
  std::mt19937_64 random(11);
  for (const std::uint32_t experts : {1U, 2U, 8U, 33U, 128U, kExpertsMax}) {
    for (const std::uint32_t k : {1U, 2U, 8U, 40U}) {
      if (k > experts) continue;
      for (const std::uint32_t normalise : {0U, 1U}) {
        const std::uint32_t tokens = 6;
        Array<float> scores(std::size_t{tokens} * experts), routing(std::size_t{tokens} * 2 * k);
        for (std::uint32_t i = 0; i < scores.size(); ++i) {
          scores[i] = static_cast<float>(static_cast<int>(random() % 41) - 20) / 4;  // many ties, both zeros
          if (scores[i] == 0 && random() % 2 == 0) scores[i] = -0.0F;
          if (i / experts == 4 && random() % 3 == 0) scores[i] = kNaN;
          if (i / experts == 5 && random() % 3 == 0) scores[i] = -kInf;
        }
        const TopKArgs args{.scores = scores.data(), .routing = routing.data(), .tokens = tokens, .experts = experts, .k = k, .normalise = normalise};
        run("top_k", top_k_launch(args), args, k + experts);
        for (std::uint32_t token = 0; token < tokens; ++token) {
          const float* row = scores.data() + std::size_t{token} * experts;
          std::vector<std::uint32_t> order(experts);
          std::iota(order.begin(), order.end(), 0U);
          std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
            if (std::isnan(row[a]) || std::isnan(row[b])) return !std::isnan(row[a]) && std::isnan(row[b]);
            return row[a] > row[b];
          });
          double sum = 0, sum_k = 0;
          const double most = static_cast<double>(row[order[0]]);
          for (std::uint32_t i = 0; i < experts; ++i) (i < k ? sum_k : sum) += std::exp(static_cast<double>(row[order[i]]) - most);
          const double whole = normalise != 0 ? sum_k : sum + sum_k;
          for (std::uint32_t slot = 0; slot < k; ++slot) {
            ASSERT_EQ(routing[std::size_t{token} * 2 * k + slot], static_cast<float>(order[slot])) << experts << " " << k << " token " << token;
            const double expected = std::exp(static_cast<double>(row[order[slot]]) - most) / whole;
            ASSERT_TRUE(near(routing[std::size_t{token} * 2 * k + k + slot], expected, expected * gamma_of(std::max(k, experts / 32) + 12 + 10)));
          }
        }
      }
    }
  }
}

struct ExpertCase {
  std::uint32_t experts, rows, columns, tokens, k;
  bool shared = true;  // the picks of a token share its row of x
  std::size_t weight_offset = 0, x_offset = 0;
  std::uint32_t picks_max = 0;  // as it is
  std::uint32_t favourite = 0;  // 1: nearly all tokens pick expert 0
};

// k distinct experts for each token, grouped.
struct Groups {
  std::vector<std::uint32_t> begin, picks;
  std::vector<std::uint32_t> expert_of;  // by pick
  std::uint32_t most = 0;
};
Groups random_groups(const ExpertCase& it, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Groups out;
  std::vector<std::vector<std::uint32_t>> of(it.experts);
  for (std::uint32_t token = 0; token < it.tokens; ++token) {
    std::vector<std::uint32_t> order(it.experts);
    std::iota(order.begin(), order.end(), 0U);
    std::shuffle(order.begin(), order.end(), random);
    if (it.favourite != 0 && random() % 8 != 0) std::iter_swap(order.begin(), std::find(order.begin(), order.end(), 0U));
    for (std::uint32_t slot = 0; slot < it.k; ++slot) {
      out.expert_of.push_back(order[slot]);
      of[order[slot]].push_back(token * it.k + slot);
    }
  }
  for (const auto& picks : of) {
    out.begin.push_back(static_cast<std::uint32_t>(out.picks.size()));
    out.picks.insert(out.picks.end(), picks.begin(), picks.end());
    out.most = std::max(out.most, static_cast<std::uint32_t>(picks.size()));
  }
  out.begin.push_back(static_cast<std::uint32_t>(out.picks.size()));
  return out;
}

void check_experts(LaneExecutor& executor, int format, const ExpertCase& it, std::uint64_t seed) {
  const Weights weights(format, std::size_t{it.experts} * it.rows * it.columns, seed, it.weight_offset);
  const Groups groups = random_groups(it, seed + 1);
  Array<std::uint32_t> begin(groups.begin.size()), picks(groups.picks.size());
  std::copy(groups.begin.begin(), groups.begin.end(), begin.begin());
  std::copy(groups.picks.begin(), groups.picks.end(), picks.begin());
  Array<float> x(std::size_t{it.tokens} * (it.shared ? 1 : it.k) * it.columns, it.x_offset), out(std::size_t{it.tokens} * it.k * it.rows, 0, kNaN);
  fill_random(x, seed + 2);
  const ExpertArgs args{.weights = weights.data(), .begin = begin.data(), .picks = picks.data(), .x = x.data(), .out = out.data(), .experts = it.experts, .rows = it.rows,
                        .columns = it.columns, .share = it.shared ? it.k : 1, .picks_max = it.picks_max != 0 ? it.picks_max : groups.most};
  const Launch launch = expert_launch(args);
  ASSERT_EQ(launch.blocks[1], it.experts);
  ASSERT_LE(launch.blocks[2], (args.picks_max + kGemvTokensMax - 1) / kGemvTokensMax);
  ASSERT_EQ(run_kernel(executor, std::string("expert_gemv") + kFormats[format], launch, args, seed), "");
  for (std::uint32_t pick = 0; pick < it.tokens * it.k; ++pick) {
    const float* vector = x.data() + std::size_t{it.shared ? pick / it.k : pick} * it.columns;
    for (std::uint32_t row = 0; row < it.rows; ++row) {
      Product product;
      for (std::uint32_t c = 0; c < it.columns; ++c) {
        product.add(static_cast<double>(weights.get((std::size_t{groups.expert_of[pick]} * it.rows + row) * it.columns + c)), static_cast<double>(vector[c]));
      }
      ASSERT_TRUE(near(out[std::size_t{pick} * it.rows + row], product.value, product.bound(it.columns)))
          << kFormats[format] << " experts " << it.experts << " rows " << it.rows << " columns " << it.columns << " tokens " << it.tokens << " k " << it.k << ": row " << row << " pick " << pick;
    }
  }
}

TEST_F(CudaExpertGemv, EveryPickIsAProductOfItsExpert) {
  std::uint64_t seed = 0;
  for (int format = 0; format < 3; ++format) {
    for (const auto& [rows, columns] : {std::array{1U, 1U}, {1U, 5U}, {9U, 64U}, {17U, 250U}, {30U, 264U}, {8U, 1032U}}) {
      for (const std::uint32_t tokens : {1U, 2U, 3U, 7U, 13U}) {
        for (const std::uint32_t k : {1U, 2U, 3U}) {
          check_experts(executor_, format, {.experts = std::array{3U, 8U}[seed % 2], .rows = rows, .columns = columns, .tokens = tokens, .k = k, .shared = seed % 3 != 0,
                                            .weight_offset = seed % 5 == 1 ? 1U : 0U, .x_offset = seed % 7 == 2 ? 1U : 0U, .favourite = static_cast<std::uint32_t>(seed % 2)},
                        seed);
          ++seed;
        }
      }
    }
  }
}

// The grids that the launch chooses: one row a warp or two, an expert's picks in one block or in several, all or fewer than there are fours of them.
TEST_F(CudaExpertGemv, EveryGridComputesAllPicksOnce) {
  const auto launch = [](std::uint32_t experts, std::uint32_t rows, std::uint32_t picks_max) {
    ExpertArgs args{};
    args.experts = experts;
    args.rows = rows;
    args.picks_max = picks_max;
    return expert_launch(args);
  };
  EXPECT_EQ(launch(2, 1024, 1).blocks[0], 256U);
  EXPECT_EQ(launch(8, 1024, 1).blocks[0], 128U) << "rows enough for two a warp";
  EXPECT_EQ(launch(2, 1024, 2).blocks[0], 128U);
  EXPECT_EQ(launch(1, 8, 64).blocks[2], 16U) << "a block for four picks";
  EXPECT_EQ(launch(2, 4096, 64).blocks[2], 2U);
  EXPECT_EQ(launch(8, 14336, 64).blocks[2], 1U);
  for (int format = 0; format < 3; ++format) {
    check_experts(executor_, format, {.experts = 2, .rows = 9, .columns = 24, .tokens = 40, .k = 1, .favourite = 1}, 1);
    check_experts(executor_, format, {.experts = 2, .rows = 4096, .columns = 8, .tokens = 1, .k = 2}, 2);
    check_experts(executor_, format, {.experts = 2, .rows = 4099, .columns = 8, .tokens = 13, .k = 1, .favourite = 1}, 3);
    check_experts(executor_, format, {.experts = 1, .rows = 10'243, .columns = 8, .tokens = 9, .k = 1}, 4);
    check_experts(executor_, format, {.experts = 4, .rows = 5, .columns = 16, .tokens = 11, .k = 2, .picks_max = 1, .favourite = 1}, 5);
  }
}

TEST_F(CudaExpertGemv, NotANumberStaysInItsExpertAndItsPick) {
  for (int format = 0; format < 3; ++format) {
    const std::uint32_t experts = 3, rows = 5, columns = 72, tokens = 6;
    Weights weights(format, std::size_t{experts} * rows * columns, 1);
    weights.set((1 * rows + 2) * columns + 70, kNaN);
    Array<float> x(std::size_t{tokens} * columns), out(std::size_t{tokens} * rows);
    fill_random(x, 2);
    x[4 * columns + 3] = kInf;
    x[5 * columns + 3] = kNaN;
    Array<std::uint32_t> begin(experts + 1), picks(tokens);
    for (std::uint32_t i = 0; i <= experts; ++i) begin[i] = 2 * i;
    for (std::uint32_t i = 0; i < tokens; ++i) picks[i] = i;  // two to an expert: 4 and 5 are of the last
    const ExpertArgs args{.weights = weights.data(), .begin = begin.data(), .picks = picks.data(), .x = x.data(), .out = out.data(), .experts = experts, .rows = rows,
                          .columns = columns, .share = 1, .picks_max = 2};
    run(std::string("expert_gemv") + kFormats[format], expert_launch(args), args);
    for (std::uint32_t i = 0; i < out.size(); ++i) {
      const std::uint32_t pick = i / rows;
      ASSERT_EQ(std::isnan(out[i]), (pick / 2 == 1 && i % rows == 2) || pick == 5) << i;
      ASSERT_EQ(std::isinf(out[i]), pick == 4) << i;
    }
  }
}

TEST_F(CudaExpertGemv, TheSumWeighsEachSlot) {
  for (const std::uint32_t rows : {1U, 255U, 257U, 1000U}) {
    for (const std::uint32_t k : {1U, 2U, 7U}) {
      const std::uint32_t tokens = 3;
      Array<float> products(std::size_t{tokens} * k * rows), routing(std::size_t{tokens} * 2 * k), out(std::size_t{tokens} * rows, 0, kNaN);
      fill_random(products, rows);
      fill_random(routing, k);
      products[std::size_t{2} * k * rows] = kNaN;
      const ExpertSumArgs args{.products = products.data(), .routing = routing.data(), .out = out.data(), .tokens = tokens, .k = k, .rows = rows};
      run("expert_sum", expert_sum_launch(args), args, rows + k);
      for (std::uint32_t token = 0; token < tokens; ++token) {
        for (std::uint32_t row = 0; row < rows; ++row) {
          Product sum;
          for (std::uint32_t slot = 0; slot < k; ++slot) {
            sum.add(static_cast<double>(routing[std::size_t{token} * 2 * k + k + slot]), static_cast<double>(products[(std::size_t{token} * k + slot) * rows + row]));
          }
          ASSERT_TRUE(near(out[std::size_t{token} * rows + row], sum.value, gamma_of(k + 1) * sum.size)) << token << " " << row;
        }
      }
    }
  }
}

}  // namespace
}  // namespace paramwire::testing
