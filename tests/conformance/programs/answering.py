"""The reference as a program of the process protocol, whole models included."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from conformance.backends.reference import ReferenceBackend
from conformance.operations import output_names

BACKEND = ReferenceBackend()
OPERATIONS = ["linear", "load", "forward", "generate", "trace"]
SESSIONS: dict[str, Any] = {}


def answer(operation: str, arguments: dict[str, Any]) -> tuple[dict[str, str], Any]:
    """What to tell of an operation, and what it returns."""
    if operation == "hello":
        about = {"protocol": 1, "name": "reference", "operations": OPERATIONS}
        return {"hello": json.dumps({**about, "numerics": dict(BACKEND.numerics)})}, ()
    if operation == "load":
        name = str(len(SESSIONS))
        SESSIONS[name] = BACKEND.load(**arguments)
        return {"session": name}, ()
    owner = SESSIONS[arguments.pop("session")] if "session" in arguments else BACKEND
    result = getattr(owner, operation)(**arguments)
    return {}, () if result is None else result


def main() -> None:
    while length := sys.stdin.buffer.read(8):
        blob = sys.stdin.buffer.read(int.from_bytes(length, "little"))
        header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
        call = header["__metadata__"]
        told, results = answer(call["operation"], {**json.loads(call["parameters"]), **load(blob)})
        values = results if isinstance(results, tuple) else (results,)
        names = output_names(call["operation"]) if values else ()
        named = isinstance(results, dict)
        arrays = results if named else dict(zip(names, values, strict=True))
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        blob = save(arrays, {"id": call["id"], "status": "ok", **told})
        sys.stdout.buffer.write(len(blob).to_bytes(8, "little") + blob)
        sys.stdout.buffer.flush()


main()
