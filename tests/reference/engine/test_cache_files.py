"""A prompt's cache in a file, taken up by another engine (SPEC 11.4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference.engine import Engine
from reference.errors import CacheError
from tests.reference.engine.decoding import generate
from tests.reference.models import LLAMA_SMALL, QWEN3_SMALL, small, tokens_of
from tests.reference.traffic import check_empty

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def test_a_cache_file_is_taken_up_by_another_engine(tmp_path: Path) -> None:
    model, path = small(QWEN3_SMALL), tmp_path / "prompt.cache"
    prompt = tokens_of(40, 32).tolist()
    engine = Engine(model, page_size=4)
    with pytest.raises(CacheError, match="no computed prompt to save"):
        engine.save_cache(path)
    engine.generate(prompt, 1, stop_tokens=())
    engine.save_cache(str(path))
    other = Engine(model, page_size=16)
    other.restore_cache(str(path))
    result = other.generate([*prompt, 3], 5, stop_tokens=())
    assert (result.cache_n, result.prompt_n) == (40, 1)
    assert result.tokens == generate(model, [*prompt, 3], 5).tokens
    with pytest.raises(CacheError):
        Engine(small(LLAMA_SMALL)).restore_cache(path)
    check_empty(other)


def test_a_file_remembers_that_it_is_not_exact(tmp_path: Path) -> None:
    model, path = small(QWEN3_SMALL), tmp_path / "prompt.cache"
    prompt = tokens_of(600, 32).tolist()
    engine = Engine(model)
    engine.generate(prompt, 1)
    engine.save_cache(path)
    other = Engine(model)
    other.restore_cache(path)
    assert other.generate(prompt[:100], 1).cache_n == 0
    assert other.generate([*prompt, 5], 1, exact_prefill=True).cache_n == 100
    assert other.generate([*prompt, 5, 5], 1, cache_salt="x").cache_n == 0
    fresh = Engine(model)
    fresh.restore_cache(path)
    assert fresh.generate([*prompt, 5], 1).cache_n == 600
