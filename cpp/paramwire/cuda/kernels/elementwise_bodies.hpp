// Bodies of compute_args.hpp that go element by element or row by row: embedding, norms, rotary, cache, pairs, soft-max, means, casts.
#pragma once

#include "paramwire/cuda/kernels/numbers.hpp"

namespace paramwire::cuda {

// The thread's first element, and how far it is to its next, where a grid's x and blocks share `count` of them.
template <typename Lane>
PARAMWIRE_BODY std::uint64_t first_of_grid(const Lane& lane) {
  return std::uint64_t{lane.block_x()} * lane.threads() + lane.thread();
}
template <typename Lane>
PARAMWIRE_BODY std::uint64_t stride_of_grid(const Lane& lane) {
  return std::uint64_t{lane.blocks_x()} * lane.threads();
}

// ---------------------------------------------------------------- embedding, bias

template <typename Weight, typename Lane>
PARAMWIRE_BODY void embedding_body(const Lane& lane, const EmbeddingArgs& args) {
  const std::uint64_t row = std::uint64_t{args.row_of[lane.block_x()]} * args.width;
  float* out = args.out + std::uint64_t{lane.block_x()} * args.width;
  for (std::uint32_t i = lane.thread(); i < args.width; i += lane.threads()) out[i] = Weight::get(args.rows, row + i);
}

template <typename Weight, typename Lane>
PARAMWIRE_BODY void bias_body(const Lane& lane, const BiasArgs& args) {
  float* out = args.out + lane.block_y() * args.out_stride;
  for (std::uint64_t i = first_of_grid(lane); i < args.rows; i += stride_of_grid(lane)) out[i] = Weight::get(args.bias, i);
}

// ---------------------------------------------------------------- norms: a block a token

// The row's s: x, or x + add, which then goes to sum. A thread reads again what it wrote itself, so no barrier is needed.
template <typename Lane>
PARAMWIRE_BODY const float* norm_input(const Lane& lane, const NormArgs& args, std::uint64_t row) {
  if (args.add == nullptr) return args.x + row;
  for (std::uint32_t i = lane.thread(); i < args.width; i += lane.threads()) args.sum[row + i] = args.x[row + i] + args.add[row + i];
  return args.sum + row;
}

template <typename Lane>
PARAMWIRE_BODY void norm_store(const Lane&, const NormArgs& args, std::uint64_t at, float value) {
  if (args.out != nullptr) args.out[at] = value;
  if (args.half != Half::kNone) store_half(args.out16, at, args.half, value);
}

template <typename Weight, typename Lane>
PARAMWIRE_BODY void rms_norm_body(const Lane& lane, const NormArgs& args) {
  const std::uint64_t row = std::uint64_t{lane.block_x()} * args.width;
  const float* s = norm_input(lane, args, row);
  float squares = 0;
  for (std::uint32_t i = lane.thread(); i < args.width; i += lane.threads()) squares += s[i] * s[i];
  squares = block_sum(lane, squares, lane.template shared<float>());
  const float scale = 1.0F / sqrtf(squares / static_cast<float>(args.width) + args.epsilon);
  for (std::uint32_t i = lane.thread(); i < args.width; i += lane.threads()) {
    norm_store(lane, args, row + i, s[i] * scale * Weight::get(args.weight, i));
  }
}

template <typename Weight, typename Lane>
PARAMWIRE_BODY void layer_norm_body(const Lane& lane, const NormArgs& args) {
  float* scratch = lane.template shared<float>();
  const std::uint64_t row = std::uint64_t{lane.block_x()} * args.width;
  const float* s = norm_input(lane, args, row);
  float sum = 0;
  for (std::uint32_t i = lane.thread(); i < args.width; i += lane.threads()) sum += s[i];
  const float mean = block_sum(lane, sum, scratch) / static_cast<float>(args.width);
  float squares = 0;
  for (std::uint32_t i = lane.thread(); i < args.width; i += lane.threads()) squares += (s[i] - mean) * (s[i] - mean);
  squares = block_sum(lane, squares, scratch + kWarp);
  const float scale = 1.0F / sqrtf(squares / static_cast<float>(args.width) + args.epsilon);
  for (std::uint32_t i = lane.thread(); i < args.width; i += lane.threads()) {
    const float bias = args.bias != nullptr ? Weight::get(args.bias, i) : 0.0F;
    norm_store(lane, args, row + i, (s[i] - mean) * scale * Weight::get(args.weight, i) + bias);
  }
}

template <typename Lane>
PARAMWIRE_BODY void normalise_body(const Lane& lane, const NormaliseArgs& args) {
  const std::uint64_t row = std::uint64_t{lane.block_x()} * args.width;
  float squares = 0;
  for (std::uint32_t i = lane.thread(); i < args.width; i += lane.threads()) squares += args.x[row + i] * args.x[row + i];
  squares = block_sum(lane, squares, lane.template shared<float>());
  const float scale = 1.0F / fmaxf(sqrtf(squares), args.epsilon);
  for (std::uint32_t i = lane.thread(); i < args.width; i += lane.threads()) args.out[row + i] = args.x[row + i] * scale;
}

// A thread a column: neighbours read neighbours, row after row.
template <typename Lane>
PARAMWIRE_BODY void mean_body(const Lane& lane, const MeanArgs& args) {
  for (std::uint64_t column = first_of_grid(lane); column < args.width; column += stride_of_grid(lane)) {
    float sum = 0;
    PARAMWIRE_UNROLL(4)
    for (std::uint32_t row = 0; row < args.rows; ++row) sum += args.x[std::uint64_t{row} * args.width + column];
    args.out[column] = sum / static_cast<float>(args.rows);
  }
}

template <typename Lane>
PARAMWIRE_BODY void softmax_body(const Lane& lane, const SoftmaxArgs& args) {
  float* scratch = lane.template shared<float>();
  const std::uint64_t row = std::uint64_t{lane.block_x()} * args.width;
  float most = -INFINITY;
  for (std::uint32_t i = lane.thread(); i < args.width; i += lane.threads()) most = fmaxf(most, args.x[row + i]);
  most = block_max(lane, most, scratch);
  float sum = 0;
  for (std::uint32_t i = lane.thread(); i < args.width; i += lane.threads()) {
    const float value = expf(args.x[row + i] - most);
    args.out[row + i] = value;
    sum += value;
  }
  const float scale = 1.0F / block_sum(lane, sum, scratch + kWarp);
  for (std::uint32_t i = lane.thread(); i < args.width; i += lane.threads()) args.out[row + i] *= scale;
}

// ---------------------------------------------------------------- rotary, cache

// Cosine and sine of `angle` >= 0 in double, without the tables in local memory of the library's large-argument path.
//
// Reduction by pi / 2 in two parts: the first 33 bits of it, so that its product with a quadrant below 2^20 is exact, and the rest
// (fdlibm, e_rem_pio2.c). Then Taylor's series within pi / 4: what is left out is below 1e-13.
struct Turn {
  double cosine, sine;
};
PARAMWIRE_BODY Turn turn_of(double angle) {
  constexpr double kTwoOverPi = 6.36619772367581382433e-01, kHalfPi = 1.57079632673412561417e+00, kHalfPiRest = 6.07710050650619224932e-11;
  const double quadrants = floor(angle * kTwoOverPi + 0.5);
  const double x = (angle - quadrants * kHalfPi) - quadrants * kHalfPiRest;
  const double z = x * x;
  const double sine =
      x * (1 - z / 6 * (1 - z / 20 * (1 - z / 42 * (1 - z / 72 * (1 - z / 110 * (1 - z / 156))))));
  const double cosine = 1 - z / 2 * (1 - z / 12 * (1 - z / 30 * (1 - z / 56 * (1 - z / 90 * (1 - z / 132 * (1 - z / 182))))));
  switch (static_cast<std::uint64_t>(quadrants) & 3) {
    case 0: return {cosine, sine};
    case 1: return {-sine, cosine};
    case 2: return {-cosine, -sine};
    default: return {sine, -cosine};
  }
}

template <typename Lane>
PARAMWIRE_BODY void rotary_table_body(const Lane& lane, const RotaryTableArgs& args) {
  const std::uint64_t position = std::uint64_t{args.state->position} + lane.block_y();
  const std::uint64_t row = std::uint64_t{lane.block_y()} * args.pairs;
  for (std::uint64_t pair = first_of_grid(lane); pair < args.pairs; pair += stride_of_grid(lane)) {
    const Turn turn = turn_of(static_cast<double>(position) * args.turns[pair]);
    args.cosines[row + pair] = static_cast<float>(turn.cosine);
    args.sines[row + pair] = static_cast<float>(turn.sine);
  }
}

// Work items of a token: of each head its pairs, then the elements behind them, which stay as they are. An item reads and writes its own
// elements alone, so out may be x.
template <typename Lane>
PARAMWIRE_BODY void rotary_body(const Lane& lane, const RotaryArgs& args) {
  const std::uint32_t items = args.head_size - args.pairs;
  const float* cosines = args.cosines + std::uint64_t{lane.block_y()} * args.pairs;
  const float* sines = args.sines + std::uint64_t{lane.block_y()} * args.pairs;
  const std::uint64_t row = std::uint64_t{lane.block_y()} * args.heads * args.head_size;
  for (std::uint64_t at = first_of_grid(lane); at < std::uint64_t{args.heads} * items; at += stride_of_grid(lane)) {
    const std::uint64_t head = row + at / items * args.head_size;
    const auto item = static_cast<std::uint32_t>(at % items);
    if (item >= args.pairs) {
      const std::uint64_t kept = head + item + args.pairs;
      args.out[kept] = args.x[kept];
      continue;
    }
    const std::uint64_t first = args.interleaved != 0 ? head + 2 * item : head + item;
    const std::uint64_t second = args.interleaved != 0 ? first + 1 : first + args.pairs;
    const float a = args.x[first], b = args.x[second], cosine = cosines[item], sine = sines[item];
    args.out[first] = a * cosine - b * sine;
    args.out[second] = a * sine + b * cosine;
  }
}

// A position that the cache has no place for is dropped: the backend never asks for one.
template <typename Lane>
PARAMWIRE_BODY void cache_write_body(const Lane& lane, const CacheWriteArgs& args) {
  const std::uint64_t position = std::uint64_t{args.state->position} + lane.block_y();
  if (position >= args.context) return;
  const std::uint64_t width = std::uint64_t{args.kv_heads} * args.head_size;
  const std::uint64_t row = lane.block_y() * width;
  for (std::uint64_t i = first_of_grid(lane); i < width; i += stride_of_grid(lane)) {
    const std::uint64_t at = (i / args.head_size * args.context + position) * args.head_size + i % args.head_size;
    args.keys[at] = args.key[row + i];
    args.values[at] = args.value[row + i];
  }
}

// ---------------------------------------------------------------- pairs: four elements a thread

struct Add {
  static constexpr bool kTwo = true;
  PARAMWIRE_BODY static float of(float left, float right) { return left + right; }
};
struct SwiGlu {
  static constexpr bool kTwo = true;
  PARAMWIRE_BODY static float of(float gate, float up) { return gate / (1.0F + expf(-gate)) * up; }
};
struct GeluExact {
  static constexpr bool kTwo = false;
  PARAMWIRE_BODY static float of(float x, float) { return 0.5F * x * (1.0F + erff(x * 0.707106781186547524F)); }
};
struct GeluTanh {
  static constexpr bool kTwo = false;
  PARAMWIRE_BODY static float of(float x, float) { return 0.5F * x * (1.0F + tanhf(0.797884560802865356F * (x + 0.044715F * x * x * x))); }
};

template <typename Operation, typename Lane>
PARAMWIRE_BODY void pair_body(const Lane& lane, const PairArgs& args) {
  const bool packed = aligned_to(args.left, 16) && (!Operation::kTwo || aligned_to(args.right, 16)) && aligned_to(args.out, 16) &&
                      aligned_to(args.out16, 8);
  const std::uint64_t packs = packed ? args.count / 4 : 0;
  for (std::uint64_t i = first_of_grid(lane); i < packs; i += stride_of_grid(lane)) {
    const Floats4 left = load_floats(args.left + 4 * i);
    Floats4 right = left;
    if constexpr (Operation::kTwo) right = load_floats(args.right + 4 * i);
    const Floats4 out = {Operation::of(left.a, right.a), Operation::of(left.b, right.b), Operation::of(left.c, right.c),
                         Operation::of(left.d, right.d)};
    if (args.out != nullptr) store_floats(args.out + 4 * i, out);
    if (args.half != Half::kNone) static_cast<HalfPack*>(args.out16)[i] = narrow_four(args.half, out);
  }
  for (std::uint64_t i = 4 * packs + first_of_grid(lane); i < args.count; i += stride_of_grid(lane)) {
    float right = 0;
    if constexpr (Operation::kTwo) right = args.right[i];
    const float out = Operation::of(args.left[i], right);
    if (args.out != nullptr) args.out[i] = out;
    if (args.half != Half::kNone) store_half(args.out16, i, args.half, out);
  }
}

// ---------------------------------------------------------------- casts: eight elements a thread

// One element, and whether it was a finite value that rounds beyond the largest.
struct Narrowed {
  std::uint32_t bits;
  std::uint32_t overflowed;
};
PARAMWIRE_BODY Narrowed narrow_counted(const CastArgs& args, std::uint32_t bits) {
  const bool f16 = args.half == Half::kF16;
  const std::uint32_t size = bits & 0x7fffffff;
  const bool over = size >= (f16 ? 0x477ff000U : 0x7f7f8000U) && size < kF32InfinityBits;
  if (over && args.saturate != 0) bits = (bits & 0x80000000) | (f16 ? 0x477fe000U : 0x7f7f0000U);
  return {narrow(args.half, bits), over ? 1U : 0U};
}

template <typename Lane>
PARAMWIRE_BODY void narrow_body(const Lane& lane, const CastArgs& args) {
  const auto* x = static_cast<const std::uint32_t*>(args.x);
  std::uint32_t over = 0;
  const auto two = [&](std::uint32_t low, std::uint32_t high) {
    const Narrowed first = narrow_counted(args, low), second = narrow_counted(args, high);
    over += first.overflowed + second.overflowed;
    return first.bits | second.bits << 16;
  };
  const std::uint64_t packs = aligned_to(args.x, 16) && aligned_to(args.out, 16) ? args.count / 8 : 0;
  for (std::uint64_t i = first_of_grid(lane); i < packs; i += stride_of_grid(lane)) {
    const Pack low = load_pack(x + 8 * i), high = load_pack(x + 8 * i + 4);
    store_pack(static_cast<Pack*>(args.out) + i, {two(low.a, low.b), two(low.c, low.d), two(high.a, high.b), two(high.c, high.d)});
  }
  for (std::uint64_t i = 8 * packs + first_of_grid(lane); i < args.count; i += stride_of_grid(lane)) {
    const Narrowed one = narrow_counted(args, x[i]);
    over += one.overflowed;
    static_cast<std::uint16_t*>(args.out)[i] = static_cast<std::uint16_t>(one.bits);
  }
  if (over != 0 && args.overflowed != nullptr) lane.atomic_add(args.overflowed, over);
}

template <Half kFrom, typename Lane>
PARAMWIRE_BODY void widen_body(const Lane& lane, const CastArgs& args) {
  const auto one = [](std::uint32_t bits) { return kFrom == Half::kF16 ? widen_f16_bits(bits) : widen_bf16_bits(bits); };
  auto* out = static_cast<std::uint32_t*>(args.out);
  const std::uint64_t packs = aligned_to(args.x, 16) && aligned_to(args.out, 16) ? args.count / 8 : 0;
  for (std::uint64_t i = first_of_grid(lane); i < packs; i += stride_of_grid(lane)) {
    const Pack in = load_pack(static_cast<const Pack*>(args.x) + i);
    store_pack(out + 8 * i, {one(in.a & 0xffff), one(in.a >> 16), one(in.b & 0xffff), one(in.b >> 16)});
    store_pack(out + 8 * i + 4, {one(in.c & 0xffff), one(in.c >> 16), one(in.d & 0xffff), one(in.d >> 16)});
  }
  for (std::uint64_t i = 8 * packs + first_of_grid(lane); i < args.count; i += stride_of_grid(lane)) {
    out[i] = one(static_cast<const std::uint16_t*>(args.x)[i]);
  }
}

}  // namespace paramwire::cuda
