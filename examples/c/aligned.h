/* Aligned arithmetic: sums that do not round, and so have no order (SPEC 2). */

#ifndef ALIGNED_H
#define ALIGNED_H

#include "call.h"

enum { BLOCK = 32 };

/* Rows of float32, cut into blocks of 32 and rounded to the grid of each block's largest. The
   value of element i of a block is integers[i] * 2^(exponents[block] - 24). */
typedef struct {
    size_t rows, length, blocks;
    int32_t *integers; /* rows x blocks x 32, zeros behind a row's end */
    int *exponents;    /* rows x blocks, 0 for a block of zeros */
    bool *finite;      /* rows */
} Aligned;

Aligned align(Call *call, const float *x, size_t rows, size_t length);

/* The dot product of row i of a and row j of b before its rounding to float32 (SPEC 2.2). What is
   not finite is the caller's to look at. */
double dot64(const Aligned *a, size_t i, const Aligned *b, size_t j);

/* The same rounded, NaN where a row is not finite. */
float dot32(const Aligned *a, size_t i, const Aligned *b, size_t j);

/* Round count numbers, at most 32 and all finite, to the grid of the largest; returns its exponent
   E, or 0 where all are zero (SPEC 2.1). They are float32 values times a power of two each. */
int align_block(const double *x, int count, int32_t *integers);

/* 2^n as a float64, for a normal result. */
double power_of_two(int n);

#endif
