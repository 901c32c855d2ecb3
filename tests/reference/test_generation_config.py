"""The sampling that a model's makers advise: given whole, or refused by name (SPEC 12.1, 12.2)."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from reference.engine import Engine
from reference.errors import BitforbitError, ConfigError, WeightsError
from reference.generation_config import HARMLESS, NAMES, NEUTRAL, advised_sampling
from reference.model import load_model
from reference.sampling import Sampling
from tests.reference.loading.texts import ROOT

DRAFT = ROOT / "fixtures" / "tiny-draft"


def written(folder: Path, advice: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(advice))
    return folder


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        advised_sampling(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("advice", "expected"),
    [
        ({}, Sampling()),
        ({"do_sample": False, "max_new_tokens": 2048}, Sampling()),
        ({"do_sample": None, "temperature": 0.6}, Sampling()),
        ({"do_sample": False, "temperature": 0.6, "top_k": 3}, Sampling(top_k=3)),
        ({"repetition_penalty": 1.05}, Sampling(repetition_penalty=1.05)),
        ({"do_sample": True}, Sampling(1.0)),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, Sampling(1.0, 64, 0.95)),
        ({"do_sample": True, "temperature": 0}, Sampling()),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 1, "min_p": 0}
            | {"repetition_penalty": 1.1, "eos_token_id": [1, 2], "transformers_version": "5"},
            Sampling(0.6, 20, 1.0, 0.0, 1.1),
        ),
    ],
)
def test_an_advice(tmp_path: Path, advice: dict[str, Any], expected: Sampling) -> None:
    assert advised_sampling(written(tmp_path, advice)) == expected
    assert advised_sampling(tmp_path / "generation_config.json") == expected


@pytest.mark.parametrize(
    ("advice", "expected"),
    [
        ({"do_sample": 1}, "do_sample is 1; give true or false"),
        ({"do_sample": True, "temperature": -1}, "temperature: -1.0 is out of range; it must be"),
        ({"do_sample": True, "temperature": "0.7"}, "temperature is '0.7'; give a number"),
        ({"do_sample": True, "temperature": True}, "temperature is True; give a number"),
        ({"do_sample": True, "temperature": 1e39}, "temperature: 1e+39 is out of range"),
        ({"top_k": 2.5}, "top_k: 2.5 is no whole number"),
        ({"top_k": -1}, "top_k: -1 is out of range; it must be 0 or more"),
        ({"top_p": 0}, "top_p: 0.0 is out of range; it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p: 1.5 is out of range"),
        ({"min_p": [0.1]}, "min_p is [0.1]; give a number"),
        ({"repetition_penalty": 0}, "repetition_penalty: 0.0 is out of range"),
        ({"num_beams": 4}, "num_beams is 4; it is not supported; remove it, or give 1"),
        ({"typical_p": 0.9}, "typical_p is 0.9; it is not supported"),
        ({"stop_strings": ["\n"]}, "stop_strings is ['\\n']; it is not supported"),
        ({"token_healing": 0}, "token_healing is 0; it is not supported; remove it, or give False"),
        ({"min_length": False}, "min_length is False; it is not supported"),
        ({"watermarking_config": {}}, "watermarking_config is {}; this key is not supported"),
        ({"of_tomorrow": 1}, "of_tomorrow is 1; this key is not supported"),
        ([], "this is [], not a JSON object"),
    ],
)
def test_what_cannot_be_given_is_refused_by_name(
    tmp_path: Path, advice: object, expected: str
) -> None:
    path = written(tmp_path, advice) / "generation_config.json"
    assert refusal(path).startswith(f"{path}: {expected}")


def test_what_is_refused_keeps_nobody_from_loading_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DRAFT, folder)
    written(folder, {"do_sample": True, "temperature": -1, "num_beams": 4, "eos_token_id": 3})
    assert load_model(folder).eos_tokens == (3,)


def test_values_that_change_nothing_are_taken(tmp_path: Path) -> None:
    for neutral in (NEUTRAL, dict.fromkeys(NEUTRAL), {"typical_p": 1.0, "epsilon_cutoff": 0.0}):
        advice = {"do_sample": True, **neutral, **dict.fromkeys(HARMLESS, 7)}
        assert advised_sampling(written(tmp_path, advice)) == Sampling(1.0)


def test_every_key_of_transformers_is_known(tmp_path: Path) -> None:
    """What its class writes, and all that it holds."""
    config: Any = GenerationConfig
    config = config(do_sample=True, temperature=0.7, top_k=9)
    config.save_pretrained(tmp_path)
    assert advised_sampling(tmp_path) == Sampling(0.7, 9)
    every = {name: value for name, value in config.to_dict().items() if value is not None}
    assert advised_sampling(written(tmp_path, every)) == Sampling(0.7, 9)
    source = inspect.getsource(GenerationConfig.__init__)
    named = [name for name in (*NAMES, *NEUTRAL, *HARMLESS) if f'"{name}"' in source]
    assert len(named) > 35, "most names are those of transformers"


def test_no_advice_is_no_advice(tmp_path: Path) -> None:
    assert "generation_config.json: it cannot be read" in refusal(tmp_path)
    assert "it cannot be read" in refusal(tmp_path / "nowhere")


def gguf(path: Path, **values: Any) -> Path:
    out = GGUFWriter(path, "llama")
    for name, value in values.items():
        kinds: Any = {int: out.add_int32, str: out.add_string}
        kinds.get(type(value), out.add_float32)(f"general.sampling.{name}", value)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def test_a_gguf_file_advises_in_names_of_its_own(tmp_path: Path) -> None:
    """Their float32 are the decimals that were meant; nothing says `do_sample`."""
    path = gguf(tmp_path / "m.gguf", temp=0.6, top_k=20, top_p=0.95, min_p=0.01, penalty_repeat=1.1)
    assert advised_sampling(path) == Sampling(0.6, 20, 0.95, 0.01, 1.1)
    path = gguf(tmp_path / "m.gguf", top_k=64, penalty_last_n=-1, mirostat=0, mirostat_tau=5.0)
    assert advised_sampling(path) == Sampling(1.0, 64)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "it has no general.sampling. keys; give the generation_config.json"),
        ({"mirostat": 2}, "general.sampling.mirostat is 2; it is not supported"),
        ({"penalty_last_n": 64}, "general.sampling.penalty_last_n is 64; it is not supported"),
        ({"sequence": "top_k;temp"}, "general.sampling.sequence is 'top_k;temp'; this key is not"),
        ({"temp": "hot"}, "general.sampling.temp is 'hot'; give a number"),
        ({"temp": float("nan")}, "temperature: nan is out of range"),
    ],
)
def test_a_gguf_file_is_refused(tmp_path: Path, values: dict[str, Any], expected: str) -> None:
    path = gguf(tmp_path / "m.gguf", **values)
    assert refusal(path).startswith(f"{path}: {expected}")


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"{}")
    with pytest.raises(WeightsError, match=r"m\.gguf"):
        advised_sampling(path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from([*NAMES, "do_sample", *NEUTRAL]) | st.text(max_size=8),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=3)
        | st.lists(st.integers(), max_size=2),
        max_size=4,
    )
)
def test_any_file_gives_a_sampling_or_one_line(tmp_path: Path, advice: dict[str, Any]) -> None:
    said = ""
    try:
        advised_sampling(written(tmp_path, advice))
    except BitforbitError as error:
        said = str(error)
    assert "\n" not in said


def test_the_engine_is_greedy_whatever_is_advised(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DRAFT, folder)
    written(folder, {"do_sample": True, "temperature": 1.5})
    greedy = Engine(load_model(DRAFT)).generate("And God", 12).tokens
    engine = Engine(load_model(folder))
    assert engine.generate("And God", 12).tokens == greedy
    warm = advised_sampling(folder)
    assert engine.generate("And God", 12, sampling=warm, seed=1).tokens != greedy
