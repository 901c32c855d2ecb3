"""Making goldens, and checking that making them again gives the same bytes (SPEC 15)."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TextIO

from conformance.cases import recipes
from conformance.cases.own import OwnGoldens, made_of
from conformance.cases.recipe import EXACT, SESSIONS, Recipe
from conformance.crew import Crew, share_out
from conformance.errors import CrewError, GoldenError
from conformance.golden import (
    MANIFEST,
    OwnModel,
    digest,
    file_of,
    id_of,
    manifest_text,
    must_be_there,
    read_manifest,
    read_own,
    write_whole,
)
from conformance.operations import Sessions
from conformance.selection import EVERYTHING, Selection
from reference.loading import load_checkpoint

JOURNAL = ".making.jsonl"
"""What is done of goldens of one's own, so that a run that was stopped goes on from there."""


def make(
    folder: Path, crew: Crew | None = None, selection: Selection = EVERYTHING
) -> Iterator[str]:
    """Compute the goldens of the suite; once all are made, they take the place of the old ones.

    Yields ids as they come. A run that ends before leaves the folder as it was. Files whose bytes
    are the same stay; goldens that are selected and that no recipe makes any more are removed; the
    others stay, and stay listed. Raises GoldenError.
    """
    digests = _others(folder, selection)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as aside:
        changed = []
        for golden, content in _contents(None, chosen(recipes(), selection), crew):
            name = file_of(golden)
            digests[name] = digest(content)
            if not _holds(folder, name, digests[name]):
                write_whole(Path(aside) / name, content)
                changed.append(name)
            yield golden
        for name in changed:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(aside) / name, folder / name)
        write_whole(folder / MANIFEST, manifest_text(digests).encode())
    for path in folder.rglob("*.safetensors"):
        name = path.relative_to(folder).as_posix()
        if name not in digests and selection.takes_golden(id_of(name)):
            path.unlink()


def chosen(made: Iterable[Recipe], selection: Selection) -> list[str]:
    """The ids of the recipes that a selection takes."""
    return [recipe.id for recipe in made if selection.takes_golden(recipe.id)]


def _others(folder: Path, selection: Selection) -> dict[str, str]:
    """Sha256 by name of the goldens in a folder that are not selected, as its manifest has them."""
    if selection == EVERYTHING or not (folder / MANIFEST).exists():
        return {}
    if read_own(folder) is not None:
        raise GoldenError(f"{folder}: it holds goldens of a model of one's own, not of the suite")
    listed = read_manifest(folder)
    return {n: sha for n, sha in listed.items() if not selection.takes_golden(id_of(n))}


def make_own(folder: Path, job: OwnGoldens, crew: Crew | None = None) -> Generator[str, None, None]:
    """Compute the goldens of a model of one's own; yields ids, those first that are there already.

    A run that was stopped goes on where it was. The manifest is written last: a folder without one
    is not whole. Raises GoldenError for a folder that holds anything else, and CrewError.
    """
    ids = [recipe.id for recipe in job.recipes()]
    kept = _kept(folder, job, set(map(file_of, ids)))
    yield from (golden for golden in ids if file_of(golden) in kept)
    left = [golden for golden in ids if file_of(golden) not in kept]
    with _journal(folder, job, kept) as journal:
        for golden, content in _contents(job, left, crew):
            name = file_of(golden)
            kept[name] = digest(content)
            write_whole(folder / name, content)
            _note(journal, {"file": name, "sha256": kept[name]})
            yield golden
    write_whole(folder / MANIFEST, manifest_text(kept, job.model, job.options).encode())
    (folder / JOURNAL).unlink()


def verify(
    folder: Path, crew: Crew | None = None, selection: Selection = EVERYTHING
) -> Iterator[tuple[str, bool]]:
    """Compute goldens again; yields each id and whether its bytes are the manifest's."""
    listed, job = read_manifest(folder), made_of(folder)
    made = recipes() if job is None else job.recipes()
    for golden, content in _contents(job, chosen(made, selection), crew):
        yield golden, listed.get(file_of(golden)) == digest(content)


def demand_unchanged(folder: Path) -> None:
    """Raise GoldenError where a model is not what the goldens of one's own were made of."""
    own = read_own(folder)
    if own is None:
        return
    model = own[0]
    must_be_there(folder, model)
    if load_checkpoint(Path(model.path), mapped=True).digest != model.digest:
        raise GoldenError(
            f"{model.path}: its configuration or tensors changed since the goldens in {folder} "
            f"were made; put {model.name} back, or make them again (`bitforbit goldens make`)"
        )


def locate(folder: Path, path: Path) -> OwnModel:
    """Note in the manifest that the model lies at `path`; the model as it is noted then.

    Raises GoldenError where the folder holds no goldens of one's own, or another model lies there.
    """
    own = read_own(folder)
    if own is None:
        raise GoldenError(f"{folder}: these goldens are of fixtures, which need no place")
    model, options = own
    if load_checkpoint(path).digest != model.digest:
        raise GoldenError(f"{path}: another model than {model.name}, of which the goldens are")
    moved = replace(model, path=str(path))
    text = manifest_text(read_manifest(folder), moved, options)
    write_whole(folder / MANIFEST, text.encode())
    return moved


def _contents(
    job: OwnGoldens | None, ids: Sequence[str], crew: Crew | None
) -> Iterator[tuple[str, bytes]]:
    """Ids and what their files hold: in order, or as a crew gets them done."""
    if crew is None:
        made, sessions = _recipes(job)
        return ((golden, made[golden].make(sessions).to_bytes()) for golden in ids)
    return share_out(crew, partial(_content, job), ids)


def _content(job: OwnGoldens | None, golden: str) -> bytes:
    """What one golden's file holds, by a worker."""
    made, sessions = _worker(job)
    return made[golden].make(sessions).to_bytes()


def _recipes(job: OwnGoldens | None) -> tuple[dict[str, Recipe], Sessions]:
    """The recipes by id, the suite's own where there is no job, and who finds the models.

    The model of a job must be the same here as where the job was given. Raises CrewError.
    """
    if job is None:
        return {recipe.id: recipe for recipe in recipes()}, SESSIONS
    path = job.model.path
    if load_checkpoint(Path(path)).digest != job.model.digest:
        raise CrewError(f"{path}: this machine has other weights there; copy the model anew")
    sessions = Sessions(EXACT, {job.model.name: path})
    return {recipe.id: recipe for recipe in job.recipes()}, sessions


@cache
def _worker(job: OwnGoldens | None) -> tuple[dict[str, Recipe], Sessions]:
    """The same, once a process."""
    return _recipes(job)


# ------------------------------------------------------------------------------- going on


def _kept(folder: Path, job: OwnGoldens, names: set[str]) -> dict[str, str]:
    """Sha256 by name of the files that an earlier run of this job has made, and that are whole."""
    if not folder.exists() or not any(folder.iterdir()):
        return {}
    if (folder / MANIFEST).exists():
        made = made_of(folder)
        earlier, listed = made and made.fingerprint, read_manifest(folder)
    elif (folder / JOURNAL).exists():
        first, *lines = _lines(folder / JOURNAL)
        earlier, listed = first.get("job"), {line["file"]: line["sha256"] for line in lines}
    else:
        raise GoldenError(
            f"{folder}: not empty, and no goldens of this command; give another folder"
        )
    if earlier != job.fingerprint:
        raise GoldenError(
            f"{folder}: made from another model, other prompts or other options; "
            "give another folder, or remove it"
        )
    return {
        name: sha for name, sha in listed.items() if name in names and _holds(folder, name, sha)
    }


def _holds(folder: Path, name: str, sha: str) -> bool:
    path = folder / name
    return path.is_file() and digest(path.read_bytes()) == sha


def _lines(journal: Path) -> list[dict[str, str]]:
    """The journal's lines; one that was cut off in the middle ends it."""
    found = []
    for line in journal.read_text(errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found or [{}]


def _journal(folder: Path, job: OwnGoldens, kept: dict[str, str]) -> TextIO:
    """The journal, with what is kept, open for more."""
    lines = [{"job": job.fingerprint}, *({"file": n, "sha256": sha} for n, sha in kept.items())]
    write_whole(folder / JOURNAL, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return (folder / JOURNAL).open("a")


def _note(journal: TextIO, line: dict[str, str]) -> None:
    journal.write(json.dumps(line) + "\n")
    journal.flush()
