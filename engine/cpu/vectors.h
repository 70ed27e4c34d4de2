/* What all kernels are written in: vectors as wide as the CPU's, elements of the type they are compiled for, and when threads
 * pay. GCC splits wider vectors badly: attention took 30 times as long with AVX2 in vectors of 16 lanes. */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if __SSE2__
#include <immintrin.h>
#endif

#if __AVX512F__
enum { LANES = 16 };
#elif __AVX2__
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float vf __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4), aligned(4)));

typedef uint16_t bf16;
typedef uint16_t vh __attribute__((vector_size(LANES * 2), aligned(2)));

static inline vf load_bf16(const bf16 *p) {
#if __SSE2__ && !__AVX2__
    return (vf)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)p));
#else
    return (vf)(__builtin_convertvector(*(const vh *)p, vu) << 16);
#endif
}
/* Round to nearest even; a NaN stays one. */
static inline void store_bf16(bf16 *p, vf x) {
    vu bits = (vu)x;
    vu rounded = bits + 0x7fff + ((bits >> 16) & 1);
    vu is_nan = (vu)(x != x);
    rounded = (rounded & ~is_nan) | ((bits | 0x400000) & is_nan);
    *(vh *)p = __builtin_convertvector(rounded >> 16, vh);
}
static inline float bf16_to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline bf16 float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bf16)((x != x ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* elem: of activations; kv: of the KV cache. */
#if ELEM_BF16
typedef bf16 elem;
static inline vf load_elems(const elem *p) { return load_bf16(p); }
static inline void store_elems(elem *p, vf x) { store_bf16(p, x); }
static inline float load1(elem x) { return bf16_to_float(x); }
static inline elem store1(float x) { return float_to_bf16(x); }
#else
typedef float elem;
static inline vf load_elems(const elem *p) { return *(const vf *)p; }
static inline void store_elems(elem *p, vf x) { *(vf *)p = x; }
static inline float load1(elem x) { return x; }
static inline elem store1(float x) { return x; }
#endif
#if KV_BF16
typedef bf16 kv;
static inline vf load_kv(const kv *p) { return load_bf16(p); }
static inline kv store_kv(float x) { return float_to_bf16(x); }
#else
typedef float kv;
static inline vf load_kv(const kv *p) { return *(const vf *)p; }
static inline kv store_kv(float x) { return x; }
#endif

static inline vf splat(float x) { return x - (vf){0}; }
static inline vf loadf(const float *p) { return *(const vf *)p; }
static inline void storef(float *p, vf x) { *(vf *)p = x; }
static inline vf choose(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

static inline float sum_lanes(vf x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

/* e^x to about 2 ulp: 2^n times a polynomial on |r| <= ln(2)/2. Below -87 it is 0, which holds for -inf too. */
static inline vf exp_lanes(vf x) {
    vi tiny = x < -87.0f;
    x = choose(tiny, splat(-87.0f), x);
    x = choose(x > 88.0f, splat(88.0f), x);
    vf shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to the nearest integer, held in the low bits */
    vf n = shifted - 12582912.0f;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vi scale = ((vi)shifted - 0x4b400000 + 127) << 23;
    return choose(tiny, splat(0), p * (vf)scale);
}

/* Threads cost more than they save on little work, and most of all on a machine that is busy. */
static inline int threads_for(int64_t num_elements, int num_threads) { return num_elements < 32768 ? 1 : num_threads; }

/* Of a model's attention; block_len: tokens in a block of the KV cache. */
typedef struct {
    int64_t heads, kv_heads, head_dim, block_len;
} Shape;
