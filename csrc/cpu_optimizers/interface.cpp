// The library's functions: choice of the instruction set, and threads. Updates return 0, or -1 for an instruction set or a data
// type that there is not. See deepspeed/ops/native/cpu_optimizers.py for their callers.
#include "interface.h"

#ifdef DS_OPENMP
#include <omp.h>
#endif
#ifdef __x86_64__
#include <cpuid.h>
#endif

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

// Below this a thread costs more than it saves. A multiple of a cache line for every data type, so that two threads
// share a line of no array that begins at one.
constexpr int64_t CHUNK = 1 << 15;

enum InstructionSet : int32_t { SCALAR = 0, AVX2 = 1, AVX512 = 2 };

const Kernels *kernels_for(int32_t instruction_set) {
    switch (instruction_set) {
        case SCALAR: return &scalar_kernels;
#ifdef __x86_64__
        case AVX2: return &avx2_kernels;
        case AVX512: return &avx512_kernels;
#endif
        default: return nullptr;
    }
}

bool is_known(DataType type) { return type >= FLOAT32 && type <= FLOAT16; }

template <class Numbers>
void run(Kernel<Numbers> kernel, const Tensors &t, const Numbers &numbers, int threads) {
    const int64_t chunks = (t.numel + CHUNK - 1) / CHUNK;
    if (threads > chunks) threads = static_cast<int>(chunks);
#ifdef DS_OPENMP
    if (threads > 1) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const int64_t end = (chunk + 1) * CHUNK;
            kernel(t, numbers, chunk * CHUNK, end < t.numel ? end : t.numel);
        }
        return;
    }
#endif
    kernel(t, numbers, 0, t.numel);
}

template <class Numbers>
int32_t update(Kernel<Numbers> Kernels::*rule, const Tensors *t, const Numbers *numbers, int32_t threads,
               int32_t instruction_set) {
    const Kernels *kernels = kernels_for(instruction_set);
    if (kernels == nullptr) return -1;
    if (!is_known(t->param_type) || !is_known(t->state_type) || !is_known(t->grad_type) || !is_known(t->out_type)) return -1;
    run(kernels->*rule, *t, *numbers, threads);
    return 0;
}

}  // namespace

// The best instruction set of this processor: 0 scalar, 1 AVX2 (with FMA and F16C), 2 AVX-512 (F, BW, DQ, VL).
EXPORTED int32_t ds_best_instruction_set() {
#ifdef __x86_64__
    __builtin_cpu_init();
    unsigned eax, ebx, ecx = 0, edx;
    // Not every compiler's __builtin_cpu_supports knows F16C.
    const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    const bool has_avx2 = has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return AVX512;
    if (has_avx2) return AVX2;
#endif
    return SCALAR;
}

// For callers to see that they mean the same struct.
EXPORTED int32_t ds_size_of_tensors() { return sizeof(Tensors); }

EXPORTED int32_t ds_has_threads() {
#ifdef DS_OPENMP
    return 1;
#else
    return 0;
#endif
}

EXPORTED int32_t ds_adam(const Tensors *t, const AdamNumbers *numbers, int32_t threads, int32_t instruction_set) {
    return update(&Kernels::adam, t, numbers, threads, instruction_set);
}

EXPORTED int32_t ds_adam_rollback(const Tensors *t, const AdamNumbers *numbers, int32_t threads, int32_t instruction_set) {
    return update(&Kernels::adam_rollback, t, numbers, threads, instruction_set);
}

EXPORTED int32_t ds_adagrad(const Tensors *t, const AdagradNumbers *numbers, int32_t threads, int32_t instruction_set) {
    return update(&Kernels::adagrad, t, numbers, threads, instruction_set);
}

EXPORTED int32_t ds_lion(const Tensors *t, const LionNumbers *numbers, int32_t threads, int32_t instruction_set) {
    return update(&Kernels::lion, t, numbers, threads, instruction_set);
}
