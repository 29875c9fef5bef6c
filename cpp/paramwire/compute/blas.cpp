#include "paramwire/compute/blas.hpp"

#include "paramwire/base/text.hpp"

#include <blis.h>
#include <cblas.h>

namespace paramwire::blas {

void multiply(std::size_t tokens, std::size_t rows, std::size_t columns, const float* x, std::size_t x_stride, const float* w,
              std::size_t w_stride, float* y, std::size_t y_stride, bool accumulate) {
  // Sizes fit an int: the caller cuts rows into tiles, steps are bounded, and columns are a model's width.
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<f77_int>(tokens), static_cast<f77_int>(rows),
              static_cast<f77_int>(columns), 1.0F, x, static_cast<f77_int>(x_stride), w, static_cast<f77_int>(w_stride),
              accumulate ? 1.0F : 0.0F, y, static_cast<f77_int>(y_stride));
}

std::string description() {
  return cat("BLIS ", static_cast<const char*>(bli_info_get_version_str()), ", ",
             static_cast<const char*>(bli_arch_string(bli_arch_query_id())), " kernels");
}

}  // namespace paramwire::blas
