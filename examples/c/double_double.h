/* Reals as the unevaluated sum of two float64 numbers: about 106 significant bits.

   Dekker 1971, "A floating-point technique for extending the available precision"; the product is
   split by one fma, which here does what fma is for. */

#ifndef DOUBLE_DOUBLE_H
#define DOUBLE_DOUBLE_H

typedef struct {
    double hi, lo; /* |lo| <= ulp(hi) / 2 */
} Real;

Real real(double x);
Real real_add(Real a, Real b);
Real real_sub(Real a, Real b);
Real real_mul(Real a, Real b);
Real real_div(Real a, Real b);
Real real_exp(Real a);
Real real_expm1(Real a);
Real real_log(Real a);
Real real_sin(double x); /* of a finite float32, over its full range */
Real real_cos(double x);
Real real_pi(void);
int real_compare(Real a, Real b); /* below, at or above 0, as a is below, at or above b */
Real real_floor(Real a);

/* The float32 nearest to a real, ties to even: one rounding. */
float real_round(Real a);

#endif
