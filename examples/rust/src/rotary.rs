//! Angles and rotation (SPEC 7.3 and 7.4).

use crate::elementary::{cos, sin};
use crate::error::{ensure, Outcome};

/// Positions, and the shifts of moved chunks (SPEC 11.5), are nearer to 0: float32 has them all.
const POSITIONS: u64 = 1 << 24;

/// `(cos(p, i), sin(p, i))` for each of the d/2 pairs (SPEC 7.3).
pub fn cos_sin(
    position: i64,
    inverse_frequencies: &[f32],
    factor: f32,
) -> Outcome<Vec<(f32, f32)>> {
    ensure(position.unsigned_abs() < POSITIONS, "a position is 2^24 or more")?;
    let angles = inverse_frequencies.iter().map(|frequency| position as f32 * frequency);
    Ok(angles.map(|angle| (factor * cos(angle), factor * sin(angle))).collect())
}

/// A head x (D,) rotated in place in its first d elements, by halves or interleaved (SPEC 7.4).
pub fn rotate(x: &mut [f32], pairs: &[(f32, f32)], interleaved: bool) {
    for (i, (cos, sin)) in pairs.iter().enumerate() {
        let (j, k) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + pairs.len()) };
        (x[j], x[k]) = (x[j] * cos - x[k] * sin, x[k] * cos + x[j] * sin);
    }
}
