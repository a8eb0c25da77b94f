/* The kernels for one kind of processor: compiled once for each, with its flags and its name as TE_VARIANT. */
#include "attention.h"
#include "elementwise.h"
#include "encoder.h"
#include "products.h"

#define TE_PASTE(a, b) a##b
#define TE_TABLE(variant) TE_PASTE(te_kernels_, variant)

extern const TeKernels TE_TABLE(TE_VARIANT);
const TeKernels TE_TABLE(TE_VARIANT) = {
    .quantize = quantize,
    .linear = linear,
    .rounded_linear = rounded_linear,
    .embedding = embedding,
    .rms_norm = rms_norm,
    .add = add,
    .lora = lora,
    .soft_cap = soft_cap,
    .gated = gated,
    .rope_write = rope_write,
    .attention = attention,
    .merge = merge,
    .layer_norm = layer_norm,
    .activate = activate,
    .full_attention = full_attention,
};
