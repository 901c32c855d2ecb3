/* Rotary position embedding (SPEC 7.3, 7.4). */

#include "elementary.h"
#include "operations.h"

void rope_operation(Call *call) {
    const Tensor *x = tensor(call, "x", F32, 3), *positions = tensor(call, "positions", I64, 1);
    const Tensor *inv_freq = tensor(call, "inv_freq", F32, 1);
    float factor = (float)number(call, "factor");
    bool interleaved = boolean(call, "interleaved");
    size_t T = x->shape[0], H = x->shape[1], D = x->shape[2], half = inv_freq->count;
    if (positions->count != T || 2 * half > D)
        refuse(call, "the shapes of x, positions and inv_freq do not fit");
    for (size_t t = 0; t < T; t++) {
        int64_t position = ((const int64_t *)positions->data)[t]; /* negative: a shift (11.5) */
        if (position <= -(1 << 24) || position >= 1 << 24)
            refuse(call, "a position is 2^24 or more, or -2^24 or less");
    }
    const float *in = x->data, *frequency = inv_freq->data;
    float *y = answer_like(call, "y", x);
    for (size_t i = 0; i < x->count; i++)
        y[i] = in[i];
    for (size_t t = 0; t < T; t++) {
        float position = (float)((const int64_t *)positions->data)[t];
        for (size_t i = 0; i < half; i++) {
            float angle = position * frequency[i];
            float c = factor * cos32(angle), s = factor * sin32(angle);
            for (size_t h = 0; h < H; h++) {
                size_t head = (t * H + h) * D;
                size_t j = head + (interleaved ? 2 * i : i);
                size_t k = head + (interleaved ? 2 * i + 1 : i + half);
                float a = in[j], b = in[k];
                y[j] = one_nan(a * c - b * s);
                y[k] = one_nan(b * c + a * s);
            }
        }
    }
}
