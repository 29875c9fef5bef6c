// Attention by splits and by tiles, against soft-max in double precision.
#include "cpp/cuda_kernels_rig.hpp"

#include <array>

namespace paramwire::testing {
namespace {

using namespace cuda;

struct Shape {
  std::uint32_t heads, kv_heads, size;
};

// One layer's inputs, and what attention over them is.
class World {
 public:
  World(const Shape& shape, std::uint32_t tokens, std::uint32_t position, bool causal, std::uint64_t seed, std::size_t offset = 0)
      : shape_(shape), tokens_(tokens), state_{.position = position, .tokens = tokens, .generation = 0, .met = kNoGeneration}, context_(causal ? position + tokens + 3 : 0), causal_(causal),
        query_(std::size_t{tokens} * shape.heads * shape.size, offset),
        keys_(std::size_t{shape.kv_heads} * shape.size * (causal ? context_ : tokens), offset),
        values_(keys_.size(), offset),
        out_(query_.size(), offset),
        out16_(query_.size()) {
    fill_random(query_, seed, -2, 2);
    fill_random(keys_, seed + 1, -2, 2);
    fill_random(values_, seed + 2);
    // What the cache holds behind the step must not matter.
    for (std::uint32_t at = position + tokens; causal && at < context_; ++at) {
      for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
        for (std::uint32_t d = 0; d < shape.size; ++d) keys_[place(head, at, d)] = values_[place(head, at, d)] = kNaN;
      }
    }
  }

  AttentionArgs args(std::uint32_t splits, Half half) {
    partial_ = std::vector<float>(attention_partial_floats(tokens_, shape_.heads, splits, shape_.size), kNaN);
    return {.state = &state_, .query = query_.data(), .keys = keys_.data(), .values = values_.data(), .out = out_.data(),
            .out16 = half == Half::kNone ? nullptr : out16_.data(), .half = half, .partial = partial_.data(), .tokens = tokens_, .heads = shape_.heads,
            .kv_heads = shape_.kv_heads, .head_size = shape_.size, .context = context_, .splits = splits, .causal = causal_ ? 1U : 0U,
            .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(shape_.size)))};
  }

  float& value_at(std::uint32_t head, std::uint32_t at, std::uint32_t d) { return values_[place(head, at, d)]; }
  float& query_at(std::uint32_t token, std::uint32_t head, std::uint32_t d) { return query_[(std::size_t{token} * shape_.heads + head) * shape_.size + d]; }
  float out_at(std::uint32_t token, std::uint32_t head, std::uint32_t d) const { return out_[(std::size_t{token} * shape_.heads + head) * shape_.size + d]; }
  std::uint32_t seen(std::uint32_t token) const { return causal_ ? state_.position + token + 1 : tokens_; }

  void check(Half half, const std::string& what) {
    for (std::uint32_t token = 0; token < tokens_; ++token) {
      for (std::uint32_t head = 0; head < shape_.heads; ++head) ASSERT_NO_FATAL_FAILURE(check_row(token, head, what));
    }
    if (half == Half::kNone) return;
    for (std::size_t i = 0; i < out_.size(); ++i) ASSERT_EQ(out16_[i], narrowed(half, out_[i])) << what;
  }

 private:
  std::size_t place(std::uint32_t head, std::uint32_t at, std::uint32_t d) const {
    if (causal_) return (std::size_t{head} * context_ + at) * shape_.size + d;
    return (std::size_t{at} * shape_.kv_heads + head) * shape_.size + d;
  }

  void check_row(std::uint32_t token, std::uint32_t head, const std::string& what) {
    const std::uint32_t kv_head = head / (shape_.heads / shape_.kv_heads), count = seen(token);
    std::vector<double> scores(count);
    double most = -INFINITY, sum = 0, score_error = 0;
    for (std::uint32_t at = 0; at < count; ++at) {
      double size = 0;
      for (std::uint32_t d = 0; d < shape_.size; ++d) {
        const double term = static_cast<double>(query_at(token, head, d)) * static_cast<double>(keys_[place(kv_head, at, d)]);
        scores[at] += term;
        size += std::abs(term);
      }
      scores[at] /= std::sqrt(static_cast<double>(shape_.size));
      // A dot product of the head's elements in any order, times the scale; in float its difference to the maximum is rounded once more.
      score_error = std::max(score_error, gamma_of(shape_.size + 3.0) * size / std::sqrt(static_cast<double>(shape_.size)) + 2 * kUnit * std::abs(scores[at]));
      most = std::max(most, scores[at]);
    }
    double spread = 0;
    for (const double score : scores) {
      sum += std::exp(score - most);
      spread = std::max(spread, most - score);
    }
    // Every weight is off by its score's error and the maximum's, by exp (2 units) and by the corrections, of which there is at most one a tile
    // of 16 keys, each a rounded exp of a rounded difference and a rounded product; the sums of weights and mixes add as many terms as keys.
    const double relative = 2 * score_error + spread * kUnit + gamma_of(4 + 4 * std::ceil(count / 16.0)) + 2 * gamma_of(count + 8.0);
    for (std::uint32_t d = 0; d < shape_.size; ++d) {
      double mix = 0, size = 0;
      for (std::uint32_t at = 0; at < count; ++at) {
        const double term = std::exp(scores[at] - most) / sum * static_cast<double>(values_[place(kv_head, at, d)]);
        mix += term;
        size += std::abs(term);
      }
      ASSERT_TRUE(near(out_at(token, head, d), mix, 2 * relative * size))
          << what << ": heads " << shape_.heads << "/" << shape_.kv_heads << " of " << shape_.size << ", token " << token << " head " << head << " element " << d;
    }
  }

  Shape shape_;
  std::uint32_t tokens_;
  StepState state_;
  std::uint32_t context_;
  bool causal_;
  Array<float> query_, keys_, values_, out_;
  Array<std::uint16_t> out16_;
  std::vector<float> partial_;
};

class CudaAttention : public CudaKernels {
 protected:
  void run_split(World& world, std::uint32_t splits, std::uint64_t seed, Half half = Half::kNone) {
    const AttentionArgs args = world.args(splits, half);
    const Launch launch = attention_split_launch(args);
    EXPECT_EQ(launch.blocks[0], splits);
    run("attention_split", launch, args, seed);
    run("attention_join", attention_join_launch(args), args, seed);
  }
  void run_tile(World& world, std::uint64_t seed, Half half = Half::kNone) {
    const AttentionArgs args = world.args(1, half);
    const Launch launch = attention_tile_launch(args);
    EXPECT_LE(launch.shared_bytes, LaneExecutor::kSharedBytesMax);
    run("attention_tile", launch, args, seed);
  }
};

constexpr Shape kShapes[] = {{9, 3, 64}, {2, 1, 128}, {4, 4, 32}, {1, 1, 256}, {2, 2, 80}, {3, 1, 6}, {1, 1, 1}, {2, 1, 200}};

TEST_F(CudaAttention, SplitsGiveTheSoftmaxOverWhatIsSeen) {
  std::uint64_t seed = 0;
  for (const Shape& shape : kShapes) {
    for (const std::uint32_t position : {0U, 1U, 130U, 300U}) {
      for (const std::uint32_t splits : {1U, 3U, 8U}) {
        World world(shape, 1 + static_cast<std::uint32_t>(seed % 2), position, true, seed, seed % 5 == 4 ? 1 : 0);
        const Half half = static_cast<Half>(seed % 3);
        run_split(world, splits, seed++, half);
        ASSERT_NO_FATAL_FAILURE(world.check(half, "split " + std::to_string(splits) + " position " + std::to_string(position)));
      }
    }
  }
}

TEST_F(CudaAttention, TilesGiveTheSoftmaxOverWhatIsSeen) {
  std::uint64_t seed = 0;
  for (const Shape& shape : kShapes) {
    for (const auto& [tokens, position] : {std::array{1U, 0U}, {5U, 40U}, {33U, 0U}, {50U, 17U}}) {
      for (const bool causal : {true, false}) {
        if (!causal && position != 0) continue;
        World world(shape, tokens, position, causal, seed, seed % 5 == 4 ? 1 : 0);
        const Half half = static_cast<Half>(seed % 3);
        run_tile(world, seed++, half);
        ASSERT_NO_FATAL_FAILURE(world.check(half, "tile " + std::to_string(tokens) + " at " + std::to_string(position)));
      }
    }
  }
}

TEST_F(CudaAttention, EveryOrderOfThreadsGivesTheSameBits) {
  for (const Shape& shape : {Shape{2, 1, 64}, Shape{1, 1, 200}}) {
    std::vector<float> split, tile;
    for (const std::uint64_t seed : {0U, 1U, 2U, 3U, 4U, 7U, 12U}) {
      World world(shape, 18, 150, true, 3);
      run_split(world, 2, seed);
      const auto gather = [&](std::vector<float>& into) {
        std::vector<float> now;
        for (std::uint32_t token = 0; token < 18; ++token) {
          for (std::uint32_t head = 0; head < shape.heads; ++head) {
            for (std::uint32_t d = 0; d < shape.size; ++d) now.push_back(world.out_at(token, head, d));
          }
        }
        if (seed == 0) into = now;
        ASSERT_EQ(now, into) << "seed " << seed;
      };
      gather(split);
      run_tile(world, seed);
      gather(tile);
    }
  }
}

TEST_F(CudaAttention, LargeScoresDoNotOverflow) {
  World world({2, 1, 32}, 20, 100, true, 9);
  for (std::uint32_t token = 0; token < 20; ++token) {
    for (std::uint32_t d = 0; d < 32; ++d) world.query_at(token, 0, d) *= 1e4F;
  }
  run_tile(world, 1);
  world.check(Half::kNone, "tile");
  run_split(world, 4, 2);
  world.check(Half::kNone, "split");
}

TEST_F(CudaAttention, NotANumberReachesNobodyWhoDoesNotSeeIt) {
  const Shape shape{2, 1, 64};
  for (const bool split : {false, true}) {
    World world(shape, 20, 30, true, 4);
    world.value_at(0, 40, 5) = kNaN;            // seen from token 10 on
    world.value_at(0, 41, 6) = kInf;            // from token 11 on
    world.query_at(3, 1, 9) = kNaN;             // one row of one head
    if (split) {
      run_split(world, 3, 1);
    } else {
      run_tile(world, 1);
    }
    for (std::uint32_t token = 0; token < 20; ++token) {
      for (std::uint32_t head = 0; head < 2; ++head) {
        for (std::uint32_t d = 0; d < 64; ++d) {
          const bool nan = (token == 3 && head == 1) || (d == 5 && token >= 10);
          ASSERT_EQ(std::isnan(world.out_at(token, head, d)), nan) << split << ": token " << token << " head " << head << " element " << d;
          if (!nan) {
            ASSERT_EQ(std::isinf(world.out_at(token, head, d)), d == 6 && token >= 11);
          }
        }
      }
    }
  }
}

TEST_F(CudaAttention, SplitsKeepADeviceBusyAndAreBounded) {
  EXPECT_EQ(attention_splits(1, 9, 2048, 132), 32U) << "no split has fewer than 64 positions of a full context";
  EXPECT_EQ(attention_splits(1, 32, 131072, 132), 17U) << "four blocks a multiprocessor";
  EXPECT_EQ(attention_splits(1, 1, 1U << 20, 132), kSplitsMax);
  EXPECT_EQ(attention_splits(4, 64, 4096, 132), 3U);
  EXPECT_EQ(attention_splits(256, 32, 4096, 132), 1U);
  EXPECT_EQ(attention_splits(1, 9, 10, 132), 1U);
}

}  // namespace
}  // namespace paramwire::testing
