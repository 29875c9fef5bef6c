// The bodies of all kernels of integrity_args.hpp.
#pragma once

#include "paramwire/cuda/kernels/crc_bodies.hpp"
#include "paramwire/cuda/kernels/decode_bodies.hpp"
