"""Files of prompts: read whole, or refused with the line that is wrong."""

from pathlib import Path

import pytest

from conformance.making.prompts import read_prompts
from conformance.paths import data_folder
from reference.errors import RequestError
from reference.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(data_folder("fixtures") / "tiny-dense" / "tokenizer.json", 1024)


def test_text_a_prompt_a_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "p.txt"
    path.write_text("In the beginning\n\n  And God said\n")
    first, second = read_prompts(path, tokenizer, 1024, 100)
    assert (first.name, second.name) == ("prompt-1", "prompt-3")
    assert tokenizer.decode(first.tokens) == "In the beginning"
    assert tokenizer.decode(second.tokens) == "  And God said"


def test_objects_a_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"name": "x.1", "tokens": [0, 1023]}\n{"prompt": "two\\nlines"}\n')
    first, second = read_prompts(path, tokenizer, 1024, 100)
    assert (first.name, first.tokens) == ("x.1", (0, 1023))
    assert tokenizer.decode(second.tokens) == "two\nlines"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "either `prompt` or `tokens`"),
        ("{}", "either `prompt` or `tokens`"),
        ('{"prompt": "a", "tokens": [1]}', "either `prompt` or `tokens`"),
        ('{"prompt": "a", "temperature": 1}', "the key 'temperature' is not known"),
        ('{"prompt": 1}', "prompt must be a text"),
        ('{"tokens": "1 2"}', "tokens must be a list of ids, 0 to 1023"),
        ('{"tokens": [1024]}', "tokens must be a list of ids"),
        ('{"tokens": [-1]}', "tokens must be a list of ids"),
        ('{"tokens": [true]}', "tokens must be a list of ids"),
        ('{"tokens": []}', "0 tokens; give 1 to 3"),
        ('{"tokens": [1, 2, 3, 4]}', "4 tokens; give 1 to 3"),
        ('{"tokens": [1], "name": "../x"}', "name must be up to 80"),
        ('{"tokens": [1], "name": 5}', "name must be up to 80"),
        ('{"tokens": [1], "name": "first"}', "the name first is there already"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    tmp_path: Path, tokenizer: Tokenizer, line: str, message: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"tokens": [1], "name": "first"}}\n{line}\n')
    with pytest.raises(RequestError) as refused:
        read_prompts(path, tokenizer, 1024, 3)
    assert "line 2: " in str(refused.value)
    assert message in str(refused.value)


def test_no_prompt_no_file_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    with pytest.raises(RequestError, match="cannot read"):
        read_prompts(path, None, 10, 3)
    path.write_text("\n")
    with pytest.raises(RequestError, match="holds no prompt"):
        read_prompts(path, None, 10, 3)
    path.write_text("hello\n")
    with pytest.raises(RequestError, match="the model has no tokenizer"):
        read_prompts(path, None, 10, 3)
    path.write_bytes(b"\xff")
    with pytest.raises(RequestError, match="as UTF-8 text"):
        read_prompts(path, None, 10, 3)
