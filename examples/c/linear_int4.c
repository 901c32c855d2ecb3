/* int8 activations times int4 weights, scaled by group (SPEC 5.5). */

#include <math.h>

#include "elementary.h"
#include "operations.h"

static int code_at(const uint8_t *row, size_t k) {
    return (row[k / 2] >> (k % 2 ? 4 : 0) & 15) - 8;
}

void linear_int4_operation(Call *call) {
    const Tensor *x = tensor(call, "x", F32, 2), *packed = tensor(call, "packed", U8, 2);
    const Tensor *scales = tensor(call, "scales", F16, 2);
    uint64_t group = unsigned_number(call, "group");
    size_t rows = x->shape[0], length = x->shape[1], columns = packed->shape[0];
    size_t size = group ? group : length, groups = size ? (length + size - 1) / size : 0;
    if (packed->shape[1] != (length + 1) / 2 || scales->shape[0] != columns ||
        scales->shape[1] != groups)
        refuse(call, "the shapes of x, packed and scales do not fit");
    int8_t *codes = allocate(call, rows * length, sizeof *codes);
    float *s = allocate(call, rows, sizeof *s);
    quantize_int8(x->data, rows, length, codes, s);
    float *y = answer(call, "y", F32, 2, (size_t[]){rows, columns});
#pragma omp parallel for if (rows * columns * length > 16384)
    for (size_t n = 0; n < columns; n++) {
        const uint8_t *w = (const uint8_t *)packed->data + n * packed->shape[1];
        const uint16_t *scale = (const uint16_t *)scales->data + n * groups;
        for (size_t t = 0; t < rows; t++) {
            double sum = 0;
            for (size_t g = 0; g < groups; g++) {
                size_t end = (g + 1) * size < length ? (g + 1) * size : length;
                int64_t dot = 0;
                for (size_t k = g * size; k < end; k++)
                    dot += codes[t * length + k] * code_at(w, k);
                sum += half_to_double(scale[g]) * (double)dot;
            }
            double product = sum * s[t];
            y[t * columns + n] = one_nan((float)product);
        }
    }
}
