"""A backend that is a folder: inputs were written to it, answers lie in it (SPEC 17).

`conformance.exporting` writes such a folder and `FolderBackend` looks answers up. A call is known
by its content: the sha256 of the inputs file that holds it, which is the same bytes whenever the
call is the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from safetensors.numpy import save

from conformance.backends.frames import MAX_FRAME, FrameError, decode, quoted
from conformance.errors import BackendError, GoldenError
from conformance.golden import MANIFEST as GOLDEN_MANIFEST
from conformance.golden import SPEC_VERSION, Array, digest
from conformance.operations import (
    NotImplementedByBackendError,
    Recorded,
    WrongAnswerError,
    output_names,
)
from conformance.paths import data_folder
from conformance.rules import demand_declaration
from reference.loading.strict_json import read_object

FORMAT = "bitforbit-folder-1"
MANIFEST = "manifest.json"
ANSWERS = "answers"
NUMERICS = f"{ANSWERS}/numerics.json"
SUFFIX = ".safetensors"


class FolderError(WrongAnswerError):
    """An answer in the folder is no answer: its case fails."""


@dataclass(frozen=True)
class Call:
    """One inputs file, as the manifest lists it.

    inputs, answer: paths in the folder. sha256: of the inputs. results: the dtype by name of what
    is to be answered. section: of SPEC.md. cases: the ids that it is judged by.
    """

    operation: str
    section: str
    inputs: str
    sha256: str
    answer: str
    results: Mapping[str, str]
    cases: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """What was exported: calls by id, sha256 of model files by path, and what could not travel."""

    goldens: str
    suite: str
    calls: Mapping[str, Call]
    models: Mapping[str, str]
    not_exportable: tuple[str, ...]

    def text(self) -> str:
        """The manifest's content."""
        about = {"format": FORMAT, "spec": SPEC_VERSION, "answers": ANSWERS}
        return json.dumps({**about, **asdict(self)}, indent=1) + "\n"


def inputs_file(operation: str, arguments: Mapping[str, Any]) -> bytes:
    """A call as a file: arrays are tensors, None is left out, the rest is JSON in the metadata.

    The same bytes for the same call: one key of metadata, for the library keeps no order of them.
    A model is named by its place in the folder. Raises GoldenError for an argument that is neither.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    arrays = {n: np.asarray(v, order="C") for n, v in given.items() if isinstance(v, np.ndarray)}
    others = {name: value for name, value in given.items() if name not in arrays}
    if "model" in others:
        others["model"] = model_path(others["model"])
    try:
        about = {"operation": operation, "parameters": others}
        text = json.dumps(about, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise GoldenError(f"the arguments of {operation} cannot be written: {error}") from error
    blob: bytes = save(dict(sorted(arrays.items())), {"call": text})
    return blob


def model_path(model: str) -> str:
    """Where a fixture lies in an exported folder."""
    return f"models/{model.removeprefix('fixtures/')}"


def golden_digest(folder: Path) -> str:
    """Sha256 of the goldens' own manifest: another one is another suite."""
    return digest((folder / GOLDEN_MANIFEST).read_bytes())


class FolderBackend(Recorded):
    """The answers in an exported folder, as a backend (SPEC 17)."""

    def __init__(self, folder: Path) -> None:
        """Open a folder. Raises BackendError where it is none, or another suite's."""
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.numerics = _object(folder / NUMERICS, "write there what you compute in (README.md)")
        demand_declaration(self.numerics)
        self._calls = {call.sha256: call for call in self.manifest.calls.values()}
        self._models = dict[str, None]()

    def answer(self, operation: str, arguments: Mapping[str, Any]) -> tuple[Array, ...]:
        """What the folder has for a call.

        Raises NotImplementedByBackendError where there is no answer, GoldenError where the inputs
        are not those that were exported, FolderError where the answer is none.
        """
        call = self._calls.get(digest(inputs_file(operation, arguments)))
        if call is None:
            raise GoldenError(f"{self.folder}: it has no inputs for this call; export it again")
        path = self.folder / call.answer
        if not path.exists():
            raise NotImplementedByBackendError(call.answer)
        self._demand(call.inputs, call.sha256)
        if "model" in arguments:
            self._demand_model(model_path(arguments["model"]))
        arrays = _read(path, call.answer)
        names = output_names(operation)
        if set(arrays) != set(names):
            found = ", ".join(quoted(name) for name in sorted(arrays)[:8])
            wrong = f", not {found}" if found else "; it has no tensor"
            raise FolderError(f"{call.answer}: it must hold {', '.join(names)}{wrong}")
        return tuple(arrays[name] for name in names)

    def _demand_model(self, folder: str) -> None:
        """Raise GoldenError where a file of a model is not what was exported; look once."""
        if folder not in self._models:
            for path, sha256 in self.manifest.models.items():
                if path.startswith(f"{folder}/"):
                    self._demand(path, sha256)
            self._models[folder] = None

    def _demand(self, name: str, sha256: str) -> None:
        """Raise GoldenError where a file is not what was exported."""
        path = self.folder / name
        if not path.is_file():
            raise GoldenError(f"{name}: missing; an answer is judged beside the inputs it is to")
        if digest(path.read_bytes()) != sha256:
            raise GoldenError(
                f"{name}: altered since it was exported, so that the answer is to something else; "
                "export again and answer that"
            )


def _read(path: Path, name: str) -> Mapping[str, Array]:
    """The tensors of an answer, whose path in the folder is `name`. Raises FolderError."""
    if not path.is_file():
        raise FolderError(f"{name}: this is no file")
    size = path.stat().st_size
    if size > MAX_FRAME:
        raise FolderError(f"{name}: {size} bytes are more than {MAX_FRAME}")
    try:
        return decode(path.read_bytes()).arrays
    except (OSError, FrameError) as error:
        raise FolderError(f"{name}: {error}") from error


def _object(path: Path, advice: str) -> dict[str, Any]:
    """The JSON object in a file of an exported folder. Raises BackendError."""
    if not path.is_file():
        raise BackendError(f"{path}: there is no such file; {advice}")
    return read_object(path, BackendError)


def read_manifest(folder: Path) -> Manifest:
    """What was exported. Raises BackendError for another suite's folder, or one that is none."""
    path = folder / MANIFEST
    told = _object(path, "give a folder that `bitforbit export` wrote to its end")
    form, spec = told.get("format"), told.get("spec")
    if (form, spec) != (FORMAT, SPEC_VERSION):
        raise BackendError(
            f"{path}: format {quoted(str(form))} of specification {quoted(str(spec))}, this suite "
            f"has {FORMAT!r} of {SPEC_VERSION!r}; export again with this suite"
        )
    ours = golden_digest(data_folder("goldens"))
    if told.get("goldens") != ours:
        raise BackendError(
            f"{path}: exported from the goldens {quoted(str(told.get('goldens'))[:12])} by "
            f"bitforbit {quoted(str(told.get('suite')))}, this suite has {ours[:12]!r}; judge it "
            "with the suite that exported it, or export again"
        )
    try:
        calls = {name: _call(about) for name, about in told["calls"].items()}
        models, left_out = told["models"], tuple(told["not_exportable"])
        if not all(isinstance(x, str) for x in (*models, *models.values(), *left_out)):
            raise TypeError("a path, a sha256 or a case is no text")
        return Manifest(ours, str(told["suite"]), calls, models, left_out)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise BackendError(
            f"{path}: not what `bitforbit export` writes ({type(error).__name__}: "
            f"{quoted(str(error))}); export again"
        ) from error


def _call(about: Mapping[str, Any]) -> Call:
    """An entry of the manifest. Raises TypeError or ValueError where it is none."""
    call = Call(**{**about, "cases": tuple(about["cases"])})
    texts = (call.operation, call.section, call.inputs, call.sha256, call.answer, *call.cases)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a call is described by texts")
    for path in map(PurePosixPath, (call.inputs, call.answer)):
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{path} leads out of the folder")
    return call
