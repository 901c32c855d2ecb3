"""The walkthrough: its page is made of its records, its words follow them, and it runs.

That its command lines parse and its links lead somewhere is in tests/test_documents.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tools.walkthrough import (
    DOCS,
    RUNS,
    Run,
    main,
    number,
    percent,
    plain_svg,
    read,
    render,
)

PICTURES = DOCS / "pictures"


@pytest.fixture
def records() -> dict[str, Any]:
    return {name: read(PICTURES / f"{name}.json") for name in RUNS}


def test_the_page_is_that_of_the_records(records: dict[str, Any]) -> None:
    """Measured by one command and not edited: `python -m tools.walkthrough --text` restores it."""
    assert (DOCS / "prefill-and-decode.md").read_text(encoding="utf-8") == render(records)


@pytest.mark.parametrize("name", RUNS)
def test_every_command_stands_in_the_page(name: str, records: dict[str, Any]) -> None:
    page = (DOCS / "prefill-and-decode.md").read_text(encoding="utf-8")
    command = records[name]["command"]
    assert f"\n{command}\n" in page
    assert command == RUNS[name].shown(name)
    if RUNS[name].picture:
        assert f"](pictures/{name}.svg)" in page
        text = (PICTURES / f"{name}.svg").read_text(encoding="utf-8")
        assert plain_svg(text) == text
        assert len(text) < 80_000


def told(records: dict[str, Any], name: str, change: Any) -> str:
    """The page after one record is changed."""
    other = copy.deepcopy(records)
    change(other[name]["rows"])
    return " ".join(render(other).split())


def test_words_follow_the_figures(records: dict[str, Any]) -> None:
    """Every sentence that a run may contradict has another form."""

    def gains(*values: float) -> Any:
        def change(rows: Any) -> None:
            for row, value in zip(rows, values, strict=True):
                for part, factor in (("median", 1), ("least", 0.9), ("most", 1.1)):
                    row[f"gain_{part}"] = factor * value

        return change

    count = len(records["attention"]["rows"])
    slow = told(records, "attention", gains(*[0.5] * count))
    assert "is slower, 0.5 times the speed at 128 tokens, and slower, 0.5 times" in slow
    assert "The gain grows with the length" not in slow
    noise = told(records, "attention", gains(*[1.0] * count))
    assert "is not faster beyond the spread of the runs at 128 tokens" in noise
    fast = told(records, "attention", gains(*range(2, 2 + count)))
    assert "is 2 times as fast at 128 tokens" in fast
    assert "The gain grows with the length" in fast

    def cold(rows: Any) -> None:
        for row in rows:
            row["cache_n"], row["prompt_n"] = 0, row["n_prompt"] or 1

    assert "both rows are prefills" in told(records, "server-warm", cold)
    assert "looks like a prefill" not in told(records, "server-warm", cold)

    def computes(rows: Any) -> None:
        for row in rows:
            row["bound"], row["turning_batch"] = "compute", 1

    assert "even a decode step alone is bound by compute" in told(records, "ceiling", computes)

    def strays(rows: Any) -> None:
        rows[0]["kl_largest"] = 1e-3

    assert "exactly 0" not in told(records, "perplexity-same", strays)

    def moved(rows: Any) -> None:
        for row in rows:
            row["bits"] = 3

    assert "gave 3 sets of bits" in told(records, "orders", moved)

    def flat(rows: Any) -> None:
        for row in rows:
            row["flat_measured"] = None

    assert "it was still growing" in told(records, "batch", flat)


def test_another_machine_is_named(records: dict[str, Any]) -> None:
    for record in records.values():
        record["machine"] = records["phases"]["machine"]
    assert "unless it says otherwise" not in " ".join(render(records).split())
    records["orders"]["machine"] = {**records["phases"]["machine"], "cpu": "Another 9000"}
    page = " ".join(render(records).split())
    assert "unless it says otherwise" in page
    assert page.count("Another 9000") == 1


def test_a_quick_run_from_end_to_end(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["--quick", "--only", "card", "--to", str(tmp_path)]) == 0
    record, stored = read(tmp_path / "pictures" / "card.json"), read(PICTURES / "card.json")
    assert record["command"] == stored["command"]
    keys = ("test", "batch", "operations", "bytes", "bound", "turning_batch")
    figures = [[[row[key] for key in keys] for row in told["rows"]] for told in (record, stored)]
    assert figures[0] == figures[1]
    drawn = (tmp_path / "pictures" / "card.svg").read_text()
    assert "roofline" in drawn
    assert "date" not in drawn
    assert "# Prefill and decode" in (tmp_path / "prefill-and-decode.md").read_text()
    assert not (tmp_path / "pictures" / "phases.svg").exists()


def test_what_cannot_be_measured_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--only", "nothing"]) == 2
    assert "'nothing' is none of phases, " in capsys.readouterr().err
    assert main(["--quick"]) == 2
    assert "give --to DIR" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["--only", "card", "--to", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith("walkthrough: ")
    assert main(["--text", "--to", str(tmp_path)]) == 2
    assert "measure phases" in capsys.readouterr().err
    monkeypatch.setitem(RUNS, "card", Run("ceiling -p 0 -b 0 --card none"))
    assert main(["--only", "card", "--to", str(tmp_path)]) == 2
    assert "card: 'none' is none of" in capsys.readouterr().err
    assert not (tmp_path / "prefill-and-decode.md").exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1, "1"),
        (1580.4, "1,580"),
        (123456, "123,000"),
        (9.999, "10"),
        (0.03456, "0.0346"),
        (0.5, "0.5"),
        (2.1e-7, "2.10e-07"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_percent() -> None:
    assert percent(0.1234) == "12 %"
    assert percent(0.1234, 1) == "12.3 %"


def test_a_picture_has_no_date(tmp_path: Path) -> None:
    text = "<svg>\n <metadata>\n  <dc:date>2026</dc:date>\n </metadata>\n"
    text += ' <path d="M 1.26 2 \nL 3 4"/>\n</svg>'
    assert plain_svg(text) == '<svg>\n<path d="M1.3 2L3 4"/>\n</svg>\n'
