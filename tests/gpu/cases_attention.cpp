// Cases of attention: by splits and by tiles, causal over a cache and over all of a step.
#include "gpu/case_make.hpp"
#include "gpu/cases.hpp"

#include "paramwire/base/text.hpp"

namespace paramwire::gpu {

using namespace cuda;

namespace {

struct AttentionShape {
  std::uint32_t heads, kv_heads, size, tokens, position;
  bool causal;
  Half half = Half::kNone;
  std::size_t offset = 0;  // bytes
};

// How far two right results may be from each other, for values within [-1, 1].
//
// A score is a dot product of the head's elements in any order, times the scale; every weight is off by its score's error and the maximum's, by exp (2
// units) and by the corrections of the running soft-max, at most one a tile of 16 keys; the sums of weights and mixes add as many terms as there are keys.
double attention_bound(const AttentionShape& it, std::uint32_t context, const std::vector<double>& query, const std::vector<double>& keys) {
  double size = 0;  // largest sum of |q k|
  for (std::uint32_t token = 0; token < it.tokens; ++token) {
    const std::uint32_t seen = it.causal ? it.position + token + 1 : it.tokens;
    for (std::uint32_t head = 0; head < it.heads; ++head) {
      const std::uint32_t kv_head = head / (it.heads / it.kv_heads);
      for (std::uint32_t at = 0; at < seen; ++at) {
        const std::size_t from = (it.causal ? std::size_t{kv_head} * context + at : std::size_t{at} * it.kv_heads + kv_head) * it.size;
        double sum = 0;
        for (std::uint32_t d = 0; d < it.size; ++d) sum += std::abs(query[(std::size_t{token} * it.heads + head) * it.size + d] * keys[from + d]);
        size = std::max(size, sum);
      }
    }
  }
  const double most = size / std::sqrt(static_cast<double>(it.size));  // of a score
  const double count = it.causal ? it.position + it.tokens : it.tokens;
  const double score_error = gamma_of(it.size + 3.0) * most + 2 * kUnit * most;
  const double relative = 2 * score_error + 2 * most * kUnit + gamma_of(4 + 4 * std::ceil(count / 16)) + 2 * gamma_of(count + 8);
  return 2 * 2 * relative;
}

Case attention_case(const AttentionShape& it, std::uint32_t splits) {
  const bool tile = splits == 0;
  const std::uint32_t context = it.causal ? it.position + it.tokens + 3 : 0;
  Case out{.operation = "attention",
           .name = cat("attention by ", tile ? std::string("tiles") : cat(splits, " splits"), ", ", it.heads, "/", it.kv_heads, " heads of ", it.size, ", ", it.tokens, " tokens at ",
                       it.position, it.causal ? "" : ", bidirectional", it.offset != 0 ? ", unaligned" : "")};
  const Dims query_shape = {it.tokens, it.heads, it.size}, key_shape = it.causal ? Dims{it.kv_heads, context, it.size} : Dims{it.tokens, it.kv_heads, it.size};
  std::vector<float> keys = random_floats(product_of(key_shape), it.size + 1, -2, 2), values = random_floats(product_of(key_shape), it.size + 2);
  // What the cache holds behind the step must not matter.
  for (std::uint32_t at = it.position + it.tokens; at < context; ++at) {
    for (std::uint32_t head = 0; head < it.kv_heads; ++head) {
      for (std::uint32_t d = 0; d < it.size; ++d) keys[(std::size_t{head} * context + at) * it.size + d] = values[(std::size_t{head} * context + at) * it.size + d] = kNaN;
    }
  }
  out.buffers.push_back(state_of(it.position, it.tokens));
  out.buffers.push_back(floats_of("query", query_shape, it.size, -2, 2));
  out.buffers.push_back(buffer_of("keys", Type::kF32, key_shape, keys));
  out.buffers.push_back(buffer_of("values", Type::kF32, key_shape, values));
  const double most = attention_bound(it, context, values_of(out.buffers[1]), values_of(out.buffers[2]));
  out.buffers.push_back(output_of("out", Type::kF32, query_shape, most));
  for (CaseBuffer& buffer : out.buffers) buffer.offset = buffer.name == "state" ? 0 : it.offset;
  if (it.half != Half::kNone) out.buffers.push_back(half_output_of(it.half, query_shape, most));
  if (!tile) {
    out.buffers.push_back(output_of("partial", Type::kF32, {attention_partial_floats(it.tokens, it.heads, splits, it.size)}));
    out.buffers.back().role = Role::kScratch;
  }
  out.numbers = {{"position", it.position}, {"causal", it.causal ? 1 : 0}};
  const auto args_of = [=](const Places& at) {
    AttentionArgs args{};
    args.state = at.at<const StepState>("state");
    args.query = at.at<const float>("query");
    args.keys = at.at<const float>("keys");
    args.values = at.at<const float>("values");
    args.out = at.at<float>("out");
    args.out16 = it.half != Half::kNone ? at.at<char>("out16") : nullptr;
    args.half = it.half;
    args.partial = tile ? nullptr : at.at<float>("partial");
    args.tokens = it.tokens;
    args.heads = it.heads;
    args.kv_heads = it.kv_heads;
    args.head_size = it.size;
    args.context = context;
    args.splits = splits;
    args.causal = it.causal ? 1 : 0;
    args.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(it.size)));
    return args;
  };
  if (tile) {
    out.steps.push_back([=](const Places& at) { return bound(Kernel::k_attention_tile, attention_tile_launch(args_of(at)), args_of(at)); });
  } else {
    out.steps.push_back([=](const Places& at) { return bound(Kernel::k_attention_split, attention_split_launch(args_of(at)), args_of(at)); });
    out.steps.push_back([=](const Places& at) { return bound(Kernel::k_attention_join, attention_join_launch(args_of(at)), args_of(at)); });
  }
  return out;
}

}  // namespace

std::vector<Case> attention_cases(const Scale& scale) {
  struct Heads {
    std::uint32_t heads, kv_heads, size;
  };
  std::vector<Case> out;
  std::uint32_t round = 0;
  for (const Heads& it : {Heads{9, 3, 64}, {2, 1, 128}, {4, 4, 32}, {1, 1, 256}, {2, 2, 80}, {3, 1, 6}, {1, 1, 1}, {2, 1, 200}}) {
    const Half half = static_cast<Half>(round % 3);
    const std::size_t offset = round++ % 4 == 3 ? 4 : 0;
    out.push_back(attention_case({it.heads, it.kv_heads, it.size, 1, 0, true, half, offset}, 1));
    out.push_back(attention_case({it.heads, it.kv_heads, it.size, 3, scale.context - 3, true, half, offset}, 3));
    out.push_back(attention_case({it.heads, it.kv_heads, it.size, 5, 40, true, half, offset}, 0));
    out.push_back(attention_case({it.heads, it.kv_heads, it.size, 33, 0, false, half, offset}, 0));
  }
  out.push_back(attention_case({9, 3, 64, 4, scale.context, true}, 8));
  out.push_back(attention_case({9, 3, 64, 50, scale.context / 2, true}, 0));
  return out;
}

}  // namespace paramwire::gpu
