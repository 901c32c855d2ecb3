"""The sampling that a model's makers advise, for those who ask for it (SPEC 12.1, 12.2).

It is never used by itself: the engine is greedy unless it is told otherwise. Advice is given whole
or refused by name, so that nobody takes half of it for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reference.config import Section
from reference.errors import ConfigError, RequestError
from reference.loading.gguf.file import open_gguf
from reference.loading.strict_json import read_object
from reference.sampling import Sampling

NAMES = {name: name for name in Sampling.__annotations__}
"""Keys of `generation_config.json`, by the fields of `Sampling`."""

GGUF_PREFIX = "general.sampling."
GGUF_NAMES = {**NAMES, "temperature": "temp", "repetition_penalty": "penalty_repeat"}
"""Keys of GGUF files without their prefix, by the fields of `Sampling`."""

NEUTRAL: Mapping[str, Any] = {
    "bad_words_ids": [],
    "begin_suppress_tokens": [],
    "constraints": [],
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "force_words_ids": [],
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "mirostat": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "penalty_last_n": -1,
    "remove_invalid_values": False,
    "sequence_bias": {},
    "stop_strings": [],
    "suppress_tokens": [],
    "token_healing": False,
    "typical_p": 1,
    "xtc_probability": 0,
}
"""Keys that are not supported, and the value of each that changes no token."""

HARMLESS = frozenset(
    {
        # Where a text begins and ends, and how long the caller lets it become.
        "bos_token_id",
        "decoder_start_token_id",
        "eos_token_id",
        "max_length",
        "max_new_tokens",
        "max_time",
        "pad_token_id",
        # Of beams, of which there is one.
        "diversity_penalty",
        "early_stopping",
        "length_penalty",
        "num_beam_groups",
        # Of samplers that are off.
        "mirostat_eta",
        "mirostat_tau",
        "xtc_threshold",
        # What a library returns, and how it computes.
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_lookbehind",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "disable_compile",
        "is_assistant",
        "low_memory",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "renormalize_logits",
        "return_dict_in_generate",
        "return_legacy_cache",
        "target_lookbehind",
        "transformers_version",
        "trust_remote_code",
        "use_cache",
    }
)
"""Keys that do not affect which token is chosen."""


def advised_sampling(path: Path) -> Sampling:
    """What a folder, a `generation_config.json` or a GGUF file advises (SPEC 12.1, 12.2).

    Raises ConfigError where it advises nothing, or something unsupported, and WeightsError for a
    file that is no GGUF.
    """
    if path.suffix == ".gguf":
        return _of_gguf(path)
    file = path / "generation_config.json" if path.is_dir() else path
    keys = Section(read_object(file, ConfigError), str(file))
    return _sampling(keys, NAMES, str(file), sampled=keys.flag("do_sample"))


def _of_gguf(path: Path) -> Sampling:
    """The sampling that the metadata of a GGUF file advises (SPEC 12.2)."""
    metadata = open_gguf(path).metadata
    given = {
        name.removeprefix(GGUF_PREFIX): value
        for name, value in metadata.items()
        if name.startswith(GGUF_PREFIX)
    }
    if not given:
        raise ConfigError(
            f"{path}: it has no {GGUF_PREFIX} keys; give the generation_config.json that belongs "
            "to the model"
        )
    return _sampling(Section(given, str(path), GGUF_PREFIX), GGUF_NAMES, str(path), sampled=True)


def _sampling(keys: Section, names: Mapping[str, str], where: str, sampled: bool) -> Sampling:
    """The sampling of the keys that are given; without them, temperature 1 and nothing else.

    names: the keys, by the fields of `Sampling`. sampled: False is greedy.
    """
    found: dict[str, Any] = {"temperature": 1}
    for name, key in names.items():
        if keys.has(key):
            found[name] = keys.value(key)
            if type(found[name]) not in (int, float):
                keys.refuse(key, "give a number")
    for key, neutral in NEUTRAL.items():
        if keys.has(key):
            value = keys.value(key)
            if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
                keys.refuse(key, f"it is not supported; remove it, or give {neutral}")
    keys.refuse_the_rest(HARMLESS)
    try:
        return Sampling(**(found if sampled else found | {"temperature": 0}))
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from None
