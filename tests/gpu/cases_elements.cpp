// Cases of the kernels that go element by element: pairs, casts, rotary, cache.
#include "gpu/case_make.hpp"
#include "gpu/cases.hpp"

#include "paramwire/base/text.hpp"

#include <array>

namespace paramwire::gpu {

using namespace cuda;

namespace {

struct PairKind {
  const char* name;
  Kernel kernel;
  bool two;
  double units;  // of rounding: see cases below
};
// exp, erf and tanh to 2 units in the last place (CUDA C++ Programming Guide, "Mathematical Functions"), and a few operations each.
constexpr PairKind kPairs[] = {{"add", Kernel::k_add, true, 0}, {"swiglu", Kernel::k_swiglu, true, 10}, {"gelu", Kernel::k_gelu, false, 10}, {"gelu_tanh", Kernel::k_gelu_tanh, false, 16}};

Case pair_case(const PairKind& kind, std::uint64_t count, std::size_t offset, Half half, bool nan) {
  Case out{.operation = kind.name, .name = cat(kind.name, " of ", count, offset != 0 ? " unaligned" : "", nan ? ", NaN" : "", half == Half::kNone ? "" : ", halves too")};
  std::vector<float> left = random_floats(count, count, -8, 8);
  if (nan && count > 6) left[2] = kNaN, left[5] = kInf;
  out.buffers.push_back(buffer_of("left", Type::kF32, {count}, left));
  out.buffers.back().offset = offset;
  if (kind.two) out.buffers.push_back(floats_of("right", {count}, count + 1, -2, 2));
  CaseBuffer result = output_of("out", Type::kF32, {count}, 0, 2 * kind.units * kUnit);
  if (!kind.two) {
    // The terms of 1 + erf and 1 + tanh may cancel: the bound is of x, not of the result.
    for (const float x : left) result.bounds.push_back(2 * kind.units * kUnit * std::abs(static_cast<double>(x)));
  }
  out.buffers.push_back(std::move(result));
  if (half != Half::kNone) {
    CaseBuffer second = half_output_of(half, {count}, 2 * kind.units * kUnit * (kind.two ? 0 : 8));
    second.offset = offset / 2;
    out.buffers.push_back(std::move(second));
  }
  out.steps.push_back([=](const Places& at) {
    const PairArgs args{.left = at.at<const float>("left"), .right = kind.two ? at.at<const float>("right") : nullptr, .out = at.at<float>("out"),
                        .out16 = half != Half::kNone ? at.at<char>("out16") : nullptr, .half = half, .count = count};
    return bound(kind.kernel, pair_launch(args), args);
  });
  return out;
}

DType dtype_of(Half half) { return half == Half::kF16 ? DType::kF16 : DType::kBF16; }

// Any bits, those around every half, where rounding decides, and what overflows.
std::vector<std::uint32_t> hard_floats(std::uint64_t count, Half half) {
  std::mt19937_64 random(count);
  std::vector<std::uint32_t> out(count);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto any = static_cast<std::uint32_t>(random());
    const auto few = static_cast<std::uint16_t>(any);
    const std::uint32_t wide = half == Half::kF16 ? f32_from_f16(few) : f32_from_bf16(few), middle = half == Half::kF16 ? 0x1000 : 0x8000;
    out[i] = i % 3 == 0 ? any : wide + (any >> 16) % 5 - 2 + ((any >> 24 & 1) != 0 ? middle : 0U);
  }
  return out;
}

Case narrow_case(Half half, std::uint64_t count, std::size_t offset, bool saturate) {
  Case out{.operation = "narrow", .name = cat("narrow to ", half == Half::kF16 ? "f16" : "bf16", " of ", count, offset != 0 ? " unaligned" : "", saturate ? ", saturated" : "")};
  const std::vector<std::uint32_t> x = hard_floats(count, half);
  out.buffers.push_back(buffer_of("x", Type::kF32, {count}, x));
  out.buffers.back().offset = 4 * offset;
  CaseBuffer result = output_of("out", half_type(half), {count});
  result.bits = true;
  result.offset = 2 * offset;
  result.expected.resize(result.bytes.size());
  const auto counted = cast_elements(DType::kF32, out.buffers[0].bytes, dtype_of(half), result.expected, saturate ? Overflow::kSaturate : Overflow::kInfinity);
  out.buffers.push_back(std::move(result));
  CaseBuffer overflowed = output_of("overflowed", Type::kU32, {1});
  overflowed.bytes = bytes_of<std::uint32_t>({5});
  overflowed.expected = bytes_of<std::uint32_t>({5 + static_cast<std::uint32_t>(counted.ok() ? *counted : UINT32_MAX)});
  out.buffers.push_back(std::move(overflowed));
  out.numbers = {{"saturate", saturate ? 1 : 0}};
  out.steps.push_back([=](const Places& at) {
    const CastArgs args{.x = at.at<const char>("x"), .out = at.at<char>("out"), .half = half, .count = count, .saturate = saturate ? 1U : 0U, .overflowed = at.at<std::uint32_t>("overflowed")};
    return bound(Kernel::k_narrow, cast_launch(args), args);
  });
  return out;
}

// Every half, in turn.
Case widen_case(Half half, std::uint64_t count, std::size_t offset) {
  Case out{.operation = "widen", .name = cat("widen ", half == Half::kF16 ? "f16" : "bf16", " of ", count, offset != 0 ? " unaligned" : "")};
  std::vector<std::uint16_t> x(count);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::uint16_t>(i);
  out.buffers.push_back(buffer_of("x", half_type(half), {count}, x));
  out.buffers.back().offset = 2 * offset;
  CaseBuffer result = output_of("out", Type::kF32, {count});
  result.bits = true;
  result.expected.resize(result.bytes.size());
  static_cast<void>(cast_elements(dtype_of(half), out.buffers[0].bytes, DType::kF32, result.expected));
  out.buffers.push_back(std::move(result));
  out.steps.push_back([=](const Places& at) {
    const CastArgs args{.x = at.at<const char>("x"), .out = at.at<char>("out"), .half = Half::kNone, .count = count};
    return bound(half == Half::kF16 ? Kernel::k_widen_f16 : Kernel::k_widen_bf16, cast_launch(args), args);
  });
  return out;
}

Case rotary_table_case(std::uint32_t position, std::uint32_t tokens, std::uint32_t pairs) {
  Case out{.operation = "rotary_table", .name = cat("rotary_table of ", pairs, " pairs at ", position)};
  std::vector<double> turns(pairs);
  for (std::uint32_t i = 0; i < pairs; ++i) turns[i] = std::pow(10000.0, -static_cast<double>(i) / pairs);
  out.buffers.push_back(state_of(position, tokens));
  out.buffers.push_back(buffer_of("turns", Type::kF64, {pairs}, turns));
  // Each is half a unit of float32 off for the cast, and 1e-12 for reduction and series in double.
  for (const char* name : {"cosines", "sines"}) out.buffers.push_back(output_of(name, Type::kF32, {tokens, pairs}, 2e-12, 2.002 * kUnit));
  out.steps.push_back([=](const Places& at) {
    const RotaryTableArgs args{.state = at.at<const StepState>("state"), .turns = at.at<const double>("turns"), .cosines = at.at<float>("cosines"), .sines = at.at<float>("sines"),
                               .tokens = tokens, .pairs = pairs};
    return bound(Kernel::k_rotary_table, rotary_table_launch(args), args);
  });
  return out;
}

Case rotary_case(std::uint32_t heads, std::uint32_t size, std::uint32_t pairs, bool interleaved) {
  constexpr std::uint32_t kTokens = 4;
  Case out{.operation = "rotary", .name = cat("rotary of ", heads, " heads of ", size, ", ", pairs, " pairs", interleaved ? ", interleaved" : "")};
  out.buffers.push_back(floats_of("x", {kTokens, heads, size}, heads));
  out.buffers.push_back(floats_of("cosines", {kTokens, pairs}, 1));
  out.buffers.push_back(floats_of("sines", {kTokens, pairs}, 2));
  out.buffers.push_back(output_of("out", Type::kF32, {kTokens, heads, size}, 2 * gamma_of(2) * 2));  // two products of numbers up to 1
  out.numbers = {{"pairs", pairs}, {"interleaved", interleaved ? 1 : 0}};
  out.steps.push_back([=](const Places& at) {
    const RotaryArgs args{.x = at.at<const float>("x"), .out = at.at<float>("out"), .cosines = at.at<const float>("cosines"), .sines = at.at<const float>("sines"), .tokens = kTokens,
                          .heads = heads, .head_size = size, .pairs = pairs, .interleaved = interleaved ? 1U : 0U};
    return bound(Kernel::k_rotary, rotary_launch(args), args);
  });
  return out;
}

Case cache_write_case(std::uint32_t kv_heads, std::uint32_t size, std::uint32_t context, std::uint32_t position) {
  constexpr std::uint32_t kTokens = 4;
  Case out{.operation = "cache_write", .name = cat("cache_write of ", kv_heads, " heads of ", size, " at ", position, " of ", context)};
  out.buffers.push_back(state_of(position, kTokens));
  out.buffers.push_back(floats_of("key", {kTokens, kv_heads, size}, 1));
  out.buffers.push_back(floats_of("value", {kTokens, kv_heads, size}, 2));
  for (const char* name : {"keys", "values"}) {
    out.buffers.push_back(output_of(name, Type::kF32, {kv_heads, context, size}));
    out.buffers.back().bits = true;
  }
  out.steps.push_back([=](const Places& at) {
    const CacheWriteArgs args{.state = at.at<const StepState>("state"), .key = at.at<const float>("key"), .value = at.at<const float>("value"), .keys = at.at<float>("keys"),
                              .values = at.at<float>("values"), .tokens = kTokens, .kv_heads = kv_heads, .head_size = size, .context = context};
    return bound(Kernel::k_cache_write, cache_write_launch(args), args);
  });
  return out;
}

}  // namespace

std::vector<Case> element_cases(const Scale& scale) {
  std::vector<Case> out;
  for (const PairKind& kind : kPairs) {
    out.push_back(pair_case(kind, 1, 0, Half::kNone, false));
    out.push_back(pair_case(kind, 1023, 0, Half::kBF16, true));
    out.push_back(pair_case(kind, 1024, 4, Half::kF16, false));
    out.push_back(pair_case(kind, scale.elements, 0, Half::kNone, true));
  }
  for (const Half half : {Half::kBF16, Half::kF16}) {
    for (const bool saturate : {false, true}) {
      out.push_back(narrow_case(half, 7, 0, saturate));
      out.push_back(narrow_case(half, 4099, 1, saturate));
    }
    out.push_back(narrow_case(half, scale.elements + 65'000, 0, false));
    out.push_back(widen_case(half, 65'536, 0));
    out.push_back(widen_case(half, 65'536, 1));
    out.push_back(widen_case(half, 7, 0));
  }
  for (const std::uint32_t position : {0U, 511U, 131'070U, 1'048'570U}) out.push_back(rotary_table_case(position, 3, 67));
  for (const bool interleaved : {false, true}) {
    for (const auto& [heads, size, pairs] : {std::array{1U, 2U, 1U}, {9U, 64U, 32U}, {3U, 80U, 16U}, {5U, 7U, 3U}}) out.push_back(rotary_case(heads, size, pairs, interleaved));
  }
  for (const std::uint32_t position : {0U, 5U, 7U}) out.push_back(cache_write_case(3, 5, 7, position));  // the end of the cache, and beyond it
  out.push_back(cache_write_case(3, 64, scale.context, scale.context - 4));
  return out;
}

}  // namespace paramwire::gpu
