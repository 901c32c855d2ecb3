"""Goldens of a model of one's own: the same bytes from anywhere, begun again where they stopped."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.backends import Opening
from conformance.backends.reference import ReferenceBackend
from conformance.cases.own import OwnGoldens, Prompt, made_of
from conformance.cases.recipe import Recipe
from conformance.cli import main
from conformance.crew import processes
from conformance.errors import CrewError, GoldenError
from conformance.golden import MANIFEST, Golden, OwnModel, read_all
from conformance.making import goldens as making
from conformance.making.goldens import JOURNAL, make_own, verify
from conformance.operations import Sessions
from conformance.paths import data_folder
from conformance.runner import run_shared
from conformance.selection import Selection
from reference.loading import load_checkpoint
from reference.model import load_model

MODEL = data_folder("fixtures") / "random-qwen2"


def job(*prompts: Prompt, path: Path = MODEL, bounds: bool = False) -> OwnGoldens:
    model = OwnModel("mine", str(path), load_checkpoint(MODEL).digest)
    return OwnGoldens(model, prompts or PROMPTS, "float32", 4, 3, bounds)


PROMPTS = (Prompt("a", (1, 2, 3, 4, 5)), Prompt("b", (9, 8)), Prompt("c", (7,)))
COUNT = 5 + 4 + 3
"""Goldens of these: one token has no decode, fewer than four have no chunks."""


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_they_hold_what_the_model_gives(tmp_path: Path) -> None:
    assert len(list(make_own(tmp_path / "o", job()))) == COUNT
    goldens = {golden.id: golden for golden in read_all(tmp_path / "o")}
    expected = load_model(MODEL).forward([1, 2, 3, 4, 5])[-4:]
    assert np.array_equal(goldens["model/forward/mine/a"].outputs["y"], expected)
    forced = goldens["generation/forced/mine/a"].outputs["tokens"]
    assert np.array_equal(forced, expected.argmax(axis=1))
    continued = goldens["generation/generate/mine/a"].outputs["tokens"]
    assert continued[0] == forced[-1]


def test_bounds_come_with_their_rules(tmp_path: Path) -> None:
    list(make_own(tmp_path / "o", job(PROMPTS[1], bounds=True)))
    rules = {golden.id: golden.rules for golden in read_all(tmp_path / "o")}
    assert rules == {
        "model/forward/mine/b": ("bits", "gauge"),
        "model/forward/mine/b/decode": ("bits", "gauge"),
        "generation/forced/mine/b": ("bits", "tokens"),
        "generation/generate/mine/b": ("bits", "gauge", "tokens"),
    }


@pytest.mark.parametrize("weights", ["int4", "int4-row"])
def test_quantized_weights_have_bounds_of_codes_that_flip(weights: str) -> None:
    quantized = replace(job(PROMPTS[1], bounds=True), weights=weights)
    made = [recipe.make(Sessions(ReferenceBackend(), {"mine": str(MODEL)})) for recipe in
            quantized.recipes()]  # fmt: skip
    assert {golden.terms["noise"] for golden in made} == {"noise_of_codes(7)"}
    assert all(golden.gauges["noise"].min() > 0 for golden in made if "gauge" in golden.rules)


@pytest.mark.parametrize(
    ("length", "last", "decode", "chunked"),
    [
        (1, 4, None, None),
        (2, 4, [1, 1], None),
        (3, 3, [1, 1, 1], None),
        (4, 2, [2, 1, 1], [2, 1, 1]),
        (40, 8, [32, *[1] * 8], [20, 10, 5, 3, 1, 1]),
    ],
)
def test_ways_to_feed_a_prompt(
    length: int, last: int, decode: list[int] | None, chunked: list[int] | None
) -> None:
    one = replace(job(Prompt("p", tuple(range(length)))), last=last)
    chunks = {r.id.removeprefix("model/forward/mine/p"): r.parameters.get("chunks")
              for r in one.recipes() if r.id.startswith("model/")}  # fmt: skip
    ways = {"": None, "/decode": decode, "/chunked": chunked}
    assert chunks == {way: found for way, found in ways.items() if found or not way}


def test_all_ways_give_the_same_rows_and_noise(made: Path) -> None:
    goldens = {golden.id: golden for golden in read_all(made)}
    whole = goldens["model/forward/mine/a"]
    for way in ("decode", "chunked"):
        other = goldens[f"model/forward/mine/a/{way}"]
        assert other.outputs["y"].tobytes() == whole.outputs["y"].tobytes()
        assert other.gauges["noise"].tobytes() == whole.gauges["noise"].tobytes()
    continued = goldens["generation/generate/mine/a"]
    assert continued.gauges["noise"].shape == continued.outputs["logits"].shape
    assert continued.parameters["exact_prefill"]


def test_a_model_with_experts_says_where_its_choices_are_sure(tmp_path: Path) -> None:
    path = data_folder("fixtures") / "families" / "mixtral"
    model = OwnModel("moe", str(path), load_checkpoint(path).digest)
    list(make_own(tmp_path / "o", OwnGoldens(model, PROMPTS[1:2], "float32", 4, 2, True)))
    goldens = {golden.id: golden for golden in read_all(tmp_path / "o")}
    forced = goldens["generation/forced/moe/b"]
    assert forced.gauges["steady"].shape == forced.outputs["tokens"].shape
    for name in ("model/forward/moe/b", "generation/generate/moe/b"):
        assert goldens[name].gauges["steady"].shape == goldens[name].gauges["noise"].shape
    assert main(["check", "numpy-float32", "--goldens", str(tmp_path / "o")]) == 0


def test_workers_make_the_same_bytes(tmp_path: Path) -> None:
    list(make_own(tmp_path / "alone", job()))
    with processes(2) as crew:
        list(make_own(tmp_path / "many", job(), crew))
    assert files(tmp_path / "alone") == files(tmp_path / "many")


def test_a_crew_is_given_all_of_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def shared(crew: Any, work: Any, ids: list[str]) -> Iterator[tuple[str, bytes]]:
        given.extend(ids)
        return ((golden, work(golden)) for golden in ids)

    monkeypatch.setattr(making, "share_out", shared)
    nobody: Any = object()
    assert len(list(make_own(tmp_path, job(), nobody))) == len(given) == COUNT
    assert all(same for _, same in verify(tmp_path, nobody))
    assert len(given) == 2 * COUNT


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list(make_own(tmp_path / "whole", job()))
    folder = tmp_path / "o"
    stopped = make_own(folder, job())
    done = list(islice(stopped, 4))
    stopped.close()
    assert (folder / JOURNAL).exists()
    assert not (folder / MANIFEST).exists()
    (folder / f"{done[0]}.safetensors").write_bytes(b"altered")
    made: list[str] = []
    make = Recipe.make

    def noted(recipe: Recipe, sessions: Sessions) -> Golden:
        made.append(recipe.id)
        return make(recipe, sessions)

    monkeypatch.setattr(Recipe, "make", noted)
    assert sorted(make_own(folder, job())) == sorted(
        golden.id for golden in read_all(tmp_path / "whole")
    )
    assert len(made) == COUNT - 3
    assert files(folder) == files(tmp_path / "whole")
    made.clear()
    list(make_own(folder, job()))
    assert made == []


def test_a_journal_cut_in_the_middle_of_a_line(tmp_path: Path) -> None:
    stopped = make_own(tmp_path, job())
    list(islice(stopped, 3))
    stopped.close()
    journal = tmp_path / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-20])
    assert len(list(make_own(tmp_path, job()))) == COUNT


@pytest.mark.parametrize("text", ["", "{", "\n{}\n"])
def test_a_journal_that_does_not_say_of_what_is_not_gone_on_with(tmp_path: Path, text: str) -> None:
    (tmp_path / JOURNAL).write_text(text)
    with pytest.raises(GoldenError, match="made from another model, other prompts or other"):
        list(make_own(tmp_path, job()))
    assert files(tmp_path) == {JOURNAL: text.encode()}


def test_what_lies_in_the_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("five years")
    with pytest.raises(GoldenError, match="give another folder"):
        list(make_own(tmp_path, job()))
    assert files(tmp_path) == {"thesis.txt": b"five years"}


def test_other_prompts_need_another_folder(tmp_path: Path) -> None:
    list(make_own(tmp_path, job()))
    before = files(tmp_path)
    with pytest.raises(GoldenError, match="other prompts"):
        list(make_own(tmp_path, job(Prompt("a", (1, 2)))))
    assert files(tmp_path) == before


def test_a_machine_with_other_weights_is_refused(tmp_path: Path) -> None:
    other = data_folder("fixtures") / "random-mistral"
    with pytest.raises(CrewError, match="other weights"):
        list(make_own(tmp_path / "o", job(path=other)))


def test_a_folder_tells_how_it_was_made(tmp_path: Path) -> None:
    list(make_own(tmp_path, job()))
    found = made_of(tmp_path)
    assert found is not None
    assert found.fingerprint == job().fingerprint
    assert made_of(data_folder("goldens")) is None
    assert all(same for _, same in verify(tmp_path))


@pytest.mark.parametrize("broken", ['{"model": 3, "job": {}, "files": {}}', "[]", '{"model": {}}'])
def test_a_broken_manifest_is_named(tmp_path: Path, broken: str) -> None:
    (tmp_path / MANIFEST).write_text(broken)
    with pytest.raises(GoldenError, match=MANIFEST):
        made_of(tmp_path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"tokens": [1, 2, 3], "name": "one"}\n\n{"tokens": [4]}\n')
    out = tmp_path / "o"
    words = ["goldens", "make", "--model", str(MODEL), "--prompts", str(prompts), "--no-bounds"]
    words += ["-n", "2", "--out", str(out)]
    assert main(words) == 0
    assert "7 goldens" in capsys.readouterr().err
    names = {golden.id for golden in read_all(out)}
    assert "model/forward/random-qwen2/one" in names
    assert "generation/generate/random-qwen2/prompt-3" in names
    assert main(["goldens", "verify", "--folder", str(out)]) == 0
    victim = out / "model/forward/random-qwen2/one.safetensors"
    listed = json.loads((out / MANIFEST).read_text())
    listed["files"]["model/forward/random-qwen2/one.safetensors"] = "0" * 64
    (out / MANIFEST).write_text(json.dumps(listed))
    assert main(["goldens", "verify", "--folder", str(out)]) == 1
    assert "differs: model/forward/random-qwen2/one" in capsys.readouterr().out
    assert victim.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", str(MODEL)], "--model: give --prompts FILE and --out DIR"),
        (["--prompts", "p"], "--prompts and --out: they go with --model"),
        (["--model", str(MODEL), "--prompts", "no", "--out", "o"], "--prompts: cannot read no"),
        (
            ["--model", str(MODEL), "--prompts", "p", "--out", "o", "--name", "../up"],
            "--name: '../up' is no name for goldens",
        ),
        (["--model", "nowhere", "--prompts", "p", "--out", "o"], "nowhere"),
    ],
)
def test_bad_options(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["goldens", "make", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("o").exists()
    shutil.rmtree(tmp_path)


# Judging by them.


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "o"
    list(make_own(folder, job(bounds=True)))
    return folder


def test_the_reference_passes_and_has_no_invariances_to_pass(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--goldens", str(made), "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["summary"]["passed"] == len(report["cases"]) == 6 * 2 + 3 * 2 + 3 * 3
    assert {case["level"] for case in report["cases"]} == {"model", "generation"}


def test_float32_passes_what_is_bounded(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "numpy-float32", "--goldens", str(made), "--json", "-"]
    assert main([*words, "--case", "*:gauge"]) == 0
    assert main([*words, "--case", "model/*:bits", "--contract", "exact"]) == 1
    report = json.loads(capsys.readouterr().out.split("\n}\n", 1)[1])
    said = [line for case in report["cases"] for line in case["diagnosis"]]
    assert said
    assert all(line.startswith("within the bound of float32") for line in said)
    assert f"--goldens {made}" in report["command"]


def test_positions_that_begin_anew_with_every_call_fail(made: Path, tmp_path: Path) -> None:
    """A prompt computed at once is right; decoding, by itself and in `generate`, is not."""
    backend = tmp_path / "anew.py"
    backend.write_text(
        "import numpy as np\n"
        "from conformance.backends.composed import OwnOrderBackend\n"
        "class Session(OwnOrderBackend.session):\n"
        "    def positions(self, count):\n"
        "        return np.arange(count)\n"
        "class Backend(OwnOrderBackend):\n"
        "    session = Session\n"
    )
    file = tmp_path / "r.json"
    assert main(["check", str(backend), "--goldens", str(made), "--json", str(file)]) == 1
    cases = json.loads(file.read_text())["cases"]
    failed = {case["id"] for case in cases if case["outcome"] == "fail"}
    assert "model/forward/mine/a:gauge" not in failed
    ways = {"model/forward/mine/a/decode:gauge", "model/forward/mine/a/chunked:gauge"}
    assert {*ways, "generation/generate/mine/a:gauge"} <= failed


def test_workers_judge_alike_and_in_order(made: Path, tmp_path: Path) -> None:
    def cases(*words: str) -> list[dict[str, object]]:
        file = tmp_path / "r.json"
        assert main(["check", "numpy", "--json", str(file), *words]) == 0
        found = json.loads(file.read_text())["cases"]
        return [{k: case[k] for k in ("id", "outcome", "worst")} for case in found]

    own = ["--goldens", str(made)]
    assert cases(*own) == cases(*own, "--workers", "2")
    mixed = ["--case", "*rms_norm*"]
    assert cases(*mixed) == cases(*mixed, "--workers", "2")


def test_a_model_that_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, folder = tmp_path / "m1", tmp_path / "m2", tmp_path / "o"
    shutil.copytree(MODEL, before)
    list(make_own(folder, job(PROMPTS[2], path=before)))
    before.rename(after)
    assert main(["check", "--goldens", str(folder)]) == 2
    assert f"goldens locate {folder} PATH" in capsys.readouterr().err
    other = str(data_folder("fixtures") / "random-mistral")
    assert main(["goldens", "locate", str(folder), other]) == 2
    assert "another model than mine" in capsys.readouterr().err
    assert main(["goldens", "locate", str(folder), str(after)]) == 0
    assert main(["check", "--goldens", str(folder)]) == 0
    assert main(["goldens", "locate", str(data_folder("goldens")), str(after)]) == 2


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("config.json", b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 1e-05'),
        ("model.safetensors", None, None),
    ],
)
def test_a_model_that_changed_is_named_and_no_backend_blamed(
    file: str,
    old: bytes | None,
    new: bytes | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, model = tmp_path / "o", tmp_path / "model"
    shutil.copytree(MODEL, model)
    list(make_own(folder, job(PROMPTS[2], path=model)))
    words = ["check", "--goldens", str(folder), "--level", "model"]
    assert main(words) == 0
    content = (model / file).read_bytes()
    if old is None or new is None:  # the last bit of the last tensor
        changed = content[:-4] + bytes([content[-4] ^ 1]) + content[-3:]
    else:
        assert old in content
        changed = content.replace(old, new, 1)
    (model / file).write_bytes(changed)
    capsys.readouterr()
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert f"{model}: its configuration or tensors changed since" in told.err
    assert "make them again" in told.err
    (model / file).write_bytes(content)
    assert main(words) == 0


def test_workers_that_do_not_agree_are_named(made: Path, tmp_path: Path) -> None:
    backend = tmp_path / "moody.py"
    backend.write_text(
        "import os\n"
        "from conformance.backends.reference import ReferenceBackend\n"
        "class Backend(ReferenceBackend):\n"
        "    def silu(self, x):\n"
        "        mark = __file__ + '.seen'\n"
        "        first = not os.path.exists(mark)\n"
        "        open(mark, 'w').close()\n"
        "        return super().silu(x) if first else x\n"
    )
    with pytest.raises(CrewError, match="do not give the same"):
        crew_check(backend)


def crew_check(backend: Path) -> None:
    opening, selection = Opening(str(backend)), Selection((), ("elementary/silu/all:bits",))
    with processes(2) as crew:
        list(run_shared(crew, opening, data_folder("goldens"), selection, {}))
