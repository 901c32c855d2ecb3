/* The gated feed-forward layer (SPEC 9). */

#include <string.h>

#include "elementary.h"
#include "operations.h"

void gated_mlp_operation(Call *call) {
    const Tensor *x = tensor(call, "x", F32, 2), *gate = tensor(call, "gate", F32, 2);
    const Tensor *up = tensor(call, "up", F32, 2), *down = tensor(call, "down", F32, 2);
    const char *name = text(call, "activation");
    float (*activation)(float) = strcmp(name, "silu") == 0 ? silu32 : gelu_tanh32;
    if (activation != silu32 && strcmp(name, "gelu_tanh") != 0)
        refuse(call, "the activation must be silu or gelu_tanh");
    size_t T = x->shape[0], K = x->shape[1], I = gate->shape[0];
    if (gate->shape[1] != K || up->shape[0] != I || up->shape[1] != K || down->shape[0] != K ||
        down->shape[1] != I)
        refuse(call, "the shapes of x, gate, up and down do not fit");
    Aligned in = align(call, x->data, T, K);
    Aligned gates = align(call, gate->data, I, K), ups = align(call, up->data, I, K);
    float *a = allocate(call, T * I, sizeof *a), *u = allocate(call, T * I, sizeof *u);
    matmul(&in, &gates, a);
    matmul(&in, &ups, u);
    for (size_t i = 0; i < T * I; i++)
        a[i] = one_nan(activation(a[i]) * u[i]);
    Aligned hidden = align(call, a, T, I), downs = align(call, down->data, K, I);
    matmul(&hidden, &downs, answer(call, "y", F32, 2, (size_t[]){T, K}));
}
