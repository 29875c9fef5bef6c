#include "paramwire/compute/kernels_x86.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// One text (kernels_loops.inc) over a small vocabulary of vector operations, compiled once for each level: templates can't
// carry a target, so the pragma around the include does. Intrinsics rather than a SIMD library: Highway's Debian package has
// no static archive to build a self-contained extension with. Everything lies in an unnamed namespace, so no function built
// for a newer processor can be picked by the linker for an older one.

// GCC 12 warns of the deliberately undefined operands inside its own AVX-512 header (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace paramwire::kernels {
namespace {
namespace avx2 {

constexpr const char* kName = "avx2";
using Vector = __m256;
constexpr std::size_t kLanes = 8;
inline Vector zero() { return _mm256_setzero_ps(); }
inline Vector set(float value) { return _mm256_set1_ps(value); }
inline Vector load(const float* source) { return _mm256_loadu_ps(source); }
inline void store(float* target, Vector value) { _mm256_storeu_ps(target, value); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(Vector value) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
inline Vector from_bf16(const std::byte* source) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Vector from_f16(const std::byte* source) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}

#include "paramwire/compute/kernels_loops.inc"

}  // namespace avx2
}  // namespace
}  // namespace paramwire::kernels
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace paramwire::kernels {
namespace {
namespace avx512 {

constexpr const char* kName = "avx512";
using Vector = __m512;
constexpr std::size_t kLanes = 16;
inline Vector zero() { return _mm512_setzero_ps(); }
inline Vector set(float value) { return _mm512_set1_ps(value); }
inline Vector load(const float* source) { return _mm512_loadu_ps(source); }
inline void store(float* target, Vector value) { _mm512_storeu_ps(target, value); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Vector value) { return _mm512_reduce_add_ps(value); }
inline Vector from_bf16(const std::byte* source) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Vector from_f16(const std::byte* source) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}

#include "paramwire/compute/kernels_loops.inc"

}  // namespace avx512
}  // namespace
}  // namespace paramwire::kernels
#pragma GCC pop_options

namespace paramwire::kernels {

const Set kAvx2 = avx2::kSet;
const Set kAvx512 = avx512::kSet;

}  // namespace paramwire::kernels

#endif
