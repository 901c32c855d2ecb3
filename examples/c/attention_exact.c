/* Exact attention: two passes over the visible positions, block sums in int64 (SPEC 8.2, 2.5). */

#include <math.h>
#include <omp.h>

#include "elementary.h"
#include "operations.h"

/* Rows v_j on one grid each over their whole width. */
typedef struct {
    int32_t *integers; /* (S Hkv, D) */
    int *exponents;    /* (S Hkv,) */
    bool *zero, *finite;
} Values;

static Values align_values(Call *call, const Attention *a) {
    size_t rows = a->S * a->Hkv;
    Values out = {allocate(call, rows * a->D, sizeof(int32_t)), allocate(call, rows, sizeof(int)),
                  allocate(call, rows, sizeof(bool)), allocate(call, rows, sizeof(bool))};
#pragma omp parallel for if (rows * a->D > 4096)
    for (size_t row = 0; row < rows; row++) {
        const float *v = a->v + row * a->D;
        float largest = 0;
        out.finite[row] = true;
        for (size_t d = 0; d < a->D; d++) {
            out.finite[row] &= isfinite(v[d]) != 0;
            largest = fmaxf(largest, fabsf(v[d]));
        }
        out.zero[row] = largest == 0;
        if (!out.finite[row])
            continue;
        frexp(largest, &out.exponents[row]);
        double grid = power_of_two(24 - out.exponents[row]);
        for (size_t d = 0; d < a->D; d++)
            out.integers[row * a->D + d] = (int32_t)nearbyint(v[d] * grid);
    }
    return out;
}

typedef struct {
    const Attention *a;
    Aligned q, k;
    Values v;
} Prepared;

/* The weights p of a row, by position, and its largest score m; false where the row is NaN by the
   rules of what is not finite. */
static bool weights(const Prepared *all, size_t t, size_t h, size_t first, size_t end, float *p,
                    float *m) {
    const Attention *a = all->a;
    size_t query = t * a->Hq + h, head = h / (a->Hq / a->Hkv);
    bool finite = all->q.finite[query];
    float sink = a->sinks ? a->sinks[h] : -INFINITY;
    *m = sink;
    for (size_t j = first; j < end; j++) {
        size_t key = j * a->Hkv + head;
        float score = dot32(&all->q, query, &all->k, key);
        float u = score * a->scale;
        finite &= isfinite(u) && all->k.finite[key] && all->v.finite[key];
        if (a->has_softcap) {
            float share = u / a->softcap;
            u = a->softcap * tanh32(share);
        }
        p[j] = u;
        *m = fmaxf(*m, u);
    }
    for (size_t j = first; j < end; j++) {
        float below = p[j] - *m;
        p[j] = exp32(below);
    }
    return finite && !isnan(sink) && sink != INFINITY;
}

/* Add one block's exact sums to num (D) and den: positions first to end, at most 32 of them. */
static void add_block(const Prepared *all, size_t head, size_t first, size_t end, const float *p,
                      double *num, double *den) {
    size_t Hkv = all->a->Hkv, D = all->a->D;
    int count = (int)(end - first);
    double plain[BLOCK] = {0}, weighted[BLOCK] = {0};
    int32_t P[BLOCK], W[BLOCK];
    for (int i = 0; i < count; i++) {
        size_t row = (first + i) * Hkv + head;
        plain[i] = p[first + i];
        weighted[i] = all->v.zero[row] ? 0 : plain[i] * power_of_two(all->v.exponents[row]);
    }
    double p_unit = power_of_two(align_block(plain, count, P) - 24);
    double unit = power_of_two(align_block(weighted, count, W) - 48);
    int64_t sum = 0;
    for (int i = 0; i < count; i++)
        sum += P[i];
    *den += (double)sum * p_unit;
    for (size_t d = 0; d < D; d++) {
        int64_t dot = 0;
        for (int i = 0; i < count; i++)
            dot += (int64_t)W[i] * all->v.integers[((first + i) * Hkv + head) * D + d];
        num[d] += (double)dot * unit;
    }
}

static void row_of_head(const Prepared *all, size_t t, size_t h, float *p, double *num,
                        float *out) {
    const Attention *a = all->a;
    size_t first, end;
    visible(a, t, &first, &end);
    if (first == end)
        return; /* +0, as the answer was made */
    float m;
    bool defined = weights(all, t, h, first, end, p, &m);
    double den = 0;
    for (size_t d = 0; d < a->D; d++)
        num[d] = 0;
    for (size_t start = first; defined && start < end;) {
        size_t next = (start / BLOCK + 1) * BLOCK;
        next = next < end ? next : end;
        add_block(all, h / (a->Hq / a->Hkv), start, next, p, num, &den);
        start = next;
    }
    if (a->sinks && defined) {
        float below = a->sinks[h] - m;
        den += exp32(below);
    }
    for (size_t d = 0; d < a->D; d++)
        out[d] = one_nan(defined ? (float)(num[d] / den) : NAN);
}

void attention_exact(Call *call, const Attention *a, float *out) {
    Prepared all = {a, align(call, a->q, a->T * a->Hq, a->D),
                    align(call, a->k, a->S * a->Hkv, a->D), align_values(call, a)};
    size_t rows = a->T * a->Hq, threads = (size_t)omp_get_max_threads();
    float *p = allocate(call, threads * a->S, sizeof *p); /* one row at a time for each thread */
    double *num = allocate(call, threads * a->D, sizeof *num);
#pragma omp parallel for schedule(dynamic, 4) if (rows * a->S * a->D > 16384)
    for (size_t row = 0; row < rows; row++) {
        size_t h = row / a->T, t = row % a->T, at = t * a->Hq + h;
        size_t thread = (size_t)omp_get_thread_num();
        row_of_head(&all, t, h, p + thread * a->S, num + thread * a->D, out + at * a->D);
    }
}
