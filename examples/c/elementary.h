/* Elementary functions of float32, correctly rounded, and the activations (SPEC 4.1, 4.2). */

#ifndef ELEMENTARY_H
#define ELEMENTARY_H

float exp32(float x);
float log32(float x);
float sin32(float x);
float cos32(float x);
float tanh32(float x);
float sigmoid32(float x);
float silu32(float x);
float gelu_tanh32(float x);

/* x, but the one NaN of SPEC 1.3 where x is any. */
float one_nan(float x);

#endif
