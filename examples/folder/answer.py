"""Answer the calls of a folder that `bitforbit export` wrote, with Python's standard library alone.

    python3 answer.py [FOLDER]

It reads the manifest, answers the operations that it has (silu, sigmoid, linear and rms_norm of
SPEC.md, to the bit), skips the rest, and declares its numerics. Take it as a pattern: what an
answer needs is in `load`, `save` and `main`, about fifty lines.
"""

import array
import json
import math
import struct
import sys
from pathlib import Path

NUMERICS = {"operands": "exact", "accumulator": "exact", "fma": False, "kv": "float32"}
CODES = {"F32": "f", "I64": "q"}  # of the array module, for the types that these operations need
NAMES = {"F32": "float32", "I64": "int64"}


# Files of safetensors.


def load(path):
    """What is asked, and the tensors by name as (type, shape, elements)."""
    blob = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    header, data = json.loads(blob[8 : 8 + length]), blob[8 + length :]
    call = json.loads(header.pop("__metadata__")["call"])
    tensors = {}
    for name, about in header.items():
        start, stop = about["data_offsets"]
        elements = array.array(CODES[about["dtype"]], data[start:stop])
        if sys.byteorder == "big":
            elements.byteswap()
        tensors[name] = (about["dtype"], about["shape"], elements)
    return call, tensors


def save(path, tensors):
    """Write tensors given as (type, shape, elements)."""
    header, data = {}, b""
    for name, (kind, shape, elements) in tensors.items():
        elements = array.array(CODES[kind], elements)
        if sys.byteorder == "big":
            elements.byteswap()
        raw = elements.tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


# The arithmetic of SPEC.md. Python's floats are float64.

NAN = struct.unpack("<f", b"\x00\x00\xc0\x7f")[0]
BLOCK = 32


def rn32(x):
    """x rounded to float32."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0] if x == x else NAN
    except OverflowError:
        return math.copysign(math.inf, x)


def aligned(block):
    """The integers and the exponent of a block (2.1); None for a block of zeros."""
    largest = max(map(abs, block))
    if largest == 0:
        return None
    exponent = math.frexp(largest)[1]
    return [round(math.ldexp(x, 24 - exponent)) for x in block], exponent


def dot64(a, b):
    """The dot product before its rounding (2.2)."""
    total = 0.0
    for start in range(0, len(a), BLOCK):
        x, y = aligned(a[start : start + BLOCK]), aligned(b[start : start + BLOCK])
        if x and y:
            products = sum(i * j for i, j in zip(x[0], y[0], strict=True))
            total += math.ldexp(products, x[1] + y[1] - 48)
    return total


def finite(row):
    """Whether all elements are."""
    return all(map(math.isfinite, row))


def sigmoid(x):
    """One element (4.2)."""
    try:
        power = rn32(math.exp(-x))
    except OverflowError:
        power = math.inf
    return rn32(1 / rn32(1 + power))


def silu(x):
    """One element (4.2)."""
    return rn32(x * sigmoid(x))


def linear(x, w, bias):
    """One row against each row of w (2.2, 5.5)."""
    y = [rn32(dot64(x, row)) if finite(x) and finite(row) else NAN for row in w]
    return y if bias is None else [rn32(a + b) for a, b in zip(y, bias, strict=True)]


def rms_norm(x, weight, eps):
    """One row (6)."""
    if not finite(x):
        return [NAN] * len(x)
    r = rn32(1 / math.sqrt(dot64(x, x) / len(x) + eps))
    return [rn32(rn32(a * r) * b) for a, b in zip(x, weight, strict=True)]


def rows(tensor):
    """A tensor of two dimensions as a list of rows."""
    _, (count, width), elements = tensor
    return [elements[i * width : (i + 1) * width] for i in range(count)]


# The operations, from parameters and tensors to results.


def answer(operation, parameters, tensors):
    """The results by name, or None for an operation that is not here."""
    _, shape, elements = tensors.get("x", ("F32", [], []))
    if operation in ("sigmoid", "silu"):
        y = [globals()[operation](x) for x in elements]
    elif operation == "linear":
        w = rows(tensors["w"])
        bias = tensors["bias"][2] if "bias" in tensors else None
        y = [v for row in rows(tensors["x"]) for v in linear(row, w, bias)]
        shape = [shape[0], len(w)]
    elif operation == "rms_norm":
        weight, eps = tensors["weight"][2], parameters["eps"]
        y = [v for row in rows(tensors["x"]) for v in rms_norm(row, weight, eps)]
    else:
        return None
    return {"y": ("F32", shape, y)}


def main(folder):
    """Answer what can be answered."""
    manifest = json.loads((folder / "manifest.json").read_text())
    answered = 0
    for entry in manifest["calls"].values():
        if entry["operation"] not in ("sigmoid", "silu", "linear", "rms_norm"):
            continue
        call, tensors = load(folder / entry["inputs"])
        results = answer(call["operation"], call["parameters"], tensors)
        assert {name: NAMES[kind] for name, (kind, _, _) in results.items()} == entry["results"]
        save(folder / entry["answer"], results)
        answered += 1
    (folder / "answers").mkdir(exist_ok=True)
    (folder / "answers" / "numerics.json").write_text(json.dumps(NUMERICS) + "\n")
    print(f"{answered} of {len(manifest['calls'])} calls answered")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
