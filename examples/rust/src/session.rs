//! Generation: a model, and what was fed to it (SPEC 14.1, 13.5 and 11.3).

use std::fs;
use std::path::Path;

use crate::attention::FAST_FLOOR;
use crate::cache_file;
use crate::error::{ensure, Outcome};
use crate::model::{Cache, Model, Trace};
use crate::prefix::common;
use crate::sampling::greedy;
use crate::speculation::lookup;

pub struct Session {
    pub model: Model,
    cache: Cache,
}

/// What a request was answered with.
#[derive(Default)]
pub struct Text {
    pub tokens: Vec<i64>,
    /// (n, V): row i chose token i.
    pub logits: Vec<f32>,
    /// How many drafted tokens each pass after the prompt's accepted.
    pub accepted: Vec<i64>,
}

/// A request's limits.
#[derive(Clone, Copy, Default)]
pub struct Limits {
    pub max_new_tokens: usize,
    pub draft_tokens: usize,
    pub exact_prefill: bool,
    /// Whether the model's end tokens end the text.
    pub ends: bool,
}

/// A sequence that is kept for those after it.
struct Kept {
    tokens: Vec<i64>,
    cache: Cache,
    /// No part of it was computed by fast attention.
    exact: bool,
}

impl Session {
    pub fn new(model: Model) -> Session {
        let cache = model.empty_cache();
        Session { model, cache }
    }

    pub fn reset(&mut self) {
        self.cache = self.model.empty_cache();
    }

    /// Logits (T, V) of the tokens that come next; what happens in between goes to the trace.
    pub fn forward(&mut self, tokens: &[i64], fast: bool, trace: &mut Trace) -> Outcome<Vec<f32>> {
        self.model.forward(tokens, &mut self.cache, fast, tokens.len(), trace)
    }

    /// The greedy token after each of the last prefixes of a text, computed exactly.
    pub fn forced(&self, tokens: &[i64], last: usize) -> Outcome<Vec<i64>> {
        let mut cache = self.model.empty_cache();
        let logits = self.model.forward(tokens, &mut cache, false, last, &mut Trace::default())?;
        logits.chunks(self.model.config.vocabulary).map(choose).collect()
    }

    pub fn generate(&self, prompt: &[i64], limits: Limits) -> Outcome<Text> {
        self.decode(&mut self.model.empty_cache(), prompt, limits)
    }

    /// Continues a prompt whose first tokens the cache holds, greedily.
    fn decode(&self, cache: &mut Cache, prompt: &[i64], limits: Limits) -> Outcome<Text> {
        ensure(!prompt.is_empty(), "a prompt has no tokens")?;
        let mut text = Text::default();
        if limits.max_new_tokens == 0 {
            return Ok(text);
        }
        let rest = &prompt[cache.length..];
        let fast = !limits.exact_prefill && rest.len() >= FAST_FLOOR;
        let logits = self.model.forward(rest, cache, fast, 1, &mut Trace::default())?;
        let mut context = prompt.to_vec();
        context.push(text.take(&logits)?);
        while text.tokens.len() < limits.max_new_tokens
            && context.len() <= self.model.config.context
            && !(limits.ends && self.ended(&text))
        {
            self.pass(cache, &mut context, &mut text, limits)?;
        }
        Ok(text)
    }

    /// Whether an end token came. It is the last one, for nothing is drafted where it counts.
    fn ended(&self, text: &Text) -> bool {
        text.tokens.last().is_some_and(|token| self.model.ends.contains(token))
    }

    /// A pass of speculation, or a decode step where nothing is drafted (SPEC 13.5).
    fn pass(
        &self,
        cache: &mut Cache,
        context: &mut Vec<i64>,
        text: &mut Text,
        limits: Limits,
    ) -> Outcome<()> {
        let config = &self.model.config;
        let tokens_left = limits.max_new_tokens - text.tokens.len();
        let positions_left = config.context - context.len();
        let drafted = lookup(context, limits.draft_tokens.min(tokens_left).min(positions_left));
        let fed = [&context[cache.length..], &drafted].concat();
        let start = cache.length;
        let logits = self.model.forward(&fed, cache, false, fed.len(), &mut Trace::default())?;
        let rows: Vec<&[f32]> = logits.chunks(config.vocabulary).collect();
        let mut accepted = 0;
        while accepted < drafted.len() && choose(rows[accepted])? == drafted[accepted] {
            accepted += 1;
        }
        text.accepted.push(accepted as i64);
        cache.truncate(start + 1 + accepted);
        for row in &rows[..=accepted] {
            if text.tokens.len() < limits.max_new_tokens {
                context.push(text.take(row)?);
            }
        }
        Ok(())
    }

    /// One prompt after the other, each kept for those after it: texts, and `cache_n` of each.
    pub fn turns(&self, prompts: &[&[i64]], limits: Limits) -> Outcome<(Vec<Text>, Vec<i64>)> {
        let mut kept: Vec<Kept> = vec![];
        let (mut texts, mut reused) = (vec![], vec![]);
        for prompt in prompts {
            let (mut cache, mut exact) = (self.model.empty_cache(), true);
            if let Some((found, length)) = self.find(&kept, prompt) {
                let found = kept.remove(found);
                cache = found.cache.clone();
                cache.truncate(length);
                exact = found.exact;
                kept.push(found);
            }
            reused.push(cache.length as i64);
            exact &= prompt.len() - cache.length < FAST_FLOOR;
            let text = self.decode(&mut cache, prompt, limits)?;
            let mut tokens = [prompt, &text.tokens[..]].concat();
            tokens.truncate(cache.length);
            kept.retain(|old| !self.replaces(&tokens, exact, old));
            kept.push(Kept { tokens, cache, exact });
            texts.push(text);
        }
        Ok((texts, reused))
    }

    /// The kept sequence with the longest usable prefix of a prompt, the last of equal ones, and
    /// that length. One that is not exact serves only a prompt that is computed fast without it.
    fn find(&self, kept: &[Kept], prompt: &[i64]) -> Option<(usize, usize)> {
        let usable = |old: &Kept| {
            let length = common(&old.tokens, prompt).min(prompt.len() - 1);
            (length > 0 && self.model.can_truncate(old.cache.length, length)).then_some(length)
        };
        let longest = |inexact: bool| {
            let counted = kept.iter().enumerate().filter(|(_, old)| old.exact || inexact);
            counted.filter_map(|(i, old)| Some((i, usable(old)?))).max_by_key(|(_, length)| *length)
        };
        let exact = longest(false);
        if prompt.len() - exact.map_or(0, |(_, length)| length) >= FAST_FLOOR {
            longest(true)
        } else {
            exact
        }
    }

    /// Whether a new sequence takes the place of an old one that it extends: not where only the old
    /// one is exact, nor where only the old one can be truncated to its length.
    fn replaces(&self, tokens: &[i64], exact: bool, old: &Kept) -> bool {
        let extends = tokens.starts_with(&old.tokens);
        extends && (exact || !old.exact) && self.model.can_truncate(tokens.len(), old.tokens.len())
    }

    /// Computes and saves a prompt, and continues a longer one from the file alone (SPEC 11.4): the
    /// text, and how many positions came from the file.
    pub fn resume(
        &self,
        prompt: &[i64],
        longer: &[i64],
        limits: Limits,
        path: &Path,
    ) -> Outcome<(Text, usize)> {
        ensure(!prompt.is_empty() && !longer.is_empty(), "a prompt has no tokens")?;
        let fast = prompt.len() >= FAST_FLOOR;
        let mut computed = self.model.empty_cache();
        self.model.forward(prompt, &mut computed, fast, 1, &mut Trace::default())?;
        cache_file::save(path, &self.model, &computed, prompt, !fast)?;
        drop(computed);

        let content = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let (tokens, mut cache) = cache_file::restore(&content, &self.model)?;
        let mut reused = common(&tokens, longer).min(longer.len() - 1);
        if self.model.can_truncate(tokens.len(), reused) {
            cache.truncate(reused);
        } else {
            (cache, reused) = (self.model.empty_cache(), 0);
        }
        Ok((self.decode(&mut cache, longer, limits)?, reused))
    }
}

impl Text {
    /// Takes the token that a row of logits chooses.
    fn take(&mut self, row: &[f32]) -> Outcome<i64> {
        let token = choose(row)?;
        self.tokens.push(token);
        self.logits.extend_from_slice(row);
        Ok(token)
    }
}

fn choose(row: &[f32]) -> Outcome<i64> {
    Ok(greedy(row)? as i64)
}
