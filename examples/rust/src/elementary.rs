//! Elementary functions, correctly rounded, and what is made of them (SPEC 4).
//!
//! The machine's float64 function settles nearly every input: where both ends of its error round
//! to one float32, so does the real value. The rest is computed with 106 bits.

use crate::aligned::sum64;
use crate::bits::NAN;
use crate::double_double::DoubleDouble;
use crate::fixed_point::reduce;

/// A bound of the relative error of the machine's float64 functions: four units of 2^-52.
const ERROR: f64 = 1.0 / (1u64 << 50) as f64;

/// The float32 that is nearest to whatever lies within the error of y, or what is computed else.
fn settle(y: f64, otherwise: impl FnOnce() -> DoubleDouble) -> f32 {
    let (below, above) = ((y * (1.0 - ERROR)) as f32, (y * (1.0 + ERROR)) as f32);
    if below.to_bits() == above.to_bits() {
        below
    } else {
        otherwise().to_f32()
    }
}

fn wide(x: f32) -> DoubleDouble {
    f64::from(x).into()
}

/// SPEC 4.1.
pub fn exp(x: f32) -> f32 {
    if x.is_nan() {
        NAN
    } else if x > 89.0 {
        f32::INFINITY
    } else if x < -104.0 {
        0.0
    } else {
        settle(f64::from(x).exp(), || wide(x).exp())
    }
}

/// SPEC 4.1.
pub fn log(x: f32) -> f32 {
    if x == 0.0 {
        f32::NEG_INFINITY
    } else if x.is_nan() || x < 0.0 {
        NAN
    } else if x.is_infinite() || x == 1.0 {
        x.ln()
    } else {
        settle(f64::from(x).ln(), || wide(x).ln())
    }
}

/// SPEC 4.1.
pub fn sin(x: f32) -> f32 {
    if !x.is_finite() {
        return NAN;
    }
    if x == 0.0 {
        return x;
    }
    settle(f64::from(x).sin(), || {
        let (quadrant, r) = reduce(x);
        let y = if quadrant % 2 == 0 { r.sin() } else { r.cos() };
        if (quadrant < 2) == (x > 0.0) {
            y
        } else {
            -y
        }
    })
}

/// SPEC 4.1.
pub fn cos(x: f32) -> f32 {
    if !x.is_finite() {
        return NAN;
    }
    settle(f64::from(x).cos(), || match reduce(x) {
        (0, r) => r.cos(),
        (1, r) => -r.sin(),
        (2, r) => -r.cos(),
        (_, r) => r.sin(),
    })
}

/// SPEC 4.1.
pub fn tanh(x: f32) -> f32 {
    if x.is_nan() {
        NAN
    } else if x == 0.0 {
        x
    } else if x.abs() > 20.0 {
        1f32.copysign(x)
    } else {
        settle(f64::from(x).tanh(), || wide(x).tanh())
    }
}

/// SPEC 4.2.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// SPEC 4.2.
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// SPEC 4.2: every step is rounded to float32.
pub fn gelu_tanh(x: f32) -> f32 {
    let cube = x * x * x;
    let u = f32::from_bits(0x3f4c_422a) * (x + f32::from_bits(0x3d37_2713) * cube);
    let t = 1.0 + tanh(u);
    (0.5 * x) * t
}

/// SPEC 9.1.
pub fn quick_gelu(x: f32) -> f32 {
    x * sigmoid(1.702 * x)
}

/// Softmax of one row (SPEC 4.3).
pub fn softmax(x: &[f32]) -> Vec<f32> {
    let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if x.iter().any(|v| v.is_nan()) || largest.is_infinite() {
        return vec![NAN; x.len()];
    }
    let p: Vec<f32> = x.iter().map(|v| exp(v - largest)).collect();
    let sum = sum64(&p);
    p.iter().map(|p| (f64::from(*p) / sum) as f32).collect()
}
