"""What comparing 64 tokens is worth: the experiment's own arithmetic and its parts (SPEC 20)."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from conformance.backends.composed import OwnOrderBackend
from conformance.calibration import gate
from conformance.calibration.gate import (
    PROMPT,
    Row,
    Task,
    as_json,
    interval,
    judged,
    prompts,
    summary,
)
from conformance.cli import main
from conformance.golden import Golden
from conformance.operations import Sessions
from conformance.variants import variants

SHORT = 6


@cache
def short_task() -> Task:
    """A task of a few tokens, its noise such as the goldens' is."""
    text = np.concatenate([prompts(2)[1], np.arange(3, 2 + SHORT)])
    backend = OwnOrderBackend()
    about = gate.answer(backend, Sessions(backend), Task(text, EMPTY, EMPTY))
    first = about.argmax(axis=1)
    forced = {"row": np.array([0]), "token": np.array([9]),
              "margin": np.ones(1, np.float32), "noise": np.ones(1, np.float32)}  # fmt: skip
    tokens = replace(EMPTY, outputs={"tokens": first}, gauges=forced, terms={"noise": "noise(7)"})
    noise = {"noise": np.full(about.shape, 200, np.float32)}
    logits = replace(EMPTY, outputs={"y": about}, gauges=noise, terms={"noise": "noise(7)"})
    return Task(text, tokens, logits)


EMPTY = Golden("a/b/c", "20", "b", {}, {}, {}, ())


def test_wilsons_interval() -> None:
    """Against the figures of a textbook: 0 of 10 and 5 of 10."""
    assert interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert interval(10, 10)[1] == pytest.approx(1)


def test_prompts_are_different_pieces() -> None:
    found = prompts(5)
    assert all(len(p) == PROMPT for p in found)
    assert len({tuple(p) for p in found}) == 5


def test_variants_and_faults_of_the_experiment_exist() -> None:
    assert set(gate.VARIANTS) <= {v.name for v in variants()}
    assert len(gate.model_faults()) >= 15


def test_a_variant_passes_and_a_fault_does_not() -> None:
    good = judged("reversed", False, [short_task()])
    assert (good.runs, good.naive, good.tokens, good.noise) == (1, [], [], [])
    bad = judged("model-qk-norm-skipped", True, [short_task()])
    assert (bad.naive, bad.tokens, bad.noise) == ([0], [0], [0])


def test_the_summary_counts() -> None:
    rows = [
        Row("a", "", False, 4, naive=[1], tokens=[], noise=[]),
        Row("b", "", True, 4, naive=[], tokens=[], noise=[0, 1, 2, 3]),
        Row("c", "", True, 4, naive=[2], tokens=[2], noise=[0, 1, 2, 3]),
    ]
    found = summary(rows)
    assert (found["naive"]["false_alarms"], found["naive"]["runs"]) == (1, 4)
    assert (found["naive"]["seen"], found["naive"]["seen_by_one"]) == (1, 0.125)
    assert found["noise"]["seen_by_one"] == 1
    assert json.loads(json.dumps(as_json(rows)))["summary"] == found


@pytest.mark.parametrize(("alarm", "code"), [([], 0), ([1], 1)])
def test_the_command(
    alarm: list[int], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Any] = [
        Row("good", "", False, 2, naive=[0], tokens=alarm),
        Row("bad", "", True, 2, noise=[0, 1]),
    ]
    monkeypatch.setattr(gate, "measure", lambda *about: iter(rows))
    assert main(["gate", "--prompts", "2"]) == code
    out = capsys.readouterr().out
    assert "naive: 1 false alarms in 2 runs, 50.0%" in out
    assert "noise: 0 false alarms" in out
