"""Backends by name, by file or by the command of a program (SPEC 17)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import shlex
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from conformance.backends.process import TIMEOUT, ProcessBackend
from conformance.errors import BackendError
from conformance.rules import demand_declaration

BUILT_IN = {
    "numpy": ("conformance.backends.reference", "ReferenceBackend", None),
    "numpy-float32": ("conformance.backends.plain", "PlainBackend", None),
    "torch": ("conformance.backends.torch", "TorchBackend", "torch"),
    "torch-float32": ("conformance.backends.torch.float32", "TorchFloat32Backend", "torch"),
    "transformers": ("conformance.backends.transformers", "TransformersBackend", "transformers"),
    "onnxruntime": ("conformance.backends.onnxruntime", "OnnxRuntimeBackend", "onnxruntime"),
}
"""Module, class and the extra that it needs, by short name."""


NAMES = (*BUILT_IN, "llama_cpp")
"""What can be given by name; llama_cpp is asked as a server."""


@dataclass(frozen=True)
class Opening:
    """How a backend is opened: by name or file, or by the command of a program (SPEC 17)."""

    name: str = ""
    device: str | None = None
    process: str | None = None
    seconds: float | None = None

    def open(self) -> Any:
        """The backend. Raises BackendError where there is none."""
        if self.process is not None:
            return resolve_process(self.process, self.seconds)
        return resolve(self.name, self.device)

    def opened(self) -> AbstractContextManager[Any]:
        """The backend, to be closed at the end where it is a program."""
        return closing(self.open()) if self.process is not None else nullcontext(self.open())

    def __str__(self) -> str:
        """Give the words that name it on the command line."""
        options = {
            "--process": self.process,
            "--device": self.device,
            "--timeout": None if self.seconds is None else f"{self.seconds:g}",
        }
        given = [word for o, value in options.items() if value is not None for word in (o, value)]
        return shlex.join([*([self.name] if self.name else []), *given])


def resolve(name: str, device: str | None = None) -> Any:
    """A backend from a short name or a Python file. Raises BackendError where there is none.

    A file must define `Backend`, a class to be called without arguments, or `backend`, an object.
    device: `cpu` or `cuda`, for the backends that take one.
    """
    options = {} if device is None else {"device": device}
    if name in BUILT_IN:
        module, attribute, extra = BUILT_IN[name]
        if device is not None and extra is None:
            raise BackendError(f"--device: the backend {name} runs on the CPU alone")
        try:
            kind = getattr(importlib.import_module(module), attribute)
            if device == "cuda" and not importlib.import_module("torch").cuda.is_available():
                raise BackendError(f"--device: {name} finds no CUDA device on this machine")
            backend = kind(**options)
        except ImportError as error:
            if extra is None:
                raise
            raise BackendError(f"{name}: {error}; pip install 'bitforbit[{extra}]'") from error
        except RuntimeError as error:
            raise BackendError(f"{name}: {error}") from error
    else:
        backend = _from_file(Path(name), options)
    return _declared(name, backend)


def resolve_process(command: str, seconds: float | None = None) -> ProcessBackend:
    """A backend from the command line of a program (docs/protocol.md).

    seconds: for each call; None is the door's default. Raises BackendError where the program
    cannot be started, says no hello, or declares nonsense.
    """
    backend = ProcessBackend(command, TIMEOUT if seconds is None else seconds)
    try:
        _declared(f"--process: {command}", backend)
    except BackendError:
        backend.close()
        raise
    return backend


def _declared(name: str, backend: Any) -> Any:
    """The backend, if it declares its precision (SPEC 17). Raises BackendError otherwise."""
    numerics = getattr(backend, "numerics", None)
    if not isinstance(numerics, dict):
        raise BackendError(
            f"{name}: `numerics` must be a dictionary that declares the precision, such as "
            '{"accumulator": "float32"}'
        )
    try:
        demand_declaration(numerics)
    except BackendError as error:
        raise BackendError(f"{name}: {error}") from error
    return backend


def strangers(backend: Any) -> Iterator[str]:
    """A line for each operation that is not one, as far as it can be told.

    Those are the names that a program lists, and public methods whose name is nearly that of an
    operation which the backend does not have.
    """
    from conformance.backends.reference import ReferenceBackend, ReferenceSession

    known = _methods(ReferenceBackend)
    for name in set(getattr(backend, "numerics", {}).get("operations", ())):
        if name not in known | _methods(ReferenceSession) | {"forced"}:
            near = get_close_matches(name, known, 1)
            meant = f"; did you mean `{near[0]}`?" if near else ""
            yield f"`{name}`, whose numerics are declared, is no operation{meant}"
    if isinstance(backend, ProcessBackend):
        known |= _methods(ReferenceSession) | {"forced"}
        names, cutoff = set(backend.operations) - known, 0.0
    else:
        names, cutoff = _methods(type(backend)) - known, 0.8
    for name in sorted(names):
        near = get_close_matches(name, known - _methods(type(backend)), 1, cutoff)
        if near:
            yield f"`{name}` is no operation, and is never called; did you mean `{near[0]}`?"


def _methods(owner: type) -> set[str]:
    """The public methods of a class."""
    names = {name for name in dir(owner) if not name.startswith("_")}
    return {name for name in names if callable(getattr(owner, name, None))}


def _keep(name: str) -> None:
    """Import a package without an `__init__`, if that is what is installed by a file's name.

    A file may be named as the library that it wraps. Installed packages come before what lies
    beside a backend, but those without an `__init__` come last, wherever they lie.
    """
    if name.isidentifier() and name not in sys.modules:
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is None:
            importlib.import_module(name)


def _from_file(path: Path, options: dict[str, str]) -> Any:
    if path.suffix != ".py":
        file = path.with_name(f"{path.name}.py") if path.name else path
        near = [file] if file.is_file() else get_close_matches(str(path), NAMES, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise BackendError(f"{path}: neither a Python file nor one of {', '.join(NAMES)}{meant}")
    if not path.is_file():
        raise BackendError(f"{path}: no such file")
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # a backend may import what lies beside it
        for file in sorted(path.resolve().parent.glob("*.py")):
            _keep(file.stem)
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"bitforbit_backend_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise BackendError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        if hasattr(module, "Backend") and not hasattr(module, "backend"):
            _demand_parameters(path, module.Backend, options)
            return module.Backend(**options)
        if options:
            raise BackendError(f"--device: {path} defines an object `backend`, which takes none")
        if hasattr(module, "backend"):
            return module.backend
    except (KeyboardInterrupt, BackendError):
        raise
    except BaseException as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise BackendError(
            f"{path}: does not import ({reason}); run it with python to see where"
        ) from error
    raise BackendError(f"{path}: defines neither a class `Backend` nor an object `backend`")


def _demand_parameters(path: Path, made: Any, options: dict[str, str]) -> None:
    """Raise BackendError where a class does not take what is asked for on the command line."""
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):
        return
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    for option in options:
        if not takes_any and option not in {one.name for one in parameters}:
            raise BackendError(
                f"--{option}: the class `Backend` of {path} takes no argument `{option}`; "
                "leave the option out, or give it one"
            )
