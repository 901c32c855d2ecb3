/* Attention's arguments (SPEC 8.1, 17); the arithmetic is in attention_exact.c and _fast.c. */

#include <math.h>
#include <string.h>

#include "operations.h"

void visible(const Attention *a, size_t t, size_t *first, size_t *end) {
    *end = a->S + t + 1 > a->T ? a->S + t + 1 - a->T : 0; /* row t is at position S - T + t */
    *first = *end > a->window ? *end - a->window : 0;
}

void attention_operation(Call *call) {
    const Tensor *q = tensor(call, "q", F32, 3), *k = tensor(call, "k", F32, 3);
    const Tensor *v = tensor(call, "v", F32, 3), *sinks = optional_tensor(call, "sinks", F32, 1);
    Attention a = {.T = q->shape[0], .Hq = q->shape[1], .D = q->shape[2]};
    a.S = k->shape[0];
    a.Hkv = k->shape[1];
    if (memcmp(k->shape, v->shape, sizeof k->shape) || k->shape[2] != a.D || !a.Hkv ||
        a.Hq % a.Hkv || (sinks && sinks->count != a.Hq))
        refuse(call, "the shapes of q, k, v and sinks do not fit");
    a.q = q->data;
    a.k = k->data;
    a.v = v->data;
    a.sinks = sinks ? sinks->data : NULL;
    a.scale = (float)number_or(call, "scale", 1 / sqrt((double)a.D));
    a.has_softcap = has(call, "softcap");
    a.softcap = (float)number_or(call, "softcap", 0);
    a.window = has(call, "window") ? unsigned_number(call, "window") : a.S + a.T;
    const char *mode = text(call, "mode");
    float *out = answer_like(call, "y", q);
    if (strcmp(mode, "exact") == 0)
        attention_exact(call, &a, out);
    else if (strcmp(mode, "fast") == 0)
        attention_fast(&a, out);
    else
        refuse(call, "the mode must be exact or fast");
}
