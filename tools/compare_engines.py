"""Logits of every family against transformers and llama.cpp: `docs/engines.md`.

    python tools/compare_engines.py                      write the page, all families
    python tools/compare_engines.py --only gemma2,llama  print these rows, write nothing

Exits with 1 where a bound is exceeded, and with 2 where an engine is missing. Run it in a checkout,
with the extra `test` and `xllamacpp` installed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from reference.arithmetic import F32
from reference.model import Model, load_model
from tools.engines import llama_cpp, mechanisms
from tools.engines.mechanisms import Mechanism, Seen
from tools.engines.miniatures import MINIATURES, tokens_of, write

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "engines.md"
COUNTS = (40, 700)

TRANSFORMERS_LIMIT = 2e-6
"""The largest difference of a logit that float32 in another order makes on these models."""

LLAMA_CPP_LIMIT = 1e-6
"""The same of llama.cpp, once the variants do what it does."""

SETTINGS: Mapping[str, Mapping[str, bool]] = {
    "float32 keys and values, no flash attention": {},
    "half-precision keys and values": {"half_cache": True},
    "flash attention": {"flash": True},
    "both": {"half_cache": True, "flash": True},
}
"""How llama.cpp may attend; the first is what the table compares with."""


@dataclass(frozen=True)
class Step:
    """A variant that was added, and the difference from llama.cpp after it."""

    name: str
    difference: float


@dataclass(frozen=True)
class Row:
    """One miniature on one prompt: largest differences of a logit.

    largest: the largest logit. steps: from llama.cpp as variants are added one by one, the first
    being the reference as it is.
    """

    name: str
    tokens: int
    largest: float
    transformers: float
    steps: tuple[Step, ...]

    @property
    def failures(self) -> Iterator[str]:
        """Bounds that are exceeded."""
        if not self.transformers <= TRANSFORMERS_LIMIT:
            yield f"{self.name}, {self.tokens} tokens: {self.transformers:.1e} from transformers"
        if not self.steps[-1].difference <= LLAMA_CPP_LIMIT:
            left = f"{self.steps[-1].difference:.1e} from llama.cpp"
            yield f"{self.name}, {self.tokens} tokens: {left} after all variants"


def difference(x: F32, y: F32) -> float:
    """The largest |x - y|; NaN where either has one."""
    return float(np.abs(x - y).max())


def compare(name: str, folder: Path, counts: Iterable[int] = COUNTS) -> Iterator[Row]:
    """The rows of one miniature, whose files go to `folder`."""
    file = write(name, folder)
    ours = load_model(folder)
    theirs = transformers_model(folder, ours)
    applied = steps_of(name)
    for count in counts:
        tokens = tokens_of(count)
        logits = ours.forward(tokens)
        yield Row(
            name,
            count,
            float(np.abs(logits).max()),
            difference(logits, transformers_logits(theirs, tokens)),
            tuple(against_llama_cpp(ours, file, tokens, applied)),
        )


def steps_of(name: str) -> tuple[Mechanism, ...]:
    """The variants of a miniature in the order in which they are added: rope before GELU."""
    own = MINIATURES[name].mechanisms
    gelu = (mechanisms.GELU_TABLE, mechanisms.GELU_INDEX)
    first = tuple(mechanism for mechanism in own if mechanism not in gelu)
    return (*first, mechanisms.PRODUCTS, *(m for m in own if m in gelu))


def against_llama_cpp(
    model: Model, file: Path, tokens: Sequence[int], applied: Sequence[Mechanism]
) -> Iterator[Step]:
    """Differences from llama.cpp as the variants are added one by one."""
    watch = next((m.watch for m in applied if m.watch is not None), None)
    answer = llama_cpp.ask(file, tokens, watch)
    yield Step("as it is", difference(model.forward(tokens), answer.logits))
    for mechanism in applied:
        model = mechanism.change(model, answer.seen)
        yield Step(mechanism.name, difference(model.forward(tokens), answer.logits))


# ------------------------------------------------------------------------------ transformers


def transformers_model(folder: Path, ours: Model) -> Any:
    """The folder in transformers, float32 and eager, with our inv_freq."""
    import torch

    from tests.reference.test_model_transformers import feed_constants

    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    feed_constants(theirs, ours)
    return theirs


def transformers_logits(theirs: Any, tokens: Sequence[int]) -> F32:
    """Logits of all tokens, (T, V) float32."""
    import torch

    with torch.no_grad():
        found: F32 = theirs(torch.tensor([list(tokens)])).logits[0].numpy()
    return found


# ---------------------------------------------------------------------------------- the page

PAGE_TEXT = """# Against other engines

Generated by `python tools/compare_engines.py`.

Random miniatures of every family, the same float32 weights in three engines: the reference (exact
lane), transformers (float32, eager, fed the reference's `inv_freq`), and llama.cpp (a GGUF file of
F32, keys and values in float32, no flash attention, one thread, one pass). Figures are the largest
difference of a logit over all positions and the whole vocabulary, raw logits on every side. Logits
go up to {largest:.2f}, and the bounds are for logits of this size: rounding grows with them.

* **transformers** is within {transformers_limit:.0e}; the largest is {transformers_worst:.1e}.
* **llama.cpp** differs by up to {as_it_is_worst:.1e} as it is. A few named mechanisms, each a
  variant of the reference in `tools/engines/mechanisms.py`, account for that: with them, it is
  within {llama_cpp_limit:.0e}. The largest difference left is {left_worst:.1e}, which is float32 in
  another order.

## The table

{table}

## The mechanisms

{mechanisms}

Where there are several, what is left as they are added one by one:

{steps}

`products` tells in proportion to the position: nothing at 40 tokens, up to {products_worst:.0e} at
700. A GELU table cannot be reproduced to 1e-6 from float32 arguments alone, since it is a step
function: an argument that lies within rounding of a step takes either value. llama.cpp's own
arguments are read by its evaluation callback, which changes no bit of its logits; `its roundings`
uses them as indices of the table, and for nothing else.

## What settings hide

By default llama.cpp keeps keys and values in half precision, and uses flash attention where it can.
On `llama`, 700 tokens, with all variants:

{settings}

## How to run it

```sh
pip install '.[test]' xllamacpp
python tools/compare_engines.py
python tools/compare_engines.py --only gemma2,gpt-oss
```

It exits with 1 where a bound is exceeded. `xllamacpp` binds llama.cpp's server, whose answers hold
log-probabilities of one position; the library inside exports llama.cpp's C interface, from which
`tools/engines/llama_cpp.py` takes the logits of all positions in one pass. Weights, prompts and
configurations are in `tools/engines/miniatures.py`, and are the same on every machine; differences
in the last digits depend on the processor.

{versions}
"""


def page(rows: Sequence[Row], settings: Sequence[tuple[str, float]]) -> str:
    """`docs/engines.md`."""
    used = [m for name in MINIATURES for m in steps_of(name)]
    named = {m.name: m.what for m in (*used, mechanisms.PRODUCTS)}
    return PAGE_TEXT.format(
        largest=max(row.largest for row in rows),
        transformers_limit=TRANSFORMERS_LIMIT,
        transformers_worst=max(row.transformers for row in rows),
        as_it_is_worst=max(row.steps[0].difference for row in rows),
        llama_cpp_limit=LLAMA_CPP_LIMIT,
        left_worst=max(row.steps[-1].difference for row in rows),
        products_worst=max(_gain(row, mechanisms.PRODUCTS.name) for row in rows),
        table=table(rows),
        mechanisms="\n".join(_item(f"**{name}**: {what}") for name, what in named.items()),
        steps=steps_table(rows),
        settings=_markdown(["llama.cpp with", "largest difference"], _shown(settings)),
        versions=textwrap.fill(f"These figures: {_versions()}.", 100),
    )


def table(rows: Sequence[Row]) -> str:
    """Both engines, one line a miniature and prompt."""
    lines = [
        [
            row.name,
            str(row.tokens),
            f"{row.transformers:.1e}",
            f"{row.steps[0].difference:.1e}",
            f"{row.steps[-1].difference:.1e}",
            ", ".join(step.name for step in row.steps[1:]),
        ]
        for row in rows
    ]
    heads = ["family", "tokens", "transformers", "llama.cpp", "with variants", "variants"]
    return _markdown(heads, lines)


def steps_table(rows: Sequence[Row]) -> str:
    """What is left as variants are added one by one, where there are several."""
    several = [row for row in rows if len(row.steps) > 2]
    lines = [
        [
            row.name,
            str(row.tokens),
            ", ".join(f"{step.name} {step.difference:.1e}" for step in row.steps),
        ]
        for row in several
    ]
    return _markdown(["family", "tokens", "difference, variants added"], lines)


def _gain(row: Row, name: str) -> float:
    """By how much a variant lessened the difference."""
    at = next(i for i, step in enumerate(row.steps) if step.name == name)
    return row.steps[at - 1].difference - row.steps[at].difference


def _item(text: str) -> str:
    """One of a list, in lines of a page."""
    return textwrap.fill(
        f"* {text}", 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _shown(figures: Iterable[tuple[str, float]]) -> list[list[str]]:
    return [[name, f"{figure:.1e}"] for name, figure in figures]


def _markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    left = ("family", "variants", "llama.cpp with", "difference, variants added")
    rule = ["---" if head in left else "---:" for head in heads]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *lines))


def settings_of(folder: Path) -> Iterator[tuple[str, float]]:
    """What llama.cpp's ways of attending cost, on the first miniature."""
    file, tokens = write("llama", folder), tokens_of(COUNTS[-1])
    nothing: Seen = {}
    logits = mechanisms.PRODUCTS.change(load_model(folder), nothing).forward(tokens)
    for name, options in SETTINGS.items():
        yield name, difference(logits, llama_cpp.ask(file, tokens, None, **options).logits)


def _versions() -> str:
    """Of all that took part."""
    ours = [f"{name} {version(name)}" for name in ("numpy", "torch", "transformers", "gguf")]
    theirs = [f"{name} {number}" for name, number in llama_cpp.versions().items()]
    python = f"Python {platform.python_version()} on {platform.machine()}"
    built = f"llama.cpp built with {llama_cpp.system()}"
    return "; ".join([python, ", ".join([*ours, *theirs]), built])


# ------------------------------------------------------------------------------- the command


def chosen(only: str | None) -> list[str]:
    """The miniatures of `--only`, all of each family; all without it. Raises ValueError."""
    if only is None:
        return list(MINIATURES)
    wanted = [part.strip() for part in only.split(",")]
    found = [name for name in MINIATURES if name.split(",")[0] in wanted]
    missing = set(wanted) - {name.split(",")[0] for name in found}
    if missing:
        families = ", ".join(dict.fromkeys(name.split(",")[0] for name in MINIATURES))
        raise ValueError(f"--only: no {', '.join(sorted(missing))}; there are {families}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and write the page where all were compared."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="FAMILIES", help="some families, divided by commas")
    only = parser.parse_args(arguments).only
    try:
        names = chosen(only)
    except ValueError as error:
        parser.error(str(error))
    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                rows += compare(name, Path(folder) / name)
            settings = [] if only else list(settings_of(Path(folder) / "settings"))
    except (ImportError, llama_cpp.EngineError) as error:
        print(f"compare_engines: {error}", file=sys.stderr)
        return 2
    if only:
        print(table(rows), steps_table(rows), sep="\n\n")
    failures = [failure for row in rows for failure in row.failures]
    print(*failures, sep="\n", end="\n" if failures else "")
    if not only and not failures:
        PAGE.write_text(page(rows, settings))
        print(f"wrote {os.path.relpath(PAGE)}: {len(rows)} rows, all within their bounds")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
