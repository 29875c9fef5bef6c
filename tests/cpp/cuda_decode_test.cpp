// Byte planes, exclusive or, steps and sparse changes: bit for bit what the codecs do.
#include "cpp/cuda_kernels_rig.hpp"

#include "paramwire/codec/delta_piece.hpp"
#include "paramwire/codec/plane_kernels.hpp"
#include "paramwire/cuda/kernels/integrity_args.hpp"

#include <array>
#include <memory>

namespace paramwire::testing {
namespace {

using namespace cuda;

class CudaDecode : public CudaKernels {
 protected:
  static void fill_bytes(std::uint8_t* bytes, std::size_t size, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(random());
  }
};

TEST_F(CudaDecode, PlanesMergeToTheElementsThatWereSplit) {
  std::uint64_t seed = 0;
  for (const std::size_t width : {1U, 2U, 4U, 8U}) {
    for (const std::size_t count : {0U, 1U, 3U, 4U, 11U, 1000U, 16384U}) {
      for (const bool rotate : {false, true}) {
        if (width == 1 && rotate) continue;
        ++seed;
        Array<std::uint8_t> raw(count * width), out(count * width, seed % 3 == 0 ? 1 : 0), short_out(std::size_t{3} * width);
        fill_bytes(raw.data(), raw.size(), seed);
        std::vector<std::unique_ptr<Array<std::uint8_t>>> planes;
        std::vector<std::uint8_t> split(count * width);
        planes::split(raw.data(), count, width, rotate, split.data(), count);
        MergePiece pieces[2] = {};
        pieces[0].out = out.data();
        pieces[0].count = static_cast<std::uint32_t>(count);
        for (std::size_t p = 0; p < width; ++p) {
          planes.push_back(std::make_unique<Array<std::uint8_t>>(count, (p + seed) % 4));  // planes lie anywhere
          std::copy_n(split.data() + p * count, count, planes.back()->data());
          pieces[0].plane[p] = planes.back()->data();
        }
        // A second, shorter piece of constants.
        pieces[1].out = short_out.data();
        pieces[1].count = 3;
        std::uint8_t few[8 * 3];
        const std::uint8_t* few_planes[8];
        for (std::size_t p = 0; p < width; ++p) {
          pieces[1].constant[p] = static_cast<std::uint8_t>(37 * p + seed);
          std::fill_n(few + 3 * p, 3, pieces[1].constant[p]);
          few_planes[p] = few + 3 * p;
        }
        std::vector<std::uint8_t> few_right(3 * width);
        planes::merge(few_planes, 3, width, rotate, few_right.data());
        const MergeArgs args{.pieces = pieces, .pieces_count = 2, .count_max = static_cast<std::uint32_t>(count), .rotate = rotate ? 1U : 0U};
        const Launch launch = merge_launch(args);
        EXPECT_EQ(launch.blocks[1], 2U);
        run("merge_" + std::to_string(width), launch, args, seed);
        ASSERT_TRUE(std::equal(out.begin(), out.end(), raw.begin())) << "width " << width << " count " << count << " rotate " << rotate;
        ASSERT_TRUE(std::equal(short_out.begin(), short_out.end(), few_right.begin()));
      }
    }
  }
}

TEST_F(CudaDecode, ConstantPlanesBesideRawOnesMerge) {
  const std::size_t count = 1001;
  Array<std::uint8_t> low(count, 1), out(count * 4);
  fill_bytes(low.data(), count, 5);
  MergePiece piece{};
  piece.plane[1] = low.data();
  piece.constant[0] = 0xab, piece.constant[2] = 0x3f, piece.constant[3] = 0x80;
  piece.out = out.data();
  piece.count = count;
  const MergeArgs args{.pieces = &piece, .pieces_count = 1, .count_max = count, .rotate = 0};
  run("merge_4", merge_launch(args), args, 1);
  for (std::size_t i = 0; i < count; ++i) {
    ASSERT_EQ(out[4 * i], 0xab);
    ASSERT_EQ(out[4 * i + 1], low[i]);
    ASSERT_EQ(out[4 * i + 2], 0x3f);
    ASSERT_EQ(out[4 * i + 3], 0x80);
  }
}

TEST_F(CudaDecode, ExclusiveOrOfAnyBytes) {
  for (const std::size_t size : {0U, 1U, 15U, 16U, 17U, 4099U, 100000U}) {
    for (const std::size_t offset : {0U, 1U, 8U}) {
      Array<std::uint8_t> base(size, offset), change(size), out(size, offset);
      fill_bytes(base.data(), size, size);
      fill_bytes(change.data(), size, size + 1);
      XorArgs args{.base = base.data(), .change = change.data(), .out = out.data(), .size = size};
      run("xor_apply", xor_launch(args), args, size);
      for (std::size_t i = 0; i < size; ++i) ASSERT_EQ(out[i], base[i] ^ change[i]);
      args.out = base.data();
      run("xor_apply", xor_launch(args), args, size);
      ASSERT_TRUE(std::equal(out.begin(), out.end(), base.begin()));
    }
  }
}

template <typename Word>
class CudaDelta : public CudaKernels {};
using WordTypes = ::testing::Types<std::uint8_t, std::uint16_t, std::uint32_t, std::uint64_t>;
TYPED_TEST_SUITE(CudaDelta, WordTypes);

template <typename Word>
Word moved(Word base, Word step, bool floating) {
  return floating ? delta::ordered<Word>(delta::after_step<Word>(delta::ordered<Word>(base), step)) : delta::after_step<Word>(base, step);
}

TYPED_TEST(CudaDelta, StepsMoveEveryElementAsTheCodecDoes) {
  using Word = TypeParam;
  std::mt19937_64 random(3);
  for (const std::size_t count : {0U, 1U, 777U, 5000U}) {
    for (const bool floating : {false, true}) {
      Array<Word> base(count, 1), steps(count), out(count, 3);
      for (std::size_t i = 0; i < count; ++i) {
        base[i] = static_cast<Word>(random());  // NaNs, both zeros' neighbours and all else
        steps[i] = static_cast<Word>(i % 3 == 0 ? random() : random() % 5);
        if (i % 7 == 0) base[i] = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));  // -0
      }
      StepsArgs args{.base = base.data(), .steps = steps.data(), .out = out.data(), .count = count, .floating = floating ? 1U : 0U};
      const std::string name = "steps_" + std::to_string(sizeof(Word));
      this->run(name, steps_launch(args), args, count);
      for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(out[i], moved(base[i], steps[i], floating));
      args.out = base.data();
      this->run(name, steps_launch(args), args, count + 1);
      ASSERT_TRUE(std::equal(out.begin(), out.end(), base.begin()));
    }
  }
}

TYPED_TEST(CudaDelta, SparseChangesReachTheirElementsAlone) {
  using Word = TypeParam;
  std::mt19937_64 random(4);
  for (const std::size_t elements : {1U, 100U, 9001U}) {
    for (const bool is_steps : {false, true}) {
      for (const bool floating : {false, true}) {
        Array<Word> target(elements, 1), before(elements), values(elements);
        Array<std::uint32_t> index(elements);
        for (std::size_t i = 0; i < elements; ++i) before[i] = target[i] = static_cast<Word>(random());
        std::size_t count = 0;
        for (std::size_t i = 0; i < elements; ++i) {
          if (random() % 4 != 0 && i + 1 != elements) continue;
          index[count] = static_cast<std::uint32_t>(i);
          values[count++] = static_cast<Word>(random());
        }
        const SparseArgs args{.target = target.data(), .index = index.data(), .values = values.data(), .count = count, .elements = elements, .is_steps = is_steps ? 1U : 0U,
                              .floating = floating ? 1U : 0U};
        this->run("sparse_" + std::to_string(sizeof(Word)), sparse_launch(args), args, elements);
        std::size_t next = 0;
        for (std::size_t i = 0; i < elements; ++i) {
          if (next < count && index[next] == i) {
            ASSERT_EQ(target[i], is_steps ? moved(before[i], values[next], floating) : values[next]);
            ++next;
          } else {
            ASSERT_EQ(target[i], before[i]);
          }
        }
        // An index beyond the end is dropped: the guards of `target` tell.
        index[count - 1] = static_cast<std::uint32_t>(elements);
        this->run("sparse_" + std::to_string(sizeof(Word)), sparse_launch(args), args, 1);
      }
    }
  }
}

}  // namespace
}  // namespace paramwire::testing
