//! A model and one forward pass of it (SPEC 10.2).

use crate::aligned::AlignedMatrix;
use crate::attention::{append, attention, default_scale, Head, Rule};
use crate::checkpoint::Checkpoint;
use crate::config::Config;
use crate::elementary::tanh;
use crate::error::{ensure, Outcome};
use crate::experts::{mix, Routing};
use crate::families::HeadNorm;
use crate::layers::{Builder, FeedForward, Layer, MixtureOfExperts};
use crate::normalization::rms_norm;
use crate::rotary::rotate;
use crate::safetensors::{Named, Tensor};

/// Positions that share a page (SPEC 11.1): what a layer with a window drops is whole pages.
const PAGE_SIZE: usize = 16;

pub struct Model {
    pub config: Config,
    pub digest: String,
    /// The tokens that end a text (SPEC 12.1).
    pub ends: Vec<i64>,
    embedding: Vec<f32>,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    head: AlignedMatrix,
}

/// The heads of each layer, and how many positions they hold (SPEC 11).
#[derive(Clone)]
pub struct Cache {
    pub layers: Vec<Vec<Head>>,
    pub length: usize,
}

impl Cache {
    pub fn truncate(&mut self, length: usize) {
        self.layers.iter_mut().flatten().for_each(|head| head.truncate(length));
        self.length = length;
    }
}

/// What the tokens of one call have in common.
struct Pass {
    rows: usize,
    /// The positions before them.
    past: usize,
    fast: bool,
}

/// The tensors in between, where somebody asked for them (SPEC 19.2).
#[derive(Default)]
pub struct Trace {
    pub steps: Option<Named>,
}

impl Trace {
    fn note(&mut self, name: String, shape: &[usize], values: &[f32]) {
        if let Some(steps) = &mut self.steps {
            steps.push((name, Tensor::floats(shape, values)));
        }
    }
}

/// The trace of one layer: steps are named after it, and have a row for each token.
struct LayerTrace<'a> {
    trace: &'a mut Trace,
    number: usize,
    rows: usize,
}

impl LayerTrace<'_> {
    fn name(&self, step: &str) -> String {
        format!("layer.{}.{step}", self.number)
    }

    fn note(&mut self, step: &str, width: &[usize], values: &[f32]) {
        self.trace.note(self.name(step), &[&[self.rows], width].concat(), values);
    }

    /// The experts (T, k) in rank order.
    fn note_experts(&mut self, routings: &[Routing], ranks: usize) {
        let name = self.name("experts");
        if let Some(steps) = &mut self.trace.steps {
            let experts = routings.iter().flat_map(|routing| &routing.experts).map(|e| *e as i64);
            let experts: Vec<i64> = experts.collect();
            steps.push((name, Tensor::integers(&[self.rows, ranks], &experts)));
        }
    }
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// `RN32(c * tanh(RN32(x / c)))`, in place.
fn softcapped(x: &mut [f32], cap: f32) {
    x.iter_mut().for_each(|x| *x = cap * tanh(*x / cap));
}

impl Model {
    /// A folder or GGUF file, with the weights in one of the modes of SPEC 10.1.
    pub fn load(path: &str, weights: &str) -> Outcome<Model> {
        let (mut checkpoint, json) = Checkpoint::open(path, weights)?;
        let config = Config::read(json)?;
        let (hidden, vocabulary) = (config.hidden, config.vocabulary);
        let mut builder = Builder { config: &config, checkpoint: &mut checkpoint };
        let layers = builder.layers()?;
        let final_norm = builder.norm("model.norm.weight", hidden)?;
        let embedding = checkpoint.floats("model.embed_tokens.weight", vocabulary * hidden)?;
        let head = match config.tied {
            true => AlignedMatrix::new(&embedding, vocabulary, hidden),
            false => {
                let head = checkpoint.floats("lm_head.weight", vocabulary * hidden)?;
                AlignedMatrix::new(&head, vocabulary, hidden)
            }
        };
        let Checkpoint { digest, ends, .. } = checkpoint;
        Ok(Model { digest, ends, config, embedding, layers, final_norm, head })
    }

    pub fn empty_cache(&self) -> Cache {
        let heads = vec![Head::new(self.config.head_dim); self.config.kv_heads];
        Cache { layers: vec![heads; self.layers.len()], length: 0 }
    }

    /// The logits (n, V) of the last n of the tokens, or of all where they are fewer.
    ///
    /// The cache grows by all of them.
    pub fn forward(
        &self,
        tokens: &[i64],
        cache: &mut Cache,
        fast: bool,
        last: usize,
        trace: &mut Trace,
    ) -> Outcome<Vec<f32>> {
        let (rows, hidden) = (tokens.len(), self.config.hidden);
        let context = self.config.context;
        ensure(
            rows <= context - cache.length,
            format!("more tokens than the context of {context}"),
        )?;
        let mut x = self.embed(tokens)?;
        trace.note("embedding".into(), &[rows, hidden], &x);
        let pass = Pass { rows, past: cache.length, fast };
        for (number, layer) in self.layers.iter().enumerate() {
            let mut steps = LayerTrace { trace, number, rows };
            self.attend(layer, &mut x, &pass, &mut cache.layers[number], &mut steps)?;
            self.feed_forward(layer, &mut x, rows, &mut steps);
        }
        cache.length += rows;
        let count = last.min(rows);
        let x = rms_norm(&x[(rows - count) * hidden..], &self.final_norm, self.config.epsilon);
        let mut logits = self.head.matmul(&x, count);
        if let (_, Some(cap)) = self.config.softcaps() {
            softcapped(&mut logits, cap);
        }
        trace.note("final_norm".into(), &[count, hidden], &x);
        trace.note("logits".into(), &[count, self.config.vocabulary], &logits);
        Ok(logits)
    }

    /// The embedding's rows (T, K), scaled where the family does so.
    fn embed(&self, tokens: &[i64]) -> Outcome<Vec<f32>> {
        let hidden = self.config.hidden;
        let mut x = Vec::with_capacity(tokens.len() * hidden);
        for token in tokens {
            let id = usize::try_from(*token).unwrap_or(usize::MAX);
            ensure(id < self.config.vocabulary, format!("token {token} is not in the vocabulary"))?;
            x.extend_from_slice(&self.embedding[id * hidden..][..hidden]);
        }
        if self.config.family.gemma {
            let scale = (hidden as f64).sqrt() as f32;
            x.iter_mut().for_each(|x| *x *= scale);
        }
        Ok(x)
    }

    /// One of the norms 1 to 4 of x, where the family has it.
    fn norm(&self, layer: &Layer, number: usize, x: &[f32]) -> Option<Vec<f32>> {
        let weight = layer.norms[number - 1].as_ref()?;
        Some(rms_norm(x, weight, self.config.epsilon))
    }

    /// `x = RN32(x + norm2(linear(attention(q, cache))))` of x (T, K).
    fn attend(
        &self,
        layer: &Layer,
        x: &mut [f32],
        pass: &Pass,
        heads: &mut [Head],
        steps: &mut LayerTrace,
    ) -> Outcome<()> {
        let (rows, past) = (pass.rows, pass.past);
        let config = &self.config;
        let (query_heads, kv_heads, head_dim) = (config.heads, config.kv_heads, config.head_dim);
        let normed = self.norm(layer, 1, x);
        if let Some(normed) = &normed {
            steps.note("attention_norm", &[config.hidden], normed);
        }
        let input = normed.as_deref().unwrap_or(x);
        let (q, k, v) =
            (layer.q.apply(input, rows), layer.k.apply(input, rows), layer.v.apply(input, rows));
        let q = self.rotated(layer, self.head_normed(q, &layer.q_norm), query_heads, past)?;
        let k = self.rotated(layer, self.head_normed(k, &layer.k_norm), kv_heads, past)?;
        steps.note("q", &[query_heads, head_dim], &q);
        steps.note("k", &[kv_heads, head_dim], &k);
        steps.note("v", &[kv_heads, head_dim], &v);
        append(heads, &k, &v, head_dim);
        let rule = Rule {
            scale: default_scale(config.scale_root()),
            window: layer.window,
            softcap: config.softcaps().0,
            sinks: layer.sinks.as_deref(),
            fast: pass.fast,
        };
        let attended = attention(&q, query_heads, heads, past + rows, &rule);
        steps.note("attention", &[query_heads, head_dim], &attended);
        let o = layer.o.apply(&attended, rows);
        steps.note("o", &[config.hidden], &o);
        add(x, self.norm(layer, 2, &o).as_deref().unwrap_or(&o));
        steps.note("attention_residual", &[config.hidden], x);
        Ok(())
    }

    /// q or k, normed per head or per row where the family does it: the weight is as wide.
    fn head_normed(&self, x: Vec<f32>, weight: &Option<Vec<f32>>) -> Vec<f32> {
        match weight {
            Some(weight) if self.config.family.head_norm != HeadNorm::None => {
                rms_norm(&x, weight, self.config.epsilon)
            }
            _ => x,
        }
    }

    /// q or k (T, H, D) rotated at its positions, where the layer has rope.
    fn rotated(
        &self,
        layer: &Layer,
        mut x: Vec<f32>,
        heads: usize,
        past: usize,
    ) -> Outcome<Vec<f32>> {
        let head_dim = self.config.head_dim;
        if let Some(rope) = &layer.rope {
            for (position, row) in (past as i64..).zip(x.chunks_mut(heads * head_dim)) {
                let pairs = rope.at(position)?;
                row.chunks_mut(head_dim).for_each(|head| rotate(head, &pairs, false));
            }
        }
        Ok(x)
    }

    /// `x = RN32(x + norm4(mlp(norm3(x))))` of x (T, K).
    fn feed_forward(&self, layer: &Layer, x: &mut [f32], rows: usize, steps: &mut LayerTrace) {
        let width = [self.config.hidden];
        let normed = self.norm(layer, 3, x);
        if let Some(normed) = &normed {
            steps.note("mlp_norm", &width, normed);
        }
        let input = normed.as_deref().unwrap_or(x);
        let y = match &layer.feed_forward {
            FeedForward::Dense(mlp) => mlp.apply(input, rows),
            FeedForward::Experts(mixture) => {
                let routings = mixture.routings(input, rows);
                steps.note_experts(&routings, mixture.rule.top_k);
                mix(input, &routings, &mixture.experts, mixture.shared.as_ref())
            }
        };
        steps.note("mlp", &width, &y);
        add(x, self.norm(layer, 4, &y).as_deref().unwrap_or(&y));
        steps.note("residual", &width, x);
    }

    /// The first position that a layer still holds of a sequence that was trimmed (SPEC 11.1).
    pub fn first_held(&self, layer: usize, length: usize) -> usize {
        let first_seen = self.first_seen(layer, length);
        first_seen / PAGE_SIZE * PAGE_SIZE
    }

    /// The first position that the one at `length` sees.
    fn first_seen(&self, layer: usize, length: usize) -> usize {
        self.layers[layer].window.map_or(0, |window| (length + 1).saturating_sub(window))
    }

    /// Whether a sequence trimmed at `length` still holds what the position `to` sees (SPEC 11.1).
    pub fn can_truncate(&self, length: usize, to: usize) -> bool {
        (0..self.layers.len())
            .all(|layer| self.first_held(layer, length) <= self.first_seen(layer, to))
    }
}

impl MixtureOfExperts {
    /// Of x (T, K), one for each row.
    fn routings(&self, x: &[f32], rows: usize) -> Vec<Routing> {
        let logits = self.router.apply(x, rows);
        logits.chunks(self.rule.experts).map(|row| self.rule.route(row)).collect()
    }
}
