"""Requests and engines that cannot be are refused in one line, before they begin."""

from __future__ import annotations

from typing import Any

import pytest

from reference.engine import Engine
from reference.errors import RequestError
from reference.sampling import Sampling
from tests.reference.engine.decoding import PROMPT
from tests.reference.models import QWEN2_SMALL, QWEN3_SMALL, small, tiny

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": -1}, "seed: -1 is out of range"),
        ({"seed": 2**64}, "seed"),
        ({"request": 2**32}, "request"),
        ({"seed": 0.5}, "^seed: 0.5 is no whole number"),
        ({"seed": "1"}, "^seed: '1' is no whole number"),
        ({"request": None}, "^request: None is no whole number"),
        ({"stop_tokens": 5}, "^stop_tokens: 5 is no list"),
        ({"stop_tokens": [[1]]}, r"^stop_tokens: \[1\] is no whole number"),
        ({"sampling": None}, "^sampling: None is no `Sampling`"),
        ({"cache_salt": "\ud800"}, r"^cache_salt: '\\ud800' is no Unicode text"),
        ({"cache_salt": None}, "^cache_salt: None is no Unicode text"),
        ({"cache_salt": 5}, "^cache_salt: 5 is no Unicode text"),
        ({"exact_prefill": "no"}, "^exact_prefill: 'no' is neither true nor false"),
        ({"cache_prompt": None}, "^cache_prompt: None is neither true nor false"),
        ({"on_text": None}, "^on_text: None cannot be called"),
        ({"on_token": 5}, "^on_token: 5 cannot be called"),
        ({"stop": None}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop": ["a", ""]}, "stop: an empty text"),
        ({"stop": ""}, "stop: an empty text"),
        ({"stop": "."}, "stop: the model has no tokenizer"),
    ],
)
def test_what_would_only_fail_later_is_refused_at_once(options: dict[str, Any], named: str) -> None:
    engine = Engine(small(QWEN3_SMALL))
    with pytest.raises(RequestError, match=named):
        engine.submit(PROMPT, 5, **options)
    assert not engine.busy


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, r"^tokens: at least one"),
        ([0, 32], {}, r"^tokens: id 32"),
        ([-1], {}, r"^tokens: id -1"),
        ([1] * 257, {}, r"^tokens: 257 positions"),
        (PROMPT, {"max_new_tokens": 0}, r"^max_new_tokens: 0 "),
        (PROMPT, {"max_new_tokens": -3}, r"^max_new_tokens: -3 "),
        (PROMPT, {"max_new_tokens": 1.5}, r"^max_new_tokens: 1.5 is no whole number"),
        (PROMPT, {"max_new_tokens": "3"}, r"^max_new_tokens: '3' is no whole number"),
        (PROMPT, {"temprature": 0.5}, r"^temprature: there is no such option; there are sampling,"),
        ("text", {}, r"^prompt: .*tokenizer\.json"),
        ("", {}, r"^prompt: .*tokenizer\.json"),
    ],
)
def test_a_bad_request_is_refused_in_one_line(
    prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as error:
        Engine(small(QWEN2_SMALL)).generate(prompt, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prompt", [[1.7], [[1, 2]], [None], ["7"], [True]])
def test_ids_that_are_no_integers_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match=r"^(tokens|prompt): ") as error:
        Engine(small(QWEN2_SMALL)).generate(prompt, 1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prompt", ["", "\ud800"])
def test_text_that_gives_no_tokens_is_refused(prompt: str) -> None:
    with pytest.raises(RequestError) as error:
        Engine(tiny()).generate(prompt, 1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.5},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"temperature": "a"},
        {"temperature": 10**400},
        {"top_p": None},
        {"top_k": 2.0},
        {"min_p": 0.5j},
    ],
)
def test_bad_sampling_is_refused_in_one_line(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(RequestError, match=f"^{name}: ") as error:
        Engine(small(QWEN2_SMALL)).generate(PROMPT, sampling=Sampling(**values))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_bytes": 0}, "^cache_bytes: 0 is out of range"),
        ({"max_batched_tokens": 0}, "^max_batched_tokens: 0 is out of range"),
        ({"cache_reuse": -1}, "^cache_reuse: -1 is out of range"),
        ({"draft_tokens": 0}, "^draft_tokens: 0 is out of range"),
        ({"cache_bytes": 1e9}, "^cache_bytes: 1000000000.0 is no whole number"),
        ({"cache_bytes": "1GiB"}, "^cache_bytes: '1GiB' is no whole number"),
        ({"max_batched_tokens": 2.5}, "^max_batched_tokens: 2.5 is no whole number"),
        ({"page_size": 16.0}, "^page_size: 16.0 is no whole number"),
        ({"page_size": 3}, "^page_size: 3 "),
        ({"kv_dtype": "int3"}, "^kv_dtype: 'int3' "),
        ({"exact_prefill": "no"}, "^exact_prefill: 'no' is neither true nor false"),
        ({"draft": "n-gram"}, "^draft: 'n-gram' is none of"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        Engine(small(QWEN2_SMALL), **options)
    assert "\n" not in str(error.value)


def test_a_refused_request_leaves_the_engine() -> None:
    engine = Engine(small(QWEN2_SMALL))
    before = engine.generate(PROMPT, 5, stop_tokens=()).tokens
    with pytest.raises(RequestError):
        engine.generate([99], 5)
    assert engine.generate(PROMPT, 5, stop_tokens=()).tokens == before
