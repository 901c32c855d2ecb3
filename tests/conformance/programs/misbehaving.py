"""A program that doubles floats over the process protocol, and misbehaves in `exp` as it is told.

It stands for a stranger's backend: it has its own few lines of the protocol and imports nothing
of the project. Usage: misbehaving.py MODE [PID_FILE]
"""

from __future__ import annotations

import array
import json
import os
import signal
import struct
import subprocess
import sys
import time
from typing import Any

MODE = sys.argv[1]
Tensors = dict[str, tuple[str, list[int], bytes]]


def read(count: int) -> bytes:
    data = sys.stdin.buffer.read(count)
    if len(data) < count:
        sys.exit(0)
    return data


def write(*parts: bytes) -> None:
    sys.stdout.buffer.write(b"".join(parts))
    sys.stdout.buffer.flush()


def blob(about: dict[str, str] | None, tensors: Tensors) -> bytes:
    header: dict[str, Any] = {} if about is None else {"__metadata__": about}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def framed(body: bytes) -> bytes:
    return struct.pack("<Q", len(body)) + body


def spin() -> None:
    time.sleep(1000)


def flood(stream: Any, text: bytes) -> None:
    while True:
        stream.buffer.write(text * 1000)


def misbehave(number: str, right: Tensors) -> bytes | None:
    """The bytes of an answer, or None after having written what there is."""
    ok = {"id": number, "status": "ok"}
    whole = framed(blob(ok, right))
    dtype, shape, raw = right["y"]
    count = len(raw) // 4
    bad: dict[str, bytes] = {
        "length_2_60": struct.pack("<Q", 1 << 60) + b"x" * 100,
        "length_2_64": b"\xff" * 8,
        "longer_than_announced": whole + b"\n",
        "print_first": b"computing exp now\n" + whole,
        "no_blob": framed(b"hello, is this a blob?"),
        "empty": framed(b""),
        "header_lies": framed(struct.pack("<Q", 1 << 40) + blob(ok, right)[8:]),
        "offsets_lie": framed(blob(ok, right).replace(b", 16]", b", 99]")),
        "no_json": framed(blob(ok, right).replace(b'{"__', b'["__')),
        "no_metadata": framed(blob(None, right)),
        "wrong_id": framed(blob({**ok, "id": "1"}, right)),
        "wrong_status": framed(blob({**ok, "status": "fine"}, right)),
        "wrong_name": framed(blob(ok, {"out": right["y"]})),
        "no_tensor": framed(blob(ok, {})),
        "extra_tensor": framed(blob(ok, {**right, "z\n": right["y"]})),
        "wrong_shape": framed(blob(ok, {"y": (dtype, [2, count // 2], raw)})),
        "too_many": framed(blob(ok, {"y": (dtype, [2 * count], raw * 2)})),
        "wrong_dtype": framed(blob(ok, {"y": ("I32", shape, raw)})),
        "odd_dtype": framed(blob(ok, {"y": ("BF16", [2 * count], raw)})),
        "nan": framed(blob(ok, {"y": (dtype, shape, b"\x00\x00\xc0\x7f" * count)})),
        "error": framed(blob({**ok, "status": "error", "message": "no\nmemory \x1b[31m"}, {})),
        "error_mute": framed(blob({**ok, "status": "error"}, {})),
        "error_long": framed(blob({**ok, "status": "error", "message": "x" * 100_000}, {})),
        "not_implemented": framed(blob({**ok, "status": "not implemented"}, {})),
    }
    if MODE in bad:
        return bad[MODE]
    if MODE == "right":
        return whole
    if MODE == "crash":
        print("about to fall", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    elif MODE == "exit_0":
        os._exit(0)
    elif MODE == "exit_3":
        print("cannot go on", file=sys.stderr, flush=True)
        os._exit(3)
    elif MODE == "raise":
        raise ValueError("a traceback of several lines")
    elif MODE == "hang":
        spin()
    elif MODE == "half_then_exit":
        write(whole[: len(whole) // 2])
        os._exit(0)
    elif MODE == "half_then_hang":
        write(whole[: len(whole) // 2])
        spin()
    elif MODE == "half_a_length":
        write(whole[:5])
        os._exit(0)
    elif MODE == "one_by_one":
        for i in range(len(whole)):
            write(whole[i : i + 1])
        return None
    elif MODE == "close_stdout":
        os.close(1)
        spin()
    elif MODE == "flood_stdout":
        flood(sys.stdout, b"spam\n")
    elif MODE == "flood_stderr":
        flood(sys.stderr, b"spam\n")
    elif MODE == "much_stderr":
        sys.stderr.write("a line of a log\n" * 200_000)
        return whole
    elif MODE == "exit_after":
        write(whole)
        os._exit(7)
    elif MODE == "write_after":
        write(whole)
        time.sleep(0.2)
        return b"done\n"
    elif MODE == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        with open(sys.argv[2], "w") as file:
            file.write(str(child.pid))
        spin()
    raise AssertionError(MODE)


def hello(number: str) -> bytes:
    told = {
        "protocol": 1,
        "name": "misbehaving",
        "operations": ["cos", "exp", "log"],
        "numerics": {"accumulator": "float32"},
    }
    about = {"id": number, "status": "ok"}
    odd: dict[str, Any] = {
        "hello_none": None,
        "hello_text": "hi",
        "hello_list": [1],
        "hello_2": {**told, "protocol": 2},
        "hello_no_numerics": {k: v for k, v in told.items() if k != "numerics"},
        "hello_numerics_list": {**told, "numerics": []},
        "hello_text_1": {**told, "protocol": "1"},
        "hello_name": {**told, "name": 7},
        "hello_operations": {**told, "operations": "exp"},
        "hello_operation": {**told, "operations": ["exp", {}]},
        "hello_precision": {**told, "numerics": {"accumulator": "fp8"}},
    }
    if MODE == "hello_not_json":
        return framed(blob({**about, "hello": "{"}, {}))
    if MODE == "hello_nested":
        return framed(blob({**about, "hello": told}, {}))  # type: ignore[dict-item]
    if MODE == "hello_deep":
        return framed(blob({**about, "hello": "[" * 100_000}, {}))
    if MODE == "hello_missing":
        return framed(blob(about, {}))
    if MODE == "deaf" or (MODE == "only_once" and os.path.exists(sys.argv[2])):
        spin() if MODE == "deaf" else sys.exit(9)
    if MODE == "other_hello" and os.path.exists(sys.argv[2]):
        told["name"] = "another"
    if MODE in ("only_once", "other_hello"):
        with open(sys.argv[2], "w") as file:
            file.write("was here")
    return framed(blob({**about, "hello": json.dumps(odd.get(MODE, told))}, {}))


def main() -> None:
    while True:
        body = read(struct.unpack("<Q", read(8))[0])
        size = struct.unpack("<Q", body[:8])[0]
        header = json.loads(body[8 : 8 + size])
        about = header["__metadata__"]
        if about["operation"] == "hello":
            write(hello(about["id"]))
            if MODE == "stop_reading":  # and never take another byte
                spin()
            continue
        begin, end = header["x"]["data_offsets"]
        x = array.array("f", body[8 + size + begin : 8 + size + end])
        y = array.array("f", [2 * value for value in x]).tobytes()
        right: Tensors = {"y": ("F32", header["x"]["shape"], y)}
        if about["operation"] == "exp":
            if MODE in ("only_once", "other_hello"):
                os._exit(1)
            answer = misbehave(about["id"], right)
        else:
            answer = framed(blob({"id": about["id"], "status": "ok"}, right))
        if answer is not None:
            write(answer)


main()
