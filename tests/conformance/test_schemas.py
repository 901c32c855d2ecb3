"""What the documents say of goldens, manifests and frames, against what is written and sent."""

import json
import re
import sys
from inspect import getmembers, isfunction, signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from safetensors import safe_open

from conformance import golden as goldens
from conformance.backends import frames, process, resolve_process
from conformance.backends.frames import Message
from conformance.backends.reference import ReferenceSession
from conformance.cases.recipe import Recipe
from conformance.golden import MANIFEST
from conformance.operations import output_names
from conformance.paths import data_folder
from conformance.runner import run
from conformance.selection import Selection

SCHEMAS = Path(goldens.__file__).parent / "schemas"
ROOT = Path(__file__).parents[2]


def validator(name: str, part: str | None = None) -> Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    Draft202012Validator.check_schema(schema)
    if part is not None:
        schema = {**schema, "$ref": f"#/$defs/{part}"}
    return Draft202012Validator(schema)


def test_every_golden_is_as_described() -> None:
    valid = validator("golden")
    count = 0
    for path in sorted(data_folder("goldens").rglob("*.safetensors")):
        with safe_open(path, "np") as file:
            metadata, names = file.metadata(), list(file.keys())
        assert list(metadata) == ["golden"]
        about = json.loads(metadata["golden"])
        valid.validate(about)
        assert path == data_folder("goldens") / f"{about['id']}.safetensors"
        kinds = {name.split(".")[0] for name in names}
        assert kinds <= {"in", "out", "gauge", "distance", "either"}
        assert ("either" in kinds) == ("either" in about["rules"])
        assert {f"gauge.{term}" for term in about["terms"]} <= set(names)
        count += 1
    assert count > 400


def test_the_manifest_is_as_described() -> None:
    validator("manifest").validate(json.loads((data_folder("goldens") / MANIFEST).read_text()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "bitforbit-golden-2"),
        ("id", "../up"),
        ("rules", []),
        ("rules", ["close enough"]),
        ("rules", ["bias"]),
        ("rules", ["either(fused)"]),
        ("terms", {"products": "about 3"}),
        ("time", "now"),
    ],
)
def test_the_schema_of_goldens_refuses(key: str, value: Any) -> None:
    recipe = Recipe("elementary/exp/x", "4.1", {}, {"x": np.zeros(1, np.float32)})
    with_metadata = recipe.make().to_bytes()
    header = json.loads(with_metadata[8 : 8 + int.from_bytes(with_metadata[:8], "little")])
    about = json.loads(header["__metadata__"]["golden"])
    valid = validator("golden")
    valid.validate(about)
    assert not valid.is_valid({**about, key: value})


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Message]]:
    """Every frame that goes through the door for programs, and which way."""
    heard: list[tuple[str, Message]] = []
    encode, decode = frames.encode, frames.decode

    def encoding(operation: str, number: str, arguments: Any) -> bytes:
        frame = encode(operation, number, arguments)
        heard.append(("call", decode(frame[frames.LENGTH :])))
        return frame

    def decoding(blob: bytes) -> Message:
        message = decode(blob)
        heard.append(("answer", message))
        return message

    monkeypatch.setattr(process, "encode", encoding)
    monkeypatch.setattr(process, "decode", decoding)
    return heard


def test_calls_and_answers_are_as_described(spoken: list[tuple[str, Message]]) -> None:
    command = f"{sys.executable} -m tests.conformance.programs.answering"
    backend = resolve_process(command, 60)
    try:
        folder = data_folder("goldens")
        results = list(run(backend, folder, Selection((), ("kernel/linear/k3*:bits",))))
        results += run(backend, folder, Selection((), ("model/forward/mistral:bits",)))
    finally:
        backend.close()
    assert {result.outcome for result in results} == {"pass"}
    assert {way for way, _ in spoken} == {"call", "answer"}
    for way, message in spoken:
        validator("protocol", way).validate(dict(message.text))
    first = spoken[0][1].text
    assert first["operation"] == "hello"
    validator("protocol", "hello_parameters").validate(json.loads(first["parameters"]))
    validator("protocol", "hello").validate(json.loads(spoken[1][1].text["hello"]))


def test_the_documents_name_every_key() -> None:
    text = (ROOT / "docs" / "golden-format.md").read_text()
    schema = json.loads((SCHEMAS / "golden.json").read_text())
    assert all(f"`{key}`" in text for key in schema["properties"])
    text = (ROOT / "docs" / "protocol.md").read_text()
    schema = json.loads((SCHEMAS / "protocol.json").read_text())
    for part in ("call", "answer", "hello_parameters"):
        assert all(f"`{key}`" in text for key in schema["$defs"][part]["properties"]), part


def test_the_protocol_names_every_operation_of_a_session() -> None:
    """With the names of its results, and the arguments of the reference's method."""
    text = (ROOT / "docs" / "protocol.md").read_text().split("## Models")[1].split("\n## ")[0]
    rows = [line.split("|")[1:5] for line in text.splitlines() if line.startswith("| `")]
    cells = [[re.findall(r"`(\w+)`", cell) for cell in row] for row in rows]
    said = {name: (parameters, tensors, answer) for [name], parameters, tensors, answer in cells}
    found = {name for name, _ in getmembers(ReferenceSession, isfunction) if name[0] != "_"}
    assert set(said) == found | {"load", "forced"}
    for name in found - {"reset"}:
        parameters, tensors, answer = said[name]
        given = set(signature(getattr(ReferenceSession, name)).parameters) - {"self"}
        assert {*parameters, *tensors} == given | {"session"}, name
        assert name == "trace" or tuple(answer) == output_names(name), name
    assert tuple(said["forced"][2]) == output_names("forced")
