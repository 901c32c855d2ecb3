"""Finding a backend by name or in a file, and the two that numpy makes (SPEC 17)."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conformance.backends import BUILT_IN, Opening, resolve, strangers
from conformance.backends.plain import PlainBackend
from conformance.backends.reference import ReferenceBackend, ReferenceSession
from conformance.commands import check
from conformance.commands.opening import opening_of
from conformance.errors import BackendError

NUMPY = (ReferenceBackend, PlainBackend)
SPEC = (Path(__file__).parents[3] / "SPEC.md").read_text()


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str, name: str = "mine.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def refused(name: str, device: str | None = None) -> str:
    with pytest.raises(BackendError) as error:
        resolve(name, device)
    assert "\n" not in str(error.value)
    return str(error.value)


NUMERICS = 'numerics = {"accumulator": "float32"}\n'


def test_short_names() -> None:
    assert isinstance(resolve("numpy"), ReferenceBackend)
    assert isinstance(resolve("numpy-float32"), PlainBackend)
    theirs = {"torch", "torch-float32", "transformers", "onnxruntime"}
    assert set(BUILT_IN) == {"numpy", "numpy-float32"} | theirs


def test_a_class_or_an_object(file: Any) -> None:
    found = resolve(file(f"class Backend:\n    {NUMERICS}"))
    assert type(found).__name__ == "Backend"
    found = resolve(file(f"class Any:\n    {NUMERICS}\nbackend = Any()"))
    assert type(found).__name__ == "Any"
    both = f"class Backend:\n    {NUMERICS}\nbackend = Backend()\nbackend.it = True"
    assert resolve(file(both)).it


def test_a_device_goes_to_the_class(file: Any) -> None:
    text = (
        f"class Backend:\n    {NUMERICS}    def __init__(self, device='cpu'): self.device = device"
    )
    assert resolve(file(text)).device == "cpu"
    assert resolve(file(text), "cuda").device == "cuda"
    told = refused(file(f"class Backend:\n    {NUMERICS}"), "cuda")
    assert "--device: the class `Backend` of " in told
    assert "takes no argument `device`; leave the option out, or give it one" in told
    told = refused(file(f"class Some:\n    {NUMERICS}\nbackend = Some()"), "cuda")
    assert told.endswith("defines an object `backend`, which takes none")
    anything = (
        f"class Backend:\n    {NUMERICS}    def __init__(self, **o): self.device = o['device']"
    )
    assert resolve(file(anything), "cuda").device == "cuda"
    assert refused("numpy", "cuda") == "--device: the backend numpy runs on the CPU alone"


@pytest.mark.parametrize("name", ["torch", "torch-float32", "transformers"])
def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = refused(name, "cuda")
    assert told == f"--device: {name} finds no CUDA device on this machine"


@pytest.mark.parametrize(
    "opening",
    [
        Opening("numpy"),
        Opening("my backends/it's.py", "cuda"),
        Opening("torch", device="cpu"),
        Opening(process="./my backend --fast", seconds=2.5),
    ],
)
def test_an_opening_is_told_as_the_words_that_repeat_it(opening: Opening) -> None:
    top = argparse.ArgumentParser()
    check.add(top.add_subparsers(), {})
    words = ["check", *shlex.split(str(opening))]
    assert opening_of(top.parse_args(words)) == opening


def test_a_dataclass_in_a_file(file: Any) -> None:
    """Which looks itself up in sys.modules."""
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass, field\n"
        "@dataclass\nclass Backend:\n    device: str = 'cpu'\n"
        "    numerics: dict = field(default_factory=lambda: {'accumulator': 'float64'})\n"
    )
    assert resolve(file(text)).numerics == {"accumulator": "float64"}


@pytest.mark.parametrize("name", ["numpy-float64", "", ".", "SPEC.md", "Numpy"])
def test_neither_a_file_nor_a_name(name: str) -> None:
    told = refused(name)
    assert "neither a Python file nor one of numpy, numpy-float32, torch, torch-float32" in told
    assert "onnxruntime, llama_cpp" in told


def test_what_is_not_there_and_what_was_meant() -> None:
    assert refused("nowhere.py") == "nowhere.py: no such file"
    assert refused("numpy-float64").endswith("; did you mean numpy-float32?")
    assert "did you mean" not in refused("SPEC.md")


def test_a_file_is_meant_that_is_named_without_its_suffix(file: Any) -> None:
    name = file("class Backend: pass")
    assert refused(name.removesuffix(".py")).endswith(f"; did you mean {name}?")


def test_a_backend_imports_what_lies_beside_it_now_and_later(
    file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("beside_it_now", "beside_it_later"):
        file("VALUE = 7\n", f"{name}.py")
        monkeypatch.delitem(sys.modules, name, raising=False)
    text = (
        f"import beside_it_now\nclass Backend:\n    {NUMERICS}"
        "    def exp(self, x):\n        import beside_it_later\n"
        "        return beside_it_now.VALUE + beside_it_later.VALUE\n"
    )
    assert resolve(file(text)).exp(1) == 14


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_a_backend_may_be_named_as_the_library_that_it_wraps(
    file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool, own: bool
) -> None:
    """The library is what is imported, with an `__init__` or without; so may a file beside it."""
    name = f"wrapped_{whole}_{own}".lower()
    installed = tmp_path / "site"
    (installed / name).mkdir(parents=True)
    (installed / name / "core.py").write_text("VALUE = 7\n")
    if whole:
        (installed / name / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    text = f"import {name}.core\nclass Backend:\n    {NUMERICS}"
    text += f"    def exp(self, x):\n        return {name}.core.VALUE\n"
    (tmp_path / f"{name}.py").write_text("raise ImportError\n")
    assert resolve(file(text, f"{name}.py" if own else "mine.py")).exp(1) == 7
    for module in (name, f"{name}.core"):
        monkeypatch.delitem(sys.modules, module)


def test_methods_that_are_no_operations_are_told() -> None:
    class Mine:
        def rmsnorm(self) -> None: ...

        def linear_q40(self) -> None: ...

        def rope(self) -> None: ...

        def ropes(self) -> None: ...  # rope is there

        def project(self) -> None: ...  # nothing is called like this

        def _lineer(self) -> None: ...

    told = list(strangers(Mine()))
    assert [line.split("did you mean ")[1] for line in told] == ["`linear_q4_0`?", "`rms_norm`?"]
    assert told[1].startswith("`rmsnorm` is no operation, and is never called")
    assert list(strangers(ReferenceBackend())) == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "defines neither a class `Backend` nor an object `backend`"),
        ("x = 1", "defines neither"),
        ("def f(:", "does not import (SyntaxError"),
        ("\0", "does not import ("),
        ("import no_such_module", "does not import (ModuleNotFoundError: No module named"),
        ("1 / 0", "does not import (ZeroDivisionError: division by zero)"),
        ("raise ValueError('two\\nlines')", "does not import (ValueError: two lines)"),
        ("raise SystemExit(0)", "does not import (SystemExit: 0)"),
        ("import sys; sys.exit()", "does not import (SystemExit"),
        ("class Backend:\n    def __init__(self): raise OSError('no GPU')", "(OSError: no GPU)"),
        ("class Backend: pass", "`numerics` must be a dictionary"),
        ("class Backend:\n    numerics = 'float32'", "`numerics` must be a dictionary"),
        ("class Backend:\n    numerics = {'accumulator': 'fp8'}", "accumulator 'fp8' is none of"),
        ("class Backend:\n    numerics = {'accumulator': ['float32']}", "is none of"),
        ("class Backend:\n    numerics = {'acumulator': 'float16'}", "did you mean accumulator?"),
        ("class Backend:\n    numerics = {'accumulator': 'exact', 2: 1}", "2 is none of operands"),
        ("class Backend:\n    numerics = {'fma': 'no'}", "fma 'no' must be true or false"),
        ("backend = None", "`numerics` must be a dictionary"),
    ],
)
def test_a_file_that_gives_no_backend(file: Any, text: str, part: str) -> None:
    path = file(text)
    message = refused(path)
    assert part in message
    assert path in message or "numerics" in message


def named_in(table: str) -> dict[str, list[str]]:
    """The operations of a table of SPEC 17, and the names of their arguments."""
    found: dict[str, Any] = {}
    for operations, arguments in re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", table, re.M):
        if "; optional: " in arguments:
            continue
        names = re.findall(r"`([a-z_0-9]+)`", re.sub(r"\([^()]*\)", "", arguments))
        wanted = [name for name in names if name not in ("exact", "fast", "sample")]
        found |= dict.fromkeys(re.findall(r"[a-z_0-9]+", operations), wanted)
    return found


def backends() -> list[tuple[object, type]]:
    """Every built-in backend, and the class of its sessions."""
    found: list[tuple[object, type]] = [(b(), ReferenceSession) for b in NUMPY]
    if importlib.util.find_spec("torch"):
        from conformance.backends.torch.session import Session

        found += [(resolve(name), Session) for name in ("torch", "torch-float32")]
    return found


def test_backends_have_every_operation_under_the_names_of_the_specification() -> None:
    """The tables of SPEC 17 against the signatures."""
    text = SPEC[SPEC.index("## 17.") : SPEC.index("## 18.")]
    operations, methods = (named_in(part) for part in text.split("A session has"))
    for backend, session in backends():
        for owner, table in ((backend, operations), (session, methods)):
            for operation, names in table.items():
                parameters = inspect.signature(getattr(owner, operation)).parameters
                takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
                missing = [name for name in names if name not in parameters]
                assert takes_any or not missing, (backend, operation, missing)
    assert {"exp", "gelu_tanh", "softmax", "linear", "attention", "sample", "load"} <= set(
        operations
    )
    assert len(operations) == 32
    assert set(methods) == {"complete", "turns", "speculate", "serve", "resume"}


def test_what_the_backends_declare() -> None:
    assert ReferenceBackend().numerics["accumulator"] == "exact"
    assert PlainBackend().numerics["accumulator"] == "float32"


def test_plain_float32_is_float32_with_the_one_nan() -> None:
    plain = PlainBackend()
    x = np.array([[1.0, np.nan, np.inf], [0.0, -np.inf, 2.0], [1.0, 2.0, 3.0]], np.float32)
    w = np.ones((2, 3), np.float32)
    for y in (plain.linear(x, w), plain.rms_norm(x, w[0], 1e-6), plain.softmax(x), plain.exp(x)):
        assert y.dtype == np.float32
        assert set(y[np.isnan(y)].view(np.uint32).tolist()) <= {0x7FC00000}
    assert np.isnan(plain.linear(x, w)).tolist() == [[True] * 2, [True] * 2, [False] * 2]


def test_plain_float32_differs_from_the_exact_lane() -> None:
    plain, exact = PlainBackend(), ReferenceBackend()
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal((40, 300)).astype(np.float32) for _ in "xw")
    y, z = exact.linear(x, w), plain.linear(x, w)
    assert (y != z).any()
    assert np.abs(y - z).max() < 1e-3
