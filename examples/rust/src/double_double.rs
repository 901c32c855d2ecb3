//! Numbers of about 106 bits, each the sum of two float64: enough for the inputs that float64 does
//! not settle (SPEC 4.1) and for the constants of rope (SPEC 7.1).

use std::ops::{Add, Div, Mul, Neg, Sub};

use crate::bits::power_of_two;

/// `high + low`, with `|low|` at most half a unit in the last place of `high`.
#[derive(Clone, Copy, Debug)]
pub struct DoubleDouble {
    pub high: f64,
    pub low: f64,
}

pub const ONE: DoubleDouble = DoubleDouble { high: 1.0, low: 0.0 };
pub const PI: DoubleDouble =
    DoubleDouble { high: std::f64::consts::PI, low: 1.2246467991473532e-16 };
const LN_2: DoubleDouble =
    DoubleDouble { high: std::f64::consts::LN_2, low: 2.3190468138462996e-17 };

/// The sum, and what rounding it lost.
fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let part = sum - a;
    (sum, (a - (sum - part)) + (b - part))
}

/// The same where `|a| >= |b|`.
fn quick_two_sum(a: f64, b: f64) -> DoubleDouble {
    let high = a + b;
    DoubleDouble { high, low: b - (high - a) }
}

impl From<f64> for DoubleDouble {
    fn from(high: f64) -> Self {
        DoubleDouble { high, low: 0.0 }
    }
}

impl Add for DoubleDouble {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        let (high, lost) = two_sum(self.high, other.high);
        let (low, lost_low) = two_sum(self.low, other.low);
        let sum = quick_two_sum(high, lost + low);
        quick_two_sum(sum.high, sum.low + lost_low)
    }
}

impl Neg for DoubleDouble {
    type Output = Self;
    fn neg(self) -> Self {
        DoubleDouble { high: -self.high, low: -self.low }
    }
}

impl Sub for DoubleDouble {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        self + -other
    }
}

impl Mul for DoubleDouble {
    type Output = Self;
    fn mul(self, other: Self) -> Self {
        let product = self.high * other.high;
        let lost = self.high.mul_add(other.high, -product);
        quick_two_sum(product, lost + (self.high * other.low + self.low * other.high))
    }
}

impl Mul<f64> for DoubleDouble {
    type Output = Self;
    fn mul(self, other: f64) -> Self {
        self * DoubleDouble::from(other)
    }
}

impl Div for DoubleDouble {
    type Output = Self;
    fn div(self, other: Self) -> Self {
        let first = self.high / other.high;
        let rest = self - other * first;
        let second = rest.high / other.high;
        let rest = rest - other * second;
        quick_two_sum(first, second) + (rest.high / other.high).into()
    }
}

impl PartialEq for DoubleDouble {
    fn eq(&self, other: &Self) -> bool {
        (*self - *other).high == 0.0
    }
}

impl PartialOrd for DoubleDouble {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        (*self - *other).high.partial_cmp(&0.0)
    }
}

impl DoubleDouble {
    /// By Newton, two steps from the float64 root; of a positive number.
    pub fn sqrt(self) -> Self {
        let start = self.high.sqrt();
        let step = |root: Self| root + ((self - root * root).high / (2.0 * start)).into();
        step(step(start.into()))
    }

    /// Times `2^exponent`, in two steps, each of which is in range.
    fn scaled(self, exponent: i32) -> Self {
        let (half, rest) = (power_of_two(exponent / 2), power_of_two(exponent - exponent / 2));
        DoubleDouble { high: self.high * half * rest, low: self.low * half * rest }
    }

    /// The float32 nearest to the sum: `high`, made odd where `low` is not 0, rounds as both do.
    pub fn to_f32(self) -> f32 {
        let bits = self.high.to_bits();
        if self.low == 0.0 || bits & 1 == 1 {
            return self.high as f32;
        }
        let outward = (self.low > 0.0) == (self.high > 0.0);
        f64::from_bits(if outward { bits + 1 } else { bits - 1 }) as f32
    }

    pub fn floor(self) -> f64 {
        let floor = self.high.floor();
        if floor == self.high && self.low < 0.0 {
            floor - 1.0
        } else {
            floor
        }
    }

    pub fn ceil(self) -> f64 {
        -(-self).floor()
    }

    /// By Taylor's series of x / 16 less the powers of two, squared four times.
    pub fn exp(self) -> Self {
        let powers = (self.high / LN_2.high).round();
        let reduced = (self - LN_2 * powers).scaled(-4);
        let mut sum = ONE;
        for n in (1..=18).rev() {
            sum = sum * reduced / f64::from(n).into() + ONE;
        }
        for _ in 0..4 {
            sum = sum * sum;
        }
        sum.scaled(powers as i32)
    }

    /// `y + ln(1 + e)` with the float64 logarithm y and the small `e = x exp(-y) - 1`.
    pub fn ln(self) -> Self {
        let near = DoubleDouble::from(self.high.ln());
        let e = self * (-near).exp() - ONE;
        near + (e - e * e * 0.5 + e * e * e / 3.0.into())
    }

    pub fn pow(self, exponent: Self) -> Self {
        (self.ln() * exponent).exp()
    }

    /// The sum over i of `sign^i x^(2i) / (2i + first)!`, for |x| below 1, first 0 or 1.
    fn even_series(self, first: i32, sign: f64) -> Self {
        let square = self * self * sign;
        let mut sum = ONE;
        for n in (1..=16).rev().map(|i| 2 * i + first) {
            sum = ONE + sum * square / f64::from(n * (n - 1)).into();
        }
        sum
    }

    pub fn sin(self) -> Self {
        self * self.even_series(1, -1.0)
    }

    pub fn cos(self) -> Self {
        self.even_series(0, -1.0)
    }

    pub fn tanh(self) -> Self {
        if self.high.abs() < 0.5 {
            return self * self.even_series(1, 1.0) / self.even_series(0, 1.0);
        }
        let e = (self * -2.0).exp();
        (ONE - e) / (ONE + e)
    }
}
