"""Measure what `docs/prefill-and-decode.md` tells, and write it: every figure, picture and word.

    python -m tools.walkthrough                     measure all, about ten minutes of two cores
    python -m tools.walkthrough --only profile      measure one part again; the others stay
    python -m tools.walkthrough --text              measure nothing, write the page anew
    python -m tools.walkthrough --quick --to DIR    a few small runs, to see that it works

Each command of the page runs in a process of its own. Its rows are kept in
`docs/pictures/NAME.json` with the command and the machine, its picture beside them, and the page is
`tools/walkthrough.md.jinja`, filled in from those files alone. Needs the extras plot, serve, http.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from conformance.commands.measure.rows import span
from reference.measure.machine import this_machine
from reference.measure.problem import HELPS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TEMPLATE = Path(__file__).with_suffix(".md.jinja")
BITFORBIT = (sys.executable, "-m", "conformance.cli")

MATPLOTLIB = "svg.hashsalt: bitforbit\nsvg.fonttype: none\n"
"""The same figures give the same SVG, with its words as words."""

Record = Mapping[str, Any]


class WalkthroughError(Exception):
    """What stopped it, in one line."""


@dataclass(frozen=True)
class Run:
    """A command of the page. arguments: after `bitforbit`; quick: those of a small run, if any.

    In arguments, `{url}` is a server that is started for the run, `{bench}` a file with the rows of
    the run named `phases`, and `{base}` a file that stays from one run to the next. output: how the
    command is asked for JSON. picture: whether it can draw one. kept: whether a later command reads
    its rows.
    """

    arguments: str
    quick: str | None = None
    output: str = "-o json"
    picture: bool = True
    kept: bool = False

    def shown(self, name: str) -> str:
        """The command as a reader types it."""
        named = {"url": "http://127.0.0.1:8080", "bench": "phases.json", "base": "base.safetensors"}
        plot = f" --plot {name}.svg" if self.picture else ""
        rows = f" {self.output} > {name}.json" if self.kept else ""
        return f"bitforbit {self.arguments.format(**named)}{plot}{rows}"


RUNS: Mapping[str, Run] = {
    "phases": Run(
        "bench -p 1,4,16,64,256,1024 -n 64 --attention exact -t 1 -r 5",
        "bench -p 1,4,16 -n 4 --attention exact -t 1 -r 1",
        kept=True,
    ),
    "arms": Run("bench -p 512 -n 64 -d 0,2048 --arithmetic exact,float32 -r 5"),
    "ceiling": Run("ceiling -p 4,16,64,256,1024 -d 0 -b 1,8,64 -t 1"),
    "card": Run(
        "ceiling -p 16,64,256,1024 -d 0,2048 -b 1,64 --card h100-sxm",
        "ceiling -p 16,64,256,1024 -d 0,2048 -b 1,64 --card h100-sxm",
    ),
    "share": Run("ceiling --bench {bench}"),
    "diagnose-short": Run("diagnose {bench} -n 8", "diagnose {bench} -n 8", picture=False),
    "diagnose-long": Run("diagnose {bench} -n 512", "diagnose {bench} -n 512", picture=False),
    "server-warm": Run("bench --server {url} -p 512 -n 16 -r 5", picture=False),
    "server-cold": Run("bench --server {url} -p 512 -n 16 -r 5 --cold", picture=False),
    "prefix": Run("prefix --held 1500 --new 60 --edits 4", output="--json"),
    "profile": Run("profile -p 512,1024,2048,4096 --layers 1 -r 3"),
    "attention": Run("attention -p 128,256,512,1024,2048 -r 3"),
    "schedule": Run("schedule --long 2000 --users 2 --chunk 256"),
    "batch": Run("schedule --batch 1,2,4,8,16,32,64 -r 3"),
    "router": Run("router --tokens 2048", picture=False),
    "placement": Run(
        "placement -n 0,24,48 -p 512,16384 --cpu-bandwidth 80e9 --cpu-rate 1e12",
        "placement -n 0,24,48 -p 512,16384 --cpu-bandwidth 80e9 --cpu-rate 1e12",
    ),
    "quantization": Run("quantization --positions 2000"),
    "perplexity-base": Run("perplexity --chunks 8 --save-logits {base}", picture=False),
    "perplexity-same": Run("perplexity --chunks 8 --kl-divergence {base}", picture=False),
    "perplexity-float32": Run(
        "perplexity --chunks 8 --arithmetic float32 --kl-divergence {base}", picture=False
    ),
    "perplexity-int4": Run(
        "perplexity --chunks 8 --weights int4 --kl-divergence {base}", picture=False
    ),
    "orders": Run(
        "orders --ties 2",
        "orders -m tiny-draft --ties 1 -p 8 -n 2 --search 64",
    ),
    "speedup": Run("speedup -w 1,2 --prompts 4 -p 512 -r 3"),
}
"""What the page shows, in its order."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for, and write the page. 2: it could not."""
    options = _parser().parse_args(arguments)
    try:
        if options.text:
            write_page(options.to)
            return 0
        if options.quick and options.to.resolve() == DOCS.resolve():
            raise WalkthroughError("--quick: its figures are not for docs/; give --to DIR")
        named = _named(options.only) if options.only else list(RUNS)
        wanted = [name for name in named if not options.quick or RUNS[name].quick is not None]
        measure(wanted, options.to, options.quick)
        write_page(options.to)
    except (WalkthroughError, OSError) as error:
        print(f"walkthrough: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tools.walkthrough", description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--only", metavar="NAME,..", help=f"measure these alone, of {', '.join(RUNS)}"
    )
    parser.add_argument("--text", action="store_true", help="measure nothing")
    parser.add_argument("--quick", action="store_true", help="small runs, where there are any")
    parser.add_argument("--to", type=Path, default=DOCS, metavar="DIR", help="instead of docs/")
    return parser


def _named(only: str) -> list[str]:
    """The runs that a name or the first word of several asks for, in the page's order."""
    asked = only.split(",")
    found = {a: [n for n in RUNS if n == a or n.startswith(f"{a}-")] for a in asked}
    if unknown := [name for name, runs in found.items() if not runs]:
        raise WalkthroughError(f"--only: {unknown[0]!r} is none of {', '.join(RUNS)}")
    return [name for name in RUNS if any(name in runs for runs in found.values())]


# ---------------------------------------------------------------------------------------- measuring


def measure(names: Sequence[str], docs: Path, quick: bool = False) -> None:
    """Run the commands, and keep their rows and pictures. Raises WalkthroughError."""
    pictures = docs / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    if docs.resolve() != DOCS.resolve():  # what is not measured is as it was
        for file in (DOCS / "pictures").glob("*.json"):
            if not (pictures / file.name).exists():
                shutil.copy(file, pictures)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "matplotlibrc").write_text(MATPLOTLIB)
        for name in names:
            started = time.perf_counter()
            record = _measured(name, pictures, work, quick)
            record["seconds"] = round(time.perf_counter() - started, 1)
            text = json.dumps(record, indent=1) + "\n"
            (pictures / f"{name}.json").write_text(text, encoding="utf-8")
            print(f"{name}: {record['seconds']} s", file=sys.stderr)


def _measured(name: str, pictures: Path, work: Path, quick: bool) -> dict[str, Any]:
    """One command's record, its picture drawn."""
    run = RUNS[name]
    arguments = run.quick if quick and run.quick is not None else run.arguments
    picture = work / f"{name}.svg"
    files = {"bench": work / "phases.json", "base": work / "base.safetensors"}
    if "{bench}" in arguments:
        files["bench"].write_text(json.dumps(read(pictures / "phases.json")["rows"]))
    if "--kl-divergence" in arguments and not files["base"].exists():
        _call(RUNS["perplexity-base"].arguments.format(**files).split(), work)
    with _server("{url}" in arguments) as url:
        called = arguments.format(url=url, **files).split() + run.output.split()
        called += ["--plot", str(picture)] if run.picture else []
        rows = json.loads(_call(called, work))
    if run.picture:
        (pictures / picture.name).write_text(plain_svg(picture.read_text()))
    command = replace(run, arguments=arguments).shown(name)
    return {"command": command, "machine": asdict(this_machine()), "rows": rows}


def _call(arguments: Sequence[str], work: Path) -> str:
    """What a command prints. Raises WalkthroughError where it fails."""
    environment = {**os.environ, "MATPLOTLIBRC": str(work / "matplotlibrc")}
    done = subprocess.run(
        [*BITFORBIT, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        said = " ".join(done.stderr.split()[-60:])
        raise WalkthroughError(f"{' '.join(arguments)} ended with {done.returncode}: {said}")
    return done.stdout


@contextmanager
def _server(wanted: bool) -> Iterator[str]:
    """The address of this engine behind HTTP, for as long as it is needed."""
    if not wanted:
        yield ""
        return
    serve = [*BITFORBIT, "serve", "--model", "fixtures/tiny-dense", "--port", "0"]
    with subprocess.Popen(
        serve, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            told = next((line for line in process.stdout if "http://" in line), "")
            found = re.search(r"http://127\.0\.0\.1:\d+", told)
            if found is None:
                raise WalkthroughError("serve did not start; is the extra serve installed?")
            yield found[0]
        finally:
            process.terminate()


def plain_svg(text: str) -> str:
    """A smaller SVG of the same picture: no date of its making, places to a tenth of a point."""
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.S)
    places = re.compile(r' (?:d|x|y|points)="[^"]*"')
    text = places.sub(lambda found: _rounded(" ".join(found[0].split())), text)
    text = re.sub(r'<g id="PolyCollection_\d+">\s*(<path [^>]*/>)\s*</g>', r"\1", text)
    lines: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        path = re.fullmatch(r'<path d="([^"]*)"( clip-path[^>]*/>)', line)
        if path and lines and lines[-1].startswith("<path d") and lines[-1].endswith(path[2]):
            lines[-1] = lines[-1].removesuffix(f'"{path[2]}') + f'{path[1]}"{path[2]}'
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _rounded(places: str) -> str:
    short = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), places)
    return " " + re.sub(r"(?<=[A-Z]) | (?=[zL])", "", short.lstrip())


# --------------------------------------------------------------------------------------- the page


def read(path: Path) -> dict[str, Any]:
    """A record. Raises WalkthroughError."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WalkthroughError(f"{path}: not a record ({error}); measure {path.stem}") from error
    return record


def write_page(docs: Path) -> None:
    """Write the page from the records beside its pictures. Raises WalkthroughError."""
    records = {name: read(docs / "pictures" / f"{name}.json") for name in RUNS}
    (docs / "prefill-and-decode.md").write_text(render(records), encoding="utf-8")


def render(records: Mapping[str, Record]) -> str:
    """The page, from records by name: every number in it is one of theirs."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update(
        number=number,
        thousands=lambda value: f"{value:,}",
        span=span,
        percent=percent,
        ms=lambda seconds: number(1000 * seconds),
    )
    rows = {name.replace("-", "_"): record["rows"] for name, record in records.items()}
    machines = {json.dumps(record["machine"]): record["machine"] for record in records.values()}
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        **rows,
        helps=HELPS,
        machines=list(machines.values()),
        shown=lambda *names: shown(records, names),
        seconds=sum(record["seconds"] for record in records.values()),
        repetitions=repetitions,
        median=lambda values: sorted(values)[len(values) // 2],
    )
    return reflowed(text)


def reflowed(text: str) -> str:
    """Paragraphs filled anew to 100 columns; tables, code, lists and markup as they are."""
    blocks: list[str] = []
    for part in re.split(r"(^```.*?^```$)", text, flags=re.S | re.M):
        for block in filter(None, (b.strip("\n") for b in re.split(r"\n{2,}", part))):
            words = not block.startswith(("|", "#", "```", "    ", "![", "<"))
            options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
            blocks.append(textwrap.fill(block, 100, **options) if words else block)
    return "\n\n".join(blocks) + "\n"


def shown(records: Mapping[str, Record], names: Sequence[str]) -> str:
    """The commands, where they ran if that was not the page's machine, and their pictures."""
    first = next(iter(records.values()))["machine"]
    lines = ["```sh", *(records[name]["command"] for name in names), "```"]
    for name in names:
        machine = records[name]["machine"]
        if machine != first:
            lines += ["", f"On {machine['cores']} cores of {machine['cpu']}, {machine['blas']}."]
        if RUNS[name].picture:
            lines += ["", f"![What {name} measured](pictures/{name}.svg)"]
    return "\n".join(lines)


def repetitions(rows: Sequence[Record]) -> str:
    """How often each figure was measured."""
    counts = {row["repetitions"] for row in rows}
    return "one run each" if counts == {1} else f"{'/'.join(map(str, sorted(counts)))} runs each"


def number(value: float, digits: int = 3) -> str:
    """Digits that count, without an exponent where none is needed: 1,580, 0.0346, 2.1e-07."""
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    rounded = float(f"{value:.{digits}g}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    text = f"{rounded:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float, decimals: int = 0) -> str:
    """A share in percent."""
    return f"{100 * share:.{decimals}f} %"


if __name__ == "__main__":
    sys.exit(main())
