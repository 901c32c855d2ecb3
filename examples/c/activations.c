/* The elementwise operations of SPEC 4.1 and 4.2. */

#include "elementary.h"
#include "operations.h"

static void elementwise(Call *call, float (*function)(float)) {
    const Tensor *x = tensor(call, "x", F32, 1);
    const float *in = x->data;
    float *y = answer_like(call, "y", x);
#pragma omp parallel for if (x->count > 1024)
    for (size_t i = 0; i < x->count; i++)
        y[i] = function(in[i]);
}

void exp_operation(Call *call) {
    elementwise(call, exp32);
}

void log_operation(Call *call) {
    elementwise(call, log32);
}

void sin_operation(Call *call) {
    elementwise(call, sin32);
}

void cos_operation(Call *call) {
    elementwise(call, cos32);
}

void tanh_operation(Call *call) {
    elementwise(call, tanh32);
}

void sigmoid_operation(Call *call) {
    elementwise(call, sigmoid32);
}

void silu_operation(Call *call) {
    elementwise(call, silu32);
}

void gelu_tanh_operation(Call *call) {
    elementwise(call, gelu_tanh32);
}
