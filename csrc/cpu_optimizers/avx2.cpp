// The kernels for processors with AVX2, FMA and F16C.
#ifdef __x86_64__
#include <immintrin.h>

#define DS_FMA
#define DS_F16C
#define KERNELS avx2_kernels
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#include "kernels.h"
#pragma clang attribute pop
#else
#pragma GCC target("avx2,fma,f16c")
#include "kernels.h"
#endif
#endif
