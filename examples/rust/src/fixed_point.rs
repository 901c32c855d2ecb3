//! Integers of 640 bits that count units of 2^-448: the remainder of a float32 by pi / 2, for any
//! float32 (SPEC 4.1, "over the full range").

use std::sync::OnceLock;

use crate::bits::power_of_two;
use crate::double_double::DoubleDouble;

const LIMBS: usize = 10;
const FRACTION: usize = 448;

/// Limbs of 64 bits, the lowest first; never negative.
#[derive(Clone, Copy, PartialEq)]
struct Fixed([u64; LIMBS]);

impl Fixed {
    fn integer(value: u64) -> Fixed {
        let mut limbs = [0; LIMBS];
        limbs[FRACTION / 64] = value;
        Fixed(limbs)
    }

    fn plus(self, other: Fixed) -> Fixed {
        let mut carry = 0;
        let mut sum = self;
        for (limb, more) in sum.0.iter_mut().zip(other.0) {
            carry += *limb as u128 + more as u128;
            *limb = carry as u64;
            carry >>= 64;
        }
        sum
    }

    fn minus(self, other: Fixed) -> Fixed {
        let mut borrow = 0;
        let mut difference = self;
        for (limb, less) in difference.0.iter_mut().zip(other.0) {
            borrow += *limb as i128 - less as i128;
            *limb = borrow as u64;
            borrow >>= 64;
        }
        difference
    }

    fn over(self, divisor: u64) -> Fixed {
        let mut rest = 0;
        let mut quotient = self;
        for limb in quotient.0.iter_mut().rev() {
            let value = rest << 64 | *limb as u128;
            *limb = (value / divisor as u128) as u64;
            rest = value % divisor as u128;
        }
        quotient
    }

    fn doubled(self) -> Fixed {
        self.plus(self)
    }

    fn halved(self) -> Fixed {
        self.over(2)
    }

    fn at_least(&self, other: &Fixed) -> bool {
        self.0.iter().rev().ge(other.0.iter().rev())
    }

    fn is_zero(&self) -> bool {
        self.0 == [0; LIMBS]
    }

    fn to_double_double(self) -> DoubleDouble {
        let mut sum = DoubleDouble::from(0.0);
        for (i, limb) in self.0.iter().enumerate().rev().filter(|(_, limb)| **limb > 0) {
            let unit = 64 * i as i32 - FRACTION as i32;
            sum = sum + ((limb >> 32) as f64 * power_of_two(unit + 32)).into();
            sum = sum + ((limb & 0xffff_ffff) as f64 * power_of_two(unit)).into();
        }
        sum
    }
}

/// `times * atan(1 / n)`, by its series.
fn arctangent(times: u64, n: u64) -> Fixed {
    let mut power = Fixed::integer(times).over(n);
    let mut sum = power;
    for k in 1.. {
        power = power.over(n * n);
        if power.is_zero() {
            break;
        }
        let term = power.over(2 * k + 1);
        sum = if k % 2 == 1 { sum.minus(term) } else { sum.plus(term) };
    }
    sum
}

/// 2 pi, by Machin's formula.
fn two_pi() -> Fixed {
    static TWO_PI: OnceLock<Fixed> = OnceLock::new();
    *TWO_PI.get_or_init(|| arctangent(32, 5).minus(arctangent(8, 239)))
}

/// `|x|` less a multiple of 2 pi: `mantissa * 2^exponent` is reduced, and then doubled and reduced
/// again for each power of two that does not fit.
fn less_whole_turns(x: f32) -> Fixed {
    let bits = x.abs().to_bits();
    let (mantissa, biased) = (bits & 0x7f_ffff, (bits >> 23) as i32);
    let mantissa = if biased == 0 { mantissa } else { mantissa | 0x80_0000 };
    let exponent = biased.max(1) - 150;
    let place = (FRACTION as i32 + exponent.min(0)) as usize;
    let shifted = (mantissa as u128) << (place % 64);
    let mut rest = Fixed([0; LIMBS]);
    rest.0[place / 64] = shifted as u64;
    rest.0[place / 64 + 1] = (shifted >> 64) as u64;

    let turn = two_pi();
    let mut multiple = turn;
    while rest.at_least(&multiple) {
        multiple = multiple.doubled();
    }
    while multiple != turn {
        multiple = multiple.halved();
        if rest.at_least(&multiple) {
            rest = rest.minus(multiple);
        }
    }
    for _ in 0..exponent {
        rest = rest.doubled();
        if rest.at_least(&turn) {
            rest = rest.minus(turn);
        }
    }
    rest
}

/// `|x| = quadrant * pi/2 + r` up to whole turns, with r from -pi/4 to pi/4 and quadrant 0 to 3.
pub fn reduce(x: f32) -> (u32, DoubleDouble) {
    let right_angle = two_pi().over(4);
    let mut rest = less_whole_turns(x);
    let mut quadrant = 0;
    while rest.at_least(&right_angle) {
        rest = rest.minus(right_angle);
        quadrant += 1;
    }
    if rest.at_least(&right_angle.halved()) {
        let below = right_angle.minus(rest).to_double_double();
        return ((quadrant + 1) % 4, -below);
    }
    (quadrant % 4, rest.to_double_double())
}
