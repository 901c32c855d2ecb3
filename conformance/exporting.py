"""Cases that travel: written as questions to a folder, and judged by the answers there (SPEC 17).

What such a folder holds, and how an answer is found in it, is `backends.folder`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from conformance.backends.folder import (
    ANSWERS,
    MANIFEST,
    SUFFIX,
    Call,
    FolderBackend,
    Manifest,
    golden_digest,
    inputs_file,
    model_path,
)
from conformance.golden import SPEC_VERSION, Golden, digest, read_all
from conformance.paths import data_folder, model_folder
from conformance.results import Answers, Result, result_of
from conformance.rules import Verdict, asked, bounded_rules, mode_of
from conformance.runner import run, selected_invariances
from conformance.selection import Selection

README = "README.md"


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
