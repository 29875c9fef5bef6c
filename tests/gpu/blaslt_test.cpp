// Matrix products by cuBLASLt against plain products in double precision.
#include "gpu/case_make.hpp"
#include "gpu/gpu_test.hpp"

#include "paramwire/cuda/blaslt.hpp"

#include <array>

namespace paramwire::gpu {
namespace {

using namespace cuda;

class GpuBlasLt : public GpuTest {
 protected:
  std::unique_ptr<BlasLt> open(const Bed& on) const {
    if (world_->blas == nullptr) throw std::runtime_error("no cuBLASLt: " + world_->blas_problem);
    return must(BlasLt::create(on.device, world_->blas));
  }
};

struct Shape {
  std::uint32_t tokens, rows, columns;
  bool accumulate;
};

// A product's operands on the device, and what it must be.
class Operands {
 public:
  Operands(const Bed& bed, int format, const Shape& shape)
      : shape_(shape), stride_(shape.rows + 3), weight_(random_weights("weight", format, {shape.rows, shape.columns}, 1)), x_(random_weights("x", format, {shape.tokens, shape.columns}, 2)),
        before_(random_floats(std::size_t{shape.tokens} * stride_, 3)), device_weight_(must(bed.upload(weight_.bytes))), device_x_(must(bed.upload(x_.bytes))),
        device_y_(must(bed.upload(std::as_bytes(std::span<const float>(before_))))) {
    product_ = {.dtype = kWeightDTypes[format], .weight = device_weight_.at<const char>(), .x = device_x_.at<const char>(), .y = device_y_.at<float>(), .tokens = shape.tokens, .rows = shape.rows,
                .columns = shape.columns, .y_stride = stride_, .accumulate = shape.accumulate};
  }
  const Product& product() const { return product_; }
  // `times`: how often it was added to what was there
  void check(const Bed& bed, int times) const {
    const auto y = must(bed.download_as<float>(device_y_, before_.size()));
    const std::vector<double> w = values_of(weight_), x = values_of(x_);
    for (std::uint32_t token = 0; token < shape_.tokens; ++token) {
      for (std::uint32_t row = 0; row < stride_; ++row) {
        const std::size_t at = std::size_t{token} * stride_ + row;
        const double before = static_cast<double>(before_[at]);
        if (row >= shape_.rows) {
          ASSERT_EQ(y[at], before_[at]) << "between the rows";
          continue;
        }
        double sum = 0, size = 0;
        for (std::uint32_t c = 0; c < shape_.columns; ++c) {
          const double term = w[std::size_t{row} * shape_.columns + c] * x[std::size_t{token} * shape_.columns + c];
          sum += term;
          size += std::abs(term);
        }
        const double right = shape_.accumulate ? before + times * sum : sum;
        ASSERT_LE(std::abs(static_cast<double>(y[at]) - right), times * gamma_of(shape_.columns + 4.0 * times) * (size + std::abs(before))) << "token " << token << ", row " << row;
      }
    }
  }

 private:
  Shape shape_;
  std::uint32_t stride_;
  CaseBuffer weight_, x_;
  std::vector<float> before_;
  DeviceMemory device_weight_, device_x_, device_y_;
  Product product_;
};

TEST_F(GpuBlasLt, ProductsAreWithinTheBoundOfSummation) {
  const Bed on = bed();
  const auto blas = open(on);
  const Current current(*on.device);
  for (int format = 0; format < 3; ++format) {
    for (const Shape& shape : {Shape{5, 7, 24, false}, {5, 48, 33, true}, {33, scale().rows, 64, false}, {6, scale().rows, 200, true}, {64, 96, scale().context, false}}) {
      SCOPED_TRACE(std::to_string(shape.tokens) + " x " + std::to_string(shape.rows) + " x " + std::to_string(shape.columns) + " " + kFormats[format]);
      const Operands operands(on, format, shape);
      must(blas->multiply(operands.product(), on.stream));
      operands.check(on, 1);
    }
  }
}

TEST_F(GpuBlasLt, AProductThatWasCapturedGivesTheSame) {
  const Bed on = bed();
  const auto blas = open(on);
  const Current current(*on.device);
  for (int format = 0; format < 3; ++format) {
    const Operands operands(on, format, {9, 64, 128, true});
    const GraphExec graph = must(on.stream.capture([&] { return blas->multiply(operands.product(), on.stream); }));
    for (int i = 0; i < 3; ++i) must(on.stream.launch(graph));
    operands.check(on, 3);
  }
}

}  // namespace
}  // namespace paramwire::gpu
