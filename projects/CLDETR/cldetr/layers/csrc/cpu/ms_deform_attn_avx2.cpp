// The kernels for processors with AVX2 and FMA; compiled with these enabled, whatever the default:
// by pragmas, because torch.utils.cpp_extension has one set of flags for all files.

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define CLDETR_AVX2
#define CLDETR_ISA cpu::avx2
#include "ms_deform_attn_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
