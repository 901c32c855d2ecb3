//! Powers of two, exponents, and the two floats of 16 bits (SPEC 1.1).

/// The one NaN that is ever produced (SPEC 1.3).
pub const NAN: f32 = f32::from_bits(0x7fc0_0000);

/// `2^exponent`, from -1074 to 1023.
pub fn power_of_two(exponent: i32) -> f64 {
    if exponent < -1022 {
        f64::from_bits(1 << (exponent + 1074))
    } else {
        f64::from_bits(((exponent + 1023) as u64) << 52)
    }
}

/// The E with `2^(E-1) <= |x| < 2^E` of a normal float64, as every float32 but zero is (SPEC 2.1).
pub fn exponent(x: f64) -> i32 {
    ((x.to_bits() >> 52) & 0x7ff) as i32 - 1022
}

/// A float16, widened.
pub fn f16_to_f32(half: u16) -> f32 {
    let (exponent, mantissa) = (((half >> 10) & 31) as i32, (half & 1023) as f32);
    let magnitude = match exponent {
        0 => mantissa * power_of_two(-24) as f32,
        31 if mantissa == 0.0 => f32::INFINITY,
        31 => NAN,
        _ => (1024.0 + mantissa) * power_of_two(exponent - 25) as f32,
    };
    if half >> 15 == 1 {
        -magnitude
    } else {
        magnitude
    }
}

/// `RN16(x)`, its bits.
pub fn f64_to_f16(x: f64) -> u16 {
    let sign = ((x.to_bits() >> 63) as u16) << 15;
    let magnitude = x.abs();
    if x.is_nan() {
        return 0x7e00;
    }
    if magnitude >= 65520.0 {
        return sign | 0x7c00;
    }
    // In units of the last place; a carry out of them runs into the exponent, as it should.
    let binade = (exponent(magnitude) - 1).max(-14);
    let units = (magnitude * power_of_two(10 - binade)).round_ties_even() as u16;
    sign | ((((binade + 14) as u16) << 10) + units)
}

/// A bfloat16, widened.
pub fn bf16_to_f32(half: u16) -> f32 {
    f32::from_bits((half as u32) << 16)
}

/// A float32, rounded to bfloat16: its bits.
pub fn f32_to_bf16(x: f32) -> u16 {
    if x.is_nan() {
        return 0x7fc0;
    }
    let bits = x.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}
