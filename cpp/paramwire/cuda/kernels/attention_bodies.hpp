// Bodies of attention: soft-max in one pass over the keys, its maximum and sum corrected as it goes.
//
// Source of the running soft-max: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867; of tiles:
// T. Dao et al., "FlashAttention", arXiv 2205.14135; of splits: "Flash-Decoding" (its partial results, joined by their maxima).
#pragma once

#include "paramwire/cuda/kernels/numbers.hpp"

namespace paramwire::cuda {

// ---------------------------------------------------------------- what keys there are

PARAMWIRE_BODY std::uint32_t attention_first(const AttentionArgs& args) { return args.causal != 0 ? args.state->position : 0; }
// Keys that exist for token `token` of the step: all before it and itself, or all of the step.
PARAMWIRE_BODY std::uint32_t attention_seen(const AttentionArgs& args, std::uint32_t token) {
  if (args.causal == 0) return args.tokens;
  const std::uint32_t seen = args.state->position + token + 1;
  return seen < args.context ? seen : args.context;
}
// Where the first key (or value) of a head lies, and how far it is to the next.
PARAMWIRE_BODY std::uint64_t attention_base(const AttentionArgs& args, std::uint32_t kv_head) {
  return std::uint64_t{kv_head} * args.head_size * (args.causal != 0 ? args.context : 1);
}
PARAMWIRE_BODY std::uint64_t attention_stride(const AttentionArgs& args) {
  return args.causal != 0 ? args.head_size : std::uint64_t{args.kv_heads} * args.head_size;
}
PARAMWIRE_HOST_BODY bool attention_packed(const AttentionArgs& args) {
  return args.head_size % 4 == 0 && reinterpret_cast<std::uintptr_t>(args.keys) % 16 == 0 && reinterpret_cast<std::uintptr_t>(args.values) % 16 == 0;
}
// exp(score - most), and 0 where there is no score at all, whatever `most` is.
PARAMWIRE_BODY float attention_weight(float score, float most) { return score == -INFINITY ? 0.0F : expf(score - most); }

// ---------------------------------------------------------------- split: a block for some keys of one head and token

// Threads of a block, keys of a round: one a thread.
inline constexpr std::uint32_t kSplitThreads = 128;
inline constexpr std::uint32_t kSplitThreadsUnpacked = 256;  // a thread an element of the largest head
// Lanes that share a key: each takes 16 bytes of it, together two sectors of 64.
inline constexpr std::uint32_t kKeyLanes = 8;

// Shared floats: scratch for sums, the query, a round's scores, and at the end the mixes of the groups.
PARAMWIRE_HOST_BODY std::uint32_t split_shared_floats(std::uint32_t threads, std::uint32_t head_size, std::uint32_t vector) {
  const std::uint32_t query = (head_size + 3) / 4 * 4;
  const std::uint32_t mixes = threads / (query / vector) * query;
  return 2 * kWarp + query + (mixes > threads ? mixes : threads);
}

// The dot products of a warp's next keys: kKeyLanes lanes a key.
template <std::uint32_t kVector, typename Lane>
PARAMWIRE_BODY void split_scores(const Lane& lane, const AttentionArgs& args, const float* query, const float* keys, std::uint64_t stride,
                                 std::uint32_t count, float* scores) {
  const std::uint32_t part = lane.lane_in_warp() % kKeyLanes, group = lane.lane_in_warp() / kKeyLanes;
  constexpr std::uint32_t kPerWarp = kWarp / kKeyLanes;
  PARAMWIRE_UNROLL(2)
  for (std::uint32_t first = lane.warp() * kPerWarp; first < count; first += lane.threads() / kKeyLanes) {
    const std::uint32_t key = first + group;
    const float* at = keys + (key < count ? key : count - 1) * stride;
    float sum = 0;
    if constexpr (kVector == 4) {
      // The whole key of a head of 128 before its sums.
      for (std::uint32_t d = 4 * part; d < args.head_size; d += 16 * kKeyLanes) {
        Floats4 four[4] = {};
        PARAMWIRE_UNROLL(4)
        for (std::uint32_t s = 0; s < 4; ++s) {
          if (d + 4 * s * kKeyLanes < args.head_size) four[s] = load_floats(at + d + 4 * s * kKeyLanes);
        }
        PARAMWIRE_UNROLL(4)
        for (std::uint32_t s = 0; s < 4; ++s) {
          if (d + 4 * s * kKeyLanes < args.head_size) sum = add_dot(sum, four[s], load_floats(query + d + 4 * s * kKeyLanes));
        }
      }
    } else {
      for (std::uint32_t d = part; d < args.head_size; d += kKeyLanes) sum += at[d] * query[d];
    }
    for (unsigned mask = kKeyLanes / 2; mask > 0; mask /= 2) sum += lane.warp_xor(sum, mask);
    if (part == 0 && key < count) scores[key] = sum * args.scale;
  }
}

// kVector elements of a head belong to one thread, and every `groups`-th key of a round.
template <std::uint32_t kVector>
struct Mix {
  float a = 0, b = 0, c = 0, d = 0;
  PARAMWIRE_BODY void scale(float by) {
    a *= by;
    if constexpr (kVector == 4) {
      b *= by;
      c *= by;
      d *= by;
    }
  }
  PARAMWIRE_BODY void add(float weight, const Floats4& v) {
    a += weight * v.a;
    if constexpr (kVector == 4) {
      b += weight * v.b;
      c += weight * v.c;
      d += weight * v.d;
    }
  }
};
template <std::uint32_t kVector>
PARAMWIRE_BODY Floats4 load_slice(const float* at) {
  if constexpr (kVector == 4) return load_floats(at);
  else return {*at, 0, 0, 0};
}

template <std::uint32_t kVector, typename Lane>
PARAMWIRE_BODY void attention_split_vector(const Lane& lane, const AttentionArgs& args) {
  const std::uint32_t token = lane.block_z(), head = lane.block_y(), split = lane.block_x();
  const std::uint32_t size = args.head_size, padded = (size + 3) / 4 * 4;
  const std::uint32_t seen = attention_seen(args, token);
  // Whole rounds of the same warps' keys, so that every split but the last is full.
  const std::uint32_t share = (seen + args.splits - 1) / args.splits;
  const std::uint64_t begin = std::uint64_t{split} * share;
  float* partial = args.partial + ((std::uint64_t{token} * args.heads + head) * args.splits + split) * (size + 2);
  if (begin >= seen) {
    for (std::uint32_t d = lane.thread(); d < size + 2; d += lane.threads()) partial[d] = d == size ? -INFINITY : 0.0F;
    return;  // the whole block
  }
  const auto count = static_cast<std::uint32_t>(seen - begin < share ? seen - begin : share);

  float* scratch = lane.template shared<float>();
  float* query = scratch + 2 * kWarp;
  float* scores = query + padded;
  for (std::uint32_t d = lane.thread(); d < size; d += lane.threads()) query[d] = args.query[(std::uint64_t{token} * args.heads + head) * size + d];
  lane.sync();

  const std::uint64_t stride = attention_stride(args);
  const std::uint64_t base = attention_base(args, head / (args.heads / args.kv_heads)) + begin * stride;
  const float* keys = args.keys + base;
  const float* values = args.values + base;
  const std::uint32_t slices = padded / kVector, groups = lane.threads() / slices;
  const std::uint32_t slice = lane.thread() % slices, group = lane.thread() / slices;
  const bool mixing = group < groups && slice * kVector < size;

  Mix<kVector> mix;
  float most = -INFINITY, sum = 0;
  for (std::uint32_t first = 0; first < count; first += lane.threads()) {
    const std::uint32_t round = count - first < lane.threads() ? count - first : lane.threads();
    split_scores<kVector>(lane, args, query, keys + first * stride, stride, round, scores);
    lane.sync();
    const float score = lane.thread() < round ? scores[lane.thread()] : -INFINITY;
    const float round_most = block_max(lane, score, scratch);
    const float next = fmaxf(most, round_most);
    const float weight = lane.thread() < round ? attention_weight(score, next) : 0.0F;
    const float correction = attention_weight(most, next);
    if (lane.thread() < round) scores[lane.thread()] = weight;
    sum = sum * correction + block_sum(lane, weight, scratch + kWarp);  // its barrier also shows the weights to all
    most = next;
    mix.scale(correction);
    if (mixing) {
      const float* value = values + first * stride + slice * kVector;
      for (std::uint32_t key = group; key < round; key += 4 * groups) {
        Floats4 four[4] = {};
        PARAMWIRE_UNROLL(4)
        for (std::uint32_t s = 0; s < 4; ++s) {
          if (key + s * groups < round) four[s] = load_slice<kVector>(value + (key + s * groups) * stride);
        }
        PARAMWIRE_UNROLL(4)
        for (std::uint32_t s = 0; s < 4; ++s) {
          if (key + s * groups < round) mix.add(scores[key + s * groups], four[s]);
        }
      }
    }
    lane.sync();  // before the next round's scores
  }

  float* mixes = scores;  // [groups][padded]
  if (mixing) {
    float* at = mixes + group * padded + slice * kVector;
    at[0] = mix.a;
    if constexpr (kVector == 4) {
      at[1] = mix.b;
      at[2] = mix.c;
      at[3] = mix.d;
    }
  }
  lane.sync();
  for (std::uint32_t d = lane.thread(); d < size; d += lane.threads()) {
    float total = 0;
    for (std::uint32_t i = 0; i < groups; ++i) total += mixes[i * padded + d];
    partial[d] = total;
  }
  if (lane.thread() == 0) {
    partial[size] = most;
    partial[size + 1] = sum;
  }
}

template <typename Lane>
PARAMWIRE_BODY void attention_split_body(const Lane& lane, const AttentionArgs& args) {
  if (attention_packed(args)) {
    attention_split_vector<4>(lane, args);
  } else {
    attention_split_vector<1>(lane, args);
  }
}

template <typename Lane>
PARAMWIRE_BODY void attention_store(const Lane&, const AttentionArgs& args, std::uint64_t at, float value) {
  if (args.out != nullptr) args.out[at] = value;
  if (args.half != Half::kNone) store_half(args.out16, at, args.half, value);
}

// A block a head and token, a thread an element.
template <typename Lane>
PARAMWIRE_BODY void attention_join_body(const Lane& lane, const AttentionArgs& args) {
  const std::uint32_t size = args.head_size;
  const std::uint64_t row = std::uint64_t{lane.block_y()} * args.heads + lane.block_x();
  const float* partial = args.partial + row * args.splits * (size + 2);
  float most = -INFINITY;
  for (std::uint32_t split = 0; split < args.splits; ++split) most = fmaxf(most, partial[std::uint64_t{split} * (size + 2) + size]);
  for (std::uint32_t d = lane.thread(); d < size; d += lane.threads()) {
    float mix = 0, sum = 0;
    PARAMWIRE_UNROLL(4)
    for (std::uint32_t split = 0; split < args.splits; ++split) {
      const float* at = partial + std::uint64_t{split} * (size + 2);
      const float weight = attention_weight(at[size], most);
      mix += weight * at[d];
      sum += weight * at[size + 1];
    }
    attention_store(lane, args, row * size + d, mix / sum);
  }
}

// ---------------------------------------------------------------- tile: a block for some queries of one head

// Four warps; keys come 32 at a time, one a lane. A warp has kRows queries, a lane of it the elements lane + 32 j of their mixes.
inline constexpr std::uint32_t kTileWarps = 4;
inline constexpr std::uint32_t kTileKeys = kWarp;

// Elements of 32 that heads have at most, and queries of a block: as many as registers and 48 KiB of shared memory allow.
PARAMWIRE_HOST_BODY std::uint32_t tile_queries(std::uint32_t head_size) { return head_size <= 128 ? 32 : 16; }
// A row of a tile: whole vectors of 128 bytes and four floats more, so that lanes that read 16 bytes each of 8 rows meet in no bank.
PARAMWIRE_HOST_BODY std::uint32_t tile_stride(std::uint32_t head_size) { return (head_size + 31) / 32 * 32 + 4; }
PARAMWIRE_HOST_BODY std::uint32_t tile_shared_floats(std::uint32_t head_size) {
  // Above 128 elements keys come 16 at a time: lanes in pairs share one.
  const std::uint32_t keys = head_size <= 128 ? kTileKeys : kTileKeys / 2;
  return (tile_queries(head_size) + keys) * tile_stride(head_size) + tile_queries(head_size) * kTileKeys;
}

// Rows [first, first + rows) of a matrix into shared memory, zeros where there are none and behind a row's end.
template <typename Lane>
PARAMWIRE_BODY void load_tile(const Lane& lane, const float* from, std::uint64_t from_stride, std::uint32_t there, std::uint32_t rows,
                              std::uint32_t size, bool packed, float* tile) {
  const std::uint32_t stride = tile_stride(size), padded = stride - 4;
  if (packed) {
    const std::uint32_t packs = padded / 4;
    for (std::uint32_t first = lane.thread(); first < rows * packs; first += 4 * lane.threads()) {
      Floats4 four[4] = {};
      PARAMWIRE_UNROLL(4)
      for (std::uint32_t s = 0; s < 4; ++s) {
        const std::uint32_t i = first + s * lane.threads(), row = i / packs, d = i % packs * 4;
        if (row < there && d < size) four[s] = load_floats(from + row * from_stride + d);
      }
      PARAMWIRE_UNROLL(4)
      for (std::uint32_t s = 0; s < 4; ++s) {
        const std::uint32_t i = first + s * lane.threads();
        if (i < rows * packs) store_floats(tile + i / packs * stride + i % packs * 4, four[s]);
      }
    }
    return;
  }
  for (std::uint32_t i = lane.thread(); i < rows * padded; i += lane.threads()) {
    const std::uint32_t row = i / padded, d = i % padded;
    tile[row * stride + d] = row < there && d < size ? from[row * from_stride + d] : 0.0F;
  }
}

// kRows queries a warp, kParts elements of each mix a lane, kShare lanes a key.
template <std::uint32_t kRows, std::uint32_t kParts, std::uint32_t kShare, typename Lane>
PARAMWIRE_BODY void attention_tile_sized(const Lane& lane, const AttentionArgs& args) {
  constexpr std::uint32_t kQueries = kRows * kTileWarps, kKeys = kTileKeys / kShare;
  const std::uint32_t size = args.head_size, stride = tile_stride(size), head = lane.block_y();
  const std::uint32_t first_query = lane.block_x() * kQueries;
  const std::uint32_t queries = args.tokens - first_query < kQueries ? args.tokens - first_query : kQueries;
  const std::uint64_t width = std::uint64_t{args.heads} * size;
  const std::uint64_t base = attention_base(args, head / (args.heads / args.kv_heads)), key_stride = attention_stride(args);
  const bool packed = attention_packed(args);

  float* query_tile = lane.template shared<float>();
  float* tile = query_tile + kQueries * stride;  // keys, then values
  float* weights = tile + kKeys * stride;        // [kQueries][kTileKeys]
  const float* query = args.query + first_query * width + std::uint64_t{head} * size;
  load_tile(lane, query, width, queries, kQueries, size, size % 4 == 0 && aligned_to(query, 16), query_tile);

  const std::uint32_t lane_key = lane.lane_in_warp() / kShare, share = lane.lane_in_warp() % kShare, row = lane.warp() * kRows;
  const std::uint32_t first = attention_first(args);
  float mix[kRows][kParts] = {}, most[kRows], sum[kRows] = {};
  PARAMWIRE_UNROLL(8)
  for (std::uint32_t r = 0; r < kRows; ++r) most[r] = -INFINITY;

  const std::uint32_t seen = attention_seen(args, first_query + queries - 1);
  for (std::uint32_t first_key = 0; first_key < seen; first_key += kKeys) {
    const std::uint32_t keys = seen - first_key < kKeys ? seen - first_key : kKeys;
    lane.sync();  // the last round's values are read
    load_tile(lane, args.keys + base + first_key * key_stride, key_stride, keys, kKeys, size, packed, tile);
    lane.sync();
    float score[kRows] = {};
    for (std::uint32_t d = 4 * share; d < stride - 4; d += 4 * kShare) {
      const Floats4 key = load_floats(tile + lane_key * stride + d);
      PARAMWIRE_UNROLL(8)
      for (std::uint32_t r = 0; r < kRows; ++r) score[r] = add_dot(score[r], key, load_floats(query_tile + (row + r) * stride + d));
    }
    PARAMWIRE_UNROLL(8)
    for (std::uint32_t r = 0; r < kRows; ++r) {
      if constexpr (kShare == 2) score[r] += lane.warp_xor(score[r], 1);
      const std::uint32_t key = first_key + lane_key, at = first_query + row + r;
      const bool visible = lane_key < keys && at < args.tokens && (args.causal == 0 || key <= first + at);
      score[r] = visible ? score[r] * args.scale : -INFINITY;
      const float next = fmaxf(most[r], lane.warp_max(score[r]));
      const float weight = share == 0 ? attention_weight(score[r], next) : 0.0F;
      const float correction = attention_weight(most[r], next);
      sum[r] = sum[r] * correction + lane.warp_sum(weight);
      most[r] = next;
      if (share == 0) weights[(row + r) * kTileKeys + lane_key] = weight;
      PARAMWIRE_UNROLL(8)
      for (std::uint32_t j = 0; j < kParts; ++j) mix[r][j] *= correction;
    }
    lane.sync();
    load_tile(lane, args.values + base + first_key * key_stride, key_stride, keys, kKeys, size, packed, tile);
    lane.sync();
    // Where a key is hidden from some of the queries, its weight 0 must not meet a value that is no number.
    const bool hides = args.causal != 0 && first_key + kKeys > first + first_query + 1;
    for (std::uint32_t key = 0; key < kKeys; ++key) {
      float value[kParts];
      PARAMWIRE_UNROLL(8)
      for (std::uint32_t j = 0; j < kParts; ++j) {
        const std::uint32_t d = lane.lane_in_warp() + kWarp * j;
        value[j] = d < stride - 4 ? tile[key * stride + d] : 0.0F;
      }
      PARAMWIRE_UNROLL(8)
      for (std::uint32_t r = 0; r < kRows; ++r) {
        const float weight = weights[(row + r) * kTileKeys + key];
        if (hides && weight == 0.0F) continue;  // the same for the whole warp
        PARAMWIRE_UNROLL(8)
        for (std::uint32_t j = 0; j < kParts; ++j) mix[r][j] += weight * value[j];
      }
    }
  }

  PARAMWIRE_UNROLL(8)
  for (std::uint32_t r = 0; r < kRows; ++r) {
    if (row + r >= queries) continue;
    PARAMWIRE_UNROLL(8)
    for (std::uint32_t j = 0; j < kParts; ++j) {
      const std::uint32_t d = lane.lane_in_warp() + kWarp * j;
      if (d < size) attention_store(lane, args, (first_query + row + r) * width + std::uint64_t{head} * size + d, mix[r][j] / sum[r]);
    }
  }
}

template <typename Lane>
PARAMWIRE_BODY void attention_tile_body(const Lane& lane, const AttentionArgs& args) {
  if (args.head_size <= 64) {
    attention_tile_sized<8, 2, 1>(lane, args);
  } else if (args.head_size <= 128) {
    attention_tile_sized<8, 4, 1>(lane, args);
  } else {
    attention_tile_sized<4, 8, 2>(lane, args);
  }
}

}  // namespace paramwire::cuda
