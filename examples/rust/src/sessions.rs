//! Loaded models and the methods of a session (SPEC 17; docs/protocol.md, "Models").

use std::collections::HashMap;
use std::path::Path;

use crate::error::{ensure, Outcome};
use crate::model::{Model, Trace};
use crate::operations::is_fast;
use crate::prefix;
use crate::protocol::{single, Call};
use crate::safetensors::{Named, Tensor};
use crate::session::{Limits, Session, Text};

type Method = fn(&Call, &mut Session) -> Outcome<Named>;

pub const METHODS: &[(&str, Method)] = &[
    ("reset", reset),
    ("forward", forward),
    ("generate", generate),
    ("complete", complete),
    ("forced", forced),
    ("turns", turns),
    ("speculate", generate_with_drafts),
    ("serve", serve),
    ("resume", resume),
    ("trace", trace),
];

/// Sessions by name; several may be loaded at once.
#[derive(Default)]
pub struct Sessions {
    by_name: HashMap<String, Session>,
}

impl Sessions {
    /// The name of a new session.
    pub fn load(&mut self, call: &Call) -> Outcome<String> {
        let model = Model::load(call.text("model")?, call.text("weights")?)?;
        let name = format!("session {}", self.by_name.len());
        self.by_name.insert(name.clone(), Session::new(model));
        Ok(name)
    }

    /// The session that a call is about.
    pub fn of(&mut self, call: &Call) -> Outcome<&mut Session> {
        let name = call.text("session")?;
        self.by_name.get_mut(name).ok_or(format!("there is no session {name}"))
    }
}

fn tokens(call: &Call, name: &str) -> Outcome<Vec<i64>> {
    Ok(call.integers::<1>(name)?.data)
}

fn limits(call: &Call) -> Outcome<Limits> {
    Ok(Limits {
        max_new_tokens: call.size("max_new_tokens")?,
        draft_tokens: call.size_or("draft_tokens", 0)?,
        exact_prefill: call.truth_or("exact_prefill", false)?,
        ends: false,
    })
}

/// `tokens` (n,) and `logits` (n, V) of one text.
fn results(text: &Text, vocabulary: usize) -> Named {
    let length = text.tokens.len();
    vec![
        ("tokens".into(), Tensor::integers(&[length], &text.tokens)),
        ("logits".into(), Tensor::floats(&[length, vocabulary], &text.logits)),
    ]
}

/// `tokens` (R, n) and `logits` (R, n, V) of texts of one length.
fn results_of_all(texts: &[Text], vocabulary: usize) -> Outcome<Named> {
    let length = texts.first().map_or(0, |text| text.tokens.len());
    let even = texts.iter().all(|text| text.tokens.len() == length);
    ensure(even, "the texts are of several lengths: the context ends")?;
    let tokens: Vec<i64> = texts.iter().flat_map(|text| text.tokens.iter().copied()).collect();
    let logits: Vec<f32> = texts.iter().flat_map(|text| text.logits.iter().copied()).collect();
    Ok(vec![
        ("tokens".into(), Tensor::integers(&[texts.len(), length], &tokens)),
        ("logits".into(), Tensor::floats(&[texts.len(), length, vocabulary], &logits)),
    ])
}

fn reset(_: &Call, session: &mut Session) -> Outcome<Named> {
    session.reset();
    Ok(vec![])
}

fn forward(call: &Call, session: &mut Session) -> Outcome<Named> {
    let tokens = tokens(call, "tokens")?;
    let logits = session.forward(&tokens, is_fast(call, "attention")?, &mut Trace::default())?;
    single(Tensor::floats(&[tokens.len(), session.model.config.vocabulary], &logits))
}

fn trace(call: &Call, session: &mut Session) -> Outcome<Named> {
    let mut trace = Trace { steps: Some(vec![]) };
    session.forward(&tokens(call, "tokens")?, is_fast(call, "attention")?, &mut trace)?;
    Ok(trace.steps.unwrap_or_default())
}

fn forced(call: &Call, session: &mut Session) -> Outcome<Named> {
    let chosen = session.forced(&tokens(call, "tokens")?, call.size("last")?)?;
    Ok(vec![("tokens".into(), Tensor::integers(&[chosen.len()], &chosen))])
}

fn generate(call: &Call, session: &mut Session) -> Outcome<Named> {
    let limits = Limits { draft_tokens: 0, ..limits(call)? };
    let text = session.generate(&tokens(call, "prompt")?, limits)?;
    Ok(results(&text, session.model.config.vocabulary))
}

fn complete(call: &Call, session: &mut Session) -> Outcome<Named> {
    let limits = Limits { ends: true, ..limits(call)? };
    let text = session.generate(&tokens(call, "prompt")?, limits)?;
    Ok(results(&text, session.model.config.vocabulary))
}

fn generate_with_drafts(call: &Call, session: &mut Session) -> Outcome<Named> {
    let text = session.generate(&tokens(call, "prompt")?, limits(call)?)?;
    let mut results = results(&text, session.model.config.vocabulary);
    results.push(("accepted".into(), Tensor::integers(&[text.accepted.len()], &text.accepted)));
    Ok(results)
}

/// Each prompt alone: who else is there changes no bit (SPEC 14.2).
fn serve(call: &Call, session: &mut Session) -> Outcome<Named> {
    let (tokens, lengths) = (tokens(call, "tokens")?, tokens(call, "lengths")?);
    let limits = limits(call)?;
    let prompts = prefix::split(&tokens, &lengths)?;
    let texts = prompts.iter().map(|prompt| session.generate(prompt, limits));
    results_of_all(&texts.collect::<Outcome<Vec<_>>>()?, session.model.config.vocabulary)
}

fn turns(call: &Call, session: &mut Session) -> Outcome<Named> {
    let (tokens, lengths) = (tokens(call, "tokens")?, tokens(call, "lengths")?);
    let prompts = prefix::split(&tokens, &lengths)?;
    let (texts, reused) = session.turns(&prompts, limits(call)?)?;
    let computed: Vec<i64> =
        lengths.iter().zip(&reused).map(|(length, reused)| length - reused).collect();
    let mut results = results_of_all(&texts, session.model.config.vocabulary)?;
    results.push(("cache_n".into(), Tensor::integers(&[reused.len()], &reused)));
    results.push(("prompt_n".into(), Tensor::integers(&[computed.len()], &computed)));
    Ok(results)
}

fn resume(call: &Call, session: &mut Session) -> Outcome<Named> {
    let (prompt, longer) = (tokens(call, "prompt")?, tokens(call, "longer")?);
    let path = Path::new(call.text("path")?);
    let (text, reused) = session.resume(&prompt, &longer, limits(call)?, path)?;
    let mut results = results(&text, session.model.config.vocabulary);
    results.push(("cache_n".into(), Tensor::integers(&[1], &[reused as i64])));
    Ok(results)
}
