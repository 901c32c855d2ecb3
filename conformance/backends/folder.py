"""A backend that is a folder: inputs were written to it, answers lie in it (SPEC 17).

`export` writes a folder and `FolderBackend` looks answers up. A call is known by its content: the
sha256 of the inputs file that holds it, which is the same bytes whenever the call is the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from safetensors.numpy import save

from conformance.backends.frames import MAX_FRAME, FrameError, decode, quoted
from conformance.errors import BackendError, GoldenError
from conformance.golden import MANIFEST as GOLDEN_MANIFEST
from conformance.golden import SPEC_VERSION, Array, Golden, digest, read_all
from conformance.operations import (
    NotImplementedByBackendError,
    Recorded,
    WrongAnswerError,
    output_names,
)
from conformance.paths import data_folder, model_folder
from conformance.results import Answers, Result, result_of
from conformance.rules import Verdict, asked, bounded_rules, demand_declaration, mode_of
from conformance.runner import run, selected_invariances
from conformance.selection import Selection
from reference.loading.strict_json import read_object

FORMAT = "bitforbit-folder-1"
MANIFEST = "manifest.json"
README = "README.md"
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


def calls_of(golden: Golden, selection: Selection) -> Iterator[tuple[str, bytes, tuple[str, ...]]]:
    """The id, the inputs file and the case ids of each call that a golden's rules need."""
    cases: dict[tuple[str, str], list[str]] = {}
    ruled = bounded_rules(golden) if selection.contract == "bounds" else golden.rules
    for rule in ruled:
        case = f"{golden.id}:{rule}"
        if selection.takes(case):
            (mode,) = mode_of(golden.operation, rule).items() or (("", ""),)
            cases.setdefault(mode, []).append(case)
    for (name, kind), ids in cases.items():
        arguments = {**golden.parameters, **golden.inputs, **({name: kind} if name else {})}
        call_id = f"{golden.id}.{kind}" if kind else golden.id
        yield call_id, inputs_file(golden.operation, arguments), tuple(ids)


def export(target: Path, selection: Selection) -> Iterator[str]:
    """Write a folder to be answered, and yield the id of each call; the manifest comes last.

    target: a folder that is empty or not there yet. Raises OSError where it cannot be written,
    GoldenError for a corrupt golden.
    """
    goldens = data_folder("goldens")
    calls: dict[str, Call] = {}
    first: dict[str, str] = {}
    models: set[str] = set()
    for golden in read_all(goldens):
        for call_id, blob, cases in calls_of(golden, selection):
            sha256 = digest(blob)
            if sha256 in first:  # another golden asks the same: one answer serves both
                known = calls[first[sha256]]
                calls[first[sha256]] = replace(known, cases=known.cases + cases)
                continue
            first[sha256] = call_id
            calls[call_id] = Call(
                golden.operation,
                golden.section,
                f"inputs/{call_id}{SUFFIX}",
                sha256,
                f"{ANSWERS}/{call_id}{SUFFIX}",
                {name: array.dtype.name for name, array in golden.outputs.items()},
                cases,
            )
            _write(target / calls[call_id].inputs, blob)
            models |= {golden.parameters["model"]} if "model" in golden.parameters else set()
            yield call_id
    left_out = tuple(
        f"{one.id}:bits"
        for one in selected_invariances(selection)
        if asked(one, {}, selection.contract)
    )
    files = dict(_copied(target, sorted(models)))
    manifest = Manifest(golden_digest(goldens), version("bitforbit"), calls, files, left_out)
    beside = goldens.parent
    _write(target / "answer.py", (beside / "examples" / "folder" / "answer.py").read_bytes())
    _write(target / "SPEC.md", (beside / "SPEC.md").read_bytes())
    _write(target / README, _readme(beside / "examples" / "folder" / README, manifest).encode())
    (target / ANSWERS).mkdir(exist_ok=True)
    _write(target / MANIFEST, manifest.text().encode())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _copied(target: Path, models: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Copy the files of models, and give the sha256 of each by its path."""
    for model in models:
        for file in sorted(model_folder(model).iterdir()):
            path, content = f"{model_path(model)}/{file.name}", file.read_bytes()
            _write(target / path, content)
            yield path, digest(content)


def _readme(general: Path, manifest: Manifest) -> str:
    """The general text, and what this folder holds."""
    counts = Counter(call.operation for call in manifest.calls.values())
    lines = [
        general.read_text(),
        "## This folder",
        "",
        f"{len(manifest.calls)} calls, of the goldens with sha256 `{manifest.goldens[:12]}`, "
        f"specification {SPEC_VERSION}, bitforbit {manifest.suite}.",
        "",
        "| operation | calls |",
        "|---|---:|",
        *(f"| {operation} | {count} |" for operation, count in sorted(counts.items())),
        "",
        "## What cannot travel",
        "",
        "Cases that compare a backend with itself, called twice or more, are a conversation: a "
        "file says nothing of how the second answer came about. They are reported as not "
        "implemented; `bitforbit check` has them, in process or with a program.",
        "",
        *(f"* `{case}`" for case in manifest.not_exportable or ("none were selected",)),
    ]
    return "\n".join(lines) + "\n"


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
            found = ", ".join(quoted(name) for name in sorted(arrays)[:8]) or "no tensor"
            raise FolderError(f"{call.answer}: it must hold {', '.join(names)}, not {found}")
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


@dataclass(frozen=True)
class Listed(Selection):
    """Those selected cases that were exported, or could not travel."""

    exported: frozenset[str] = frozenset()

    @classmethod
    def of(cls, selection: Selection, manifest: Manifest) -> Listed:
        """What a selection takes of a folder."""
        cases = {case for call in manifest.calls.values() for case in call.cases}
        return cls(**vars(selection), exported=frozenset(cases | set(manifest.not_exportable)))

    def takes(self, case_id: str) -> bool:
        """Whether a case is selected and was exported."""
        return super().takes(case_id) and case_id in self.exported


def judged(backend: FolderBackend, selection: Listed, answers: Answers) -> Iterator[Result]:
    """The result of each selected case that a folder was exported for, as `runner.run` gives it."""
    listed = replace(selection, exported=selection.exported - set(backend.manifest.not_exportable))
    yield from run(backend, data_folder("goldens"), listed, answers)
    left_out = set(backend.manifest.not_exportable)
    message = "it cannot travel as a file: it compares a backend with itself, called several times"
    for invariance in selected_invariances(selection):
        case = f"{invariance.id}:bits"
        if case in left_out and asked(invariance, backend.numerics, selection.contract):
            missing = Verdict("not implemented", None, message)
            yield result_of(case, invariance.section, "bits", missing)
