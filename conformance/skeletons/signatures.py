"""What the suite gives each operation and what it asks back, read from the goldens (SPEC 17).

Nothing is written down twice: the arguments are those of the calls that are made, and their shapes
are in the words of the specification's tables where these name them.
"""

from __future__ import annotations

import json
import re
import string
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from safetensors import safe_open

from conformance.golden import read_manifest
from conformance.operations import output_names
from conformance.paths import data_folder
from conformance.rules import mode_of
from conformance.selection import LEVELS

DTYPES = {"F32": "float32", "F16": "float16", "F64": "float64", "BOOL": "bool"} | {
    f"{short}{bits}": f"{kind}{bits}"
    for short, kind in (("I", "int"), ("U", "uint"))
    for bits in (8, 16, 32, 64)
}

_WORD = re.compile("[a-z][a-z0-9_]{,15}")

WIDTH = 88
"""Columns of a stub's first line."""

OF_THE_SUITE = ("model", "weights", "chunks", "last")
"""Parameters of whole models that say which session is called, how often, and what is kept."""

WRITTEN = ("rms_norm", "linear", "forward", "forced", "resume")
"""Operations that the skeleton has, or that are made of another one."""


@dataclass
class Calls:
    """All calls of one operation, as the goldens have them.

    arrays: by name (`in.x`, `out.y`), its type, and its shape in each call; count: of calls.
    parameters: by name, its values.
    """

    count: int = 0
    arrays: dict[str, dict[int, tuple[str, tuple[int, ...]]]] = field(default_factory=dict)
    parameters: dict[str, list[Any]] = field(default_factory=dict)


@cache
def calls() -> dict[str, Calls]:
    """The calls of every operation that has a golden, from the headers of the files."""
    found: dict[str, Calls] = defaultdict(Calls)
    folder = data_folder("goldens")
    for name in sorted(read_manifest(folder), key=_level):
        with safe_open(folder / name, "np") as file:
            about = json.loads((file.metadata() or {})["golden"])
            of = found[about["operation"]]
            for tensor in file.keys():  # noqa: SIM118
                if tensor.startswith(("in.", "out.")):
                    part = file.get_slice(tensor)
                    entry = (DTYPES[part.get_dtype()], tuple(part.get_shape()))
                    of.arrays.setdefault(tensor, {})[of.count] = entry
        for parameter, value in about["parameters"].items():
            of.parameters.setdefault(parameter, []).append(value)
        of.count += 1
    for operation, of in found.items():
        modes = [mode_of(operation, rule) for rule in ("bits", "gauge")]
        for parameter in modes[0]:
            of.parameters[parameter] = [mode[parameter] for mode in modes] * of.count
    return found


def _level(name: str) -> int:
    """Which level a golden is of: operations are listed in the order in which a backend grows."""
    return LEVELS.index(name.split("/")[0])


def operations() -> Iterator[list[str]]:
    """A stub of every operation of a backend but those that the skeleton has, line by line."""
    for operation, of in calls().items():
        if operation not in WRITTEN and "model" not in of.parameters:
            yield _stub(operation, of)


def sessions() -> Iterator[list[str]]:
    """A stub of every operation of a session but those that the skeleton has."""
    for operation, of in calls().items():
        if operation not in WRITTEN and "model" in of.parameters:
            yield _stub(operation, of)


def weights() -> list[str]:
    """The modes of weights that models are loaded with."""
    modes = {mode for of in calls().values() for mode in of.parameters.get("weights", ())}
    return sorted(modes)


@cache
def stated() -> dict[str, dict[str, tuple[str, ...]]]:
    """The axes that the tables of SPEC 17 name, by operation and array (`in.x`, `out.y`)."""
    text = (data_folder("goldens").parent / "SPEC.md").read_text(encoding="utf-8")
    section = text[text.index("\n## 17. ") : text.index("\n## 18. ")]
    found: dict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
    for row in re.findall(r"^\| (`.+`) \| (.+) \| (.+) \|$", section, re.M):
        for operation in re.findall(r"\w+", row[0]):
            for side, cell in (("in", row[1]), ("out", row[2])):
                named = re.findall(r"((?:`\w+`,? )+)\(([^()]+(?:\([^()]*\))?[^()]*)\)", cell)
                alone = re.match(r"\(([^()]+)\)", cell)
                for names, axes in [*named, *([("`y`", alone[1])] if alone else [])]:
                    for name in re.findall(r"\w+", names):
                        found[operation].setdefault(f"{side}.{name}", _axes(axes))
    return found


def _axes(text: str) -> tuple[str, ...]:
    """`N, ceil(K/2)` and `n,` as one text an axis."""
    return tuple(axis.strip() for axis in text.split(",") if axis.strip())


def _stub(operation: str, of: Calls) -> list[str]:
    """A method's first line, what it is given, and what it answers."""
    session = "model" in of.parameters
    arrays = {n.removeprefix("in."): shapes for n, shapes in of.arrays.items() if n[:3] == "in."}
    others = {
        name: values
        for name, values in of.parameters.items()
        if not (session and name in OF_THE_SUITE)
    }
    needed = [n for n, seen in (arrays | others).items() if len(seen) >= of.count]
    optional = [n for n in arrays | others if n not in needed]
    given = ", ".join(["self", *needed, *(f"{name}=None" for name in optional)])
    named = stated().get(operation, {})
    letters = _letters(of.arrays, of.count == 1, named)
    lines = [f"def {operation}({given}):"]
    if len(lines[0]) > WIDTH:
        inside = textwrap.wrap(f"{given},", WIDTH - 4)
        lines = [f"def {operation}(", *(f"    {line}" for line in inside), "):"]
    lines += [f"    # {n} {_array(s, letters, named.get(f'in.{n}'))}" for n, s in arrays.items()]
    lines += [f"    # {name}: {_values(values)}" for name, values in others.items()]
    results = [
        f"{name} {_array(of.arrays[f'out.{name}'], letters, named.get(f'out.{name}'))}"
        for name in output_names(operation)
    ]
    lines += [f"    # -> {result}" for result in results]
    return [*lines, f"    return {', '.join(output_names(operation))}"]


Shapes = Mapping[int, tuple[str, tuple[int, ...]]]


def _letters(
    arrays: Mapping[str, Shapes], alone: bool, named: Mapping[str, tuple[str, ...]]
) -> dict[tuple[int, ...], str]:
    """A letter for every size that varies over the calls, by its values in all of them.

    alone: there is one call, which does not show what varies. named: axes that have a name.
    """
    known: dict[tuple[int, ...], str] = {}
    for name, axes in named.items():
        columns = _columns(arrays[name]) if name in arrays else []
        if len(columns) == len(axes):
            known = {**dict(zip(columns, axes, strict=True)), **known}
    others = dict.fromkeys(column for shapes in arrays.values() for column in _columns(shapes))
    taken = " ".join(" ".join(axes) for axes in named.values())
    letters = (letter for letter in string.ascii_uppercase if letter not in taken)
    fresh = {column: next(letters) for column in others if alone or len(set(column)) > 1}
    return {**fresh, **known}


def _columns(shapes: Shapes) -> list[tuple[int, ...]]:
    """The sizes of each axis over the calls; none where the number of axes varies."""
    listed = [shape for _, shape in shapes.values()]
    return list(zip(*listed, strict=True)) if len({len(s) for s in listed}) == 1 else []


def _array(
    shapes: Shapes, letters: Mapping[tuple[int, ...], str], axes: tuple[str, ...] | None
) -> str:
    """`float32 (T, K)`, as its axes are named; else a size that never varies is a number."""
    columns = _columns(shapes)
    sizes = [letters.get(column, str(column[0])) for column in columns]
    if axes and len(axes) == len(columns):
        sizes = list(axes)
    inside = f"{sizes[0]}," if len(sizes) == 1 else ", ".join(sizes)
    dtypes = "|".join(sorted({dtype for dtype, _ in shapes.values()}))
    return f"{dtypes} ({inside})"


def _values(values: list[Any]) -> str:
    """What a parameter may be: its few texts, or its type."""
    kinds = sorted({type(value).__name__ for value in values if value is not None})
    texts = sorted({value for value in values if isinstance(value, str)})
    if kinds == ["str"] and len(texts) <= 4 and all(map(_WORD.fullmatch, texts)):
        said = ", ".join(map(repr, texts))
    else:
        said = " or ".join(kinds)
    return f"{said} or None" if None in values else said
