"""Failing cases kept as goldens: a folder that the suite reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conformance.fuzzing.case import Case
from conformance.fuzzing.draw import Asked
from conformance.fuzzing.saving import Folder
from conformance.golden import MANIFEST, Golden, OwnModel, manifest_text, read_all
from reference.errors import RequestError


def golden(text: str) -> Golden:
    return Case.read(text).draw(Asked()).golden({"accumulator": "exact"})


def test_a_folder_grows_and_reads_as_goldens_do(tmp_path: Path) -> None:
    path = tmp_path / "new" / "found"
    first, least = golden("linear/1/2"), golden("linear/1/2 rows=1 columns=1")
    assert first.id != least.id
    Folder(path).add(first)
    Folder(path).add(least)
    kept = {g.id: g for g in read_all(path)}
    assert set(kept) == {first.id, least.id}
    assert kept[least.id].to_bytes() == least.to_bytes()


def test_an_interrupted_save_loses_none_of_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, least = golden("linear/1/2"), golden("linear/1/2 rows=1 columns=1")
    folder = Folder(tmp_path / "found")
    folder.add(first)
    replace = os.replace

    def interrupted(source: str, target: Path) -> None:
        if target.name == MANIFEST:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folder.add(least)
    assert [g.id for g in read_all(folder.path)] == [first.id]


@pytest.mark.parametrize("name", ["a.txt", MANIFEST])
def test_what_is_no_such_folder_is_left_alone(tmp_path: Path, name: str) -> None:
    model = OwnModel("mine", "/models/mine", "00" * 32)
    (tmp_path / name).write_text(manifest_text({}, model, {}))
    with pytest.raises(RequestError, match=r"^--save: .*; give "):
        Folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(RequestError, match="holds something else"):
        Folder(tmp_path / "x")
