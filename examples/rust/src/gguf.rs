//! Models in one GGUF file, of llama, qwen2 and qwen3, dense (SPEC 12.2).

use std::collections::HashMap;

use crate::bits::{bf16_to_f32, f16_to_f32};
use crate::error::{ensure, Outcome};
use crate::json::Json;
use crate::quantization::{read_blocks, BlockFormat, CodeMatrix};
use crate::safetensors::{Tensor, Tensors};

/// What a folder would hold, and the codes of projections by the names of their weights.
pub struct Gguf {
    pub config: Json,
    /// The tokens that end a text.
    pub ends: Vec<i64>,
    pub tensors: Tensors,
    pub codes: HashMap<String, CodeMatrix>,
}

/// Lists within lists deeper than this are refused.
const DEEPEST: usize = 8;

struct Reader<'a> {
    content: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: usize) -> Outcome<&'a [u8]> {
        let bytes = self.content[self.at..].get(..count).ok_or("the GGUF file is truncated")?;
        self.at += count;
        Ok(bytes)
    }

    fn array<const COUNT: usize>(&mut self) -> Outcome<[u8; COUNT]> {
        let mut array = [0; COUNT];
        array.copy_from_slice(self.bytes(COUNT)?);
        Ok(array)
    }

    fn word(&mut self) -> Outcome<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn size(&mut self) -> Outcome<usize> {
        let size = self.array().map(u64::from_le_bytes)?;
        usize::try_from(size).map_err(|_| "a size is too large".into())
    }

    fn text(&mut self) -> Outcome<String> {
        let length = self.size()?;
        String::from_utf8(self.bytes(length)?.to_vec()).map_err(|_| "a text is not UTF-8".into())
    }

    /// A value of metadata; a float32 is the shortest decimal that rounds to it.
    fn value(&mut self, kind: u32, depth: usize) -> Outcome<Json> {
        Ok(match kind {
            0 => Json::number(u8::from_le_bytes(self.array()?)),
            1 => Json::number(i8::from_le_bytes(self.array()?)),
            2 => Json::number(u16::from_le_bytes(self.array()?)),
            3 => Json::number(i16::from_le_bytes(self.array()?)),
            4 => Json::number(u32::from_le_bytes(self.array()?)),
            5 => Json::number(i32::from_le_bytes(self.array()?)),
            6 => Json::number(f32::from_le_bytes(self.array()?)),
            7 => Json::Truth(self.array::<1>()? != [0]),
            8 => Json::Text(self.text()?),
            9 if depth < DEEPEST => {
                let (kind, count) = (self.word()?, self.size()?);
                let items = (0..count).map(|_| self.value(kind, depth + 1));
                Json::List(items.collect::<Outcome<_>>()?)
            }
            10 => Json::number(u64::from_le_bytes(self.array()?)),
            11 => Json::number(i64::from_le_bytes(self.array()?)),
            12 => Json::number(f64::from_le_bytes(self.array()?)),
            _ => return Err(format!("a value of GGUF has the unknown type {kind}")),
        })
    }
}

#[derive(Clone, Copy)]
enum Type {
    F32,
    F16,
    Bf16,
    Blocks(BlockFormat),
}

impl Type {
    fn of(number: u32) -> Outcome<Type> {
        Ok(match number {
            0 => Type::F32,
            1 => Type::F16,
            2 => Type::Blocks(BlockFormat::Q4_0),
            8 => Type::Blocks(BlockFormat::Q8_0),
            30 => Type::Bf16,
            _ => return Err(format!("a tensor of GGUF has the type {number}, which is not read")),
        })
    }

    /// The bytes of a row of so many elements.
    fn row_bytes(self, elements: usize) -> Outcome<usize> {
        let (elements_of_unit, bytes_of_unit) = match self {
            Type::F32 => (1, 4),
            Type::F16 | Type::Bf16 => (1, 2),
            Type::Blocks(format) => (32, format.bytes()),
        };
        ensure(
            elements > 0 && elements.is_multiple_of(elements_of_unit),
            "a row does not fit its blocks",
        )?;
        (elements / elements_of_unit).checked_mul(bytes_of_unit).ok_or("a size is too large".into())
    }

    fn dequantized(self, bytes: &[u8], row: usize) -> Vec<f32> {
        let pairs = bytes.chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]]));
        match self {
            Type::F32 => {
                let words = bytes.chunks_exact(4);
                words.map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
            }
            Type::F16 => pairs.map(f16_to_f32).collect(),
            Type::Bf16 => pairs.map(bf16_to_f32).collect(),
            Type::Blocks(format) => {
                let matrix = read_blocks(bytes, row, format);
                let scaled = |(codes, scale): (&[i8], &f32)| -> Vec<f32> {
                    codes.iter().map(|code| scale * f32::from(*code)).collect()
                };
                matrix.codes.chunks(32).zip(&matrix.scales).flat_map(scaled).collect()
            }
        }
    }
}

/// Where a tensor lies and what it is: shape with the rows first.
struct Entry {
    name: String,
    shape: Vec<usize>,
    kind: Type,
    offset: usize,
}

/// Reads a whole file.
pub fn read(content: &[u8]) -> Outcome<Gguf> {
    let mut reader = Reader { content, at: 0 };
    ensure(reader.bytes(4)? == b"GGUF", "the file is no GGUF file")?;
    ensure([2, 3].contains(&reader.word()?), "the GGUF file is of another version")?;
    let (tensor_count, value_count) = (reader.size()?, reader.size()?);
    let mut values = HashMap::new();
    for _ in 0..value_count {
        let (key, kind) = (reader.text()?, reader.word()?);
        values.insert(key, reader.value(kind, 0)?);
    }
    let mut entries = vec![];
    for _ in 0..tensor_count {
        entries.push(entry(&mut reader)?);
    }
    let alignment =
        values.get("general.alignment").and_then(Json::as_int).unwrap_or(32).max(1) as usize;
    let data = content.get(reader.at.next_multiple_of(alignment)..).unwrap_or_default();
    let metadata = Metadata::new(values)?;
    let config = metadata.config(&entries)?;
    let (mut tensors, mut codes) = (Tensors::new(), HashMap::new());
    for entry in &entries {
        let name = folder_name(&entry.name)?;
        let turned = metadata.architecture == "llama" && is_turned(&entry.name);
        let row = entry.shape[1..].iter().product();
        let bytes = entry.rows(data, row, turned.then_some(metadata.head_dim()?))?;
        if let (Type::Blocks(format), 2) = (entry.kind, entry.shape.len()) {
            codes.insert(name.clone(), read_blocks(&bytes, row, format));
        }
        tensors.insert(name, Tensor::floats(&entry.shape, &entry.kind.dequantized(&bytes, row)));
    }
    let ends = ["eos", "eot", "eom"];
    let ends = ends.iter().filter_map(|end| metadata.end(end)).collect();
    Ok(Gguf { config, ends, tensors, codes })
}

fn entry(reader: &mut Reader) -> Outcome<Entry> {
    let (name, axes) = (reader.text()?, reader.word()?);
    ensure((1..=4).contains(&axes), format!("{name} has {axes} axes"))?;
    let mut shape = (0..axes).map(|_| reader.size()).collect::<Outcome<Vec<_>>>()?;
    shape.reverse();
    let small = shape.iter().try_fold(1usize, |count, axis| count.checked_mul(*axis));
    ensure(small.is_some_and(|count| count > 0), format!("{name} has an impossible shape"))?;
    Ok(Entry { name, shape, kind: Type::of(reader.word()?)?, offset: reader.size()? })
}

impl Entry {
    /// The bytes of a tensor. Where rows are turned, in heads of this dimension, they are put back:
    /// neighbours 2i and 2i + 1 are the elements i and i + D/2 of a head.
    fn rows(&self, data: &[u8], row: usize, turned: Option<usize>) -> Outcome<Vec<u8>> {
        let step = self.kind.row_bytes(row)?;
        let size = step.checked_mul(self.shape[0]).ok_or("a size is too large")?;
        let end = self.offset.checked_add(size).ok_or("a size is too large")?;
        let bytes =
            data.get(self.offset..end).ok_or(format!("{} is beyond the file", self.name))?;
        let Some(head_dim) = turned else { return Ok(bytes.to_vec()) };
        ensure(
            self.shape[0].is_multiple_of(head_dim),
            format!("{} does not fit its heads", self.name),
        )?;
        let stored = |i: usize| {
            let (head, element) = (i / head_dim, i % head_dim);
            let (pair, second) = (element % (head_dim / 2), element / (head_dim / 2));
            head * head_dim + 2 * pair + second
        };
        Ok((0..self.shape[0]).flat_map(|i| bytes[stored(i) * step..][..step].to_vec()).collect())
    }
}

fn is_turned(name: &str) -> bool {
    name.contains("attn_q.") || name.contains("attn_k.")
}

/// The name that a folder has for a tensor.
fn folder_name(name: &str) -> Outcome<String> {
    let unknown = || format!("the tensor {name} of GGUF is unknown");
    let whole = match name {
        "token_embd.weight" => "model.embed_tokens.weight",
        "output_norm.weight" => "model.norm.weight",
        "output.weight" => "lm_head.weight",
        _ => "",
    };
    if !whole.is_empty() {
        return Ok(whole.into());
    }
    let rest = name.strip_prefix("blk.").ok_or_else(unknown)?;
    let (layer, rest) = rest.split_once('.').ok_or_else(unknown)?;
    let (part, suffix) = rest.rsplit_once('.').ok_or_else(unknown)?;
    let part = match part {
        "attn_norm" => "input_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return Err(unknown()),
    };
    Ok(format!("model.layers.{layer}.{part}.{suffix}"))
}

struct Metadata {
    values: HashMap<String, Json>,
    architecture: String,
}

impl Metadata {
    fn new(values: HashMap<String, Json>) -> Outcome<Metadata> {
        let architecture = values.get("general.architecture").and_then(Json::as_text);
        let architecture = architecture.ok_or("the GGUF file names no architecture")?.to_string();
        Ok(Metadata { values, architecture })
    }

    fn get(&self, key: &str) -> Option<&Json> {
        self.values.get(&format!("{}.{key}", self.architecture))
    }

    /// A token of the vocabulary that ends a text.
    fn end(&self, name: &str) -> Option<i64> {
        self.values.get(&format!("tokenizer.ggml.{name}_token_id")).and_then(Json::as_int)
    }

    fn needed(&self, key: &str) -> Outcome<Json> {
        self.get(key).cloned().ok_or(format!("the GGUF file has no {key}"))
    }

    fn size(&self, key: &str) -> Outcome<usize> {
        let size = self.needed(key)?.as_int().and_then(|size| usize::try_from(size).ok());
        size.filter(|size| *size > 0).ok_or(format!("{key} is no size"))
    }

    fn size_or(&self, key: &str, default: usize) -> Outcome<usize> {
        self.get(key).map_or(Ok(default), |_| self.size(key))
    }

    fn head_dim(&self) -> Outcome<usize> {
        let default = self.size("embedding_length")? / self.size("attention.head_count")?;
        let head_dim = self.size_or("attention.key_length", default)?;
        ensure(head_dim > 0 && head_dim.is_multiple_of(2), "the dimension of a head is not even")?;
        let rotary = self.size_or("rope.dimension_count", head_dim)?;
        ensure(rotary == head_dim, "heads of which only a part rotates are not read from GGUF")?;
        Ok(head_dim)
    }

    /// The object that `config.json` would hold.
    fn config(&self, entries: &[Entry]) -> Outcome<Json> {
        let architecture = match self.architecture.as_str() {
            "llama" => "LlamaForCausalLM",
            "qwen2" => "Qwen2ForCausalLM",
            "qwen3" => "Qwen3ForCausalLM",
            other => return Err(format!("GGUF files of {other} are not supported")),
        };
        let shape_of =
            |name: &str| entries.iter().find(|entry| entry.name == name).map(|entry| &entry.shape);
        let embedding =
            shape_of("token_embd.weight").ok_or("the GGUF file has no token_embd.weight")?;
        let heads = self.size("attention.head_count")?;
        let kv_heads = self.size_or("attention.head_count_kv", heads)?;
        let mut config = vec![
            ("architectures", Json::List(vec![Json::Text(architecture.into())])),
            ("hidden_act", Json::Text("silu".into())),
            ("num_attention_heads", Json::number(heads)),
            ("num_key_value_heads", Json::number(kv_heads)),
            ("head_dim", Json::number(self.head_dim()?)),
            ("vocab_size", Json::number(embedding[0])),
            ("tie_word_embeddings", Json::Truth(shape_of("output.weight").is_none())),
            ("num_hidden_layers", self.needed("block_count")?),
            ("max_position_embeddings", self.needed("context_length")?),
            ("hidden_size", self.needed("embedding_length")?),
            ("intermediate_size", self.needed("feed_forward_length")?),
            ("rms_norm_eps", self.needed("attention.layer_norm_rms_epsilon")?),
            ("rope_theta", self.needed("rope.freq_base")?),
        ];
        if let Some(kind) = self.get("rope.scaling.type").and_then(Json::as_text) {
            if kind != "none" {
                config.push(("rope_scaling", self.scaling(kind)?));
            }
        }
        Ok(object(config))
    }

    /// `rope_scaling`; what is not given is null, which is as good as absent.
    fn scaling(&self, kind: &str) -> Outcome<Json> {
        let given = |key: &str| self.get(&format!("rope.scaling.{key}")).cloned();
        let or_null = |key: &str| given(key).unwrap_or(Json::Null);
        Ok(object(vec![
            ("rope_type", Json::Text(kind.into())),
            ("factor", self.needed("rope.scaling.factor")?),
            ("original_max_position_embeddings", or_null("original_context_length")),
            ("beta_fast", or_null("yarn_beta_fast")),
            ("beta_slow", or_null("yarn_beta_slow")),
            ("attention_factor", given("yarn_attn_factor").unwrap_or(or_null("attn_factor"))),
        ]))
    }
}

fn object(members: Vec<(&str, Json)>) -> Json {
    Json::Object(members.into_iter().map(|(key, value)| (key.to_string(), value)).collect())
}
