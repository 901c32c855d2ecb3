//! Drafted tokens: where they come from and which are accepted (SPEC 13.3 and 13.4).

use crate::error::{ensure, Outcome};
use crate::sampling::{draw, law, sample, Sampling, Source};

/// The longest run of tokens that is looked up.
const LONGEST: usize = 3;

/// n tokens that followed the end of the context where it occurred before, or none (SPEC 13.3).
pub fn lookup(context: &[i64], n: usize) -> Vec<i64> {
    for size in (1..=LONGEST.min(context.len())).rev() {
        let tail = &context[context.len() - size..];
        let earlier = (size..context.len()).rev().find(|end| context[end - size..*end] == *tail);
        if let Some(end) = earlier {
            return context[end..].iter().copied().cycle().take(n).collect();
        }
    }
    vec![]
}

/// Guessed tokens (n,), and for each the weights (V,) that it was drawn by.
pub struct Draft {
    pub tokens: Vec<usize>,
    pub laws: Vec<Vec<u64>>,
}

/// The accepted tokens and one more, of logits (n + 1, V), V above 0 (SPEC 13.4); `position` is the
/// first drafted token's.
pub fn verify(
    logits: &[f32],
    draft: &Draft,
    sampling: &Sampling,
    previous: &[usize],
    source: Source,
    position: u32,
) -> Outcome<Vec<usize>> {
    let vocabulary = logits.len() / (draft.tokens.len() + 1);
    let mut context = previous.to_vec();
    let rows = (position..).zip(logits.chunks_exact(vocabulary));
    for ((position, logits), (token, drafted)) in rows.zip(draft.tokens.iter().zip(&draft.laws)) {
        let target = law(logits, sampling, &context)?;
        ensure(drafted[*token] > 0, "a draft law gives its own token no weight")?;
        if accepts(source.word(position, 2), *token, &target, drafted) {
            context.push(*token);
            continue;
        }
        context.push(draw(&residual(&target, drafted), source.word(position, 3)));
        return Ok(context.split_off(previous.len()));
    }
    let last = &logits[draft.tokens.len() * vocabulary..];
    let position = position + draft.tokens.len() as u32;
    context.push(sample(last, sampling, &context, source, position)?);
    Ok(context.split_off(previous.len()))
}

fn total(law: &[u64]) -> u128 {
    law.iter().map(|weight| u128::from(*weight)).sum()
}

/// Step 2, `u * q(x) * W < w(x) * Q * 2^64`: the left, less its last 64 bits, is below `w(x) * Q`.
fn accepts(u: u64, token: usize, target: &[u64], drafted: &[u64]) -> bool {
    let left = u128::from(drafted[token]) * total(target);
    let low = u128::from(u) * (left & u128::from(u64::MAX));
    let high = u128::from(u) * (left >> 64) + (low >> 64);
    high < u128::from(target[token]) * total(drafted)
}

/// Step 3: `max(w(y) * Q - q(y) * W, 0)` for every y.
fn residual(target: &[u64], drafted: &[u64]) -> Vec<u128> {
    let (target_total, drafted_total) = (total(target), total(drafted));
    let rest = |(w, q): (&u64, &u64)| {
        (u128::from(*w) * drafted_total).saturating_sub(u128::from(*q) * target_total)
    };
    target.iter().zip(drafted).map(rest).collect()
}
