// How many blocks of how many threads each kernel gets: pure functions of its arguments, for host code alone.
#include "paramwire/cuda/kernels/attention_bodies.hpp"
#include "paramwire/cuda/kernels/compute_args.hpp"
#include "paramwire/cuda/kernels/crc_bodies.hpp"
#include "paramwire/cuda/kernels/expert_bodies.hpp"
#include "paramwire/cuda/kernels/gemv_bodies.hpp"

#include <algorithm>

namespace paramwire::cuda {

namespace {

// Threads of blocks that share an array element by element.
constexpr std::uint32_t kThreads = 256;
// Blocks of such a grid; beyond it a thread takes several elements. 8 blocks of 256 fill a multiprocessor of 2048 threads, of 132 (H100,
// H200) to 160 (B200) that a device has, and twice that evens out who ends last.
constexpr std::uint64_t kBlocksMax = 2560;

std::uint32_t blocks_for(std::uint64_t items, std::uint64_t per_block) {
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>((items + per_block - 1) / per_block, 1, kBlocksMax));
}
// Of a block that goes over a row: one for four elements.
std::uint32_t row_threads(std::uint32_t width) { return std::clamp((width / 4 + kWarp - 1) / kWarp * kWarp, kWarp, std::uint32_t{512}); }
// A grid of no blocks is refused by the driver: who has nothing to do launches nothing, or a block that finds nothing.
std::uint32_t at_least_one(std::uint32_t count) { return std::max(count, std::uint32_t{1}); }

constexpr std::uint32_t kSums = 2 * kWarp * sizeof(float);  // scratch of two block-wide sums

}  // namespace

Launch embedding_launch(const EmbeddingArgs& args) {
  return {.blocks = {at_least_one(args.tokens), 1, 1}, .threads = row_threads(args.width), .shared_bytes = 0};
}

Launch norm_launch(const NormArgs& args) {
  return {.blocks = {at_least_one(args.tokens), 1, 1}, .threads = row_threads(args.width), .shared_bytes = kSums};
}

Launch rotary_table_launch(const RotaryTableArgs& args) {
  return {.blocks = {blocks_for(args.pairs, 64), at_least_one(args.tokens), 1}, .threads = 64, .shared_bytes = 0};
}

Launch rotary_launch(const RotaryArgs& args) {
  const std::uint64_t items = std::uint64_t{args.heads} * (args.head_size - args.pairs);
  return {.blocks = {blocks_for(items, kThreads), at_least_one(args.tokens), 1}, .threads = kThreads, .shared_bytes = 0};
}

Launch cache_write_launch(const CacheWriteArgs& args) {
  const std::uint64_t width = std::uint64_t{args.kv_heads} * args.head_size;
  return {.blocks = {blocks_for(width, kThreads), at_least_one(args.tokens), 1}, .threads = kThreads, .shared_bytes = 0};
}

std::uint32_t attention_splits(std::uint32_t tokens, std::uint32_t heads, std::uint32_t context, std::uint32_t multiprocessors) {
  const std::uint64_t rows = std::max<std::uint64_t>(std::uint64_t{tokens} * heads, 1);
  const std::uint64_t wanted = (std::uint64_t{4} * multiprocessors + rows - 1) / rows;
  const std::uint64_t useful = std::min<std::uint64_t>(kSplitsMax, (std::uint64_t{context} + kSplitPositions - 1) / kSplitPositions);
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(wanted, 1, std::max<std::uint64_t>(useful, 1)));
}

std::uint64_t attention_partial_floats(std::uint32_t tokens, std::uint32_t heads, std::uint32_t splits, std::uint32_t head_size) {
  return std::uint64_t{tokens} * heads * splits * (std::uint64_t{head_size} + 2);
}

Launch attention_split_launch(const AttentionArgs& args) {
  const bool packed = attention_packed(args);
  const std::uint32_t threads = packed ? kSplitThreads : kSplitThreadsUnpacked;
  return {.blocks = {args.splits, args.heads, at_least_one(args.tokens)},
          .threads = threads,
          .shared_bytes = split_shared_floats(threads, args.head_size, packed ? 4 : 1) * std::uint32_t{sizeof(float)}};
}

Launch attention_join_launch(const AttentionArgs& args) {
  const std::uint32_t threads = (args.head_size + kWarp - 1) / kWarp * kWarp;
  return {.blocks = {args.heads, at_least_one(args.tokens), 1}, .threads = threads, .shared_bytes = 0};
}

Launch attention_tile_launch(const AttentionArgs& args) {
  const std::uint32_t queries = tile_queries(args.head_size);
  return {.blocks = {at_least_one((args.tokens + queries - 1) / queries), args.heads, 1},
          .threads = kTileWarps * kWarp,
          .shared_bytes = tile_shared_floats(args.head_size) * std::uint32_t{sizeof(float)}};
}

Launch pair_launch(const PairArgs& args) {
  return {.blocks = {blocks_for(args.count, std::uint64_t{4} * kThreads), 1, 1}, .threads = kThreads, .shared_bytes = 0};
}

Launch softmax_launch(const SoftmaxArgs& args) {
  return {.blocks = {at_least_one(args.rows), 1, 1}, .threads = row_threads(args.width), .shared_bytes = kSums};
}

Launch gemv_launch(const GemvArgs& args) {
  const std::uint32_t rows = kGemvWarps * gemv_rows_per_warp(args);
  return {.blocks = {at_least_one((args.rows + rows - 1) / rows), 1, 1}, .threads = kGemvWarps * kWarp, .shared_bytes = 0};
}

Launch bias_launch(const BiasArgs& args) {
  return {.blocks = {blocks_for(args.rows, kThreads), at_least_one(args.tokens), 1}, .threads = kThreads, .shared_bytes = 0};
}

Launch cast_launch(const CastArgs& args) {
  return {.blocks = {blocks_for(args.count, std::uint64_t{8} * kThreads), 1, 1}, .threads = kThreads, .shared_bytes = 0};
}

Launch mean_launch(const MeanArgs& args) {
  return {.blocks = {blocks_for(args.width, 64), 1, 1}, .threads = 64, .shared_bytes = 0};
}

Launch normalise_launch(const NormaliseArgs& args) {
  return {.blocks = {at_least_one(args.rows), 1, 1}, .threads = row_threads(args.width), .shared_bytes = kSums};
}

Launch top_k_launch(const TopKArgs& args) {
  return {.blocks = {at_least_one(args.tokens), 1, 1}, .threads = kWarp, .shared_bytes = args.experts * std::uint32_t{sizeof(std::uint32_t)}};
}

Launch expert_launch(const ExpertArgs& args) {
  const std::uint32_t rows = kGemvWarps * expert_rows_per_warp(args);
  const std::uint32_t across = at_least_one((args.rows + rows - 1) / rows), experts = at_least_one(args.experts);
  // An expert's picks are divided over as many blocks as fill the device.
  const std::uint64_t room = std::max<std::uint64_t>(kBlocksMax / (std::uint64_t{across} * experts), 1);
  const std::uint64_t fours = (std::uint64_t{args.picks_max} + kGemvTokensMax - 1) / kGemvTokensMax;
  return {.blocks = {across, experts, at_least_one(static_cast<std::uint32_t>(std::min(room, fours)))}, .threads = kGemvWarps * kWarp, .shared_bytes = 0};
}

Launch expert_sum_launch(const ExpertSumArgs& args) {
  return {.blocks = {blocks_for(args.rows, kThreads), at_least_one(args.tokens), 1}, .threads = kThreads, .shared_bytes = 0};
}

// ---------------------------------------------------------------- integrity and codecs

// Blocks of crc32c_extents: as many as are resident at once on the largest device, each then takes extents in turn and fills its table once.
constexpr std::uint64_t kExtentBlocksMax = 2240;  // 14 of 16 KiB a multiprocessor, 160 of them

Launch crc32c_extents_launch(const Crc32cArgs& args) {
  const std::uint64_t extents = (args.size + args.extent_bytes - 1) / args.extent_bytes;
  return {.blocks = {static_cast<std::uint32_t>(std::clamp<std::uint64_t>(extents, 1, kExtentBlocksMax)), 1, 1},
          .threads = Crc32c::kThreads,
          .shared_bytes = crc_shared_bytes<Crc32c>()};
}

Launch crc64_strips_launch(const Crc64Args& args) {
  const std::uint64_t words = crc_message<Crc64Xz>(args.data, args.size).words;
  const std::uint64_t strip = std::uint64_t{Crc64Xz::kThreads} << crc64_strip_shift(words);
  return {.blocks = {at_least_one(static_cast<std::uint32_t>((words + strip - 1) / strip)), 1, 1},
          .threads = Crc64Xz::kThreads,
          .shared_bytes = crc_shared_bytes<Crc64Xz>()};
}

Launch crc64_join_launch(const Crc64Args&) {
  return {.blocks = {1, 1, 1}, .threads = kThreads, .shared_bytes = kThreads / kWarp * std::uint32_t{sizeof(std::uint64_t)}};
}

Launch merge_launch(const MergeArgs& args) {
  // Pieces of a 64 KiB chunk of float32 have 16384 elements: four blocks of four rounds each.
  return {.blocks = {blocks_for(args.count_max, std::uint64_t{16} * kThreads), std::clamp(args.pieces_count, std::uint32_t{1}, std::uint32_t{65535}), 1},
          .threads = kThreads,
          .shared_bytes = 0};
}

Launch generation_launch(const GenerationArgs&) { return {}; }

Launch xor_launch(const XorArgs& args) {
  return {.blocks = {blocks_for(args.size, std::uint64_t{16} * kThreads), 1, 1}, .threads = kThreads, .shared_bytes = 0};
}

Launch steps_launch(const StepsArgs& args) {
  return {.blocks = {blocks_for(args.count, std::uint64_t{4} * kThreads), 1, 1}, .threads = kThreads, .shared_bytes = 0};
}

Launch sparse_launch(const SparseArgs& args) {
  return {.blocks = {blocks_for(args.count, kThreads), 1, 1}, .threads = kThreads, .shared_bytes = 0};
}

}  // namespace paramwire::cuda
