/* One vector of floats of this processor: what all kernels are made of. */
#pragma once
#include <math.h>
#include <stdint.h>

/* One vector register of floats, and sum + a * b with one rounding where the processor has it. The compiler is told not
 * to contract products and sums by itself (-ffp-contract=off): it may do so in one copy of a loop and not in another. */
#if defined __AVX512F__
#include <immintrin.h>
#define LANES 16
#define NUM_REGISTERS 32
#elif defined __FMA__
#include <immintrin.h>
#define LANES 8
#define NUM_REGISTERS 16
#elif defined __aarch64__
#include <arm_neon.h>
#define LANES 4
#define NUM_REGISTERS 32
#else
#define LANES 4
#define NUM_REGISTERS 16
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec v) { *(vec *)p = v; }

/* splat; sum + a * b; the sum of all lanes, in one order of additions. */
#if defined __AVX512F__
static inline float sum_lanes(vec v) { return _mm512_reduce_add_ps((__m512)v); }
static inline vec splat(float x) { return (vec)_mm512_set1_ps(x); }
static inline vec add_product(vec sum, vec a, vec b) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }
#elif defined __FMA__
static inline float sum_lanes(vec v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
static inline vec splat(float x) { return (vec)_mm256_set1_ps(x); }
static inline vec add_product(vec sum, vec a, vec b) { return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum); }
#elif defined __aarch64__
static inline float sum_lanes(vec v) { return vaddvq_f32((float32x4_t)v); }
static inline vec splat(float x) { return (vec)vdupq_n_f32(x); }
static inline vec add_product(vec sum, vec a, vec b) {
    return (vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
}
#else
static inline float sum_lanes(vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
static inline vec splat(float x) { return x - (vec){0}; }
static inline vec add_product(vec sum, vec a, vec b) { return sum + a * b; }
#endif

/* ---- exp ---------------------------------------------------------------------------------------------------------
 * 2^n * p(r), the polynomial of the Cephes library (expf), for arguments clamped to [-87, 88]: no denormals. */
static inline vec exp_vec(vec x) {
    for (int i = 0; i < LANES; i++) x[i] = x[i] < -87.0f ? -87.0f : x[i] > 88.0f ? 88.0f : x[i];
    vec scaled = x * 1.44269504088896341f;
    ivec n;
    for (int i = 0; i < LANES; i++) n[i] = (int32_t)(scaled[i] + (scaled[i] < 0 ? -0.5f : 0.5f));
    vec whole;
    for (int i = 0; i < LANES; i++) whole[i] = (float)n[i];
    vec r = add_product(add_product(x, whole, splat(-0.693359375f)), whole, splat(2.12194440e-4f));
    vec p = add_product(splat(1.3981999507e-3f), splat(1.9875691500e-4f), r);
    p = add_product(splat(8.3334519073e-3f), p, r);
    p = add_product(splat(4.1665795894e-2f), p, r);
    p = add_product(splat(1.6666665459e-1f), p, r);
    p = add_product(splat(5.0000001201e-1f), p, r);
    p = add_product(r, p, r * r) + 1.0f;
    ivec bits = (n + 127) << 23;
    return p * (vec)bits;
}
