"""Goldens: one self-describing safetensors file each, and a manifest of digests (SPEC 15)."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from conformance.errors import GoldenError
from reference.errors import reason

FORMAT = "bitforbit-golden-1"
SPEC_VERSION = "1"
MANIFEST = "MANIFEST.json"

Array = NDArray[Any]


@dataclass(frozen=True)
class OwnModel:
    """A model that goldens were made for, where it is none of the fixtures (SPEC 15.4).

    name: as the goldens call it. path: where it lay. digest: of its configuration and tensors, as
    `reference.loading.Checkpoint` computes it, in hex.
    """

    name: str
    path: str
    digest: str


@dataclass(frozen=True, eq=False)
class Golden:
    """What a backend is given and what it must answer (SPEC 15.1). It equals itself alone.

    id: `<level>/<operation>/<name>`. parameters: the operation's arguments that are no arrays.
    inputs, outputs: arrays by name. gauges: by term, shaped as the first output; terms: the error
    model of each. distance: how far the first output may lie from the real value. forms: other
    legal outputs, by the name of their form (SPEC 16.9).
    """

    id: str
    section: str
    operation: str
    parameters: Mapping[str, Any]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    rules: tuple[str, ...]
    gauges: Mapping[str, Array] = field(default_factory=dict)
    terms: Mapping[str, str] = field(default_factory=dict)
    distance: Array | None = None
    note: str = ""
    forms: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)

    @property
    def level(self) -> str:
        """The first part of the id."""
        return self.id.split("/")[0]

    def to_bytes(self) -> bytes:
        """The file's content: the same bytes on every machine (SPEC 15.1)."""
        groups = {"in": self.inputs, "out": self.outputs, "gauge": self.gauges}
        groups |= {f"either.{form}": outputs for form, outputs in self.forms.items()}
        tensors = {
            f"{g}.{n}": np.ascontiguousarray(a) for g, m in groups.items() for n, a in m.items()
        }
        if self.distance is not None:
            tensors["distance"] = np.ascontiguousarray(self.distance)
        about = {
            "format": FORMAT,
            "spec": SPEC_VERSION,
            "id": self.id,
            "section": self.section,
            "operation": self.operation,
            "parameters": dict(self.parameters),
            "rules": list(self.rules),
            "terms": dict(self.terms),
            "note": self.note,
            "provenance": "computed by the exact lane of bitforbit's reference",
        }
        # One key: the library keeps the order of tensors, but not that of metadata.
        return save(dict(sorted(tensors.items())), {"golden": json.dumps(about, sort_keys=True)})


@dataclass(frozen=True)
class Heading:
    """What is known of a golden without its arrays."""

    id: str
    section: str
    operation: str
    rules: tuple[str, ...]


def read_headings(folder: Path) -> Iterator[Heading]:
    """The heading of every golden of a folder, in the order of `read_all`. Raises GoldenError."""
    for name in read_manifest(folder):
        try:
            with safe_open(folder / name, "np") as file:
                about = json.loads((file.metadata() or {})["golden"])
            yield Heading(about["id"], about["section"], about["operation"], tuple(about["rules"]))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            next(read_all(folder, {id_of(name)}))  # says what is wrong
            raise


def read(path: Path) -> Golden:
    """Read one golden file. Raises GoldenError where it is not one."""
    try:
        with safe_open(path, "np") as file:
            about = json.loads((file.metadata() or {})["golden"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about["format"] != FORMAT:
            raise ValueError(f"format {about['format']!r}, this suite reads {FORMAT}")
        return _parsed(about, tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise GoldenError(
            f"{path}: not a golden ({reason}); restore it or run `bitforbit goldens make`"
        ) from error


def _parsed(about: Mapping[str, Any], tensors: Mapping[str, Array]) -> Golden:
    """A golden from what its file holds. Raises KeyError or TypeError where a part is missing."""

    def group(prefix: str) -> dict[str, Array]:
        return {n.removeprefix(prefix): a for n, a in tensors.items() if n.startswith(prefix)}

    forms: dict[str, dict[str, Array]] = {}
    for name, array in group("either.").items():
        form, output = name.split(".")
        forms.setdefault(form, {})[output] = array
    return Golden(
        about["id"],
        about["section"],
        about["operation"],
        about["parameters"],
        group("in."),
        group("out."),
        tuple(about["rules"]),
        group("gauge."),
        about["terms"],
        tensors.get("distance"),
        about["note"],
        forms,
    )


def must_be_there(folder: Path, model: OwnModel) -> None:
    """Raise GoldenError where a model is not where the goldens in a folder say that it lies."""
    if not Path(model.path).exists():
        raise GoldenError(
            f"{folder}: its model {model.name} is no more at {model.path}; "
            f"say where with `bitforbit goldens locate {folder} PATH`"
        )


def file_of(golden_id: str) -> str:
    """A golden's path inside the folder of goldens."""
    return f"{golden_id}.safetensors"


def id_of(file: str) -> str:
    """The id of the golden whose path inside the folder of goldens that is."""
    return file.removesuffix(".safetensors")


def digest(content: bytes) -> str:
    """Sha256 in hex."""
    return hashlib.sha256(content).hexdigest()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is whole or as it was before; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_manifest(folder: Path) -> dict[str, str]:
    """Sha256 by relative path. Raises GoldenError where the manifest is missing or malformed."""
    path = folder / MANIFEST
    listed = _manifest(path).get("files")
    if not isinstance(listed, dict) or not all(isinstance(v, str) for v in listed.values()):
        raise GoldenError(
            f"{path}: 'files' must give a sha256 by path; run `bitforbit goldens make`"
        )
    return listed


def read_own(folder: Path) -> tuple[OwnModel, dict[str, Any]] | None:
    """The model that goldens of one's own are of, and how they were made; None for the suite's.

    Raises GoldenError where the manifest is missing or malformed.
    """
    path = folder / MANIFEST
    manifest = _manifest(path)
    if "model" not in manifest:
        return None
    try:
        model, job = OwnModel(**manifest["model"]), dict(manifest["job"])
    except (KeyError, TypeError, ValueError) as error:
        raise GoldenError(
            f"{path}: 'model' or 'job' is malformed ({error}); make the goldens again"
        ) from error
    if not all(isinstance(text, str) for text in (model.name, model.path, model.digest)):
        raise GoldenError(f"{path}: 'model' must hold texts; make the goldens again")
    return model, job


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise GoldenError(
            f"{path}: unreadable ({reason(error)}); run `bitforbit goldens make`"
        ) from error
    if not isinstance(manifest, dict):
        raise GoldenError(f"{path}: it must hold a JSON object; run `bitforbit goldens make`")
    return manifest


def manifest_text(
    digests: Mapping[str, str],
    model: OwnModel | None = None,
    job: Mapping[str, Any] | None = None,
) -> str:
    """The manifest's content."""
    about: dict[str, Any] = {"format": FORMAT, "spec": SPEC_VERSION}
    if model is not None:
        about |= {"model": asdict(model), "job": dict(job or {})}
    about["files"] = dict(sorted(digests.items()))
    return json.dumps(about, indent=1) + "\n"


def read_all(folder: Path, wanted: set[str] | None = None) -> Iterator[Golden]:
    """Every golden of a folder in order of path, or those whose id is in `wanted` (SPEC 15.2).

    A model of one's own is given by the path where it lies. Raises GoldenError where a file is
    missing or its sha256 is not the manifest's.
    """
    own = read_own(folder)
    for name, expected in read_manifest(folder).items():
        if wanted is not None and id_of(name) not in wanted:
            continue
        path = folder / name
        if not path.is_file():
            raise GoldenError(f"{path}: missing; restore it or run `bitforbit goldens make`")
        if digest(path.read_bytes()) != expected:
            raise GoldenError(
                f"{path}: its sha256 differs from {MANIFEST}'s; "
                "restore it or run `bitforbit goldens make`"
            )
        golden = read(path)
        if own is not None and "model" in golden.parameters:
            must_be_there(folder, own[0])
            golden = replace(golden, parameters={**golden.parameters, "model": own[0].path})
        yield golden
