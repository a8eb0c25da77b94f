/* Half precision, without instructions for it: packing weights and the portable kernels use these. */
#ifndef TE_HALF_H
#define TE_HALF_H

#include <stdint.h>
#include <string.h>

static inline float te_half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, 4);
    value *= 0x1p112f; /* moves the exponent's bias, of subnormal numbers too */
    memcpy(&bits, &value, 4);
    if ((half & 0x7c00) == 0x7c00)
        bits |= 0x7f800000;
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

/* Rounds to nearest, ties to even; what is too large becomes infinite. */
static inline uint16_t te_float_to_half(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits >= 0x7f800000)
        return sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00);
    if (bits >= 0x477ff000)
        return sign | 0x7c00;
    if (bits < 0x38800000) { /* subnormal: the addition puts the last bit where it belongs, and rounds */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    bits += 0xc8000fff + (bits >> 13 & 1);
    return sign | (uint16_t)(bits >> 13);
}

#endif
