/* Alignment by whole numbers: int32 elements, int64 block sums. */

#include "aligned.h"

#include <math.h>
#include <string.h>

#include "elementary.h"

double power_of_two(int n) {
    uint64_t bits = (uint64_t)(n + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

int align_block(const double *x, int count, int32_t *integers) {
    double largest = 0;
    for (int i = 0; i < count; i++)
        largest = fmax(largest, fabs(x[i]));
    int exponent;
    frexp(largest, &exponent); /* 2^(E-1) <= largest < 2^E; 0 for zero */
    double grid = power_of_two(24 - exponent);
    for (int i = 0; i < count; i++)
        integers[i] = (int32_t)nearbyint(x[i] * grid);
    return exponent;
}

Aligned align(Call *call, const float *x, size_t rows, size_t length) {
    Aligned out = {.rows = rows, .length = length, .blocks = (length + BLOCK - 1) / BLOCK};
    out.integers = allocate(call, rows * out.blocks * BLOCK, sizeof *out.integers);
    out.exponents = allocate(call, rows * out.blocks, sizeof *out.exponents);
    out.finite = allocate(call, rows, sizeof *out.finite);
#pragma omp parallel for if (rows * length > 4096)
    for (size_t row = 0; row < rows; row++) {
        bool finite = true;
        for (size_t k = 0; k < length; k++)
            finite &= isfinite(x[row * length + k]) != 0;
        out.finite[row] = finite;
        for (size_t block = 0; finite && block < out.blocks; block++) {
            size_t start = block * BLOCK, left = length - start, at = row * out.blocks + block;
            int count = left < BLOCK ? (int)left : BLOCK;
            double wide[BLOCK];
            for (int i = 0; i < count; i++)
                wide[i] = x[row * length + start + i];
            out.exponents[at] = align_block(wide, count, out.integers + at * BLOCK);
        }
    }
    return out;
}

double dot64(const Aligned *a, size_t i, const Aligned *b, size_t j) {
    double total = 0;
    for (size_t block = 0; block < a->blocks; block++) {
        size_t at = i * a->blocks + block, bt = j * b->blocks + block;
        const int32_t *left = a->integers + at * BLOCK, *right = b->integers + bt * BLOCK;
        int64_t sum = 0;
        for (int k = 0; k < BLOCK; k++)
            sum += (int64_t)left[k] * right[k];
        total += (double)sum * power_of_two(a->exponents[at] + b->exponents[bt] - 48);
    }
    return total;
}

float dot32(const Aligned *a, size_t i, const Aligned *b, size_t j) {
    return one_nan(a->finite[i] && b->finite[j] ? (float)dot64(a, i, b, j) : NAN);
}
