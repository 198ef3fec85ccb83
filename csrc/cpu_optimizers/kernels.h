// The update rules, compiled once per instruction set: scalar.cpp, avx2.cpp and avx512.cpp set the compiler's target and
// include this file, and the compiler vectorises the loops. KERNELS is the name of the table that it defines.
//
// Note [Same numbers everywhere]. An element's result must depend neither on the instruction set nor on where it lies, so that
// one run can be compared with another. So each rule says with `fma` where a product is added without rounding,
// -ffp-contract=off forbids the compiler to choose, and the rest are operations that IEEE 754 rounds in one way.
//
// Note [Blocks]. Memory is the limit, so each array is to be read and written once. A block is small enough for the
// first-level cache: 16-bit arrays are widened into buffers there, the rule runs on fp32, and results are rounded from there.
// Hardware prefetches each array well; software prefetches and larger blocks were measured and were slower.
//
// Nothing from the C++ library is used here: an inline function of it, compiled for AVX-512, could become the one that the
// whole program calls.
#include "interface.h"

#if defined(DS_F16C) || defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t BLOCK = 128;
constexpr int64_t LINE = 64;  // bytes of a cache line
// Smaller outputs may still be in the cache when they are read.
constexpr int64_t STREAMED_NUMEL = 1 << 18;

inline uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

// a * b + c, rounded once.
inline float fma(float a, float b, float c) {
#if defined(DS_FMA) || defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    // The product is exact in double. The sum is rounded twice, which differs from once in about 1 of 2^29 cases.
    return static_cast<float>(static_cast<double>(a) * b + c);
#endif
}

// ---- 16-bit formats: to nearest, ties to even; NaN stays NaN

inline float from_bfloat16(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

inline uint16_t to_bfloat16(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40;
    return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

inline float from_float16(uint16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, rest = x & 0x7fff;
    if (rest < 0x400) return float_of(sign | bits_of(static_cast<float>(rest) * 0x1p-24f));
    if (rest < 0x7c00) return float_of(sign | ((rest << 13) + (112u << 23)));
    return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000 : 0));
}

inline uint16_t to_float16(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return sign | 0x7e00 | (rest >> 13 & 0x3ff);
    if (rest >= 0x477ff000) return sign | 0x7c00;  // 65520 and more
    if (rest >= 0x38800000) return sign | (rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13;
    return sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f));  // in [0.5, 1) floats lie as far apart as these: 2^-24
}

void widen(const uint16_t *__restrict from, DataType type, float *__restrict to, int64_t n) {
    int64_t i = 0;
    if (type == BFLOAT16) {
        for (; i < n; ++i) to[i] = from_bfloat16(from[i]);
        return;
    }
#ifdef DS_F16C
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i))));
#endif
    for (; i < n; ++i) to[i] = from_float16(from[i]);
}

void narrow(const float *__restrict from, uint16_t *__restrict to, DataType type, int64_t n) {
    int64_t i = 0;
    if (type == BFLOAT16) {
        for (; i < n; ++i) to[i] = to_bfloat16(from[i]);
        return;
    }
#ifdef DS_F16C
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
    for (; i < n; ++i) to[i] = to_float16(from[i]);
}

// ---- blocks

inline int64_t size_of(DataType type) { return type == FLOAT32 ? 4 : 2; }

inline char *at(void *array, DataType type, int64_t index) { return static_cast<char *>(array) + index * size_of(type); }

// Elements of an array as fp32: in place, or widened into `buffer`.
float *open(void *array, DataType type, int64_t start, int64_t n, float *buffer) {
    if (array == nullptr) return nullptr;
    char *from = at(array, type, start);
    if (type == FLOAT32) return reinterpret_cast<float *>(from);
    widen(reinterpret_cast<uint16_t *>(from), type, buffer, n);
    return buffer;
}

// The same for elements whose results go elsewhere: never in place.
float *open_copy(void *array, DataType type, int64_t start, int64_t n, float *buffer) {
    const float *opened = open(array, type, start, n, buffer);
    if (opened != nullptr && opened != buffer) __builtin_memcpy(buffer, opened, n * sizeof(float));
    return opened == nullptr ? nullptr : buffer;
}

// Scales the gradient into `buffer`.
void load_gradient(const Tensors &t, int64_t start, int64_t n, float *__restrict buffer) {
    const float factor = t.factor;
    const float *from = open(const_cast<void *>(t.grad), t.grad_type, start, n, buffer);
    if (from == buffer) {
        for (int64_t i = 0; i < n; ++i) buffer[i] *= factor;
    } else {
        const float *__restrict grad = from;
        for (int64_t i = 0; i < n; ++i) buffer[i] = grad[i] * factor;
    }
}

// Writes whole cache lines past the caches: nobody here reads them, and a line written in one go need not be read first.
void write_past_caches(char *__restrict to, const char *__restrict from, int64_t bytes) {
#ifdef __x86_64__
    for (int64_t i = 0; i < bytes; i += 16)
        _mm_stream_si128(reinterpret_cast<__m128i *>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i)));
#else
    __builtin_memcpy(to, from, bytes);
#endif
}

// Rounds `values` into elements of an array that nobody reads soon. rounded: room for a block.
void write(const float *values, void *array, DataType type, int64_t start, int64_t n, bool may_stream, uint16_t *rounded) {
    char *to = at(array, type, start);
    const char *from = reinterpret_cast<const char *>(values);
    if (type != FLOAT32) {
        narrow(values, rounded, type, n);
        from = reinterpret_cast<const char *>(rounded);
    }
    const int64_t bytes = n * size_of(type);
    const bool is_streamed = may_stream && reinterpret_cast<uintptr_t>(to) % LINE == 0 && bytes % LINE == 0;
    is_streamed ? write_past_caches(to, from, bytes) : static_cast<void>(__builtin_memcpy(to, from, bytes));
}

// The reverse of open or open_copy, once the elements are updated. elsewhere: null for the array that was opened.
void close(const float *opened, void *array, void *elsewhere, DataType type, int64_t start, int64_t n, bool may_stream,
           uint16_t *rounded) {
    if (array == nullptr) return;
    if (elsewhere != nullptr) {
        write(opened, elsewhere, type, start, n, may_stream, rounded);
    } else if (type != FLOAT32) {
        narrow(opened, reinterpret_cast<uint16_t *>(at(array, type, start)), type, n);
    }
}

// Elements of the first block: as many as bring what is only written to a cache line, so that all blocks after it can be
// streamed.
int64_t first_block(const Tensors &t, int64_t begin) {
    void *array = t.out == nullptr ? t.new_param : t.out;
    if (array == nullptr) return BLOCK;
    const DataType type = t.out == nullptr ? t.param_type : t.out_type;
    const int64_t beyond = reinterpret_cast<uintptr_t>(at(array, type, begin)) % LINE;
    return beyond == 0 ? BLOCK : (LINE - beyond + size_of(type) - 1) / size_of(type);
}

template <class Rule>
void update(const Tensors &t, const typename Rule::Numbers &numbers, int64_t begin, int64_t end) {
    alignas(LINE) float grad[BLOCK], buffers[3][BLOCK];
    alignas(LINE) uint16_t rounded[BLOCK];
    const bool may_stream = t.numel >= STREAMED_NUMEL;
    const auto open_state = t.new_param == nullptr ? open : open_copy;
    int64_t n = first_block(t, begin);
    for (int64_t start = begin; start < end; start += n, n = BLOCK) {
        if (n > end - start) n = end - start;
        load_gradient(t, start, n, grad);
        float *param = open_state(t.param, t.param_type, start, n, buffers[0]);
        float *state0 = open_state(t.state[0], t.state_type, start, n, buffers[1]);
        float *state1 = open_state(t.state[1], t.state_type, start, n, buffers[2]);
        Rule::apply(numbers, grad, param, state0, state1, n);
        close(param, t.param, t.new_param, t.param_type, start, n, may_stream, rounded);
        close(state0, t.state[0], t.new_state[0], t.state_type, start, n, may_stream, rounded);
        close(state1, t.state[1], t.new_state[1], t.state_type, start, n, may_stream, rounded);
        if (t.out != nullptr) write(param, t.out, t.out_type, start, n, may_stream, rounded);
    }
#ifdef __x86_64__
    _mm_sfence();
#endif
}

// ---- rules

// Weight decay. None at all is a case of its own, since 0 * infinity is NaN; the compiler takes the question out of the loop.
inline float decayed(float param, float decay) { return decay == 0 ? param : fma(-decay, param, param); }

inline float with_decay(float grad, float param, float decay) { return decay == 0 ? grad : fma(decay, param, grad); }

// Kingma and Ba, arXiv:1412.6980; with decoupled decay Loshchilov and Hutter, arXiv:1711.05101.
struct Adam {
    using Numbers = AdamNumbers;

    template <bool DECOUPLED>
    static void loop(const Numbers &numbers, const float *__restrict grad, float *__restrict param, float *__restrict exp_avg,
                     float *__restrict exp_avg_sq, int64_t n) {
        const Numbers k = numbers;
        for (int64_t i = 0; i < n; ++i) {
            const float g = DECOUPLED ? grad[i] : with_decay(grad[i], param[i], k.decay);
            const float p = DECOUPLED ? decayed(param[i], k.decay) : param[i];
            const float m = fma(g, k.rest1, exp_avg[i] * k.beta1);
            const float v = fma(g * g, k.rest2, exp_avg_sq[i] * k.beta2);
            exp_avg[i] = m;
            exp_avg_sq[i] = v;
            param[i] = fma(-k.step_size, m / fma(__builtin_sqrtf(v), k.root, k.eps), p);
        }
    }

    static void apply(const Numbers &k, const float *grad, float *param, float *exp_avg, float *exp_avg_sq, int64_t n) {
        (k.is_decoupled ? loop<true> : loop<false>)(k, grad, param, exp_avg, exp_avg_sq, n);
    }
};

// Adam backwards: param, exp_avg and exp_avg_sq as before the step with the same gradient and numbers, but for rounding.
struct AdamRollback {
    using Numbers = AdamNumbers;

    static void apply(const Numbers &numbers, const float *__restrict grad, float *__restrict param, float *__restrict exp_avg,
                      float *__restrict exp_avg_sq, int64_t n) {
        const Numbers k = numbers;
        const float kept = k.is_decoupled ? 1 - k.decay : 1, coupled = k.is_decoupled ? 0 : k.decay;
        for (int64_t i = 0; i < n; ++i) {
            const float m = exp_avg[i], v = exp_avg_sq[i];
            const float p = fma(k.step_size, m / fma(__builtin_sqrtf(v), k.root, k.eps), param[i]) / kept;
            const float g = with_decay(grad[i], p, coupled);
            const float v_before = fma(g * g, -k.rest2, v) / k.beta2;
            param[i] = p;
            exp_avg[i] = fma(g, -k.rest1, m) / k.beta1;
            exp_avg_sq[i] = v_before < 0 ? 0 : v_before;
        }
    }
};

// Duchi, Hazan and Singer, "Adaptive subgradient methods" (JMLR 12, 2011).
struct Adagrad {
    using Numbers = AdagradNumbers;

    static void apply(const Numbers &numbers, const float *__restrict grad, float *__restrict param, float *__restrict sum,
                      float *, int64_t n) {
        const Numbers k = numbers;
        for (int64_t i = 0; i < n; ++i) {
            const float g = with_decay(grad[i], param[i], k.weight_decay);
            const float v = fma(g, g, sum[i]);
            sum[i] = v;
            param[i] = fma(-k.lr, g / (__builtin_sqrtf(v) + k.eps), param[i]);
        }
    }
};

// Chen et al., "Symbolic discovery of optimization algorithms" (arXiv:2302.06675).
struct Lion {
    using Numbers = LionNumbers;

    static void apply(const Numbers &numbers, const float *__restrict grad, float *__restrict param, float *__restrict exp_avg,
                      float *, int64_t n) {
        const Numbers k = numbers;
        for (int64_t i = 0; i < n; ++i) {
            const float g = grad[i], m = exp_avg[i];
            const float c = fma(g, k.rest1, m * k.beta1);
            const float step = c > 0 ? k.lr : c < 0 ? -k.lr : c * 0;  // the last is 0, or NaN
            exp_avg[i] = fma(g, k.rest2, m * k.beta2);
            param[i] = decayed(param[i], k.decay) - step;
        }
    }
};

}  // namespace

const Kernels KERNELS = {update<Adam>, update<AdamRollback>, update<Adagrad>, update<Lion>};
