//! What becomes of k and v in a cache of a type (SPEC 11.2).

use crate::bits::{bf16_to_f32, f16_to_f32, f32_to_bf16, f64_to_f16};
use crate::error::Outcome;
use crate::quantization::quantize_int8;

/// x (T, Hkv, D) as it is read back: int8 has a scale for each token and head.
pub fn store(x: &[f32], head_dim: usize, dtype: &str) -> Outcome<Vec<f32>> {
    Ok(match dtype {
        "float32" => x.to_vec(),
        "float16" => x.iter().map(|v| f16_to_f32(f64_to_f16(f64::from(*v)))).collect(),
        "bfloat16" => x.iter().map(|v| bf16_to_f32(f32_to_bf16(*v))).collect(),
        "int8" => x.chunks(head_dim.max(1)).flat_map(through_int8).collect(),
        _ => return Err(format!("{dtype} is no type of a cache")),
    })
}

fn through_int8(row: &[f32]) -> Vec<f32> {
    let (codes, scale) = quantize_int8(row);
    codes.iter().map(|code| f32::from(*code) * scale).collect()
}
