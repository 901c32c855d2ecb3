"""Where in an answer something is wrong, in the words of its axes (SPEC 19.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from conformance.golden import Array, Golden

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

_VECTOR = ("exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "gelu_tanh")
_HEADS = {"y": ("row", "head", "element")}
_ROWS = {"y": ("row", "element")}
_WRITTEN = {"tokens": ("step",), "logits": ("step", "token")}
_REQUESTS = {"tokens": ("request", "step"), "logits": ("request", "step", "token")}

AXES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    **{operation: {"y": ("element",)} for operation in _VECTOR},
    "softmax": _ROWS,
    "linear": {"y": ("row", "output")},
    "quantize_int4": {"packed": ("row", "byte"), "scales": ("row", "group")},
    "quantize_int8": {"codes": ("row", "element"), "scale": ("row",)},
    "linear_int4": {"y": ("row", "output")},
    "linear_w4a16": {"y": ("row", "output")},
    "linear_q4_0": {"y": ("row", "output")},
    "linear_q8_0": {"y": ("row", "output")},
    "rms_norm": _ROWS,
    "rope_constants": {"inv_freq": ("pair",), "factor": ("value",)},
    "rope": _HEADS,
    "attention": _HEADS,
    "gated_mlp": _ROWS,
    "route": {"experts": ("row", "rank"), "gates": ("row", "rank")},
    "moe": _ROWS,
    "philox": {"y": ("draw",)},
    "sample": {"y": ("draw",)},
    "verify_draft": {"y": ("token",)},
    "paged_attention": _HEADS,
    "store_kv": {"y": ("position", "head", "element")},
    "page_hashes": {"y": ("page", "byte")},
    "paging": {"y": ("line", "count")},
    "prefix_reuse": {"y": ("request",)},
    "forward": {"y": ("row", "token")},
    "forced": {"tokens": ("row",)},
    "generate": _WRITTEN,
    "complete": _WRITTEN,
    "speculate": {**_WRITTEN, "accepted": ("pass",)},
    "resume": {**_WRITTEN, "cache_n": ("value",)},
    "serve": _REQUESTS,
    "turns": {**_REQUESTS, "cache_n": ("request",), "prompt_n": ("request",)},
}
"""The names of the axes of each operation's results (SPEC 17)."""


LISTED = 8
"""Indices without a pattern that are named one by one."""


def axes_of(operation: str, name: str, array: Array) -> tuple[str, ...]:
    """The names of a result's axes; `axis 0`, ... for an operation that the table lacks."""
    axes = AXES.get(operation, {}).get(name, ())
    return axes if len(axes) == array.ndim else tuple(f"axis {i}" for i in range(array.ndim))


def spread(wrong: Bools, axes: Sequence[str]) -> str:
    """Which part of an array is wrong: `rows 33 to 47, head 2 of 8, all elements`.

    wrong: of the array's shape, true somewhere.
    """
    parts = []
    for axis, name in enumerate(axes):
        others = tuple(i for i in range(wrong.ndim) if i != axis)
        parts.append(_indices(np.flatnonzero(wrong.any(axis=others)), wrong.shape[axis], name))
    return ", ".join(parts)


def _indices(found: Ints, of: int, name: str) -> str:
    """Indices along an axis of length `of`, as a person would say them."""
    first, last = int(found[0]), int(found[-1])
    steps = np.unique(np.diff(found))
    if len(found) == of:
        return f"all {_plural(name)}" if of > 1 else f"the one {name}"
    if len(found) == 1:
        return f"{name} {first} of {of}"
    if len(steps) == 1 and steps[0] == 1:
        return f"{_plural(name)} {first} to {last} of {of}"
    if len(steps) == 1 and len(found) > 2:
        return f"every {_ordinal(int(steps[0]))} {name} from {first} to {last} of {of}"
    if len(found) <= LISTED:
        return f"{_plural(name)} {', '.join(map(str, found))} of {of}"
    return f"{len(found)} of {of} {_plural(name)} from {first} to {last}"


def _plural(name: str) -> str:
    return {"byte": "bytes", "pass": "passes", "axis": "axes"}.get(name, f"{name}s")


def _ordinal(n: int) -> str:
    ending = "th" if n // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def at(index: Sequence[int], axes: Sequence[str]) -> str:
    """One element: `row 3, head 0, element 5`."""
    return ", ".join(f"{name} {i}" for name, i in zip(axes, index, strict=True))


def index_of(flat: int, array: Array) -> tuple[int, ...]:
    """The index of an element that is given by its place in memory order."""
    return tuple(int(i) for i in np.unravel_index(flat, array.shape))


def named(golden: Golden, name: str, flat: int) -> str:
    """One element of an answer to a golden, and what its index means there."""
    wanted = golden.outputs[name]
    index = index_of(flat, wanted)
    remark = remarks(golden, name, index)
    return at(index, axes_of(golden.operation, name, wanted)) + (f" ({remark})" if remark else "")


def remarks(golden: Golden, name: str, index: Sequence[int]) -> str:
    """What an index means in a golden: a row's position, its page, a head's keys; or nothing."""
    given, operation = golden.inputs, golden.operation
    if operation in ("attention", "paged_attention"):
        row, head = index[0], index[1]
        heads, key_heads = given["q"].shape[1], given["k" if "k" in given else "k_pages"].shape[-2]
        keys = f"key-value head {head // max(heads // key_heads, 1)}"
        if operation == "attention":
            position = len(given["k"]) - len(given["q"]) + row
            if position < 0:
                return f"before the first of {len(given['k'])} positions, {keys}"
            return f"position {position} of {len(given['k'])}, block {position // 32}, {keys}"
        size = given["k_pages"].shape[1]
        position = int(golden.parameters["length"]) - len(given["q"]) + row
        page = int(given["block_table"][position // size])
        return f"position {position}, entry {position // size} of the table, page {page}, {keys}"
    if operation == "rope":
        return f"position {int(given['positions'][index[0]])}"
    if operation == "forward":
        rows = len(golden.outputs[name])
        return f"position {len(given['tokens']) - rows + index[0]}"
    if operation in ("linear_int4", "quantize_int4") and name == "packed":
        return f"weights {2 * index[1]} and {2 * index[1] + 1}"
    return ""
