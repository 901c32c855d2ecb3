/* Floats times int4 weights with group scales and zero points: aligned dots (SPEC 5.9). */

#include "elementary.h"
#include "operations.h"

void linear_w4a16_operation(Call *call) {
    const Tensor *x = tensor(call, "x", F32, 2), *packed = tensor(call, "packed", U8, 2);
    const Tensor *scales = tensor(call, "scales", F16, 2);
    const Tensor *zeros = optional_tensor(call, "zeros", U8, 2);
    uint64_t group = unsigned_number(call, "group");
    size_t rows = x->shape[0], length = x->shape[1], columns = packed->shape[0];
    size_t size = group ? group : length, groups = size ? (length + size - 1) / size : 0;
    if (packed->shape[1] != (length + 1) / 2 || scales->shape[0] != columns ||
        scales->shape[1] != groups)
        refuse(call, "the shapes of x, packed and scales do not fit");
    if (zeros && (zeros->shape[0] != columns || zeros->shape[1] != groups))
        refuse(call, "the shapes of scales and zeros do not fit");
    float *weights = allocate(call, columns * length, sizeof *weights);
    for (size_t n = 0; n < columns; n++) {
        const uint8_t *row = (const uint8_t *)packed->data + n * packed->shape[1];
        for (size_t k = 0; k < length; k++) {
            size_t g = n * groups + k / size;
            int zero = zeros ? ((const uint8_t *)zeros->data)[g] : 8;
            int code = row[k / 2] >> (k % 2 ? 4 : 0) & 15;
            double scale = half_to_double(((const uint16_t *)scales->data)[g]);
            weights[n * length + k] = (float)(scale * (code - zero)); /* exact */
        }
    }
    Aligned left = align(call, x->data, rows, length);
    Aligned right = align(call, weights, columns, length);
    matmul(&left, &right, answer(call, "y", F32, 2, (size_t[]){rows, columns}));
}
