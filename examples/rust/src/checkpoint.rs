//! A model's tensors by name, and linear layers made of them by the weight mode (SPEC 10.1, 12.1).

use std::collections::HashMap;
use std::fs;

use crate::aligned::all_finite;
use crate::bits::f16_to_f32;
use crate::error::{ensure, Outcome};
use crate::gguf;
use crate::json::{self, Json};
use crate::linear::{Linear, Weights};
use crate::quantization::{quantize_int4, quantize_int4_search, CodeMatrix};
use crate::safetensors::{self, Tensors};
use crate::sha256::sha256;

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Float32,
    Int4,
    Int4Row,
    Native,
}

pub struct Checkpoint {
    mode: Mode,
    tensors: Tensors,
    /// Codes of GGUF files, by the name of their weight.
    codes: HashMap<String, CodeMatrix>,
    /// Of all files and the mode: what a saved cache belongs to (SPEC 11.4).
    pub digest: String,
    /// The tokens that end a text (SPEC 12.1).
    pub ends: Vec<i64>,
}

impl Checkpoint {
    /// A folder or a `.gguf` file, and its configuration.
    pub fn open(path: &str, weights: &str) -> Outcome<(Checkpoint, Json)> {
        let mode = match weights {
            "float32" => Mode::Float32,
            "int4" => Mode::Int4,
            "int4-row" => Mode::Int4Row,
            "native" => Mode::Native,
            _ => return Err(format!("weights {weights} are unknown")),
        };
        let mut content = vec![];
        let (config, ends, tensors, codes) = if path.ends_with(".gguf") {
            content = read(path)?;
            let file = gguf::read(&content)?;
            (file.config, file.ends, file.tensors, file.codes)
        } else {
            let (config, tensors) = read_folder(path, &mut content)?;
            let ends = ends_of_folder(path, &config)?;
            (config, ends, tensors, HashMap::new())
        };
        content.extend_from_slice(weights.as_bytes());
        let digest = sha256(&content).iter().map(|byte| format!("{byte:02x}")).collect();
        Ok((Checkpoint { mode, tensors, codes, digest, ends }, config))
    }

    /// A tensor of so many elements, all finite.
    pub fn floats(&self, name: &str, count: usize) -> Outcome<Vec<f32>> {
        let tensor = self.tensors.get(name).ok_or(format!("the model has no tensor {name}"))?;
        let values = tensor.to_floats().map_err(|message| format!("{name}: {message}"))?;
        ensure(
            values.len() == count,
            format!("{name} has {:?} elements, not {count}", tensor.shape),
        )?;
        ensure(all_finite(&values), format!("{name} has elements that are not finite"))?;
        Ok(values)
    }

    pub fn floats_if_there(&self, name: &str, count: usize) -> Outcome<Option<Vec<f32>>> {
        self.tensors.contains_key(name).then(|| self.floats(name, count)).transpose()
    }

    /// A layer as it is stored, `<name>.weight` and `<name>.bias`, in every mode.
    pub fn stored(&self, name: &str, outputs: usize, inputs: usize) -> Outcome<Linear> {
        let w = self.floats(&format!("{name}.weight"), outputs * inputs)?;
        let bias = self.floats_if_there(&format!("{name}.bias"), outputs)?;
        Ok(Linear::floats(&w, outputs, inputs).with_bias(bias))
    }

    /// A projection inside the layers, by the weight mode.
    pub fn projection(&mut self, name: &str, outputs: usize, inputs: usize) -> Outcome<Linear> {
        let weight = format!("{name}.weight");
        let bias = self.floats_if_there(&format!("{name}.bias"), outputs)?;
        if self.mode == Mode::Native {
            if let Some(codes) = self.codes.remove(&weight) {
                ensure(
                    (codes.outputs, codes.inputs) == (outputs, inputs),
                    format!("{weight} has another shape"),
                )?;
                return Ok(Linear { weights: Weights::Codes(codes), bias });
            }
        }
        let w = self.floats(&weight, outputs * inputs)?;
        Ok(self.quantized(&w, outputs, inputs)?.with_bias(bias))
    }

    /// A layer of the weights w (N, K), by the weight mode.
    pub fn quantized(&self, w: &[f32], outputs: usize, inputs: usize) -> Outcome<Linear> {
        let (group, (codes, scales)) = match self.mode {
            Mode::Float32 | Mode::Native => return Ok(Linear::floats(w, outputs, inputs)),
            Mode::Int4 => (32, quantize_int4(w, inputs, 32)?),
            Mode::Int4Row => (0, quantize_int4_search(w, inputs)?),
        };
        let scales = scales.into_iter().map(f16_to_f32).collect();
        let codes = CodeMatrix { outputs, inputs, group, codes, scales };
        Ok(Linear { weights: Weights::Codes(codes), bias: None })
    }
}

fn read(path: &str) -> Outcome<Vec<u8>> {
    fs::read(path).map_err(|error| format!("{path}: {error}"))
}

/// The configuration and tensors of a folder; all that was read is appended to the content.
fn read_folder(path: &str, content: &mut Vec<u8>) -> Outcome<(Json, Tensors)> {
    let config = read(&format!("{path}/config.json"))?;
    content.extend_from_slice(&config);
    let mut tensors = Tensors::new();
    for file in shards(path)? {
        let blob = read(&format!("{path}/{file}"))?;
        tensors.extend(safetensors::read(&blob)?.1);
        content.extend(blob);
    }
    Ok((json::parse(&config)?, tensors))
}

/// One id or a list, of `generation_config.json` before `config.json`.
fn ends_of_folder(path: &str, config: &Json) -> Outcome<Vec<i64>> {
    let beside = match fs::read(format!("{path}/generation_config.json")) {
        Ok(content) => json::parse(&content)?,
        Err(_) => Json::Null,
    };
    let key = "eos_token_id";
    let Some(ids) = beside.get(key).or(config.get(key)) else {
        return Ok(vec![]);
    };
    let ids = ids.as_list().unwrap_or(std::slice::from_ref(ids)).iter().map(Json::as_int);
    ids.collect::<Option<_>>().ok_or(format!("{key} holds no token ids"))
}

/// The files of tensors: those that the index lists, or the one.
fn shards(path: &str) -> Outcome<Vec<String>> {
    let Ok(index) = fs::read(format!("{path}/model.safetensors.index.json")) else {
        return Ok(vec!["model.safetensors".into()]);
    };
    let index = json::parse(&index)?;
    let map =
        index.get("weight_map").and_then(Json::as_object).ok_or("the index has no weight_map")?;
    let names = map.iter().map(|(_, file)| file.as_text().map(str::to_string));
    let mut names: Vec<String> = names.collect::<Option<_>>().ok_or("the index names no files")?;
    names.sort();
    names.dedup();
    let plain = names.iter().all(|name| !name.contains(['/', '\\']));
    ensure(plain, "a shard is not named by a plain file name")?;
    Ok(names)
}
