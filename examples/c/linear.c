/* Linear layers by aligned dot products (SPEC 2.2, 10.1). */

#include "elementary.h"
#include "operations.h"

void matmul(const Aligned *x, const Aligned *w, float *y) {
#pragma omp parallel for if (x->rows * w->rows * x->length > 16384)
    for (size_t n = 0; n < w->rows; n++)
        for (size_t t = x->rows; t-- > 0;)
            y[t * w->rows + n] = dot32(x, t, w, n);
}

void linear_operation(Call *call) {
    const Tensor *x = tensor(call, "x", F32, 2), *w = tensor(call, "w", F32, 2);
    const Tensor *bias = optional_tensor(call, "bias", F32, 1);
    size_t shape[2] = {x->shape[0], w->shape[0]};
    if (x->shape[1] != w->shape[1] || (bias && bias->count != shape[1]))
        refuse(call, "the shapes of x, w and bias do not fit");
    Aligned left = align(call, x->data, shape[0], x->shape[1]);
    Aligned right = align(call, w->data, shape[1], x->shape[1]);
    float *y = answer(call, "y", F32, 2, shape);
    matmul(&left, &right, y);
    for (size_t i = 0; bias && i < shape[0] * shape[1]; i++)
        y[i] = one_nan(y[i] + ((const float *)bias->data)[i % shape[1]]);
}
