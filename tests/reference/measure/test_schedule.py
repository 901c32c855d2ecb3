"""What a long prompt does to others: the arms differ in when, never in what (SPEC 14.2)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from conformance import cli
from reference.errors import RequestError
from reference.measure.schedule import BEFORE, LONG_OUTPUT, Arm, Experiment, computed
from reference.trace import Pass
from tests.reference.models import LLAMA_SMALL, QWEN2_SMALL, small

TINY = str(Path(__file__).parents[3] / "fixtures" / "tiny-draft")


@pytest.fixture(scope="module")
def run() -> tuple[Experiment, list[Arm], list[Pass]]:
    seen: list[Pass] = []
    experiment = Experiment(small(LLAMA_SMALL), long=300, users=3, chunk=20)
    return experiment, list(experiment.arms(seen.append)), seen


Run = tuple[Experiment, list[Arm], list[Pass]]


def test_the_arms_differ_in_how_the_long_prompt_is_cut(run: Run) -> None:
    _, arms, _ = run
    chunks = [
        [
            n
            for p in arm.trace.passes
            for number, kind, n in p.shares
            if (number, kind) == (4, "prefill")
        ]
        for arm in arms
    ]
    assert chunks == [[], [300], [20] * 15]
    assert [arm.budget for arm in arms] == [23, 303, 23]


def test_all_users_decode_in_every_pass_until_the_long_prompt_is_done(run: Run) -> None:
    for arm in run[1][1:]:
        for done in arm.trace.passes:
            if (4, "prefill") in [share[:2] for share in done.shares]:
                assert [share for share in done.shares if share[1] == "decode"] == [
                    (number, "decode", 1) for number in (1, 2, 3)
                ]


def test_the_stall_is_the_pass_that_computes_the_whole_prompt(run: Run) -> None:
    """Not a claim about speed: the longest gap is where the trace says that the pass was."""
    _, (_, whole, _), _ = run
    (long,) = (p for p in whole.trace.passes if (4, "prefill", 300) in p.shares)
    before = max(p.ended for p in whole.trace.passes if p.ended < long.ended)
    assert whole.users.longest >= long.ended - before


def test_nobodys_tokens_depend_on_the_arm(run: Run) -> None:
    experiment, arms, _ = run
    assert all(arm.tokens == arms[0].tokens for arm in arms)
    assert [len(tokens) for tokens in arms[0].tokens] == [experiment.answer] * 3
    first, *others = (arm.long for arm in arms)
    assert first is None
    tokens = [other.tokens for other in others if other is not None]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == LONG_OUTPUT


def test_the_work_is_what_was_computed(run: Run) -> None:
    experiment, arms, seen = run
    assert sum(map(computed, seen)) == experiment.work
    assert seen == [done for arm in arms for done in arm.trace.passes]
    for arm, tokens in zip(arms, (0, 307, 307), strict=True):
        had = [sum(t <= arm.came for t in arm.trace.times(number)) for number in (1, 2, 3)]
        assert min(had) == BEFORE
        since = min(p.started for p in arm.trace.passes if p.started >= arm.came)
        total = 3 * experiment.answer - sum(had) + tokens
        seconds = arm.trace.passes[-1].ended - since
        assert arm.throughput == pytest.approx(total / seconds)


def test_gaps_are_counted_from_when_the_long_prompt_came(run: Run) -> None:
    experiment, arms, _ = run
    for arm in arms:
        times = [arm.trace.times(number) for number in (1, 2, 3)]
        came = max(user[BEFORE - 1] for user in times)
        assert arm.users == arm.trace.latency([1, 2, 3], came)
        assert all(sum(t > came for t in user) >= experiment.answer - BEFORE - 2 for user in times)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"long": 0}, "^long: 0 is out of range"),
        ({"users": 0}, "^users: 0 is out of range"),
        ({"chunk": -1}, "^chunk: -1 is out of range"),
        ({"long": 249}, "^long: 257 positions are needed, .* has 256; lower long"),
        ({"long": 200, "chunk": 1}, "^long: 432 positions are needed"),
    ],
)
def test_what_cannot_be_run_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        Experiment(small(QWEN2_SMALL), **options)
    assert "\n" not in str(error.value)
    Experiment(small(QWEN2_SMALL), long=248)


# the command


def test_the_command_prints_figures_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "schedule.svg"
    arguments = ["--model", TINY, "--long", "80", "--users", "2", "--chunk", "16"]
    assert cli.main(["schedule", *arguments, "--trace", "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "users got the same tokens in all arms" in out
    assert out.count("#3 P16") == 5
    assert out.count("#3 P80") == 1
    assert plot.read_text().count("<!-- request 3 -->") == 2


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", TINY, "--long", "40", "--users", "1", "--chunk", "16", "--json"]
    assert cli.main(["schedule", *arguments]) == 0
    arms = json.loads(capsys.readouterr().out)
    assert [arm["name"] for arm in arms] == ["no long prompt", "in one pass", "chunks of 16"]
    for arm in arms:
        gaps = arm["between_tokens"]
        assert 0 < gaps["p50"] <= gaps["p99"] <= gaps["longest"]
        assert (arm["time_to_first_token"] is None) == (arm["name"] == "no long prompt")
        assert len(arm["passes"]) >= len(arm["tokens"][0])


def test_the_command_prints_flat_rows(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", TINY, "--long", "40", "--users", "1", "--chunk", "16", "-o", "jsonl"]
    assert cli.main(["schedule", *arguments, "-t", "1"]) == 0
    arms = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [arm["arm"] for arm in arms] == ["no long prompt", "in one pass", "chunks of 16"]
    assert [arm["prompt_n"] for arm in arms] == [None, 40, 40]
    assert [arm["cache_n"] for arm in arms] == [None, 0, 0]
    for arm in arms:
        assert (arm["threads"], arm["repetitions"], len(arm["digest"])) == (1, 1, 64)
        gaps = [arm[f"between_tokens_{part}"] for part in ("median", "p99", "most")]
        assert 0 < gaps[0] <= gaps[1] <= gaps[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "x.gif"], "--plot: x.gif is no .png or .svg"),
        (["--plot", "missing/x.svg"], "--plot: missing/x.svg is no .png or .svg in a folder"),
        (["--long", "100000"], "long: 100008 positions are needed"),
        (["--users", "0"], "users: 0 is out of range"),
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["schedule", "--model", TINY, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"bitforbit: {message}")
    assert err.count("\n") == 1


def test_the_command_knows_before_it_runs_that_it_cannot_draw(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(Experiment, "arms", lambda *_: pytest.fail("it ran"))
    assert cli.main(["schedule", "--model", TINY, "--plot", str(tmp_path / "x.svg")]) == 2
    assert "pip install 'bitforbit[plot]'" in capsys.readouterr().err
