//! An inference engine after SPEC.md of bitforbit, in the standard library alone.
//!
//! It is a backend for `bitforbit check --process` (docs/protocol.md): calls come by standard input
//! and answers go to standard output. Each module is about one section of SPEC.md. Read them in
//! this order:
//!
//! | SPEC | modules |
//! |---|---|
//! | 1, 2 | `bits`, `aligned` |
//! | 4 | `elementary`, for what float64 does not settle `double_double`, `fixed_point` |
//! | 5, 6, 7 | `quantization`, `normalization`, `rotary`, `rope_constants` |
//! | 8, 9 | `attention`, `feed_forward`, `experts` |
//! | 10 | `linear`, `families`, `config`, `model` |
//! | 11 | `pages`, `storage`, `prefix`, `cache_file`, with `sha256` |
//! | 12 | `checkpoint`, `layers`, `gguf`, with `json`, `safetensors` |
//! | 13, 14 | `sampling`, `speculation`, `session` |
//! | 17 | `operations`, `sessions`, with `protocol` |

mod aligned;
mod attention;
mod bits;
mod cache_file;
mod checkpoint;
mod config;
mod double_double;
mod elementary;
mod error;
mod experts;
mod families;
mod feed_forward;
mod fixed_point;
mod gguf;
mod json;
mod layers;
mod linear;
mod model;
mod normalization;
mod operations;
mod pages;
mod prefix;
mod protocol;
mod quantization;
mod rope_constants;
mod rotary;
mod safetensors;
mod sampling;
mod session;
mod sessions;
mod sha256;
mod speculation;
mod storage;

use std::io;
use std::process::ExitCode;

use error::Outcome;
use operations::OPERATIONS;
use protocol::{read_frame, write_frame, Answer, Call};
use sessions::{Sessions, METHODS};

/// All that the engine has, and that its sums are exact.
fn hello() -> String {
    let names = OPERATIONS.iter().map(|(name, _)| *name).chain(["load"]);
    let methods = METHODS.iter().map(|(name, _)| *name).filter(|name| *name != "reset");
    let operations: Vec<String> = names.chain(methods).map(json::quote).collect();
    let numerics =
        r#"{"operands": "float32", "accumulator": "exact", "fma": false, "kv": "float32"}"#;
    let operations = operations.join(", ");
    format!(
        r#"{{"protocol": 1, "name": "rust", "operations": [{operations}], "numerics": {numerics}}}"#
    )
}

fn answer(call: &Call, sessions: &mut Sessions) -> Outcome<Answer> {
    let name = call.operation.as_str();
    if name == "hello" {
        return Ok(Answer::Hello(hello()));
    }
    if name == "load" {
        return Ok(Answer::Session(sessions.load(call)?));
    }
    if let Some((_, operation)) = OPERATIONS.iter().find(|(known, _)| *known == name) {
        return Ok(Answer::Results(operation(call)?));
    }
    if let Some((_, method)) = METHODS.iter().find(|(known, _)| *known == name) {
        return Ok(Answer::Results(method(call, sessions.of(call)?)?));
    }
    Ok(Answer::NotImplemented)
}

/// Answers calls until the input ends; a frame that is none ends it too: there is no id to answer.
fn serve() -> Outcome<()> {
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    let mut sessions = Sessions::default();
    while let Some(blob) = read_frame(&mut input)? {
        let call = Call::read(&blob)?;
        let answer = answer(&call, &mut sessions).unwrap_or_else(Answer::Error);
        write_frame(&mut output, &answer.blob(&call.id)).map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("engine: {message}");
            ExitCode::FAILURE
        }
    }
}
