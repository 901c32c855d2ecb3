//! safetensors: the form of calls and answers (docs/protocol.md), of models (SPEC 12.1) and of
//! saved caches (SPEC 11.4).

use std::collections::BTreeMap;

use crate::bits::{bf16_to_f32, f16_to_f32, NAN};
use crate::error::{ensure, Outcome};
use crate::json::{self, Json};

/// An array as it travels: row-major, little-endian.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

pub type Tensors = BTreeMap<String, Tensor>;

/// Tensors by name, in the order in which they are written.
pub type Named = Vec<(String, Tensor)>;

fn element_size(dtype: &str) -> Option<usize> {
    Some(match dtype {
        "BOOL" | "U8" | "I8" => 1,
        "U16" | "I16" | "F16" | "BF16" => 2,
        "U32" | "I32" | "F32" => 4,
        "U64" | "I64" | "F64" => 8,
        _ => return None,
    })
}

fn pairs(data: &[u8]) -> impl Iterator<Item = u16> + '_ {
    data.chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]]))
}

impl Tensor {
    /// float32; NaN of any kind becomes the one of SPEC 1.3.
    pub fn floats(shape: &[usize], values: &[f32]) -> Tensor {
        let bits = values.iter().map(|x| if x.is_nan() { NAN } else { *x });
        Tensor::new("F32", shape, bits.flat_map(f32::to_le_bytes).collect())
    }

    pub fn integers(shape: &[usize], values: &[i64]) -> Tensor {
        Tensor::new("I64", shape, values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub fn unsigned(shape: &[usize], values: &[u64]) -> Tensor {
        Tensor::new("U64", shape, values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    /// float16, of bits.
    pub fn halves(shape: &[usize], values: &[u16]) -> Tensor {
        Tensor::new("F16", shape, values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub fn codes(shape: &[usize], values: &[i8]) -> Tensor {
        Tensor::new("I8", shape, values.iter().map(|x| *x as u8).collect())
    }

    pub fn bytes(shape: &[usize], values: Vec<u8>) -> Tensor {
        Tensor::new("U8", shape, values)
    }

    fn new(dtype: &str, shape: &[usize], data: Vec<u8>) -> Tensor {
        Tensor { dtype: dtype.into(), shape: shape.to_vec(), data }
    }

    fn demand(&self, dtype: &str) -> Outcome<()> {
        ensure(self.dtype == dtype, format!("{} where {dtype} belongs", self.dtype))
    }

    /// The elements, widened to float32 (SPEC 1.1).
    pub fn to_floats(&self) -> Outcome<Vec<f32>> {
        match self.dtype.as_str() {
            "F32" => {
                let words = self.data.chunks_exact(4);
                Ok(words.map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
            }
            "F16" => Ok(pairs(&self.data).map(f16_to_f32).collect()),
            "BF16" => Ok(pairs(&self.data).map(bf16_to_f32).collect()),
            other => Err(format!("{other} where a float belongs")),
        }
    }

    /// The elements of a float16 tensor, widened: multiples of 2^-24 (SPEC 5.6).
    pub fn to_scales(&self) -> Outcome<Vec<f32>> {
        self.demand("F16")?;
        self.to_floats()
    }

    pub fn to_integers(&self) -> Outcome<Vec<i64>> {
        self.demand("I64")?;
        let words = self.data.chunks_exact(8);
        Ok(words.map(|c| c.iter().rev().fold(0, |word, byte| word << 8 | *byte as i64)).collect())
    }

    pub fn to_bytes(&self) -> Outcome<Vec<u8>> {
        self.demand("U8")?;
        Ok(self.data.clone())
    }
}

/// The metadata and the tensors of a blob, whose header is held against its length.
pub fn read(blob: &[u8]) -> Outcome<(Json, Tensors)> {
    let (length, rest) = blob.split_first_chunk::<8>().ok_or("no header")?;
    let length = u64::from_le_bytes(*length);
    ensure(length <= rest.len() as u64, "the header is longer than its file")?;
    let (header, body) = rest.split_at(length as usize);
    let header = json::parse(header)?;
    let (mut metadata, mut tensors) = (Json::Object(vec![]), Tensors::new());
    for (name, entry) in header.as_object().ok_or("the header is no object")? {
        if name == "__metadata__" {
            metadata = entry.clone();
            continue;
        }
        let tensor = tensor(entry, body).map_err(|message| format!("{name}: {message}"))?;
        ensure(tensors.insert(name.clone(), tensor).is_none(), format!("{name} is there twice"))?;
    }
    Ok((metadata, tensors))
}

fn tensor(entry: &Json, body: &[u8]) -> Outcome<Tensor> {
    let sizes = |key: &str| -> Outcome<Vec<usize>> {
        let list = entry.list(key).ok_or(format!("no {key}"))?;
        let sizes = list.iter().map(|item| item.as_unsigned()?.try_into().ok());
        sizes.collect::<Option<_>>().ok_or(format!("{key} holds no sizes"))
    };
    let dtype = entry.text("dtype").ok_or("no dtype")?;
    let element = element_size(dtype).ok_or(format!("unknown dtype {dtype}"))?;
    let (shape, offsets) = (sizes("shape")?, sizes("data_offsets")?);
    let [begin, end] = offsets[..] else { return Err("data_offsets are no pair".into()) };
    let data = body.get(begin..end).ok_or("data_offsets are outside the file")?;
    let wanted = shape.iter().try_fold(element, |size, axis| size.checked_mul(*axis));
    ensure(wanted == Some(data.len()), "data_offsets and shape differ")?;
    Ok(Tensor::new(dtype, &shape, data.to_vec()))
}

/// A blob of these tensors, one behind the other in their order.
pub fn write(metadata: &[(&str, String)], tensors: &[(String, Tensor)]) -> Vec<u8> {
    let texts =
        metadata.iter().map(|(key, text)| format!("{}:{}", json::quote(key), json::quote(text)));
    let mut header = format!("{{\"__metadata__\":{{{}}}", texts.collect::<Vec<_>>().join(","));
    let mut end = 0;
    for (name, tensor) in tensors {
        let begin = end;
        end += tensor.data.len();
        let (name, dtype) = (json::quote(name), json::quote(&tensor.dtype));
        let shape = &tensor.shape;
        header.push_str(&format!(
            ",{name}:{{\"dtype\":{dtype},\"shape\":{shape:?},\"data_offsets\":[{begin},{end}]}}"
        ));
    }
    header.push('}');
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut blob = (header.len() as u64).to_le_bytes().to_vec();
    blob.extend_from_slice(header.as_bytes());
    tensors.iter().for_each(|(_, tensor)| blob.extend_from_slice(&tensor.data));
    blob
}
