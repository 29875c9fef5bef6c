// The bodies of all kernels of compute_args.hpp.
#pragma once

#include "paramwire/cuda/kernels/attention_bodies.hpp"
#include "paramwire/cuda/kernels/elementwise_bodies.hpp"
#include "paramwire/cuda/kernels/expert_bodies.hpp"
#include "paramwire/cuda/kernels/gemv_bodies.hpp"
