// Graphs that were captured once compute with whatever weights lie in place: the same bits as launches one by one, version after version.
#include "gpu/case_make.hpp"
#include "gpu/session_rig.hpp"

#include <array>

namespace paramwire::gpu {
namespace {

using namespace cuda;

constexpr int kVersions = 100;

// One layer of a decoder's step without attention: embedding, norm, two products, SwiGLU, a product that is added.
class Layer {
 public:
  static constexpr std::uint32_t kWidth = 72, kFfn = 152, kRows = 5;

  explicit Layer(const Bed& bed) : bed_(bed), weights_(must(bed.allocate(2 * kElements))), state_(must(bed.upload(bytes_of<std::uint32_t>({3})))), values_(must(bed.allocate(4 * kFloats))) {}

  // A version over the one before, in the stream's order.
  void replace(std::uint64_t version) {
    host_ = random_weights("weights", 1, {kElements}, version).bytes;
    must(bed_.stream.to_device(weights_.address(), host_));
  }
  Status enqueue() const {
    float *x = values_.at<float>(), *norm = x + kWidth, *gate = norm + kWidth, *up = gate + kFfn;
    const EmbeddingArgs embedding{.rows = weight(0), .row_of = state_.at<const std::uint32_t>(), .out = x, .tokens = 1, .width = kWidth};
    PARAMWIRE_CHECK(launch(Kernel::k_embedding_bf16, embedding_launch(embedding), embedding));
    NormArgs args{};
    args.x = x;
    args.weight = weight(kRows * kWidth);
    args.out = norm;
    args.tokens = 1;
    args.width = kWidth;
    args.epsilon = 1e-5F;
    PARAMWIRE_CHECK(launch(Kernel::k_rms_norm_bf16, norm_launch(args), args));
    PARAMWIRE_CHECK(product(kMatrices, norm, gate, kFfn, kWidth, false));
    PARAMWIRE_CHECK(product(kMatrices + kFfn * kWidth, norm, up, kFfn, kWidth, false));
    const PairArgs pair{.left = gate, .right = up, .out = gate, .out16 = nullptr, .half = Half::kNone, .count = kFfn};
    PARAMWIRE_CHECK(launch(Kernel::k_swiglu, pair_launch(pair), pair));
    return product(kMatrices + 2 * kFfn * kWidth, gate, x, kWidth, kFfn, true);
  }
  std::vector<std::byte> result() const { return must(bed_.download(values_.address(), 4 * kWidth)); }

 private:
  static constexpr std::uint32_t kMatrices = kRows * kWidth + kWidth, kElements = kMatrices + 3 * kFfn * kWidth, kFloats = 2 * kWidth + 2 * kFfn;

  const void* weight(std::uint32_t element) const { return weights_.at<const char>(2 * std::uint64_t{element}); }
  template <typename Args>
  Status launch(Kernel kernel, const Launch& geometry, const Args& args) const {
    return bed_.module->launch(bed_.stream, kernel, geometry, args);
  }
  Status product(std::uint32_t element, const float* x, float* out, std::uint32_t rows, std::uint32_t columns, bool accumulate) const {
    const GemvArgs args{.weight = weight(element), .x = x, .out = out, .bias = nullptr, .rows = rows, .columns = columns, .tokens = 1, .x_stride = columns, .out_stride = rows,
                        .accumulate = accumulate ? 1U : 0U};
    return launch(Kernel::k_gemv_bf16, gemv_launch(args), args);
  }

  const Bed& bed_;
  DeviceMemory weights_, state_, values_;
  std::vector<std::byte> host_;
};

class GpuGraph : public GpuTest {};

TEST_F(GpuGraph, AReplayHasTheBitsOfLaunchesOneByOneForAHundredVersionsInPlace) {
  const Bed on = bed();
  const Current current(*on.device);
  Layer layer(on);
  const GraphExec graph = must(on.stream.capture([&] { return layer.enqueue(); }));
  std::vector<std::byte> before;
  for (int version = 0; version < kVersions; ++version) {
    layer.replace(static_cast<std::uint64_t>(version));
    must(on.stream.launch(graph));
    const std::vector<std::byte> replayed = layer.result();
    must(layer.enqueue());
    ASSERT_EQ(layer.result(), replayed) << "version " << version;
    ASSERT_NE(replayed, before) << "version " << version << " computes what the one before did";
    before = replayed;
  }
}

TEST_F(GpuGraph, AHundredVersionsThroughASessionsSlotsGiveWhatTheCpuBackendGives) {
  SessionRig rig(*world_, oracle::small_llama(), DType::kBF16, 32);
  const std::array<Token, 2> tokens = {3, 41};
  for (int version = 0; version < kVersions; ++version) {
    const oracle::Tensors tensors = rig.tensors(1 + static_cast<std::uint64_t>(version));
    rig.load(tensors);
    must(rig.session().rewind(0));
    std::vector<float> logits;
    for (const Token token : tokens) logits = must(rig.step(token));
    ASSERT_LE(largest_difference(logits, rig.cpu_logits(tensors, tokens)), kLogitTolerance) << "version " << version;
  }
}

TEST_F(GpuGraph, AHundredVersionsStagedBesideAndSwappedGiveWhatTheCpuBackendGives) {
  SessionRig rig(*world_, oracle::small_llama(), DType::kBF16, 32, 2);
  const std::array<Token, 2> tokens = {3, 41};
  for (int version = 0; version < kVersions; ++version) {
    const oracle::Tensors tensors = rig.tensors(1 + static_cast<std::uint64_t>(version));
    rig.load(tensors);
    if (version > 0) must(rig.stage_and_swap());
    must(rig.session().rewind(0));
    std::vector<float> logits;
    for (const Token token : tokens) logits = must(rig.step(token));
    ASSERT_LE(largest_difference(logits, rig.cpu_logits(tensors, tokens)), kLogitTolerance) << "version " << version;
  }
}

}  // namespace
}  // namespace paramwire::gpu
