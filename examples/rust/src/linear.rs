//! A linear layer, by its weights (SPEC 10.1).

use crate::aligned::AlignedMatrix;
use crate::quantization::{linear_codes, CodeMatrix};

pub enum Weights {
    /// SPEC 2.2.
    Floats(AlignedMatrix),
    /// SPEC 5.5 and 5.7.
    Codes(CodeMatrix),
}

pub struct Linear {
    pub weights: Weights,
    /// (N,)
    pub bias: Option<Vec<f32>>,
}

impl Linear {
    /// Of weights w (N, K), without a bias.
    pub fn floats(w: &[f32], outputs: usize, inputs: usize) -> Linear {
        Linear { weights: Weights::Floats(AlignedMatrix::new(w, outputs, inputs)), bias: None }
    }

    pub fn with_bias(self, bias: Option<Vec<f32>>) -> Linear {
        Linear { bias, ..self }
    }

    /// x (T, K), result (T, N).
    pub fn apply(&self, x: &[f32], rows: usize) -> Vec<f32> {
        let mut y = match &self.weights {
            Weights::Floats(w) => w.matmul(x, rows),
            Weights::Codes(w) => linear_codes(x, rows, w),
        };
        if let Some(bias) = &self.bias {
            for row in y.chunks_mut(bias.len().max(1)) {
                row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
            }
        }
        y
    }
}
