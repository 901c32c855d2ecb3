"""Where goldens and fixtures lie: beside the packages in a checkout, inside one when installed."""

from __future__ import annotations

from pathlib import Path

from conformance.errors import GoldenError
from reference.errors import RequestError

_HERE = Path(__file__).resolve().parent


def data_folder(name: str) -> Path:
    """The folder `goldens` or `fixtures`. Raises GoldenError where neither place has it."""
    for folder in (_HERE.parent / name, _HERE / "data" / name):
        if folder.is_dir():
            return folder
    raise GoldenError(
        f"{name}: found neither in {_HERE.parent} nor in {_HERE / 'data'}; reinstall bitforbit"
    )


def model_folder(path: str) -> Path:
    """A model's folder, where it is, or among the fixtures when named as `tiny-dense`.

    Raises RequestError where there is none.
    """
    given = Path(path)
    if given.exists():
        return given
    if not given.is_absolute() and ".." not in given.parts:
        bundled = data_folder("fixtures") / path.removeprefix("fixtures/")
        if bundled.is_dir():
            return bundled
    raise RequestError(
        f"{path}: no such model; give a folder with config.json, a .gguf file, or the name of a "
        "fixture, such as tiny-dense"
    )


def named_model(name: str) -> Path:
    """A model as goldens name it: a fixture, or where a model of one's own lies (SPEC 15.4)."""
    return Path(name) if Path(name).is_absolute() else model_folder(f"fixtures/{name}")
