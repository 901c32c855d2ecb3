//! The layers of a model, made of its tensors under the names of its family (SPEC 12.1).

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use crate::checkpoint::Checkpoint;
use crate::config::Config;
use crate::error::Outcome;
use crate::experts::{Router, SharedExpert};
use crate::families::{HeadNorm, Norms};
use crate::feed_forward::GatedMlp;
use crate::linear::Linear;
use crate::rope_constants::Rope;
use crate::rotary::cos_sin;

/// Cosines and sines by position, computed once each.
pub struct RopeTable {
    rope: Rope,
    /// Where constants are the same at all positions.
    fixed: Option<(Vec<f32>, f32)>,
    pairs: RefCell<HashMap<i64, Pairs>>,
}

/// `(cos, sin)` for each pair of a head's elements.
pub type Pairs = Rc<Vec<(f32, f32)>>;

impl RopeTable {
    pub fn new(rope: Rope) -> RopeTable {
        let fixed = (!rope.by_position()).then(|| rope.constants(0));
        RopeTable { rope, fixed, pairs: RefCell::default() }
    }

    pub fn at(&self, position: i64) -> Outcome<Pairs> {
        if let Some(pairs) = self.pairs.borrow().get(&position) {
            return Ok(pairs.clone());
        }
        let pairs = Rc::new(match &self.fixed {
            Some((constants, factor)) => cos_sin(position, constants, *factor)?,
            None => {
                let (constants, factor) = self.rope.constants(position);
                cos_sin(position, &constants, factor)?
            }
        });
        self.pairs.borrow_mut().insert(position, pairs.clone());
        Ok(pairs)
    }
}

pub struct MixtureOfExperts {
    pub router: Linear,
    pub rule: Router,
    pub experts: Vec<GatedMlp>,
    pub shared: Option<SharedExpert>,
}

pub enum FeedForward {
    Dense(Box<GatedMlp>),
    Experts(Box<MixtureOfExperts>),
}

pub struct Layer {
    /// Norms 1 to 4 of SPEC 10.2, where the family has them.
    pub norms: [Option<Vec<f32>>; 4],
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    pub o: Linear,
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
    pub window: Option<usize>,
    pub rope: Option<Rc<RopeTable>>,
    pub sinks: Option<Vec<f32>>,
    pub feed_forward: FeedForward,
}

/// The names of gate, up and down.
const USUAL: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Makes layers out of a checkpoint.
pub struct Builder<'a> {
    pub config: &'a Config,
    pub checkpoint: &'a mut Checkpoint,
}

impl Builder<'_> {
    pub fn layers(&mut self) -> Outcome<Vec<Layer>> {
        let full = Rc::new(RopeTable::new(self.config.rope(false)?));
        let local = match self.config.family.rope_by_type {
            true => Rc::new(RopeTable::new(self.config.rope(true)?)),
            false => full.clone(),
        };
        let layers = 0..self.config.layers;
        layers.map(|number| self.layer(number, &full, &local)).collect()
    }

    /// A norm's weight, `RN32(1 + w)` where the family stores `w - 1` (SPEC 6).
    pub fn norm(&self, name: &str, width: usize) -> Outcome<Vec<f32>> {
        let mut weight = self.checkpoint.floats(name, width)?;
        if self.config.family.gemma {
            weight.iter_mut().for_each(|w| *w += 1.0);
        }
        Ok(weight)
    }

    fn layer(
        &mut self,
        number: usize,
        full: &Rc<RopeTable>,
        local: &Rc<RopeTable>,
    ) -> Outcome<Layer> {
        let config = self.config;
        let prefix = format!("model.layers.{number}");
        let attention = format!("{prefix}.self_attn");
        let window = config.window(number);
        let rope = if window.is_some() { local } else { full };
        let [q, k, v] = self.q_k_v(&attention)?;
        let o = format!("{attention}.o_proj");
        Ok(Layer {
            norms: self.norms(&prefix)?,
            q,
            k,
            v,
            o: self.checkpoint.projection(&o, config.hidden, config.heads * config.head_dim)?,
            q_norm: self.head_norm(&format!("{attention}.q_norm.weight"), config.heads)?,
            k_norm: self.head_norm(&format!("{attention}.k_norm.weight"), config.kv_heads)?,
            window,
            rope: config.rotates(number).then(|| rope.clone()),
            sinks: match config.is("GptOss") {
                true => Some(self.checkpoint.floats(&format!("{attention}.sinks"), config.heads)?),
                false => None,
            },
            feed_forward: self.feed_forward(number, &prefix)?,
        })
    }

    fn norms(&self, prefix: &str) -> Outcome<[Option<Vec<f32>>; 4]> {
        let norm = |name: &str| {
            self.norm(&format!("{prefix}.{name}.weight"), self.config.hidden).map(Some)
        };
        let (input, after_attention) = ("input_layernorm", "post_attention_layernorm");
        let (before_mlp, after_mlp) = ("pre_feedforward_layernorm", "post_feedforward_layernorm");
        Ok(match self.config.family.norms {
            Norms::Before => [norm(input)?, None, norm(after_attention)?, None],
            Norms::After => [None, norm(after_attention)?, None, norm(after_mlp)?],
            Norms::Around => {
                [norm(input)?, norm(after_attention)?, norm(before_mlp)?, norm(after_mlp)?]
            }
        })
    }

    fn head_norm(&self, name: &str, heads: usize) -> Outcome<Option<Vec<f32>>> {
        let head_dim = self.config.head_dim;
        Ok(match self.config.family.head_norm {
            HeadNorm::None => None,
            HeadNorm::Head => Some(self.norm(name, head_dim)?),
            HeadNorm::Row => Some(self.norm(name, heads * head_dim)?),
        })
    }

    /// Phi-3 stores the three as one tensor.
    fn q_k_v(&mut self, attention: &str) -> Outcome<[Linear; 3]> {
        let (hidden, head_dim) = (self.config.hidden, self.config.head_dim);
        let (queries, keys) = (self.config.heads * head_dim, self.config.kv_heads * head_dim);
        if self.config.is("Phi3") {
            let name = format!("{attention}.qkv_proj.weight");
            let fused = self.checkpoint.floats(&name, (queries + 2 * keys) * hidden)?;
            let (q, rest) = fused.split_at(queries * hidden);
            let (k, v) = rest.split_at(keys * hidden);
            let quantized = |w, outputs| self.checkpoint.quantized(w, outputs, hidden);
            return Ok([quantized(q, queries)?, quantized(k, keys)?, quantized(v, keys)?]);
        }
        let mut projection = |name: &str, outputs| {
            self.checkpoint.projection(&format!("{attention}.{name}"), outputs, hidden)
        };
        Ok([
            projection("q_proj", queries)?,
            projection("k_proj", keys)?,
            projection("v_proj", keys)?,
        ])
    }

    fn feed_forward(&mut self, number: usize, prefix: &str) -> Outcome<FeedForward> {
        let mlp = format!("{prefix}.mlp");
        if self.config.is_sparse(number) {
            return Ok(FeedForward::Experts(Box::new(self.mixture(prefix, &mlp)?)));
        }
        let inner = self.config.size("intermediate_size")?;
        let dense = if self.config.is("Phi3") {
            self.fused_mlp(&mlp, inner)
        } else {
            self.mlp(&mlp, inner, USUAL)
        };
        Ok(FeedForward::Dense(Box::new(dense?)))
    }

    fn mlp(&mut self, prefix: &str, inner: usize, names: [&str; 3]) -> Outcome<GatedMlp> {
        let hidden = self.config.hidden;
        let [gate, up, down] = names.map(|name| format!("{prefix}.{name}"));
        Ok(GatedMlp {
            gate: self.checkpoint.projection(&gate, inner, hidden)?,
            up: self.checkpoint.projection(&up, inner, hidden)?,
            down: self.checkpoint.projection(&down, hidden, inner)?,
            activation: self.config.activation,
        })
    }

    /// Phi-3 stores gate and up as one tensor.
    fn fused_mlp(&mut self, prefix: &str, inner: usize) -> Outcome<GatedMlp> {
        let hidden = self.config.hidden;
        let fused =
            self.checkpoint.floats(&format!("{prefix}.gate_up_proj.weight"), 2 * inner * hidden)?;
        let (gate, up) = fused.split_at(inner * hidden);
        Ok(GatedMlp {
            gate: self.checkpoint.quantized(gate, inner, hidden)?,
            up: self.checkpoint.quantized(up, inner, hidden)?,
            down: self.checkpoint.projection(&format!("{prefix}.down_proj"), hidden, inner)?,
            activation: self.config.activation,
        })
    }

    fn mixture(&mut self, prefix: &str, mlp: &str) -> Outcome<MixtureOfExperts> {
        let (rule, inner) = (self.config.router()?, self.config.expert_size()?);
        let (mixtral, gpt_oss) = (self.config.is("Mixtral"), self.config.is("GptOss"));
        let router = if mixtral {
            format!("{prefix}.block_sparse_moe.gate")
        } else if gpt_oss {
            format!("{mlp}.router")
        } else {
            format!("{mlp}.gate")
        };
        let router = self.checkpoint.stored(&router, rule.experts, self.config.hidden)?;
        let experts = if gpt_oss {
            self.transposed_experts(mlp, rule.experts, inner)?
        } else {
            let (place, names) = match mixtral {
                true => (format!("{prefix}.block_sparse_moe.experts"), ["w1", "w3", "w2"]),
                false => (format!("{mlp}.experts"), USUAL),
            };
            let expert = |number| self.mlp(&format!("{place}.{number}"), inner, names);
            (0..rule.experts).map(expert).collect::<Outcome<_>>()?
        };
        let shared = if self.config.is("Qwen2Moe") { Some(self.shared_expert(mlp)?) } else { None };
        Ok(MixtureOfExperts { router, rule, experts, shared })
    }

    fn shared_expert(&mut self, mlp: &str) -> Outcome<SharedExpert> {
        let inner = self.config.size("shared_expert_intermediate_size")?;
        let gate =
            self.checkpoint.stored(&format!("{mlp}.shared_expert_gate"), 1, self.config.hidden)?;
        Ok(SharedExpert {
            mlp: self.mlp(&format!("{mlp}.shared_expert"), inner, USUAL)?,
            gate: Some(gate),
        })
    }

    /// gpt-oss stores all experts of a layer in one tensor, inputs first, gate and up in turns.
    fn transposed_experts(&self, mlp: &str, count: usize, inner: usize) -> Outcome<Vec<GatedMlp>> {
        let hidden = self.config.hidden;
        let floats = |name: &str, size| {
            self.checkpoint.floats(&format!("{mlp}.experts.{name}"), count * size)
        };
        let gate_up = floats("gate_up_proj", hidden * 2 * inner)?;
        let gate_up_bias = floats("gate_up_proj_bias", 2 * inner)?;
        let (down, down_bias) =
            (floats("down_proj", inner * hidden)?, floats("down_proj_bias", hidden)?);
        let expert = |number: usize| -> Outcome<GatedMlp> {
            let gate_up =
                transposed(&gate_up[number * hidden * 2 * inner..][..hidden * 2 * inner], hidden);
            let bias = &gate_up_bias[number * 2 * inner..][..2 * inner];
            let every_other = |first: usize| -> Outcome<Linear> {
                let rows = gate_up.chunks(hidden).skip(first).step_by(2);
                let w: Vec<f32> = rows.flatten().copied().collect();
                let bias = bias.iter().skip(first).step_by(2).copied().collect();
                Ok(self.checkpoint.quantized(&w, inner, hidden)?.with_bias(Some(bias)))
            };
            let down = transposed(&down[number * inner * hidden..][..inner * hidden], inner);
            let down_bias = down_bias[number * hidden..][..hidden].to_vec();
            Ok(GatedMlp {
                gate: every_other(0)?,
                up: every_other(1)?,
                down: self.checkpoint.quantized(&down, hidden, inner)?.with_bias(Some(down_bias)),
                activation: self.config.activation,
            })
        };
        (0..count).map(expert).collect()
    }
}

/// A matrix (K, N), of so many rows, as (N, K).
fn transposed(matrix: &[f32], rows: usize) -> Vec<f32> {
    let columns = matrix.len() / rows;
    (0..matrix.len()).map(|i| matrix[i % rows * columns + i / rows]).collect()
}
