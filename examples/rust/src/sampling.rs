//! From logits to a token (SPEC 13.1 and 13.2).

use std::collections::HashSet;

use crate::elementary::exp;
use crate::error::{ensure, Outcome};

/// What a request says about its tokens.
pub struct Sampling {
    pub temperature: f32,
    pub top_k: usize,
    pub top_p: f64,
    pub min_p: f64,
    pub repetition_penalty: f32,
}

impl Sampling {
    /// Refuses what SPEC 13.1 does not allow.
    pub fn check(&self) -> Outcome<()> {
        ensure((0.0..f32::INFINITY).contains(&self.temperature), "temperature must be 0 or more")?;
        ensure(self.top_p > 0.0 && self.top_p <= 1.0, "top_p must be above 0 and at most 1")?;
        ensure((0.0..=1.0).contains(&self.min_p), "min_p must be from 0 to 1")?;
        let penalty = self.repetition_penalty;
        ensure(penalty > 0.0 && penalty.is_finite(), "repetition_penalty must be above 0")
    }

    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }
}

/// Whose random words are drawn.
#[derive(Clone, Copy)]
pub struct Source {
    pub seed: u64,
    pub request: u32,
}

impl Source {
    /// The word of a position and stream: Philox4x32-10 (SPEC 13.2).
    pub fn word(self, position: u32, stream: u32) -> u64 {
        let (mut k0, mut k1) = (self.seed as u32, (self.seed >> 32) as u32);
        let mut counter = [position, self.request, stream, 0];
        for _ in 0..10 {
            let [c0, c1, c2, c3] = counter;
            let a = 0xD251_1F53 * u64::from(c0);
            let b = 0xCD9E_8D57 * u64::from(c2);
            counter = [(b >> 32) as u32 ^ c1 ^ k0, b as u32, (a >> 32) as u32 ^ c3 ^ k1, a as u32];
            (k0, k1) = (k0.wrapping_add(0x9E37_79B9), k1.wrapping_add(0xBB67_AE85));
        }
        u64::from(counter[0]) | u64::from(counter[1]) << 32
    }
}

/// The token with the largest logit, of equal ones the lowest id.
pub fn greedy(logits: &[f32]) -> Outcome<usize> {
    let unfit = logits.iter().any(|l| l.is_nan() || *l == f32::INFINITY);
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    ensure(!unfit && largest.is_finite(), "a row of logits has NaN, infinity or no finite one")?;
    Ok(logits.iter().position(|l| *l == largest).unwrap_or(0))
}

/// The weights (V,) of SPEC 13.1, steps 1 to 6: 0 for what is not kept; greedy, a point mass.
///
/// `previous` are the tokens so far; each of them is below V.
pub fn law(logits: &[f32], sampling: &Sampling, previous: &[usize]) -> Outcome<Vec<u64>> {
    let logits = penalized(logits, sampling.repetition_penalty, previous);
    let best = greedy(&logits)?;
    let mut law = vec![0; logits.len()];
    if sampling.is_greedy() {
        law[best] = 1;
        return Ok(law);
    }
    let weight = |l: &f32| {
        let p = exp((l - logits[best]) / sampling.temperature);
        (f64::from(p) * (1u64 << 40) as f64).round_ties_even() as u64
    };
    let weights: Vec<u64> = logits.iter().map(weight).collect();
    for id in kept(&weights, sampling) {
        law[id] = weights[id];
    }
    Ok(law)
}

/// Step 1.
fn penalized(logits: &[f32], penalty: f32, previous: &[usize]) -> Vec<f32> {
    let mut logits = logits.to_vec();
    for id in previous.iter().collect::<HashSet<_>>() {
        let logit = &mut logits[*id];
        *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
    }
    logits
}

/// Steps 4 to 6: the ids that remain, ranked.
fn kept(weights: &[u64], sampling: &Sampling) -> Vec<usize> {
    let mut ranked: Vec<usize> = (0..weights.len()).collect();
    ranked.sort_by_key(|id| std::cmp::Reverse(weights[*id]));
    if sampling.top_k > 0 {
        ranked.truncate(sampling.top_k);
    }
    let total = ranked.iter().map(|id| weights[*id] as u128).sum();
    let mut sum = 0;
    let crossing = ranked.iter().position(|id| {
        sum += weights[*id] as u128;
        reaches(sum, sampling.top_p, total)
    });
    ranked.truncate(crossing.map_or(ranked.len(), |last| last + 1));
    let largest = weights[ranked[0]];
    let best = ranked[0];
    ranked.retain(|id| *id == best || reaches(weights[*id].into(), sampling.min_p, largest.into()));
    ranked
}

/// Whether `weight >= share * total`, on the rational value of a share from 0 to 1; total is below
/// 2^75, so that 53 bits of the share fit beside it.
fn reaches(weight: u128, share: f64, total: u128) -> bool {
    let bits = share.to_bits();
    let (fraction, biased) = (bits & ((1 << 52) - 1), (bits >> 52) as u32);
    let mantissa = if biased == 0 { fraction } else { fraction | 1 << 52 };
    let shift = 1075 - biased.max(1);
    let product = u128::from(mantissa) * total;
    if shift < 128 {
        // weight >= product / 2^shift, rounded up to an integer.
        weight >= (product >> shift) + u128::from(product & ((1 << shift) - 1) > 0)
    } else {
        weight >= u128::from(product > 0)
    }
}

/// Step 7: the token that the word x draws; weights sum to below 2^127, and not to 0.
pub fn draw(weights: &[u128], x: u64) -> usize {
    let total: u128 = weights.iter().sum();
    let (high, low, x) = (total >> 64, total & u128::from(u64::MAX), u128::from(x));
    let target = high * x + ((low * x) >> 64);
    let mut sum = 0;
    let exceeds = |weight: &u128| {
        sum += weight;
        sum > target
    };
    weights.iter().position(exceeds).unwrap_or(0)
}

/// The token of one position (SPEC 13.1).
pub fn sample(
    logits: &[f32],
    sampling: &Sampling,
    previous: &[usize],
    source: Source,
    position: u32,
) -> Outcome<usize> {
    let weights: Vec<u128> = law(logits, sampling, previous)?.into_iter().map(u128::from).collect();
    Ok(draw(&weights, source.word(position, 0)))
}
