/* Fast attention: plain float32 with an online softmax, one pass (SPEC 8.3). */

#include <math.h>

#include "elementary.h"
#include "operations.h"

static bool all_finite(const float *x, size_t count) {
    bool finite = true;
    for (size_t i = 0; i < count; i++)
        finite &= isfinite(x[i]) != 0;
    return finite;
}

static void row_of_head(const Attention *a, size_t t, size_t h, float *out) {
    size_t first, end, D = a->D, head = h / (a->Hq / a->Hkv);
    visible(a, t, &first, &end);
    if (first == end)
        return;
    const float *q = a->q + (t * a->Hq + h) * D;
    float sink = a->sinks ? a->sinks[h] : -INFINITY;
    bool finite = all_finite(q, D) && !isnan(sink) && sink != INFINITY;
    float m = sink, den = sink > -INFINITY ? 1 : 0;
    for (size_t j = first; finite && j < end; j++) {
        const float *k = a->k + (j * a->Hkv + head) * D, *v = a->v + (j * a->Hkv + head) * D;
        float score = 0;
        for (size_t d = 0; d < D; d++)
            score += q[d] * k[d];
        score *= a->scale;
        finite = isfinite(score) && all_finite(k, D) && all_finite(v, D);
        if (a->has_softcap)
            score = a->softcap * tanhf(score / a->softcap);
        float largest = fmaxf(m, score), shrink = expf(m - largest), p = expf(score - largest);
        m = largest;
        den = den * shrink + p;
        for (size_t d = 0; d < D; d++)
            out[d] = out[d] * shrink + p * v[d];
    }
    for (size_t d = 0; d < D; d++)
        out[d] = one_nan(finite ? out[d] / den : NAN);
}

void attention_fast(const Attention *a, float *out) {
    size_t rows = a->T * a->Hq;
#pragma omp parallel for schedule(dynamic, 4) if (rows * a->S * a->D > 16384)
    for (size_t row = 0; row < rows; row++)
        row_of_head(a, row / a->Hq, row % a->Hq, out + row * a->D);
}
