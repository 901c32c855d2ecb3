/* Each function is evaluated by libm in float64. Where its value lies within 2^-48 of a rounding
   boundary of float32, which no error of a sound libm exceeds, double-double decides instead. */

#include "elementary.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "double_double.h"

float one_nan(float x) {
    const uint32_t bits = 0x7fc00000;
    if (x != x)
        memcpy(&x, &bits, sizeof x);
    return x;
}

/* Round y to float32; false where an error of y within 2^-48 |y| could change the result. */
static bool settled(double y, float *result) {
    double error = isinf(y) ? 0 : fabs(y) * 0x1p-48;
    *result = (float)(y - error);
    return *result == (float)(y + error);
}

float exp32(float x) {
    float result;
    if (!isfinite(x))
        return one_nan(expf(x));
    return settled(exp(x), &result) ? result : real_round(real_exp(real(x)));
}

float log32(float x) {
    float result;
    if (!(x > 0) || isinf(x))
        return one_nan(logf(x));
    return settled(log(x), &result) ? result : real_round(real_log(real(x)));
}

float sin32(float x) {
    float result;
    if (!isfinite(x))
        return one_nan(NAN);
    return settled(sin(x), &result) ? result : real_round(real_sin(x));
}

float cos32(float x) {
    float result;
    if (!isfinite(x))
        return one_nan(NAN);
    return settled(cos(x), &result) ? result : real_round(real_cos(x));
}

float tanh32(float x) {
    float result;
    if (!isfinite(x))
        return one_nan(tanhf(x));
    if (settled(tanh(x), &result))
        return result;
    Real e = real_expm1(real(2 * (double)x));
    return real_round(real_div(e, real_add(e, real(2))));
}

float sigmoid32(float x) {
    float below = 1 + exp32(-x);
    return one_nan(1 / below);
}

float silu32(float x) {
    return one_nan(x * sigmoid32(x));
}

float gelu_tanh32(float x) {
    const float cubic = 0x1.6e4e26p-5f, slope = 0x1.988454p-1f; /* 0x3d372713, 0x3f4c422a */
    float u = x * x;
    u = u * x;
    u = cubic * u;
    u = x + u;
    u = slope * u;
    float t = 1 + tanh32(u), half = 0.5f * x;
    return one_nan(half * t);
}
