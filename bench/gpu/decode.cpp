// What turns stored bytes into weights on the device: planes, casts, exclusive or, sparse changes. GB/s of bytes read and written.
#include "bench.hpp"

#include "gpu/case_make.hpp"

#include "paramwire/codec/plane_kernels.hpp"
#include "paramwire/cuda/kernels/integrity_args.hpp"

namespace paramwire::gpu {

using namespace cuda;

namespace {

class Decode {
 public:
  explicit Decode(Bench& bench)
      : bench_(bench), bed_(bench.bed), elements_(bench.size<std::uint64_t>(70'001, std::uint64_t{32} << 20, std::uint64_t{128} << 20)) {}

  Status run() {
    const Current current(*bed_.device);
    PARAMWIRE_CHECK(current.status());
    PARAMWIRE_TRY(copy, bench_.copy_bandwidth());
    copy_ = copy;
    PARAMWIRE_CHECK(planes());
    PARAMWIRE_CHECK(casts());
    PARAMWIRE_CHECK(exclusive_or());
    return sparse();
  }

 private:
  // name: of the figure. moved: bytes that one launch reads and writes. right: what `out` must hold afterwards
  template <typename Args>
  Status measure(const char* name, Kernel kernel, const Launch& launch, const Args& args, double moved, const DeviceMemory& out, std::span<const std::byte> right) {
    PARAMWIRE_TRY(seconds, bench_.device_seconds([&] { return bed_.module->launch(bed_.stream, kernel, launch, args); }));
    PARAMWIRE_TRY(bytes, bed_.download(out.address(), right.size()));
    bench_.add({.name = name, .value = gigabytes(moved, seconds), .unit = "GB/s", .baseline = Bench::kCopyBaseline, .baseline_value = copy_,
                .correct = std::equal(bytes.begin(), bytes.end(), right.begin(), right.end())});
    return {};
  }

  // bf16 blocks whose two planes were stored raw, in chunks of 64 KiB, as they are cut.
  Status planes() {
    constexpr std::uint64_t kChunk = std::uint64_t{32} << 10;  // elements
    const std::vector<std::uint8_t> stored = random_octets(2 * elements_, 1);
    std::vector<std::uint8_t> right(2 * elements_);
    PARAMWIRE_TRY(device, bed_.upload(bytes_of(stored)));
    PARAMWIRE_TRY(out, bed_.allocate(2 * elements_));
    std::vector<MergePiece> pieces;
    for (std::uint64_t at = 0; at < elements_; at += kChunk) {
      const std::uint64_t count = std::min(kChunk, elements_ - at);
      MergePiece piece{};
      const std::uint8_t* host[2];
      for (std::uint64_t p = 0; p < 2; ++p) {
        piece.plane[p] = device.at<const std::uint8_t>(2 * at + p * count);
        host[p] = stored.data() + 2 * at + p * count;
      }
      piece.out = out.at<char>(2 * at);
      piece.count = static_cast<std::uint32_t>(count);
      pieces.push_back(piece);
      planes::merge(host, static_cast<std::size_t>(count), 2, true, right.data() + 2 * at);
    }
    PARAMWIRE_TRY(table, bed_.upload(bytes_of(pieces)));
    const MergeArgs args{.pieces = table.at<const MergePiece>(), .pieces_count = static_cast<std::uint32_t>(pieces.size()), .count_max = static_cast<std::uint32_t>(std::min(kChunk, elements_)),
                         .rotate = 1};
    return measure("decode_planes_bf16", Kernel::k_merge_2, merge_launch(args), args, 4 * static_cast<double>(elements_), out, std::as_bytes(std::span(right)));
  }

  Status casts() {
    const std::vector<float> wide = random_floats(elements_, 2);
    std::vector<std::byte> narrowed(2 * elements_), widened(4 * elements_);
    static_cast<void>(cast_elements(DType::kF32, std::as_bytes(std::span(wide)), DType::kBF16, narrowed, Overflow::kInfinity));
    static_cast<void>(cast_elements(DType::kBF16, narrowed, DType::kF32, widened));
    PARAMWIRE_TRY(x, bed_.upload(std::as_bytes(std::span(wide))));
    PARAMWIRE_TRY(halves, bed_.allocate(narrowed.size()));
    PARAMWIRE_TRY(out, bed_.allocate(widened.size()));
    const CastArgs narrow{.x = x.at<const char>(), .out = halves.at<char>(), .half = Half::kBF16, .count = elements_};
    PARAMWIRE_CHECK(measure("cast_f32_to_bf16", Kernel::k_narrow, cast_launch(narrow), narrow, 6 * static_cast<double>(elements_), halves, narrowed));
    const CastArgs widen{.x = halves.at<const char>(), .out = out.at<char>(), .half = Half::kNone, .count = elements_};
    return measure("cast_bf16_to_f32", Kernel::k_widen_bf16, cast_launch(widen), widen, 6 * static_cast<double>(elements_), out, widened);
  }

  Status exclusive_or() {
    const std::uint64_t size = 2 * elements_;
    const std::vector<std::uint8_t> base = random_octets(size, 3), change = random_octets(size, 4);
    std::vector<std::uint8_t> right(size);
    for (std::size_t i = 0; i < right.size(); ++i) right[i] = base[i] ^ change[i];
    PARAMWIRE_TRY(device_base, bed_.upload(bytes_of(base)));
    PARAMWIRE_TRY(device_change, bed_.upload(bytes_of(change)));
    PARAMWIRE_TRY(out, bed_.allocate(size));
    const XorArgs args{.base = device_base.at<const char>(), .change = device_change.at<const char>(), .out = out.at<char>(), .size = size};
    return measure("xor", Kernel::k_xor_apply, xor_launch(args), args, 3 * static_cast<double>(size), out, std::as_bytes(std::span(right)));
  }

  // Every 20th element of a bf16 tensor gets a new value: an index, a value and an element each. Elements share sectors of 32 bytes, which move whole.
  Status sparse() {
    std::vector<std::uint16_t> right(elements_, 0x3f80);
    PARAMWIRE_TRY(target, bed_.upload(bytes_of(right)));
    std::vector<std::uint32_t> index;
    std::vector<std::uint16_t> values;
    for (std::uint64_t at = 7; at < elements_; at += 20) {
      index.push_back(static_cast<std::uint32_t>(at));
      values.push_back(static_cast<std::uint16_t>(at * 31));
      right[at] = values.back();
    }
    PARAMWIRE_TRY(device_index, bed_.upload(bytes_of(index)));
    PARAMWIRE_TRY(device_values, bed_.upload(bytes_of(values)));
    const SparseArgs args{.target = target.at<char>(), .index = device_index.at<const std::uint32_t>(), .values = device_values.at<const char>(), .count = index.size(), .elements = elements_,
                          .is_steps = 0, .floating = 0};
    const double moved = 8 * static_cast<double>(index.size());
    return measure("sparse_values_bf16", Kernel::k_sparse_2, sparse_launch(args), args, moved, target, std::as_bytes(std::span(right)));
  }

  Bench& bench_;
  const Bed& bed_;
  const std::uint64_t elements_;
  double copy_ = 0;
};

}  // namespace

Status bench_decode(Bench& bench) { return Decode(bench).run(); }

}  // namespace paramwire::gpu
