/* Which kernels this processor runs, and which are in use. */
#include "te.h"

#if defined(TE_HAVE_DOTPROD) && defined(__linux__)
#include <sys/auxv.h>
#endif

extern const TeKernels te_kernels_portable;
#if defined(TE_HAVE_AVX2)
extern const TeKernels te_kernels_avx2;
#endif
#if defined(TE_HAVE_VNNI)
extern const TeKernels te_kernels_vnni;
#endif
#if defined(TE_HAVE_DOTPROD)
extern const TeKernels te_kernels_dotprod;
#endif

static const TeKernels *chosen;
static int32_t chosen_isa;

static const TeKernels *kernels_of(int32_t isa)
{
    switch (isa) {
    case TE_PORTABLE:
        return &te_kernels_portable;
#if defined(TE_HAVE_AVX2)
    case TE_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &te_kernels_avx2 : NULL;
#endif
#if defined(TE_HAVE_VNNI)
    case TE_VNNI:
        return __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")
                   ? &te_kernels_vnni
                   : NULL;
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
#if defined(__x86_64__)
    __builtin_cpu_init();
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
