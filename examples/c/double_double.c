/* Arithmetic and elementary functions on double-double reals, good to about 2^-95. */

#include "double_double.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

static const Real LN2 = {0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56};
static const Real HALF_PI = {0x1.921fb54442d18p+0, 0x1.1a62633145c07p-54};

Real real(double x) {
    return (Real){x, 0.0};
}

/* The sum and its rounding error; |a| >= |b|. */
static Real quick_sum(double a, double b) {
    double sum = a + b;
    return (Real){sum, b - (sum - a)};
}

static Real two_sum(double a, double b) {
    double sum = a + b, part = sum - a;
    return (Real){sum, (a - (sum - part)) + (b - part)};
}

static Real two_product(double a, double b) {
    double product = a * b;
    return (Real){product, fma(a, b, -product)};
}

Real real_add(Real a, Real b) {
    Real high = two_sum(a.hi, b.hi), low = two_sum(a.lo, b.lo);
    high = quick_sum(high.hi, high.lo + low.hi);
    return quick_sum(high.hi, high.lo + low.lo);
}

static Real negative(Real a) {
    return (Real){-a.hi, -a.lo};
}

Real real_sub(Real a, Real b) {
    return real_add(a, negative(b));
}

Real real_mul(Real a, Real b) {
    Real product = two_product(a.hi, b.hi);
    return quick_sum(product.hi, product.lo + (a.hi * b.lo + a.lo * b.hi));
}

Real real_div(Real a, Real b) {
    double first = a.hi / b.hi;
    Real rest = real_sub(a, real_mul(b, real(first)));
    double second = rest.hi / b.hi;
    rest = real_sub(rest, real_mul(b, real(second)));
    return real_add(quick_sum(first, second), real(rest.hi / b.hi));
}

int real_compare(Real a, Real b) {
    double difference = real_sub(a, b).hi;
    return (difference > 0) - (difference < 0);
}

Real real_floor(Real a) {
    double whole = floor(a.hi);
    return whole == a.hi ? quick_sum(whole, floor(a.lo)) : real(whole);
}

Real real_pi(void) {
    return (Real){2 * HALF_PI.hi, 2 * HALF_PI.lo};
}

static Real scaled(Real a, int exponent) {
    return (Real){ldexp(a.hi, exponent), ldexp(a.lo, exponent)};
}

/* e^r - 1 = ((1 + s)^512) - 1 with s = e^(r/512) - 1 by its series; |r| <= ln(2) / 2. */
static Real expm1_reduced(Real r) {
    enum { HALVINGS = 9, TERMS = 10 };
    r = scaled(r, -HALVINGS);
    Real sum = real_div(r, real(TERMS)); /* Horner's scheme */
    for (int n = TERMS - 1; n >= 1; n--)
        sum = real_div(real_mul(r, real_add(real(1), sum)), real(n));
    for (int i = 0; i < HALVINGS; i++) /* (1 + s)^2 - 1 = 2 s + s^2 */
        sum = real_add(scaled(sum, 1), real_mul(sum, sum));
    return sum;
}

Real real_expm1(Real a) {
    double k = nearbyint(a.hi / LN2.hi);
    Real s = expm1_reduced(real_sub(a, real_mul(real(k), LN2)));
    return k == 0 ? s : real_sub(scaled(real_add(s, real(1)), (int)k), real(1));
}

Real real_exp(Real a) {
    double k = nearbyint(a.hi / LN2.hi);
    Real s = expm1_reduced(real_sub(a, real_mul(real(k), LN2)));
    return scaled(real_add(s, real(1)), (int)k);
}

/* One step of Newton's method from libm's: ln a = y + ln(1 + d), d = a e^-y - 1, d^3 < 2^-150. */
Real real_log(Real a) {
    double y = log(a.hi);
    Real d = real_sub(real_mul(a, real_exp(real(-y))), real(1));
    return real_add(real(y), real_sub(d, scaled(real_mul(d, d), -1)));
}

/* 2/pi in 320 bits, lowest word first: enough for the largest float32, 24 bits times 2^104. */
static const uint32_t TWO_OVER_PI[10] = {
    0x424dd2e0, 0xb7246e3a, 0xdebbc561, 0xfe5163ab, 0x3c439041,
    0xdb629599, 0xf534ddc0, 0xfc2757d1, 0x4e441529, 0xa2f9836e,
};

/* 32 bits of a number of 11 words, from a bit position that may lie below it. */
static uint32_t bits_at(const uint32_t words[11], int position) {
    uint32_t found = 0;
    for (int bit = 31; bit >= 0; bit--) {
        int at = position + bit;
        uint32_t one = at < 0 || at >= 11 * 32 ? 0 : words[at / 32] >> at % 32 & 1;
        found = found << 1 | one;
    }
    return found;
}

/* x = quadrant * pi/2 + r with |r| <= pi/4: Payne and Hanek's reduction, in whole numbers. */
static Real reduced(double x, unsigned *quadrant) {
    int exponent;
    uint64_t mantissa = (uint64_t)ldexp(frexp(fabs(x), &exponent), 24);
    exponent -= 24;
    *quadrant = 0;
    if (fabs(x) < 0.75)
        return real(x);
    uint32_t product[11];
    uint64_t carry = 0;
    for (int i = 0; i < 10; i++) {
        carry += mantissa * TWO_OVER_PI[i];
        product[i] = (uint32_t)carry;
        carry >>= 32;
    }
    product[10] = (uint32_t)carry;
    int point = 320 - exponent; /* of |x| * 2/pi within the product */
    *quadrant = bits_at(product, point) & 3;
    uint32_t fraction[5];
    for (int i = 0; i < 5; i++)
        fraction[i] = bits_at(product, point - 32 * (i + 1));
    double sign = 1;
    if (fraction[0] >> 31) { /* nearer to the next quadrant: 1 - fraction, short of 2^-160 */
        for (int i = 0; i < 5; i++)
            fraction[i] = ~fraction[i];
        *quadrant = (*quadrant + 1) & 3;
        sign = -1;
    }
    Real sum = real(0);
    for (int i = 4; i >= 0; i--)
        sum = real_add(real(ldexp(fraction[i], -32 * (i + 1))), sum);
    Real r = real_mul(sum, (Real){sign * HALF_PI.hi, sign * HALF_PI.lo});
    if (x < 0) {
        r = negative(r);
        *quadrant = (4 - *quadrant) & 3;
    }
    return r;
}

/* r - r^3/3! + ... (odd) or 1 - r^2/2! + ... (even), by Horner's scheme, up to r^31. */
static Real series(Real r, int odd) {
    Real square = negative(real_mul(r, r)), sum = real(1);
    for (int n = 30 + odd; n > 1; n -= 2)
        sum = real_add(real(1), real_div(real_mul(square, sum), real((double)n * (n - 1))));
    return odd ? real_mul(r, sum) : sum;
}

static Real sine_of_quadrant(Real r, unsigned quadrant) {
    Real value = series(r, quadrant % 2 == 0);
    return quadrant & 2 ? negative(value) : value;
}

Real real_sin(double x) {
    unsigned quadrant;
    Real r = reduced(x, &quadrant);
    return sine_of_quadrant(r, quadrant);
}

Real real_cos(double x) {
    unsigned quadrant;
    Real r = reduced(x, &quadrant);
    return sine_of_quadrant(r, (quadrant + 1) & 3);
}

/* First to odd in float64, where the last bit keeps what was lost, then once to float32. */
float real_round(Real a) {
    double odd = a.hi;
    if (a.lo != 0) {
        if ((a.hi > 0) != (a.lo > 0)) /* truncate: the real lies nearer to zero than hi */
            odd = nextafter(odd, 0);
        uint64_t bits;
        memcpy(&bits, &odd, sizeof bits);
        bits |= 1;
        memcpy(&odd, &bits, sizeof bits);
    }
    return (float)odd;
}
