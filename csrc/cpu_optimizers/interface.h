// What interface.cpp and the three builds of kernels.h share. The structs up to LionNumbers are mirrored, field by field, in
// deepspeed/ops/native/cpu_optimizers.py.
#pragma once
#include <stdint.h>

enum DataType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// One update: arrays of `numel` elements at any address, of which none overlap. state[1] is null for rules with one state, out
// for an update that rounds into no other array. The results go into new_param and new_state, in the types of param and state;
// null for those themselves. The gradient counts `factor` times.
struct Tensors {
    int64_t numel;
    void *param, *state[2];
    void *new_param, *new_state[2];
    const void *grad;
    void *out;
    DataType param_type, state_type, grad_type, out_type;
    float factor;
};

struct AdamNumbers {
    float decay;  // lr * weight_decay where is_decoupled (AdamW), else weight_decay
    float beta1, rest1, beta2, rest2;  // rest = 1 - beta, rounded once from double
    float step_size, root, eps;  // lr / (1 - beta1^step), 1 / sqrt(1 - beta2^step)
    int32_t is_decoupled;
};

struct AdagradNumbers {
    float lr, eps, weight_decay;
};

struct LionNumbers {
    float lr, decay, beta1, rest1, beta2, rest2;  // decay = lr * weight_decay
};

// An update of the elements begin to end.
template <class Numbers>
using Kernel = void (*)(const Tensors &, const Numbers &, int64_t begin, int64_t end);

struct Kernels {
    Kernel<AdamNumbers> adam, adam_rollback;
    Kernel<AdagradNumbers> adagrad;
    Kernel<LionNumbers> lion;
};

extern const Kernels scalar_kernels, avx2_kernels, avx512_kernels;
