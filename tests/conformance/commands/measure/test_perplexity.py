"""`bitforbit perplexity`: one row, a base and what is compared with it, and its refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from conformance.commands.measure.models import encoded
from reference.measure.perplexity import Evaluation, Scores
from reference.tokenizer import Tokenizer
from tests.conformance.command_line import MODEL, Run

SMALL = ("perplexity", "-m", MODEL, "-c", "32", "--chunks", "4", "-t", "1")


def row(run: Run, *arguments: str) -> dict[str, Any]:
    code, out, err = run(*SMALL, "-o", "jsonl", *arguments)
    assert (code, err) == (0, "")
    (line,) = out.splitlines()
    told: dict[str, Any] = json.loads(line)
    return told


def test_a_row_says_what_a_figure_needs(run: Run) -> None:
    told = row(run)
    assert (told["tokens"], told["repetitions"], told["threads"]) == (4 * 15, 4, 1)
    assert (told["cache_n"], told["prompt_n"]) == (0, 4 * 31)
    assert (len(told["digest"]), told["model"], told["text"]) == (64, "tiny-draft", "held-out.txt")
    assert told["window_least"] < told["perplexity"] < told["window_most"]
    code, out, _ = run(*SMALL)
    assert code == 0
    assert f"{told['perplexity']:.4f} ± {told['perplexity_error']:.4f}" in out
    assert told["digest"][:12] in out


def test_a_base_and_what_is_compared_with_it(run: Run, tmp_path: Path) -> None:
    base = str(tmp_path / "base")
    saved = row(run, "--save-logits", base)
    same = row(run, "--kl-divergence", base)
    assert same["perplexity"] == saved["perplexity"]
    assert same["base_digest"] == saved["digest"]
    assert (same["kl_largest"], same["same_top"], same["ratio"]) == (0.0, 1.0, 1.0)
    other = row(run, "--kl-divergence", base, "--weights", "int4")
    assert 0 < other["kl_q50"] < other["kl_q99.9"] <= other["kl_largest"]
    assert other["ratio"] == pytest.approx(other["perplexity"] / saved["perplexity"], rel=1e-12)
    assert other["digest"] != other["base_digest"]
    code, out, _ = run(*SMALL, "--kl-divergence", base, "--weights", "int4")
    assert code == 0
    assert "| same top |" in out
    wrong = run.refused(*SMALL, "--kl-divergence", base, "--stride", "8")
    assert "stride is 0, and here it is 8" in wrong


@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_another_engine_is_compared(run: Run, tmp_path: Path, weights: str) -> None:
    """The engine's own backend has no divergence; plain float32 has one of its rounding."""
    base = str(tmp_path / "base")
    saved = row(run, "--save-logits", base, "--weights", weights)
    same = row(run, "--kl-divergence", base, "--backend", "numpy", "--weights", weights)
    assert (same["kl_largest"], same["same_top"], same["ratio"]) == (0.0, 1.0, 1.0)
    assert same["perplexity"] == saved["perplexity"]
    assert (same["backend"], same["digest"], same["arithmetic"]) == ("numpy", "", None)
    other = row(run, "--kl-divergence", base, "--backend", "numpy-float32", "--weights", weights)
    assert 0 < other["kl_mean"] < 1e-2 if weights == "int4" else 0 < other["kl_mean"] < 1e-9
    assert run(*SMALL, "--backend", "numpy")[0] == 0


def test_another_engines_logits_may_be_the_base(run: Run, tmp_path: Path) -> None:
    base = str(tmp_path / "base")
    row(run, "--save-logits", base, "--backend", "numpy")
    told = row(run, "--kl-divergence", base)
    assert (told["kl_largest"], told["base_digest"]) == (0.0, "")
    code, out, _ = run(*SMALL, "--kl-divergence", base)
    assert (code, "| - | 1.0000" in out) == (0, True)


OTHER = """
import numpy as np

class Session:
    def reset(self): pass
    def forward(self, tokens, attention): {forward}

class Backend:
    numerics = {{"accumulator": "float32"}}
    def load(self, model, weights): {load}
"""


@pytest.mark.parametrize(
    ("load", "forward", "part"),
    [
        ("raise OSError('no disk')", "pass", "it failed (OSError: no disk)"),
        ("return Session()", "raise ValueError('too long')", "it failed (ValueError: too long)"),
        ("return Session()", "return np.zeros((2, 3), np.float32)", "of shape (2, 3); it must be"),
        ("return Session()", "return np.zeros((31, 1024))", "float64 of shape (31, 1024); it must"),
        ("return Session()", "return [1]", "int64 of shape (1,); it must be"),
        ("return object()", "pass", "it has no `reset`"),
    ],
)
def test_another_engines_failure_is_one_line(
    run: Run, tmp_path: Path, load: str, forward: str, part: str
) -> None:
    file = tmp_path / "other.py"
    file.write_text(OTHER.format(load=load, forward=forward))
    assert part in run.refused(*SMALL, "--backend", str(file))


def test_an_interrupt_keeps_the_windows(run: Run, monkeypatch: Any, tmp_path: Path) -> None:
    whole = Evaluation.run

    def interrupted(evaluation: Evaluation) -> Iterator[Scores]:
        scores = whole(evaluation)
        yield next(scores)
        yield next(scores)
        raise KeyboardInterrupt

    monkeypatch.setattr(Evaluation, "run", interrupted)
    base = tmp_path / "base"
    code, out, err = run(*SMALL, "-o", "json", "--save-logits", str(base))
    assert code == 2
    assert err == "bitforbit: interrupted; 1 row was kept\n"
    assert [told["repetitions"] for told in json.loads(out)] == [2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("-c", "5000"), "context: 5000 is out of range"),
        (("--stride", "32"), "stride: 32 is out of range"),
        (("-f", "/nowhere"), "--file: cannot read /nowhere"),
        (("--kl-divergence", "/nowhere"), "/nowhere: it is no file of logits"),
        (("--save-logits", "/nowhere/x"), "--save-logits: /nowhere is no folder"),
        (("--save-logits", "."), ".: it is no name of a file"),
        (("--save-logits", "/"), "/: it is no name of a file"),
        (("--backend", "torchh"), "torchh: "),
        (("--backend", "numpy", "--arithmetic", "float32"), "neither --memory nor --arithmetic"),
        (("--process", "false"), "no hello"),
        (("-m", "fixtures/random-llama"), "it has no tokenizer.json"),
    ],
)
def test_bad_values_are_refused(run: Run, arguments: tuple[str, ...], part: str) -> None:
    assert part in run.refused(*SMALL, *arguments)


def test_a_text_too_short_is_refused(run: Run, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("a b c")
    assert "do not fill a window of 32" in run.refused(*SMALL, "-f", str(short))


def test_the_token_before_every_text_is_told_from_the_text() -> None:
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="a")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    assert encoded(Tokenizer(library), "a b") == ([1, 2], None)
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    assert encoded(Tokenizer(library), "a b") == ([0, 1, 2], 0)
