/* int4 weights, one float16 scale a group of 32 or a row (SPEC 5.1 to 5.3, max-abs). */

#include <math.h>

#include "operations.h"

/* The float16 nearest to a value of 0 or more, ties to even, as bits; above 65,504 refused. */
static uint16_t half_of(Call *call, double value) {
    int exponent;
    frexp(value, &exponent);
    int unit = exponent - 11 < -24 ? -24 : exponent - 11; /* of the last place */
    double rounded = nearbyint(ldexp(value, -unit));     /* at most 2048 */
    if (ldexp(rounded, unit) > 65504)
        refuse(call, "a scale exceeds 65504");
    /* 1024 of a binade's 2048 is the hidden bit, and a carry moves to the next binade by itself. */
    return (uint16_t)((uint32_t)(unit + 24) * 1024 + (uint32_t)rounded);
}

double half_to_double(uint16_t half) {
    int exponent = half >> 10 & 31, fraction = half & 1023;
    double value = exponent == 31 ? (fraction ? NAN : INFINITY)
                   : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                  : ldexp(fraction, -24);
    return half >> 15 ? -value : value;
}

static uint16_t scale_of(Call *call, const float *w, size_t count) {
    double largest = 0;
    for (size_t k = 0; k < count; k++) {
        if (!isfinite(w[k]))
            refuse(call, "a weight is not finite");
        largest = fmax(largest, fabs(w[k]));
    }
    uint16_t scale = half_of(call, largest / 7);
    if (largest == 0)
        return 0x3c00; /* 1 */
    return scale ? scale : 1; /* 2^-24 */
}

void quantize_int4_operation(Call *call) {
    const Tensor *w = tensor(call, "w", F32, 2);
    uint64_t group = unsigned_number(call, "group");
    size_t rows = w->shape[0], length = w->shape[1];
    size_t size = group ? group : length, groups = size ? (length + size - 1) / size : 0;
    size_t bytes = (length + 1) / 2;
    uint8_t *packed = answer(call, "packed", U8, 2, (size_t[]){rows, bytes});
    uint16_t *scales = answer(call, "scales", F16, 2, (size_t[]){rows, groups});
    for (size_t row = 0; row < rows; row++) {
        const float *in = (const float *)w->data + row * length;
        for (size_t g = 0; g < groups; g++) {
            size_t start = g * size, end = start + size < length ? start + size : length;
            uint16_t half = scale_of(call, in + start, end - start);
            double scale = half_to_double(half);
            scales[row * groups + g] = half;
            for (size_t k = start; k < end; k++) {
                int code = (int)fmax(-7, fmin(7, round(in[k] / scale))); /* half away from 0 */
                packed[row * bytes + k / 2] |= (uint8_t)((code + 8) << (k % 2 ? 4 : 0));
            }
        }
        if (length % 2)
            packed[row * bytes + bytes - 1] |= 8 << 4;
    }
}
