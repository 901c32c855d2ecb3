"""What a run did, pass by pass, and what each user felt of it (SPEC 14.2)."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.engine import Engine
from reference.errors import RequestError
from reference.trace import Latency, Pass, Trace, draw_traces
from tests.reference.models import QWEN3_SMALL, small

HAND = Trace(
    [
        Pass(0.0, 1.0, ((1, "prefill", 5), (2, "prefill", 3)), {1: 1, 2: 0}),
        Pass(1.0, 3.0, ((1, "decode", 4), (2, "prefill", 2)), {1: 3, 2: 1}),
        Pass(3.5, 4.0, ((2, "decode", 1),), {2: 1}),
        Pass(4.0, 10.25, ((1, "decode", 1), (2, "decode", 1)), {1: 1, 2: 1}),
    ]
)


def test_tokens_of_one_pass_come_at_once() -> None:
    assert HAND.times(1) == [1.0, 3.0, 3.0, 3.0, 10.25]
    assert HAND.times(2) == [3.0, 4.0, 10.25]
    assert HAND.times(3) == []
    assert HAND.numbers == [1, 2]


def test_latency_is_of_the_gaps_between_tokens() -> None:
    """By hand: request 1 has the gaps 2, 0, 0, 7.25, request 2 has 1, 6.25."""
    found = HAND.latency([1])
    assert (found.p50, found.longest) == (1.0, 7.25)
    assert found.p99 == pytest.approx(0.97 * 7.25 + 0.03 * 2)
    assert HAND.latency([1, 2]).p50 == 1.5
    assert HAND.latency([1, 2]).longest == 7.25
    assert HAND.latency([2]).longest == 6.25


def test_latency_since_a_time_counts_the_gap_that_spans_it() -> None:
    assert HAND.latency([1], since=3.0) == Latency(7.25, 7.25, 7.25)
    assert HAND.latency([1], since=2.9).p50 == 1.0
    assert HAND.latency([2], since=3.0).p50 == (1 + 6.25) / 2


@pytest.mark.parametrize("requests", [[], [3], [7, 8]])
def test_no_gap_is_no_time(requests: list[int]) -> None:
    assert HAND.latency(requests) == Latency(0.0, 0.0, 0.0)
    assert Trace().latency([1]) == Latency(0.0, 0.0, 0.0)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60))
def test_quantiles_are_those_of_the_gaps(gaps: list[int]) -> None:
    ends = np.cumsum([1, *gaps]).tolist()
    trace = Trace([Pass(end - 1, end, ((4, "decode", 1),), {4: 1}) for end in ends])
    found = trace.latency([4])
    assert found.p50 == median(gaps)
    assert found.longest == max(gaps)
    assert found.p50 <= found.p99 <= found.longest
    assert sum(gap > found.p99 for gap in gaps) <= 0.01 * len(gaps) + 1


def test_a_line_for_each_pass() -> None:
    assert HAND.lines() == [
        "    0.000 s   1000.0 ms  #1 P5  #2 P3",
        "    1.000 s   2000.0 ms  #1 D4  #2 P2",
        "    3.500 s    500.0 ms  #2 D1",
        "    4.000 s   6250.0 ms  #1 D1  #2 D1",
    ]


def test_an_engine_tells_its_trace() -> None:
    """All that was computed and all that was chosen, in passes one behind the other."""
    engine, trace = Engine(small(QWEN3_SMALL), max_batched_tokens=8, draft="ngram"), Trace()
    engine.on_pass = trace.add
    requests = [engine.submit([5, 1, 5, 1, 5 + i] * 3, 10, stop_tokens=()) for i in range(3)]
    while engine.busy:
        engine.step()
    for request in requests:
        number, result = request.task.number, request.result()
        assert len(trace.times(number)) == len(result.tokens) == 10
        own = [s for p in trace.passes for s in p.shares if s[0] == number]
        assert sum(n for _, kind, n in own if kind == "prefill") == result.prompt_n
        decoded = [n for _, kind, n in own if kind == "decode"]
        assert len(decoded) == result.draft.passes
        assert sum(decoded) == result.draft.passes + result.draft.drafted
    for before, after in zip(trace.passes, trace.passes[1:], strict=False):
        assert before.started < before.ended <= after.started


# drawn


def test_a_drawing_has_every_share(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for count in (4, 2):
        trace = Trace(HAND.passes[:count])
        trace.draw(tmp_path / "some.svg")
        text = (tmp_path / "some.svg").read_text()
        bars = text.count("PolyCollection_")
        assert bars == sum(len(p.shares) for p in trace.passes)
        for number in (1, 2):
            strokes = ElementTree.fromstring(text).findall(f".//*[@id='tokens-{number}']//{{*}}use")
            assert len(strokes) == len(trace.times(number))
    HAND.draw(tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


def test_traces_are_drawn_below_each_other(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_traces({"first": HAND, "second": HAND, "none": Trace()}, tmp_path / "both.svg")
    text = (tmp_path / "both.svg").read_text()
    assert text.count("<!-- request 1 -->") == text.count("<!-- request 2 -->") == 2
    assert [text.count(f"<!-- {name} -->") for name in ("first", "second", "none")] == [1, 1, 1]
    assert text.count("<!-- prefill -->") == text.count("<!-- decode -->") == 1


@pytest.mark.parametrize("name", ["trace.doc", "missing/trace.svg"])
def test_where_nothing_can_be_drawn(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(RequestError, match="cannot draw there") as error:
        HAND.draw(tmp_path / name)
    assert "\n" not in str(error.value)


def test_no_traces_are_no_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(RequestError, match=r"a\.png: there is no trace to draw; give one"):
        draw_traces({}, tmp_path / "a.png")


def test_drawing_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RequestError, match=r"needs matplotlib; pip install 'bitforbit\[plot\]'"):
        HAND.draw(tmp_path / "trace.svg")
