/* The operations of SPEC 17, one a file; each reads its arguments from the call and answers. */

#ifndef OPERATIONS_H
#define OPERATIONS_H

#include "aligned.h"
#include "call.h"

void exp_operation(Call *call);
void log_operation(Call *call);
void sin_operation(Call *call);
void cos_operation(Call *call);
void tanh_operation(Call *call);
void sigmoid_operation(Call *call);
void silu_operation(Call *call);
void gelu_tanh_operation(Call *call);
void softmax_operation(Call *call);
void linear_operation(Call *call);
void quantize_int4_operation(Call *call);
void quantize_int8_operation(Call *call);
void linear_int4_operation(Call *call);
void linear_w4a16_operation(Call *call);
void linear_q4_0_operation(Call *call);
void linear_q8_0_operation(Call *call);
void rms_norm_operation(Call *call);
void rope_constants_operation(Call *call);
void rope_operation(Call *call);
void attention_operation(Call *call);
void gated_mlp_operation(Call *call);
void philox_operation(Call *call);
void sample_operation(Call *call);

/* What one operation lends to another. */

/* y[t, n] = dot(x[t], w[n]) (SPEC 2.2). */
void matmul(const Aligned *x, const Aligned *w, float *y);

/* int8 codes (T, K) and the scale of each row, NaN where it is not finite (SPEC 5.4). */
void quantize_int8(const float *x, size_t rows, size_t length, int8_t *codes, float *scales);

/* 64 random bits (SPEC 13.2). */
uint64_t philox(uint64_t seed, uint64_t request, uint64_t position, uint64_t stream);

double half_to_double(uint16_t half);

/* What attention takes, checked (SPEC 8). */
typedef struct {
    size_t T, Hq, S, Hkv, D;
    const float *q, *k, *v;
    const float *sinks; /* or NULL */
    float scale, softcap;
    bool has_softcap;
    size_t window; /* S + T where there is none */
} Attention;

/* First and last + 1 of the positions that query row t sees (SPEC 8.1). */
void visible(const Attention *a, size_t t, size_t *first, size_t *end);

void attention_exact(Call *call, const Attention *a, float *out);
void attention_fast(const Attention *a, float *out);

#endif
