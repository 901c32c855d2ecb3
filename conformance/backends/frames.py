"""The messages of the process door: safetensors blobs whose metadata is a call or an answer.

`docs/protocol.md` is their definition; a frame is a length and such a blob.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from conformance.errors import GoldenError
from conformance.golden import Array

PROTOCOL = 1
"""The version that `hello` carries both ways."""

LENGTH = 8
"""Bytes of the little-endian length before each blob."""

MAX_FRAME = 1 << 30
"""Bytes that a blob may have; who announces more is not listened to."""

MAX_TEXT = 300
"""Characters of a backend's own words that a message repeats."""


class FrameError(Exception):
    """A blob is not a message of the protocol; the text says in what."""


@dataclass(frozen=True)
class Message:
    """What a frame holds: text by key, arrays by name."""

    text: Mapping[str, str]
    arrays: Mapping[str, Array]


def encode(operation: str, number: str, arguments: Mapping[str, Any]) -> bytes:
    """The frame of a call: arrays become tensors, None is left out, the rest is JSON.

    Raises GoldenError where an argument is none of these, for no backend is to blame.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    arrays = {n: np.asarray(v, order="C") for n, v in given.items() if isinstance(v, np.ndarray)}
    others = {name: value for name, value in given.items() if name not in arrays}
    try:
        parameters = json.dumps(others, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise GoldenError(f"the arguments of {operation} cannot be sent: {error}") from error
    about = {"id": number, "operation": operation, "parameters": parameters}
    blob: bytes = save(arrays, about)
    return len(blob).to_bytes(LENGTH, "little") + blob


def decode(blob: bytes) -> Message:
    """The message in a blob. Raises FrameError where it is none."""
    try:
        arrays = load(blob)
        header = json.loads(blob[LENGTH : LENGTH + int.from_bytes(blob[:LENGTH], "little")])
    except KeyError as error:
        raise FrameError(
            f"its answer has a tensor of {error}, which no operation returns"
        ) from error
    except (SafetensorError, ValueError, OverflowError, RecursionError) as error:
        raise FrameError(
            _no_text(blob) or f"its answer is no safetensors blob: {quoted(str(error))}"
        ) from error
    return Message(header.get("__metadata__") or {}, arrays)


KINDS: Mapping[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a fraction",
    bool: "true or false",
    type(None): "null",
}
"""The types of JSON, in words."""


def _no_text(blob: bytes) -> str:
    """Which value of a blob's metadata is no text, as safetensors demands; "" where all are."""
    try:
        header = json.loads(blob[LENGTH : LENGTH + int.from_bytes(blob[:LENGTH], "little")])
        values = list(header["__metadata__"].items())
    except (ValueError, OverflowError, RecursionError, KeyError, TypeError, AttributeError):
        return ""
    for name, value in values:
        if not isinstance(value, str):
            return (
                f"{quoted(name)} in its answer's metadata must be a text, not {KINDS[type(value)]}"
                "; a value that is none is written as the text of its JSON (docs/protocol.md)"
            )
    return ""


def quoted(text: str) -> str:
    """A program's words, fit for one line: short, printable, in quotes."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
    return repr(line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 3] + "...")
