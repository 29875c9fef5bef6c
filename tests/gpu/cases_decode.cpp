// Cases of what decodes: byte planes, exclusive or, steps and sparse changes, bit for bit what the codecs do.
#include "gpu/case_make.hpp"
#include "gpu/cases.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/codec/delta_piece.hpp"
#include "paramwire/codec/plane_kernels.hpp"

#include <array>

namespace paramwire::gpu {

using namespace cuda;

namespace {

constexpr Kernel kMerge[] = {Kernel::k_merge_1, Kernel::k_merge_2, Kernel::k_merge_4, Kernel::k_merge_8};
constexpr Kernel kSteps[] = {Kernel::k_steps_1, Kernel::k_steps_2, Kernel::k_steps_4, Kernel::k_steps_8};
constexpr Kernel kSparse[] = {Kernel::k_sparse_1, Kernel::k_sparse_2, Kernel::k_sparse_4, Kernel::k_sparse_8};
constexpr Type kWords[] = {Type::kU8, Type::kU16, Type::kU32, Type::kU64};

// Two pieces: `count` elements of raw planes that lie at any alignment, and three elements of constant planes but for the lowest.
Case merge_case(unsigned log_width, std::uint32_t count, bool rotate) {
  const std::uint32_t width = 1U << log_width;
  Case out{.operation = "merge", .name = cat("merge_", width, " of ", count, rotate ? ", rotated" : "")};
  const std::vector<std::uint8_t> planes = random_octets(std::size_t{width} * count, count + width);
  for (std::uint32_t p = 0; p < width; ++p) {
    const std::vector<std::uint8_t> plane(planes.begin() + static_cast<std::ptrdiff_t>(std::size_t{p} * count), planes.begin() + static_cast<std::ptrdiff_t>(std::size_t{p + 1} * count));
    out.buffers.push_back(buffer_of(cat("plane", p), Type::kU8, {count}, plane));
    out.buffers.back().offset = (p + count) % 4;
  }
  std::vector<std::uint8_t> few(std::size_t{width} * 3);
  for (std::uint32_t p = 0; p < width; ++p) std::fill_n(few.begin() + 3 * p, 3, static_cast<std::uint8_t>(37 * p + 11));
  few[1] = 200;
  out.buffers.push_back(buffer_of<std::uint8_t>("few", Type::kU8, {3}, {few[0], few[1], few[2]}));
  const auto merged = [&](const std::vector<std::uint8_t>& from, std::uint32_t elements) {
    const std::uint8_t* at[8] = {};
    for (std::uint32_t p = 0; p < width; ++p) at[p] = from.data() + std::size_t{p} * elements;
    std::vector<std::uint8_t> right(std::size_t{width} * elements);
    planes::merge(at, elements, width, rotate, right.data());
    return bytes_of(right);
  };
  out.buffers.push_back(output_of("out", kWords[log_width], {count}));
  out.buffers.back().expected = merged(planes, count);
  out.buffers.push_back(output_of("few_out", kWords[log_width], {3}));
  out.buffers.back().expected = merged(few, 3);
  out.buffers.push_back({.name = "pieces", .type = Type::kU64, .shape = {2, sizeof(MergePiece) / 8}, .bytes = std::vector<std::byte>(2 * sizeof(MergePiece)), .role = Role::kScratch});
  out.patched = "pieces";
  out.patch = [=](const Places& at, std::span<std::byte> bytes) {
    MergePiece pieces[2] = {};
    for (std::uint32_t p = 0; p < width; ++p) pieces[0].plane[p] = at.at<const std::uint8_t>(cat("plane", p));
    pieces[0].out = at.at<char>("out");
    pieces[0].count = count;
    for (std::uint32_t p = 1; p < width; ++p) pieces[1].constant[p] = static_cast<std::uint8_t>(37 * p + 11);
    pieces[1].plane[0] = at.at<const std::uint8_t>("few");
    pieces[1].out = at.at<char>("few_out");
    pieces[1].count = 3;
    std::memcpy(bytes.data(), pieces, sizeof pieces);
  };
  out.numbers = {{"width", width}, {"rotate", rotate ? 1 : 0}};
  out.steps.push_back([=](const Places& at) {
    const MergeArgs args{.pieces = at.at<const MergePiece>("pieces"), .pieces_count = 2, .count_max = std::max(count, 3U), .rotate = rotate ? 1U : 0U};
    return bound(kMerge[log_width], merge_launch(args), args);
  });
  return out;
}

Case xor_case(std::uint64_t size, std::size_t offset) {
  Case out{.operation = "xor", .name = cat("xor_apply of ", size, " at ", offset)};
  const std::vector<std::uint8_t> base = random_octets(size, size), change = random_octets(size, size + 1);
  std::vector<std::uint8_t> right(size);
  for (std::size_t i = 0; i < right.size(); ++i) right[i] = base[i] ^ change[i];
  out.buffers.push_back(buffer_of("base", Type::kU8, {size}, base));
  out.buffers.push_back(buffer_of("change", Type::kU8, {size}, change));
  out.buffers.push_back(output_of("out", Type::kU8, {size}));
  out.buffers[0].offset = out.buffers[2].offset = offset;
  out.buffers[2].expected = bytes_of(right);
  out.steps.push_back([=](const Places& at) {
    const XorArgs args{.base = at.at<const char>("base"), .change = at.at<const char>("change"), .out = at.at<char>("out"), .size = size};
    return bound(Kernel::k_xor_apply, xor_launch(args), args);
  });
  return out;
}

template <typename Word>
Word moved(Word base, Word step, bool floating) {
  return floating ? delta::ordered<Word>(delta::after_step<Word>(delta::ordered<Word>(base), step)) : delta::after_step<Word>(base, step);
}

// NaNs, both zeros' neighbours and all else.
template <typename Word>
std::vector<Word> any_words(std::uint64_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Word> out(count);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = i % 7 == 0 ? static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1)) : static_cast<Word>(random());
  return out;
}
template <typename Word>
std::vector<Word> any_steps(std::uint64_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Word> out(count);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<Word>(i % 3 == 0 ? random() : random() % 5);
  return out;
}

template <typename Word>
Case steps_case(unsigned log_width, std::uint64_t count, bool floating) {
  Case out{.operation = "steps", .name = cat("steps_", sizeof(Word), " of ", count, floating ? ", floating" : "")};
  const std::vector<Word> base = any_words<Word>(count, count), steps = any_steps<Word>(count, count + 1);
  std::vector<Word> right(count);
  for (std::size_t i = 0; i < right.size(); ++i) right[i] = moved<Word>(base[i], steps[i], floating);
  out.buffers.push_back(buffer_of("base", kWords[log_width], {count}, base));
  out.buffers[0].offset = sizeof(Word);
  out.buffers.push_back(buffer_of("steps", kWords[log_width], {count}, steps));
  out.buffers.push_back(output_of("out", kWords[log_width], {count}));
  out.buffers[2].expected = bytes_of(right);
  out.numbers = {{"floating", floating ? 1 : 0}};
  out.steps.push_back([=](const Places& at) {
    const StepsArgs args{.base = at.at<const char>("base"), .steps = at.at<const char>("steps"), .out = at.at<char>("out"), .count = count, .floating = floating ? 1U : 0U};
    return bound(kSteps[log_width], steps_launch(args), args);
  });
  return out;
}

template <typename Word>
Case sparse_case(unsigned log_width, std::uint64_t elements, bool is_steps, bool floating) {
  Case out{.operation = "sparse", .name = cat("sparse_", sizeof(Word), " of ", elements, is_steps ? ", steps" : ", values", floating ? ", floating" : "")};
  std::vector<Word> right = any_words<Word>(elements, elements);
  CaseBuffer target = buffer_of("target", kWords[log_width], {elements}, right);
  target.role = Role::kOutput;
  target.offset = sizeof(Word);
  std::mt19937_64 random(elements);
  std::vector<std::uint32_t> index;
  for (std::uint64_t i = 0; i < elements; ++i) {
    if (random() % 4 == 0 || i + 1 == elements) index.push_back(static_cast<std::uint32_t>(i));
  }
  const std::vector<Word> values = any_steps<Word>(index.size() + 1, elements + 1);
  for (std::size_t i = 0; i < index.size(); ++i) right[index[i]] = is_steps ? moved<Word>(right[index[i]], values[i], floating) : values[i];
  index.push_back(static_cast<std::uint32_t>(elements));  // beyond the end: dropped
  target.expected = bytes_of(right);
  out.buffers.push_back(std::move(target));
  out.buffers.push_back(buffer_of("index", Type::kU32, {index.size()}, index));
  out.buffers.push_back(buffer_of("values", kWords[log_width], {values.size()}, values));
  out.numbers = {{"is_steps", is_steps ? 1 : 0}, {"floating", floating ? 1 : 0}};
  const std::uint64_t count = index.size();
  out.steps.push_back([=](const Places& at) {
    const SparseArgs args{.target = at.at<char>("target"), .index = at.at<const std::uint32_t>("index"), .values = at.at<const char>("values"), .count = count, .elements = elements,
                          .is_steps = is_steps ? 1U : 0U, .floating = floating ? 1U : 0U};
    return bound(kSparse[log_width], sparse_launch(args), args);
  });
  return out;
}

template <typename Word>
void delta_cases(unsigned log_width, const Scale& scale, std::vector<Case>& out) {
  for (const bool floating : {false, true}) {
    for (const std::uint64_t count : {std::uint64_t{1}, std::uint64_t{777}, scale.elements}) out.push_back(steps_case<Word>(log_width, count, floating));
    for (const bool is_steps : {false, true}) {
      for (const std::uint64_t elements : {std::uint64_t{1}, std::uint64_t{100}, scale.elements}) out.push_back(sparse_case<Word>(log_width, elements, is_steps, floating));
    }
  }
}

}  // namespace

std::vector<Case> decode_cases(const Scale& scale) {
  std::vector<Case> out;
  for (unsigned log_width = 0; log_width < 4; ++log_width) {
    for (const bool rotate : {false, true}) {
      if (log_width == 0 && rotate) continue;
      for (const std::uint32_t count : {1U, 11U, 16'384U, static_cast<std::uint32_t>(scale.elements)}) out.push_back(merge_case(log_width, count, rotate));
    }
  }
  for (const std::size_t offset : {0U, 1U, 8U}) {
    for (const std::uint64_t size : {std::uint64_t{1}, std::uint64_t{17}, std::uint64_t{4099}, scale.payload}) out.push_back(xor_case(size, offset));
  }
  delta_cases<std::uint8_t>(0, scale, out);
  delta_cases<std::uint16_t>(1, scale, out);
  delta_cases<std::uint32_t>(2, scale, out);
  delta_cases<std::uint64_t>(3, scale, out);
  return out;
}

}  // namespace paramwire::gpu
