// Arguments and launches of the compute kernels: what the backend fills in, and the contract of each body (compute_bodies.hpp).
//
// Pointers are device addresses. Activations are float32, row-major, a row a token: [tokens, width]. A weight pointer's type is in the
// kernel's name: _f32, _bf16, _f16. "16": a second output in the dtype of the next matrix product, or nullptr.
//
// Step state: what changes from step to step lies in device memory, so that a captured graph can be replayed at any position. `tokens` is
// also an argument where it shapes the grid: a graph is captured for one number of tokens.
#pragma once

#include <cstdint>

namespace paramwire::cuda {

struct StepState {
  std::uint32_t position;  // of the step's first token
  std::uint32_t tokens;    // of the step
  std::uint32_t generation;  // of the weights that stay, which the step must meet: GenerationArgs
  std::uint32_t met;         // another that it met, or kNoGeneration
};
inline constexpr std::uint32_t kNoGeneration = 0xffffffff;

enum class Half : std::uint32_t { kNone = 0, kBF16 = 1, kF16 = 2 };  // what out16 holds; kNone: there is none

// Geometry of one launch; all block dimensions are x, a multiple of 32.
struct Launch {
  std::uint32_t blocks[3] = {1, 1, 1};
  std::uint32_t threads = 32;
  std::uint32_t shared_bytes = 0;
};

// embedding_<w>: out[t] = row_of[t] row of `rows`, widened.
struct EmbeddingArgs {
  const void* rows;              // packed rows that were fetched, [any, width]
  const std::uint32_t* row_of;   // [tokens]: index into `rows`
  float* out;                    // [tokens, width]
  std::uint32_t tokens, width;
};
Launch embedding_launch(const EmbeddingArgs& args);

// Sizes may be any, zero too; pointers of weights and activations are aligned to their elements. Kernels take 16 bytes at a time where the
// pointers that they are given, and the distance from row to row, are multiples of that, and elements where not.

// rms_norm_<w>: s = x (+ add); out = s / sqrt(mean(s^2) + epsilon) * weight. Sums of squares in float32 by the block's tree.
struct NormArgs {
  const float* x;         // [tokens, width]
  const float* add;       // or nullptr: a residual, [tokens, width]
  float* sum;             // where s goes when add is given, may be x; else unused
  const void* weight;     // [width]
  const void* bias;       // layer_norm only, may be nullptr; the dtype of weight
  float* out;             // [tokens, width], or nullptr when only out16 is wanted; may be x
  void* out16;
  Half half;
  std::uint32_t tokens, width;
  float epsilon;
};
// layer_norm_<w>: s = x (+ add); out = (s - mean) / sqrt(variance + epsilon) * weight + bias; variance of the population, of s - mean.
Launch norm_launch(const NormArgs& args);

// rotary_table: cosines and sines of every token of the step, [tokens][pairs], computed in double: off by half a unit in the last place of
// float32 for angles below 2^20 radians.
struct RotaryTableArgs {
  const StepState* state;
  const double* turns;  // [pairs]: radians a position
  float* cosines;
  float* sines;
  std::uint32_t tokens, pairs;
};
Launch rotary_table_launch(const RotaryTableArgs& args);

// rotary: as OpKind::kRotary. out may be x.
struct RotaryArgs {
  const float* x;
  float* out;
  const float* cosines;
  const float* sines;
  std::uint32_t tokens, heads, head_size, pairs;  // rotary_size is 2 * pairs
  std::uint32_t interleaved;                      // 1: pairs are (2 i, 2 i + 1); 0: (i, i + pairs)
};
Launch rotary_launch(const RotaryArgs& args);

// cache_write: keys and values of the step's tokens into their place, [kv_heads][context][head_size] each.
struct CacheWriteArgs {
  const StepState* state;
  const float* key;      // [tokens, kv_heads * head_size]
  const float* value;
  float* keys;
  float* values;
  std::uint32_t tokens, kv_heads, head_size, context;
};
Launch cache_write_launch(const CacheWriteArgs& args);

// attention: softmax(q k / sqrt(head_size)) v over the cache, or, where it is bidirectional, over the step's own keys and values.
struct AttentionArgs {
  const StepState* state;
  const float* query;    // [tokens, heads * head_size]
  const float* keys;     // causal: the cache, [kv_heads][context][head_size]; bidirectional: [tokens, kv_heads * head_size]
  const float* values;
  float* out;            // [tokens, heads * head_size]
  void* out16;
  Half half;
  float* partial;        // attention_split only: [tokens][heads][splits][head_size + 2]
  std::uint32_t tokens, heads, kv_heads, head_size, context;
  std::uint32_t splits;  // attention_split: over how many blocks a head's positions are divided
  std::uint32_t causal;
  float scale;
};
// Few tokens (decode): blocks of (split, head, token); each leaves its maximum, sum and unscaled mix in `partial`; a block whose positions are
// not there yet leaves an empty one. attention_join adds them up. The grid does not depend on the position.
// splits: what attention_splits() says.
Launch attention_split_launch(const AttentionArgs& args);
Launch attention_join_launch(const AttentionArgs& args);
// Many tokens (prefill): blocks of (query tile, head), keys tile by tile through shared memory, one pass.
Launch attention_tile_launch(const AttentionArgs& args);
inline constexpr std::uint32_t kHeadSizeMax = 256;  // of the attention kernels
// How many blocks a head's positions are divided over, so that a device with `multiprocessors` is busy: each has four of them, and at least
// kSplitPositions of a full context.
inline constexpr std::uint32_t kSplitPositions = 64;
inline constexpr std::uint32_t kSplitsMax = 64;
std::uint32_t attention_splits(std::uint32_t tokens, std::uint32_t heads, std::uint32_t context, std::uint32_t multiprocessors);
// Floats of AttentionArgs::partial.
std::uint64_t attention_partial_floats(std::uint32_t tokens, std::uint32_t heads, std::uint32_t splits, std::uint32_t head_size);

// swiglu: out = silu(gate) * up.   add: out = left + right.   gelu: exact, 0.5 x (1 + erf(x / sqrt 2)); gelu_tanh: its approximation.
struct PairArgs {
  const float* left;   // gate; x of gelu
  const float* right;  // up; unused by gelu
  float* out;          // may be left or right, or nullptr when only out16 is wanted
  void* out16;
  Half half;
  std::uint64_t count;
};
Launch pair_launch(const PairArgs& args);

// softmax: along the width, stable. out may be x.
struct SoftmaxArgs {
  const float* x;
  float* out;
  std::uint32_t rows, width;
};
Launch softmax_launch(const SoftmaxArgs& args);

// gemv_<w>: out[t * out_stride + r] (+)= sum over c of weight[r][c] * x[t * x_stride + c], for up to kGemvTokensMax tokens: what a decode step
// does, bound by reading the weights once. A warp a row; 16-byte loads where weight and columns allow, element by element where not.
struct GemvArgs {
  const void* weight;    // [rows, columns]
  const float* x;
  float* out;
  const void* bias;      // [rows] of the weight's dtype, or nullptr
  std::uint32_t rows, columns, tokens;
  std::uint64_t x_stride, out_stride;  // elements
  std::uint32_t accumulate;            // 1: adds to out
};
inline constexpr std::uint32_t kGemvTokensMax = 4;
Launch gemv_launch(const GemvArgs& args);

// bias_<w>: out[t][r] = bias[r], what a matrix product then adds to.
struct BiasArgs {
  const void* bias;
  float* out;
  std::uint32_t tokens, rows;
  std::uint64_t out_stride;
};
Launch bias_launch(const BiasArgs& args);

// narrow: float32 to out16 of `half`, to nearest, ties to even (as codec/cast). widen_<w>: to float32.
// A NaN stays one, quiet, with the top of its payload.
struct CastArgs {
  const void* x;
  void* out;
  Half half;  // narrow only
  std::uint64_t count;
  std::uint32_t saturate = 0;           // narrow only; 1: finite values beyond the largest one become it, instead of infinity
  std::uint32_t* overflowed = nullptr;  // narrow only: how many such values there were is added here, modulo 2^32
};
Launch cast_launch(const CastArgs& args);

// mean: out = the mean of all rows of x, in float32 by columns.
struct MeanArgs {
  const float* x;  // [rows, width]
  float* out;      // [width]
  std::uint32_t rows, width;
};
Launch mean_launch(const MeanArgs& args);

// normalise: out = x / max(|x|, epsilon), |x| the Euclidean length of a row. out may be x.
struct NormaliseArgs {
  const float* x;
  float* out;
  std::uint32_t rows, width;
  float epsilon;
};
Launch normalise_launch(const NormaliseArgs& args);

// top_k: as OpKind::kTopK: of each row of scores the k largest, ties to the lower index, NaN behind all others, as soft-max weights over
// those k (or over all).
struct TopKArgs {
  const float* scores;    // [tokens, experts]
  float* routing;         // [tokens, 2 k]: k expert numbers, then k weights, largest first
  std::uint32_t tokens, experts, k;
  std::uint32_t normalise;  // 1: the k weights sum to 1; 0: they are those of a soft-max over all experts
};
inline constexpr std::uint32_t kExpertsMax = 1024;  // scores of a row lie in shared memory
Launch top_k_launch(const TopKArgs& args);

// expert_gemv_<w>: out[p] = W[e] x[p / share] for each pick p = token * k + slot of each expert e. Picks are grouped by expert, so that an expert
// is read once for all tokens that picked it (from the second-level cache, beyond kGemvTokensMax of them).
struct ExpertArgs {
  const void* weights;         // [experts, rows, columns]: what was fetched, packed
  const std::uint32_t* begin;  // [experts + 1]: the picks of expert i are picks[begin[i]] to picks[begin[i + 1] - 1]
  const std::uint32_t* picks;  // each once
  const float* x;              // [tokens, columns], or, a row for each pick, [tokens * k, columns]
  float* out;                  // [tokens * k, rows]
  std::uint32_t experts, rows, columns;
  std::uint32_t share;         // picks to a row of x: k, or 1
  std::uint32_t picks_max;     // of one expert, for the launch: more of them are right, too, and slower
};
Launch expert_launch(const ExpertArgs& args);

// expert_sum: out[t] = the sum over slots j of weight[t][j] * products[t * k + j], slot by slot.
struct ExpertSumArgs {
  const float* products;  // [tokens * k, rows]
  const float* routing;   // [tokens, 2 k]
  float* out;             // [tokens, rows]
  std::uint32_t tokens, k, rows;
};
Launch expert_sum_launch(const ExpertSumArgs& args);

}  // namespace paramwire::cuda
