/* int8 activations, one float32 scale a row (SPEC 5.4). */

#include <math.h>

#include "elementary.h"
#include "operations.h"

void quantize_int8(const float *x, size_t rows, size_t length, int8_t *codes, float *scales) {
#pragma omp parallel for if (rows * length > 4096)
    for (size_t row = 0; row < rows; row++) {
        const float *in = x + row * length;
        int8_t *out = codes + row * length;
        bool finite = true;
        float largest = 0;
        for (size_t k = 0; k < length; k++) {
            finite &= isfinite(in[k]) != 0;
            largest = fmaxf(largest, fabsf(in[k]));
        }
        float scale = finite ? largest / 127 : one_nan(NAN);
        scales[row] = scale;
        for (size_t k = 0; k < length; k++) {
            float code = scale > 0 ? nearbyintf(in[k] / scale) : 0;
            out[k] = (int8_t)fmaxf(-127, fminf(127, code));
        }
    }
}

void quantize_int8_operation(Call *call) {
    const Tensor *x = tensor(call, "x", F32, 2);
    int8_t *codes = answer(call, "codes", I8, 2, x->shape);
    float *scales = answer(call, "scale", F32, 1, x->shape);
    quantize_int8(x->data, x->shape[0], x->shape[1], codes, scales);
}
