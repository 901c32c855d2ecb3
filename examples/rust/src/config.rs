//! A model's configuration, read by its family (SPEC 10.3 and 12.1).
//!
//! Read for models that the specification supports: contradictions and keys that it would refuse
//! are not looked for.

use crate::error::{ensure, Outcome};
use crate::experts::{Router, Score};
use crate::families::{Family, Sparse, Windows, FAMILIES};
use crate::feed_forward::Activation;
use crate::json::Json;
use crate::rope_constants::Rope;

pub struct Config {
    json: Json,
    pub family: Family,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocabulary: usize,
    /// `max_position_embeddings`
    pub context: usize,
    pub epsilon: f64,
    pub activation: Activation,
    pub tied: bool,
}

impl Config {
    pub fn read(json: Json) -> Outcome<Config> {
        let architecture = json.list("architectures").and_then(|list| list.first()?.as_text());
        let architecture = architecture.ok_or("the configuration names no architecture")?;
        let family = FAMILIES.iter().find(|family| family.architecture == architecture);
        let family = *family.ok_or(format!("{architecture} is not supported"))?;
        let (hidden, heads) =
            (needed(&json, "hidden_size")?, needed(&json, "num_attention_heads")?);
        let kv_heads = json.size("num_key_value_heads").unwrap_or(heads);
        ensure(
            heads > 0 && kv_heads > 0 && heads % kv_heads == 0,
            "the numbers of heads do not fit",
        )?;
        let head_dim = json.size("head_dim").unwrap_or(hidden / heads);
        ensure(hidden > 0 && head_dim > 0, "a size is 0")?;
        Ok(Config {
            family,
            hidden,
            heads,
            kv_heads,
            head_dim,
            layers: needed(&json, "num_hidden_layers")?,
            vocabulary: needed(&json, "vocab_size")?,
            context: needed(&json, "max_position_embeddings")?,
            epsilon: json.float("rms_norm_eps").ok_or("the configuration has no rms_norm_eps")?,
            activation: activation(&json, &family)?,
            tied: json.truth("tie_word_embeddings").unwrap_or(family.tied),
            json,
        })
    }

    /// A size that the configuration must have.
    pub fn size(&self, key: &str) -> Outcome<usize> {
        needed(&self.json, key)
    }

    pub fn is(&self, architecture: &str) -> bool {
        self.family.architecture.strip_suffix("ForCausalLM") == Some(architecture)
    }

    /// What is under the root of attention's scale, D by default (SPEC 10.2).
    pub fn scale_root(&self) -> f64 {
        let given = self.json.float("query_pre_attn_scalar").filter(|_| self.family.gemma);
        given.unwrap_or(self.head_dim as f64)
    }

    /// The softcap of attention, and that of the logits.
    pub fn softcaps(&self) -> (Option<f32>, Option<f32>) {
        let softcap = |key: &str| self.json.float(key).map(|cap| cap as f32);
        (softcap("attn_logit_softcapping"), softcap("final_logit_softcapping"))
    }

    /// What `layer_types`, or a like list, says of the layer.
    fn named(&self, key: &str, layer: usize) -> Option<&str> {
        self.json.list(key)?.get(layer)?.as_text()
    }

    /// The window of a layer.
    pub fn window(&self, layer: usize) -> Option<usize> {
        let family = &self.family;
        if family.switched && !self.json.truth("use_sliding_window").unwrap_or(false) {
            return None;
        }
        let by_rule = match family.windows {
            Windows::None | Windows::Named => false,
            Windows::Every => true,
            Windows::AllBut(n) => !(layer + 1).is_multiple_of(n),
            Windows::Pattern => {
                !(layer + 1).is_multiple_of(self.json.size("sliding_window_pattern").unwrap_or(6))
            }
            Windows::FromLayer => layer >= self.json.size("max_window_layers").unwrap_or(0),
        };
        let can_be_named = !matches!(family.windows, Windows::None | Windows::Every);
        let named = self.named("layer_types", layer).filter(|_| can_be_named);
        let has_window = named.map_or(by_rule, |name| name == "sliding_attention");
        self.json.size("sliding_window").filter(|_| has_window)
    }

    /// Whether a layer rotates q and k.
    pub fn rotates(&self, layer: usize) -> bool {
        if !self.is("SmolLM3") {
            return true;
        }
        match self.json.list("no_rope_layers") {
            Some(layers) => layers.get(layer).and_then(Json::as_int) == Some(1),
            None => {
                !(layer + 1).is_multiple_of(self.json.size("no_rope_layer_interval").unwrap_or(4))
            }
        }
    }

    /// The rope of layers with a window, or of the others.
    pub fn rope(&self, windowed: bool) -> Outcome<Rope> {
        let by_type = self.family.rope_by_type;
        let layer_type = if windowed { "sliding_attention" } else { "full_attention" };
        let mut parameters: Vec<(String, Json)> = vec![];
        if let Some(new_style) = self.json.get("rope_parameters") {
            let of_type = new_style.get(layer_type).filter(|_| by_type);
            parameters
                .extend_from_slice(of_type.unwrap_or(new_style).as_object().unwrap_or_default());
        } else if windowed && by_type {
            let key = if self.is("Gemma3") { "rope_local_base_freq" } else { "rope_theta" };
            let theta = self.json.get(key).ok_or(format!("the configuration has no {key}"))?;
            parameters.push(("rope_theta".into(), theta.clone()));
        } else if let Some(scaling) = self.json.get("rope_scaling").and_then(Json::as_object) {
            parameters.extend_from_slice(scaling);
        }
        for key in ["rope_theta", "partial_rotary_factor", "original_max_position_embeddings"] {
            if parameters.iter().all(|(name, _)| name != key) {
                parameters.extend(self.json.get(key).map(|value| (key.to_string(), value.clone())));
            }
        }
        Rope::new(&Json::Object(parameters), self.head_dim, Some(self.context as f64))
    }

    /// Whether a layer has experts.
    pub fn is_sparse(&self, layer: usize) -> bool {
        match self.family.sparse {
            Sparse::None => false,
            Sparse::All => true,
            Sparse::Named => self.named("mlp_layer_types", layer) == Some("sparse"),
            Sparse::Stepped => {
                let step = self.json.size("decoder_sparse_step").unwrap_or(1);
                let dense = self.json.list("mlp_only_layers").unwrap_or_default();
                (layer + 1).is_multiple_of(step)
                    && !dense.iter().any(|number| number.as_int() == Some(layer as i64))
            }
        }
    }

    /// How the family routes (the table of SPEC 9.2).
    pub fn router(&self) -> Outcome<Router> {
        let experts = self.size("num_experts").or(self.size("num_local_experts"))?;
        let score = if self.is("GptOss") { Score::Logits } else { Score::Softmax };
        let said = self.family.renormalise.or(self.json.truth("norm_topk_prob"));
        let renormalise = said.ok_or("the configuration has no norm_topk_prob")?;
        let router = Router {
            renormalise,
            ..Router::new(experts, self.size("num_experts_per_tok")?, score)
        };
        router.check()?;
        Ok(router)
    }

    /// The inner size of an expert.
    pub fn expert_size(&self) -> Outcome<usize> {
        match self.family.sparse {
            Sparse::All => self.size("intermediate_size"),
            _ => self.size("moe_intermediate_size"),
        }
    }
}

fn needed(json: &Json, key: &str) -> Outcome<usize> {
    json.size(key).ok_or(format!("the configuration has no {key}"))
}

fn activation(json: &Json, family: &Family) -> Outcome<Activation> {
    if family.architecture == "GptOssForCausalLM" {
        let limit = json.float("swiglu_limit").filter(|limit| *limit > 0.0);
        let limit = limit.ok_or("the configuration has no swiglu_limit")? as f32;
        return Ok(Activation::ClampedQuickGelu { limit });
    }
    let key = if family.gemma { "hidden_activation" } else { "hidden_act" };
    Activation::named(json.text(key).ok_or(format!("the configuration has no {key}"))?)
}
