/* Which kernels this processor runs, and which are in use. */
#include "te.h"

#if defined(TE_HAVE_AVX2) || defined(TE_HAVE_VNNI)
#include <cpuid.h>
#endif
#if defined(TE_HAVE_DOTPROD) && defined(__linux__)
#include <sys/auxv.h>
#endif

extern const TeKernels te_kernels_portable;
#if defined(TE_HAVE_AVX2)
extern const TeKernels te_kernels_avx2;
#endif
#if defined(TE_HAVE_AVXVNNI)
extern const TeKernels te_kernels_avxvnni;
#endif
#if defined(TE_HAVE_VNNI)
extern const TeKernels te_kernels_vnni;
#endif
#if defined(TE_HAVE_DOTPROD)
extern const TeKernels te_kernels_dotprod;
#endif

#if defined(TE_HAVE_AVX2) || defined(TE_HAVE_VNNI)
/* Not __builtin_cpu_supports: it needs a part of the compiler's runtime library that zig's does not have. */
static int has_x86_features(int wants_avx512)
{
    unsigned eax, ebx, ecx, edx, saved_low, saved_high;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx))
        return 0;
    const unsigned fma = 1u << 12, os_saves = 1u << 27, f16c = 1u << 29;
    if (~ecx & (fma | os_saves | f16c))
        return 0;
    /* Which registers the system keeps when it switches threads: those of AVX, and of AVX-512. */
    __asm__ volatile("xgetbv" : "=a"(saved_low), "=d"(saved_high) : "c"(0));
    if (~saved_low & (wants_avx512 ? 0xe6u : 0x6u))
        return 0;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
        return 0;
    const unsigned avx2 = 1u << 5, avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, vnni = 1u << 11; /* F DQ BW VL */
    if (~ebx & avx2)
        return 0;
    return !wants_avx512 || !(~ebx & avx512 || ~ecx & vnni);
}

/* Of processors with AVX2. */
__attribute__((unused)) static int has_avx_vnni(void)
{
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax >> 4 & 1;
}
#endif

static int32_t has_bf16;

int32_t te_has_bf16(void)
{
    return has_bf16;
}

static const TeKernels *chosen;
static int32_t chosen_isa;

static const TeKernels *kernels_of(int32_t isa)
{
    switch (isa) {
    case TE_PORTABLE:
        return &te_kernels_portable;
#if defined(TE_HAVE_AVX2)
    case TE_AVX2:
        return has_x86_features(0) ? &te_kernels_avx2 : NULL;
#endif
#if defined(TE_HAVE_AVXVNNI)
    case TE_AVX_VNNI:
        return has_x86_features(0) && has_avx_vnni() ? &te_kernels_avxvnni : NULL;
#endif
#if defined(TE_HAVE_VNNI)
    case TE_VNNI:
        return has_x86_features(1) ? &te_kernels_vnni : NULL;
#endif
#if defined(TE_HAVE_DOTPROD) && defined(__linux__)
    case TE_DOTPROD:
        return getauxval(AT_HWCAP) & (1u << 20) ? &te_kernels_dotprod : NULL; /* HWCAP_ASIMDDP */
#elif defined(TE_HAVE_DOTPROD)
    case TE_DOTPROD:
        return &te_kernels_dotprod; /* every ARM Mac has it */
#endif
    default:
        return NULL;
    }
}

int32_t te_isa_is_supported(int32_t isa)
{
    return kernels_of(isa) != NULL;
}

int32_t te_set_isa(int32_t isa)
{
    const TeKernels *kernels = kernels_of(isa);
    if (!kernels)
        return 0;
    chosen = kernels;
    chosen_isa = isa;
    return 1;
}

__attribute__((constructor)) static void choose_fastest(void)
{
#if defined(TE_HAVE_VNNI)
    unsigned eax, ebx, ecx, edx;
    has_bf16 = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax >> 5 & 1;
#endif
    for (int32_t isa = TE_NUM_ISAS - 1; !te_set_isa(isa); isa--)
        ;
}

int32_t te_isa(void)
{
    return chosen_isa;
}

const TeKernels *te_kernels(void)
{
    return chosen;
}
