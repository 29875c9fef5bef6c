// The vector loops of deltas against loops over single elements, with every vector target that this machine has.
#include "delta_fixture.hpp"

#include "paramwire/codec/delta_kernels.hpp"

#include <hwy/targets.h>

#include <span>

namespace paramwire::delta {
namespace {

// Runs body() with each target in turn.
template <typename Body>
void with_each_target(Body&& body) {
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(hwy::TargetName(target));
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

// Around the widths of vectors, of words of 64 elements and of blocks of 1024.
constexpr std::size_t kCounts[] = {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 1000, 1023, 1024, 1025, 1087, 2049};
constexpr DType kWords[] = {DType::kU8, DType::kF8E4M3, DType::kF8E5M2, DType::kU16, DType::kF16, DType::kBF16, DType::kI32, DType::kF32, DType::kU64, DType::kF64};

// A base of `elements` elements, and a result of which one in `every` differs; both begin at an odd address.
class Pair {
 public:
  Pair(DType dtype, std::size_t elements, std::size_t every) : word_(std::max<std::size_t>(dtype_bits(dtype) / 8, 1)), base_(random_bytes(1 + elements * word_, elements)), next_(base_) {
    std::mt19937_64 random(elements + every);
    for (std::size_t i = 0; i < elements; ++i) {
      // Exponents as weights have them, near one another, but for a few.
      if (word_ > 1 && i % 37 != 0) base_[1 + (i + 1) * word_ - 1] = static_cast<std::byte>(0x3c);
      next_[1 + (i + 1) * word_ - 1] = base_[1 + (i + 1) * word_ - 1];
      if (random() % every == 0) next_[1 + i * word_ + i % word_] ^= static_cast<std::byte>(1 + i % 255);
    }
  }
  std::span<const std::byte> base() const { return std::span(base_).subspan(1); }
  std::span<const std::byte> next() const { return std::span(next_).subspan(1); }
  bool differs(std::size_t i) const { return !std::equal(at(base_, i), at(base_, i + 1), at(next_, i)); }
  std::uint64_t bits(std::size_t i) const {
    std::uint64_t value = 0;
    std::memcpy(&value, &*at(base_, i), word_);
    return value;
  }

 private:
  Bytes::const_iterator at(const Bytes& bytes, std::size_t i) const { return bytes.begin() + static_cast<std::ptrdiff_t>(1 + i * word_); }

  std::size_t word_;
  Bytes base_, next_;
};

bool is_set(const std::vector<std::uint64_t>& bits, std::size_t i) { return (bits[i / 64] >> (i % 64) & 1) != 0; }

TEST(DeltaKernels, FindTheElementsThatDiffer) {
  with_each_target([] {
    for (const DType dtype : kWords) {
      for (const std::size_t elements : kCounts) {
        const Pair pair(dtype, elements, 5);
        std::vector<std::uint64_t> changed(words_of(elements), UINT64_MAX);
        const std::size_t count = find_changes(element_of(dtype), pair.base(), pair.next(), changed.data());
        std::size_t want = 0;
        for (std::size_t i = 0; i < 64 * changed.size(); ++i) {
          const bool differs = i < elements && pair.differs(i);
          ASSERT_EQ(is_set(changed, i), differs) << dtype_name(dtype) << ' ' << elements << " elements, element " << i;
          want += differs ? 1 : 0;
        }
        EXPECT_EQ(count, want);
      }
    }
  });
}

TEST(DeltaKernels, ClassesAndDistancesAreThoseOfTheFormat) {
  with_each_target([] {
    for (const DType dtype : kWords) {
      const Element element = element_of(dtype);
      for (const std::size_t elements : kCounts) {
        const Pair pair(dtype, elements, 5);
        const Classes several{element.floating ? 7U : 1U, element.floating ? element.exponent_mask / 2 : 0};
        for (const Classes& classes : {Classes{}, several}) {
          SCOPED_TRACE(testing::Message() << dtype_name(dtype) << ' ' << elements << " elements, " << classes.count << " classes");
          std::vector<std::uint8_t> found(64 * words_of(elements), 99);
          find_classes(element, classes, pair.base(), found.data());
          std::vector<std::uint64_t> changed(words_of(elements)), selected(words_of(elements));
          const std::size_t changes = find_changes(element, pair.base(), pair.next(), changed.data());
          find_elements_of(found.data(), elements, 0b101, selected.data());
          std::vector<std::uint32_t> distances(classes.count + changes, 12345);
          std::array<std::uint32_t, kClassesMax> in_class{};
          measure_distances(found.data(), changed.data(), elements, classes.count, distances.data(), in_class);

          std::array<std::uint32_t, kClassesMax> run{}, sizes{};
          std::array<std::size_t, kClassesMax> slot{};
          for (std::size_t c = 0; c < classes.count; ++c) slot[c] = c;
          std::vector<std::uint32_t> want(distances.size());
          std::size_t slots = classes.count;
          for (std::size_t i = 0; i < found.size(); ++i) {
            if (i >= elements) {
              ASSERT_EQ(found[i], kNoClass);
              ASSERT_FALSE(is_set(selected, i));
              continue;
            }
            const std::uint64_t exponent = pair.bits(i) >> element.exponent_shift & element.exponent_mask;
            const std::uint64_t c = exponent >= classes.top ? 0 : std::min<std::uint64_t>(classes.top - exponent, classes.count - 1);
            ASSERT_EQ(found[i], c) << "element " << i;
            ASSERT_EQ(is_set(selected, i), c == 0 || c == 2) << "element " << i;
            ++sizes[c];
            if (!pair.differs(i)) {
              ++run[c];
              continue;
            }
            want[slot[c]] = run[c];
            run[c] = 0;
            slot[c] = slots++;
          }
          for (std::size_t c = 0; c < classes.count; ++c) want[slot[c]] = run[c];
          EXPECT_EQ(distances, want);
          EXPECT_EQ(in_class, sizes);
        }
      }
    }
  });
}

TEST(DeltaKernels, EveryTargetWritesTheSameDeltaAndAppliesIt) {
  for (const DType dtype : kWords) {
    for (const std::size_t elements : kCounts) {
      for (const std::size_t every : {1U, 2U, 10U, 200U}) {  // dense classes, some of each, and hardly a change
        const Pair pair(dtype, elements, every);
        Bytes first;
        with_each_target([&] {
          SCOPED_TRACE(testing::Message() << dtype_name(dtype) << ' ' << elements << " elements, one in " << every);
          const auto delta = encode_delta(dtype, pair.base(), {kBase}, pair.next(), 1, {DeltaForm::kSparse});
          ASSERT_TRUE(delta.ok()) << delta.error().message();
          if (first.empty()) first = *delta;
          EXPECT_TRUE(*delta == first);
          Bytes out(1 + pair.base().size());
          const auto target = std::span(out).subspan(1);
          ASSERT_TRUE(apply_delta(*delta, dtype, pair.base(), kBase, target, 1).ok());
          EXPECT_TRUE(std::ranges::equal(target, pair.next()));
        });
      }
    }
  }
}

}  // namespace
}  // namespace paramwire::delta
