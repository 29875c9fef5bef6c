// The one BLAS routine that the CPU backend uses, behind one declaration.
//
// Library: BLIS (Debian's libblis-serial-dev, static, no threads of its own). Weighed on a Xeon of a model that appeared
// after Debian 12, [160, 576] x [576, 4096] float32, one thread: OpenBLAS 0.3.21 doesn't know the model and falls back to its
// SSE3 kernels, 28 GFLOP/s (107 when its AVX-512 kernels are forced by an environment variable, which a library inside
// another program must not touch); BLIS 0.9.0 chooses by feature bits and gives 47 to 55. oneDNN has no static archive and
// brings OpenMP's threads. BLIS is safe to call from several threads, also in its serial build (BLIS FAQ, "Is BLIS
// thread-safe?"): 8 threads of products gave no wrong element.
#pragma once

#include <cstddef>
#include <string>

namespace paramwire::blas {

// y[t][r] = (accumulate ? itself : 0) + sum over c of x[t][c] * w[r][c]; float32, row-major, row strides in elements.
// Allocates packing buffers at the first call of each thread that runs at the same time (a few MiB), then reuses them.
// threads: any.
void multiply(std::size_t tokens, std::size_t rows, std::size_t columns, const float* x, std::size_t x_stride, const float* w,
              std::size_t w_stride, float* y, std::size_t y_stride, bool accumulate);

// "BLIS 0.9.0, haswell kernels".
std::string description();

}  // namespace paramwire::blas
