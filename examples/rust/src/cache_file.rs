//! Saved caches (SPEC 11.4).

use std::fs;
use std::path::Path;

use crate::attention::append;
use crate::error::{ensure, Outcome};
use crate::json::{self, Json};
use crate::model::{Cache, Model};
use crate::safetensors::{self, Named, Tensor};
use crate::sha256::sha256;

const FORMAT: &str = "bitforbit-cache";
const DIGEST: usize = 32;

/// Writes what the cache holds of these tokens: beside the path, to the disk, and then renamed.
pub fn save(path: &Path, model: &Model, cache: &Cache, tokens: &[i64], exact: bool) -> Outcome<()> {
    let content = content(model, cache, tokens, exact);
    let mut beside = path.as_os_str().to_owned();
    beside.push(".part");
    let written = fs::write(&beside, content)
        .and_then(|()| fs::File::open(&beside)?.sync_all())
        .and_then(|()| fs::rename(&beside, path));
    written.map_err(|error| format!("{}: {error}", path.display()))
}

fn content(model: &Model, cache: &Cache, tokens: &[i64], exact: bool) -> Vec<u8> {
    let dimension = model.config.head_dim;
    let mut tensors: Named = vec![("tokens".into(), Tensor::integers(&[tokens.len()], tokens))];
    for (number, heads) in cache.layers.iter().enumerate() {
        let first = model.first_held(number, cache.length);
        let shape = [heads.len(), cache.length - first, dimension];
        let held = first * dimension..;
        let keys: Vec<f32> =
            heads.iter().flat_map(|head| head.keys[held.clone()].to_vec()).collect();
        let values: Vec<f32> =
            heads.iter().flat_map(|head| head.values[held.clone()].to_vec()).collect();
        tensors.push((format!("layers.{number}.k"), Tensor::floats(&shape, &keys)));
        tensors.push((format!("layers.{number}.v"), Tensor::floats(&shape, &values)));
    }
    tensors.push(("sha256".into(), Tensor::bytes(&[DIGEST], vec![0; DIGEST])));
    let about = format!(
        "{{\"exact\": {exact}, \"format\": \"{FORMAT}\", \"kv_dtype\": \"float32\", \"model\": {}, \
         \"salt\": \"\", \"version\": 1}}",
        json::quote(&model.digest)
    );
    let mut content = safetensors::write(&[("cache", about)], &tensors);
    content.truncate(content.len() - DIGEST);
    let digest = sha256(&content);
    content.extend(digest);
    content
}

/// The tokens of a saved cache of this model, and the cache.
pub fn restore(content: &[u8], model: &Model) -> Outcome<(Vec<i64>, Cache)> {
    let (rest, digest) =
        content.split_last_chunk::<DIGEST>().ok_or("the cache file is truncated")?;
    ensure(sha256(rest) == *digest, "the cache file is truncated or altered")?;
    let (metadata, tensors) = safetensors::read(content)?;
    let about = json::parse(metadata.text("cache").ok_or("the file is no cache")?.as_bytes())?;
    let fits = about.text("format") == Some(FORMAT) && about.int("version") == Some(1);
    ensure(fits, "the cache file is of another format or version")?;
    ensure(about.text("model") == Some(&model.digest), "the cache file is of another model")?;
    ensure(about.text("kv_dtype") == Some("float32"), "the cache file is of another type")?;
    ensure(
        matches!(about.get("exact"), Some(Json::Truth(_))),
        "the cache file does not say `exact`",
    )?;
    let tensor = |name: &str| tensors.get(name).ok_or(format!("the cache file has no {name}"));
    let tokens = tensor("tokens")?.to_integers()?;
    let mut cache = model.empty_cache();
    cache.length = tokens.len();
    for number in 0..cache.layers.len() {
        let first = model.first_held(number, tokens.len());
        let (heads, dimension) = (model.config.kv_heads, model.config.head_dim);
        let shape = [heads, tokens.len() - first, dimension];
        let (k, v) =
            (tensor(&format!("layers.{number}.k"))?, tensor(&format!("layers.{number}.v"))?);
        ensure(
            k.shape == shape && v.shape == shape,
            "the cache file has other shapes than the cache",
        )?;
        let (k, v) = (k.to_floats()?, v.to_floats()?);
        // What a window has left behind is never read.
        let left_behind = vec![0.0; first * dimension];
        let rows = shape[1] * dimension;
        for (head, i) in cache.layers[number].iter_mut().zip(0..) {
            let one = std::slice::from_mut(head);
            append(one, &left_behind, &left_behind, dimension);
            append(one, &k[i * rows..][..rows], &v[i * rows..][..rows], dimension);
        }
    }
    Ok((tokens, cache))
}
