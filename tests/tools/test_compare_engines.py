"""Other engines on the same weights: the bounds hold, and each variant is what closes the gap."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.config import parse_config
from reference.families import FAMILIES
from reference.rotary import rope_constants
from tools import compare_engines
from tools.compare_engines import LLAMA_CPP_LIMIT, PAGE, Row, Step
from tools.engines import llama_cpp, mechanisms
from tools.engines.miniatures import MINIATURES, tokens_of, write

COUNT = 40


@pytest.fixture
def asked() -> None:
    pytest.importorskip("xllamacpp")
    pytest.importorskip("transformers")


def test_every_family_has_a_miniature_and_every_miniature_is_on_the_page() -> None:
    assert {miniature.architecture for miniature in MINIATURES.values()} == set(FAMILIES)
    for name in MINIATURES:
        for count in compare_engines.COUNTS:
            assert f"\n| {name} | {count} |" in PAGE.read_text()


@pytest.mark.parametrize("name", MINIATURES)
def test_products_are_near_the_angles_that_they_stand_for(name: str) -> None:
    """A relative error of a few roundings for each pair; scaled as the configuration says."""
    rope = parse_config(MINIATURES[name].raw, name).rope
    positions = np.arange(700)
    inv_freq = rope_constants(rope)[0].astype(np.float64)
    found = mechanisms.angles(rope, positions)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, positions[:, None] * inv_freq, rtol=3e-6)


@pytest.mark.parametrize(
    ("transformers", "left", "failures"),
    [(1e-6, 9e-7, 0), (3e-6, 9e-7, 1), (1e-6, 2e-6, 1), (np.nan, np.nan, 2)],
)
def test_what_exceeds_a_bound_fails(transformers: float, left: float, failures: int) -> None:
    row = Row("any", 40, 1.0, transformers, (Step("as it is", 1.0), Step("last", left)))
    assert len(list(row.failures)) == failures


def test_a_family_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        compare_engines.main(["--only", "llama,gemma9"])
    assert ended.value.code == 2
    assert "no gemma9; there are llama, mistral" in capsys.readouterr().err


def test_a_missing_engine_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    llama_cpp._library.cache_clear()
    assert compare_engines.main(["--only", "llama"]) == 2
    assert "xllamacpp is not installed" in capsys.readouterr().err


# ------------------------------------------------------------------------ with both engines there


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss, limit", "phi3, longrope"])
def test_bounds_hold_with_the_variants_and_not_without(name: str, tmp_path: Path) -> None:
    (row,) = compare_engines.compare(name, tmp_path, [COUNT])
    assert list(row.failures) == []
    own = {mechanism.name for mechanism in MINIATURES[name].mechanisms}
    for before, after in zip(row.steps[:-1], row.steps[1:], strict=True):
        if after.name in own:
            assert before.difference > 10 * LLAMA_CPP_LIMIT
            assert after.difference < before.difference / 2


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.usefixtures("asked")
def test_llama_cpp_does_what_it_is_asked(tmp_path: Path) -> None:
    """Otherwise the comparison might be with half-precision keys, or with other logits."""
    file, tokens = write("gemma2", tmp_path), tokens_of(COUNT)
    plain = llama_cpp.ask(file, tokens)
    watched = llama_cpp.ask(file, tokens, mechanisms.GATES)
    assert plain.logits.tobytes() == watched.logits.tobytes()
    assert sorted(watched.seen) == [f"ffn_gate-{layer}" for layer in range(4)]
    assert {gates.shape for gates in watched.seen.values()} == {(COUNT, 96)}
    for options in ({"half_cache": True}, {"flash": True}):
        other: Any = llama_cpp.ask(file, tokens, None, **options)
        assert compare_engines.difference(plain.logits, other.logits) > 1e-6
    assert plain.logits[:7].tobytes() == llama_cpp.ask(file, tokens[:7]).logits.tobytes()
    with pytest.raises(llama_cpp.EngineError, match=r"does not load it.*nothing\.gguf"):
        llama_cpp.ask(tmp_path / "nothing.gguf", tokens)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.usefixtures("asked")
def test_the_table_of_gelu_is_that_of_ggml(tmp_path: Path) -> None:
    llama_cpp.ask(write("llama", tmp_path), [1])
    package: Any = sys.modules["xllamacpp"]
    library = ctypes.CDLL(package.xllamacpp.__file__)
    entries = (ctypes.c_uint16 * 65536).in_dll(library, "ggml_table_gelu_f16")
    theirs = np.frombuffer(bytes(entries), np.float16).astype(np.float32)
    x = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    inside = np.abs(x) < 10
    assert inside.sum() > 37000
    assert np.array_equal(mechanisms.gelu_by_table(x[inside]), theirs[inside])
