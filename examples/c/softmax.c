/* Softmax of rows (SPEC 4.3). */

#include <math.h>

#include "elementary.h"
#include "operations.h"

/* p_i = exp(x_i - max); false where the row has NaN, +inf, or nothing but -inf. */
static bool exponentials(const float *x, float *p, size_t length) {
    float largest = -INFINITY;
    for (size_t i = 0; i < length; i++) {
        if (isnan(x[i]) || x[i] == INFINITY)
            return false;
        largest = fmaxf(largest, x[i]);
    }
    for (size_t i = 0; i < length; i++) {
        float below = x[i] - largest;
        p[i] = exp32(below);
    }
    return largest > -INFINITY;
}

void softmax_operation(Call *call) {
    const Tensor *x = tensor(call, "x", F32, 2);
    size_t rows = x->shape[0], length = x->shape[1];
    float *y = answer_like(call, "y", x);
    bool *defined = allocate(call, rows, sizeof *defined);
    for (size_t row = 0; row < rows; row++)
        defined[row] = exponentials((float *)x->data + row * length, y + row * length, length);
    Aligned p = align(call, y, rows, length);
    float *ones = allocate(call, length, sizeof *ones);
    for (size_t i = 0; i < length; i++)
        ones[i] = 1;
    Aligned one = align(call, ones, 1, length);
    for (size_t row = 0; row < rows; row++) {
        double sum = dot64(&p, row, &one, 0);
        for (size_t i = 0; i < length; i++) {
            float *share = y + row * length + i;
            *share = defined[row] ? (float)(*share / sum) : one_nan(NAN);
        }
    }
}
