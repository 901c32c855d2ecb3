//! The operations of SPEC 17's first table: arguments are taken and held against each other, and
//! the rest is done by the module of the section.

use crate::attention::{attention, default_scale, heads_of, Rule};
use crate::elementary;
use crate::error::{ensure, Outcome};
use crate::experts::{mix, Router, Routing, Score, SharedExpert};
use crate::feed_forward::{Activation, GatedMlp};
use crate::linear::{Linear, Weights};
use crate::normalization;
use crate::pages;
use crate::prefix;
use crate::protocol::{named, single, Array, Call, Floats};
use crate::quantization::{
    self, grouping, read_blocks, unpack, w4a16_weights, BlockFormat, CodeMatrix,
};
use crate::rope_constants::Rope;
use crate::rotary::{cos_sin, rotate};
use crate::safetensors::{Named, Tensor};
use crate::sampling::{self, Sampling, Source};
use crate::speculation::{self, Draft};
use crate::storage;

type Operation = fn(&Call) -> Outcome<Named>;

pub const OPERATIONS: &[(&str, Operation)] = &[
    ("exp", |call| elementwise(call, elementary::exp)),
    ("log", |call| elementwise(call, elementary::log)),
    ("sin", |call| elementwise(call, elementary::sin)),
    ("cos", |call| elementwise(call, elementary::cos)),
    ("tanh", |call| elementwise(call, elementary::tanh)),
    ("sigmoid", |call| elementwise(call, elementary::sigmoid)),
    ("silu", |call| elementwise(call, elementary::silu)),
    ("gelu_tanh", |call| elementwise(call, elementary::gelu_tanh)),
    ("softmax", softmax),
    ("linear", linear),
    ("quantize_int4", quantize_int4),
    ("quantize_int8", quantize_int8),
    ("linear_int4", linear_int4),
    ("linear_w4a16", linear_w4a16),
    ("linear_q4_0", |call| linear_blocks(call, BlockFormat::Q4_0)),
    ("linear_q8_0", |call| linear_blocks(call, BlockFormat::Q8_0)),
    ("rms_norm", rms_norm),
    ("rope_constants", rope_constants),
    ("rope", rope),
    ("attention", whole_attention),
    ("paged_attention", paged_attention),
    ("gated_mlp", gated_mlp),
    ("route", route),
    ("moe", moe),
    ("philox", philox),
    ("sample", sample),
    ("verify_draft", verify_draft),
    ("store_kv", store_kv),
    ("page_hashes", page_hashes),
    ("paging", paging),
    ("prefix_reuse", prefix_reuse),
];

/// Two shapes, or axes of them, that must be the same.
fn fit<T: PartialEq>(ours: T, theirs: T, what: &str) -> Outcome<()> {
    ensure(ours == theirs, format!("the shape of {what} does not fit the others"))
}

/// An axis along which there must be something.
fn filled(size: usize, what: &str) -> Outcome<()> {
    ensure(size > 0, format!("{what} has no elements"))
}

// Elementary functions, and rows (SPEC 4 and 6).

fn elementwise(call: &Call, function: fn(f32) -> f32) -> Outcome<Named> {
    let x: Floats<1> = call.floats("x")?;
    let y: Vec<f32> = x.data.iter().map(|x| function(*x)).collect();
    single(Tensor::floats(&x.shape, &y))
}

fn softmax(call: &Call) -> Outcome<Named> {
    let x: Floats<2> = call.floats("x")?;
    let y: Vec<f32> = x.data.chunks(x.shape[1].max(1)).flat_map(elementary::softmax).collect();
    single(Tensor::floats(&x.shape, &y))
}

fn rms_norm(call: &Call) -> Outcome<Named> {
    let (x, weight): (Floats<2>, Floats<1>) = (call.floats("x")?, call.floats("weight")?);
    fit(weight.shape[0], x.shape[1], "weight")?;
    let y = normalization::rms_norm(&x.data, &weight.data, call.float("eps")?);
    single(Tensor::floats(&x.shape, &y))
}

// Linear layers and their codes (SPEC 2 and 5).

/// The layer of a matrix w (N, K).
fn layer(w: &Floats<2>) -> Linear {
    Linear::floats(&w.data, w.shape[0], w.shape[1])
}

fn apply(layer: Linear, x: &Floats<2>, outputs: usize) -> Outcome<Named> {
    single(Tensor::floats(&[x.shape[0], outputs], &layer.apply(&x.data, x.shape[0])))
}

fn linear(call: &Call) -> Outcome<Named> {
    let (x, w): (Floats<2>, Floats<2>) = (call.floats("x")?, call.floats("w")?);
    fit(x.shape[1], w.shape[1], "w")?;
    let bias: Option<Floats<1>> = call.floats_if_there("bias")?;
    fit(bias.as_ref().map_or(w.shape[0], |bias| bias.shape[0]), w.shape[0], "bias")?;
    apply(layer(&w).with_bias(bias.map(|bias| bias.data)), &x, w.shape[0])
}

fn quantize_int4(call: &Call) -> Outcome<Named> {
    let w: Floats<2> = call.floats("w")?;
    let ([outputs, inputs], group) = (w.shape, call.size("group")?);
    filled(inputs, "w")?;
    let (codes, scales) = quantization::quantize_int4(&w.data, inputs, group)?;
    let packed = quantization::pack(&codes, inputs);
    named([
        ("packed", Tensor::bytes(&[outputs, inputs.div_ceil(2)], packed)),
        ("scales", Tensor::halves(&[outputs, grouping(group, inputs).1], &scales)),
    ])
}

fn quantize_int8(call: &Call) -> Outcome<Named> {
    let x: Floats<2> = call.floats("x")?;
    filled(x.shape[1], "x")?;
    let rows = x.data.chunks(x.shape[1]).map(quantization::quantize_int8);
    let (codes, scales): (Vec<Vec<i8>>, Vec<f32>) = rows.unzip();
    named([
        ("codes", Tensor::codes(&x.shape, &codes.concat())),
        ("scale", Tensor::floats(&[x.shape[0]], &scales)),
    ])
}

/// x (T, K), packed (N, ceil(K/2)), scales (N, G) and the group of both int4 layers.
fn int4_arguments(call: &Call) -> Outcome<(Floats<2>, Array<u8, 2>, Floats<2>, usize)> {
    let (x, packed) = (call.floats::<2>("x")?, call.bytes::<2>("packed")?);
    let (scales, group) = (call.scales("scales")?, call.size("group")?);
    let (outputs, inputs) = (packed.shape[0], x.shape[1]);
    filled(inputs, "x")?;
    fit(packed.shape[1], inputs.div_ceil(2), "packed")?;
    fit(scales.shape, [outputs, grouping(group, inputs).1], "scales")?;
    Ok((x, packed, scales, group))
}

fn linear_int4(call: &Call) -> Outcome<Named> {
    let (x, packed, scales, group) = int4_arguments(call)?;
    let (outputs, inputs) = (packed.shape[0], x.shape[1]);
    let codes = unpack(&packed.data, inputs);
    let w = CodeMatrix { outputs, inputs, group, codes, scales: scales.data };
    apply(Linear { weights: Weights::Codes(w), bias: None }, &x, outputs)
}

fn linear_w4a16(call: &Call) -> Outcome<Named> {
    let (x, packed, scales, group) = int4_arguments(call)?;
    let zeros = call.bytes_if_there::<2>("zeros")?;
    fit(zeros.as_ref().map_or(scales.shape, |zeros| zeros.shape), scales.shape, "zeros")?;
    let (outputs, inputs) = (packed.shape[0], x.shape[1]);
    let zeros = zeros.as_ref().map(|zeros| &zeros.data[..]);
    let w = w4a16_weights(&packed.data, &scales.data, zeros, inputs, group);
    apply(Linear::floats(&w, outputs, inputs), &x, outputs)
}

fn linear_blocks(call: &Call, format: BlockFormat) -> Outcome<Named> {
    let (x, blocks) = (call.floats::<2>("x")?, call.bytes::<3>("blocks")?);
    let [outputs, groups, bytes] = blocks.shape;
    fit((Some(x.shape[1]), bytes), (groups.checked_mul(32), format.bytes()), "blocks")?;
    filled(groups, "blocks")?;
    let w = read_blocks(&blocks.data, x.shape[1], format);
    apply(Linear { weights: Weights::Codes(w), bias: None }, &x, outputs)
}

// Rope (SPEC 7).

fn rope_constants(call: &Call) -> Outcome<Named> {
    let parameters = call.parameters.get("parameters").ok_or("parameters are missing")?;
    let head_dim = parameters.size("head_dim").ok_or("parameters have no head_dim")?;
    let rope = Rope::new(parameters, head_dim, parameters.float("max_position_embeddings"))?;
    let (constants, factor) = rope.constants(call.size("position")?.min(1 << 24) as i64);
    named([
        ("inv_freq", Tensor::floats(&[constants.len()], &constants)),
        ("factor", Tensor::floats(&[1], &[factor])),
    ])
}

fn rope(call: &Call) -> Outcome<Named> {
    let mut x: Floats<3> = call.floats("x")?;
    let [rows, heads, head_dim] = x.shape;
    let (positions, constants) = (call.integers::<1>("positions")?, call.floats::<1>("inv_freq")?);
    fit(positions.shape[0], rows, "positions")?;
    ensure(constants.shape[0] <= head_dim / 2, "inv_freq has more pairs than a head")?;
    filled(heads * head_dim, "x")?;
    let (factor, interleaved) =
        (call.float_or("factor", 1.0)? as f32, call.truth_or("interleaved", false)?);
    for (position, row) in positions.data.iter().zip(x.data.chunks_mut(heads * head_dim)) {
        let pairs = cos_sin(*position, &constants.data, factor)?;
        row.chunks_mut(head_dim).for_each(|head| rotate(head, &pairs, interleaved));
    }
    single(Tensor::floats(&x.shape, &x.data))
}

// Attention (SPEC 8).

fn whole_attention(call: &Call) -> Outcome<Named> {
    let (k, v): (Floats<3>, Floats<3>) = (call.floats("k")?, call.floats("v")?);
    fit(v.shape, k.shape, "v")?;
    attend(call, &k.data, &v.data, k.shape)
}

/// The rows that are visible are gathered by the table; what nobody sees is never read.
fn paged_attention(call: &Call) -> Outcome<Named> {
    let (k, v): (Floats<4>, Floats<4>) = (call.floats("k_pages")?, call.floats("v_pages")?);
    fit(v.shape, k.shape, "v_pages")?;
    let [pages, page_size, heads, head_dim] = k.shape;
    filled(page_size * heads * head_dim, "k_pages")?;
    let (table, length) = (call.integers::<1>("block_table")?.data, call.size("length")?);
    let first = match call.size_if_there("window")? {
        Some(window) => {
            (length + 1).saturating_sub(call.floats::<3>("q")?.shape[0]).saturating_sub(window)
        }
        None => 0,
    };
    ensure(length.div_ceil(page_size) <= table.len(), "length is beyond the block table")?;
    let width = heads * head_dim;
    let (mut keys, mut values) = (vec![0.0; length * width], vec![0.0; length * width]);
    for j in first..length {
        let page = usize::try_from(table[j / page_size]).unwrap_or(usize::MAX);
        ensure(page < pages, "the block table names a page that is not there")?;
        let from = (page * page_size + j % page_size) * width;
        keys[j * width..][..width].copy_from_slice(&k.data[from..][..width]);
        values[j * width..][..width].copy_from_slice(&v.data[from..][..width]);
    }
    attend(call, &keys, &values, [length, heads, head_dim])
}

/// q of the call over k and v of this shape (S, Hkv, D).
fn attend(call: &Call, keys: &[f32], values: &[f32], shape: [usize; 3]) -> Outcome<Named> {
    let q: Floats<3> = call.floats("q")?;
    let ([_, query_heads, dimension], [length, heads, key_dimension]) = (q.shape, shape);
    fit(dimension, key_dimension, "q")?;
    filled(heads * dimension, "k")?;
    ensure(
        query_heads > 0 && query_heads % heads == 0,
        "query heads must be a multiple of key heads",
    )?;
    let sinks: Option<Floats<1>> = call.floats_if_there("sinks")?;
    fit(sinks.as_ref().map_or(query_heads, |sinks| sinks.shape[0]), query_heads, "sinks")?;
    let rule = Rule {
        scale: call
            .float_if_there("scale")?
            .map_or(default_scale(dimension as f64), |scale| scale as f32),
        window: call.size_if_there("window")?,
        softcap: call.float_if_there("softcap")?.map(|cap| cap as f32),
        sinks: sinks.as_ref().map(|sinks| &sinks.data[..]),
        fast: is_fast(call, "mode")?,
    };
    let heads = heads_of(keys, values, heads, dimension);
    single(Tensor::floats(&q.shape, &attention(&q.data, query_heads, &heads, length, &rule)))
}

/// Whether the parameter says `fast`; `exact` is the default.
pub fn is_fast(call: &Call, name: &str) -> Outcome<bool> {
    match call.or(name, call.parameters.text(name), "exact")? {
        "exact" => Ok(false),
        "fast" => Ok(true),
        other => Err(format!("{name} {other} is unknown")),
    }
}

// Feed-forward layers (SPEC 9).

fn gated_mlp(call: &Call) -> Outcome<Named> {
    let x: Floats<2> = call.floats("x")?;
    let activation = Activation::named(call.text("activation")?)?;
    let mlp = mlp_of(call, ["gate", "up", "down"], x.shape[1], activation)?;
    single(Tensor::floats(&x.shape, &mlp.apply(&x.data, x.shape[0])))
}

/// The MLP of three matrices of these names, (I, K), (I, K) and (K, I).
fn mlp_of(
    call: &Call,
    names: [&str; 3],
    width: usize,
    activation: Activation,
) -> Outcome<GatedMlp> {
    let [gate, up, down] = names;
    let (gate, up, down): (Floats<2>, Floats<2>, Floats<2>) =
        (call.floats(gate)?, call.floats(up)?, call.floats(down)?);
    let inner = gate.shape[0];
    fit(gate.shape, [inner, width], names[0])?;
    fit(up.shape, gate.shape, names[1])?;
    fit(down.shape, [width, inner], names[2])?;
    Ok(GatedMlp { gate: layer(&gate), up: layer(&up), down: layer(&down), activation })
}

fn route(call: &Call) -> Outcome<Named> {
    let logits: Floats<2> = call.floats("logits")?;
    let [rows, experts] = logits.shape;
    filled(experts, "logits")?;
    let router = Router {
        experts,
        top_k: call.size("top_k")?,
        score: Score::named(call.text("score")?)?,
        selection_bias: call.floats_if_there::<1>("selection_bias")?.map(|bias| bias.data),
        groups: call.size_or("groups", 1)?,
        kept_groups: call.size_or("kept_groups", 1)?,
        group_best: call.size_or("group_best", 1)?,
        renormalise: call.truth_or("renormalise", false)?,
        epsilon: call.float_or("epsilon", 0.0)?,
        scale: call.float_or("scale", 1.0)? as f32,
    };
    router.check()?;
    let routings: Vec<Routing> = logits.data.chunks(experts).map(|row| router.route(row)).collect();
    let chosen: Vec<i64> =
        routings.iter().flat_map(|r| r.experts.iter().map(|e| *e as i64)).collect();
    let gates: Vec<f32> = routings.into_iter().flat_map(|r| r.gates).collect();
    let shape = [rows, router.top_k];
    named([
        ("experts", Tensor::integers(&shape, &chosen)),
        ("gates", Tensor::floats(&shape, &gates)),
    ])
}

fn moe(call: &Call) -> Outcome<Named> {
    let x: Floats<2> = call.floats("x")?;
    let (gate, up, down): (Floats<3>, Floats<3>, Floats<3>) =
        (call.floats("gate")?, call.floats("up")?, call.floats("down")?);
    let ([rows, width], [count, inner, _]) = (x.shape, gate.shape);
    filled(width, "x")?;
    fit(gate.shape, [count, inner, width], "gate")?;
    fit(up.shape, gate.shape, "up")?;
    fit(down.shape, [count, width, inner], "down")?;
    let activation = Activation::named(call.text("activation")?)?;
    let matrix = |w: &Floats<3>, expert: usize, outputs: usize, inputs: usize| {
        Linear::floats(&w.data[expert * inner * width..][..inner * width], outputs, inputs)
    };
    let expert = |e: usize| GatedMlp {
        gate: matrix(&gate, e, inner, width),
        up: matrix(&up, e, inner, width),
        down: matrix(&down, e, width, inner),
        activation,
    };
    let experts: Vec<GatedMlp> = (0..count).map(expert).collect();
    let shared = shared_expert(call, width, activation)?;
    let y = mix(&x.data, &routings_of(call, rows, count)?, &experts, shared.as_ref());
    single(Tensor::floats(&x.shape, &y))
}

/// The routings that `experts` and `gates` (T, k) are.
fn routings_of(call: &Call, rows: usize, count: usize) -> Outcome<Vec<Routing>> {
    let (experts, gates) = (call.integers::<2>("experts")?, call.floats::<2>("gates")?);
    fit(experts.shape[0], rows, "experts")?;
    fit(gates.shape, experts.shape, "gates")?;
    let known = experts.data.iter().all(|e| (0..count as i64).contains(e));
    ensure(known, "experts names one that is not there")?;
    let ranks = experts.shape[1];
    filled(ranks, "experts")?;
    let pairs = experts.data.chunks(ranks).zip(gates.data.chunks(ranks));
    let routing = |(experts, gates): (&[i64], &[f32])| Routing {
        experts: experts.iter().map(|e| *e as usize).collect(),
        gates: gates.to_vec(),
    };
    Ok(pairs.map(routing).collect())
}

fn shared_expert(
    call: &Call,
    width: usize,
    activation: Activation,
) -> Outcome<Option<SharedExpert>> {
    if call.floats_if_there::<2>("shared_gate")?.is_none() {
        return Ok(None);
    }
    let mlp = mlp_of(call, ["shared_gate", "shared_up", "shared_down"], width, activation)?;
    let router: Option<Floats<2>> = call.floats_if_there("shared_router")?;
    fit(router.as_ref().map_or([1, width], |router| router.shape), [1, width], "shared_router")?;
    Ok(Some(SharedExpert { mlp, gate: router.as_ref().map(layer) }))
}

// Sampling (SPEC 13).

fn philox(call: &Call) -> Outcome<Named> {
    let positions = call.integers::<1>("positions")?;
    let stream = call.or("stream", call.parameters.size("stream"), 0)?;
    let stream = u32::try_from(stream).map_err(|_| "stream is 2^32 or more")?;
    let source = source(call)?;
    let word =
        |position: &i64| u32::try_from(*position).map(|position| source.word(position, stream));
    let words: Result<Vec<u64>, _> = positions.data.iter().map(word).collect();
    let words = words.map_err(|_| "a position is negative, or 2^32 or more")?;
    single(Tensor::unsigned(&positions.shape, &words))
}

fn source(call: &Call) -> Outcome<Source> {
    Ok(Source { seed: call.unsigned("seed")?, request: call.word("request")? })
}

fn sampling_of(call: &Call) -> Outcome<Sampling> {
    let sampling = Sampling {
        temperature: call.float("temperature")? as f32,
        top_k: call.size_or("top_k", 0)?,
        top_p: call.float_or("top_p", 1.0)?,
        min_p: call.float_or("min_p", 0.0)?,
        repetition_penalty: call.float_or("repetition_penalty", 1.0)? as f32,
    };
    sampling.check()?;
    Ok(sampling)
}

/// The tokens of a tensor (n,), each of which is in the vocabulary.
fn tokens(call: &Call, name: &str, vocabulary: usize) -> Outcome<Vec<usize>> {
    let ids = call.integers::<1>(name)?.data;
    let known = |id: &i64| usize::try_from(*id).ok().filter(|id| *id < vocabulary);
    let known: Option<Vec<usize>> = ids.iter().map(known).collect();
    known.ok_or(format!("{name} holds a token that is not in the vocabulary"))
}

fn sample(call: &Call) -> Outcome<Named> {
    let logits: Floats<1> = call.floats("logits")?;
    let previous = tokens(call, "previous", logits.shape[0])?;
    let (source, position) = (source(call)?, call.word("position")?);
    let token = sampling::sample(&logits.data, &sampling_of(call)?, &previous, source, position)?;
    single(Tensor::integers(&[1], &[token as i64]))
}

fn verify_draft(call: &Call) -> Outcome<Named> {
    let (logits, weights) = (call.floats::<2>("logits")?, call.integers::<2>("draft_weights")?);
    let [rows, vocabulary] = logits.shape;
    filled(vocabulary, "logits")?;
    let drafted = tokens(call, "draft", vocabulary)?;
    fit(weights.shape, [drafted.len(), vocabulary], "draft_weights")?;
    fit(rows, drafted.len() + 1, "logits")?;
    // Weights are at most 2^40 (SPEC 13.1).
    let small = weights.data.iter().all(|weight| (0..=1 << 40).contains(weight));
    ensure(small, "draft_weights must be from 0 to 2^40")?;
    let law = |row: &[i64]| row.iter().map(|weight| *weight as u64).collect();
    let draft = Draft { tokens: drafted, laws: weights.data.chunks(vocabulary).map(law).collect() };
    let (source, position) = (source(call)?, call.word("position")?);
    ensure(draft.tokens.len() <= (u32::MAX - position) as usize, "a position is 2^32 or more")?;
    let previous = tokens(call, "previous", vocabulary)?;
    let sampling = sampling_of(call)?;
    let verified =
        speculation::verify(&logits.data, &draft, &sampling, &previous, source, position)?;
    let verified: Vec<i64> = verified.into_iter().map(|token| token as i64).collect();
    single(Tensor::integers(&[verified.len()], &verified))
}

// The cache (SPEC 11).

fn store_kv(call: &Call) -> Outcome<Named> {
    let x: Floats<3> = call.floats("x")?;
    single(Tensor::floats(&x.shape, &storage::store(&x.data, x.shape[2], call.text("dtype")?)?))
}

fn page_hashes(call: &Call) -> Outcome<Named> {
    let (tokens, page_size) = (call.integers::<1>("tokens")?, call.size("page_size")?);
    ensure(page_size > 0, "page_size must be above 0")?;
    let (digest, dtype, salt) = (call.text("digest")?, call.text("dtype")?, call.text("salt")?);
    let chain = prefix::page_hashes(&tokens.data, page_size, digest, dtype, salt);
    single(Tensor::bytes(&[chain.len() / 32, 32], chain))
}

fn paging(call: &Call) -> Outcome<Named> {
    let script = call.integers::<2>("script")?;
    fit(script.shape[1], 3, "script")?;
    let told = pages::paging(&script.data, call.size("page_size")?)?;
    single(Tensor::integers(&script.shape, &told))
}

fn prefix_reuse(call: &Call) -> Outcome<Named> {
    let (tokens, lengths) = (call.integers::<1>("tokens")?, call.integers::<1>("lengths")?);
    let prompts = prefix::split(&tokens.data, &lengths.data)?;
    let reused = prefix::prefix_reuse(&prompts, call.size("page_size")?, call.size("pages")?)?;
    single(Tensor::integers(&lengths.shape, &reused))
}
