/* RMSNorm (SPEC 6). */

#include <math.h>

#include "elementary.h"
#include "operations.h"

void rms_norm_operation(Call *call) {
    const Tensor *x = tensor(call, "x", F32, 2), *weight = tensor(call, "weight", F32, 1);
    size_t rows = x->shape[0], length = x->shape[1];
    double eps = number(call, "eps");
    if (weight->count != length)
        refuse(call, "weight must have as many elements as a row of x");
    Aligned aligned = align(call, x->data, rows, length);
    const float *in = x->data, *w = weight->data;
    float *y = answer_like(call, "y", x);
#pragma omp parallel for if (rows * length > 4096)
    for (size_t row = 0; row < rows; row++) {
        double square = dot64(&aligned, row, &aligned, row) / (double)length;
        float r = (float)(1 / sqrt(square + eps));
        for (size_t k = 0; k < length; k++) {
            float scaled = in[row * length + k] * r;
            y[row * length + k] = one_nan(aligned.finite[row] ? scaled * w[k] : NAN);
        }
    }
}
