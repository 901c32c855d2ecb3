//! Frames, calls and answers (docs/protocol.md).

use std::io::{self, Read, Write};

use crate::error::{ensure, Outcome};
use crate::json::{self, Json};
use crate::safetensors::{self, Named, Tensor, Tensors};

/// No frame is longer.
const LONGEST: u64 = 1 << 30;

/// The blob of the next frame; None where the input ends before one begins.
pub fn read_frame(input: &mut impl Read) -> Outcome<Option<Vec<u8>>> {
    let mut length = [0; 8];
    match input.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other.map_err(|error| error.to_string())?,
    }
    let length = u64::from_le_bytes(length);
    ensure(length <= LONGEST, format!("a frame of {length} bytes is longer than 2^30"))?;
    let mut blob = vec![];
    input.take(length).read_to_end(&mut blob).map_err(|error| error.to_string())?;
    ensure(blob.len() as u64 == length, "the input ends within a frame")?;
    Ok(Some(blob))
}

pub fn write_frame(output: &mut impl Write, blob: &[u8]) -> io::Result<()> {
    output.write_all(&(blob.len() as u64).to_le_bytes())?;
    output.write_all(blob)?;
    output.flush()
}

/// Elements in row-major order, of a rank that was asked for.
pub struct Array<T, const RANK: usize> {
    pub shape: [usize; RANK],
    pub data: Vec<T>,
}

pub type Floats<const RANK: usize> = Array<f32, RANK>;

pub struct Call {
    pub id: String,
    pub operation: String,
    pub parameters: Json,
    tensors: Tensors,
}

impl Call {
    /// Refuses a blob that is none; what the call is about is looked at when it is asked for.
    pub fn read(blob: &[u8]) -> Outcome<Call> {
        let (metadata, tensors) = safetensors::read(blob)?;
        let text = |key: &str| metadata.text(key).ok_or(format!("the metadata has no text {key}"));
        Ok(Call {
            id: text("id")?.into(),
            operation: text("operation")?.into(),
            parameters: json::parse(text("parameters")?.as_bytes())?,
            tensors,
        })
    }

    fn tensor(&self, name: &str) -> Outcome<&Tensor> {
        self.tensors.get(name).ok_or(format!("{name} is missing"))
    }

    fn array<T, const RANK: usize>(
        &self,
        name: &str,
        read: fn(&Tensor) -> Outcome<Vec<T>>,
    ) -> Outcome<Array<T, RANK>> {
        let tensor = self.tensor(name)?;
        let shape = tensor.shape[..].try_into();
        let shape =
            shape.map_err(|_| format!("{name} has {} axes, not {RANK}", tensor.shape.len()))?;
        let data = read(tensor).map_err(|message| format!("{name}: {message}"))?;
        Ok(Array { shape, data })
    }

    /// A tensor of floats, widened to float32.
    pub fn floats<const RANK: usize>(&self, name: &str) -> Outcome<Floats<RANK>> {
        self.array(name, Tensor::to_floats)
    }

    /// The same of an argument that may be left out.
    pub fn floats_if_there<const RANK: usize>(&self, name: &str) -> Outcome<Option<Floats<RANK>>> {
        self.tensors.contains_key(name).then(|| self.floats(name)).transpose()
    }

    /// A float16 tensor, widened.
    pub fn scales(&self, name: &str) -> Outcome<Floats<2>> {
        self.array(name, Tensor::to_scales)
    }

    pub fn integers<const RANK: usize>(&self, name: &str) -> Outcome<Array<i64, RANK>> {
        self.array(name, Tensor::to_integers)
    }

    pub fn bytes<const RANK: usize>(&self, name: &str) -> Outcome<Array<u8, RANK>> {
        self.array(name, Tensor::to_bytes)
    }

    pub fn bytes_if_there<const RANK: usize>(
        &self,
        name: &str,
    ) -> Outcome<Option<Array<u8, RANK>>> {
        self.tensors.contains_key(name).then(|| self.bytes(name)).transpose()
    }

    fn parameter<T>(&self, name: &str, value: Option<T>) -> Outcome<T> {
        value.ok_or(format!("{name} is missing or of another kind"))
    }

    pub fn float(&self, name: &str) -> Outcome<f64> {
        self.parameter(name, self.parameters.float(name))
    }

    pub fn size(&self, name: &str) -> Outcome<usize> {
        self.parameter(name, self.parameters.size(name))
    }

    pub fn text(&self, name: &str) -> Outcome<&str> {
        self.parameter(name, self.parameters.text(name))
    }

    pub fn unsigned(&self, name: &str) -> Outcome<u64> {
        self.parameter(name, self.parameters.get(name).and_then(Json::as_unsigned))
    }

    /// An unsigned integer below 2^32.
    pub fn word(&self, name: &str) -> Outcome<u32> {
        u32::try_from(self.unsigned(name)?).map_err(|_| format!("{name} is 2^32 or more"))
    }

    /// An argument that has a default: refused where it is there and of another kind.
    pub fn or<T>(&self, name: &str, value: Option<T>, default: T) -> Outcome<T> {
        match self.parameters.get(name) {
            None => Ok(default),
            Some(_) => self.parameter(name, value),
        }
    }

    pub fn size_or(&self, name: &str, default: usize) -> Outcome<usize> {
        self.or(name, self.parameters.size(name), default)
    }

    pub fn float_or(&self, name: &str, default: f64) -> Outcome<f64> {
        self.or(name, self.parameters.float(name), default)
    }

    pub fn truth_or(&self, name: &str, default: bool) -> Outcome<bool> {
        self.or(name, self.parameters.truth(name), default)
    }

    pub fn size_if_there(&self, name: &str) -> Outcome<Option<usize>> {
        self.or(name, self.parameters.size(name).map(Some), None)
    }

    pub fn float_if_there(&self, name: &str) -> Outcome<Option<f64>> {
        self.or(name, self.parameters.float(name).map(Some), None)
    }
}

/// What is said to a call.
pub enum Answer {
    Results(Named),
    Session(String),
    Hello(String),
    NotImplemented,
    Error(String),
}

impl Answer {
    /// The blob that answers the call of this id.
    pub fn blob(self, id: &str) -> Vec<u8> {
        let mut metadata = vec![("id", id.to_string())];
        let mut results = vec![];
        let status = match self {
            Answer::Results(named) => {
                results = named;
                "ok"
            }
            Answer::Session(name) => {
                metadata.push(("session", name));
                "ok"
            }
            Answer::Hello(declaration) => {
                metadata.push(("hello", declaration));
                "ok"
            }
            Answer::NotImplemented => "not implemented",
            Answer::Error(message) => {
                metadata.push(("message", message.replace('\n', " ")));
                "error"
            }
        };
        metadata.push(("status", status.to_string()));
        safetensors::write(&metadata, &results)
    }
}

/// The only result of an operation.
pub fn single(y: Tensor) -> Outcome<Named> {
    named([("y", y)])
}

pub fn named<const COUNT: usize>(results: [(&str, Tensor); COUNT]) -> Outcome<Named> {
    Ok(results.map(|(name, tensor)| (name.to_string(), tensor)).into())
}
