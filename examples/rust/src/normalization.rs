//! RMSNorm (SPEC 6).

use crate::aligned::squares64;
use crate::bits::NAN;

/// Rows of x, each as wide as the weight (K,), normed: result as x.
pub fn rms_norm(x: &[f32], weight: &[f32], epsilon: f64) -> Vec<f32> {
    x.chunks(weight.len().max(1)).flat_map(|row| norm_row(row, weight, epsilon)).collect()
}

fn norm_row(x: &[f32], weight: &[f32], epsilon: f64) -> Vec<f32> {
    let Some(squares) = squares64(x) else { return vec![NAN; x.len()] };
    let mean = squares / x.len() as f64;
    let r = (1.0 / (mean + epsilon).sqrt()) as f32;
    x.iter().zip(weight).map(|(x, w)| x * r * w).collect()
}
