/* Vectors of eight floats, for whatever processor this file is compiled for. */
#ifndef TE_SIMD_H
#define TE_SIMD_H

#include "half.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define TE_INLINE static inline __attribute__((always_inline, unused))

typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));

TE_INLINE vf vf_load(const float *p)
{
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

TE_INLINE void vf_store(float *p, vf v)
{
    memcpy(p, &v, sizeof v);
}

TE_INLINE vf vf_set(float x)
{
    return (vf){x, x, x, x, x, x, x, x};
}

TE_INLINE vi vi_load(const void *p)
{
    vi v;
    memcpy(&v, p, sizeof v);
    return v;
}

TE_INLINE vf vf_from(vi a)
{
    return __builtin_convertvector(a, vf);
}

TE_INLINE vf vf_zero(void)
{
    return (vf){0};
}

TE_INLINE vi vi_set(int32_t x)
{
    return (vi){x, x, x, x, x, x, x, x};
}

/* a * b + c, rounded once where the processor can. */
TE_INLINE vf vf_fma(vf a, vf b, vf c)
{
#if defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    float32x4_t av[2], bv[2], cv[2];
    memcpy(av, &a, 32);
    memcpy(bv, &b, 32);
    memcpy(cv, &c, 32);
    cv[0] = vfmaq_f32(cv[0], av[0], bv[0]);
    cv[1] = vfmaq_f32(cv[1], av[1], bv[1]);
    memcpy(&c, cv, 32);
    return c;
#else
    return a * b + c;
#endif
}

TE_INLINE vf vf_select(vi mask, vf yes, vf no)
{
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}

TE_INLINE vf vf_max(vf a, vf b)
{
#if defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vf_select(a > b, a, b);
#endif
}

TE_INLINE vf vf_min(vf a, vf b)
{
#if defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return vf_select(a < b, a, b);
#endif
}

TE_INLINE vf vf_abs(vf a)
{
    return (vf)((vi)a & vi_set(0x7fffffff));
}

/* Always in this order: lanes four apart, then two, then one. */
TE_INLINE float vf_sum(vf a)
{
#if defined(__AVX2__)
    __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)a), _mm256_extractf128_ps((__m256)a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
    float s0 = a[0] + a[4], s1 = a[1] + a[5], s2 = a[2] + a[6], s3 = a[3] + a[7];
    return (s0 + s2) + (s1 + s3);
#endif
}

TE_INLINE int32_t vi_sum(vi a)
{
#if defined(__AVX2__)
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
#else
    return ((a[0] + a[4]) + (a[1] + a[5])) + ((a[2] + a[6]) + (a[3] + a[7]));
#endif
}

TE_INLINE float vf_largest(vf a)
{
#if defined(__AVX2__)
    __m128 s = _mm_max_ps(_mm256_castps256_ps128((__m256)a), _mm256_extractf128_ps((__m256)a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
#else
    float s0 = a[0] > a[4] ? a[0] : a[4], s1 = a[1] > a[5] ? a[1] : a[5];
    float s2 = a[2] > a[6] ? a[2] : a[6], s3 = a[3] > a[7] ? a[3] : a[7];
    s0 = s0 > s2 ? s0 : s2;
    s1 = s1 > s3 ? s1 : s3;
    return s0 > s1 ? s0 : s1;
#endif
}

TE_INLINE vf vf_load_half(const uint16_t *p)
{
#if defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
    float16x4_t h[2];
    float32x4_t f[2];
    vf v;
    memcpy(h, p, 16);
    f[0] = vcvt_f32_f16(h[0]);
    f[1] = vcvt_f32_f16(h[1]);
    memcpy(&v, f, 32);
    return v;
#else
    vf v;
    for (int i = 0; i < 8; i++)
        v[i] = te_half_to_float(p[i]);
    return v;
#endif
}

TE_INLINE void vf_store_half(uint16_t *p, vf v)
{
#if defined(__F16C__)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < 8; i++)
        p[i] = te_float_to_half(v[i]);
#endif
}

/* The nearest integer, ties to even, for numbers below 2^22. */
TE_INLINE vf vf_round(vf x)
{
    const vf magic = vf_set(12582912.0f);
    return (x + magic) - magic;
}

/* e^r for |r| <= ln 2 / 2, of Cephes' expf, for vectors of some width. */
#define TE_EXP_SERIES(name, vector, set, fma)                                                                          \
    TE_INLINE vector name(vector r)                                                                                    \
    {                                                                                                                  \
        vector p = set(1.9875691500e-4f);                                                                              \
        p = fma(p, r, set(1.3981999507e-3f));                                                                          \
        p = fma(p, r, set(8.3334519073e-3f));                                                                          \
        p = fma(p, r, set(4.1665795894e-2f));                                                                          \
        p = fma(p, r, set(1.6666665459e-1f));                                                                          \
        p = fma(p, r, set(5.0000001201e-1f));                                                                          \
        return fma(p, r * r, r + set(1.0f));                                                                           \
    }
TE_EXP_SERIES(vf_exp_series, vf, vf_set, vf_fma)

/* e^x to about 1e-7, relative; exactly 0 below -87.3 and for -infinity; NaN stays NaN. After Cephes' expf: x = n ln 2
 * + r with |r| <= ln 2 / 2, and a polynomial for e^r. */
TE_INLINE vf vf_exp(vf x)
{
    vi is_tiny = x < vf_set(-87.3f);
    vf bounded = vf_select(is_tiny, vf_set(-87.3f), x);
    bounded = vf_select(bounded > vf_set(88.3f), vf_set(88.3f), bounded);
    vf n = vf_round(bounded * vf_set(1.44269504088896341f));
    vf r = vf_fma(n, vf_set(-0.693359375f), bounded);
    r = vf_fma(n, vf_set(2.12194440e-4f), r);
    const vf p = vf_exp_series(r);
    /* A NaN has no integer: its lane is converted from 0, and p is NaN already. */
    vi exponent = __builtin_convertvector(vf_select(n == n, n, vf_zero()), vi);
    vf scaled = p * (vf)((exponent + vi_set(127)) << 23);
    return vf_select(is_tiny, vf_zero(), scaled);
}

/* ---- sixteen floats: one vector, or two of eight ---- */

#if defined(__AVX512VNNI__)
typedef __m512 vw;

TE_INLINE vw vw_zero(void)
{
    return _mm512_setzero_ps();
}

TE_INLINE vw vw_set(float x)
{
    return _mm512_set1_ps(x);
}

TE_INLINE vw vw_load_half(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

TE_INLINE void vw_store(float *p, vw v)
{
    _mm512_storeu_ps(p, v);
}

TE_INLINE vw vw_fma(vw a, vw b, vw c)
{
    return _mm512_fmadd_ps(a, b, c);
}

TE_EXP_SERIES(vw_exp_series, vw, vw_set, vw_fma)

/* vf_exp, twice as wide: the same operations. */
TE_INLINE vw vw_exp(vw x)
{
    const __mmask16 is_tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_LT_OQ);
    __m512 bounded = _mm512_mask_mov_ps(x, is_tiny, _mm512_set1_ps(-87.3f));
    bounded = _mm512_mask_mov_ps(bounded, _mm512_cmp_ps_mask(bounded, _mm512_set1_ps(88.3f), _CMP_GT_OQ),
                                 _mm512_set1_ps(88.3f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(bounded, _mm512_set1_ps(1.44269504088896341f)),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693359375f), bounded);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    const __m512 p = vw_exp_series(r);
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    const __m512 scaled = _mm512_mul_ps(p, (__m512)_mm512_slli_epi32(exponent, 23)); /* a NaN in p stays */
    return _mm512_maskz_mov_ps(_mm512_knot(is_tiny), scaled);
}
#else
typedef struct {
    vf low, high;
} vw;

TE_INLINE vw vw_zero(void)
{
    return (vw){vf_zero(), vf_zero()};
}

TE_INLINE vw vw_set(float x)
{
    return (vw){vf_set(x), vf_set(x)};
}

TE_INLINE vw vw_load_half(const uint16_t *p)
{
    return (vw){vf_load_half(p), vf_load_half(p + 8)};
}

TE_INLINE void vw_store(float *p, vw v)
{
    vf_store(p, v.low);
    vf_store(p + 8, v.high);
}

TE_INLINE vw vw_fma(vw a, vw b, vw c)
{
    return (vw){vf_fma(a.low, b.low, c.low), vf_fma(a.high, b.high, c.high)};
}
#endif

/* 1 / (1 + e^-x). */
TE_INLINE vf vf_sigmoid(vf x)
{
    return vf_set(1.0f) / (vf_set(1.0f) + vf_exp(-x));
}

/* To about 1e-7, absolute. */
TE_INLINE vf vf_tanh(vf x)
{
    return vf_set(1.0f) - vf_set(2.0f) / (vf_set(1.0f) + vf_exp(x + x));
}

#endif
