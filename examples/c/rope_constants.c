/* inv_freq and the factor of yarn and longrope, by double-double reals and one rounding
   (SPEC 7.1, 7.2). */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "double_double.h"
#include "operations.h"

/* The parameters of SPEC 7.2 live in a dictionary of their own. */
static Real given(Call *call, const char *name) {
    return real(number(call, name));
}

static Real given_or(Call *call, const char *name, double otherwise) {
    return real(number_or(call, name, otherwise));
}

/* base^(numerator / denominator) */
static Real power(Real base, double numerator, double denominator) {
    Real exponent = real_div(real(numerator), real(denominator));
    return real_exp(real_mul(real_log(base), exponent));
}

static Real dynamic_theta(Call *call, Real theta, size_t d, double position) {
    if (d <= 2)
        refuse(call, "dynamic needs a rotary dimension above 2");
    double old = number_or(call, "original_max_position_embeddings",
                           number(call, "max_position_embeddings"));
    Real factor = given(call, "factor"), n = real(fmax(position + 1, old));
    Real stretch = real_div(real_mul(factor, n), real(old));
    stretch = real_sub(stretch, real_sub(factor, real(1)));
    return real_mul(theta, power(stretch, (double)d, (double)d - 2));
}

static Real llama3(Call *call, Real f) {
    Real factor = given(call, "factor");
    Real old = given(call, "original_max_position_embeddings");
    Real low = given(call, "low_freq_factor"), high = given(call, "high_freq_factor");
    Real wavelength = real_div(real_mul(real(2), real_pi()), f);
    if (real_compare(wavelength, real_div(old, low)) > 0)
        return real_div(f, factor);
    if (real_compare(wavelength, real_div(old, high)) < 0)
        return f;
    Real s = real_div(real_sub(real_div(old, wavelength), low), real_sub(high, low));
    Real slow = real_div(real_mul(real_sub(real(1), s), f), factor);
    return real_add(slow, real_mul(s, f));
}

/* c(b) = d ln(old / (2 pi b)) / (2 ln theta) */
static Real correction(Call *call, Real theta, size_t d, Real beta) {
    Real old = given(call, "original_max_position_embeddings");
    Real turns = real_div(old, real_mul(real_mul(real(2), real_pi()), beta));
    return real_div(real_mul(real((double)d), real_log(turns)), real_mul(real(2), real_log(theta)));
}

static Real clamped(Real x, double low, double high) {
    if (real_compare(x, real(low)) < 0)
        return real(low);
    return real_compare(x, real(high)) > 0 ? real(high) : x;
}

/* The ends of yarn's ramp. */
static void yarn_range(Call *call, Real theta, size_t d, Real *low, Real *high) {
    *low = correction(call, theta, d, given_or(call, "beta_fast", 32));
    *high = correction(call, theta, d, given_or(call, "beta_slow", 1));
    if (!has(call, "truncate") || boolean(call, "truncate")) {
        *low = real_floor(*low);
        *high = real_sub(real(0), real_floor(real_sub(real(0), *high)));
    }
    *low = real_compare(*low, real(0)) < 0 ? real(0) : *low;
    *high = real_compare(*high, real((double)d - 1)) > 0 ? real((double)d - 1) : *high;
    if (real_compare(*low, *high) == 0)
        *high = real_add(*high, real_div(real(1), real(1000)));
}

/* g(x) = 0.1 x ln(factor) + 1 */
static Real yarn_growth(Real x, Real factor) {
    if (factor.hi <= 1)
        return real(1);
    return real_add(real_mul(real_div(x, real(10)), real_log(factor)), real(1));
}

static Real yarn_factor(Call *call) {
    if (has(call, "attention_factor"))
        return given(call, "attention_factor");
    Real factor = given(call, "factor");
    Real one = given_or(call, "mscale", 0), all = given_or(call, "mscale_all_dim", 0);
    if (one.hi != 0 && all.hi != 0)
        return real_div(yarn_growth(one, factor), yarn_growth(all, factor));
    return yarn_growth(real(1), factor);
}

/* The divisors of longrope, one for each pair. */
static const double *divisors(Call *call, const char *name, size_t count) {
    const Json *list = json_member(call->parameters, name);
    if (!list || list->kind != JSON_ARRAY)
        refuse(call, "longrope needs %s, a list", name);
    double *values = allocate(call, count, sizeof *values);
    size_t found = 0;
    for (const Json *item = list->first; item; item = item->next, found++) {
        if (item->kind != JSON_NUMBER || found == count)
            refuse(call, "%s must be %zu numbers", name, count);
        values[found] = strtod(item->text, NULL);
    }
    if (found != count)
        refuse(call, "%s must be %zu numbers", name, count);
    return values;
}

/* sqrt(1 + ln(factor) / ln(old)) */
static Real longrope_factor(Call *call) {
    if (has(call, "attention_factor"))
        return given(call, "attention_factor");
    double old = number(call, "original_max_position_embeddings");
    double factor = has(call, "factor") ? number(call, "factor")
                                        : number(call, "max_position_embeddings") / old;
    if (factor <= 1)
        return real(1);
    Real square = real_add(real(1), real_div(real_log(real(factor)), real_log(real(old))));
    return power(square, 1, 2);
}

void rope_constants_operation(Call *call) {
    double position = (double)unsigned_number(call, "position");
    call->parameters = json_member(call->parameters, "parameters");
    double partial = number_or(call, "partial_rotary_factor", 1);
    double rotary = trunc(number(call, "head_dim") * partial);
    if (!(rotary > 0 && rotary <= 65536) || fmod(rotary, 2) != 0)
        refuse(call, "the rotary dimension must be even and positive");
    size_t d = (size_t)rotary;
    const char *kind = text(call, has(call, "rope_type") ? "rope_type" : "type");
    Real theta = given(call, "rope_theta"), low = real(0), high = real(1);
    const double *divided = NULL;
    if (!(theta.hi > 1))
        refuse(call, "rope_theta must be above 1");
    if (strcmp(kind, "dynamic") == 0)
        theta = dynamic_theta(call, theta, d, position);
    else if (strcmp(kind, "yarn") == 0)
        yarn_range(call, theta, d, &low, &high);
    else if (strcmp(kind, "longrope") == 0)
        divided = divisors(call,
                           position < number(call, "original_max_position_embeddings")
                               ? "short_factor"
                               : "long_factor",
                           d / 2);
    else if (strcmp(kind, "default") && strcmp(kind, "linear") && strcmp(kind, "llama3"))
        refuse(call, "the rope_type %.32s is not supported", kind);

    float *inv_freq = answer(call, "inv_freq", F32, 1, (size_t[]){d / 2});
    for (size_t i = 0; i < d / 2; i++) {
        Real f = power(theta, -2 * (double)i, (double)d);
        if (strcmp(kind, "linear") == 0) {
            f = real_div(f, given(call, "factor"));
        } else if (strcmp(kind, "llama3") == 0) {
            f = llama3(call, f);
        } else if (strcmp(kind, "yarn") == 0) {
            Real along = real_sub(real((double)i), low);
            Real ramp = clamped(real_div(along, real_sub(high, low)), 0, 1);
            Real slow = real_mul(real_div(f, given(call, "factor")), ramp);
            f = real_add(slow, real_mul(f, real_sub(real(1), ramp)));
        } else if (divided) {
            f = real_div(f, real(divided[i]));
        }
        inv_freq[i] = real_round(f);
    }
    float *factor = answer(call, "factor", F32, 1, (size_t[]){1});
    *factor = 1;
    if (strcmp(kind, "yarn") == 0)
        *factor = real_round(yarn_factor(call));
    else if (divided)
        *factor = real_round(longrope_factor(call));
}
