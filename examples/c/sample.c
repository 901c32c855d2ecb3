/* Sampling: float32 up to the weights, whole numbers from there (SPEC 13.1). */

#include <math.h>
#include <stdlib.h>

#include "elementary.h"
#include "operations.h"

typedef struct {
    uint64_t high, low;
} Wide; /* 128 bits */

static Wide multiply(uint64_t a, uint64_t b) {
    uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
    uint64_t middle = a1 * b0 + (a0 * b0 >> 32), other = a0 * b1 + (uint32_t)middle;
    return (Wide){a1 * b1 + (middle >> 32) + (other >> 32), a * b};
}

/* The smallest integer that is not below share * weight, exactly; share from 0 to 1. */
static uint64_t at_least(double share, uint64_t weight) {
    int exponent;
    uint64_t mantissa = (uint64_t)ldexp(frexp(share, &exponent), 53);
    Wide product = multiply(mantissa, weight);
    int shift = 53 - exponent; /* 52 or more, for share <= 1 */
    if (shift >= 128)
        return product.high || product.low;
    uint64_t lost, whole;
    if (shift >= 64) {
        shift -= 64;
        lost = product.low | (shift ? product.high << (64 - shift) : 0);
        whole = product.high >> shift;
    } else {
        lost = product.low << (64 - shift);
        whole = product.high << (64 - shift) | product.low >> shift;
    }
    return whole + (lost != 0);
}

typedef struct {
    uint64_t weight;
    size_t id;
} Candidate;

static int by_weight(const void *left, const void *right) {
    const Candidate *a = left, *b = right;
    if (a->weight != b->weight)
        return a->weight < b->weight ? 1 : -1;
    return (a->id > b->id) - (a->id < b->id);
}

static int by_id(const void *left, const void *right) {
    const Candidate *a = left, *b = right;
    return (a->id > b->id) - (a->id < b->id);
}

/* Step 1. */
static void penalize(Call *call, float *logits, size_t vocabulary, float penalty) {
    const Tensor *previous = tensor(call, "previous", I64, 1);
    bool *done = allocate(call, vocabulary, sizeof *done);
    for (size_t i = 0; i < previous->count; i++) {
        int64_t id = ((const int64_t *)previous->data)[i];
        if (id < 0 || (uint64_t)id >= vocabulary)
            refuse(call, "a previous token is outside the vocabulary");
        if (!done[id])
            logits[id] = logits[id] > 0 ? logits[id] / penalty : logits[id] * penalty;
        done[id] = true;
    }
}

/* Steps 4 to 6 on candidates ranked by weight: how many of them remain. */
static size_t kept(const Candidate *ranked, size_t count, uint64_t top_k, double top_p,
                   double min_p) {
    if (top_k && top_k < count)
        count = top_k;
    uint64_t total = 0, sum = 0;
    for (size_t i = 0; i < count; i++)
        total += ranked[i].weight;
    uint64_t wanted = at_least(top_p, total), least = at_least(min_p, ranked[0].weight);
    size_t prefix = 0;
    do
        sum += ranked[prefix++].weight;
    while (sum < wanted && prefix < count);
    while (prefix > 1 && ranked[prefix - 1].weight < least)
        prefix--;
    return prefix;
}

void sample_operation(Call *call) {
    const Tensor *given = tensor(call, "logits", F32, 1);
    size_t vocabulary = given->count;
    float temperature = (float)number(call, "temperature");
    float penalty = (float)number(call, "repetition_penalty");
    double top_p = number(call, "top_p"), min_p = number(call, "min_p");
    uint64_t request = unsigned_number(call, "request");
    uint64_t position = unsigned_number(call, "position");
    if (!(temperature >= 0) || isinf(temperature) || !(penalty > 0) || isinf(penalty) ||
        !(top_p > 0 && top_p <= 1) || !(min_p >= 0 && min_p <= 1) || request > UINT32_MAX ||
        position > UINT32_MAX || vocabulary > 1 << 23)
        refuse(call, "a sampling parameter is out of range");

    float *logits = allocate(call, vocabulary, sizeof *logits), largest = -INFINITY;
    for (size_t i = 0; i < vocabulary; i++)
        logits[i] = ((const float *)given->data)[i];
    penalize(call, logits, vocabulary, penalty);
    size_t best = 0;
    for (size_t i = 0; i < vocabulary; i++) {
        if (isnan(logits[i]) || logits[i] == INFINITY)
            refuse(call, "a logit is NaN or +inf");
        if (logits[i] > largest) {
            largest = logits[i];
            best = i;
        }
    }
    if (largest == -INFINITY)
        refuse(call, "no logit is finite");
    int64_t *token = answer(call, "y", I64, 1, (size_t[]){1});
    *token = (int64_t)best;
    if (temperature == 0)
        return;

    Candidate *ranked = allocate(call, vocabulary, sizeof *ranked);
    for (size_t i = 0; i < vocabulary; i++) {
        float below = logits[i] - largest, z = below / temperature;
        ranked[i] = (Candidate){(uint64_t)nearbyint((double)exp32(z) * 0x1p40), i};
    }
    qsort(ranked, vocabulary, sizeof *ranked, by_weight);
    size_t count = kept(ranked, vocabulary, unsigned_number(call, "top_k"), top_p, min_p);
    qsort(ranked, count, sizeof *ranked, by_id);
    uint64_t total = 0, sum = 0;
    for (size_t i = 0; i < count; i++)
        total += ranked[i].weight;
    uint64_t x = philox(unsigned_number(call, "seed"), request, position, 0);
    uint64_t threshold = multiply(x, total).high;
    for (size_t i = 0; i < count; i++) {
        sum += ranked[i].weight;
        if (sum > threshold) {
            *token = (int64_t)ranked[i].id;
            return;
        }
    }
}
