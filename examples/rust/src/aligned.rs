//! Aligned arithmetic: sums that do not round, and so have no order (SPEC 2).
//!
//! Aligned values are kept as float64, with which the products of one block are summed exactly in
//! any order; block sums are added one by one, ascending.

use crate::bits::{exponent, power_of_two, NAN};

/// Consecutive terms that are summed exactly (SPEC 2.1).
pub const BLOCK: usize = 32;

/// Adding and subtracting it rounds a float64 below 2^51 to an integer, ties to even.
const ROUNDER: f64 = 6755399441055744.0;

/// x aligned on the grid of its largest element, in place; x has one block at most (SPEC 2.1).
pub fn align(x: &mut [f64]) {
    let largest = x.iter().fold(0.0, |largest: f64, v| largest.max(v.abs()));
    if largest == 0.0 {
        return x.fill(0.0);
    }
    let e = exponent(largest);
    let (up, down) = (power_of_two(24 - e), power_of_two(e - 24));
    for v in x {
        *v = ((*v * up + ROUNDER) - ROUNDER) * down;
    }
}

pub fn all_finite(x: &[f32]) -> bool {
    x.iter().all(|v| v.is_finite())
}

/// The elements of a row once its ragged block is filled up with zeros.
pub fn padded(length: usize) -> usize {
    length.next_multiple_of(BLOCK)
}

/// A row aligned block by block and padded; None where an element is not finite (SPEC 2.6).
pub fn align_row(x: &[f32]) -> Option<Vec<f64>> {
    if !all_finite(x) {
        return None;
    }
    let mut aligned = vec![0.0; padded(x.len())];
    for (to, from) in aligned.iter_mut().zip(x) {
        *to = f64::from(*from);
    }
    aligned.chunks_exact_mut(BLOCK).for_each(align);
    Some(aligned)
}

/// `dot64` of two aligned rows (SPEC 2.2). Eight lanes let the machine sum a block side by side.
pub fn dot64(a: &[f64], b: &[f64]) -> f64 {
    let mut dot = 0.0;
    for (a, b) in a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK)) {
        let mut lanes = [0.0; 8];
        for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
            for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
                *lane += a * b;
            }
        }
        dot += lanes.iter().sum::<f64>();
    }
    dot
}

/// `dot64(x, x)` of a row (SPEC 2.2), None where it is not finite.
pub fn squares64(x: &[f32]) -> Option<f64> {
    let aligned = align_row(x)?;
    Some(dot64(&aligned, &aligned))
}

/// `sum64(p)` of finite p (SPEC 2.4).
pub fn sum64(p: &[f32]) -> f64 {
    let mut sum = 0.0;
    for chunk in p.chunks(BLOCK) {
        let mut block = [0.0; BLOCK];
        for (to, from) in block.iter_mut().zip(chunk) {
            *to = f64::from(*from);
        }
        align(&mut block);
        sum += block.iter().sum::<f64>();
    }
    sum
}

/// A row of values on one grid over its whole width (SPEC 2.5): the integers V of it, (D,), and
/// `2^e`, or 0 for an all-zero row. None where an element is not finite.
pub fn align_value(v: &[f32]) -> Option<(Vec<f64>, f64)> {
    if !all_finite(v) {
        return None;
    }
    let largest = v.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
    if largest == 0.0 {
        return Some((vec![0.0; v.len()], 0.0));
    }
    let e = exponent(f64::from(largest));
    let up = power_of_two(24 - e);
    let integers = v.iter().map(|x| (f64::from(*x) * up + ROUNDER) - ROUNDER).collect();
    Some((integers, power_of_two(e)))
}

/// Outputs that lie side by side in a panel, and rows that a tile computes with them at once.
const PANEL: usize = 16;
const TILE: usize = 4;

/// A weight matrix w (N, K), aligned once: panels of 16 outputs, k by k.
pub struct AlignedMatrix {
    pub outputs: usize,
    inputs: usize,
    panels: Vec<f64>,
    finite: Vec<bool>,
}

impl AlignedMatrix {
    /// w has `outputs * inputs` elements, row by row.
    pub fn new(w: &[f32], outputs: usize, inputs: usize) -> AlignedMatrix {
        let depth = padded(inputs);
        let mut panels = vec![0.0; outputs.next_multiple_of(PANEL) * depth];
        let mut finite = vec![true; outputs];
        for n in 0..outputs {
            let Some(row) = align_row(&w[n * inputs..][..inputs]) else {
                finite[n] = false;
                continue;
            };
            let panel = &mut panels[n / PANEL * PANEL * depth..][..PANEL * depth];
            for (k, value) in row.iter().enumerate() {
                panel[k * PANEL + n % PANEL] = *value;
            }
        }
        AlignedMatrix { outputs, inputs, panels, finite }
    }

    /// `matmul(x, w)` (SPEC 2.2): x (T, K), result (T, N).
    pub fn matmul(&self, x: &[f32], rows: usize) -> Vec<f32> {
        let (outputs, depth) = (self.outputs, padded(self.inputs));
        let mut aligned = vec![0.0; rows.next_multiple_of(TILE) * depth];
        let mut finite = vec![true; rows];
        for t in 0..rows {
            match align_row(&x[t * self.inputs..][..self.inputs]) {
                Some(row) => aligned[t * depth..][..depth].copy_from_slice(&row),
                None => finite[t] = false,
            }
        }
        let mut y = vec![NAN; rows * outputs];
        for first_output in (0..outputs).step_by(PANEL) {
            let panel = &self.panels[first_output * depth..][..PANEL * depth];
            for first_row in (0..rows).step_by(TILE) {
                let x = &aligned[first_row * depth..][..TILE * depth];
                let sums = if rows == 1 { tile::<1>(x, panel) } else { tile::<TILE>(x, panel) };
                for t in first_row..rows.min(first_row + TILE) {
                    for n in first_output..outputs.min(first_output + PANEL) {
                        if finite[t] && self.finite[n] {
                            y[t * outputs + n] = sums[t - first_row][n - first_output] as f32;
                        }
                    }
                }
            }
        }
        y
    }
}

/// `dot64` of the first ROWS aligned rows of x (4, K) and the 16 outputs of a panel.
fn tile<const ROWS: usize>(x: &[f64], panel: &[f64]) -> [[f64; PANEL]; TILE] {
    let depth = panel.len() / PANEL;
    let mut sums = [[0.0; PANEL]; TILE];
    for (block, weights) in panel.chunks_exact(BLOCK * PANEL).enumerate() {
        let mut block_sums = [[0.0; PANEL]; ROWS];
        for (k, weights) in weights.chunks_exact(PANEL).enumerate() {
            for (row, block_sums) in block_sums.iter_mut().enumerate() {
                let x = x[row * depth + block * BLOCK + k];
                for (sum, weight) in block_sums.iter_mut().zip(weights) {
                    *sum += x * weight;
                }
            }
        }
        for (sums, block_sums) in sums.iter_mut().zip(block_sums) {
            for (sum, block_sum) in sums.iter_mut().zip(block_sums) {
                *sum += block_sum;
            }
        }
    }
    sums
}
