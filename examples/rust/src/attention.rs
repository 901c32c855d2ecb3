//! Attention, exact and fast (SPEC 8).

use std::ops::Range;

use crate::aligned::{align, align_row, align_value, all_finite, dot64, padded, BLOCK};
use crate::bits::{power_of_two, NAN};
use crate::elementary::{exp, tanh};

/// Requests that compute so many tokens of their prompt or more use fast attention (SPEC 8.4).
pub const FAST_FLOOR: usize = 512;

/// The positions of one key-value head: as they are stored, and as exact attention reads them.
#[derive(Clone, Default)]
pub struct Head {
    dimension: usize,
    /// (S, D) each.
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
    /// Keys aligned and padded; values as integers (S, D) times `2^(e - 24)` of their position.
    aligned_keys: Vec<f64>,
    value_integers: Vec<f64>,
    value_scales: Vec<f64>,
    /// Whether the position's key and value are finite.
    finite: Vec<bool>,
}

impl Head {
    pub fn new(dimension: usize) -> Head {
        Head { dimension, ..Head::default() }
    }

    /// Appends the k (D,) and v (D,) of the next position.
    pub fn push(&mut self, key: &[f32], value: &[f32]) {
        self.keys.extend_from_slice(key);
        self.values.extend_from_slice(value);
        let (aligned_key, aligned_value) = (align_row(key), align_value(value));
        self.finite.push(aligned_key.is_some() && aligned_value.is_some());
        self.aligned_keys.extend(aligned_key.unwrap_or(vec![0.0; padded(self.dimension)]));
        let (integers, scale) = aligned_value.unwrap_or((vec![0.0; self.dimension], 0.0));
        self.value_integers.extend(integers);
        self.value_scales.push(scale);
    }

    /// Keeps the first positions.
    pub fn truncate(&mut self, length: usize) {
        let elements = length * self.dimension;
        self.keys.truncate(elements);
        self.values.truncate(elements);
        self.value_integers.truncate(elements);
        self.aligned_keys.truncate(length * padded(self.dimension));
        self.value_scales.truncate(length);
        self.finite.truncate(length);
    }

    fn row<'a, T>(&self, all: &'a [T], position: usize) -> &'a [T] {
        &all[position * self.dimension..][..self.dimension]
    }
}

/// Heads of k and v (S, Hkv, D).
pub fn heads_of(keys: &[f32], values: &[f32], count: usize, dimension: usize) -> Vec<Head> {
    let mut heads = vec![Head::new(dimension); count];
    append(&mut heads, keys, values, dimension);
    heads
}

/// Appends the rows of k and v (T, Hkv, D) to their heads.
pub fn append(heads: &mut [Head], keys: &[f32], values: &[f32], dimension: usize) {
    let rows = keys.chunks_exact(dimension).zip(values.chunks_exact(dimension));
    let count = heads.len();
    for (i, (key, value)) in rows.enumerate() {
        heads[i % count].push(key, value);
    }
}

/// What all rows and heads of one attention have in common (SPEC 8.2).
pub struct Rule<'a> {
    pub scale: f32,
    pub window: Option<usize>,
    pub softcap: Option<f32>,
    /// (Hq,)
    pub sinks: Option<&'a [f32]>,
    pub fast: bool,
}

/// `RN32(1/sqrt(D))`.
pub fn default_scale(dimension: f64) -> f32 {
    (1.0 / dimension.sqrt()) as f32
}

/// Query rows q (T, Hq, D), the last of the positions of the heads: result (T, Hq, D).
///
/// `length` is S; heads hold D elements a position, and Hq is a multiple of their number.
pub fn attention(
    q: &[f32],
    query_heads: usize,
    heads: &[Head],
    length: usize,
    rule: &Rule,
) -> Vec<f32> {
    let dimension = heads[0].dimension;
    let shared = query_heads / heads.len();
    let rows = q.len() / (query_heads * dimension);
    let mut out = vec![0.0; q.len()];
    for (i, out) in out.chunks_exact_mut(dimension).enumerate() {
        let (row, query_head) = (i / query_heads, i % query_heads);
        let end = (length + row + 1).saturating_sub(rows);
        let begin = rule.window.map_or(0, |window| end.saturating_sub(window));
        let query = &q[i * dimension..][..dimension];
        let sink = rule.sinks.map(|sinks| sinks[query_head]);
        attend(query, &heads[query_head / shared], begin..end, rule, sink, out);
    }
    out
}

/// One row of one head over the visible positions (SPEC 8.1).
fn attend(
    q: &[f32],
    head: &Head,
    visible: Range<usize>,
    rule: &Rule,
    sink: Option<f32>,
    out: &mut [f32],
) {
    if visible.is_empty() {
        return;
    }
    let scores = if rule.fast { fast_scores } else { exact_scores };
    let weigh = if rule.fast { fast_sum } else { exact_sum };
    let bad_sink = sink.is_some_and(|sink| sink.is_nan() || sink == f32::INFINITY);
    match scores(q, head, visible.clone(), rule) {
        Some(scores) if !bad_sink => weigh(&scores, head, visible, sink, out),
        _ => out.fill(NAN),
    }
}

/// The largest score, the sink's among them.
fn largest(scores: &[f32], sink: Option<f32>) -> f32 {
    scores.iter().copied().fold(sink.unwrap_or(f32::NEG_INFINITY), f32::max)
}

/// u of SPEC 8.2 for each visible position; None where something is not finite.
fn exact_scores(q: &[f32], head: &Head, visible: Range<usize>, rule: &Rule) -> Option<Vec<f32>> {
    let q = align_row(q)?;
    let score = |j: usize| {
        let key = &head.aligned_keys[j * q.len()..][..q.len()];
        let t = dot64(&q, key) as f32 * rule.scale;
        let u = rule.softcap.map_or(t, |cap| cap * tanh(t / cap));
        (head.finite[j] && t.is_finite()).then_some(u)
    };
    visible.map(score).collect()
}

/// The weighted sum of SPEC 2.5 and 8.2, in blocks by absolute position.
fn exact_sum(
    scores: &[f32],
    head: &Head,
    visible: Range<usize>,
    sink: Option<f32>,
    out: &mut [f32],
) {
    let largest = largest(scores, sink);
    let (mut numerator, mut denominator) = (vec![0.0; out.len()], 0.0);
    let mut begin = visible.start;
    while begin < visible.end {
        let end = (begin / BLOCK * BLOCK + BLOCK).min(visible.end);
        let weights = &scores[begin - visible.start..end - visible.start];
        let mut p: Vec<f64> = weights.iter().map(|u| exp(u - largest).into()).collect();
        let mut w: Vec<f64> =
            p.iter().zip(&head.value_scales[begin..end]).map(|(p, e)| p * e).collect();
        align(&mut p);
        align(&mut w);
        denominator += p.iter().sum::<f64>();
        let mut block = vec![0.0; out.len()];
        for (j, w) in (begin..end).zip(w) {
            for (sum, v) in block.iter_mut().zip(head.row(&head.value_integers, j)) {
                *sum += w * v;
            }
        }
        for (sum, block) in numerator.iter_mut().zip(block) {
            *sum += block * power_of_two(-24);
        }
        begin = end;
    }
    if let Some(sink) = sink {
        denominator += f64::from(exp(sink - largest));
    }
    for (out, numerator) in out.iter_mut().zip(numerator) {
        *out = (numerator / denominator) as f32;
    }
}

/// Scores in plain float32 (SPEC 8.3), summed in the order `lanes8` of SPEC 3.
fn fast_scores(q: &[f32], head: &Head, visible: Range<usize>, rule: &Rule) -> Option<Vec<f32>> {
    let score = |j: usize| {
        let mut lanes = [0.0f32; 8];
        for (i, (q, k)) in q.iter().zip(head.row(&head.keys, j)).enumerate() {
            lanes[i % 8] += q * k;
        }
        let [a, b, c, d, e, f, g, h] = lanes;
        let t = (((a + e) + (c + g)) + ((b + f) + (d + h))) * rule.scale;
        let u = rule.softcap.map_or(t, |cap| cap * (t / cap).tanh());
        (head.finite[j] && t.is_finite()).then_some(u)
    };
    if all_finite(q) {
        visible.map(score).collect()
    } else {
        None
    }
}

/// The weighted sum in plain float32 (SPEC 8.3).
fn fast_sum(
    scores: &[f32],
    head: &Head,
    visible: Range<usize>,
    sink: Option<f32>,
    out: &mut [f32],
) {
    let largest = largest(scores, sink);
    let mut denominator = sink.map_or(0.0, |sink| (sink - largest).exp());
    out.fill(0.0);
    for (j, u) in visible.zip(scores) {
        let p = (u - largest).exp();
        denominator += p;
        for (sum, v) in out.iter_mut().zip(head.row(&head.values, j)) {
            *sum += p * v;
        }
    }
    for sum in out {
        *sum /= denominator;
    }
}
