// The cases of every kernel in kernels/list.hpp, by family; parity_test.cpp fails for a kernel that none of them launches.
#pragma once

#include "gpu/case.hpp"

#include <vector>

namespace paramwire::gpu {

std::vector<Case> row_cases(const Scale& scale);          // embedding, bias, norms, soft-max, mean, normalise, top k
std::vector<Case> element_cases(const Scale& scale);      // pairs, casts, rotary, cache
std::vector<Case> attention_cases(const Scale& scale);
std::vector<Case> product_cases(const Scale& scale);      // gemv, experts
std::vector<Case> integrity_cases(const Scale& scale);    // CRCs, generation
std::vector<Case> decode_cases(const Scale& scale);       // planes, exclusive or, steps, sparse
std::vector<Case> all_cases(const Scale& scale);

}  // namespace paramwire::gpu
