// The kernels for processors with AVX-512 (F, BW, DQ, VL).
#ifdef __x86_64__
#include <immintrin.h>

#define DS_FMA
#define DS_F16C
#define KERNELS avx512_kernels
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#include "kernels.h"
#pragma clang attribute pop
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#include "kernels.h"
#endif
#endif
