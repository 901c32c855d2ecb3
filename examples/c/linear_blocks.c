/* int8 activations times the blocks of GGUF files, Q4_0 and Q8_0 (SPEC 5.7). */

#include "elementary.h"
#include "operations.h"

typedef int (*Code)(const uint8_t *codes, size_t i);

static int q4_0(const uint8_t *codes, size_t i) {
    return (i < BLOCK / 2 ? codes[i] & 15 : codes[i - BLOCK / 2] >> 4) - 8;
}

static int q8_0(const uint8_t *codes, size_t i) {
    return (int8_t)codes[i];
}

static void linear_blocks(Call *call, size_t bytes, Code code) {
    const Tensor *x = tensor(call, "x", F32, 2), *blocks = tensor(call, "blocks", U8, 3);
    size_t rows = x->shape[0], length = x->shape[1], columns = blocks->shape[0];
    size_t groups = blocks->shape[1];
    if (blocks->shape[2] != bytes || groups * BLOCK != length)
        refuse(call, "the shapes of x and blocks do not fit");
    int8_t *codes = allocate(call, rows * length, sizeof *codes);
    float *s = allocate(call, rows, sizeof *s);
    quantize_int8(x->data, rows, length, codes, s);
    float *y = answer(call, "y", F32, 2, (size_t[]){rows, columns});
#pragma omp parallel for if (rows * columns * length > 16384)
    for (size_t n = 0; n < columns; n++) {
        const uint8_t *row = (const uint8_t *)blocks->data + n * groups * bytes;
        for (size_t t = 0; t < rows; t++) {
            double sum = 0;
            for (size_t g = 0; g < groups; g++) {
                const uint8_t *block = row + g * bytes;
                int64_t dot = 0;
                for (size_t i = 0; i < BLOCK; i++)
                    dot += codes[t * length + g * BLOCK + i] * code(block + 2, i);
                sum += half_to_double((uint16_t)(block[0] | block[1] << 8)) * (double)dot;
            }
            double product = sum * s[t];
            y[t * columns + n] = one_nan((float)product);
        }
    }
}

void linear_q4_0_operation(Call *call) {
    linear_blocks(call, 18, q4_0);
}

void linear_q8_0_operation(Call *call) {
    linear_blocks(call, 34, q8_0);
}
