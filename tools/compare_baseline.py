"""Compare a run of the benchmarks with a stored one, by ratios that travel between machines.

    python -m pytest tests/benchmarks/test_paths.py --benchmark-only --benchmark-json=now.json
    python -m tools.compare_baseline now.json                  against the stored baseline
    python -m tools.compare_baseline now.json other.json --factor 1.3
    python -m tools.compare_baseline now.json --store          make it the baseline

Each path was timed beside a primitive of numpy in the same run, and is compared by how many times
that primitive's time it takes, not by seconds. Exit code: 0 no path is slower by more than the
factor, 1 one is, 2 there was nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASELINE = Path(__file__).parents[1] / "tests" / "benchmarks" / "baselines" / "paths.json"
MACHINE = ("machine", "processor", "python_version", "system")
CPU = ("brand_raw", "count", "arch")
FACTOR = 1.5


class BaselineError(Exception):
    """What cannot be compared, in one line."""


@dataclass(frozen=True)
class Timing:
    """A benchmark: how many times its primitive's time, of the least times of both.

    quarter, three_quarters: quartiles of the ratios of turns; far apart, the machine was busy.
    """

    primitive: str
    ratio: float
    quarter: float
    three_quarters: float


@dataclass(frozen=True)
class Change:
    """A path now and then, either of which may lack it.

    factor: how many times as slow it is beside its primitive; None where that cannot be told, and
    then why.
    """

    name: str
    then: Timing | None
    now: Timing | None
    factor: float | None
    why: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare or store, and say how it went."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("compare_baseline", description=__doc__, formatter_class=raw)
    parser.add_argument("now", type=Path, help="what --benchmark-json wrote")
    parser.add_argument("then", type=Path, nargs="?", default=BASELINE, help="(the stored one)")
    parser.add_argument("--factor", type=float, default=FACTOR, help=f"allowed ({FACTOR})")
    parser.add_argument("--store", action="store_true", help="keep `now` as `then`, trimmed")
    options = parser.parse_args(arguments)
    try:
        now = load(options.now)
        if options.store:
            text = json.dumps(trimmed(now), indent=1) + "\n"
            options.then.write_text(text, encoding="utf-8")
            return 0
        if not options.factor > 0:
            raise BaselineError(f"--factor: {options.factor} is out of range; it must be above 0")
        found = list(changes(paths(load(options.then)), paths(now)))
        if all(change.factor is None for change in found):
            raise BaselineError(f"{options.now}: no path of {options.then} is in it")
    except (BaselineError, OSError) as error:
        print(f"compare_baseline: {error}", file=sys.stderr)
        return 2
    slower = [c for c in found if c.factor is not None and c.factor > options.factor]
    print(*table(found, options.factor), sep="\n")
    for change in slower:
        print(f"{change.name}: {change.factor:.2f} times as slow as it was", file=sys.stderr)
    return 1 if slower else 0


def load(path: Path) -> dict[str, Any]:
    """A file of pytest-benchmark. Raises BaselineError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not isinstance(content["benchmarks"], list):
            raise TypeError("no list of benchmarks")
    except (ValueError, KeyError, TypeError) as error:
        raise BaselineError(f"{path}: not a file of pytest-benchmark ({error})") from None
    return content


def trimmed(content: Mapping[str, Any]) -> dict[str, Any]:
    """What comparing needs, by these ratios or by pytest-benchmark: no raw data, no commit."""
    machine = content["machine_info"]
    kept = {key: machine.get(key) for key in MACHINE}
    kept["cpu"] = {key: machine.get("cpu", {}).get(key) for key in CPU}
    benchmarks = [
        {**benchmark, "params": None, "stats": without_data(benchmark["stats"])}
        for benchmark in content["benchmarks"]
    ]
    return {
        "machine_info": kept,
        "commit_info": {},
        "benchmarks": benchmarks,
        "datetime": content["datetime"],
        "version": content["version"],
    }


def without_data(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics without the rounds themselves, in six digits."""
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in stats.items()
        if key != "data"
    }


def paths(content: Mapping[str, Any]) -> dict[str, Timing]:
    """The benchmarks that have a ratio, by name. Raises BaselineError."""
    found = {}
    for benchmark in content["benchmarks"]:
        extra = benchmark.get("extra_info", {})
        if "times_primitive" in extra:
            try:
                found[str(benchmark["name"])] = Timing(
                    str(extra["primitive"]),
                    *(
                        positive(extra[f"times_primitive{part}"])
                        for part in ("", "_quarter", "_three_quarters")
                    ),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise BaselineError(f"{benchmark.get('name')}: incomplete ({error})") from None
    return found


def positive(value: Any) -> float:
    """A ratio. Raises ValueError."""
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{value!r} is no ratio")
    return float(value)


def changes(then: Mapping[str, Timing], now: Mapping[str, Timing]) -> Iterator[Change]:
    """Every path of either run."""
    for name in dict.fromkeys([*then, *now]):
        before, after = then.get(name), now.get(name)
        if before is None or after is None:
            yield Change(name, before, after, None, "new" if before is None else "not run")
        elif before.primitive != after.primitive:
            yield Change(name, before, after, None, f"other primitive: {after.primitive}")
        else:
            yield Change(name, before, after, after.ratio / before.ratio)


def table(found: Sequence[Change], allowed: float) -> Iterator[str]:
    """The changes in Markdown, the slowest first."""
    yield "| path | times its primitive, then | now | as slow | |"
    yield "|---|---:|---:|---:|---|"
    for change in sorted(found, key=lambda c: -(c.factor or 0.0)):
        told = change.why
        if change.factor is not None and change.factor > allowed:
            told = "**slower**"
        elif change.factor is not None and change.factor < 1 / allowed:
            told = "faster"
        factor = "" if change.factor is None else f"{change.factor:.2f}"
        cells = (change.name, shown(change.then), shown(change.now), factor, told)
        yield f"| {' | '.join(cells)} |"


def shown(path: Timing | None) -> str:
    """The ratio, and the quartiles of its turns."""
    if path is None:
        return ""
    return f"{path.ratio:.3g} ({path.quarter:.3g} to {path.three_quarters:.3g})"


if __name__ == "__main__":
    sys.exit(main())
