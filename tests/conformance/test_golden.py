"""Golden files: what they hold, the same bytes always, and what becomes of a bad one (SPEC 15)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from conformance import paths
from conformance.cases.recipe import Recipe
from conformance.errors import GoldenError
from conformance.golden import (
    FORMAT,
    MANIFEST,
    Golden,
    digest,
    file_of,
    id_of,
    manifest_text,
    read,
    read_all,
    read_manifest,
)
from conformance.making import goldens as making
from conformance.making.goldens import make, verify
from conformance.paths import data_folder, model_folder
from conformance.rules import bounded
from conformance.rules.gauges import Gauge
from conformance.selection import Selection
from reference.errors import RequestError

ROOT = Path(__file__).parents[2]
REMEDY = "run `bitforbit goldens make`"

GOLDEN = Golden(
    "kernel/linear/small",
    "2.2",
    "linear",
    {"b": 1, "a": None},
    {"w": np.ones((2, 3), np.float32), "x": np.arange(3, dtype=np.float32)},
    {"y": np.array([3.0, np.nan], np.float32), "codes": np.array([1], np.int8)},
    ("bits", "gauge"),
    {"products": np.array([3.0, 4.0], np.float32)},
    {"products": "dot(3)"},
    np.array([0.5, 0.25]),
    "a note",
)


def one_line(error: pytest.ExceptionInfo[BaseException], *parts: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for part in (*parts, REMEDY):
        assert part in text, text


# The file.


def test_a_golden_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    path.write_bytes(GOLDEN.to_bytes())
    back = read(path)
    assert back.to_bytes() == GOLDEN.to_bytes()
    assert back.level == "kernel"
    for name in ("id", "section", "operation", "parameters", "rules", "terms", "note"):
        assert getattr(back, name) == getattr(GOLDEN, name)
    assert back.distance is not None
    assert back.distance.dtype == np.float64
    assert {n: a.dtype.name for n, a in back.outputs.items()} == {"codes": "int8", "y": "float32"}


def test_the_metadata_is_one_json_object_with_sorted_keys(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    path.write_bytes(GOLDEN.to_bytes())
    with safe_open(path, "np") as file:
        metadata, names = file.metadata(), set(file.keys())
    assert list(metadata) == ["golden"]
    about = json.loads(metadata["golden"])
    assert list(about) == sorted(about)
    assert set(about) == {
        *("format", "id", "section", "operation", "parameters", "rules", "terms", "note"),
        *("provenance", "spec"),
    }
    assert about["format"] == FORMAT == "bitforbit-golden-1"
    assert names == {"in.x", "in.w", "out.y", "out.codes", "gauge.products", "distance"}


def test_the_bytes_do_not_depend_on_the_order_or_layout_of_the_parts() -> None:
    def turned_round(parts: Any) -> Any:
        return {name: np.asfortranarray(part) for name, part in reversed(parts.items())}

    other = Golden(
        GOLDEN.id,
        GOLDEN.section,
        GOLDEN.operation,
        {"a": None, "b": 1},
        turned_round(GOLDEN.inputs),
        turned_round(GOLDEN.outputs),
        GOLDEN.rules,
        GOLDEN.gauges,
        GOLDEN.terms,
        GOLDEN.distance,
        GOLDEN.note,
    )
    assert other.to_bytes() == GOLDEN.to_bytes()


def test_two_processes_make_the_same_bytes() -> None:
    """Under hash seeds that put dictionaries and sets of strings in other orders."""
    code = (
        "from conformance.cases import recipes\n"
        "from conformance.golden import digest\n"
        "for r in recipes():\n"
        "    if r.id in ('kernel/linear/bias', 'kernel/attention/sinks', 'kernel/rope/half',\n"
        "                'kernel/rope_constants/yarn_mscale_0', 'elementary/softmax/k33'):\n"
        "        print(r.id, digest(r.make().to_bytes()))\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "12345")
    }
    assert len(printed) == 1
    listed = read_manifest(data_folder("goldens"))
    lines = [line.split() for line in printed.pop().splitlines()]
    assert len(lines) == 5
    assert all(listed[file_of(name)] == sha for name, sha in lines)


# The committed goldens.


PARTS = ("[eck]*", "model/*/[a-m]*", "model/*/[n-z]*", "generation/[a-s]*", "generation/t*")
"""Globs of ids that share the committed goldens out, for as many processes."""


@pytest.mark.parametrize("part", PARTS)
def test_making_goldens_again_gives_the_committed_bytes(part: str) -> None:
    folder, selection = data_folder("goldens"), Selection(patterns=(part,))
    made = list(verify(folder, selection=selection))
    assert [name for name, same in made if not same] == []
    listed = {name for name in read_manifest(folder) if selection.takes_golden(id_of(name))}
    assert {file_of(name) for name, _ in made} == listed


def test_every_committed_golden_is_in_one_of_the_parts() -> None:
    parts = [Selection(patterns=(part,)) for part in PARTS]
    for name in read_manifest(data_folder("goldens")):
        assert sum(part.takes_golden(id_of(name)) for part in parts) == 1, name


def test_the_manifest_lists_just_the_files_sorted() -> None:
    folder = data_folder("goldens")
    listed = read_manifest(folder)
    assert list(listed) == sorted(listed)
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*.safetensors")}
    assert set(listed) == found
    assert (folder / MANIFEST).read_text() == manifest_text(listed)
    for name, sha in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha


def check_choices(golden: Golden) -> None:
    """Every token that may come first is another than the first, and has a margin and a noise."""
    first, about = golden.outputs["tokens"], golden.gauges
    assert set(about) == {"row", "token", "margin", "noise"}
    assert set(golden.terms) == {"noise"}
    assert len(first) == golden.parameters["last"] <= len(golden.inputs["tokens"])
    assert len({part.shape for part in about.values()}) == 1
    assert about["row"].max() < len(first)
    assert (about["token"] != first[about["row"]]).all()
    assert (about["margin"] >= 0).all()
    assert (about["noise"] > 0).all()


def test_every_committed_golden_is_well_formed() -> None:
    for golden in read_all(data_folder("goldens")):
        assert golden.operation == golden.id.split("/")[1]
        assert golden.rules[0] == "bits"
        known = {"bits", "either", "gauge", "ulp(4)", "tokens", "bias(1)", "bias(32)"}
        assert set(golden.rules) <= known
        if "tokens" in golden.rules and golden.operation == "forced":
            check_choices(golden)
            continue
        assert set(golden.gauges) == set(golden.terms)
        assert ("gauge" in golden.rules) == bool(golden.gauges), golden.id
        judged = bounded(golden) if golden.gauges else next(iter(golden.outputs))
        y = golden.outputs[judged]
        for part in golden.gauges.values():
            assert part.shape == y.shape
            assert np.isfinite(part).all()
            assert (part >= 0).all()
        if golden.distance is not None:
            assert golden.distance.shape == y.shape
            assert np.isfinite(golden.distance).all()
            assert (golden.distance >= 0).all()
        for array in golden.outputs.values():
            if array.dtype == np.float32:
                assert {int(w) for w in array[np.isnan(array)].view(np.uint32)} <= {0x7FC00000}


# Bad files.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    content = GOLDEN.to_bytes()
    path = tmp_path / file_of(GOLDEN.id)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    (tmp_path / MANIFEST).write_text(manifest_text({file_of(GOLDEN.id): digest(content)}))
    return tmp_path


def test_what_is_wanted_is_read(folder: Path) -> None:
    assert [g.id for g in read_all(folder)] == [GOLDEN.id]
    assert [g.id for g in read_all(folder, {GOLDEN.id})] == [GOLDEN.id]
    assert list(read_all(folder, {"kernel/linear/other"})) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: b"",
    ],
    ids=["truncated", "longer", "one bit", "empty"],
)
def test_an_altered_file_is_refused(folder: Path, spoil: Callable[[bytes], bytes]) -> None:
    path = folder / file_of(GOLDEN.id)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(GoldenError) as error:
        list(read_all(folder))
    one_line(error, str(path), "sha256 differs", "restore it")


def test_a_missing_file_is_refused(folder: Path) -> None:
    (folder / file_of(GOLDEN.id)).unlink()
    with pytest.raises(GoldenError) as error:
        list(read_all(folder))
    one_line(error, str(folder / file_of(GOLDEN.id)), "missing", "restore it")


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "{", "[]", "{}", "3", '{"files": []}', '{"files": {"a": 1}}', "\xff"),
        '{"files": {"a": 1, "b": "c"}}',
    ],
)
def test_a_bad_manifest_is_refused(folder: Path, text: str | None) -> None:
    path = folder / MANIFEST
    path.unlink()
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(GoldenError) as error:
        list(read_all(folder))
    one_line(error, str(path))


@pytest.mark.parametrize(
    "model",
    [
        '{"name": 1, "path": "a", "digest": "b"}, "job": {}',
        '{"name": "a"}, "job": {}',
        '{"name": "a", "path": "b", "digest": "c"}',
    ],
)
def test_a_bad_model_in_a_manifest_is_refused(folder: Path, model: str) -> None:
    path = folder / MANIFEST
    path.write_text(f'{{"files": {{}}, "model": {model}}}')
    with pytest.raises(GoldenError, match="make the goldens again") as error:
        list(read_all(folder))
    assert str(error.value).startswith(f"{path}: 'model' ")


def about(**changed: object) -> bytes:
    """A file like the golden's, its metadata changed; None leaves a key out."""
    data = GOLDEN.to_bytes()
    size = int.from_bytes(data[:8], "little")
    told = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["golden"])
    told = {k: v for k, v in {**told, **changed}.items() if v is not None}
    return save({"out.y": np.zeros(1, np.float32)}, {"golden": json.dumps(told)})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a golden at all, whatever its name",
        GOLDEN.to_bytes()[:100],
        save({"x": np.zeros(1, np.float32)}),
        save({"x": np.zeros(1, np.float32)}, {"golden": "{"}),
        save({"x": np.zeros(1, np.float32)}, {"golden": "[1]"}),
        save({"x": np.zeros(1, np.float32)}, {"golden": "3"}),
        about(format="bitforbit-golden-0"),
        about(format=None),
        about(rules=None),
        about(rules=3),
        about(terms=None),
    ],
)
def test_what_is_no_golden_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(GoldenError) as error:
        read(path)
    one_line(error, str(path), "not a golden")


def test_a_golden_with_all_its_keys_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.safetensors"
    path.write_bytes(about())
    assert read(path).id == GOLDEN.id


# Making.


def recipe(name: str, value: float = 1.0) -> Recipe:
    x = np.full((2, 4), value, np.float32)
    gauge = Gauge({"size": x}, {"size": "ops(1)"}, np.zeros((2, 4)))
    return Recipe(f"elementary/exp/{name}", "4.1", {}, {"x": x}, ("bits",), lambda a, o: gauge)


def recipes(*names: str) -> Callable[[], Iterator[Recipe]]:
    return lambda: iter([recipe(name) for name in names])


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def test_making_writes_files_and_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "recipes", recipes("a", "b"))
    assert list(make(tmp_path / "new")) == ["elementary/exp/a", "elementary/exp/b"]
    written = tree(tmp_path / "new")
    assert set(written) == {
        MANIFEST,
        "elementary/exp/a.safetensors",
        "elementary/exp/b.safetensors",
    }
    assert [g.id for g in read_all(tmp_path / "new")] == ["elementary/exp/a", "elementary/exp/b"]
    assert all(same for _, same in verify(tmp_path / "new"))
    list(make(tmp_path / "new"))
    assert tree(tmp_path / "new") == written
    assert (tmp_path / "new" / MANIFEST).stat().st_mode & 0o777 == 0o644


def test_making_removes_what_no_recipe_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "recipes", recipes("a", "b"))
    list(make(tmp_path))
    (tmp_path / "ORACLE.json").write_text("{}")
    monkeypatch.setattr(making, "recipes", recipes("b"))
    list(make(tmp_path))
    assert set(tree(tmp_path)) == {MANIFEST, "ORACLE.json", "elementary/exp/b.safetensors"}


def some(*globs: str) -> Selection:
    return Selection(patterns=globs)


def test_making_some_leaves_the_others_and_the_manifest_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lists what lies there: what was made now, and what was there before, as it was."""
    monkeypatch.setattr(making, "recipes", recipes("a", "b", "c"))
    list(make(tmp_path))
    before = tree(tmp_path)
    changed = [recipe(name, 2.0) for name in ("a", "b", "d")]
    monkeypatch.setattr(making, "recipes", lambda: iter(changed))
    made = list(make(tmp_path, selection=some("*/b", "*/d:bits")))
    assert made == ["elementary/exp/b", "elementary/exp/d"]
    after = tree(tmp_path)
    same = {name for name in before if after.get(name) == before[name]}
    assert same == {f"elementary/exp/{name}.safetensors" for name in "ac"}
    assert set(after) == {*before, "elementary/exp/d.safetensors"}
    assert [g.id[-1] for g in read_all(tmp_path)] == list("abcd")  # every sha256 is right
    assert list(verify(tmp_path, selection=some("*/b"))) == [("elementary/exp/b", True)]
    list(make(tmp_path))
    whole = tree(tmp_path)
    assert "elementary/exp/c.safetensors" not in whole
    list(make(tmp_path, selection=some("*/a")))
    assert tree(tmp_path) == whole


def test_making_some_removes_of_them_what_no_recipe_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "recipes", recipes("a1", "a2", "b1"))
    list(make(tmp_path))
    monkeypatch.setattr(making, "recipes", recipes("a2"))
    list(make(tmp_path, selection=some("*/a*")))
    assert [g.id[-2:] for g in read_all(tmp_path)] == ["a2", "b1"]
    assert set(read_manifest(tmp_path)) == {n for n in tree(tmp_path) if n != MANIFEST}


def test_making_some_touches_no_file_beside_a_manifest_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "recipes", recipes("a", "b"))
    list(make(tmp_path))
    (tmp_path / MANIFEST).unlink()
    list(make(tmp_path, selection=some("*/a")))
    assert [g.id[-1] for g in read_all(tmp_path)] == ["a"]
    assert (tmp_path / "elementary/exp/b.safetensors").exists()


def test_making_some_leaves_goldens_of_a_model_of_ones_own(tmp_path: Path) -> None:
    model = '{"name": "a", "path": "b", "digest": "c"}'
    (tmp_path / MANIFEST).write_text(f'{{"files": {{}}, "model": {model}, "job": {{}}}}')
    before = tree(tmp_path)
    with pytest.raises(GoldenError, match="it holds goldens of a model of one's own"):
        list(make(tmp_path, selection=some("elementary/exp/*")))
    assert tree(tmp_path) == before


def test_verifying_sees_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "recipes", recipes("a", "b"))
    list(make(tmp_path))
    monkeypatch.setattr(
        making, "recipes", lambda: iter([recipe("a"), recipe("b", 2.0), recipe("c")])
    )
    assert list(verify(tmp_path)) == [
        ("elementary/exp/a", True),
        ("elementary/exp/b", False),
        ("elementary/exp/c", False),
    ]


def test_until_all_are_made_the_old_ones_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "recipes", recipes("a", "b"))
    list(make(tmp_path))
    before = tree(tmp_path)
    monkeypatch.setattr(making, "recipes", lambda: iter([recipe("a"), recipe("b", 2.0)]))
    unchanged = (tmp_path / "elementary/exp/a.safetensors").stat()
    running = make(tmp_path)
    for _ in range(2):
        next(running)
        assert [float(g.inputs["x"][0, 0]) for g in read_all(tmp_path)] == [1, 1]
        assert {
            name: content for name, content in tree(tmp_path).items() if name in before
        } == before
    assert list(running) == []
    assert [float(g.inputs["x"][0, 0]) for g in read_all(tmp_path)] == [1, 2]
    assert set(tree(tmp_path)) == set(before)
    assert (tmp_path / "elementary/exp/a.safetensors").stat() == unchanged


@pytest.mark.parametrize("when", [1, 2, 3])
def test_an_interrupted_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    """Of the replacements the first two are aside, and the third is the first in its place."""
    monkeypatch.setattr(making, "recipes", recipes("a", "b"))
    list(make(tmp_path))
    before = tree(tmp_path)
    calls = []
    replace = os.replace

    def interrupted(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == when:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(making, "recipes", lambda: iter([recipe("a", 2.0), recipe("b", 2.0)]))
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(make(tmp_path))
    assert tree(tmp_path) == before


def test_a_failing_recipe_leaves_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "recipes", recipes("a", "b"))
    list(make(tmp_path))
    before = tree(tmp_path)

    def broken() -> Iterator[Recipe]:
        yield recipe("a", 2.0)
        raise RuntimeError("no more")

    monkeypatch.setattr(making, "recipes", broken)
    with pytest.raises(RuntimeError, match="no more"):
        list(make(tmp_path))
    assert tree(tmp_path) == before


# Where things lie.


def test_folders_of_a_checkout() -> None:
    assert data_folder("goldens") == ROOT / "goldens"
    assert data_folder("fixtures") == ROOT / "fixtures"


def test_folders_of_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "conformance" / "data" / "goldens"
    inside.mkdir(parents=True)
    monkeypatch.setattr(paths, "_HERE", tmp_path / "conformance")
    assert data_folder("goldens") == inside
    with pytest.raises(
        GoldenError, match=r"fixtures: found neither in .*; reinstall bitforbit"
    ) as error:
        data_folder("fixtures")
    assert "\n" not in str(error.value)


def test_model_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fixture = ROOT / "fixtures" / "tiny-dense"
    assert model_folder("tiny-dense") == fixture
    assert model_folder("fixtures/tiny-dense") == fixture
    assert model_folder(str(fixture)) == fixture
    for name in ("nowhere", "other/tiny-dense"):
        with pytest.raises(RequestError, match=f"^{name}: no such model"):
            model_folder(name)
    (tmp_path / "tiny-dense").mkdir()
    assert model_folder("tiny-dense") == Path("tiny-dense")
