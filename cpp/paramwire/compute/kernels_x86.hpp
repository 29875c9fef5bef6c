// The AVX2 and AVX-512 sets of kernels.hpp. Call a set only when usable_sets() gives it.
#pragma once

#include "paramwire/compute/kernels.hpp"

namespace paramwire::kernels {

#if defined(__x86_64__)
extern const Set kAvx2;    // AVX2, FMA, F16C
extern const Set kAvx512;  // AVX-512 F, BW, DQ, VL
#endif

}  // namespace paramwire::kernels
