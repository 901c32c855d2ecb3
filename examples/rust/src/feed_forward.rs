//! The dense feed-forward layer (SPEC 9.1).

use crate::elementary::{gelu_tanh, quick_gelu, silu};
use crate::error::Outcome;
use crate::linear::Linear;

#[derive(Clone, Copy)]
pub enum Activation {
    Silu,
    GeluTanh,
    /// gpt-oss: gate and up are limited, and up has 1 added.
    ClampedQuickGelu {
        limit: f32,
    },
}

impl Activation {
    pub fn named(name: &str) -> Outcome<Activation> {
        match name {
            "silu" => Ok(Activation::Silu),
            "gelu_tanh" | "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
            _ => Err(format!("activation {name} is unknown")),
        }
    }

    /// `act(gate) * up`.
    fn gated(self, gate: f32, up: f32) -> f32 {
        match self {
            Activation::Silu => silu(gate) * up,
            Activation::GeluTanh => gelu_tanh(gate) * up,
            Activation::ClampedQuickGelu { limit } => {
                // A comparison with NaN is false, so NaN stays.
                let gate = if gate > limit { limit } else { gate };
                quick_gelu(gate) * (up.clamp(-limit, limit) + 1.0)
            }
        }
    }
}

/// gate and up (I, K), down (K, I).
pub struct GatedMlp {
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
    pub activation: Activation,
}

impl GatedMlp {
    /// x (T, K), result (T, K).
    pub fn apply(&self, x: &[f32], rows: usize) -> Vec<f32> {
        let (gate, up) = (self.gate.apply(x, rows), self.up.apply(x, rows));
        let gated: Vec<f32> =
            gate.iter().zip(up).map(|(g, u)| self.activation.gated(*g, u)).collect();
        self.down.apply(&gated, rows)
    }
}
