// The reference backend: runs on any processor, holds no parameters, uses bf16, f16 and f32 weights as they are.
//
// Products of a few tokens (decoding) go row by row through the kernels of kernels.hpp; products of many (prompts) widen a
// tile of rows that fits the L2 cache to float32 and call the BLAS of blas.hpp, one tile and one thread at a time. All sums
// are float32 (means, squares and lengths of rows double).
#pragma once

#include "paramwire/compute/backend.hpp"
#include "paramwire/compute/kernels.hpp"

namespace paramwire {

// Open it. The product is compared with a plain one in double precision first, for each format and each routine that a step
// would use: libraries have given wrong results on processors younger than they are.
// errors: kInvalid: more than 256 threads; kUnavailable naming the library and kernel whose product is wrong;
//         kBackpressure when a thread can't start.
Result<std::unique_ptr<Backend>> open_cpu_backend(const BackendOptions& options);

// The check that open_cpu_backend() makes, with the kernels of `set`. Below 2 ms. errors: kUnavailable, as there.
Status check_cpu_products(const kernels::Set& set);

// The reason of Availability, after the same check.
Availability cpu_backend_available();

}  // namespace paramwire
