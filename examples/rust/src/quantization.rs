//! Codes and scales: int4, int8, Q4_0 and Q8_0 (SPEC 5).

use crate::aligned::{all_finite, squares64};
use crate::bits::{exponent, f16_to_f32, f64_to_f16, power_of_two, NAN};
use crate::error::{ensure, Outcome};

/// Codes q (N, K), each group of `group` consecutive k of a row with a scale: scales (N, G).
pub struct CodeMatrix {
    pub outputs: usize,
    pub inputs: usize,
    /// 0 is one group a row.
    pub group: usize,
    pub codes: Vec<i8>,
    /// Widened from float16.
    pub scales: Vec<f32>,
}

/// Consecutive k with one scale, and how many such groups a row has.
pub fn grouping(group: usize, inputs: usize) -> (usize, usize) {
    if group == 0 {
        (inputs.max(1), 1)
    } else {
        (group, inputs.div_ceil(group))
    }
}

/// The largest magnitude of weights, which must be finite.
fn largest(w: &[f32]) -> Outcome<f64> {
    ensure(all_finite(w), "a weight is not finite")?;
    Ok(w.iter().fold(0.0, |largest: f64, v| largest.max(f64::from(v.abs()))))
}

/// The bits of the float16 scale for the quotient `max|w| / 7`, by the rules of SPEC 5.1.
fn scale_of(quotient: f64) -> Outcome<u16> {
    if quotient == 0.0 {
        return Ok(f64_to_f16(1.0));
    }
    let scale = f64_to_f16(quotient);
    ensure(scale < 0x7c00, "a scale would round beyond 65504")?;
    Ok(scale.max(1))
}

fn int4_code(w: f32, scale: f32) -> i8 {
    let quotient = f64::from(w) / f64::from(scale);
    let magnitude = (quotient.abs() + 0.5).floor().min(7.0) as i8;
    if quotient < 0.0 {
        -magnitude
    } else {
        magnitude
    }
}

/// Codes (N, K) and the bits of scales (N, G) of w (N, K), by largest magnitude (SPEC 5.1).
pub fn quantize_int4(w: &[f32], inputs: usize, group: usize) -> Outcome<(Vec<i8>, Vec<u16>)> {
    let (group, _) = grouping(group, inputs);
    let (mut codes, mut scales) = (vec![], vec![]);
    for row in w.chunks(inputs.max(1)) {
        for w in row.chunks(group) {
            let bits = scale_of(largest(w)? / 7.0)?;
            codes.extend(w.iter().map(|v| int4_code(*v, f16_to_f32(bits))));
            scales.push(bits);
        }
    }
    Ok((codes, scales))
}

/// The same with one scale a row, the one of 19 with the least squared error (SPEC 5.3, `search`).
pub fn quantize_int4_search(w: &[f32], inputs: usize) -> Outcome<(Vec<i8>, Vec<u16>)> {
    let (mut codes, mut scales) = (vec![], vec![]);
    for row in w.chunks(inputs.max(1)) {
        let largest = largest(row)?;
        let mut best = (f64::INFINITY, 0, vec![]);
        for j in 22..=40 {
            let bits = scale_of(largest * (f64::from(j) / 40.0) / 7.0)?;
            let scale = f16_to_f32(bits);
            let tried: Vec<i8> = row.iter().map(|v| int4_code(*v, scale)).collect();
            let error =
                |(w, q): (&f32, &i8)| (f64::from(*w) - f64::from(scale) * f64::from(*q)) as f32;
            let errors: Vec<f32> = row.iter().zip(&tried).map(error).collect();
            let squares = squares64(&errors).ok_or("an error of a code is not finite")?;
            // Of equal ones the largest factor wins, which comes last.
            if squares <= best.0 {
                best = (squares, bits, tried);
            }
        }
        codes.extend(best.2);
        scales.push(best.1);
    }
    Ok((codes, scales))
}

/// The bytes (N, ceil(K/2)) of codes (N, K), two in each (SPEC 5.2).
pub fn pack(codes: &[i8], inputs: usize) -> Vec<u8> {
    let byte = |pair: &[i8]| {
        let high = pair.get(1).copied().unwrap_or(0);
        (pair[0] + 8) as u8 | ((high + 8) as u8) << 4
    };
    codes.chunks(inputs.max(1)).flat_map(|row| row.chunks(2).map(byte)).collect()
}

/// The codes (N, K) of bytes (N, ceil(K/2)).
pub fn unpack(packed: &[u8], inputs: usize) -> Vec<i8> {
    let row = |bytes: &[u8]| -> Vec<i8> {
        let nibbles = bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]);
        nibbles.take(inputs).map(|nibble| nibble as i8 - 8).collect()
    };
    packed.chunks(inputs.div_ceil(2).max(1)).flat_map(row).collect()
}

/// One row of activations (K,): its codes and its scale (SPEC 5.4).
pub fn quantize_int8(x: &[f32]) -> (Vec<i8>, f32) {
    if !all_finite(x) {
        return (vec![0; x.len()], NAN);
    }
    let scale = x.iter().fold(0.0, |largest: f32, v| largest.max(v.abs())) / 127.0;
    if scale == 0.0 {
        return (vec![0; x.len()], scale);
    }
    let code = |v: &f32| (v / scale).round_ties_even().clamp(-127.0, 127.0) as i8;
    (x.iter().map(code).collect(), scale)
}

/// The layer of SPEC 5.5 and 5.7: x (T, K), result (T, N).
pub fn linear_codes(x: &[f32], rows: usize, w: &CodeMatrix) -> Vec<f32> {
    let (inputs, outputs) = (w.inputs, w.outputs);
    let (group, groups) = grouping(w.group, inputs);
    let activations: Vec<_> =
        (0..rows).map(|t| quantize_int8(&x[t * inputs..][..inputs])).collect();
    let mut y = vec![NAN; rows * outputs];
    for n in 0..outputs {
        let (codes, scales) = (&w.codes[n * inputs..][..inputs], &w.scales[n * groups..][..groups]);
        if !all_finite(scales) {
            continue;
        }
        // In units of 2^-24, of which every float16 is a multiple (5.6), sums are exact.
        let units: Vec<i64> =
            scales.iter().map(|d| (f64::from(*d) * power_of_two(24)) as i64).collect();
        for (t, (x, scale)) in activations.iter().enumerate() {
            if scale.is_nan() {
                continue;
            }
            let dots = x.chunks(group).zip(codes.chunks(group)).map(|(x, q)| dot_codes(x, q));
            let sum = dots.zip(&units).map(|(dot, unit)| i128::from(dot) * i128::from(*unit)).sum();
            y[t * outputs + n] = scaled(sum, *scale);
        }
    }
    y
}

/// In int32 over stretches that cannot overflow it.
fn dot_codes(a: &[i8], b: &[i8]) -> i64 {
    let stretch = |(a, b): (&[i8], &[i8])| -> i64 {
        let dot: i32 = a.iter().zip(b).map(|(a, b)| i32::from(*a) * i32::from(*b)).sum();
        dot.into()
    };
    a.chunks(4096).zip(b.chunks(4096)).map(stretch).sum()
}

/// `RN32(RN64(sum * 2^-24 * scale))` of an exact sum and a scale that is not negative (SPEC 5.5).
fn scaled(sum: i128, scale: f32) -> f32 {
    if scale == 0.0 {
        return 0.0;
    }
    let unit = exponent(f64::from(scale)) - 24;
    let mantissa = (f64::from(scale) * power_of_two(-unit)) as i128;
    ((sum * mantissa) as f64 * power_of_two(unit - 24)) as f32
}

/// The weights (N, K) of SPEC 5.9, `scale * (c - z)`.
///
/// packed (N, ceil(K/2)), scales and zeros (N, G); without zeros, z is 8.
pub fn w4a16_weights(
    packed: &[u8],
    scales: &[f32],
    zeros: Option<&[u8]>,
    inputs: usize,
    group: usize,
) -> Vec<f32> {
    let (group, groups) = grouping(group, inputs);
    let weight = |(i, code): (usize, i8)| {
        let at = i / inputs * groups + i % inputs / group;
        let zero = zeros.map_or(0.0, |zeros| f32::from(zeros[at]) - 8.0);
        scales[at] * (f32::from(code) - zero)
    };
    unpack(packed, inputs).into_iter().enumerate().map(weight).collect()
}

/// The two formats of blocks (SPEC 5.7).
#[derive(Clone, Copy, PartialEq)]
pub enum BlockFormat {
    Q4_0,
    Q8_0,
}

impl BlockFormat {
    pub fn bytes(self) -> usize {
        match self {
            BlockFormat::Q4_0 => 18,
            BlockFormat::Q8_0 => 34,
        }
    }
}

/// The codes and scales of blocks as they are stored, (N, K / 32, 18 or 34) (SPEC 5.7).
pub fn read_blocks(blocks: &[u8], inputs: usize, format: BlockFormat) -> CodeMatrix {
    let (mut codes, mut scales) = (vec![], vec![]);
    for block in blocks.chunks_exact(format.bytes()) {
        let (scale, bytes) = block.split_at(2);
        scales.push(f16_to_f32(u16::from_le_bytes([scale[0], scale[1]])));
        match format {
            BlockFormat::Q4_0 => {
                codes.extend(bytes.iter().map(|byte| (byte & 15) as i8 - 8));
                codes.extend(bytes.iter().map(|byte| (byte >> 4) as i8 - 8));
            }
            BlockFormat::Q8_0 => codes.extend(bytes.iter().map(|byte| *byte as i8)),
        }
    }
    let outputs = codes.len() / inputs.max(1);
    CodeMatrix { outputs, inputs, group: 32, codes, scales }
}
