// The one list of kernels: X(name, arguments, most threads of a block, blocks, body...). Kernel `name` is pw_<name> in the fatbin, and
// cuda::Kernel::k_<name> in module.hpp; tests run the same bodies on the host.
//
// blocks: how many of them a multiprocessor is to hold at once, which bounds a thread's registers: 65536 / (threads * blocks). Given for
// every kernel, since ptxas by itself aims higher for some, and then spills. tests/python/test_cuda_kernels.py refuses spills.
#pragma once

#include "paramwire/cuda/kernels/compute_args.hpp"
#include "paramwire/cuda/kernels/integrity_args.hpp"

// clang-format off
#define PARAMWIRE_CUDA_KERNELS(X)                                                                    \
  X(embedding_f32, EmbeddingArgs, 512, 3, embedding_body<F32>)                                       \
  X(embedding_bf16, EmbeddingArgs, 512, 3, embedding_body<Bf16>)                                     \
  X(embedding_f16, EmbeddingArgs, 512, 3, embedding_body<F16>)                                       \
  X(rms_norm_f32, NormArgs, 512, 3, rms_norm_body<F32>)                                              \
  X(rms_norm_bf16, NormArgs, 512, 3, rms_norm_body<Bf16>)                                            \
  X(rms_norm_f16, NormArgs, 512, 3, rms_norm_body<F16>)                                              \
  X(layer_norm_f32, NormArgs, 512, 3, layer_norm_body<F32>)                                          \
  X(layer_norm_bf16, NormArgs, 512, 3, layer_norm_body<Bf16>)                                        \
  X(layer_norm_f16, NormArgs, 512, 3, layer_norm_body<F16>)                                          \
  X(rotary_table, RotaryTableArgs, 64, 16, rotary_table_body)                                        \
  X(rotary, RotaryArgs, 256, 4, rotary_body)                                                         \
  X(cache_write, CacheWriteArgs, 256, 4, cache_write_body)                                           \
  X(attention_split, AttentionArgs, 256, 4, attention_split_body)                                    \
  X(attention_join, AttentionArgs, 256, 5, attention_join_body)                                      \
  X(attention_tile, AttentionArgs, 128, 2, attention_tile_body)                                      \
  X(add, PairArgs, 256, 4, pair_body<Add>)                                                           \
  X(swiglu, PairArgs, 256, 4, pair_body<SwiGlu>)                                                     \
  X(gelu, PairArgs, 256, 4, pair_body<GeluExact>)                                                    \
  X(gelu_tanh, PairArgs, 256, 4, pair_body<GeluTanh>)                                                \
  X(softmax, SoftmaxArgs, 512, 3, softmax_body)                                                      \
  X(gemv_f32, GemvArgs, 128, 5, gemv_body<F32>)                                                      \
  X(gemv_bf16, GemvArgs, 128, 5, gemv_body<Bf16>)                                                    \
  X(gemv_f16, GemvArgs, 128, 5, gemv_body<F16>)                                                      \
  X(bias_f32, BiasArgs, 256, 4, bias_body<F32>)                                                      \
  X(bias_bf16, BiasArgs, 256, 4, bias_body<Bf16>)                                                    \
  X(bias_f16, BiasArgs, 256, 4, bias_body<F16>)                                                      \
  X(narrow, CastArgs, 256, 4, narrow_body)                                                           \
  X(widen_bf16, CastArgs, 256, 4, widen_body<Half::kBF16>)                                           \
  X(widen_f16, CastArgs, 256, 4, widen_body<Half::kF16>)                                             \
  X(mean, MeanArgs, 64, 16, mean_body)                                                               \
  X(normalise, NormaliseArgs, 512, 3, normalise_body)                                                \
  X(top_k, TopKArgs, 32, 16, top_k_body)                                                             \
  X(expert_gemv_f32, ExpertArgs, 128, 5, expert_body<F32>)                                           \
  X(expert_gemv_bf16, ExpertArgs, 128, 5, expert_body<Bf16>)                                         \
  X(expert_gemv_f16, ExpertArgs, 128, 5, expert_body<F16>)                                           \
  X(expert_sum, ExpertSumArgs, 256, 4, expert_sum_body)                                              \
  X(crc32c_extents, Crc32cArgs, 128, 9, crc32c_extents_body)                                        \
  X(generation, GenerationArgs, 32, 16, generation_body)                                             \
  X(crc64_strips, Crc64Args, 256, 6, crc64_strips_body)                                              \
  X(crc64_join, Crc64Args, 256, 4, crc64_join_body)                                                  \
  X(merge_1, MergeArgs, 256, 4, merge_body<std::uint8_t>)                                            \
  X(merge_2, MergeArgs, 256, 4, merge_body<std::uint16_t>)                                           \
  X(merge_4, MergeArgs, 256, 4, merge_body<std::uint32_t>)                                           \
  X(merge_8, MergeArgs, 256, 4, merge_body<std::uint64_t>)                                           \
  X(xor_apply, XorArgs, 256, 4, xor_body)                                                            \
  X(steps_1, StepsArgs, 256, 4, steps_body<std::uint8_t>)                                            \
  X(steps_2, StepsArgs, 256, 4, steps_body<std::uint16_t>)                                           \
  X(steps_4, StepsArgs, 256, 4, steps_body<std::uint32_t>)                                           \
  X(steps_8, StepsArgs, 256, 4, steps_body<std::uint64_t>)                                           \
  X(sparse_1, SparseArgs, 256, 4, sparse_body<std::uint8_t>)                                         \
  X(sparse_2, SparseArgs, 256, 4, sparse_body<std::uint16_t>)                                        \
  X(sparse_4, SparseArgs, 256, 4, sparse_body<std::uint32_t>)                                        \
  X(sparse_8, SparseArgs, 256, 4, sparse_body<std::uint64_t>)
// clang-format on
